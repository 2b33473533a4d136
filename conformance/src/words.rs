//! What a client's requests are on the wire: the same for all clients, as `golden/words.yaml` has them.

use std::fs;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use redis::Value;
use serde::Deserialize;
use support::{Fate, Proxy, Server, Toward};

use crate::driver::{Call, Driver};
use crate::play::{BOUND, Judged};
use crate::scenario::{Feature, Terms};

/// The default of the server that hears them.
const SERVERS_LEASE: &str = " LEASE 30000";

/// A request, and its words.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Golden {
    keys: Vec<String>,
    terms: Terms,
    words: String,
}

/// Reads the golden file.
///
/// # Errors
///
/// What is wrong, with the file's name.
pub fn read(file: &Path) -> Result<Vec<Golden>, String> {
    let wrong = |why: &dyn std::fmt::Display| format!("{}: {why}", file.display());
    let text = fs::read_to_string(file).map_err(|why| wrong(&why))?;
    serde_saphyr::from_str(&text).map_err(|why| wrong(&why))
}

/// How a client's words differ from these.
///
/// # Errors
///
/// If its driver doesn't start, or ends.
pub fn differences(golden: &[Golden], client: &Judged) -> Result<Vec<String>, String> {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let (sender, sent) = channel();
    proxy.rule(move |toward, message| {
        if toward == Toward::Server
            && let Some(words) = words(message)
        {
            // Nobody listens any more at the end.
            let _ = sender.send(words);
        }
        Fate::Pass
    });
    let mut driver = Driver::start(client.manifest, client.programs)?;
    let open = driver.call(&Call::Open { url: format!("redis://{}/", proxy.addr()) })?;
    driver.outcome(open, BOUND)?.ok_or("open does not end")?;
    let mut differences = Vec::new();
    for it in golden.iter().filter(|it| can(client, &it.terms, it.keys.len())) {
        let hold = "h".to_owned();
        let call = Call::Acquire { hold: hold.clone(), keys: it.keys.clone(), terms: it.terms.clone() };
        let id = driver.call(&call)?;
        driver.outcome(id, BOUND)?.ok_or("acquire does not end")?;
        let words = sent.recv_timeout(Duration::ZERO).map_err(|_| "nothing was sent")?;
        let id = driver.call(&Call::Release { hold })?;
        driver.outcome(id, BOUND)?.ok_or("release does not end")?;
        // A client may name the lease that it counts by where the program names none.
        let words = if it.terms.lease.is_none() { words.replace(SERVERS_LEASE, "") } else { words };
        if words != it.words {
            differences.push(format!("{:?}: {words}, not {}", it.terms, it.words));
        }
    }
    Ok(differences)
}

fn can(client: &Judged, terms: &Terms, keys: usize) -> bool {
    let has = |is_needed: bool, feature| !is_needed || client.manifest.has(feature);
    has(terms.watched, Feature::WatchedLease)
        && has(terms.ephemeral, Feature::Ephemeral)
        && has(terms.shared, Feature::Shared)
        && has(terms.limit.is_some(), Feature::Semaphore)
        && has(keys > 1, Feature::SeveralKeys)
}

/// The words of an acquisition, with names for what is different each time, and its options in order.
fn words(message: &[u8]) -> Option<String> {
    let Ok(Value::Array(words)) = redis::parse_redis_value(message) else { return None };
    let text = |word: &Value| match word {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        other => format!("{other:?}"),
    };
    let words: Vec<String> = words.iter().map(text).collect();
    let keys = match words.first()?.as_str() {
        "LOCK.ACQUIRE" => 1,
        "LOCK.MACQUIRE" => 1 + words.get(1)?.parse::<usize>().ok()?,
        _ => return None,
    };
    let (names, rest) = words.split_at_checked(1 + keys)?;
    let mut options = Vec::new();
    let mut rest = rest.iter().skip(1);
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
