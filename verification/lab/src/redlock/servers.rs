//! Five servers on loopback, each behind a proxy that counts its messages, and with a clock of its own.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::Duration;

use support::{Fate, Proxy, Server};

use crate::single::{SteppedClock, TempDir};

/// What is done to one of the five.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `kill -9`, and started again with its append-only file.
    Kill,
    /// `SIGSTOP`, then `SIGCONT`.
    Stop,
    /// Its connections end, and it takes none.
    Cut,
    /// Nothing goes to it or comes from it, and nobody is told; what was on its way arrives afterwards.
    Silence,
    /// Its clock goes a minute forward: all of its leases are over.
    Forward,
    /// Its clock goes a minute back: all of its leases last a minute longer.
    Back,
}

/// All faults, in the order in which they are dealt.
pub const FAULTS: [Fault; 6] = [Fault::Kill, Fault::Stop, Fault::Cut, Fault::Forward, Fault::Silence, Fault::Back];

const STEP_SECONDS: i64 = 60;

struct One {
    server: Server,
    proxy: Proxy,
    clock: SteppedClock,
    ahead: i64,
}

/// The five servers.
pub struct Five {
    all: Vec<One>,
    messages: Arc<AtomicU64>,
    _dir: TempDir,
}

impl Five {
    /// Starts them, with every grant on disk before it is answered.
    pub fn start() -> io::Result<Five> {
        let dir = TempDir::new()?;
        let messages = Arc::new(AtomicU64::new(0));
        let start = |number: usize| {
            let (builder, clock) = SteppedClock::server(&dir.0, number)?;
            let server = builder.arg("appendonly", "yes").arg("appendfsync", "always").start();
            let proxy = Proxy::to(server.addr());
            Ok(One { server, proxy, clock, ahead: 0 })
        };
        let all: Vec<One> = (0..5).map(start).collect::<io::Result<_>>()?;
        let five = Five { all, messages, _dir: dir };
        (0..5).for_each(|which| five.pass(which));
        Ok(five)
    }

    /// Where clients find them.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.all.iter().map(|one| one.proxy.addr()).collect()
    }

    /// Messages handed on so far, in both directions.
    pub fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }

    /// Deals a fault to one of them, and undoes it after `away`; a step of the clock stays.
    pub fn deal(&mut self, fault: Fault, which: usize, away: Duration) -> io::Result<()> {
        crate::trace::trace(|| format!("server {which}: {fault:?} for {away:?}"));
        let one = &mut self.all[which];
        match fault {
            Fault::Kill => {
                one.server.kill9();
                sleep(away);
                one.server.restart();
            }
            Fault::Stop => {
                one.server.stop();
                sleep(away);
                one.server.cont();
            }
            Fault::Cut => {
                one.proxy.refuse();
                sleep(away);
                one.proxy.accept();
            }
            Fault::Silence => {
                one.proxy.rule(|_, _| Fate::Hold);
                sleep(away);
                self.pass(which);
            }
            Fault::Forward => one.step(STEP_SECONDS)?,
            Fault::Back => one.step(-STEP_SECONDS)?,
        }
        Ok(())
    }

    fn pass(&self, which: usize) {
        let messages = Arc::clone(&self.messages);
        self.all[which].proxy.rule(move |_, _| {
            messages.fetch_add(1, Ordering::Relaxed);
            Fate::Pass
        });
    }
}

impl One {
    fn step(&mut self, seconds: i64) -> io::Result<()> {
        self.ahead += seconds;
        self.clock.set(self.ahead)
    }
}
