//! The present.

use crate::lock::Millis;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A moment, in Unix microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Now {
    /// Microseconds since 1970.
    pub micros: u64,
}

impl Now {
    /// Reads the system's clock, the one that key expiry goes by.
    pub fn read() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { micros: u64::try_from(since.as_micros()).unwrap_or(u64::MAX) }
    }

    /// Milliseconds since 1970.
    pub fn millis(self) -> Millis {
        self.micros / 1000
    }
}

/// A slice of time: whoever works through a crowd stops when it is over, lets others in, and goes on afterwards.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    began: Instant,
    length: Duration,
}

impl Slice {
    /// What one turn of the event loop spends on crowds. With the longest single piece of work (a grant of as many
    /// keys as a request may name) it stays below the 5 ms that nobody is to wait for.
    pub fn of_turn() -> Self {
        Self { began: Instant::now(), length: Duration::from_millis(1) }
    }

    /// What one turn spends on each kind of work besides: so that none of them, however much there is of it, keeps the
    /// others from going on.
    pub fn of_piece() -> Self {
        Self { began: Instant::now(), length: Duration::from_micros(150) }
    }

    /// What one command spends on serving others before its own client is answered.
    pub fn of_command() -> Self {
        Self { began: Instant::now(), length: Duration::from_micros(500) }
    }

    /// Whether it is over. Costs some 30 ns.
    pub fn is_over(&self) -> bool {
        self.began.elapsed() >= self.length
    }
}
