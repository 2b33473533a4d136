//! The order in which locks of several servers are requested.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Deserialize;
use support::{Direction, Fate, Proxy, Server};

use super::{Played, end_of, open, requested_keys, rows, words_of};
use crate::driver::{At, Call};
use crate::left::{self, Moment};
use crate::play::{CLEAN, ClientUnderTest};
use crate::scenario::{Feature, Terms};

/// Locks in the program's order, and the expected requests.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    /// The server and database of each: `host/database`.
    locks: BTreeMap<String, String>,
    requests: Vec<Vec<String>>,
    /// The locks that another client holds.
    #[serde(default)]
    taken: Option<String>,
}

pub fn play(client: &ClientUnderTest) -> Result<Played, String> {
    let mut played = Played::default();
    if !client.manifest.has(Feature::MultiLock) {
        return Ok(played);
    }
    // One server under several host names.
    let server = Server::start();
    let requests: Arc<Mutex<Vec<Vec<String>>>> = Arc::default();
    let mut proxies: BTreeMap<Ipv4Addr, Proxy> = BTreeMap::new();
    let mut driver = open(client, server.addr())?;
    for row in rows::<Row>("order")? {
        if let Some(key) = &row.taken {
            server.raw().call(&[b"LOCK.ACQUIRE", key.as_bytes(), b"other", b"LEASE", b"600000"]);
        }
        let (mut keys, mut each) = (Vec::new(), Vec::new());
        for (key, place) in &row.locks {
            let (host, database) = place.split_once('/').ok_or_else(|| format!("{place} is not host/database"))?;
            let host: Ipv4Addr = host.parse().map_err(|why| format!("{host}: {why}"))?;
            let proxy = proxies.entry(host).or_insert_with(|| watched(&server, host, requests.clone()));
            keys.push(key.clone());
            each.push(format!("redis://{}/{database}", proxy.addr()));
        }
        // Without a wait, a lock that is taken ends the acquisition.
        let wait = if row.taken.is_some() { 0 } else { 60_000 };
        let (hold, terms) = ("h".to_owned(), Terms { wait: Some(wait), ..Terms::default() });
        let at = At { each, ..At::default() };
        let outcome = end_of(&mut driver, &Call::Acquire { hold: hold.clone(), keys, terms, at })?;
        let seen = std::mem::take(&mut *requests.lock().unwrap_or_else(PoisonError::into_inner));
        played.rows += 1;
        let ends = if row.taken.is_some() { "not-granted" } else { "held" };
        if outcome.outcome != ends || seen != row.requests {
            let differs = format!("{outcome:?} after {seen:?}, not {:?}", row.requests);
            played.differences.push((format!("{:?}", row.locks), differs));
        }
        if outcome.outcome == "held" {
            end_of(&mut driver, &Call::Release { hold })?;
        }
        // All or none: locks that were granted before are released.
        if let Some(key) = &row.taken {
            server.raw().call(&[b"LOCK.FORCE", key.as_bytes()]);
        }
        let left = left::after(CLEAN, Moment::Free, &[&server]);
        played.differences.extend(left.map(|left| (format!("{:?}", row.locks), left)));
    }
    end_of(&mut driver, &Call::Close)?;
    Ok(played)
}

/// A proxy to the server with this host name. It records the keys of each request for locks.
fn watched(server: &Server, host: Ipv4Addr, requests: Arc<Mutex<Vec<Vec<String>>>>) -> Proxy {
    let proxy = Proxy::at(host, server.addr());
    proxy.rule(move |toward, message| {
        let words = words_of(message).filter(|_| toward == Direction::Server).unwrap_or_default();
        if let Some(keys) = requested_keys(&words) {
            requests.lock().unwrap_or_else(PoisonError::into_inner).push(keys.to_vec());
        }
        Fate::Pass
    });
    proxy
}
