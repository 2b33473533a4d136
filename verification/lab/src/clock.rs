//! The machine's monotonic clock in microseconds, and the conversion of fencing tokens to it.

use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

use crate::history::Micros;

/// Now, in microseconds of the monotonic clock.
pub fn now() -> Micros {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds * 1_000_000 + nanos / 1_000
}

/// A duration in microseconds.
pub fn micros(duration: Duration) -> Micros {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The offset of the wall clock, from which servers make tokens, to the monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct WallClock {
    ahead: u64,
}

impl WallClock {
    /// Reads both clocks. All servers and clients of the lab share one machine, so one reading is enough.
    pub fn read() -> WallClock {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        WallClock { ahead: micros(wall).saturating_sub(now()) }
    }

    /// When a token was issued. (A token may be a few microseconds ahead of the clock, never behind.)
    pub fn time_of(self, token: u64) -> Micros {
        token.saturating_sub(self.ahead)
    }
}

/// Polls until `done` returns true or the time is over. Returns whether it did.
pub fn until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = now() + micros(limit);
    loop {
        if done() {
            return true;
        }
        if now() >= end {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
}
