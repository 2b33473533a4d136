//! A client that measures how long the server's event-loop iterations are.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::processor::ProcessorClock;
use crate::raw::Raw;
use crate::resp::{self, encode};

/// A reply takes less than this if the server is otherwise idle.
const SOON: Duration = Duration::from_micros(200);

/// How long a `PING` waited.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waited {
    /// From request to reply, including all that the machine did besides.
    pub all: Duration,
    /// The processor time that the server used between request and reply. Other load on the machine does not add to it, and
    /// neither does the server's work after the reply.
    pub server: Duration,
}

/// A client that sends one `PING` at a time, followed by a request for the server's processor time.
pub struct Probe {
    raw: Raw,
    clock: ProcessorClock,
    requests: Vec<u8>,
}

impl Probe {
    /// Connects to the server that listens on `address`, whose process is `pid`.
    ///
    /// # Errors
    ///
    /// If there is no such server.
    pub fn connect(address: SocketAddr, pid: u32) -> io::Result<Self> {
        let requests = encode([&["PING"][..], &["INFO", "cpu"]]);
        Ok(Self { raw: Raw::connect(address)?, clock: ProcessorClock::of(pid)?, requests })
    }

    /// Sends one `PING` and waits for the reply.
    ///
    /// # Errors
    ///
    /// If the server is gone.
    pub fn ping(&mut self) -> io::Result<Waited> {
        let sent = Instant::now();
        let first = self.send()?;
        // A server sends its replies at the end of the iteration. A PING that it read just before a long iteration waits for its
        // end with the reply already composed. So another PING is sent, which waits unread during the iteration.
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

    /// Sends a request. Returns the processor time that the server had used by then, which is read after sending, because this
    /// thread may be paused in between.
    fn send(&mut self) -> io::Result<Duration> {
        self.raw.send_bytes(&self.requests)?;
        self.clock.now().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn waited_since(&mut self, sent: Duration) -> io::Result<Duration> {
        let info = resp::text(&self.raw.read()?)?;
        Ok(used(&info).ok_or(io::ErrorKind::InvalidData)?.saturating_sub(sent))
    }
}

/// The processor time of the process in `INFO cpu`.
fn used(info: &str) -> Option<Duration> {
    let seconds = |field: &str| -> Option<f64> {
        info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?.trim().parse().ok()
    };
    Duration::try_from_secs_f64(seconds("used_cpu_sys")? + seconds("used_cpu_user")?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_adds_server_and_kernel_time() {
        let info = "# CPU\r\nused_cpu_sys:0.250000\r\nused_cpu_user:1.500000\r\nused_cpu_sys_children:7.0\r\n";
        assert_eq!(used(info), Some(Duration::from_millis(1750)));
        assert_eq!(used("used_cpu_sys:0.25\r\n"), None);
    }
}
