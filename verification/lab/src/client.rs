//! A client that locks, waits, renews and releases as applications do, well and badly, and writes down what it saw.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fastrand::Rng;
use redis::{Cmd, Value, cmd};
use tokio::time::sleep;

use crate::checker::PATIENCE;
use crate::clock::{WallClock, now};
use crate::history::{Assurance, Epoch, Event, Grant, Limit, Micros, Outcome, Request};
use crate::session::{Answer, Session, Way};
use crate::trace::trace;
use wishes::Wish;

mod holding;
mod wishes;

/// What a client asks of replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asks {
    /// Nothing.
    Nothing,
    /// `WAIT 1` after each grant, and notes the answer.
    Wait,
    /// `REPLICAS n` with each request.
    Replicas(usize),
}

/// How long a client holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Milliseconds, on a few locks of every kind that all want.
    Short,
    /// Seconds, renewing now and then: longer than a failover takes.
    Long,
}

/// What a client is to be.
#[derive(Clone, Debug)]
pub struct Character {
    /// Its name, part of its owners' names.
    pub name: String,
    /// What all keys begin with.
    pub prefix: String,
    /// How it finds the server.
    pub way: Way,
    /// What it asks of replicas.
    pub asks: Asks,
    /// How long it holds.
    pub pace: Pace,
    /// Where its choices come from.
    pub seed: u64,
}

/// `WAIT 1` for so long, as a client would that does not want to stand still.
const WAIT_FOR_REPLICA: u64 = 50;
/// The module's `holdfast.replicas-timeout`.
const REPLICAS_TIMEOUT: Micros = 1_000_000;

/// A client at work.
pub struct Client {
    character: Character,
    rng: Rng,
    wall: WallClock,
    stop: Arc<AtomicBool>,
    session: Option<Session>,
    record: Vec<Event>,
    asked: u64,
}

/// What it got.
struct Held {
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
    pub fn new(character: Character, wall: WallClock, stop: Arc<AtomicBool>) -> Client {
        Client {
            rng: Rng::with_seed(character.seed),
            character,
            wall,
            stop,
            session: None,
            record: Vec::new(),
            asked: 0,
        }
    }

    /// Works, and hands back the record.
    pub async fn run(mut self) -> Vec<Event> {
        while !self.stopped() {
            let wish = self.wish();
            match self.acquire(wish).await {
                Some(held) => self.hold(held).await,
                None => self.pause(1..20).await,
            }
        }
        self.record
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    async fn acquire(&mut self, wish: Wish) -> Option<Held> {
        let first_sent = now();
        let mut reply = self.request(&wish.keys[0], self.acquire_command(&wish), wish.wait).await;
        if reply.is_none() && !self.stopped() && self.rng.bool() {
            reply = self.request(&wish.keys[0], self.acquire_command(&wish), wish.wait).await;
        }
        let reply = reply?;
        let token = token(&reply.value)?;
        let began = reply.sent.max(self.wall.time_of(token));
        let assurance = self.assurance(&wish.keys[0]).await?;
        let replied = now();
        let holds: Vec<u64> = (0..wish.keys.len()).map(|index| self.asked * 4 + index as u64).collect();
        trace(|| format!("{} got {:?} with {token}, asked at {first_sent}", wish.owner, wish.keys));
        for (hold, key) in holds.iter().zip(&wish.keys) {
            self.record.push(Event::Grant(Grant {
                hold: *hold,
                key: key.clone(),
                owner: wish.owner.clone(),
                limit: wish.limit,
                token,
                sent: first_sent,
                began,
                replied: replied.max(reply.replied),
                lease: wish.lease * 1_000,
                epoch: reply.epoch.clone(),
                assurance,
            }));
        }
        Some(Held {
            holds,
            keys: wish.keys,
            owner: wish.owner,
            limit: wish.limit,
            token,
            lease: wish.lease,
            ends: began + wish.lease * 1_000,
        })
    }

    fn ask_replicas(&self, command: &mut Cmd) {
        if let Asks::Replicas(n) = self.character.asks {
            command.arg("REPLICAS").arg(n);
        }
    }

    /// How sure the grant or renewal is that was just received; `None` if the connection broke over the question
    /// (the client then takes itself to hold nothing, and the lease runs out).
    async fn assurance(&mut self, key: &str) -> Option<Assurance> {
        match self.character.asks {
            Asks::Nothing => Some(Assurance::Plain),
            Asks::Replicas(_) => Some(Assurance::Replicas),
            Asks::Wait => {
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

    /// One request and its reply; none if there was an error or no answer. Then the connection is given up, as a careful
    /// client does: it can't know any more which reply comes next on it.
    async fn request(&mut self, key: &str, command: Cmd, wait: Option<u64>) -> Option<Reply> {
        self.connect().await?;
        let session = self.session.as_mut()?;
        let confirming = match self.character.asks {
            Asks::Replicas(_) => REPLICAS_TIMEOUT,
            _ => 0,
        };
        let allowed = (wait.unwrap_or(0) * 1_000 + confirming) * self.character.way.attempts();
        let sent = now();
        let answer = session.ask(command, key, Duration::from_micros(allowed + PATIENCE)).await;
        let replied = now();
        let (outcome, value) = match answer {
            Answer::Value(Value::Nil) => (Outcome::Refused, Some(Value::Nil)),
            Answer::Value(value) => (Outcome::Granted, Some(value)),
            Answer::Error(error) => {
                trace(|| format!("{}: {error}", self.character.name));
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
            match self.character.way.open().await {
                Ok(session) => self.session = Some(session),
                Err(why) => {
                    trace(|| format!("{}: {why}", self.character.name));
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
