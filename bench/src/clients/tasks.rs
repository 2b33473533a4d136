//! Many tasks of one process contend for a few locks: with the Rust client, and with the crate rslock, which polls.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_client::Locks;
use rslock::LockManager;
use support::resp;
use tokio::task::JoinSet;

use crate::machine;
use crate::server::{Program, Running};
use crate::settings::Scale;
use crate::stats::{Spread, jain};

/// The number of locks. Each task uses one.
pub const LOCKS: usize = 100;
/// How long a task holds its lock.
const WORK: Duration = Duration::from_millis(1);
const LEASE: Duration = Duration::from_secs(60);
/// By then, all tasks have been refused at least once, and poll.
const ALL_POLL: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(30);

/// The client to measure.
#[derive(Clone)]
enum LockClient {
    Holdfast(Locks),
    Rslock(LockManager),
}

const NAMES: [&str; 2] = ["holdfast-client", "rslock"];

/// The results of one round.
struct Round {
    seconds: f64,
    turns: Vec<u64>,
    cpu: f64,
    connections: f64,
    bytes: f64,
}

/// A line of the result.
#[derive(serde::Serialize)]
pub struct Row {
    pub server: String,
    pub name: String,
    pub tasks: usize,
    /// The time limit, in seconds.
    pub limit_s: f64,
    /// The time until every task had held its lock, or the limit.
    pub seconds: Spread,
    /// How many tasks had held theirs by then.
    pub had_a_turn: Spread,
    pub turns_per_second: Spread,
    /// Jain's index over the number of holds of each task.
    pub jain: Spread,
    /// Microseconds of the server's main thread for a hold.
    pub cpu_us: Spread,
    /// The client's CPU while all tasks wait.
    pub connections: Spread,
    /// The client's memory for a waiting task.
    pub bytes_a_task: Spread,
}

/// Measures both, alternately.
pub fn measure(scale: &Scale, program: &Program, server: &mut Running) -> Result<Vec<Row>> {
    let mut rounds = NAMES.map(|name| (name, Vec::new()));
    for number in 0..scale.task_rounds {
        for turn in 0..NAMES.len() {
            let (name, rounds) = &mut rounds[(number + turn) % NAMES.len()];
            rounds.push(round(scale, server, name).context(*name)?);
            server.clear()?;
        }
    }
    Ok(rounds.iter().map(|(name, rounds)| row(scale, program, name, rounds)).collect())
}

fn round(scale: &Scale, server: &mut Running, name: &str) -> Result<Round> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let url = format!("redis://127.0.0.1:{}", server.port());
    let client = if name == NAMES[0] {
        LockClient::Holdfast(Locks::open(&url)?)
    } else {
        LockClient::Rslock(LockManager::new(vec![url.as_str()]))
    };
    let outcome = runtime.block_on(contend(scale, server, &client));
    // The next round starts with an empty server.
    drop((runtime, client));
    outcome
}

async fn contend(scale: &Scale, server: &mut Running, client: &LockClient) -> Result<Round> {
    let lease = LEASE.as_millis().to_string();
    for lock in 0..LOCKS {
        let key = key(lock);
        match client {
            LockClient::Holdfast(_) => server.control.call(&["LOCK.ACQUIRE", &key, "holder", "LEASE", &lease])?,
            LockClient::Rslock(_) => server.control.call(&["SET", &key, "holder", "PX", &lease])?,
        };
    }
    client.connect().await?;
    let turns: Arc<[AtomicU64]> = (0..scale.tasks).map(|_| AtomicU64::new(0)).collect();
    let (mut tasks, before) = (JoinSet::new(), machine::allocated());
    for task in 0..scale.tasks {
        client.spawn(&mut tasks, task, turns.clone());
    }
    client.all_wait(server, scale.tasks).await?;
    let bytes = (machine::allocated() as f64 - before as f64) / scale.tasks as f64;
    let connections = resp::text(&server.control.call(&["CLIENT", "LIST"])?)?.lines().count() - 1;
    let (cpu, start) = (server.control.server_cpu()?, Instant::now());
    for lock in 0..LOCKS {
        server.control.call(&["DEL", &key(lock)])?;
    }
    let all = || turns.iter().all(|turns| turns.load(Ordering::Relaxed) > 0);
    while !all() && start.elapsed() < scale.task_limit {
        if let Some(ended) = tasks.try_join_next() {
            ended?.context("a task failed")?;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let seconds = start.elapsed().as_secs_f64();
    let cpu = server.control.server_cpu()? - cpu;
    let turns = turns.iter().map(|turns| turns.load(Ordering::Relaxed)).collect();
    tasks.shutdown().await;
    if let LockClient::Holdfast(locks) = client {
        locks.settle().await;
    }
    Ok(Round { seconds, turns, cpu, connections: connections as f64, bytes })
}

fn key(task: usize) -> String {
    format!("tasks:{}", task % LOCKS)
}

impl LockClient {
    /// Opens the connections first, so that their memory is not counted for the tasks.
    async fn connect(&self) -> Result<()> {
        match self {
            Self::Holdfast(locks) => {
                let guard = locks.lock("first").try_acquire().await?.context("a free lock was refused")?;
                guard.release().await?;
            }
            Self::Rslock(manager) => manager.acquire("first", LEASE).await?.release().await,
        }
        Ok(())
    }

    /// A task that acquires and releases until it is aborted.
    fn spawn(&self, tasks: &mut JoinSet<Result<()>>, task: usize, turns: Arc<[AtomicU64]>) {
        match self.clone() {
            Self::Holdfast(locks) => {
                let lock = locks.lock(key(task)).wait_forever();
                tasks.spawn(async move {
                    loop {
                        let guard = lock.acquire().await?.context("a wait without a timeout has ended")?;
                        turns[task].fetch_add(1, Ordering::Relaxed);
                        tokio::time::sleep(WORK).await;
                        guard.release().await?;
                    }
                })
            }
            Self::Rslock(manager) => tasks.spawn(async move {
                let key = key(task);
                loop {
                    let guard = manager.acquire(key.as_str(), LEASE).await?;
                    turns[task].fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(WORK).await;
                    guard.release().await;
                }
            }),
        };
    }

    async fn all_wait(&self, server: &mut Running, tasks: usize) -> Result<()> {
        if let Self::Rslock(_) = self {
            tokio::time::sleep(ALL_POLL).await;
            return Ok(());
        }
        let end = Instant::now() + PATIENCE;
        while server.control.info("holdfast", "holdfast_waiters")?.parse::<usize>()? < tasks {
            if Instant::now() > end {
                bail!("not all tasks wait within {PATIENCE:?}");
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }
}

fn row(scale: &Scale, program: &Program, name: &str, rounds: &[Round]) -> Row {
    let spread = |of: fn(&Round) -> f64| Spread::of(&rounds.iter().map(of).collect::<Vec<_>>());
    let sum = |round: &Round| round.turns.iter().sum::<u64>() as f64;
    Row {
        server: program.label.clone(),
        name: name.to_owned(),
        tasks: scale.tasks,
        limit_s: scale.task_limit.as_secs_f64(),
        seconds: spread(|round| round.seconds),
        had_a_turn: spread(|round| round.turns.iter().filter(|turns| **turns > 0).count() as f64),
        turns_per_second: Spread::of(&rounds.iter().map(|round| sum(round) / round.seconds).collect::<Vec<_>>()),
        jain: spread(|round| jain(&round.turns)),
        cpu_us: Spread::of(&rounds.iter().map(|round| round.cpu * 1e6 / sum(round)).collect::<Vec<_>>()),
        connections: spread(|round| round.connections),
        bytes_a_task: spread(|round| round.bytes),
    }
}
