//! Two hundred connections use twenty locks, with faults of every kind. Afterwards, the tests check what each connection
//! recorded.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;
use std::time::Duration;

use redis::Value;
use support::{Random, Raw, Server, until};

use crate::common::{info_number, unix_micros};
use crate::lines::setting;
use crate::waiter::{Commands, SOON, blocked_clients, figure, until_no_waiters};

const CONNECTIONS: usize = 200;
const KEYS: u64 = 20;
const LEASES: std::ops::Range<u64> = 20..400;
const WAITS: std::ops::Range<u64> = 1..500;
/// If a requested lock was free for longer, a wake-up was lost. Far longer than a busy machine takes.
const LOST: i64 = 5_000_000;
/// A deadline is in milliseconds, a token in microseconds.
const MILLI: i64 = 1000;
/// By how many bytes the server may have grown: tables that were larger for a while.
const GROWTH: i64 = 256 << 10;

type Micros = i64;

/// A hold, as its holder recorded it, by the clock that servers and tests share.
#[derive(Clone, Copy, Debug)]
struct Hold {
    key: u64,
    owner: usize,
    /// Just before the grant, when the server read the clock.
    token: i64,
    asked: Micros,
    heard: Micros,
    /// When the holder stopped using it: before its release, or at its deadline.
    end: Micros,
    /// When it had ended on the server, at the latest.
    gone: Micros,
}

/// A `DEL` or `LOCK.FORCE`, and when it happened.
#[derive(Clone, Copy, Debug)]
struct Forced {
    key: u64,
    from: Micros,
    to: Micros,
}

/// The outcomes of one connection's requests.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    granted: u64,
    in_vain: u64,
    unblocked: u64,
    cut_off: u64,
}

struct Stress {
    server: Server,
    /// The connections' client ids; 0 for a closed connection.
    clients: Vec<AtomicI64>,
    over: AtomicBool,
}

#[test]
fn random_clients_never_hold_a_lock_twice() {
    let duration = Duration::from_secs(setting("HOLDFAST_STRESS_SECONDS", 5));
    let stress = Stress {
        server: Server::start(),
        clients: (0..CONNECTIONS).map(|_| AtomicI64::new(0)).collect(),
        over: AtomicBool::new(false),
    };
    let mut random = Random::new();
    // The server allocates some memory once and keeps it. This happens before the measurement.
    stress.run(Duration::from_secs(1), &mut random);
    let before = settled_memory(&stress.server);
    let (holds, forced, tally) = stress.run(duration, &mut random);
    figure(format_args!(
        "stress: {} grants ({} holds known), {} not granted, {} waits unblocked, {} connections closed, {} locks forced, {} s",
        tally.granted,
        holds.len(),
        tally.in_vain,
        tally.unblocked,
        tally.cut_off,
        forced.len(),
        duration.as_secs()
    ));
    assert!(tally.granted > CONNECTIONS as u64 && tally.unblocked > 0 && tally.cut_off > 0, "{tally:?}");

    assert_tokens_increase(&holds);
    let longest_gap = (0..KEYS).map(|key| check_key(key, &holds, &forced)).max().unwrap_or_default();
    figure(format_args!("stress: longest time a requested lock was free: {longest_gap} µs"));
    assert_nothing_left(&stress.server, before);
}

impl Stress {
    /// Runs all workers for this long, and then until every request has ended.
    fn run(&self, duration: Duration, random: &mut Random) -> (Vec<Hold>, Vec<Forced>, Tally) {
        self.over.store(false, Ordering::SeqCst);
        let (workers, forced) = thread::scope(|threads| {
            let workers: Vec<_> = (0..CONNECTIONS)
                .map(|number| {
                    let mut worker = Worker::new(self, number, random.fork());
                    threads.spawn(move || worker.work())
                })
                .collect();
            let mut faults = random.fork();
            let faults = threads.spawn(move || self.inject_faults(&mut faults));
            thread::sleep(duration);
            self.over.store(true, Ordering::SeqCst);
            let forced = faults.join().expect("the faults-maker came to its end");
            let workers: Vec<_> = workers.into_iter().map(|it| it.join().expect("every request ended")).collect();
            (workers, forced)
        });
        let mut all = Tally::default();
        let mut holds = Vec::new();
        for (its, tally) in workers {
            holds.extend(its);
            all.granted += tally.granted;
            all.in_vain += tally.in_vain;
            all.unblocked += tally.unblocked;
            all.cut_off += tally.cut_off;
        }
        (holds, forced, all)
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Stalls the server for `millis` ms, so that it finds many events at once.
    fn stall(&self, millis: u64) {
        self.server.stop();
        thread::sleep(Duration::from_millis(millis));
        self.server.cont();
    }

    /// Kills and unblocks clients, forces locks, and stalls the server.
    fn inject_faults(&self, random: &mut Random) -> Vec<Forced> {
        let mut client = self.server.raw();
        let mut forced = Vec::new();
        while !self.is_over() {
            thread::sleep(Duration::from_millis(random.below(10)));
            let victim = random.pick(&self.clients).load(Ordering::SeqCst);
            let key = random.below(KEYS);
            if random.chance(2) {
                self.stall(random.below(150));
            }
            match random.below(6) {
                0 | 1 if victim > 0 => drop(client.run(&format!("CLIENT KILL ID {victim}"))),
                2 => drop(client.run_ok(&format!("CLIENT UNBLOCK {victim}"))),
                3 => drop(client.run_ok(&format!("CLIENT UNBLOCK {victim} ERROR"))),
                4 => forced.push(force(&mut client, key, "DEL")),
                _ => forced.push(force(&mut client, key, "LOCK.FORCE")),
            }
        }
        forced
    }
}

fn force(client: &mut Raw, key: u64, command: &str) -> Forced {
    let from = unix_micros();
    client.run_ok(&format!("{command} key-{key}"));
    Forced { key, from, to: unix_micros() }
}

struct Worker<'a> {
    stress: &'a Stress,
    number: usize,
    random: Random,
    raw: Raw,
    holds: Vec<Hold>,
    tally: Tally,
}

impl<'a> Worker<'a> {
    fn new(stress: &'a Stress, number: usize, random: Random) -> Self {
        let raw = stress.server.raw();
        Self { stress, number, random, raw, holds: Vec::new(), tally: Tally::default() }
    }

    fn work(&mut self) -> (Vec<Hold>, Tally) {
        self.connect();
        while !self.stress.is_over() {
            if self.request().is_none() {
                self.tally.cut_off += 1;
                self.connect();
            }
        }
        self.stress.clients[self.number].store(0, Ordering::SeqCst);
        (std::mem::take(&mut self.holds), self.tally)
    }

    fn connect(&mut self) {
        loop {
            self.stress.clients[self.number].store(0, Ordering::SeqCst);
            self.raw = self.stress.server.raw();
            // Even this may fail: the fault injector may kill the connection already.
            if let Some(Value::Int(id)) = self.run("CLIENT ID") {
                self.stress.clients[self.number].store(id, Ordering::SeqCst);
                return;
            }
        }
    }

    /// The reply, or `None` if the connection was closed.
    fn run(&mut self, line: &str) -> Option<Value> {
        self.raw.send(&crate::common::words(line)).ok()?;
        match self.raw.read() {
            Ok(reply) => Some(reply),
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => panic!("{line}: no reply"),
            Err(_) => None,
        }
    }

    /// One request and its consequences; `None` if the connection was closed.
    fn request(&mut self) -> Option<()> {
        let (key, owner) = (self.random.below(KEYS), self.number);
        let lease = LEASES.start + self.random.below(LEASES.end - LEASES.start);
        let wait = match self.random.below(10) {
            0 => String::new(),
            1..4 => " WAIT 0".to_owned(),
            _ => format!(" WAIT {}", WAITS.start + self.random.below(WAITS.end - WAITS.start)),
        };
        let line = format!("LOCK.ACQUIRE key-{key} owner-{owner} LEASE {lease}{wait}");
        if self.random.chance(8) {
            self.disconnect_without_reply(&line);
            return None;
        }
        let asked = unix_micros();
        let reply = self.run(&line)?;
        let heard = unix_micros();
        match reply {
            Value::Int(token) => {
                self.tally.granted += 1;
                self.hold(Hold { key, owner, token, asked, heard, end: 0, gone: 0 }, lease)
            }
            Value::Nil => {
                self.tally.in_vain += 1;
                Some(())
            }
            // It closes a cycle if another client waits for a lock that this one left to its lease.
            Value::ServerError(error) if ["UNBLOCKED", "DEADLOCK"].contains(&error.code()) => {
                self.tally.in_vain += 1;
                Some(())
            }
            // An earlier request of this owner on a closed connection was granted, and the server has not noticed the end yet.
            Value::ServerError(error) if error.details().is_some_and(|why| why.contains("is being confirmed")) => {
                self.tally.in_vain += 1;
                Some(())
            }
            other => panic!("{line}: {other:?}"),
        }
    }

    /// Closes or resets the connection around the time of the grant.
    fn disconnect_without_reply(&mut self, line: &str) {
        self.tally.unblocked += 1;
        self.stress.clients[self.number].store(0, Ordering::SeqCst);
        let mut raw = std::mem::replace(&mut self.raw, self.stress.server.raw());
        // The fault injector may have closed it already.
        let _ = raw.send(&crate::common::words(line));
        thread::sleep(Duration::from_micros(self.random.below(20_000)));
        if self.random.chance(50) { raw.reset() } else { raw.close() }
    }

    /// Holds the lock for a while, and then releases it, lets it expire, or disconnects.
    fn hold(&mut self, mut hold: Hold, lease: u64) -> Option<()> {
        let Hold { key, owner, token, .. } = hold;
        // An unread grant of this owner may exist: then this was a re-entry, which keeps the older token and the later
        // deadline.
        let granted = token.max(hold.asked);
        let deadline = granted + lease as i64 * MILLI - MILLI;
        let latest = hold.heard + LEASES.end as i64 * MILLI;
        let pause = if self.random.chance(10) { lease + 5 } else { self.random.below(20) };
        thread::sleep(Duration::from_millis(pause));
        let release = unix_micros();
        hold.end = release.min(deadline);
        let reply = match self.random.below(10) {
            0 => None,
            1..5 => Some(self.run(&format!("LOCK.RELEASE key-{key} owner-{owner} TOKEN {token} ALL"))),
            _ => Some(self.run(&format!("LOCK.RELEASE key-{key} owner-{owner} ALL"))),
        };
        hold.gone = if matches!(reply, Some(Some(_))) { unix_micros().min(latest) } else { latest };
        self.holds.push(hold);
        match reply {
            Some(None) => None,
            Some(Some(reply)) => {
                assert!(matches!(reply, Value::Nil | Value::Int(1)), "{reply:?}");
                Some(())
            }
            None => Some(()),
        }
    }
}

/// A request that is sent after a token was read gets a greater token, for all keys. Tokens are unique.
fn assert_tokens_increase(holds: &[Hold]) {
    let mut of: HashMap<i64, (u64, usize)> = HashMap::new();
    for hold in holds {
        let known = of.insert(hold.token, (hold.key, hold.owner));
        assert!(known.is_none_or(|it| it == (hold.key, hold.owner)), "one token for {known:?} and {hold:?}");
    }
    let mut heard: Vec<&Hold> = holds.iter().collect();
    heard.sort_by_key(|hold| hold.heard);
    let mut asked: Vec<&Hold> = holds.iter().collect();
    asked.sort_by_key(|hold| hold.asked);
    let mut newest: HashMap<u64, i64> = HashMap::new();
    let mut heard = heard.into_iter().peekable();
    for hold in asked {
        while let Some(earlier) = heard.next_if(|it| it.heard < hold.asked) {
            let newest = newest.entry(earlier.key).or_default();
            *newest = earlier.token.max(*newest);
        }
        // The same token if the owner still held the lock.
        let before = newest.get(&hold.key).copied().unwrap_or_default();
        assert!(hold.token >= before, "after {before} was read: {hold:?}");
    }
}

/// No two owners held the lock at the same time. Returns the longest time that the lock was free while its next holder
/// waited.
fn check_key(key: u64, holds: &[Hold], forced: &[Forced]) -> i64 {
    let mut holds: Vec<Hold> = holds.iter().filter(|hold| hold.key == key).copied().collect();
    holds.sort_by_key(|hold| (hold.token, hold.asked));
    let forced: Vec<&Forced> = forced.iter().filter(|it| it.key == key).collect();
    for hold in &mut holds {
        // The holder of a forced lock could not know: it held the lock until then.
        let force = forced.iter().filter(|it| it.to >= hold.token && it.from <= hold.end);
        if let Some(first) = force.map(|it| it.from).min() {
            hold.end = first;
        }
    }
    let mut longest = 0;
    for (before, next) in holds.iter().zip(holds.iter().skip(1)).filter(|(before, next)| before.token != next.token) {
        // Not by the token: a server that was paused between reading the clock and the key returns an earlier one.
        assert!(before.end <= next.heard, "two holders for {} µs:\n{before:?}\n{next:?}", before.end - next.heard);
        if next.asked < before.end {
            let gap = next.token - before.gone;
            assert!(gap < LOST, "free for {gap} µs:\n{before:?}\n{next:?}");
            longest = gap.max(longest);
        }
    }
    longest
}

fn assert_nothing_left(server: &Server, memory_before: i64) {
    until_no_waiters(server);
    assert_eq!(blocked_clients(server), 0);
    let mut client = server.raw();
    until(SOON, "every lease has expired", || client.run("DBSIZE") == Value::Int(0));
    for field in ["waiters", "contended_locks", "bound_holds"] {
        assert_eq!(info_number(server, "holdfast", &format!("holdfast_{field}")), 0, "{field}");
    }
    let grown = settled_memory(server) - memory_before;
    figure(format_args!("stress: memory grown by {grown} bytes"));
    assert!(grown < GROWTH, "memory has grown by {grown} bytes");
}

/// The server's memory once it has freed its caches.
fn settled_memory(server: &Server) -> i64 {
    let mut before = i64::MAX;
    until(SOON, "memory has settled", || {
        thread::sleep(Duration::from_millis(500));
        let now = info_number(server, "memory", "used_memory");
        (now - std::mem::replace(&mut before, now)).abs() < 16 << 10
    });
    before
}

fn some_hold(owner: usize, from: Micros, to: Micros) -> Hold {
    Hold { key: 0, owner, token: from, asked: from, heard: from + 10, end: to, gone: to }
}

#[test]
#[should_panic(expected = "two holders for 490 µs")]
fn check_finds_two_holders() {
    check_key(0, &[some_hold(1, 10_000, 20_500), some_hold(2, 20_000, 30_000)], &[]);
}

#[test]
fn check_allows_forced_locks() {
    let forced = Forced { key: 0, from: 19_900, to: 20_100 };
    check_key(0, &[some_hold(1, 10_000, 20_500), some_hold(2, 20_000, 30_000)], &[forced]);
}

#[test]
#[should_panic(expected = "free for")]
fn check_finds_lost_wake_up() {
    let late = Hold { asked: 15_000, ..some_hold(2, 20_000 + LOST, 30_000 + LOST) };
    check_key(0, &[some_hold(1, 10_000, 20_000), late], &[]);
}

#[test]
#[should_panic(expected = "was read")]
fn check_finds_token_that_does_not_increase() {
    let stale = Hold { token: 9_999, ..some_hold(2, 20_000, 30_000) };
    assert_tokens_increase(&[some_hold(1, 10_000, 20_000), stale]);
}

#[test]
#[should_panic(expected = "one token for")]
fn check_finds_repeated_token() {
    let twin = Hold { key: 1, ..some_hold(2, 10_000, 20_000) };
    assert_tokens_increase(&[some_hold(1, 10_000, 20_000), twin]);
}
