//! What a request asks for.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

/// The terms of a hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) lease: Lease,
    pub(crate) limit: Limit,
    pub(crate) ending: Ending,
    pub(crate) replicas: Option<NonZeroU32>,
}

/// How long a hold lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lease {
    /// Renewed by the server while the session's connection lives; then this long, or the server's default.
    Watched(Option<Duration>),
    /// This long, and nobody renews it.
    Fixed(Duration),
}

/// How many may hold at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    One,
    Of(u32),
    Shared,
}

/// What happens to a hold when the session's connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Its lease runs, and another session may take it over.
    LeaseRuns,
    /// It is given back at once.
    Released,
}

/// How long a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    No,
    For(Duration),
    Forever,
}

impl Wait {
    /// At most this long. No time is no wait at all.
    pub(crate) fn at_most(time: Duration) -> Self {
        if time.is_zero() { Self::No } else { Self::For(time) }
    }

    /// When a wait that begins now is over.
    pub(crate) fn deadline(self, now: Instant) -> Deadline {
        match self {
            Self::No => Deadline::Past,
            // A time that the clock can't count is as good as for ever.
            Self::For(time) => now.checked_add(time).map_or(Deadline::Never, Deadline::At),
            Self::Forever => Deadline::Never,
        }
    }
}

/// When a wait is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deadline {
    Past,
    At(Instant),
    Never,
}

impl Deadline {
    /// This one, or then if that is earlier.
    pub(crate) fn before(self, end: Instant) -> Self {
        match self {
            Self::Past => Self::Past,
            Self::At(own) => Self::At(own.min(end)),
            Self::Never => Self::At(end),
        }
    }

    /// What is left of the wait.
    pub(crate) fn left(self, now: Instant) -> Wait {
        match self {
            Self::Past => Wait::No,
            Self::At(end) => Wait::at_most(end.saturating_duration_since(now)),
            Self::Never => Wait::Forever,
        }
    }
}

impl Default for Terms {
    fn default() -> Self {
        Self { lease: Lease::Watched(None), limit: Limit::One, ending: Ending::LeaseRuns, replicas: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_is_over_is_no_wait_at_all() {
        let now = Instant::now();
        let deadline = Wait::For(Duration::from_secs(1)).deadline(now);
        assert_eq!(deadline.left(now), Wait::For(Duration::from_secs(1)));
        assert_eq!(deadline.left(now + Duration::from_secs(1)), Wait::No);
        assert_eq!(deadline.left(now + Duration::from_secs(2)), Wait::No);
        assert_eq!(Wait::No.deadline(now).left(now), Wait::No);
        assert_eq!(Wait::Forever.deadline(now).left(now + Duration::from_secs(1)), Wait::Forever);
        assert_eq!(Wait::For(Duration::MAX).deadline(now), Deadline::Never);
        assert_eq!(Deadline::Never.before(now), Deadline::At(now));
        assert_eq!(deadline.before(now), Deadline::At(now));
        assert_eq!(deadline.before(now + Duration::from_secs(2)), deadline);
        assert_eq!(Deadline::Past.before(now), Deadline::Past);
    }
}
