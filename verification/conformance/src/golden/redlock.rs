//! The validity and the fence of a lock on a majority of servers.

use std::net::Ipv4Addr;
use std::thread;
use std::time::Duration;

use redis::Value;
use serde::Deserialize;
use support::{Proxy, Server, eventually};

use super::{Played, end_of, open, rows};
use crate::clock::{self, Micros};
use crate::driver::{At, Call, Driver, Outcome};
use crate::left::{self, Moment};
use crate::play::{CLEAN, ClientUnderTest, SOON, holders};
use crate::scenario::{Feature, Terms};

/// The lock.
const KEY: &str = "k";
/// The hold.
const HOLD: &str = "h";
/// By how much the tokens of a server that is ahead exceed its clock, in µs.
const AHEAD: u64 = 60_000_000;
/// The interval at which the client is asked whether it holds the lock.
const PAUSE: Duration = Duration::from_millis(20);

/// The state of the servers, and the outcome of an acquisition. Servers are named by their numbers, from 0.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    case: String,
    servers: usize,
    /// The servers with greater tokens.
    #[serde(default)]
    ahead: Vec<usize>,
    /// The servers that are unreachable.
    #[serde(default)]
    away: Vec<usize>,
    /// The servers at which another client holds the lock.
    #[serde(default)]
    taken: Vec<usize>,
    /// The servers at which the lock is forced once it is held.
    #[serde(default)]
    broken: Vec<usize>,
    /// The timeout in ms.
    #[serde(default)]
    wait: u64,
    lease: u64,
    /// By how much the validity is less than the lease.
    #[serde(default)]
    drift: u64,
    ends: String,
}

pub fn play(client: &ClientUnderTest) -> Result<Played, String> {
    let mut played = Played::default();
    if !client.manifest.has(Feature::RedLock) {
        return Ok(played);
    }
    for row in rows::<Row>("redlock")? {
        let differences = play_row(&row, client)?;
        played.rows += 1;
        played.differences.extend(differences.into_iter().map(|why| (row.case.clone(), why)));
    }
    Ok(played)
}

fn play_row(row: &Row, client: &ClientUnderTest) -> Result<Vec<String>, String> {
    let servers: Vec<Server> = (0..row.servers).map(|_| Server::start()).collect();
    // Their names are in the order of their numbers, in which clients request the lock (docs/redlock.md).
    let named = (1..).map(|number| Ipv4Addr::new(127, 0, 0, number));
    let proxies: Vec<Proxy> = servers.iter().zip(named).map(|(server, name)| Proxy::at(name, server.addr())).collect();
    let mut greatest = 0;
    for number in &row.ahead {
        greatest = greatest.max(go_ahead(server(&servers, *number)?)?);
    }
    for number in &row.away {
        proxies.get(*number).ok_or("no such server")?.refuse();
    }
    for number in &row.taken {
        let taken =
            server(&servers, *number)?.raw().call(&[b"LOCK.ACQUIRE", KEY.as_bytes(), b"other", b"LEASE", b"600000"]);
        if !matches!(taken, Value::Int(_)) {
            return Err(format!("taken: {taken:?}"));
        }
    }
    // Some rows have no majority. The client itself is opened at another server.
    let own = Server::start();
    let mut driver = open(client, own.addr())?;
    let majority = proxies.iter().map(|proxy| format!("redis://{}/", proxy.addr())).collect();
    let (hold, keys, from) = (HOLD.to_owned(), vec![KEY.to_owned()], clock::now());
    let terms = Terms { wait: Some(row.wait), lease: Some(row.lease), ..Terms::default() };
    let at = At { majority, ..At::default() };
    let outcome = end_of(&mut driver, &Call::Acquire { hold, keys, terms, at })?;
    let mut wrong = Vec::new();
    if outcome.outcome != row.ends {
        wrong.push(format!("{outcome:?}"));
    }
    if outcome.outcome == "held" {
        wrong.extend(fence(row, &servers, greatest, outcome.fence.unwrap_or_default()));
        // A client may have its majority before it holds the lock at all servers. A lock that is forced before that would be acquired
        // there again. If one of a majority of two is forced, no majority is left: a server counts once it has confirmed the fence.
        let has_confirmed = |it: &Server| it.info("commandstats", "cmdstat_lock.renew").is_some();
        let is_joined = || servers.iter().all(|it| holders(&mut it.raw(), KEY).len() == 1 && has_confirmed(it));
        if !row.broken.is_empty() && !eventually(SOON, is_joined) {
            wrong.push(format!("the lock is not held and confirmed at all servers within {SOON:?}"));
        }
        for number in &row.broken {
            server(&servers, *number)?.raw().call(&[b"LOCK.FORCE", KEY.as_bytes()]);
        }
        // With a majority left, the validity is the same as without the force.
        if row.servers - row.broken.len() > row.servers / 2 {
            wrong.extend(validity(row, &mut driver, from, &outcome)?);
        } else {
            wrong.extend(loss(&mut driver)?);
        }
    }
    end_of(&mut driver, &Call::Close)?;
    for (number, server) in servers.iter().enumerate().filter(|(number, _)| !row.taken.contains(number)) {
        wrong.extend(left::after(CLEAN, Moment::Ended, &[server]).map(|left| format!("server {number}: {left}")));
    }
    Ok(wrong)
}

fn server(servers: &[Server], number: usize) -> Result<&Server, String> {
    servers.get(number).ok_or_else(|| format!("no server {number}"))
}

/// Raises the server's tokens above its clock. Returns the greatest token so far.
fn go_ahead(server: &Server) -> Result<u64, String> {
    let mut raw = server.raw();
    let Value::Int(token) = raw.call(&[b"LOCK.ACQUIRE", KEY.as_bytes(), b"ahead", b"LEASE", b"60000"]) else {
        return Err("a free lock is granted".to_owned());
    };
    let greatest = token.unsigned_abs() + AHEAD;
    let fence = greatest.to_string();
    let raised = raw.call(&[b"LOCK.RENEW", KEY.as_bytes(), b"ahead", b"LEASE", b"60000", b"FENCE", fence.as_bytes()]);
    let released = raw.call(&[b"LOCK.RELEASE", KEY.as_bytes(), b"ahead"]);
    match (raised, released) {
        (Value::Int(_), Value::Int(1)) => Ok(greatest),
        other => Err(format!("the token is not raised: {other:?}")),
    }
}

/// A majority has the fence, and it is greater than each earlier token at one of them.
fn fence(row: &Row, servers: &[Server], greatest: u64, fence: u64) -> Option<String> {
    let tokens: Vec<u64> = servers.iter().flat_map(|server| holders(&mut server.raw(), KEY)).collect();
    let known = tokens.iter().filter(|token| **token == fence).count();
    (known <= row.servers / 2 || fence <= greatest)
        .then(|| format!("the fence is {fence}, the servers' tokens are {tokens:?}, and the earlier one is {greatest}"))
}

/// The client reports by itself that no majority is left, and again when it is asked.
fn loss(driver: &mut Driver) -> Result<Option<String>, String> {
    let reason = driver.loss(HOLD, SOON)?.map(|it| it.reason);
    let checked = end_of(driver, &Call::Check { hold: HOLD.to_owned() })?;
    let is_lost = reason.as_deref() == Some("forced") && checked.outcome == "lost";
    Ok((!is_lost).then(|| format!("reason {reason:?}, and {checked:?}")))
}

/// The lock is valid for the lease, less the drift, from a moment between the call and its end. A check before the
/// earliest possible end of that time reports no loss, and one after the latest possible end reports no hold.
fn validity(row: &Row, driver: &mut Driver, from: Micros, held: &Outcome) -> Result<Option<String>, String> {
    let valid = (row.lease - row.drift) * 1_000;
    loop {
        let asked = clock::now();
        let outcome = end_of(driver, &Call::Check { hold: HOLD.to_owned() })?;
        if outcome.at < from + valid && outcome.outcome == "lost" {
            return Ok(Some(format!("lost already after {} µs", outcome.at - from)));
        }
        if asked > held.at + valid {
            let late = format!("still held {} µs after it was", asked - held.at);
            return Ok((outcome.outcome == "held").then_some(late));
        }
        thread::sleep(PAUSE);
    }
}
