//! Waiting for a condition, never for a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(1);

/// Polls `condition` about every millisecond until it holds; false if it does not within `deadline`.
pub fn eventually(deadline: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + deadline;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(POLL);
    }
}

/// Waits until `condition` holds.
///
/// # Panics
///
/// With `what` in the message, if it does not hold within `deadline`.
#[track_caller]
pub fn until(deadline: Duration, what: &str, condition: impl FnMut() -> bool) {
    assert!(eventually(deadline, condition), "not within {deadline:?}: {what}");
}

/// A moment that something must not come before. How much later it comes is up to the machine: no test asserts that.
#[derive(Clone, Copy, Debug)]
pub struct NotBefore(Instant);

impl NotBefore {
    /// That moment is `millis` milliseconds from now.
    #[must_use]
    pub fn millis(millis: u64) -> Self {
        Self(Instant::now() + Duration::from_millis(millis))
    }

    /// Asserts that the moment is over.
    ///
    /// # Panics
    ///
    /// With `what` in the message, if it is not.
    #[track_caller]
    pub fn is_over(self, what: &str) {
        assert!(Instant::now() >= self.0, "too early: {what}");
    }
}

/// Tells other threads that it is over when it goes, so that they end also where a test fails and nobody else tells them.
pub struct Over<'a>(pub &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
