//! Somebody else on a server, who notices how long the server's steps are.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::processor::ProcessorClock;
use crate::raw::Raw;
use crate::resp::{self, encode};

/// An answer comes sooner than this if the server has nothing else to do.
const SOON: Duration = Duration::from_micros(200);

/// How long a `PING` waited.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waited {
    /// From request to reply, with all that the machine did besides.
    pub all: Duration,
    /// The processor time that the server used while the request lay there. A machine that is busy with others, or stops
    /// everybody, does not add to it, and neither does what the server did after its answer.
    pub server: Duration,
}

/// A client that sends a `PING` at a time, and asks right behind it what processor time the server has used by then.
pub struct Bystander {
    raw: Raw,
    clock: ProcessorClock,
    requests: Vec<u8>,
}

impl Bystander {
    /// Connects to the server that listens on `address` and is the process `pid`.
    ///
    /// # Errors
    ///
    /// If there is no such server.
    pub fn connect(address: SocketAddr, pid: u32) -> io::Result<Self> {
        let requests = encode([&["PING"][..], &["INFO", "cpu"]]);
        Ok(Self { raw: Raw::connect(address)?, clock: ProcessorClock::of(pid)?, requests })
    }

    /// Sends one and waits for the reply.
    ///
    /// # Errors
    ///
    /// If the server is gone.
    pub fn ping(&mut self) -> io::Result<Waited> {
        let sent = Instant::now();
        let first = self.send()?;
        // A server hands its replies to the network at the end of the turn. A PING that it took in just before a long step
        // waits for that step with its answer already made up; so another one is sent to lie there during the step.
        let second = if self.raw.arrives_within(SOON)? { None } else { Some(self.send()?) };
        self.raw.read()?;
        let all = sent.elapsed();
        let mut server = self.waited_since(first)?;
        if let Some(second) = second {
            self.raw.read()?;
            server = server.max(self.waited_since(second)?);
        }
        Ok(Waited { all, server })
    }

    /// Sends a request. What the server had used by then: only when it is sent it surely lies there, for this thread may
    /// have been stopped before.
    fn send(&mut self) -> io::Result<Duration> {
        self.raw.send_bytes(&self.requests)?;
        self.clock.now().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn waited_since(&mut self, sent: Duration) -> io::Result<Duration> {
        let info = resp::text(&self.raw.read()?)?;
        Ok(used(&info).ok_or(io::ErrorKind::InvalidData)?.saturating_sub(sent))
    }
}

/// The processor time of the process that `INFO cpu` tells.
fn used(info: &str) -> Option<Duration> {
    let seconds = |field: &str| -> Option<f64> {
        info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?.trim().parse().ok()
    };
    Duration::try_from_secs_f64(seconds("used_cpu_sys")? + seconds("used_cpu_user")?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Over, Server};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    const BUSY: &str = "local sum = 0 for i = 1, 5000000 do sum = sum + i % 7 end return sum";

    /// However the steps and the requests fall together, most of the steps are seen, and as long as they are.
    #[test]
    fn steps_are_seen_as_long_as_they_are() {
        const STEPS: usize = 10;
        let server = Server::builder().without_module().start();
        let mut bystander = Bystander::connect(server.addr(), server.pid()).unwrap();
        let over = AtomicBool::new(false);
        let (pings, used) = thread::scope(|scope| {
            let pings = scope.spawn(|| {
                let more = || (!over.load(Ordering::Relaxed)).then(|| bystander.ping().unwrap().server);
                std::iter::from_fn(more).collect::<Vec<_>>()
            });
            let (mut raw, clock) = (server.raw(), ProcessorClock::of(server.pid()).unwrap());
            let used = (0..STEPS).map(|_| {
                let before = clock.now().unwrap();
                raw.call(&[b"EVAL", BUSY.as_bytes(), b"0"]);
                clock.now().unwrap() - before
            });
            let used: Vec<Duration> = {
                let _over = Over(&over);
                used.collect()
            };
            (pings.join().unwrap(), used)
        });
        let (shortest, longest) = (used.iter().min().unwrap(), used.iter().max().unwrap());
        let seen = pings.iter().filter(|ping| **ping > *shortest * 3 / 4).count();
        assert!(seen >= STEPS / 2, "{seen} of {STEPS} steps of {shortest:?} and more");
        assert!(pings.iter().max().unwrap() < &(*longest * 2), "{:?}", pings.iter().max());
    }
}
