//! Clients that acquire, wait, renew, write and release during faults, and record what they see.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use redis::{Client, Cmd, Connection, ErrorKind, RedisError, RedisResult};

use crate::clock::now;
use crate::history::{Assurance, Epoch, Event, Grant, Limit, Micros, Outcome, Request};

/// Concurrent clients.
pub const CLIENTS: u64 = 6;

const LEASE: Duration = Duration::from_millis(1500);
const WAIT: Duration = Duration::from_millis(100);
/// How long a client repeats one request before it times out.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// The timeout of one attempt.
const SILENCE: Duration = Duration::from_secs(5);

/// The state that the clients share.
pub struct Shared {
    /// Where the server is.
    pub address: SocketAddr,
    /// Set when the clients must stop.
    pub over: AtomicBool,
    /// While set, clients send requests without `WAIT`.
    pub no_waits: AtomicBool,
    /// Grants so far, which show the fault injector that clients make progress.
    pub grants: AtomicU64,
    /// Whether a restart may lose acknowledged writes. If so, each server run has its own epoch.
    pub may_lose: bool,
}

impl Shared {
    fn is_running(&self) -> bool {
        !self.over.load(Ordering::Relaxed)
    }
}

/// The results of one client.
#[derive(Default)]
pub struct Record {
    /// Its record.
    pub events: Vec<Event>,
    /// Requests sent, counting each attempt.
    pub requests: u64,
    /// Holds that the server lost within their lease.
    pub lost: u64,
    /// Errors that no fault explains.
    pub odd: Vec<String>,
}

/// The contended locks, with their limits.
pub fn locks() -> Vec<(String, Limit)> {
    let mutexes = (0..4).map(|n| (format!("mutex:{n}"), Limit::Of(1)));
    let others = [("semaphore".to_owned(), Limit::Of(2)), ("readers".to_owned(), Limit::Shared)];
    mutexes.chain(others).collect()
}

/// Runs until `stop` is set.
pub fn work(shared: &Shared, number: u64, seed: u64) -> Record {
    let mut worker = Worker {
        shared,
        name: format!("client-{number}"),
        rng: Rng::with_seed(seed),
        line: None,
        epoch: None,
        hold: 0,
        record: Record::default(),
    };
    while shared.is_running() {
        worker.run_once();
    }
    worker.record
}

struct Worker<'a> {
    shared: &'a Shared,
    name: String,
    rng: Rng,
    line: Option<Connection>,
    epoch: Epoch,
    hold: u64,
    record: Record,
}

/// A reply, and when its request was sent. With several `tries`, an earlier one may have been executed too.
struct Answer {
    value: Option<u64>,
    first_sent: Micros,
    sent: Micros,
    tries: u32,
}

/// A hold.
struct ActiveHold {
    key: String,
    token: u64,
    until: Micros,
}

impl Worker<'_> {
    /// Acquires, uses and releases one lock.
    fn run_once(&mut self) {
        let locks = locks();
        let (key, limit) = &locks[self.rng.usize(..locks.len())];
        let Some(mut held) = self.acquire(key, *limit) else {
            return;
        };
        for _ in 0..self.rng.u32(..3) {
            self.write();
            thread::sleep(Duration::from_micros(self.rng.u64(..3000)));
            if self.rng.u32(..4) == 0 && !self.renew(&mut held) {
                return;
            }
        }
        // Sometimes a client disappears, and its lease has to expire.
        if self.rng.u32(..400) > 0 {
            self.release(&held);
        }
    }

    fn acquire(&mut self, key: &str, limit: Limit) -> Option<ActiveHold> {
        // A new owner for each hold, so that an abandoned one is not re-entered.
        self.hold += 1;
        let owner = format!("{}/{}", self.name, self.hold);
        let wait = if self.shared.no_waits.load(Ordering::Relaxed) { Duration::ZERO } else { WAIT };
        let limit = match limit {
            // All attempts share one owner: a writer among readers.
            Limit::Shared if self.rng.u32(..4) == 0 => Limit::Of(1),
            other => other,
        };
        let mut command = redis::cmd("LOCK.ACQUIRE");
        command.arg(key).arg(&owner).arg("LEASE").arg(LEASE.as_millis() as u64);
        if !wait.is_zero() {
            command.arg("WAIT").arg(wait.as_millis() as u64);
        }
        // HOLDS: an attempt without a reply may be repeated.
        command.arg("HOLDS").arg(1);
        match limit {
            Limit::Shared => command.arg("SHARED"),
            Limit::Of(n) => command.arg("LIMIT").arg(n),
        };
        let answer = self.ask(&command, wait)?;
        let Some(token) = answer.value else {
            // Without `WAIT`, pause between requests.
            thread::sleep(Duration::from_millis(u64::from(wait.is_zero())));
            return None;
        };
        let replied = now();
        self.shared.grants.fetch_add(1, Ordering::Relaxed);
        let lease = LEASE.as_micros() as Micros;
        self.record.events.push(Event::Grant(Grant {
            hold: self.hold,
            key: key.to_owned(),
            owner,
            limit,
            token,
            sent: answer.first_sent,
            began: answer.sent,
            replied,
            lease,
            epoch: self.epoch.clone(),
            assurance: Assurance::Plain,
        }));
        Some(ActiveHold { key: key.to_owned(), token, until: answer.sent + lease })
    }

    /// False if the hold has ended.
    fn renew(&mut self, held: &mut ActiveHold) -> bool {
        let owner = self.owner();
        let mut command = redis::cmd("LOCK.RENEW");
        command.arg(&held.key).arg(&owner).arg("TOKEN").arg(held.token).arg("LEASE").arg(LEASE.as_millis() as u64);
        let Some(answer) = self.ask(&command, Duration::ZERO) else {
            self.end();
            return false;
        };
        if answer.value.is_none() {
            self.lost_unless_over(held);
            self.end();
            return false;
        }
        let lease = LEASE.as_micros() as Micros;
        held.until = answer.sent + lease;
        self.record.events.push(Event::Renewed {
            hold: self.hold,
            sent: answer.sent,
            replied: now(),
            lease,
            epoch: self.epoch.clone(),
            assurance: Assurance::Plain,
        });
        true
    }

    fn release(&mut self, held: &ActiveHold) {
        self.end();
        let owner = self.owner();
        let mut command = redis::cmd("LOCK.RELEASE");
        command.arg(&held.key).arg(&owner).arg("TOKEN").arg(held.token).arg("ALL");
        if let Some(answer) = self.ask(&command, Duration::ZERO)
            && answer.value.is_none()
            && answer.tries == 1
        {
            self.lost_unless_over(held);
        }
    }

    fn owner(&self) -> String {
        format!("{}/{}", self.name, self.hold)
    }

    fn write(&mut self) {
        self.record.events.push(Event::Write { hold: self.hold, at: now() });
    }

    fn end(&mut self) {
        self.record.events.push(Event::Ended { hold: self.hold, at: now() });
    }

    /// The server replied that the lock is not held: correct if the lease has expired, by this client's clock and a margin.
    fn lost_unless_over(&mut self, held: &ActiveHold) {
        const MARGIN: Micros = 5_000;
        if now() + MARGIN < held.until {
            self.record.lost += 1;
        }
    }

    /// Repeats the request until a reply comes, over as many connections as it takes. `None`: the client timed out.
    fn ask(&mut self, command: &Cmd, allowed: Duration) -> Option<Answer> {
        let first_sent = now();
        let mut tries = 0;
        let mut answer = None;
        while now() < first_sent + REQUEST_TIMEOUT.as_micros() as Micros {
            let sent = now();
            tries += 1;
            match self.attempt(command) {
                Ok(value) => {
                    answer = Some(Answer { value, first_sent, sent, tries });
                    break;
                }
                Err(error) => self.handle_error(&error),
            }
        }
        let outcome = match &answer {
            Some(Answer { value: Some(_), .. }) => Outcome::Granted,
            Some(_) => Outcome::Refused,
            None => Outcome::Unanswered,
        };
        self.record.events.push(Event::Request(Request {
            sent: first_sent,
            allowed: allowed.as_micros() as Micros,
            ended: Some(now()),
            outcome,
        }));
        answer
    }

    fn attempt(&mut self, command: &Cmd) -> RedisResult<Option<u64>> {
        if self.line.is_none() {
            self.line = Some(self.connect()?);
        }
        self.record.requests += 1;
        match &mut self.line {
            Some(line) => command.query(line),
            None => unreachable!("connected above"),
        }
    }

    fn connect(&mut self) -> RedisResult<Connection> {
        let client = Client::open(format!("redis://{}", self.shared.address))?;
        let mut line = client.get_connection_with_timeout(SILENCE)?;
        line.set_read_timeout(Some(SILENCE))?;
        let run: String = redis::cmd("INFO").arg("server").query(&mut line)?;
        let run = run.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap_or_default().to_owned();
        let life = if self.shared.may_lose { run.split(':').next().unwrap_or_default() } else { "the server" };
        self.epoch = Some(life.to_owned());
        Ok(line)
    }

    /// Broken connections and loading servers are expected. Other errors are reported.
    fn handle_error(&mut self, error: &RedisError) {
        let expected = error.is_io_error()
            || error.is_connection_dropped()
            || error.is_timeout()
            || ["BUSYLOADING", "LOADING", "OOM", "UNBLOCKED"].contains(&error.code().unwrap_or_default())
            || error.to_string().contains("unknown command")
            || error.kind() == ErrorKind::Io;
        if !expected && self.record.odd.len() < 5 {
            self.record.odd.push(error.to_string());
        }
        if error.code().is_none() {
            self.line = None;
        }
        thread::sleep(Duration::from_millis(2));
    }
}
