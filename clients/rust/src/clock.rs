//! The clock of leases: monotonic, and running while the machine sleeps.

use std::time::{Duration, Instant};

use holdfast_core::Millis;
use rustix::time::{ClockId, clock_gettime};

#[cfg(target_os = "linux")]
const CLOCK: ClockId = ClockId::Boottime;
#[cfg(not(target_os = "linux"))]
const CLOCK: ClockId = ClockId::Monotonic;

/// The longest wait that the server accepts, and short enough for every clock.
pub(crate) const LONG: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

fn exactly() -> Duration {
    let now = clock_gettime(CLOCK);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// In whole milliseconds, rounded down.
pub(crate) fn now() -> Millis {
    u64::try_from(exactly().as_millis()).unwrap_or(Millis::MAX)
}

/// The same moment by the clock of the standard library.
pub(crate) fn instant(at: Millis) -> Instant {
    Instant::now() + Duration::from_millis(at).saturating_sub(exactly()).min(LONG)
}

/// A duration in the server's unit. Less than a unit is rounded up.
pub(crate) fn millis(time: Duration) -> Millis {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(Millis::MAX)
}
