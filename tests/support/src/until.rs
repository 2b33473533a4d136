//! Waiting for a condition instead of a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The pause of a poll that has waited for this long. Hundreds of tests poll at once, each with a request to its server.
pub fn pause(waited: Duration) -> Duration {
    (waited / 8).clamp(Duration::from_millis(1), Duration::from_millis(10))
}

/// Polls `condition`, after pauses that grow from 1 to 10 ms. Returns false if it does not hold within `deadline`.
pub fn eventually(deadline: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    loop {
        if condition() {
            return true;
        }
        let waited = begin.elapsed();
        if waited >= deadline {
            return false;
        }
        thread::sleep(pause(waited));
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

/// A moment before which something must not happen. How much later it happens depends on the machine.
#[derive(Clone, Copy, Debug)]
pub struct NotBefore(Instant);

impl NotBefore {
    /// A moment in `millis` milliseconds.
    #[must_use]
    pub fn millis(millis: u64) -> Self {
        Self(Instant::now() + Duration::from_millis(millis))
    }

    /// Asserts that the moment has passed.
    ///
    /// # Panics
    ///
    /// With `what` in the message, if it has not.
    #[track_caller]
    pub fn is_over(self, what: &str) {
        assert!(Instant::now() >= self.0, "too early: {what}");
    }
}

/// Sets the flag when it is dropped, so that other threads end even if the test fails.
pub struct Over<'a>(pub &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
