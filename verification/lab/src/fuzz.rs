//! Robustness: random bytes and random requests against a server with two replicas, one of them without the module.
//!
//! The server must not crash, no log may contain an error, memory must be freed, and the replicas must equal the primary.

pub mod copies;
mod large_states;
mod mixed;
mod near_locks;
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
/// Runs in the long form.
const RUNS: u64 = 10;
/// Concurrent connections.
const CONNECTIONS: u64 = 6;
/// After each round all connections end, and replicas and logs are checked.
const ROUNDS: u64 = 20;
/// Rounds before the first measurement of memory: buffers, tables and statistics have their size by then.
const WARM_UP: u64 = 4;
/// By how much `used_memory` may grow over all rounds: less than a byte for each request.
const GROWTH: i64 = 256 * 1024;
/// Memory that has not decreased for this long does not decrease any more.
const STILL: Duration = Duration::from_secs(6);
/// How many violations of a round are printed in full.
const SHOWN_VIOLATIONS: usize = 8;

/// Runs the scenario: a million requests in the short form, at least ten million otherwise.
pub fn run(options: &Options) -> Vec<Row> {
    let programs = programs();
    let start = Instant::now();
    let mut total = Row { scenario: "robustness: random requests".into(), ..Row::default() };
    let mut longest = Duration::ZERO;
    // Each run uses one of the servers. The short form divides its requests among them.
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
        for violation in outcome.violations.iter().take(SHOWN_VIOLATIONS) {
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

/// The servers to test: the default one, and one with field expiry, if it is installed. If a server is named, only that one: it
/// may be special, such as one with a sanitizer.
fn programs() -> Vec<PathBuf> {
    if std::env::var_os("HOLDFAST_SERVER").is_some() {
        return vec![support::server_program()];
    }
    let newer = support::workspace().join(".servers/valkey-9.1/valkey-server");
    let newer = Some(newer).filter(|program| program.exists());
    std::iter::once(support::server_program()).chain(newer).collect()
}

/// `LAB_FUZZ_REQUESTS`, for runs under tools that slow the server down many times.
fn requests_wanted() -> u64 {
    std::env::var("LAB_FUZZ_REQUESTS").ok().and_then(|text| text.parse().ok()).unwrap_or(REQUESTS)
}

fn once(program: &Path, seed: u64, requests: u64) -> Outcome {
    let mut outcome = Outcome::default();
    let databases = (mixed::DATABASE + 1).to_string();
    let server = || Server::builder().program(program).arg("databases", &databases);
    let primary = server()
        .arg("repl-diskless-sync-delay", "0")
        .arg("notify-keyspace-events", "KEAd")
        // In each of its cron runs the server may spend a quarter of the period on expired keys: 25 ms with the default of 10 runs a
        // second.
        .arg("hz", "100")
        .arg("crash-memcheck-enabled", "no")
        .start();
    let replicas = [server().start(), server().without_module().start()];
    for replica in &replicas {
        replica.replica_of(&primary);
    }
    primary.wait_replicas_online(replicas.len());
    until(Duration::from_secs(20), "the process that sent the snapshot has ended", || {
        primary.info("persistence", "rdb_bgsave_in_progress").as_deref() == Some("0")
    });
    // Servers log warnings while they start and make the first copies.
    let servers: Vec<(&Server, usize)> =
        [&primary].into_iter().chain(&replicas).map(|server| (server, server.log().len())).collect();
    rights::make_users(&mut primary.connect());
    watch::note_slow_steps(&mut primary.connect());
    let mut tokens = Tokens::default();
    let mut base = None;
    for round in 0..ROUNDS {
        outcome.add(run_round(&primary, seed.wrapping_mul(1000) + round, requests / ROUNDS));
        if outcome.violations.is_empty()
            && let Err(why) = tokens.probe(&mut primary.connect())
        {
            outcome.violations.push(format!("round {round}: {why}"));
        }
        let quiet = || servers.iter().try_for_each(|(server, seen)| quiet_log(server, *seen));
        let checked = quiet()
            .and_then(|()| check_nothing_left(&primary))
            .and_then(|()| check_copies(&primary, &replicas))
            .and_then(|()| quiet());
        match checked {
            Ok(()) => outcome.compared += 1,
            Err(why) => {
                outcome.violations.push(format!("round {round}: {why}"));
                print_state(&primary);
                break;
            }
        }
        if round + 1 == WARM_UP {
            base = Some(memory_when_empty(&primary, i64::MIN));
        }
    }
    if let Some(verdict) = primary.client().get_connection().ok().and_then(|mut it| outcome.watch.verdict(&mut it)) {
        outcome.violations.push(verdict);
    }
    if !outcome.violations.is_empty() {
        // The server may have crashed.
        return outcome;
    }
    outcome.reached = reached(&primary);
    let mixed::PlayerCounts { asked, notified, cancelled, ended } = outcome.player_counts;
    let others = [
        ("forbidden", outcome.forbidden),
        ("requested in mixed queues", asked),
        ("events read there", notified),
        ("cancelled there", cancelled),
        ("sessions ended there", ended),
    ];
    outcome.reached.extend(others.map(|(what, times)| (what, times as i64)));
    if requests >= REQUESTS / 10
        && let Some((what, _)) = outcome.reached.iter().find(|(_, times)| *times == 0)
    {
        outcome.violations.push(format!("no request led to {what}: the run tests too little"));
    }
    if let Some(base) = base {
        outcome.growth = memory_when_empty(&primary, base) - base;
        if outcome.growth > GROWTH {
            outcome.violations.push(format!("memory grew by {} bytes", outcome.growth));
        }
    }
    outcome
}

/// The module's counters of what the requests led to. Each must be positive.
fn reached(primary: &Server) -> Vec<(&'static str, i64)> {
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
    let mut connection = primary.connect();
    COUNTS.map(|(what, field)| (what, holdfast(&mut connection, field))).to_vec()
}

/// When all connections are closed, no request may wait and no hold may be bound.
fn check_nothing_left(primary: &Server) -> Result<(), String> {
    const NOW: [&str; 7] =
        ["waiters", "contended_locks", "bound_holds", "confirming", "sessions", "session_waits", "undelivered_events"];
    let mut connection = primary.client().get_connection().map_err(|error| error.to_string())?;
    match NOW.into_iter().find(|of| !eventually(Duration::from_secs(5), || holdfast(&mut connection, of) == 0)) {
        Some(of) => Err(format!("all connections are closed, yet {of} does not go down to 0")),
        None => Ok(()),
    }
}

/// Prints what the module and the server's log report, to explain a violation.
fn print_state(primary: &Server) {
    let info = primary.client().get_connection().and_then(|mut it| redis::cmd("INFO").arg("holdfast").query(&mut it));
    eprintln!("{}", info.unwrap_or_else(|error| format!("no INFO: {error}")));
    let log = primary.log();
    let lines: Vec<&str> = log.lines().rev().take(30).collect();
    lines.iter().rev().for_each(|line| eprintln!("{line}"));
}

fn holdfast(connection: &mut Connection, name: &str) -> i64 {
    field(connection, "holdfast", &format!("holdfast_{name}"))
}

/// One round: several connections send concurrently, until each has sent its part.
fn run_round(primary: &Server, seed: u64, requests: u64) -> Outcome {
    let address = primary.addr();
    let clients = Mutex::new(BTreeMap::new());
    let mut outcome = Outcome::default();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = scope.spawn(|| Watch::over(address, primary.pid(), |_| stop.load(Ordering::Relaxed)));
        // Its connections may end early without a violation.
        let large_states = scope.spawn(|| large_states::build(address, seed, &stop));
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
        let _ = large_states.join();
        match player.join() {
            Ok((player_counts, verdict)) => {
                outcome.player_counts.add(player_counts);
                outcome.violations.extend(verdict.err());
            }
            Err(_) => outcome.violations.push("the player of the mixed queues panicked".into()),
        }
        outcome.watch.add(watch.join().unwrap_or_default());
    });
    outcome
}

/// The server's memory when all keys are deleted, without temporary buffers of connections and backlog. Waits until it is at
/// most `base` and the allowance, or until it does not decrease any more.
fn memory_when_empty(primary: &Server, base: i64) -> i64 {
    let mut connection = primary.connect();
    for command in [
        // Otherwise the measurements would fill it: a thousand of them take a quarter of a megabyte.
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
    until(Duration::from_secs(10), "the senders' connections are closed", || {
        field(&mut connection, "clients", "connected_clients") == 1
    });
    // Tables shrink when the server's cron runs. The server frees its memory for blocked clients (36 kB for each that was blocked at
    // once) gradually: it begins within three seconds, and takes a few.
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
