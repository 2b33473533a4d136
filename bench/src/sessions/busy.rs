//! Many tasks of ten busy processes on many locks: whatever there is to be said goes out at once.

use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::contenders::{Contender, Lock};
use crate::crowd::{Crowd, Happened};
use crate::handoff::Round;
use crate::memory::LEASE;
use crate::relay::{Next, Relay};
use crate::server::Running;
use crate::settings::{IDLE, Scale};
use crate::stats::Percentiles;

/// Tasks, or clients where each has a connection of its own.
pub const TASKS: usize = 1_000;
/// Of so many processes, where several share one.
pub const PROCESSES: usize = 10;
/// Locks; the tasks that want the same one belong to different processes.
pub const LOCKS: usize = 200;
const EACH: usize = TASKS / LOCKS;

/// All locks go round, as fast as it goes.
pub fn round(server: &mut Running, contender: Box<dyn Contender>, scale: &Scale) -> Result<Round> {
    let locks: Vec<_> = (0..TASKS).map(|task| Lock::new(format!("busy:{}", task / EACH), task, LEASE)).collect();
    for lock in locks.iter().step_by(EACH) {
        if let Some(seed) = contender.seed(lock) {
            server.control.ask(&seed)?;
        }
    }
    let crowd = Crowd::of_processes(server.port(), contender, locks, PROCESSES)?;
    let relays = (0..LOCKS).map(|_| Relay::default()).collect();
    let mut busy = Busy { crowd, relays, times: Vec::new() };
    for task in 0..TASKS {
        busy.crowd.want(task)?;
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
    crowd: Crowd,
    relays: Vec<Relay>,
    times: Vec<f64>,
}

impl Busy {
    fn go_on(&mut self, until: Instant) -> Result<()> {
        while let Some(happened) = self.crowd.next(until)? {
            let (Happened::Granted(task, _) | Happened::Released(task) | Happened::Waits(task)) = happened;
            let relay = self.relays.get_mut(task / EACH).context("a task of no lock")?;
            if let Happened::Granted(_, at) = happened {
                self.times.extend(relay.left_at().map(|left| (at - left).as_secs_f64() * 1e6));
            }
            match relay.happened(happened) {
                None => {}
                Some(Next::Return(leaver)) => self.crowd.want(leaver)?,
                Some(Next::Leave(holder)) => {
                    relay.leave(holder);
                    self.crowd.release(holder)?;
                }
            }
        }
        Ok(())
    }
}
