//! Many tasks of ten busy processes on many locks: several events are sent at once.

use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::client_pool::{ClientEvent, ClientPool};
use crate::contenders::{Contender, Lock};
use crate::handoff::Round;
use crate::memory::LEASE;
use crate::relay::{Next, Relay};
use crate::server::Running;
use crate::settings::{IDLE, Scale};
use crate::stats::Percentiles;

/// Tasks, or clients if each has its own connection.
pub const TASKS: usize = 1_000;
/// The number of processes, if several tasks share one.
pub const PROCESSES: usize = 10;
/// Locks. The tasks that use the same one belong to different processes.
pub const LOCKS: usize = 200;
const EACH: usize = TASKS / LOCKS;

/// All locks are handed on, as fast as possible.
pub fn round(server: &mut Running, contender: Box<dyn Contender>, scale: &Scale) -> Result<Round> {
    let locks: Vec<_> = (0..TASKS).map(|task| Lock::new(format!("busy:{}", task / EACH), task, LEASE)).collect();
    for lock in locks.iter().step_by(EACH) {
        if let Some(seed) = contender.seed(lock) {
            server.control.ask(&seed)?;
        }
    }
    let pool = ClientPool::of_processes(server.port(), contender, locks, PROCESSES)?;
    let relays = (0..LOCKS).map(|_| Relay::default()).collect();
    let mut busy = Busy { pool, relays, times: Vec::new() };
    for task in 0..TASKS {
        busy.pool.want(task)?;
    }
    busy.go_on(Instant::now() + scale.handoff_least / 2)?;
    busy.times.clear();
    let (cpu, start) = (server.control.server_cpu()?, Instant::now());
    while busy.times.is_empty() && start.elapsed() < IDLE {
        busy.go_on(Instant::now() + scale.handoff_least)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let cpu = server.control.server_cpu()? - cpu;
    let count = busy.times.len() as f64;
    if busy.times.is_empty() {
        bail!("nothing was handed off in {seconds:.1} s");
    }
    Ok(Round {
        per_second: count / seconds,
        cpu_us: cpu * 1e6 / count,
        times: Percentiles::of(&mut busy.times),
        ..Round::default()
    })
}

struct Busy {
    pool: ClientPool,
    relays: Vec<Relay>,
    times: Vec<f64>,
}

impl Busy {
    fn go_on(&mut self, until: Instant) -> Result<()> {
        while let Some(event) = self.pool.next(until)? {
            let (ClientEvent::Granted(task, _) | ClientEvent::Released(task) | ClientEvent::Waits(task)) = event;
            let relay = self.relays.get_mut(task / EACH).context("a task of no lock")?;
            if let ClientEvent::Granted(_, at) = event {
                self.times.extend(relay.left_at().map(|left| (at - left).as_secs_f64() * 1e6));
            }
            match relay.handle(event) {
                None => {}
                Some(Next::Return(leaver)) => self.pool.want(leaver)?,
                Some(Next::Leave(holder)) => {
                    relay.leave(holder);
                    self.pool.release(holder)?;
                }
            }
        }
        Ok(())
    }
}
