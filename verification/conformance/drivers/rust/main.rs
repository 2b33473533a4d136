//! The driver of the Rust client: DRIVER.md says what it reads and writes.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io::BufRead;
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::Duration;

use conformance::clock;
use holdfast_client::{Error, Guard, Lock, Locks, LossReason, MultiGuard, MultiLock, RedGuard, RedLock};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, mpsc, oneshot};

/// The timeout of a majority's server, longer than a reply takes on a busy machine.
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

/// A call about a hold, with the channel for its outcome.
enum HoldCall {
    Release(oneshot::Sender<Value>),
    Renew(Duration, oneshot::Sender<Value>),
    Check(oneshot::Sender<Value>),
    Drop,
}

/// A hold: on one server, on several, or on a majority.
enum AnyGuard {
    One(Guard),
    Several(MultiGuard),
    Majority(RedGuard),
}

/// The common methods of all three.
macro_rules! of_each {
    ($held:expr, $guard:ident => $what:expr) => {
        match $held {
            AnyGuard::One($guard) => $what,
            AnyGuard::Several($guard) => $what,
            AnyGuard::Majority($guard) => $what,
        }
    };
}

impl AnyGuard {
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
    holds: HashMap<String, mpsc::UnboundedSender<HoldCall>>,
    running: HashMap<String, Arc<Notify>>,
}

type Shared = Arc<Mutex<Holds>>;

fn of(holds: &Shared) -> MutexGuard<'_, Holds> {
    holds.lock().unwrap_or_else(PoisonError::into_inner)
}

fn main() -> std::io::Result<()> {
    let (mut clients, mut holds) = (Clients::default(), Shared::default());
    // All calls run in the last runtime.
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
            "acquire" => match request(&mut clients, &line) {
                Ok(request) => {
                    let mut acquiring = Box::pin(acquire(request, line, holds.clone()));
                    // The first poll asks: two tasks of a runtime begin in any order, and calls keep theirs.
                    if acquiring.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                        tokio::spawn(acquiring);
                    }
                }
                Err(error) => say(line.id, failure(&error)),
            },
            "cancel" => {
                if let Some(cancellation) = of(&holds).running.remove(&line.hold) {
                    cancellation.notify_one();
                }
                say(line.id, json!({"outcome": "ok"}));
            }
            "drop" => {
                of(&holds).holds.remove(&line.hold).map(|hold| hold.send(HoldCall::Drop));
                say(line.id, json!({"outcome": "ok"}));
            }
            "close" => {
                let all = std::mem::take(&mut *of(&holds));
                all.running.values().for_each(|cancellation| cancellation.notify_one());
                for (_, locks) in std::mem::take(&mut clients.all) {
                    runtime.block_on(locks.close());
                }
                all.holds.values().for_each(|hold| drop(hold.send(HoldCall::Drop)));
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
                tokio::spawn(call_hold(line, hold));
            }
        }
    }
    Ok(())
}

/// Blocks every thread of a runtime for this long.
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

type PendingAcquire = std::pin::Pin<Box<dyn Future<Output = Result<Option<AnyGuard>, Error>> + Send>>;

/// The acquisition of a call.
fn request(clients: &mut Clients, line: &Line) -> Result<PendingAcquire, Error> {
    let (wait, lease) = (line.wait.map(Duration::from_millis), line.lease.map(Duration::from_millis));
    if !line.majority.is_empty() {
        let servers = line.majority.iter().map(|url| clients.of(url)).collect::<Result<Vec<_>, _>>()?;
        let lock = RedLock::new(servers, line.keys.first().map_or("", String::as_str)).server_timeout(ANSWERS);
        let lock = wait.map_or(lock.clone().wait_forever(), |time| lock.wait(time));
        let lock = lease.map_or(lock.clone(), |lease| lock.lease(lease));
        return Ok(Box::pin(async move { Ok(lock.acquire().await?.map(AnyGuard::Majority)) }));
    }
    if !line.at.is_empty() {
        let each = line.at.iter().zip(&line.keys).map(|(url, key)| Ok(with_options(clients.of(url)?.lock(key), line)));
        let lock = MultiLock::new(each.collect::<Result<Vec<_>, Error>>()?);
        let lock = wait.map_or(lock.clone().wait_forever(), |time| lock.wait(time));
        return Ok(Box::pin(async move { Ok(lock.acquire().await?.map(AnyGuard::Several)) }));
    }
    let url = clients.url.clone();
    let lock = with_options(clients.of(&url)?.lock_all(&line.keys), line);
    let lock = wait.map_or(lock.clone().wait_forever(), |time| lock.wait(time));
    Ok(Box::pin(async move { Ok(lock.acquire().await?.map(AnyGuard::One)) }))
}

fn with_options(mut lock: Lock, line: &Line) -> Lock {
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

async fn acquire(request: PendingAcquire, line: Line, holds: Shared) {
    let cancellation = Arc::new(Notify::new());
    of(&holds).running.insert(line.hold.clone(), cancellation.clone());
    let outcome = tokio::select! {
        outcome = request => outcome,
        () = cancellation.notified() => return say(line.id, json!({"outcome": "cancelled"})),
    };
    of(&holds).running.remove(&line.hold);
    match outcome {
        Ok(Some(held)) => {
            let (sender, request) = mpsc::unbounded_channel();
            of(&holds).holds.insert(line.hold.clone(), sender);
            say(line.id, json!({"outcome": "held", "fence": held.fence()}));
            serve_hold(line.hold, held, request).await;
        }
        Ok(None) => say(line.id, json!({"outcome": "not-granted"})),
        Err(error) => say(line.id, failure(&error)),
    }
}

/// Serves the calls about a hold, from its grant on.
async fn serve_hold(hold: String, held: AnyGuard, mut request: mpsc::UnboundedReceiver<HoldCall>) {
    let mut reported = false;
    loop {
        tokio::select! {
            why = held.lost(), if !reported => {
                reported = true;
                println!("{}", json!({"lost": hold, "reason": why.to_string(), "at": clock::now()}));
            }
            call = request.recv() => match call {
                Some(HoldCall::Release(reply)) => {
                    let outcome = of_each!(held, guard => guard.release().await);
                    let _ = reply.send(outcome.map_or_else(|error| failure(&error), |()| json!({"outcome": "released"})));
                    return;
                }
                Some(HoldCall::Renew(lease, reply)) => {
                    let outcome = of_each!(&held, guard => guard.renew(lease).await);
                    let _ = reply.send(outcome.map_or_else(|error| failure(&error), |()| json!({"outcome": "renewed"})));
                }
                Some(HoldCall::Check(reply)) => {
                    let checked = match &held {
                        AnyGuard::One(guard) => guard.check().await,
                        AnyGuard::Several(guard) => guard.check().await,
                        AnyGuard::Majority(guard) => guard.check(),
                    };
                    let _ = reply.send(checked.map_or_else(|error| failure(&error), |()| json!({"outcome": "held"})));
                }
                // The guard is dropped.
                Some(HoldCall::Drop) | None => return,
            },
        }
    }
}

async fn call_hold(line: Line, hold: Option<mpsc::UnboundedSender<HoldCall>>) {
    let (answer, outcome) = oneshot::channel();
    let call_hold = match line.call.as_str() {
        "release" => HoldCall::Release(answer),
        "renew" => HoldCall::Renew(Duration::from_millis(line.lease.unwrap_or_default()), answer),
        _ => HoldCall::Check(answer),
    };
    let _ = hold.map(|hold| hold.send(call_hold));
    say(line.id, outcome.await.unwrap_or_else(|_| json!({"outcome": "invalid", "text": "no such hold"})));
}

fn failure(error: &Error) -> Value {
    let kind = match error {
        Error::Deadlock { .. } => "deadlock",
        Error::NoReplicas { .. } => "no-replicas",
        Error::WrongType { .. } => "wrong-type",
        Error::NotHeld { .. } => "not-held",
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
