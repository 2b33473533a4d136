//! A thousand clients, in Rust and in Python, for as long as requested: does memory grow?
//!
//! There are no faults, so a hold ends only by its release. A ledger for each lock in this process reports a grant beside a holder,
//! or with a token that is not greater. Clients in Python report to the ledgers over a socket.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fastrand::Rng;
use holdfast_client::Locks;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisResult, cmd};
use support::{Server, eventually};
use tokio::runtime::Builder;
use tokio::time::sleep;

use crate::clock::micros;
use crate::options::Options;
use crate::report::Row;
use others::{Others, resident};

mod others;

/// Clients that block, each on its own connection.
const BLOCKED: usize = 400;
/// Tasks that wait through sessions, and how many sessions they share.
const TASKS: usize = 300;
const SESSIONS: usize = 6;
/// Programs in Python, each with a session, and how many threads or tasks share it.
const PROGRAMS: usize = 4;
const CLIENTS_OF_ONE: usize = 75;
const CLIENTS: usize = BLOCKED + TASKS + PROGRAMS * CLIENTS_OF_ONE;
/// Few enough for a queue at each lock, with these pauses.
const LOCKS: usize = 10;
/// The pause of a client between two locks, and how long it holds one, in milliseconds.
const PAUSE: Range<u64> = 200..2_000;
const HOLD: Range<u64> = 1..20;
/// Every fifth lock is a semaphore with this limit.
const PERMITS: usize = 3;
const WAIT: Duration = Duration::from_secs(60);
const SAMPLES: u32 = 40;
/// The second round may use one part in this many more memory than the first: how many clients wait varies.
const MAY_GROW_BY: u64 = 20;
/// It may use this many more bytes in addition: tables keep their largest size, which depends on how many clients wait.
const TABLES: u64 = 1 << 20;

/// One row, for the whole time.
pub fn run(options: &Options) -> Vec<Row> {
    vec![soak(options).unwrap_or_else(|why| Row::not_run("soak", why))]
}

/// The state of a lock, from its grants and releases.
struct Ledger {
    holders: AtomicUsize,
    last: AtomicU64,
    limit: usize,
}

struct Shared {
    ledgers: Vec<Ledger>,
    over: AtomicBool,
    grants: AtomicU64,
    timeouts: AtomicU64,
    errors: AtomicU64,
    wrong: AtomicU64,
    /// How far a token was ahead of the clock at most, in microseconds.
    ahead: AtomicU64,
}

impl Shared {
    fn new() -> Shared {
        let ledger = |number| Ledger {
            holders: AtomicUsize::new(0),
            last: AtomicU64::new(0),
            limit: if number % 5 == 0 { PERMITS } else { 1 },
        };
        Shared {
            ledgers: (0..LOCKS).map(ledger).collect(),
            over: AtomicBool::new(false),
            grants: AtomicU64::new(0),
            timeouts: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            wrong: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
        }
    }

    fn is_running(&self) -> bool {
        !self.over.load(Ordering::Relaxed)
    }

    fn granted(&self, number: usize, token: u64) {
        let ledger = &self.ledgers[number];
        let beside = ledger.holders.fetch_add(1, Ordering::SeqCst);
        let last = ledger.last.fetch_max(token, Ordering::SeqCst);
        let grows = ledger.limit > 1 || last < token;
        if beside >= ledger.limit || !grows {
            self.wrong.fetch_add(1, Ordering::Relaxed);
            eprintln!("soak: lock {number}: {beside} other holders with token {token}, the last token was {last}");
        }
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, micros);
        self.ahead.fetch_max(token.saturating_sub(wall), Ordering::Relaxed);
        self.grants.fetch_add(1, Ordering::Relaxed);
    }

    /// Must be called before the release is sent.
    fn releases(&self, number: usize) {
        self.ledgers[number].holders.fetch_sub(1, Ordering::SeqCst);
    }

    fn timed_out(&self) {
        self.timeouts.fetch_add(1, Ordering::Relaxed);
    }

    fn failed(&self, why: &impl std::fmt::Display) {
        if self.errors.fetch_add(1, Ordering::Relaxed) < 5 {
            eprintln!("soak: {why}");
        }
    }
}

async fn block(shared: Arc<Shared>, mut line: MultiplexedConnection, seed: u64) {
    let mut rng = Rng::with_seed(seed);
    let mut turn = 0;
    while shared.is_running() {
        sleep(Duration::from_millis(rng.u64(PAUSE))).await;
        let number = rng.usize(..LOCKS);
        turn += 1;
        let owner = format!("{seed}-{turn}");
        let mut acquire = cmd("LOCK.ACQUIRE");
        acquire.arg(key(number)).arg(&owner).arg("LIMIT").arg(shared.ledgers[number].limit);
        acquire.arg("WAIT").arg(WAIT.as_millis() as u64);
        match acquire.query_async::<Option<u64>>(&mut line).await {
            Ok(Some(token)) => {
                shared.granted(number, token);
                sleep(Duration::from_millis(rng.u64(HOLD))).await;
                shared.releases(number);
                let release: RedisResult<Option<u64>> =
                    cmd("LOCK.RELEASE").arg(key(number)).arg(&owner).query_async(&mut line).await;
                match release {
                    Ok(Some(1)) => {}
                    other => shared.failed(&format!("release: {other:?}")),
                }
            }
            Ok(None) => shared.timed_out(),
            Err(why) => shared.failed(&why),
        }
    }
}

async fn ask_by_session(shared: Arc<Shared>, locks: Locks, seed: u64) {
    let mut rng = Rng::with_seed(seed);
    while shared.is_running() {
        sleep(Duration::from_millis(rng.u64(PAUSE))).await;
        let number = rng.usize(..LOCKS);
        let limit = u32::try_from(shared.ledgers[number].limit).unwrap_or(1);
        match locks.lock(key(number)).limit(limit).wait(WAIT).acquire().await {
            Ok(Some(guard)) => {
                shared.granted(number, guard.fence());
                sleep(Duration::from_millis(rng.u64(HOLD))).await;
                shared.releases(number);
                if let Err(why) = guard.release().await {
                    shared.failed(&why);
                }
            }
            Ok(None) => shared.timed_out(),
            Err(why) => shared.failed(&why),
        }
    }
}

fn key(number: usize) -> String {
    format!("soak:{number}")
}

/// The memory of one round: while clients run, and after they have stopped.
struct Round {
    used: Vec<u64>,
    left: u64,
    waiting: Vec<u64>,
    /// The memory of client processes: this one, one with threads, one with tasks.
    clients: [Vec<u64>; 3],
    wrong: Vec<String>,
}

/// Two equal rounds. The first leaves tables that keep their size. The second must leave no more.
fn soak(options: &Options) -> RedisResult<Row> {
    let server = Server::start();
    let before = memory(&server);
    let shared = Arc::new(Shared::new());
    let begun = Instant::now();
    let rounds = [round(&server, &shared, options)?, round(&server, &shared, options)?];
    Ok(summarize(&shared, before, &rounds, begun.elapsed()))
}

fn round(server: &Server, shared: &Arc<Shared>, options: &Options) -> RedisResult<Round> {
    let time = options.budget / 2;
    shared.over.store(false, Ordering::Relaxed);
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let begun = Instant::now();
    let (mut used, mut waiting, mut memory_of) = (Vec::new(), Vec::new(), [const { Vec::new() }; 3]);
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(WAIT * 2));
    let mut clients = Vec::new();
    for seed in 0..BLOCKED {
        let line = runtime.block_on(server.client().get_multiplexed_async_connection_with_config(&config))?;
        clients.push(runtime.spawn(block(Arc::clone(shared), line, seed as u64)));
    }
    let inside = runtime.enter();
    let sessions: Vec<Locks> = (0..SESSIONS).map(|_| Locks::new(server.client())).collect();
    for seed in BLOCKED..BLOCKED + TASKS {
        let locks = sessions[seed % SESSIONS].clone();
        clients.push(runtime.spawn(ask_by_session(Arc::clone(shared), locks, seed as u64)));
    }
    let others = Others::start(shared, (server.addr(), server.dir()), options, PROGRAMS, CLIENTS_OF_ONE)?;
    drop((inside, sessions));
    for sample in 1..=SAMPLES {
        thread::sleep((time * sample / SAMPLES).saturating_sub(begun.elapsed()));
        used.push(memory(server));
        waiting.push(number(server, "holdfast", "holdfast_waiters"));
        let clients = [resident("self")].into_iter().chain(others.memory());
        for (samples, memory) in memory_of.iter_mut().zip(clients) {
            samples.push(memory);
        }
        let last = |samples: &Vec<u64>| samples.last().map_or(0, |bytes| bytes / 1024);
        eprintln!(
            "soak: {:?}, {} kB, {} waiting, {} grants; clients {:?} kB",
            begun.elapsed(),
            last(&used),
            waiting.last().copied().unwrap_or(0),
            shared.grants.load(Ordering::Relaxed),
            memory_of.each_ref().map(last),
        );
    }
    shared.over.store(true, Ordering::Relaxed);
    let others_ended = others.end(WAIT * 2);
    let all_ended = runtime.block_on(async {
        let all = async {
            for client in clients {
                let _ = client.await;
            }
        };
        tokio::time::timeout(WAIT * 2, all).await.is_ok()
    });
    runtime.shutdown_timeout(Duration::from_secs(5));
    let mut wrong = vec![
        (!all_ended, "a client did not stop"),
        (!others_ended, "a program in Python failed"),
        (!nothing_left(server), "holds or waits were left when all clients had stopped"),
    ];
    wrong.retain(|(is_wrong, _)| *is_wrong);
    let wrong = wrong.into_iter().map(|(_, what)| what.to_owned()).collect();
    Ok(Round { used, left: memory(server), waiting, clients: memory_of, wrong })
}

fn nothing_left(server: &Server) -> bool {
    eventually(Duration::from_secs(10), || {
        ["holdfast_waiters", "holdfast_bound_holds", "holdfast_sessions"]
            .iter()
            .all(|field| server.info("holdfast", field).is_none_or(|value| value == "0"))
            && server.info("clients", "connected_clients").as_deref() == Some("1")
            && redis::cmd("DBSIZE").query::<u64>(&mut server.connect()).is_ok_and(|keys| keys == 0)
    })
}

fn summarize(shared: &Shared, before: u64, rounds: &[Round; 2], took: Duration) -> Row {
    let [first, second] = rounds;
    let ([early, late], of_one) =
        apart_from_waits(rounds.each_ref().map(|round| (&round.waiting[..], &round.used[..])));
    let mut wrong: Vec<String> = rounds.iter().flat_map(|round| round.wrong.iter().cloned()).collect();
    let grown = [("while clients run", early, late, 0), ("after they have stopped", first.left, second.left, TABLES)];
    for (what, one, other, tables) in grown {
        if other > one + one / MAY_GROW_BY + tables {
            wrong.push(format!("memory {what}: {one} bytes in the first round, {other} in the second"));
        }
    }
    let names = ["clients in Rust", "threads in Python", "tasks in Python"];
    let mut of_clients = Vec::new();
    for (index, name) in names.iter().enumerate() {
        for round in rounds {
            let (early, late) = halves(&round.clients[index]);
            of_clients.push(format!("{name} {} and {}", early / 1024, late / 1024));
            if late > early + early / MAY_GROW_BY + TABLES {
                wrong.push(format!("memory of {name}: {early} bytes, {late} later in the same round"));
            }
        }
    }
    for what in &wrong {
        eprintln!("soak: {what}");
    }
    let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let grants = load(&shared.grants);
    Row {
        scenario: format!("Soak, {CLIENTS} clients"),
        runs: 2,
        faults: 0,
        requests: 2 * grants + load(&shared.timeouts),
        violations: wrong.len() as u64 + load(&shared.wrong) + load(&shared.errors),
        note: format!(
            "{} s, {grants} grants, {} timed out, {} and {} waiting (median of each half); memory {} kB before, {} and {} at \
             work without {} for each that waits, {} and {} when all had gone; tokens at most {} µs ahead of the clock; processes of clients in each half, \
             early and late, kB: {}",
            took.as_secs(),
            load(&shared.timeouts),
            median(&first.waiting),
            median(&second.waiting),
            before / 1024,
            early / 1024,
            late / 1024,
            of_one / 1024,
            first.left / 1024,
            second.left / 1024,
            load(&shared.ahead),
            of_clients.join(", "),
        ),
    }
}

fn memory(server: &Server) -> u64 {
    number(server, "memory", "used_memory")
}

fn number(server: &Server, section: &str, field: &str) -> u64 {
    server.info(section, field).and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// The memory of each round without waiters, and of one waiter: how many wait depends on the load of the machine. (Least squares:
/// one slope for both rounds, and an offset for each.)
fn apart_from_waits(rounds: [(&[u64], &[u64]); 2]) -> ([u64; 2], u64) {
    let mean = |values: &[u64]| values.iter().sum::<u64>() as f64 / values.len().max(1) as f64;
    let means = rounds.map(|(waiting, used)| (mean(waiting), mean(used)));
    let (mut both, mut square) = (0.0, 0.0);
    for ((waiting, used), (middle, height)) in rounds.iter().zip(means) {
        for (&waiting, &used) in waiting.iter().zip(*used) {
            let away = waiting as f64 - middle;
            both += away * (used as f64 - height);
            square += away * away;
        }
    }
    let of_one = if square > 0.0 { both / square } else { 0.0 };
    (means.map(|(middle, height)| (height - of_one * middle) as u64), of_one as u64)
}

/// The median of the second quarter, when all clients run, and that of the last quarter.
fn halves(samples: &[u64]) -> (u64, u64) {
    let quarter = samples.len() / 4;
    (median(&samples[quarter..2 * quarter]), median(&samples[3 * quarter..]))
}

fn median(values: &[u64]) -> u64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples of a server that uses `base`, and 20 kB for each waiter.
    fn samples(waiting: &[u64], base: u64) -> (Vec<u64>, Vec<u64>) {
        (waiting.to_vec(), waiting.iter().map(|count| base + 20_000 * count).collect())
    }

    #[test]
    fn waiting_clients_count_as_no_growth() {
        let (first, second) = (samples(&[50, 80, 100], 12_000_000), samples(&[100, 380, 90, 200], 12_000_000));
        let rounds = [(&first.0[..], &first.1[..]), (&second.0[..], &second.1[..])];
        assert_eq!(apart_from_waits(rounds), ([12_000_000, 12_000_000], 20_000));
    }

    #[test]
    fn growth_is_found_despite_waiting_clients() {
        let (first, second) = (samples(&[50, 80, 100], 12_000_000), samples(&[40, 30, 20], 13_000_000));
        let rounds = [(&first.0[..], &first.1[..]), (&second.0[..], &second.1[..])];
        assert_eq!(apart_from_waits(rounds), ([12_000_000, 13_000_000], 20_000));
    }

    #[test]
    fn growth_is_found_without_waiting_clients() {
        let (first, second) = (samples(&[0, 0], 12_000_000), samples(&[0], 13_000_000));
        let rounds = [(&first.0[..], &first.1[..]), (&second.0[..], &second.1[..])];
        assert_eq!(apart_from_waits(rounds), ([12_000_000, 13_000_000], 0));
    }
}
