//! 12. Lock caching (`keep`).
//!
//! One process that acquires the same lock repeatedly, ten that mostly use their own locks each, and ten that contend for one lock.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_client::Locks;
use rslock::LockManager;
use serde::{Deserialize, Serialize};
use serde_json::json;
use support::Random;

use crate::client::Client;
use crate::client_pool::{ClientEvent, ClientPool};
use crate::contenders::{Lock, Redisson};
use crate::figures::{ratio, whole};
use crate::process::Process;
use crate::report::{Findings, Goal, Table};
use crate::server::{Program, Running, With};
use crate::settings::{Scale, Settings};
use crate::stats::{Percentiles, Spread, jain};

/// The argument that makes this program one of the processes.
pub const PROCESS: &str = "one-that-keeps";

/// The number of processes, the number of locks, and the percentage of uses with a lock of the process' own.
const SCENARIOS: [(usize, usize, usize); 3] = [(1, 1, 100), (10, 1_000, 90), (10, 1, 100)];

/// The contenders: those that this program can run, and those in Python.
const RUST: [&str; 4] = ["holdfast, keep", "holdfast", "redisson", "rslock"];
const PYTHON: [&str; 2] = ["Python", "redis-py Lock"];
/// The contenders without `keep`, in each language.
const PLAIN: [&str; 2] = ["holdfast", "Python"];

/// The limit for acquire and release of a cached lock, µs.
const MOST_RUST: f64 = 1.0;
/// Contention for one lock may cost at most a tenth: the ratio of uses without and with `keep`.
const MOST_LOST: f64 = 1.1;
/// How long an uncontended lock is cached.
const KEEP: Duration = Duration::from_secs(5);
const LEASE: Duration = Duration::from_secs(60);

/// The task of a process.
#[derive(Clone, Copy, Debug)]
struct Task {
    port: u16,
    number: usize,
    processes: usize,
    locks: usize,
    own: usize,
    window: Duration,
}

impl Task {
    /// The arguments for the program with this name.
    fn words(self, name: &str) -> Vec<String> {
        let Self { port, number, processes, locks, own, window } = self;
        let numbers = [usize::from(port), number, processes, locks, own, window.as_millis() as usize];
        std::iter::once(name.to_owned()).chain(numbers.map(|number| number.to_string())).collect()
    }
}

/// The report of a process.
#[derive(Debug, Deserialize, Serialize)]
struct Report {
    /// How often it acquired and released a lock.
    uses: u64,
    /// The percentiles of the time for each, in µs.
    p50: f64,
    p99: f64,
}

/// The results of one round.
struct Round {
    uses_per_second: f64,
    p50_us: f64,
    p99_us: f64,
    jain: f64,
    requests: f64,
    cpu_us: f64,
}

/// A line of the result.
#[derive(Serialize)]
struct Row {
    server: String,
    processes: usize,
    locks: usize,
    own: usize,
    name: &'static str,
    uses_per_second: Spread,
    /// For acquire and release; the median of the processes.
    p50_us: Spread,
    p99_us: Spread,
    jain: Spread,
    /// The server's requests for each use.
    requests: Spread,
    /// Microseconds of the server's main thread for a use.
    cpu_us: Spread,
    uses_over_plain: Option<Spread>,
}

/// Measures on each server.
pub fn run(settings: &Settings, programs: &[Program]) -> Result<Findings> {
    let mut rows = Vec::new();
    for program in programs {
        let mut server = Running::start(program, With::Module)?;
        for scene in SCENARIOS {
            rows.extend(measure(settings, program, &mut server, scene).with_context(|| program.label.clone())?);
        }
    }
    let alike = |a: &Row, b: &Row| (&a.server, a.processes, a.locks) == (&b.server, b.processes, b.locks);
    Ok(Findings {
        section: "keep",
        tables: rows.chunk_by(alike).map(table).collect(),
        goals: rows.iter().filter_map(goal).collect(),
        plots: vec![],
        data: json!({ "rounds": settings.scale.keep_rounds, "rows": rows }),
    })
}

fn goal(row: &Row) -> Option<Goal> {
    if row.name != "holdfast, keep" {
        return None;
    }
    let (name, server) = (row.name, &row.server);
    Some(match (row.processes, row.locks) {
        (1, _) => {
            Goal::at_most(format!("µs of acquire and release of a kept lock, {name} ({server})"), MOST_RUST, row.p50_us)
        }
        (_, 1) => {
            let Spread { median, min, max } = row.uses_over_plain?;
            let lost = Spread { median: 1.0 / median, min: 1.0 / max, max: 1.0 / min };
            Goal::at_most(format!("ten fight for one lock: uses without / with, {name} ({server})"), MOST_LOST, lost)
        }
        _ => return None,
    })
}

fn measure(
    settings: &Settings,
    program: &Program,
    server: &mut Running,
    scene: (usize, usize, usize),
) -> Result<Vec<Row>> {
    let (this, script) = (std::env::current_exe()?, Path::new(env!("CARGO_MANIFEST_DIR")).join("one_that_keeps.py"));
    let rust = RUST.map(|name| (name, vec![this.clone(), PROCESS.into()]));
    let python = settings.python.iter();
    let python = python.flat_map(|python| PYTHON.map(|name| (name, vec![python.clone(), script.clone()])));
    let mut all: Vec<(&str, Vec<PathBuf>, Vec<Round>)> =
        rust.into_iter().chain(python).map(|(name, words)| (name, words, Vec::new())).collect();
    all.retain(|(name, ..)| settings.measures(name));
    let count = all.len();
    for number in 0..settings.scale.keep_rounds {
        for turn in 0..count {
            let (name, words, rounds) = &mut all[(number + turn) % count];
            rounds.push(round(&settings.scale, server, (name, words), scene).context(*name)?);
            server.clear()?;
        }
    }
    let plain = |name: &str| {
        let plain = PLAIN[usize::from(PYTHON.contains(&name))];
        all.iter().find(|(of, ..)| *of == plain).map_or(&[][..], |(.., rounds)| rounds.as_slice())
    };
    Ok(all.iter().map(|(name, _, rounds)| row(program, scene, name, rounds, plain(name))).collect())
}

fn round(
    scale: &Scale,
    server: &mut Running,
    (name, words): (&str, &[PathBuf]),
    (processes, locks, own): (usize, usize, usize),
) -> Result<Round> {
    let task = Task { port: server.port(), number: 0, processes, locks, own, window: scale.keep_window };
    let all = (0..processes).map(|number| Process::start(words, Task { number, ..task }.words(name)));
    let mut all = all.collect::<Result<Vec<Process>>>()?;
    all.iter_mut().try_for_each(Process::is_ready)?;
    let asked = |server: &mut Running| -> Result<f64> {
        Ok(server.control.info("stats", "total_commands_processed")?.parse()?)
    };
    let (cpu, requests) = (server.control.server_cpu()?, asked(server)?);
    all.iter_mut().try_for_each(|process| process.send_line("go"))?;
    let report = |process: &mut Process| serde_json::from_str(&process.line()?).context("a report");
    let reports = all.iter_mut().map(report).collect::<Result<Vec<Report>>>()?;
    // The requests that read these figures are not counted.
    let (cpu, requests) = (server.control.server_cpu()? - cpu, asked(server)? - requests - 2.0);
    let uses: Vec<u64> = reports.iter().map(|report| report.uses).collect();
    let total = uses.iter().sum::<u64>() as f64;
    if total == 0.0 {
        bail!("no lock was acquired");
    }
    let middle = |of: fn(&Report) -> f64| Spread::of(&reports.iter().map(of).collect::<Vec<_>>()).median;
    Ok(Round {
        uses_per_second: total / scale.keep_window.as_secs_f64(),
        p50_us: middle(|report| report.p50),
        p99_us: middle(|report| report.p99),
        jain: jain(&uses),
        requests: requests / total,
        cpu_us: cpu * 1e6 / total,
    })
}

fn row(
    program: &Program,
    (processes, locks, own): (usize, usize, usize),
    name: &'static str,
    rounds: &[Round],
    plain: &[Round],
) -> Row {
    let all = |rounds: &[Round], of: fn(&Round) -> f64| rounds.iter().map(of).collect::<Vec<_>>();
    let spread = |of: fn(&Round) -> f64| Spread::of(&all(rounds, of));
    let uses = |round: &Round| round.uses_per_second;
    let is_compared = !PLAIN.contains(&name) && !plain.is_empty();
    Row {
        server: program.label.clone(),
        processes,
        locks,
        own,
        name,
        uses_per_second: spread(uses),
        p50_us: spread(|round| round.p50_us),
        p99_us: spread(|round| round.p99_us),
        jain: spread(|round| round.jain),
        requests: spread(|round| round.requests),
        cpu_us: spread(|round| round.cpu_us),
        uses_over_plain: is_compared.then(|| Spread::of_ratios(&all(rounds, uses), &all(plain, uses))),
    }
}

fn table(rows: &[Row]) -> Table {
    let title = rows.first().map_or_else(String::new, |row| {
        let what = match (row.processes, row.locks) {
            (1, _) => "one process takes one lock again and again".to_owned(),
            (processes, 1) => format!("{processes} processes fight for one lock"),
            (processes, locks) => {
                let locks = whole(locks as f64);
                format!("{processes} processes, {locks} locks, {} of a hundred uses by the same process", row.own)
            }
        };
        format!("Kept locks: {what}, {}", row.server)
    });
    let note = "Take a lock, release it, and again. redis-py's is beside that of the Python client, which keeps none.";
    let columns =
        ["who", "uses/s", "p50", "p99", "Jain", "requests a use", "server CPU a use", "uses/s / without keep"];
    let mut table = Table::new(title, note, &columns);
    for row in rows {
        table.row(vec![
            row.name.to_owned(),
            whole(row.uses_per_second.median),
            micros(row.p50_us.median),
            micros(row.p99_us.median),
            format!("{:.3}", row.jain.median),
            format!("{:.3}", row.requests.median),
            micros(row.cpu_us.median),
            row.uses_over_plain.as_ref().map_or_else(|| "1".to_owned(), ratio),
        ]);
    }
    table
}

/// With three significant digits, also below a microsecond.
fn micros(micros: f64) -> String {
    if micros < 1.0 { format!("{:.3} µs", micros) } else { crate::figures::micros(micros) }
}

/// A process: it connects, waits for the start, uses locks for a while, and reports.
pub fn run_process(mut arguments: impl Iterator<Item = String>) -> Result<()> {
    let name = arguments.next().context("a name")?;
    let numbers = arguments.map(|number| Ok(number.parse()?)).collect::<Result<Vec<usize>>>()?;
    let [port, number, processes, locks, own, window] = numbers[..] else { bail!("six numbers") };
    let (port, window) = (u16::try_from(port)?, Duration::from_millis(window as u64));
    let uses = Uses::new(Task { port, number, processes, locks, own, window });
    let url = format!("redis://127.0.0.1:{port}");
    let (runtime, locks) = (tokio::runtime::Builder::new_current_thread().enable_all().build()?, Locks::open(&url)?);
    let uses = match name.as_str() {
        "holdfast, keep" => runtime.block_on(with_holdfast(uses, &locks, Some(KEEP))),
        "holdfast" => runtime.block_on(with_holdfast(uses, &locks, None)),
        "rslock" => runtime.block_on(with_rslock(uses, &url)),
        "redisson" => with_redisson(uses, port),
        other => bail!("unknown contender {other}"),
    };
    println!("{}", serde_json::to_string(&uses?.report())?);
    // The process stays until its input ends. The runtime keeps running, so that cached locks are released on
    // contention.
    runtime
        .block_on(async { tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await })??;
    Ok(())
}

/// The uses of one process.
struct Uses {
    task: Task,
    random: Random,
    end: Option<Instant>,
    times: Vec<f64>,
}

impl Uses {
    fn new(task: Task) -> Self {
        Self { task, random: Random::new(), end: None, times: Vec::new() }
    }

    /// Prints that it is ready, and waits for the start.
    fn begin(&mut self) -> Result<()> {
        println!("ready");
        std::io::stdin().read_line(&mut String::new())?;
        self.end = Some(Instant::now() + self.task.window);
        Ok(())
    }

    /// The number of the next lock; `None`: the time is over.
    fn next(&mut self, now: Instant) -> Option<usize> {
        if self.end.is_some_and(|end| now >= end) {
            return None;
        }
        let Task { number, processes, locks, own, .. } = self.task;
        if locks == 1 {
            return Some(0);
        }
        let process = match self.random.index(100) < own {
            true => number,
            false => (number + 1 + self.random.index(processes - 1)) % processes,
        };
        Some(self.random.index(locks / processes) * processes + process)
    }

    fn used(&mut self, since: Instant, now: Instant) {
        self.times.push((now - since).as_secs_f64() * 1e6);
    }

    fn report(mut self) -> Report {
        let Percentiles { p50, p99, .. } = Percentiles::of(&mut self.times);
        Report { uses: self.times.len() as u64, p50, p99 }
    }
}

fn key(lock: usize) -> String {
    format!("kept:{lock}")
}

async fn with_holdfast(mut uses: Uses, locks: &Locks, keep: Option<Duration>) -> Result<Uses> {
    let lock = |number| {
        let lock = locks.lock(key(number)).wait_forever();
        keep.map_or(lock.clone(), |keep| lock.keep(keep))
    };
    let all: Vec<holdfast_client::Lock> = (0..uses.task.locks).map(lock).collect();
    locks.lock("first").wait_forever().acquire().await?.context("a wait has ended")?.release().await?;
    uses.begin()?;
    let mut now = Instant::now();
    while let Some(number) = uses.next(now) {
        let since = Instant::now();
        let guard = all[number].acquire().await?.context("a wait without a timeout has ended")?;
        guard.release().await?;
        now = Instant::now();
        uses.used(since, now);
    }
    Ok(uses)
}

async fn with_rslock(mut uses: Uses, url: &str) -> Result<Uses> {
    let manager = LockManager::new(vec![url]);
    manager.acquire("first", LEASE).await?.release().await;
    uses.begin()?;
    let mut now = Instant::now();
    while let Some(number) = uses.next(now) {
        let (key, since) = (key(number), Instant::now());
        manager.acquire(key.as_str(), LEASE).await?.release().await;
        now = Instant::now();
        uses.used(since, now);
    }
    Ok(uses)
}

fn with_redisson(mut uses: Uses, port: u16) -> Result<Uses> {
    let redisson = Redisson::load(&mut Client::connect(port)?)?;
    let mut pool = ClientPool::connect(port, Box::new(redisson), vec![Lock::new("", uses.task.number, LEASE)])?;
    uses.begin()?;
    let mut now = Instant::now();
    while let Some(number) = uses.next(now) {
        pool.switch_to(0, &key(number));
        let since = Instant::now();
        pool.want(0)?;
        let deadline = since + LEASE;
        loop {
            match pool.next(deadline)?.context("a reply")? {
                ClientEvent::Granted(..) => pool.release(0)?,
                ClientEvent::Released(_) => break,
                ClientEvent::Waits(_) => {}
            }
        }
        now = Instant::now();
        uses.used(since, now);
    }
    Ok(uses)
}
