//! The time.

use crate::lock::Millis;
use std::time::{Duration, Instant};

/// A moment, in Unix microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Now {
    /// Microseconds since 1970.
    pub micros: u64,
}

impl Now {
    /// Reads the system's clock, the one by which keys expire.
    pub fn read() -> Self {
        let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the structure is ours. (`SystemTime` reads the same clock, and then calculates for longer than that
        // takes.)
        unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut at) };
        let (seconds, nanos) = (u64::try_from(at.tv_sec).unwrap_or(0), u64::try_from(at.tv_nsec).unwrap_or(0));
        Self { micros: seconds.saturating_mul(1_000_000).saturating_add(nanos / 1000) }
    }

    /// Milliseconds since 1970.
    pub fn millis(self) -> Millis {
        self.micros / 1000
    }
}

/// A slice of time: the work on a crowd stops when it is over, lets others in, and continues afterwards.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    began: Instant,
    length: Duration,
}

impl Slice {
    /// What one turn of the event loop spends on all kinds of work together. Only the last thing begun in it may go on
    /// beyond that; even with the longest one (a lock with as many holders as allowed that has to be read anew, or a
    /// grant of as many keys as a request may name) and the replies, a turn stays below 5 ms: nobody should have to
    /// wait that long.
    pub fn of_turn() -> Self {
        Self { began: Instant::now(), length: Duration::from_micros(1_000) }
    }

    /// What one turn spends on answers that were put off, or that replicas have confirmed.
    pub fn of_replies() -> Self {
        Self { began: Instant::now(), length: Duration::from_millis(1) }
    }

    /// What one command spends on serving others before its own client is answered.
    pub fn of_command() -> Self {
        Self { began: Instant::now(), length: Duration::from_micros(500) }
    }

    /// The share of one kind of work, so that none of them, however much there is of it, starves the others.
    pub fn piece(&self) -> Self {
        self.part(Duration::from_micros(150))
    }

    /// The share of those who wait.
    pub fn of_crowds(&self) -> Self {
        self.part(Duration::from_micros(600))
    }

    /// This much of it from now on, or what is left.
    fn part(&self, length: Duration) -> Self {
        let began = Instant::now();
        let left = self.length.saturating_sub(began.saturating_duration_since(self.began));
        Self { began, length: length.min(left) }
    }

    /// Whether it is over. Costs some 30 ns.
    pub fn is_over(&self) -> bool {
        self.began.elapsed() >= self.length
    }
}
