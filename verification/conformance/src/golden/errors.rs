//! How acquisitions end when the server returns an error.

use std::sync::atomic::{AtomicBool, Ordering};

use serde::Deserialize;
use support::{Direction, Fate, Proxy, Server, encode};

use super::{Played, end_of, open, requested_keys, rows, words_of};
use crate::driver::{At, Call};
use crate::play::ClientUnderTest;
use crate::scenario::{Profile, Terms};

/// The lock, and another one.
const KEY: &str = "k";
const OTHER_KEY: &str = "j";

/// The timeout of an acquisition that ends before, in ms.
fn ample() -> u64 {
    60_000
}

/// An error, and how the call that gets it ends.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    /// The error's text; `None`: the server has no module.
    #[serde(default)]
    error: Option<String>,
    /// A reply that is not an error, and that no version of the server returns.
    #[serde(default)]
    nonsense: Option<String>,
    /// The clients that the row applies to; empty: all.
    #[serde(default)]
    profile: Option<Profile>,
    /// Whether only the first request gets this reply.
    #[serde(default)]
    once: bool,
    /// The timeout of the acquisition. It waits unless this is 0, and so ends early if it is granted, or the error is final.
    #[serde(default = "ample")]
    wait: u64,
    outcome: String,
    /// What the error's text must name.
    #[serde(default)]
    names: Vec<String>,
}

pub fn play(client: &ClientUnderTest) -> Result<Played, String> {
    let mut played = Played::default();
    let is_meant = |row: &Row| row.profile.is_none_or(|it| it == client.manifest.profile);
    for row in rows::<Row>("errors")?.into_iter().filter(is_meant) {
        let builder = Server::builder();
        let error = row.error.as_ref().map(|it| format!("return redis.error_reply([[{it}]])"));
        let script = error.or(row.nonsense.as_ref().map(|it| format!("return redis.status_reply([[{it}]])")));
        let server = if script.is_some() { builder.start() } else { builder.without_module().start() };
        let proxy = Proxy::to(server.addr());
        let mut driver = open(client, proxy.addr())?;
        if let Some(script) = &script {
            // A request without a wait must get its reply within a second. Opening the first connection alone may take
            // longer.
            let first = end_of(&mut driver, &acquire("first", OTHER_KEY, ample()))?;
            if first.outcome != "held" {
                return Err(format!("a free lock is granted: {first:?}"));
            }
            answer(&proxy, script, row.once);
        }
        let outcome = end_of(&mut driver, &acquire("h", KEY, row.wait))?;
        let text = outcome.text.unwrap_or_default();
        let said = row.error.as_deref().or(row.nonsense.as_deref());
        let what = said.and_then(|it| it.split(' ').next()).unwrap_or("no module").to_owned();
        played.rows += 1;
        if outcome.outcome != row.outcome {
            let differs = format!("{} {text}, not {}", outcome.outcome, row.outcome);
            played.differences.push((what.clone(), differs));
        }
        for name in row.names.iter().filter(|name| !text.contains(*name)) {
            played.differences.push((what.clone(), format!("\"{text}\" does not name {name}")));
        }
    }
    Ok(played)
}

fn acquire(hold: &str, key: &str, wait: u64) -> Call {
    let terms = Terms { wait: Some(wait), ..Terms::default() };
    Call::Acquire { hold: hold.to_owned(), keys: vec![key.to_owned()], terms, at: At::default() }
}

/// Replaces requests for locks by a script, whose result is their reply. So all replies come in order.
fn answer(proxy: &Proxy, script: &str, once: bool) {
    let instead = encode([["EVAL", script, "0"]]);
    let answered = AtomicBool::new(false);
    proxy.rule(move |toward, message| {
        let asks = toward == Direction::Server && words_of(message).is_some_and(|it| requested_keys(&it).is_some());
        if asks && !(answered.fetch_or(true, Ordering::SeqCst) && once) {
            Fate::Instead(instead.clone())
        } else {
            Fate::Pass
        }
    });
}
