//! Robustness: random bytes and random requests against a living server with two replicas, one of them without the module.
//!
//! Nothing may crash, no log may hold an error, memory must come back, and the replicas must have what the master has.

mod almost;
mod burden;
pub mod copies;
mod mixed;
mod outcome;
mod replies;
mod requests;
mod rights;
mod sender;
mod tokens;
mod watch;
mod words;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis::Connection;
use support::{Server, eventually, until};

use crate::options::Options;
use crate::report::Row;
use copies::{check_copies, quiet_log};
use outcome::Outcome;
use sender::Sender;
use tokens::Tokens;
use watch::Watch;

/// Requests of a run.
const REQUESTS: u64 = 1_000_000;
/// Runs of the long form.
const RUNS: u64 = 10;
/// Connections that send at the same time.
const CONNECTIONS: u64 = 6;
/// After each round all connections end, and copies and logs are looked at.
const ROUNDS: u64 = 20;
/// Rounds before memory is measured first: buffers, tables and statistics that stay have their size by then.
const WARM_UP: u64 = 4;
/// How much `used_memory` may have grown over all the rounds: less than a byte a request.
const GROWTH: i64 = 256 * 1024;
/// Memory that has not shrunk for as long as that does not shrink any more.
const STILL: Duration = Duration::from_secs(6);
/// Violations of a round that are told in full.
const TOLD: usize = 8;

/// Runs the scenario: a million requests in the short form, ten million otherwise, and more if there is time.
pub fn run(options: &Options) -> Vec<Row> {
    let programs = programs();
    let start = Instant::now();
    let mut total = Row { scenario: "robustness: random requests".into(), ..Row::default() };
    let mut longest = Duration::ZERO;
    // Each run has one of the servers; the short form shares its requests out among them.
    let (runs, requests) = match options.short {
        true => (programs.len() as u64, requests_wanted() / programs.len() as u64),
        false => (RUNS, requests_wanted()),
    };
    for run in 0.. {
        let before = Instant::now();
        if run >= runs && (options.short || start.elapsed() + longest > options.budget) {
            break;
        }
        let seed = options.seed + run;
        let outcome = once(&programs[run as usize % programs.len()], seed, requests);
        longest = longest.max(before.elapsed());
        total.runs += 1;
        total.requests += outcome.requests;
        total.faults += outcome.dropped;
        total.violations += outcome.violations.len() as u64;
        for violation in outcome.violations.iter().take(TOLD) {
            eprintln!("fuzz, seed {seed}: {violation}");
        }
        let reached: Vec<String> = outcome.reached.iter().map(|(what, times)| format!("{times} {what}")).collect();
        total.note = format!(
            "the last run: {} garbage strings; {}; copies compared {} times; memory grew by {} B; {} pings; \
             the longest step that one waited for took {:.1?} of the server's own time: {}",
            outcome.garbage,
            reached.join(", "),
            outcome.compared,
            outcome.growth,
            outcome.watch.pings,
            outcome.watch.longest.0,
            outcome.watch.longest.1,
        );
    }
    vec![total]
}

/// The servers that the requests are sent to: the usual one, and one whose hash fields can expire, if it is here. Only the one that
/// is named, if one is: what makes it special, such as a sanitizer, the others don't have.
fn programs() -> Vec<PathBuf> {
    if std::env::var_os("HOLDFAST_SERVER").is_some() {
        return vec![support::server_program()];
    }
    let newer = support::workspace().join(".servers/valkey-9.1/valkey-server");
    let newer = Some(newer).filter(|program| program.exists());
    std::iter::once(support::server_program()).chain(newer).collect()
}

/// `LAB_FUZZ_REQUESTS`, for runs under tools that make the server many times slower.
fn requests_wanted() -> u64 {
    std::env::var("LAB_FUZZ_REQUESTS").ok().and_then(|text| text.parse().ok()).unwrap_or(REQUESTS)
}

fn once(program: &Path, seed: u64, requests: u64) -> Outcome {
    let mut outcome = Outcome::default();
    let databases = (mixed::DATABASE + 1).to_string();
    let server = || Server::builder().program(program).arg("databases", &databases);
    let master = server()
        .arg("repl-diskless-sync-delay", "0")
        .arg("notify-keyspace-events", "KEAd")
        // In each of so many rounds a second the server itself may search a quarter of the time for keys that have expired:
        // 25 ms in one step with the 10 rounds that it begins with.
        .arg("hz", "100")
        .arg("crash-memcheck-enabled", "no")
        .start();
    let replicas = [server().start(), server().without_module().start()];
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
    rights::make_users(&mut master.connect());
    watch::note_slow_steps(&mut master.connect());
    let mut tokens = Tokens::default();
    let mut base = None;
    for round in 0..ROUNDS {
        outcome.add(storm(&master, seed.wrapping_mul(1000) + round, requests / ROUNDS));
        if outcome.violations.is_empty()
            && let Err(why) = tokens.probe(&mut master.connect())
        {
            outcome.violations.push(format!("round {round}: {why}"));
        }
        let quiet = || servers.iter().try_for_each(|(server, seen)| quiet_log(server, *seen));
        let checked = quiet()
            .and_then(|()| everybody_gone(&master))
            .and_then(|()| check_copies(&master, &replicas))
            .and_then(|()| quiet());
        match checked {
            Ok(()) => outcome.compared += 1,
            Err(why) => {
                outcome.violations.push(format!("round {round}: {why}"));
                tell_state(&master);
                break;
            }
        }
        if round + 1 == WARM_UP {
            base = Some(memory_when_empty(&master, i64::MIN));
        }
    }
    if let Some(verdict) = master.client().get_connection().ok().and_then(|mut it| outcome.watch.verdict(&mut it)) {
        outcome.violations.push(verdict);
    }
    if !outcome.violations.is_empty() {
        // The server may be gone.
        return outcome;
    }
    outcome.reached = reached(&master);
    let mixed::Played { asked, told, cancelled, ended } = outcome.played;
    let others = [
        ("forbidden", outcome.forbidden),
        ("asked in mixed queues", asked),
        ("events told there", told),
        ("cancelled there", cancelled),
        ("sessions ended there", ended),
    ];
    outcome.reached.extend(others.map(|(what, times)| (what, times as i64)));
    if requests >= REQUESTS / 10
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
        ("revoked", "revoked"),
    ];
    let mut connection = master.connect();
    COUNTS.map(|(what, field)| (what, holdfast(&mut connection, field))).to_vec()
}

/// With all connections gone, nobody may wait or be bound.
fn everybody_gone(master: &Server) -> Result<(), String> {
    const NOW: [&str; 7] =
        ["waiters", "contended_locks", "bound_holds", "confirming", "sessions", "session_waits", "undelivered_events"];
    let mut connection = master.client().get_connection().map_err(|error| error.to_string())?;
    match NOW.into_iter().find(|of| !eventually(Duration::from_secs(5), || holdfast(&mut connection, of) == 0)) {
        Some(of) => Err(format!("all connections are closed, yet {of} does not go down to 0")),
        None => Ok(()),
    }
}

/// What the module and the server's log say, to find the reason of a violation.
fn tell_state(master: &Server) {
    let info = master.client().get_connection().and_then(|mut it| redis::cmd("INFO").arg("holdfast").query(&mut it));
    eprintln!("{}", info.unwrap_or_else(|error| format!("no INFO: {error}")));
    let log = master.log();
    let lines: Vec<&str> = log.lines().rev().take(30).collect();
    lines.iter().rev().for_each(|line| eprintln!("{line}"));
}

fn holdfast(connection: &mut Connection, name: &str) -> i64 {
    field(connection, "holdfast", &format!("holdfast_{name}"))
}

/// One round: several connections send at once, until each has sent its part.
fn storm(master: &Server, seed: u64, requests: u64) -> Outcome {
    let address = master.addr();
    let clients = Mutex::new(BTreeMap::new());
    let mut outcome = Outcome::default();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = scope.spawn(|| Watch::over(address, master.pid(), &stop));
        // That its connections end early is nothing that is promised.
        let burden = scope.spawn(|| burden::bear(address, seed, &stop));
        let player = scope.spawn(|| mixed::play(address, seed, &stop));
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
        stop.store(true, Ordering::Relaxed);
        let _ = burden.join();
        match player.join() {
            Ok((played, verdict)) => {
                outcome.played.add(played);
                outcome.violations.extend(verdict.err());
            }
            Err(_) => outcome.violations.push("the player of the mixed queues panicked".into()),
        }
        outcome.watch.add(watch.join().unwrap_or_default());
    });
    outcome
}

/// What the server uses once every key is gone, without what connections and the backlog hold for a while. Waits until it
/// is no more than `base` and what is allowed besides, or until it is clear that it stays above.
fn memory_when_empty(master: &Server, base: i64) -> i64 {
    let mut connection = master.connect();
    for command in [
        // Else the looks at the memory fill it: a quarter of a megabyte for a thousand of them.
        &["CONFIG", "SET", "slowlog-log-slower-than", "-1"][..],
        &["FLUSHALL"],
        &["SCRIPT", "FLUSH", "SYNC"],
        &["CONFIG", "RESETSTAT"],
        &["ACL", "LOG", "RESET"],
        &["SLOWLOG", "RESET"],
    ] {
        let mut request = redis::cmd(command[0]);
        request.arg(&command[1..]);
        request.exec(&mut connection).expect("the server empties itself");
    }
    until(Duration::from_secs(10), "the senders' connections are gone", || {
        field(&mut connection, "clients", "connected_clients") == 1
    });
    // Tables shrink when the server's own cycle comes by, and what it keeps for clients that modules block (36 kB for each
    // that was blocked at once) it frees by and by: begins to within three seconds, and takes some.
    let mut least = i64::MAX;
    let mut end = Instant::now() + STILL;
    while Instant::now() < end && least > base.saturating_add(GROWTH / 8) {
        let now = used(&mut connection);
        if now < least.saturating_sub(GROWTH / 8) {
            end = Instant::now() + STILL;
        }
        least = least.min(now);
        thread::sleep(Duration::from_millis(20));
    }
    watch::note_slow_steps(&mut connection);
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
