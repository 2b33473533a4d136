//! Tables that apply to all clients (`golden/*.yaml`). Each row is played to each client.

mod errors;
mod losses;
mod order;
mod redlock;
mod words;

use std::fs;
use std::path::Path;

use redis::Value;
use serde::de::DeserializeOwned;

use crate::driver::{Call, Driver, Outcome};
use crate::play::{BOUND, ClientUnderTest};
use crate::scenario::{Feature, Terms};

/// The result of a table.
#[derive(Debug, Default)]
pub struct Played {
    /// The number of rows played. Rows that the client does not support are left out.
    pub rows: usize,
    /// The differences: the name of the row, and a sentence.
    pub differences: Vec<(String, String)>,
}

/// Plays a table to a client. The error says why it could not be played.
type Table = fn(&ClientUnderTest) -> Result<Played, String>;

/// All tables, by the names of their files.
pub const TABLES: [(&str, Table); 5] = [
    ("words", words::play),
    ("losses", losses::play),
    ("errors", errors::play),
    ("order", order::play),
    ("redlock", redlock::play),
];

/// The rows of a table.
fn rows<T: DeserializeOwned>(name: &str) -> Result<Vec<T>, String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name).with_extension("yaml");
    let wrong = |why: &dyn std::fmt::Display| format!("{}: {why}", file.display());
    let text = fs::read_to_string(&file).map_err(|why| wrong(&why))?;
    serde_saphyr::from_str(&text).map_err(|why| wrong(&why))
}

/// Whether a client supports these options of an acquisition.
fn can(client: &ClientUnderTest, terms: &Terms, keys: usize) -> bool {
    let has = |is_needed: bool, feature| !is_needed || client.manifest.has(feature);
    has(terms.watched, Feature::WatchedLease)
        && has(terms.ephemeral, Feature::Ephemeral)
        && has(terms.shared, Feature::Shared)
        && has(terms.limit.is_some(), Feature::Semaphore)
        && has(terms.replicas.is_some(), Feature::Replicas)
        && has(terms.callback.is_some(), Feature::Callbacks)
        && has(terms.keep.is_some(), Feature::Keep)
        && has(keys > 1, Feature::SeveralKeys)
}

/// Makes a call, and waits for its outcome.
fn end_of(driver: &mut Driver, call: &Call) -> Result<Outcome, String> {
    let id = driver.call(call)?;
    driver.outcome(id, BOUND)?.ok_or_else(|| format!("{call:?} has not ended after {BOUND:?}"))
}

/// A driver that has opened a client of this server.
fn open(client: &ClientUnderTest, server: std::net::SocketAddr) -> Result<Driver, String> {
    let mut driver = Driver::start(client.manifest, client.programs)?;
    end_of(&mut driver, &Call::Open { url: format!("redis://{server}/") })?;
    Ok(driver)
}

/// The words of a request.
fn words_of(message: &[u8]) -> Option<Vec<String>> {
    let Ok(Value::Array(words)) = redis::parse_redis_value(message) else { return None };
    let text = |word: &Value| match word {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        other => format!("{other:?}"),
    };
    Some(words.iter().map(text).collect())
}

/// The keys in a request for locks, and `None` for other requests.
fn requested_keys(words: &[String]) -> Option<&[String]> {
    match words.first()?.as_str() {
        "LOCK.ACQUIRE" => words.get(1..2),
        "LOCK.MACQUIRE" => words.get(2..2 + words.get(1)?.parse::<usize>().ok()?),
        _ => None,
    }
}
