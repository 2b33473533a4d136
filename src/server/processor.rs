//! Moments in the life of the server's thread.

use std::time::{Duration, Instant};

/// A moment by the time that the processor has spent on the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Moment {
    used: Duration,
    /// The thread can't get there before this.
    not_before: Instant,
}

impl Moment {
    /// When the thread will have worked for this much longer.
    pub(super) fn after(length: Duration) -> Self {
        // In this order: the thread can't have worked for `length` since then in less time.
        let now = Instant::now();
        let not_before = now.checked_add(length).unwrap_or(now);
        Self { used: time_of(libc::CLOCK_THREAD_CPUTIME_ID).saturating_add(length), not_before }
    }

    /// Whether it has come. The processor's time takes a call of the system, and is asked only if it may have.
    pub(super) fn has_come(self) -> bool {
        Instant::now() >= self.not_before && time_of(libc::CLOCK_THREAD_CPUTIME_ID) >= self.used
    }
}

/// What a clock of the system shows.
pub(super) fn time_of(clock: libc::clockid_t) -> Duration {
    let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours. (`SystemTime` and `Instant` read the same clocks, and then calculate for longer
    // than that takes.)
    unsafe { libc::clock_gettime(clock, &raw mut at) };
    Duration::new(u64::try_from(at.tv_sec).unwrap_or(0), u32::try_from(at.tv_nsec).unwrap_or(0))
}
