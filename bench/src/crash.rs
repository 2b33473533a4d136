//! 3. The holder is killed: how long until the next waiter has the lock.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::json;
use support::resp::{self, Request};

use crate::client::Client;
use crate::client_pool::{ClientEvent, ClientPool};
use crate::contenders::{Contender, Holdfast, Lock};
use crate::plot::Plot;
use crate::report::{Findings, Table};
use crate::server::{Program, Running, With};
use crate::settings::{Scale, Settings};
use crate::stats::Percentiles;

/// The argument that makes this program a holder to be killed.
pub const HOLDER: &str = "hold-until-killed";
/// Never reached in the test.
const EPHEMERAL_LEASE: Duration = Duration::from_secs(30);

/// A line of the result. Times in milliseconds.
#[derive(Serialize)]
struct Row {
    server: String,
    name: String,
    lease_ms: u128,
    /// From the kill to the next holder's reply.
    after_death_ms: Percentiles,
    /// From the end of the dead holder's lease to the next holder's reply.
    after_deadline_ms: Option<Percentiles>,
}

/// Measures on each server.
pub fn run(settings: &Settings, programs: &[Program]) -> Result<Findings> {
    let mut rows = Vec::new();
    for program in programs {
        let mut server = Running::start(program, With::Module)?;
        rows.extend(measure(&settings.scale, program, &mut server)?);
    }
    Ok(Findings {
        section: "crash",
        tables: vec![table(&settings.scale, &rows)],
        goals: vec![],
        plots: plot(&rows).into_iter().collect(),
        data: json!({ "deaths": settings.scale.crashes, "rows": rows }),
    })
}

struct Deaths {
    name: &'static str,
    lease: Duration,
    after_death: Vec<f64>,
    after_deadline: Vec<f64>,
}

fn measure(scale: &Scale, program: &Program, server: &mut Running) -> Result<Vec<Row>> {
    let mut all: Vec<Deaths> = Vec::new();
    for _ in 0..scale.crashes {
        let mut contenders = server.lockers()?;
        contenders.push(Box::new(Holdfast::EPHEMERAL));
        for (index, contender) in contenders.into_iter().enumerate() {
            if all.len() <= index {
                all.push(Deaths::of(contender.name(), scale));
            }
            all[index].once(server, contender).with_context(|| all[index].name)?;
            server.clear()?;
        }
    }
    Ok(all.into_iter().map(|deaths| deaths.row(program)).collect())
}

impl Deaths {
    fn of(name: &'static str, scale: &Scale) -> Self {
        let lease = if name == Holdfast::EPHEMERAL.name() { EPHEMERAL_LEASE } else { scale.crash_lease };
        Self { name, lease, after_death: vec![], after_deadline: vec![] }
    }

    fn once(&mut self, server: &mut Running, contender: Box<dyn Contender>) -> Result<()> {
        let acquire = contender.acquire(&Lock::new("crash", 0, self.lease));
        let mut holder = Holder::start(server.port(), &acquire)?;
        let mut waiter = ClientPool::connect(server.port(), contender, vec![Lock::new("crash", 1, self.lease)])?;
        waiter.want(0)?;
        let Some(ClientEvent::Waits(_)) = waiter.next(Instant::now() + self.lease)? else {
            bail!("the lock was not held")
        };
        // The waiter waits for 50 ms in its own way. Then the holder is killed.
        if let Some(early) = waiter.next(Instant::now() + Duration::from_millis(50))? {
            bail!("{early:?} while the holder lived")
        }
        let deadline = resp::int(&server.control.call(&["PEXPIRETIME", "crash"])?)?;
        let death = Instant::now();
        holder.kill()?;
        let Some(ClientEvent::Granted(_, at)) = waiter.next(death + Duration::from_secs(10))? else {
            bail!("the waiter did not get the lock within 10 s")
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64() * 1e3 - at.elapsed().as_secs_f64() * 1e3;
        self.after_death.push((at - death).as_secs_f64() * 1e3);
        self.after_deadline.push(now - deadline as f64);
        Ok(())
    }

    fn row(mut self, program: &Program) -> Row {
        let leased = self.lease != EPHEMERAL_LEASE;
        Row {
            server: program.label.clone(),
            name: self.name.to_owned(),
            lease_ms: self.lease.as_millis(),
            after_death_ms: Percentiles::of(&mut self.after_death),
            after_deadline_ms: leased.then(|| Percentiles::of(&mut self.after_deadline)),
        }
    }
}

/// A process that holds the lock.
struct Holder(Child);

impl Holder {
    fn start(port: u16, acquire: &Request) -> Result<Self> {
        let request = String::from_utf8_lossy(acquire.bytes()).into_owned();
        let mut child = Command::new(std::env::current_exe()?)
            .args([HOLDER, &port.to_string(), &request])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting the holder")?;
        let output = child.stdout.take().context("the holder's output")?;
        let holder = Self(child);
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        if line.trim() != "held" {
            bail!("the holder did not get the lock: {line}");
        }
        Ok(holder)
    }

    /// Kills it with `kill -9`, and returns when it has ended.
    fn kill(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// The holder's process: it acquires the lock, prints a line, and stays.
pub fn hold_until_killed(mut arguments: impl Iterator<Item = String>) -> Result<()> {
    let port = arguments.next().context("a port")?.parse()?;
    let request = arguments.next().context("a request")?;
    let mut client = Client::connect(port)?;
    client.send(request.as_bytes())?;
    match resp::error(&client.read()?) {
        Some(error) => bail!(error),
        None => println!("held"),
    }
    // Longer than any lease here, in case the parent that should kill it is gone.
    thread::sleep(Duration::from_secs(60));
    Ok(())
}

fn table(scale: &Scale, rows: &[Row]) -> Table {
    let note = format!(
        "`kill -9` of the holder's process with a lease of {} ms (EPHEMERAL: 30 s), one client waiting; {} deaths each, \
         times in ms. A holder that renews a longer lease, as Redisson's of 30 s, leaves the lock held for what is left of it.",
        scale.crash_lease.as_millis(),
        scale.crashes
    );
    let columns = ["who", "after death: p50", "max", "after the lease's end: p50", "max"];
    let mut table = Table::new("The holder dies", note, &columns);
    for row in rows {
        let late = |of: fn(&Percentiles) -> f64| {
            row.after_deadline_ms.as_ref().map_or("-".to_owned(), |p| format!("{:.1}", of(p)))
        };
        table.row(vec![
            format!("{} ({})", row.name, row.server),
            format!("{:.1}", row.after_death_ms.p50),
            format!("{:.1}", row.after_death_ms.max),
            late(|p| p.p50),
            late(|p| p.max),
        ]);
    }
    table
}

fn plot(rows: &[Row]) -> Option<Plot> {
    let rows: Vec<&Row> = rows.chunk_by(|a, b| a.server == b.server).next()?.iter().collect();
    let bars = |of: &dyn Fn(&Row) -> Option<f64>| rows.iter().filter_map(|r| Some((r.name.clone(), of(r)?))).collect();
    let groups = vec![
        ("from the end of the dead holder's lease, median".to_owned(), bars(&|r| Some(r.after_deadline_ms?.p50))),
        (
            "from its death, where the connection's end gives the lock back".to_owned(),
            bars(&|r| r.after_deadline_ms.is_none().then_some(r.after_death_ms.p50)),
        ),
    ];
    Some(Plot::bars("crash", "A holder was killed: until the next one has the lock", "ms", groups))
}
