//! Five servers on loopback, each behind a proxy that counts its messages, and with its own clock.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::Duration;

use support::{Fate, Proxy, Server};

use crate::single::{SteppedClock, TempDir};

/// A fault of one of the five.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `kill -9`, and a restart with the append-only file.
    Kill,
    /// `SIGSTOP`, then `SIGCONT`.
    Stop,
    /// Its connections are closed, and it accepts none.
    Cut,
    /// Its network delivers nothing for a while. Later all messages arrive.
    Silence,
    /// Its clock steps a minute forward: all of its leases expire.
    Forward,
    /// Its clock steps a minute back: all of its leases last a minute longer.
    Back,
}

/// All faults, in the order of injection.
pub const FAULTS: [Fault; 6] = [Fault::Kill, Fault::Stop, Fault::Cut, Fault::Forward, Fault::Silence, Fault::Back];

const STEP_SECONDS: i64 = 60;

struct Member {
    server: Server,
    proxy: Proxy,
    clock: SteppedClock,
    ahead: i64,
}

/// The five servers.
pub struct FiveServers {
    all: Vec<Member>,
    messages: Arc<AtomicU64>,
    _dir: TempDir,
}

impl FiveServers {
    /// Starts them. Every grant is on disk before its reply.
    pub fn start() -> io::Result<FiveServers> {
        let dir = TempDir::new()?;
        let messages = Arc::new(AtomicU64::new(0));
        let start = |number: usize| {
            let (builder, clock) = SteppedClock::server(&dir.0, number)?;
            let server = builder.arg("appendonly", "yes").arg("appendfsync", "always").start();
            let proxy = Proxy::to(server.addr());
            Ok(Member { server, proxy, clock, ahead: 0 })
        };
        let all: Vec<Member> = (0..5).map(start).collect::<io::Result<_>>()?;
        let five = FiveServers { all, messages, _dir: dir };
        (0..5).for_each(|which| five.pass(which));
        Ok(five)
    }

    /// The addresses for clients.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.all.iter().map(|one| one.proxy.addr()).collect()
    }

    /// The number of messages so far, in both directions.
    pub fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }

    /// Injects a fault into one of them, and undoes it after `away`. A clock step stays.
    pub fn inject_fault(&mut self, fault: Fault, which: usize, away: Duration) -> io::Result<()> {
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

impl Member {
    fn step(&mut self, seconds: i64) -> io::Result<()> {
        self.ahead += seconds;
        self.clock.set(self.ahead)
    }
}
