//! Random requests for several of ten locks from fifty connections: mutual exclusion, fairness, and no wait without an end.

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis::Value;
use support::{Random, Raw, Server};

use crate::lines::{Commands, Reply, encode, setting};

const CONNECTIONS: usize = 50;
const KEYS: usize = 10;
const NOBODY: usize = usize::MAX;

/// The state of one lock, as its holders report it.
struct Inside {
    holder: AtomicUsize,
    token: AtomicI64,
}

impl Inside {
    fn enter(&self, who: usize, token: i64) {
        let before = self.holder.swap(who, Ordering::SeqCst);
        assert_eq!(before, NOBODY, "{who} was granted the lock while {before} held it");
        let last = self.token.swap(token, Ordering::SeqCst);
        assert!(token > last, "token {token} follows {last}");
    }

    fn leave(&self, who: usize) {
        assert_eq!(self.holder.swap(NOBODY, Ordering::SeqCst), who);
    }
}

/// What one connection counted.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    granted: u64,
    refused: u64,
    timed_out: u64,
    broken: u64,
    longest: Duration,
    passed_by: i64,
}

#[test]
fn random_requests_for_several_locks_never_overlap() {
    let duration = Duration::from_secs(setting("HOLDFAST_STRESS_SECONDS", 4));
    let server = Server::start();
    let inside: Vec<Inside> =
        (0..KEYS).map(|_| Inside { holder: AtomicUsize::new(NOBODY), token: AtomicI64::new(0) }).collect();
    let mut random = Random::new();
    let end = Instant::now() + duration;
    let tallies: Vec<Tally> = thread::scope(|scope| {
        let threads: Vec<_> = (0..CONNECTIONS)
            .map(|who| {
                let mut worker = Worker::new(who, &server, &inside, random.fork());
                scope.spawn(move || {
                    while Instant::now() < end {
                        worker.step();
                    }
                    worker.tally
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no connection saw anything wrong")).collect()
    });

    let sum = |field: fn(&Tally) -> u64| tallies.iter().map(field).sum::<u64>();
    let longest = tallies.iter().map(|tally| tally.longest).max().unwrap_or_default();
    let passed_by = tallies.iter().map(|tally| tally.passed_by).max().unwrap_or_default();
    println!(
        "{} grants, {} refusals, {} waits timed out, {} connections broken; longest wait {longest:?}, {passed_by} before it",
        sum(|tally| tally.granted),
        sum(|tally| tally.refused),
        sum(|tally| tally.timed_out),
        sum(|tally| tally.broken),
    );
    assert!(tallies.iter().all(|tally| tally.granted > 0), "a connection got no lock: {tallies:?}");
    assert!(passed_by > 5, "too little contention");

    let mut viewer = server.raw();
    let left = |viewer: &mut Raw| (0..KEYS).filter(|key| !viewer.run(&format!("LOCK.INFO k{key}")).is_null()).count();
    support::until(Duration::from_secs(30), "no holds and waits are left", || left(&mut viewer) == 0);
}

struct Worker<'a> {
    who: usize,
    server: &'a Server,
    inside: &'a [Inside],
    random: Random,
    connection: Raw,
    tally: Tally,
}

impl<'a> Worker<'a> {
    fn new(who: usize, server: &'a Server, inside: &'a [Inside], random: Random) -> Self {
        Self { who, server, inside, random, connection: server.raw(), tally: Tally::default() }
    }

    fn step(&mut self) {
        let all: Vec<usize> = (0..KEYS).collect();
        let count = *self.random.pick(&[1, 1, 2, 2, 3, 4]);
        let keys = self.random.some(&all, count);
        match self.random.index(20) {
            0 => self.abandon(&keys),
            1..4 => self.request(&keys, ""),
            4..6 => self.request(&keys, " WAIT 3"),
            _ => self.request(&keys, " WAIT 0"),
        }
        thread::sleep(Duration::from_micros(self.random.index(4000) as u64));
    }

    /// Sends a request, and disconnects before the reply.
    fn abandon(&mut self, keys: &[usize]) {
        self.connection.send_line(&self.line(keys, " WAIT 0"));
        thread::sleep(Duration::from_micros(self.random.index(3000) as u64));
        self.reconnect();
    }

    /// Counts the grants ahead of this one. Every holder increments a counter of the key before it releases. The first reading is
    /// in the same packet as the request.
    fn request(&mut self, keys: &[usize], wait: &str) {
        let names = keys.iter().map(|key| format!("count:{key}")).collect::<Vec<_>>().join(" ");
        let (count, line) = (format!("MGET {names}"), self.line(keys, wait));
        let sent = Instant::now();
        self.connection.send_bytes(&[encode(&count), encode(&line)].concat()).expect("request sent");
        let before = counts(&self.connection.read().expect("counts"));
        let reply = self.connection.read().unwrap_or_else(|error| panic!("{line} is stuck: {error}"));
        if reply.is_null() {
            *(if wait.is_empty() { &mut self.tally.refused } else { &mut self.tally.timed_out }) += 1;
            return;
        }
        let token = reply.token();
        for &key in keys {
            self.inside[key].enter(self.who, token);
        }
        self.tally.granted += 1;
        self.tally.longest = self.tally.longest.max(sent.elapsed());
        let after = counts(&self.connection.run(&count));
        for (before, after) in before.iter().zip(after) {
            let passed_by = after - before;
            // Each other connection may have been ahead once. Its next request is behind this one.
            assert!(passed_by < CONNECTIONS as i64, "{passed_by} requests were granted before {line}");
            self.tally.passed_by = self.tally.passed_by.max(passed_by);
        }
        self.work(keys);
        self.give_back(keys, token);
    }

    fn work(&mut self, keys: &[usize]) {
        let lines: Vec<String> = keys.iter().map(|key| format!("INCR count:{key}")).collect();
        self.connection.run_all(&lines);
        if self.random.chance(30) {
            thread::sleep(Duration::from_micros(self.random.index(1000) as u64));
        }
    }

    fn give_back(&mut self, keys: &[usize], token: i64) {
        for &key in keys {
            self.inside[key].leave(self.who);
        }
        if self.random.chance(5) {
            self.reconnect();
            return;
        }
        let names = keys.iter().map(|key| format!("k{key}")).collect::<Vec<_>>().join(" ");
        let line = format!("LOCK.MRELEASE {} {names} * TOKEN {token}", keys.len());
        let left = self.connection.run(&line);
        assert!(left.items().iter().all(|left| *left == Value::Int(1)), "{line}: {left:?}");
    }

    fn reconnect(&mut self) {
        std::mem::replace(&mut self.connection, self.server.raw()).reset();
        self.tally.broken += 1;
    }

    fn line(&self, keys: &[usize], wait: &str) -> String {
        let names = keys.iter().map(|key| format!("k{key}")).collect::<Vec<_>>().join(" ");
        match keys.len() {
            1 => format!("LOCK.ACQUIRE {names} * LEASE 600000 EPHEMERAL{wait}"),
            count => format!("LOCK.MACQUIRE {count} {names} * LEASE 600000 EPHEMERAL{wait}"),
        }
    }
}

fn counts(reply: &Value) -> Vec<i64> {
    let count = |value: &Value| if value.is_null() { 0 } else { value.text().parse().expect("a count") };
    reply.items().iter().map(count).collect()
}
