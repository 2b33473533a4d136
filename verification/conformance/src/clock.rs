//! The clock that the runner and all drivers share: the machine's monotonic clock.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Microseconds of `CLOCK_MONOTONIC`.
pub type Micros = u64;

/// The current time, as drivers report it.
pub fn now() -> Micros {
    let time = clock_gettime(ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap_or_default() * 1_000_000 + u64::try_from(time.tv_nsec).unwrap_or_default() / 1_000
}

/// The time after this duration.
pub fn after(time: Duration) -> Instant {
    Instant::now() + time
}

/// The remaining time until then.
pub fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}
