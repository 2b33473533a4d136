//! Robustness: random bytes and random requests against a living server with two replicas, one of them without the module.
//!
//! Nothing may crash, no log may hold an error, memory must come back, and the replicas must have what the master has.

pub mod copies;
mod outcome;
mod replies;
mod requests;
mod sender;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use redis::Connection;
use support::{Server, eventually, until};

use crate::options::Options;
use crate::report::Row;
use copies::{check_copies, quiet_log};
use outcome::Outcome;
use sender::Sender;

/// Requests of the short form.
const SHORT: u64 = 1_000_000;
/// Connections that send at the same time.
const CONNECTIONS: u64 = 6;
/// After each round all connections end, and copies and logs are looked at.
const ROUNDS: u64 = 20;
/// Rounds before memory is measured first: buffers, tables and statistics that stay have their size by then.
const WARM_UP: u64 = 4;
/// How much `used_memory` may have grown over all the rounds: less than a byte a request.
const GROWTH: i64 = 256 * 1024;
/// Violations of a round that are told in full.
const TOLD: usize = 8;

/// Runs the scenario: a million requests in the short form, as many times a million as fit in the budget otherwise.
pub fn run(options: &Options) -> Vec<Row> {
    let start = Instant::now();
    let mut total = Row { scenario: "robustness: random requests".into(), ..Row::default() };
    let mut seed = options.seed;
    loop {
        let before = Instant::now();
        let outcome = once(seed, requests_wanted());
        total.runs += 1;
        total.requests += outcome.requests;
        total.faults += outcome.dropped;
        total.violations += outcome.violations.len() as u64;
        for violation in outcome.violations.iter().take(TOLD) {
            eprintln!("fuzz, seed {seed}: {violation}");
        }
        let reached: Vec<String> = outcome.reached.iter().map(|(what, times)| format!("{times} {what}")).collect();
        total.note = format!(
            "{} garbage strings; {}; copies compared {} times; memory grew by {} B",
            outcome.garbage,
            reached.join(", "),
            outcome.compared,
            outcome.growth
        );
        seed += 1;
        if options.short || start.elapsed() + before.elapsed() > options.budget {
            return vec![total];
        }
    }
}

/// `LAB_FUZZ_REQUESTS`, for runs under tools that make the server many times slower.
fn requests_wanted() -> u64 {
    std::env::var("LAB_FUZZ_REQUESTS").ok().and_then(|text| text.parse().ok()).unwrap_or(SHORT)
}

fn once(seed: u64, requests: u64) -> Outcome {
    let mut outcome = Outcome::default();
    let master = Server::builder()
        .arg("databases", &requests::DATABASES.to_string())
        .arg("repl-diskless-sync-delay", "0")
        .arg("notify-keyspace-events", "KEAd")
        .arg("crash-memcheck-enabled", "no")
        .start();
    let replicas = [Server::start(), Server::builder().without_module().start()];
    for replica in &replicas {
        replica.replica_of(&master);
    }
    master.wait_replicas_online(replicas.len());
    until(Duration::from_secs(20), "the process that made the copies is gone", || {
        master.info("persistence", "rdb_bgsave_in_progress").as_deref() == Some("0")
    });
    // Servers warn about this and that while they start and make the first copies.
    let servers: Vec<(&Server, usize)> =
        [&master].into_iter().chain(&replicas).map(|server| (server, server.log().len())).collect();
    let mut base = None;
    for round in 0..ROUNDS {
        outcome.add(storm(&master, seed.wrapping_mul(1000) + round, requests / ROUNDS));
        let quiet = || servers.iter().try_for_each(|(server, seen)| quiet_log(server, *seen));
        let checked = quiet()
            .and_then(|()| everybody_gone(&master))
            .and_then(|()| check_copies(&master, &replicas))
            .and_then(|()| quiet());
        match checked {
            Ok(()) => outcome.compared += 1,
            Err(why) => {
                outcome.violations.push(format!("round {round}: {why}"));
                break;
            }
        }
        if round + 1 == WARM_UP {
            base = Some(memory_when_empty(&master, i64::MIN));
        }
    }
    if !outcome.violations.is_empty() {
        // The server may be gone.
        return outcome;
    }
    outcome.reached = reached(&master);
    if requests >= SHORT / 10
        && let Some((what, _)) = outcome.reached.iter().find(|(_, times)| *times == 0)
    {
        outcome.violations.push(format!("among the requests none led to {what}: they test too little"));
    }
    if let Some(base) = base {
        outcome.growth = memory_when_empty(&master, base) - base;
        if outcome.growth > GROWTH {
            outcome.violations.push(format!("memory grew by {} bytes", outcome.growth));
        }
    }
    outcome
}

/// What the requests led to, by the module's own count: each must have happened.
fn reached(master: &Server) -> Vec<(&'static str, i64)> {
    const COUNTS: [(&str, &str); 14] = [
        ("grants", "grants_at_once"),
        ("from the queue", "grants_queued"),
        ("refusals", "refusals"),
        ("timeouts", "timeouts"),
        ("releases", "releases"),
        ("renewals", "renewals"),
        ("of lost locks", "renewals_lost"),
        ("expired", "expired"),
        ("forced", "forced"),
        ("by disconnect", "released_by_disconnect"),
        ("by watchdog", "watchdog_renewals"),
        ("deadlocks", "deadlocks_refused"),
        ("confirmed", "confirmed"),
        ("taken back", "taken_back"),
    ];
    let mut connection = master.connect();
    COUNTS.map(|(what, field)| (what, holdfast(&mut connection, field))).to_vec()
}

/// With all connections gone, nobody may wait or be tied.
fn everybody_gone(master: &Server) -> Result<(), String> {
    const NOW: [&str; 4] = ["waiters", "contended_locks", "tied_holds", "confirming"];
    let mut connection = master.client().get_connection().map_err(|error| error.to_string())?;
    match NOW.into_iter().find(|of| !eventually(Duration::from_secs(5), || holdfast(&mut connection, of) == 0)) {
        Some(of) => Err(format!("all connections are closed, yet {of} does not go down to 0")),
        None => Ok(()),
    }
}

fn holdfast(connection: &mut Connection, name: &str) -> i64 {
    field(connection, "holdfast", &format!("holdfast_{name}"))
}

/// One round: several connections send at once, until each has sent its part.
fn storm(master: &Server, seed: u64, requests: u64) -> Outcome {
    let address = master.addr();
    let clients = Mutex::new(BTreeMap::new());
    let mut outcome = Outcome::default();
    thread::scope(|scope| {
        let senders: Vec<_> = (0..CONNECTIONS)
            .map(|number| {
                let clients = &clients;
                scope.spawn(move || {
                    let sender = Sender::new(address, clients, number, seed * 100 + number);
                    sender.send(requests / CONNECTIONS)
                })
            })
            .collect();
        for sender in senders {
            match sender.join() {
                Ok(part) => outcome.add(part),
                Err(_) => outcome.violations.push("a sender panicked".into()),
            }
        }
    });
    outcome
}

/// What the server uses once every key is gone, without what connections and the backlog hold for a while. Waits until it
/// is no more than `base` and what is allowed besides, or until it is clear that it stays above.
fn memory_when_empty(master: &Server, base: i64) -> i64 {
    let mut connection = master.connect();
    for command in [&["FLUSHALL"][..], &["SCRIPT", "FLUSH", "SYNC"], &["CONFIG", "RESETSTAT"]] {
        let mut request = redis::cmd(command[0]);
        request.arg(&command[1..]);
        request.exec(&mut connection).expect("the server empties itself");
    }
    until(Duration::from_secs(10), "the senders' connections are gone", || {
        field(&mut connection, "clients", "connected_clients") == 1
    });
    // Tables shrink when the server's own cycle comes by, ten times a second.
    let mut least = i64::MAX;
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end && least > base.saturating_add(GROWTH / 8) {
        least = least.min(used(&mut connection));
        thread::sleep(Duration::from_millis(20));
    }
    least
}

fn used(connection: &mut Connection) -> i64 {
    let mut of = |name| field(connection, "memory", name);
    of("used_memory") - of("mem_clients_normal") - of("mem_total_replication_buffers")
}

fn field(connection: &mut Connection, section: &str, name: &str) -> i64 {
    let info: redis::InfoDict = redis::cmd("INFO").arg(section).query(connection).expect("INFO");
    info.get(name).unwrap_or(0)
}
