//! The driver of the Rust client: DRIVER.md says what it reads and writes.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io::BufRead;
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conformance::clock;
use holdfast_client::{Error, Guard, Lock, Locks, LossReason, MultiGuard, MultiLock, RedGuard, RedLock};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, mpsc, oneshot};

/// How long a server of a majority may take to answer: longer than a busy machine does.
const ANSWERS: Duration = Duration::from_secs(5);

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
    #[serde(default)]
    at: Vec<String>,
    #[serde(default)]
    majority: Vec<String>,
    #[serde(default)]
    is: String,
    #[serde(default)]
    time: u64,
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
    keep: Option<u64>,
    keep_uses: Option<u32>,
}

/// What is asked of a hold, and whom to tell.
enum Ask {
    Release(oneshot::Sender<Value>),
    Renew(Duration, oneshot::Sender<Value>),
    Check(oneshot::Sender<Value>),
    Drop,
}

/// What is held: of one server, of several, or of a majority.
enum Held {
    One(Guard),
    Several(MultiGuard),
    Majority(RedGuard),
}

/// The same for all three.
macro_rules! of_each {
    ($held:expr, $guard:ident => $what:expr) => {
        match $held {
            Held::One($guard) => $what,
            Held::Several($guard) => $what,
            Held::Majority($guard) => $what,
        }
    };
}

impl Held {
    fn fence(&self) -> u64 {
        match self {
            Self::One(guard) => guard.fence(),
            Self::Several(guard) => guard.parts().iter().map(Guard::fence).max().unwrap_or_default(),
            Self::Majority(guard) => guard.fence(),
        }
    }

    async fn lost(&self) -> LossReason {
        of_each!(self, guard => guard.lost().await)
    }
}

/// The clients of a program, by their URLs.
#[derive(Default)]
struct Clients {
    url: String,
    all: HashMap<String, Locks>,
}

impl Clients {
    fn of(&mut self, url: &str) -> Result<Locks, Error> {
        match self.all.get(url) {
            Some(locks) => Ok(locks.clone()),
            None => {
                let locks = Locks::open(url)?;
                self.all.insert(url.to_owned(), locks.clone());
                Ok(locks)
            }
        }
    }
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

fn main() -> std::io::Result<()> {
    let (mut clients, mut holds) = (Clients::default(), Shared::default());
    // All calls run in the last one.
    let mut runtimes = VecDeque::from([Runtime::new()?]);
    for text in std::io::stdin().lock().lines() {
        let line: Line = serde_json::from_str(&text?)?;
        let Some(runtime) = runtimes.back() else { break };
        let _in_it = runtime.enter();
        match line.call.as_str() {
            "open" => {
                holds = Shared::default();
                clients = Clients { url: line.url.clone(), ..Clients::default() };
                let opened = clients.of(&line.url);
                say(line.id, json!({"outcome": if opened.is_ok() { "ok" } else { "invalid" }}));
            }
            "acquire" => match asked(&mut clients, &line) {
                Ok(asked) => drop(tokio::spawn(acquire(asked, line, holds.clone()))),
                Err(error) => say(line.id, failure(&error)),
            },
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
                for (_, locks) in std::mem::take(&mut clients.all) {
                    runtime.block_on(locks.settle());
                }
                say(line.id, json!({"outcome": "ok"}));
            }
            "block" => {
                block(runtime, Duration::from_millis(line.time));
                say(line.id, json!({"outcome": "ok"}));
            }
            "threads" => {
                let tasks: usize = runtimes.iter().map(|it| it.metrics().num_alive_tasks()).sum();
                let threads = std::fs::read_dir("/proc/self/task")?.count();
                say(line.id, json!({"outcome": "ok", "count": threads + tasks}));
            }
            "runtime" => {
                match line.is.as_str() {
                    "another" => runtimes.push_back(Runtime::new()?),
                    _ => drop(runtimes.pop_front()),
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

/// Has every thread of a runtime do something else for so long.
fn block(runtime: &Runtime, time: Duration) {
    let threads = runtime.metrics().num_workers();
    let all_in_it = Arc::new(Barrier::new(threads + 1));
    let blocks = |_| {
        let all_in_it = all_in_it.clone();
        runtime.spawn(async move {
            all_in_it.wait();
            std::thread::sleep(time);
        })
    };
    let blocked: Vec<_> = (0..threads).map(blocks).collect();
    all_in_it.wait();
    for each in blocked {
        let _ = runtime.block_on(each);
    }
}

type Asked = std::pin::Pin<Box<dyn Future<Output = Result<Option<Held>, Error>> + Send>>;

/// What the call asks the client for.
fn asked(clients: &mut Clients, line: &Line) -> Result<Asked, Error> {
    let (wait, lease) = (line.wait.map(Duration::from_millis), line.lease.map(Duration::from_millis));
    if !line.majority.is_empty() {
        let servers = line.majority.iter().map(|url| clients.of(url)).collect::<Result<Vec<_>, _>>()?;
        let lock = RedLock::new(servers, line.keys.first().map_or("", String::as_str)).server_timeout(ANSWERS);
        let lock = wait.map_or(lock.clone().wait_forever(), |time| lock.wait(time));
        let lock = lease.map_or(lock.clone(), |lease| lock.lease(lease));
        return Ok(Box::pin(async move { Ok(lock.acquire().await?.map(Held::Majority)) }));
    }
    if !line.at.is_empty() {
        let each = line.at.iter().zip(&line.keys).map(|(url, key)| Ok(on_terms(clients.of(url)?.lock(key), line)));
        let lock = MultiLock::new(each.collect::<Result<Vec<_>, Error>>()?);
        let lock = wait.map_or(lock.clone().wait_forever(), |time| lock.wait(time));
        return Ok(Box::pin(async move { Ok(lock.acquire().await?.map(Held::Several)) }));
    }
    let url = clients.url.clone();
    let lock = on_terms(clients.of(&url)?.lock_all(&line.keys), line);
    let lock = wait.map_or(lock.clone().wait_forever(), |time| lock.wait(time));
    Ok(Box::pin(async move { Ok(lock.acquire().await?.map(Held::One)) }))
}

fn on_terms(mut lock: Lock, line: &Line) -> Lock {
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
    lock = line.replicas.map_or(lock.clone(), |count| lock.clone().replicas(count));
    lock = line.keep.map_or(lock.clone(), |time| lock.clone().keep(Duration::from_millis(time)));
    line.keep_uses.map_or(lock.clone(), |uses| lock.clone().keep_uses(uses))
}

async fn acquire(asked: Asked, line: Line, holds: Shared) {
    let given_up = Arc::new(Notify::new());
    of(&holds).running.insert(line.hold.clone(), given_up.clone());
    let outcome = tokio::select! {
        outcome = asked => outcome,
        () = given_up.notified() => return say(line.id, json!({"outcome": "cancelled"})),
    };
    of(&holds).running.remove(&line.hold);
    match outcome {
        Ok(Some(held)) => {
            let (sender, asked) = mpsc::unbounded_channel();
            of(&holds).holds.insert(line.hold.clone(), sender);
            say(line.id, json!({"outcome": "held", "fence": held.fence()}));
            keep(line.hold, held, asked).await;
        }
        Ok(None) => say(line.id, json!({"outcome": "not-granted"})),
        Err(error) => say(line.id, failure(&error)),
    }
}

/// A hold, from its grant on.
async fn keep(hold: String, held: Held, mut asked: mpsc::UnboundedReceiver<Ask>) {
    let mut told = false;
    loop {
        tokio::select! {
            why = held.lost(), if !told => {
                told = true;
                println!("{}", json!({"lost": hold, "reason": why.to_string(), "at": clock::now()}));
            }
            ask = asked.recv() => match ask {
                Some(Ask::Release(answer)) => {
                    let outcome = of_each!(held, guard => guard.release().await);
                    let _ = answer.send(outcome.map_or_else(|error| failure(&error), |()| json!({"outcome": "released"})));
                    return;
                }
                Some(Ask::Renew(lease, answer)) => {
                    let outcome = of_each!(&held, guard => guard.renew(lease).await);
                    let _ = answer.send(outcome.map_or_else(|error| failure(&error), |()| json!({"outcome": "renewed"})));
                }
                Some(Ask::Check(answer)) => {
                    let checked = of_each!(&held, guard => guard.check());
                    let _ = answer.send(checked.map_or_else(|error| failure(&error), |()| json!({"outcome": "held"})));
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
        Error::Uncertain { .. } => "in-doubt",
        Error::Lost { why, .. } => {
            return json!({"outcome": "lost", "reason": why.to_string(), "text": error.to_string()});
        }
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
