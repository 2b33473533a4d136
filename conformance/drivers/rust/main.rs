//! The driver of the Rust client: DRIVER.md says what it reads and writes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conformance::clock;
use holdfast_client::{Error, Guard, Lock, Locks};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, stdin};
use tokio::sync::{Notify, mpsc, oneshot};

#[derive(Deserialize)]
struct Line {
    id: u64,
    call: String,
    #[serde(default)]
    url: String,
    #[serde(default)]
    hold: String,
    #[serde(default)]
    keys: Vec<String>,
    wait: Option<u64>,
    lease: Option<u64>,
    #[serde(default)]
    watched: bool,
    #[serde(default)]
    ephemeral: bool,
    #[serde(default)]
    shared: bool,
    limit: Option<u32>,
    replicas: Option<u32>,
}

/// What is asked of a hold, and whom to tell.
enum Ask {
    Release(oneshot::Sender<Value>),
    Renew(Duration, oneshot::Sender<Value>),
    Check(oneshot::Sender<Value>),
    Drop,
}

#[derive(Default)]
struct Holds {
    holds: HashMap<String, mpsc::UnboundedSender<Ask>>,
    running: HashMap<String, Arc<Notify>>,
}

type Shared = Arc<Mutex<Holds>>;

fn of(holds: &Shared) -> MutexGuard<'_, Holds> {
    holds.lock().unwrap_or_else(PoisonError::into_inner)
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let mut lines = BufReader::new(stdin()).lines();
    let (mut locks, mut holds) = (None, Shared::default());
    while let Some(text) = lines.next_line().await? {
        let line: Line = serde_json::from_str(&text)?;
        match line.call.as_str() {
            "open" => {
                holds = Shared::default();
                locks = Locks::open(&line.url).ok();
                say(line.id, json!({"outcome": if locks.is_some() { "ok" } else { "invalid" }}));
            }
            "acquire" => {
                let Some(locks) = &locks else { return Ok(()) };
                tokio::spawn(acquire(lock(locks, &line), line, holds.clone()));
            }
            "cancel" => {
                if let Some(given_up) = of(&holds).running.remove(&line.hold) {
                    given_up.notify_one();
                }
                say(line.id, json!({"outcome": "ok"}));
            }
            "drop" => {
                of(&holds).holds.remove(&line.hold).map(|hold| hold.send(Ask::Drop));
                say(line.id, json!({"outcome": "ok"}));
            }
            "close" => {
                let all = std::mem::take(&mut *of(&holds));
                all.running.values().for_each(|given_up| given_up.notify_one());
                all.holds.values().for_each(|hold| drop(hold.send(Ask::Drop)));
                if let Some(locks) = locks.take() {
                    locks.settle().await;
                }
                say(line.id, json!({"outcome": "ok"}));
            }
            _ => {
                let hold = of(&holds).holds.get(&line.hold).cloned();
                tokio::spawn(ask(line, hold));
            }
        }
    }
    Ok(())
}

fn lock(locks: &Locks, line: &Line) -> Lock {
    let mut lock = locks.lock_all(&line.keys);
    lock = match line.wait {
        None => lock.wait_forever(),
        Some(0) => lock,
        Some(time) => lock.wait(Duration::from_millis(time)),
    };
    lock = match line.lease.map(Duration::from_millis) {
        None => lock,
        Some(lease) if line.watched => lock.watched(lease),
        Some(lease) => lock.lease(lease),
    };
    if line.ephemeral {
        lock = lock.ephemeral();
    }
    if line.shared {
        lock = lock.shared();
    }
    lock = line.limit.map_or(lock.clone(), |limit| lock.clone().limit(limit));
    line.replicas.map_or(lock.clone(), |count| lock.clone().replicas(count))
}

async fn acquire(lock: Lock, line: Line, holds: Shared) {
    let given_up = Arc::new(Notify::new());
    of(&holds).running.insert(line.hold.clone(), given_up.clone());
    let outcome = tokio::select! {
        outcome = lock.acquire() => outcome,
        () = given_up.notified() => return say(line.id, json!({"outcome": "cancelled"})),
    };
    of(&holds).running.remove(&line.hold);
    match outcome {
        Ok(Some(guard)) => {
            let (sender, asked) = mpsc::unbounded_channel();
            of(&holds).holds.insert(line.hold.clone(), sender);
            say(line.id, json!({"outcome": "held", "fence": guard.fence()}));
            keep(line.hold, guard, asked).await;
        }
        Ok(None) => say(line.id, json!({"outcome": "not-granted"})),
        Err(error) => say(line.id, failure(&error)),
    }
}

/// A hold, from its grant on.
async fn keep(hold: String, guard: Guard, mut asked: mpsc::UnboundedReceiver<Ask>) {
    let mut told = false;
    loop {
        tokio::select! {
            why = guard.lost(), if !told => {
                told = true;
                println!("{}", json!({"lost": hold, "reason": why.to_string(), "at": clock::now()}));
            }
            ask = asked.recv() => match ask {
                Some(Ask::Release(answer)) => {
                    let outcome = guard.release().await;
                    let _ = answer.send(outcome.map_or_else(|error| failure(&error), |()| json!({"outcome": "released"})));
                    return;
                }
                Some(Ask::Renew(lease, answer)) => {
                    let outcome = guard.renew(lease).await;
                    let _ = answer.send(outcome.map_or_else(|error| failure(&error), |()| json!({"outcome": "renewed"})));
                }
                Some(Ask::Check(answer)) => {
                    let _ = answer.send(guard.check().map_or_else(|error| failure(&error), |()| json!({"outcome": "held"})));
                }
                // The guard goes.
                Some(Ask::Drop) | None => return,
            },
        }
    }
}

async fn ask(line: Line, hold: Option<mpsc::UnboundedSender<Ask>>) {
    let (answer, outcome) = oneshot::channel();
    let ask = match line.call.as_str() {
        "release" => Ask::Release(answer),
        "renew" => Ask::Renew(Duration::from_millis(line.lease.unwrap_or_default()), answer),
        _ => Ask::Check(answer),
    };
    let _ = hold.map(|hold| hold.send(ask));
    say(line.id, outcome.await.unwrap_or_else(|_| json!({"outcome": "invalid", "text": "it holds no such thing"})));
}

fn failure(error: &Error) -> Value {
    let kind = match error {
        Error::Deadlock { .. } => "deadlock",
        Error::NoReplicas { .. } => "no-replicas",
        Error::WrongType { .. } => "wrong-type",
        Error::NotHeld { .. } => "not-held",
        Error::InDoubt { .. } => "in-doubt",
        Error::Lost { why, .. } => return json!({"outcome": "lost", "reason": why.to_string()}),
        Error::Invalid { .. } => "invalid",
        Error::Connection { .. } | Error::NoMajority { .. } => "connection",
        _ => "server",
    };
    json!({"outcome": kind, "text": error.to_string()})
}

fn say(id: u64, mut outcome: Value) {
    outcome["id"] = json!(id);
    outcome["at"] = json!(clock::now());
    println!("{outcome}");
}
