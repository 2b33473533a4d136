//! Another client that sends one `PING` after the other, in its own thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use support::{Probe, Waited};

use crate::machine;

/// One `PING`.
#[derive(Clone, Copy)]
struct Ping {
    sent: Instant,
    waited: Waited,
}

/// The longest `PING` of a period, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Longest {
    /// From request to reply, including the time that the machine spent on other work.
    pub took: f64,
    /// The most processor time of the server during one `PING`, which may be another one.
    pub server: f64,
}

/// Sends `PING` until it is stopped.
pub struct Pinger {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Ping>>>,
}

impl Pinger {
    /// Starts to ping the server that listens on `port`, whose process is `pid`.
    pub fn start(port: u16, pid: u32) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let probe = Probe::connect(([127, 0, 0, 1], port).into(), pid)?;
        let stopped = Arc::clone(&stop);
        Ok(Self { stop, thread: thread::spawn(move || ping(probe, &stopped)) })
    }

    /// Stops it. Returns the longest of those that were pending at some time from `begin` to `end`.
    pub fn longest(self, begin: Instant, end: Instant) -> Result<Longest> {
        self.stop.store(true, Ordering::Relaxed);
        let pings = self.thread.join().map_err(|_| anyhow!("the pinger panicked"))??;
        let within = || pings.iter().filter(|ping| ping.sent <= end && ping.sent + ping.waited.all >= begin);
        let longest = |of: fn(&Ping) -> Duration| within().map(of).max().map(|time| time.as_secs_f64() * 1e6);
        Ok(Longest {
            took: longest(|ping| ping.waited.all).context("no PING")?,
            server: longest(|ping| ping.waited.server).context("no PING")?,
        })
    }
}

fn ping(mut probe: Probe, stop: &AtomicBool) -> Result<Vec<Ping>> {
    machine::run_first();
    let mut pings = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let sent = Instant::now();
        pings.push(Ping { sent, waited: probe.ping()? });
    }
    Ok(pings)
}
