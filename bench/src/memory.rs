//! 4. The server's memory for a held lock, for a waiting client, for a watched lock.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;
use support::resp;

use crate::client_pool::{ClientEvent, ClientPool};
use crate::contenders::{Answer, Contender, Holdfast, List, Lock};
use crate::figures::whole;
use crate::report::{Findings, Table};
use crate::server::{Program, Running, With};
use crate::settings::{Scale, Settings};

/// Longer than any measurement.
pub const LEASE: Duration = Duration::from_secs(600);

/// A line of the result.
#[derive(Serialize)]
struct Row {
    server: String,
    what: String,
    name: String,
    count: usize,
    /// Growth of `used_memory` for one.
    bytes: f64,
}

/// Measures on each server.
pub fn run(settings: &Settings, programs: &[Program]) -> Result<Findings> {
    let mut rows = Vec::new();
    for program in programs {
        rows.extend(measure(&settings.scale, program).with_context(|| program.label.clone())?);
    }
    Ok(Findings { section: "memory", tables: vec![table(&rows)], goals: vec![], plots: vec![], data: json!(rows) })
}

fn measure(scale: &Scale, program: &Program) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut add = |what: &str, name: &str, count: usize, bytes: f64| {
        let (what, name) = (what.to_owned(), name.to_owned());
        rows.push(Row { server: program.label.clone(), what, name, count, bytes });
    };
    let mut contenders = fresh(program)?.lockers()?;
    contenders.push(Box::new(Holdfast::EPHEMERAL));
    for contender in contenders {
        let bytes = held(&mut fresh(program)?, contender.as_ref(), scale)?;
        add("held lock", contender.name(), scale.locks_held, bytes);
    }
    let mut contenders = fresh(program)?.lockers()?;
    contenders.push(Box::new(List));
    for contender in contenders {
        let name = contender.name();
        let bytes = waiting(&mut fresh(program)?, contender, scale)?;
        add("waiter, beside its connection", name, scale.waiters, bytes);
    }
    Ok(rows)
}

/// A new server for every figure, because an allocator keeps the state of earlier ones.
pub fn fresh(program: &Program) -> Result<Running> {
    let mut server = Running::start(program, With::Module)?;
    server.lockers()?;
    Ok(server)
}

fn held(server: &mut Running, contender: &dyn Contender, scale: &Scale) -> Result<f64> {
    let count = scale.locks_held;
    let before = settled_memory(server, scale)?;
    let requests = (0..count).map(|number| contender.acquire(&Lock::new(format!("lock:{number:08}"), number, LEASE)));
    server.control.pipeline(requests, 100, |reply| match contender.answer(&reply)? {
        Answer::Granted => Ok(()),
        Answer::Busy(_) => anyhow::bail!("a free lock was refused"),
    })?;
    Ok((settled_memory(server, scale)? - before) / count as f64)
}

/// The server's bytes for a client that waits for a lock, beside its connection.
pub fn waiting(server: &mut Running, contender: Box<dyn Contender>, scale: &Scale) -> Result<f64> {
    let count = scale.waiters;
    let first = Lock::new("hot", count, LEASE);
    // A client that is not among the waiters holds the lock. An empty list needs no holder.
    if contender.seed(&first).is_none()
        && let Some(error) = resp::error(&server.control.ask(&contender.acquire(&first))?)
    {
        anyhow::bail!(error);
    }
    let locks = (0..count).map(|client| Lock::new("hot", client, LEASE)).collect();
    let mut pool = ClientPool::connect(server.port(), contender, locks)?;
    let before = settled_memory(server, scale)?;
    for client in 0..count {
        pool.want(client)?;
    }
    // Redisson's clients subscribe and try once more before they sleep.
    let deadline = Instant::now() + 4 * scale.settling_step;
    while let Some(event) = pool.next(deadline)? {
        if !matches!(event, ClientEvent::Waits(_)) {
            anyhow::bail!("{event:?} although the lock is held");
        }
    }
    Ok((settled_memory(server, scale)? - before) / count as f64)
}

/// `used_memory` when it does not decrease any more: the server frees the buffers of idle clients gradually.
pub fn settled_memory(server: &mut Running, scale: &Scale) -> Result<f64> {
    let give_up = Instant::now() + 30 * scale.settling_step;
    let mut same = 0;
    let mut last: f64 = server.control.info("memory", "used_memory")?.parse()?;
    while same < 6 && Instant::now() < give_up {
        thread::sleep(scale.settling_step);
        let now: f64 = server.control.info("memory", "used_memory")?.parse()?;
        same = if (now - last).abs() / last < 0.001 { same + 1 } else { 0 };
        last = now;
    }
    Ok(last)
}

fn table(rows: &[Row]) -> Table {
    let note = "Growth of the server's `used_memory` for one of so many; owners of 40 bytes. A polling waiter costs the \
                server nothing while it sleeps.";
    let mut table = Table::new("Memory", note, &["what", "who", "count", "bytes for one"]);
    for row in rows {
        table.row(vec![
            format!("{} ({})", row.what, row.server),
            row.name.clone(),
            whole(row.count as f64),
            whole(row.bytes),
        ]);
    }
    table
}
