//! How long a call waits.

use std::time::{Duration, Instant};

use holdfast_core::Wait;

use crate::clock;

/// At most this long. Zero means no wait.
pub(crate) fn at_most(time: Duration) -> Wait {
    match clock::millis(time) {
        0 => Wait::No,
        // The server refuses a longer wait.
        _ if time > clock::LONG => Wait::Forever,
        time => Wait::For(time),
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
    /// When a wait that begins now is over.
    pub(crate) fn of(wait: Wait, now: Instant) -> Self {
        match wait {
            Wait::No => Self::Past,
            Wait::For(time) => now.checked_add(Duration::from_millis(time)).map_or(Self::Never, Self::At),
            Wait::Forever => Self::Never,
        }
    }

    /// This one, or the given time if that is earlier.
    pub(crate) fn before(self, end: Instant) -> Self {
        match self {
            Self::Past => Self::Past,
            Self::At(own) => Self::At(own.min(end)),
            Self::Never => Self::At(end),
        }
    }

    /// The time left to wait.
    pub(crate) fn left(self, now: Instant) -> Wait {
        match self {
            Self::Past => Wait::No,
            Self::At(end) => at_most(end.saturating_duration_since(now)),
            Self::Never => Wait::Forever,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_that_passed_is_no_wait() {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let deadline = Deadline::of(at_most(second), now);
        assert_eq!(deadline.left(now), Wait::For(1000));
        assert_eq!(deadline.left(now + second), Wait::No);
        assert_eq!(deadline.left(now + second * 2), Wait::No);
        assert_eq!(Deadline::of(Wait::No, now).left(now), Wait::No);
        assert_eq!(Deadline::of(Wait::Forever, now).left(now + second), Wait::Forever);
        assert_eq!(Deadline::of(at_most(Duration::MAX), now), Deadline::Never);
        assert_eq!(Deadline::Never.before(now), Deadline::At(now));
        assert_eq!(deadline.before(now), Deadline::At(now));
        assert_eq!(deadline.before(now + second * 2), deadline);
        assert_eq!(Deadline::Past.before(now), Deadline::Past);
    }
}
