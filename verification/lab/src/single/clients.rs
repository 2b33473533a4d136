//! Clients that lock, wait, renew, write and release, come what may, and write down what they saw.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use redis::{Client, Cmd, Connection, ErrorKind, RedisError, RedisResult};

use crate::clock::now;
use crate::history::{Assurance, Epoch, Event, Grant, Limit, Micros, Outcome, Request};

/// Clients at work at the same time.
pub const CLIENTS: u64 = 6;

const LEASE: Duration = Duration::from_millis(1500);
const WAIT: Duration = Duration::from_millis(100);
/// How long a client goes on with one request before it says that no answer came.
const GIVES_UP: Duration = Duration::from_secs(20);
/// A reply that comes later than this is none.
const SILENCE: Duration = Duration::from_secs(5);

/// What the clients share.
pub struct Scene {
    /// Where the server is.
    pub address: SocketAddr,
    /// Set when the clients are to end.
    pub over: AtomicBool,
    /// While set, clients ask without waiting in the queue.
    pub nobody_waits: AtomicBool,
    /// Grants so far, so that the one who injects faults sees that work goes on.
    pub grants: AtomicU64,
    /// Whether a restart may lose what was acknowledged. If so, each life of the server has an epoch of its own.
    pub may_lose: bool,
}

impl Scene {
    fn goes_on(&self) -> bool {
        !self.over.load(Ordering::Relaxed)
    }
}

/// What one client brings home.
#[derive(Default)]
pub struct Record {
    /// Its record.
    pub events: Vec<Event>,
    /// Requests sent, each try counted.
    pub requests: u64,
    /// Holds that the server did not know any more although their lease ran.
    pub lost: u64,
    /// Errors that no fault explains.
    pub odd: Vec<String>,
}

/// The locks that all clients want, with their limits.
pub fn locks() -> Vec<(String, Limit)> {
    let mutexes = (0..4).map(|n| (format!("mutex:{n}"), Limit::Of(1)));
    let others = [("semaphore".to_owned(), Limit::Of(2)), ("readers".to_owned(), Limit::Shared)];
    mutexes.chain(others).collect()
}

/// Works until the scene is over.
pub fn work(scene: &Scene, number: u64, seed: u64) -> Record {
    let mut worker = Worker {
        scene,
        name: format!("client-{number}"),
        rng: Rng::with_seed(seed),
        line: None,
        epoch: None,
        hold: 0,
        record: Record::default(),
    };
    while scene.goes_on() {
        worker.turn();
    }
    worker.record
}

struct Worker<'a> {
    scene: &'a Scene,
    name: String,
    rng: Rng,
    line: Option<Connection>,
    epoch: Epoch,
    hold: u64,
    record: Record,
}

/// An answer, and when the request that got it was sent. `tries` above one: an earlier try may have been carried out too.
struct Answer {
    value: Option<u64>,
    first_sent: Micros,
    sent: Micros,
    tries: u32,
}

/// What is held.
struct Held {
    key: String,
    token: u64,
    until: Micros,
}

impl Worker<'_> {
    /// One lock taken, used and released.
    fn turn(&mut self) {
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
        // Now and then a client is gone without a word, and its lease has to end.
        if self.rng.u32(..400) > 0 {
            self.release(&held);
        }
    }

    fn acquire(&mut self, key: &str, limit: Limit) -> Option<Held> {
        // An owner of its own for each hold: one that vanished must not be re-entered.
        self.hold += 1;
        let owner = format!("{}/{}", self.name, self.hold);
        let wait = if self.scene.nobody_waits.load(Ordering::Relaxed) { Duration::ZERO } else { WAIT };
        let limit = match limit {
            // As one name that all tries give: a writer among readers.
            Limit::Shared if self.rng.u32(..4) == 0 => Limit::Of(1),
            other => other,
        };
        let mut command = redis::cmd("LOCK.ACQUIRE");
        command.arg(key).arg(&owner).arg("LEASE").arg(LEASE.as_millis() as u64);
        if !wait.is_zero() {
            command.arg("WAIT").arg(wait.as_millis() as u64);
        }
        // HOLDS: a try whose answer was lost may be repeated.
        command.arg("HOLDS").arg(1);
        match limit {
            Limit::Shared => command.arg("SHARED"),
            Limit::Of(n) => command.arg("LIMIT").arg(n),
        };
        let answer = self.ask(&command, wait)?;
        let Some(token) = answer.value else {
            // One that does not wait must not ask in a tight loop.
            thread::sleep(Duration::from_millis(u64::from(wait.is_zero())));
            return None;
        };
        let replied = now();
        self.scene.grants.fetch_add(1, Ordering::Relaxed);
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
        Some(Held { key: key.to_owned(), token, until: answer.sent + lease })
    }

    /// False if the hold is no more.
    fn renew(&mut self, held: &mut Held) -> bool {
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

    fn release(&mut self, held: &Held) {
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

    /// The server says that this is not held: right if the lease is over, by this client's clock and a margin.
    fn lost_unless_over(&mut self, held: &Held) {
        const MARGIN: Micros = 5_000;
        if now() + MARGIN < held.until {
            self.record.lost += 1;
        }
    }

    /// Asks until an answer comes, over as many connections as it takes. None: the client gave up.
    fn ask(&mut self, command: &Cmd, allowed: Duration) -> Option<Answer> {
        let first_sent = now();
        let mut tries = 0;
        let mut answer = None;
        while now() < first_sent + GIVES_UP.as_micros() as Micros {
            let sent = now();
            tries += 1;
            match self.attempt(command) {
                Ok(value) => {
                    answer = Some(Answer { value, first_sent, sent, tries });
                    break;
                }
                Err(error) => self.take_in(&error),
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
        let client = Client::open(format!("redis://{}", self.scene.address))?;
        let mut line = client.get_connection_with_timeout(SILENCE)?;
        line.set_read_timeout(Some(SILENCE))?;
        let run: String = redis::cmd("INFO").arg("server").query(&mut line)?;
        let run = run.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap_or_default().to_owned();
        let life = if self.scene.may_lose { run.split(':').next().unwrap_or_default() } else { "the server" };
        self.epoch = Some(life.to_owned());
        Ok(line)
    }

    /// Connections break and servers load: those are the faults. Whatever else an error says is told.
    fn take_in(&mut self, error: &RedisError) {
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
