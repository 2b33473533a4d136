//! The arguments of a client's requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use serde::Deserialize;
use support::{Direction, Fate, Proxy, Server};

use super::{Played, can, end_of, open, requested_keys, rows, words_of};
use crate::driver::{At, Call};
use crate::play::ClientUnderTest;
use crate::scenario::{Profile, Terms};

/// The server's default lease.
const SERVERS_LEASE: &str = " LEASE 30000";

/// A request, and its arguments.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    keys: Vec<String>,
    terms: Terms,
    /// Delay of a new client's session, in ms.
    #[serde(default)]
    late: u64,
    words: String,
}

pub fn play(client: &ClientUnderTest) -> Result<Played, String> {
    // The vectors cover the basic profile.
    if client.manifest.profile == Profile::Basic {
        return Ok(Played::default());
    }
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let (sender, sent) = channel();
    let late: Arc<AtomicU64> = Arc::default();
    let how_late = late.clone();
    proxy.rule(move |toward, message| {
        let words = words_of(message).filter(|_| toward == Direction::Server).unwrap_or_default();
        if words.first().is_some_and(|it| it == "LOCK.SESSION") {
            thread::sleep(Duration::from_millis(how_late.load(Ordering::SeqCst)));
        }
        if let Some(words) = golden(&words) {
            // The receiver is gone at the end.
            let _ = sender.send(words);
        }
        Fate::Pass
    });
    let mut driver = open(client, proxy.addr())?;
    let mut played = Played::default();
    for it in rows::<Row>("words")?.into_iter().filter(|it| can(client, &it.terms, it.keys.len())) {
        if it.late > 0 {
            late.store(it.late, Ordering::SeqCst);
            end_of(&mut driver, &Call::Open { url: format!("redis://{}/", proxy.addr()) })?;
        }
        let hold = "h".to_owned();
        let call =
            Call::Acquire { hold: hold.clone(), keys: it.keys.clone(), terms: it.terms.clone(), at: At::default() };
        end_of(&mut driver, &call)?;
        let words = sent.recv_timeout(Duration::ZERO).ok();
        end_of(&mut driver, &Call::Release { hold })?;
        played.rows += 1;
        let Some(words) = words else {
            if it.late == 0 {
                played.differences.push((it.words, "nothing was sent".to_owned()));
            }
            continue;
        };
        // A client may name its own lease if the program names none.
        let words = if it.terms.lease.is_none() { words.replace(SERVERS_LEASE, "") } else { words };
        if words != it.words {
            played.differences.push((it.words.clone(), format!("{words}, not {}", it.words)));
        }
    }
    Ok(played)
}

/// The arguments of an acquisition, with placeholders for values that vary, and its options in order.
fn golden(words: &[String]) -> Option<String> {
    let keys = requested_keys(words)?;
    let several = usize::from(keys.len() > 1);
    let (names, rest) = words.split_at_checked(1 + several + keys.len())?;
    let mut rest = rest.iter().skip(1);
    let mut options = Vec::new();
    while let Some(option) = rest.next() {
        options.push(match option.as_str() {
            "SESSION" => rest.next().map(|_| "SESSION <session>".to_owned()),
            "WAIT" => rest.next().map(|time| if time == "0" { "WAIT 0".to_owned() } else { "WAIT <time>".to_owned() }),
            "LEASE" | "LIMIT" | "REPLICAS" | "HOLDS" | "WAITED" => rest.next().map(|value| format!("{option} {value}")),
            _ => Some(option.clone()),
        }?);
    }
    options.sort();
    Some(format!("{} <owner> {}", names.join(" "), options.join(" ")))
}
