//! Somebody else on a server, who notices how long the server's steps are.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::processor::ProcessorClock;
use crate::raw::Raw;
use crate::resp::{self, encode};

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
        self.raw.send_bytes(&self.requests)?;
        // Only from here on the request surely lies there: this thread may have been stopped before it was sent.
        let before = self.clock.now().ok_or(io::ErrorKind::NotConnected)?;
        self.raw.read()?;
        let all = sent.elapsed();
        let answered = used(&resp::text(&self.raw.read()?)?).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Waited { all, server: answered.saturating_sub(before) })
    }
}

/// The processor time of the process that `INFO cpu` tells.
fn used(info: &str) -> Option<Duration> {
    let seconds = |field: &str| -> Option<f64> {
        info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?.trim().parse().ok()
    };
    Duration::try_from_secs_f64(seconds("used_cpu_sys")? + seconds("used_cpu_user")?).ok()
}
