//! 11. After a stall: the server is paused until each client considers its locks lost, and then all clients reconnect.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_client::Locks;
use serde::Serialize;
use serde_json::json;
use support::resp::{self, Value};

use crate::figures::whole;
use crate::process::Process;
use crate::report::{Findings, Table};
use crate::server::{Program, Running, With};
use crate::settings::{Herd, Settings};
use crate::stats::Percentiles;

/// The argument that makes this program one of the processes.
pub const PROCESS: &str = "one-of-the-herd";
/// The interval at which the server's state is read.
const STEP: Duration = Duration::from_millis(20);
/// Without a change for this long, the recovery is complete.
const QUIET: Duration = Duration::from_secs(8);
/// Timeout for the setup, and for the recovery.
const LIMIT: Duration = Duration::from_secs(180);

/// A line of the result.
#[derive(Serialize)]
struct Row {
    server: String,
    name: &'static str,
    /// From the end of the pause to the last connection, and to full recovery.
    whole_s: Option<f64>,
    connections: i64,
    requests: i64,
    /// Seconds of the server's main thread.
    cpu_s: f64,
    holds_lost: usize,
    waits_ended: usize,
    /// By how much the positions in the queues have changed.
    moved_ms: Percentiles,
}

/// Measures on each server.
pub fn run(settings: &Settings, programs: &[Program]) -> Result<Findings> {
    let herd = &settings.scale.herd;
    let mut clients = vec![("Rust", vec![std::env::current_exe()?, PROCESS.into()])];
    if let Some(python) = &settings.python {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("one_of_the_herd.py");
        clients.push(("Python, asyncio", vec![python.clone(), script]));
    }
    let mut rows = Vec::new();
    for program in programs {
        for (name, words) in &clients {
            rows.push(measure(herd, program, name, words).with_context(|| format!("{name}, {}", program.label))?);
        }
    }
    Ok(Findings {
        section: "herd",
        tables: vec![table(herd, &rows)],
        goals: vec![],
        plots: vec![],
        data: json!({ "herd": herd, "rows": rows }),
    })
}

/// The server's state.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    waiters: i64,
    holds: i64,
    sessions: i64,
    connections: i64,
}

impl Seen {
    fn look(server: &mut Running) -> Result<Self> {
        let text = resp::text(&server.control.call(&["INFO", "everything"])?)?;
        let field = |name: &str| -> Result<i64> {
            let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            Ok(found.with_context(|| format!("INFO has no {name}"))?.trim().parse()?)
        };
        Ok(Self {
            waiters: field("holdfast_waiters")?,
            holds: field("holdfast_bound_holds")?,
            sessions: field("holdfast_sessions")?,
            connections: field("total_connections_received")?,
        })
    }

    fn is_whole(&self, herd: &Herd) -> bool {
        let all = |each: usize| (herd.processes * each) as i64;
        (self.waiters, self.holds, self.sessions) == (all(herd.waits), all(herd.holds), all(1))
    }
}

fn measure(herd: &Herd, program: &Program, name: &'static str, words: &[PathBuf]) -> Result<Row> {
    let mut server = Running::start(program, With::Module)?;
    for key in 0..herd.waits {
        server.control.call(&["LOCK.ACQUIRE", &wanted(key), "nobody", "LEASE", "3600000"])?;
    }
    let mut processes = Vec::new();
    for number in 0..herd.processes {
        let numbers = [usize::from(server.port()), number, herd.holds, herd.waits];
        processes.push(Process::start(words, numbers.map(|number| number.to_string()))?);
    }
    processes.iter_mut().try_for_each(Process::is_ready)?;
    let begin = Instant::now();
    while !Seen::look(&mut server)?.is_whole(herd) {
        if begin.elapsed() > LIMIT {
            bail!("never whole: {:?}", Seen::look(&mut server)?);
        }
        thread::sleep(STEP);
    }
    let before = Seen::look(&mut server)?;
    let places = places(&mut server, herd, begin)?;
    let requests = |server: &mut Running| -> Result<i64> {
        Ok(server.control.info("stats", "total_commands_processed")?.parse()?)
    };
    let (asked, cpu) = (requests(&mut server)?, server.control.server_cpu()?);

    signal(&server, libc::SIGSTOP)?;
    thread::sleep(herd.stall);
    signal(&server, libc::SIGCONT)?;
    let on = Instant::now();
    let (mut last, mut changed) = (before.clone(), Duration::ZERO);
    while on.elapsed() < changed + QUIET {
        let seen = Seen::look(&mut server)?;
        if seen != last || !seen.is_whole(herd) {
            changed = on.elapsed();
        }
        last = seen;
        if on.elapsed() > LIMIT {
            eprintln!("{name}, {}: not whole after {} s: {last:?}", program.label, LIMIT.as_secs());
            break;
        }
        thread::sleep(STEP);
    }
    let cpu = server.control.server_cpu()? - cpu;
    let asked = requests(&mut server)? - asked;
    let after = self::places(&mut server, herd, begin)?;
    let moved = |(waiter, since): (_, &f64)| Some((after.get(waiter)? - since).abs());
    let mut moved: Vec<f64> = places.iter().filter_map(moved).collect();
    let (mut lost, mut ended) = (0, 0);
    for process in &mut processes {
        let (holds, waits) = report(process)?;
        lost += holds;
        ended += waits;
    }
    Ok(Row {
        server: program.label.clone(),
        name,
        whole_s: last.is_whole(herd).then_some(changed.as_secs_f64()),
        connections: last.connections - before.connections,
        requests: asked,
        cpu_s: cpu,
        holds_lost: lost,
        waits_ended: ended,
        moved_ms: Percentiles::of(&mut moved),
    })
}

/// The position of each waiter in each queue: since when it waits, in ms.
fn places(server: &mut Running, herd: &Herd, begin: Instant) -> Result<BTreeMap<(usize, String), f64>> {
    let mut places = BTreeMap::new();
    for key in 0..herd.waits {
        let queue = server.control.call(&["LOCK.WAITERS", &wanted(key), "COUNT", "100000"])?;
        let Value::Array(queue) = queue else { bail!("not a queue: {queue:?}") };
        let now = begin.elapsed().as_secs_f64() * 1e3;
        for waiter in queue {
            let Value::Array(fields) = waiter else { bail!("not a waiter: {waiter:?}") };
            let field = |name: &str| {
                let found = fields.chunks(2).find(|pair| resp::text(&pair[0]).is_ok_and(|field| field == name));
                found.and_then(|pair| pair.get(1)).with_context(|| format!("a waiter without {name}"))
            };
            let (owner, waited) = (resp::text(field("owner")?)?, resp::int(field("waited")?)?);
            places.insert((key, owner), now - waited as f64);
        }
    }
    Ok(places)
}

fn wanted(key: usize) -> String {
    format!("wanted:{key}")
}

fn signal(server: &Running, signal: libc::c_int) -> Result<()> {
    let process = libc::pid_t::try_from(server.server.pid())?;
    // SAFETY: a call with two numbers. The process is our child, which has not been reaped.
    if unsafe { libc::kill(process, signal) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(())
}

/// The number of its lost holds, and of its ended waits.
fn report(process: &mut Process) -> Result<(usize, usize)> {
    process.send_line("report")?;
    let line = process.line()?;
    let (holds, waits) = line.split_once(' ').with_context(|| format!("a report: {line:?}"))?;
    Ok((holds.parse()?, waits.parse()?))
}

/// A process with the Rust client: it holds and waits, prints that it is ready, and reports on request.
pub fn run_process(arguments: impl Iterator<Item = String>) -> Result<()> {
    let numbers = arguments.map(|number| Ok(number.parse()?)).collect::<Result<Vec<usize>>>()?;
    let [port, number, holds, waits] = numbers[..] else { bail!("expected a port, a number, holds and waits") };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let locks = Locks::open(&format!("redis://127.0.0.1:{port}"))?;
        let mut held = Vec::new();
        for hold in 0..holds {
            let guard = locks.lock(format!("own:{number}:{hold}")).try_acquire().await?;
            held.push(guard.context("a free lock")?);
        }
        let wait = |key| {
            let lock = locks.lock(wanted(key)).wait_forever();
            tokio::spawn(async move { lock.acquire().await.map(drop) })
        };
        let waiting: Vec<_> = (0..waits).map(wait).collect();
        println!("ready");
        tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await??;
        let lost = held.iter().filter(|guard| !guard.is_held()).count();
        let ended = waiting.iter().filter(|waiting| waiting.is_finished()).count();
        println!("{lost} {ended}");
        // The process stays until its input ends, because it must not release the locks one by one.
        tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await??;
        Ok(())
    })
}

fn table(herd: &Herd, rows: &[Row]) -> Table {
    let note = format!(
        "{} processes, each with {} waits (all wait for the same locks) and {} holds of its own; the server is stopped for {} s \
         (SIGSTOP), and goes on. *Whole*: until the last connection was made and nothing was missing.",
        herd.processes,
        herd.waits,
        herd.holds,
        herd.stall.as_secs_f64()
    );
    let columns = [
        "who",
        "whole after",
        "holds lost",
        "waits ended",
        "places moved: p50",
        "max",
        "connections",
        "requests",
        "server CPU",
    ];
    let mut table = Table::new("After a stall", note, &columns);
    for row in rows {
        table.row(vec![
            format!("{} ({})", row.name, row.server),
            row.whole_s.map_or_else(|| "never".to_owned(), |seconds| format!("{seconds:.1} s")),
            whole(row.holds_lost as f64),
            whole(row.waits_ended as f64),
            format!("{:.0} ms", row.moved_ms.p50),
            format!("{:.0} ms", row.moved_ms.max),
            whole(row.connections as f64),
            whole(row.requests as f64),
            format!("{:.2} s", row.cpu_s),
        ]);
    }
    table
}
