//! The clocks.

pub use super::slice::Slice;
use crate::lock::Millis;
use std::time::Duration;

/// A point in time by the wall clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Now {
    /// Microseconds since 1970.
    pub micros: u64,
}

impl Now {
    /// Reads the wall clock, by which keys expire.
    pub fn read() -> Self {
        Self { micros: micros_of(libc::CLOCK_REALTIME) }
    }

    /// Milliseconds since 1970.
    pub fn millis(self) -> Millis {
        self.micros / 1000
    }
}

/// Reads the steady clock, in milliseconds. It does not step, and continues while the machine is suspended. It orders
/// requests by arrival, measures how long they have waited, and reveals steps of the wall clock.
///
/// The value is at least a day. So a request that has already waited on another server can have an arrival time before
/// the start of this machine.
pub fn steady_millis() -> Millis {
    DAY.saturating_add(steady_micros() / 1000)
}

/// Reads the steady clock in microseconds since the start of the machine, to measure durations.
pub fn steady_micros() -> u64 {
    micros_of(libc::CLOCK_BOOTTIME)
}

const DAY: Millis = 24 * 60 * 60 * 1000;

fn micros_of(clock: libc::clockid_t) -> u64 {
    let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is a local variable. (`SystemTime` and `Instant` also call `clock_gettime`, but their
    // arithmetic takes longer than the call.)
    unsafe { libc::clock_gettime(clock, &raw mut at) };
    let time = Duration::new(u64::try_from(at.tv_sec).unwrap_or(0), u32::try_from(at.tv_nsec).unwrap_or(0));
    time.as_secs().saturating_mul(1_000_000).saturating_add(u64::from(time.subsec_micros()))
}
