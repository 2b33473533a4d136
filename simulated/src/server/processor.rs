//! Moments of the simulated time.

use crate::redis::node;
use std::time::Duration;

/// A moment of the monotonic clock: whatever takes time here is work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Moment(Duration);

impl Moment {
    pub(super) fn after(length: Duration) -> Self {
        Self(mono() + length)
    }

    pub(super) fn has_come(self) -> bool {
        mono() >= self.0
    }
}

fn mono() -> Duration {
    Duration::from_micros(node(|node| node.clock.mono))
}
