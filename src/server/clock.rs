//! The time.

pub use super::slice::Slice;
use crate::lock::Millis;
use std::time::Duration;

/// A moment, in Unix microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Now {
    /// Microseconds since 1970.
    pub micros: u64,
}

impl Now {
    /// Reads the system's clock, the one by which keys expire.
    pub fn read() -> Self {
        Self { micros: micros_of(libc::CLOCK_REALTIME) }
    }

    /// Milliseconds since 1970.
    pub fn millis(self) -> Millis {
        self.micros / 1000
    }
}

/// Milliseconds of a clock that does not step, and goes on while the machine sleeps: for the order in which requests
/// arrived, for how long they have waited, and to tell a step of the other clock. It shows more than a day, so that
/// a request that has waited elsewhere can have arrived before this machine started.
pub fn steady_millis() -> Millis {
    DAY.saturating_add(steady_micros() / 1000)
}

/// The same clock in microseconds, counted from when the machine started: for how long something took.
pub fn steady_micros() -> u64 {
    micros_of(libc::CLOCK_BOOTTIME)
}

const DAY: Millis = 24 * 60 * 60 * 1000;

fn micros_of(clock: libc::clockid_t) -> u64 {
    let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours. (`SystemTime` and `Instant` read the same clocks, and then calculate for longer
    // than that takes.)
    unsafe { libc::clock_gettime(clock, &raw mut at) };
    let time = Duration::new(u64::try_from(at.tv_sec).unwrap_or(0), u32::try_from(at.tv_nsec).unwrap_or(0));
    time.as_secs().saturating_mul(1_000_000).saturating_add(u64::from(time.subsec_micros()))
}
