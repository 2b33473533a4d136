//! A client that acquires, waits, renews, writes and releases, correctly or not, and records what it sees.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fastrand::Rng;
use redis::{Cmd, Value, cmd};
use tokio::time::sleep;

use crate::checker::PATIENCE;
use crate::clock::{WallClock, now};
use crate::history::{Assurance, Epoch, Event, Grant, Limit, Micros, Outcome, Request};
use crate::session::{Answer, Discovery, Session};
use crate::trace::trace;
use planned::PlannedRequest;

mod holding;
mod planned;

/// What a client requests of replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Nothing.
    Nothing,
    /// `WAIT 1` after each grant. The client records the reply.
    Wait,
    /// `REPLICAS n` with each request.
    Replicas(usize),
}

/// How long a client holds a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldTime {
    /// Milliseconds, on a few contended locks of every kind.
    Short,
    /// Seconds, with renewals: longer than a failover takes.
    Long,
}

/// The settings of a client.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Its name, which is part of its owners' names.
    pub name: String,
    /// The prefix of all keys.
    pub prefix: String,
    /// How it finds the server.
    pub discovery: Discovery,
    /// What it requests of replicas.
    pub durability: Durability,
    /// How long it holds locks.
    pub hold_time: HoldTime,
    /// The seed of its random choices.
    pub seed: u64,
}

/// The timeout of `WAIT 1` in ms, short so that the client continues soon.
const WAIT_FOR_REPLICA: u64 = 50;
/// The module's `holdfast.replicas-timeout`.
const REPLICAS_TIMEOUT: Micros = 1_000_000;

/// A running client.
pub struct Client {
    client_config: ClientConfig,
    rng: Rng,
    wall: WallClock,
    stop: Arc<AtomicBool>,
    session: Option<Session>,
    record: Vec<Event>,
    asked: u64,
}

/// A hold.
struct ActiveHold {
    holds: Vec<u64>,
    keys: Vec<String>,
    owner: String,
    limit: Limit,
    token: u64,
    lease: u64,
    ends: Micros,
}

struct Reply {
    sent: Micros,
    replied: Micros,
    epoch: Epoch,
    value: Value,
}

impl Client {
    /// A client that works until `stop`.
    pub fn new(client_config: ClientConfig, wall: WallClock, stop: Arc<AtomicBool>) -> Client {
        Client {
            rng: Rng::with_seed(client_config.seed),
            client_config,
            wall,
            stop,
            session: None,
            record: Vec::new(),
            asked: 0,
        }
    }

    /// Runs until `stop`, and returns the record.
    pub async fn run(mut self) -> Vec<Event> {
        while !self.stopped() {
            let planned = self.planned();
            match self.acquire(planned).await {
                Some(held) => self.hold(held).await,
                None => self.pause(1..20).await,
            }
        }
        self.record
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    async fn acquire(&mut self, planned: PlannedRequest) -> Option<ActiveHold> {
        let first_sent = now();
        let mut reply = self.request(&planned.keys[0], self.acquire_command(&planned), planned.wait).await;
        if reply.is_none() && !self.stopped() && self.rng.bool() {
            reply = self.request(&planned.keys[0], self.acquire_command(&planned), planned.wait).await;
        }
        let reply = reply?;
        let token = token(&reply.value)?;
        let began = reply.sent.max(self.wall.time_of(token));
        let assurance = self.assurance(&planned.keys[0]).await?;
        let replied = now();
        let holds: Vec<u64> = (0..planned.keys.len()).map(|index| self.asked * 4 + index as u64).collect();
        trace(|| format!("{} got {:?} with {token}, requested at {first_sent}", planned.owner, planned.keys));
        for (hold, key) in holds.iter().zip(&planned.keys) {
            self.record.push(Event::Grant(Grant {
                hold: *hold,
                key: key.clone(),
                owner: planned.owner.clone(),
                limit: planned.limit,
                token,
                sent: first_sent,
                began,
                replied: replied.max(reply.replied),
                lease: planned.lease * 1_000,
                epoch: reply.epoch.clone(),
                assurance,
            }));
        }
        Some(ActiveHold {
            holds,
            keys: planned.keys,
            owner: planned.owner,
            limit: planned.limit,
            token,
            lease: planned.lease,
            ends: began + planned.lease * 1_000,
        })
    }

    fn ask_replicas(&self, command: &mut Cmd) {
        if let Durability::Replicas(n) = self.client_config.durability {
            command.arg("REPLICAS").arg(n);
        }
    }

    /// The assurance of the last grant or renewal. `None` if the connection broke: the client then considers the lock lost, and
    /// the lease expires.
    async fn assurance(&mut self, key: &str) -> Option<Assurance> {
        match self.client_config.durability {
            Durability::Nothing => Some(Assurance::Plain),
            Durability::Replicas(_) => Some(Assurance::Replicas),
            Durability::Wait => {
                let mut command = cmd("WAIT");
                command.arg(1).arg(WAIT_FOR_REPLICA);
                let reply = self.request(key, command, Some(WAIT_FOR_REPLICA)).await?;
                Some(match reply.value {
                    Value::Int(1..) => Assurance::Confirmed,
                    _ => Assurance::Unconfirmed,
                })
            }
        }
    }

    /// One request and its reply, or `None` after an error or a timeout. The client then closes the connection, because it can't
    /// know which reply comes next.
    async fn request(&mut self, key: &str, command: Cmd, wait: Option<u64>) -> Option<Reply> {
        self.connect().await?;
        let session = self.session.as_mut()?;
        let confirming = match self.client_config.durability {
            Durability::Replicas(_) => REPLICAS_TIMEOUT,
            _ => 0,
        };
        let allowed = (wait.unwrap_or(0) * 1_000 + confirming) * self.client_config.discovery.attempts();
        let sent = now();
        let answer = session.ask(command, key, Duration::from_micros(allowed + PATIENCE)).await;
        let replied = now();
        let (outcome, value) = match answer {
            Answer::Value(Value::Nil) => (Outcome::Refused, Some(Value::Nil)),
            Answer::Value(value) => (Outcome::Granted, Some(value)),
            Answer::Error(error) => {
                trace(|| format!("{}: {error}", self.client_config.name));
                (Outcome::Failed, None)
            }
            Answer::Nothing => (Outcome::Unanswered, None),
        };
        self.record.push(Event::Request(Request { sent, allowed, ended: Some(replied), outcome }));
        let epoch = session.epoch();
        if value.is_none() {
            self.session = None;
            self.pause(5..40).await;
        }
        value.map(|value| Reply { sent, replied, epoch, value })
    }

    async fn connect(&mut self) -> Option<()> {
        if self.session.is_none() {
            match self.client_config.discovery.open().await {
                Ok(session) => self.session = Some(session),
                Err(why) => {
                    trace(|| format!("{}: {why}", self.client_config.name));
                    self.pause(20..60).await;
                    return None;
                }
            }
        }
        Some(())
    }

    async fn pause(&mut self, millis: std::ops::Range<u64>) {
        sleep(Duration::from_millis(self.rng.u64(millis))).await;
    }
}

fn keyed(one: &str, many: &str, keys: &[String]) -> Cmd {
    let mut command;
    if keys.len() == 1 {
        command = cmd(one);
    } else {
        command = cmd(many);
        command.arg(keys.len());
    }
    command.arg(keys);
    command
}

fn token(value: &Value) -> Option<u64> {
    match value {
        Value::Int(token) => u64::try_from(*token).ok(),
        _ => None,
    }
}
