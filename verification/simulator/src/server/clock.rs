//! The simulated time: a wall clock that can step, and a monotonic one that can't.

pub use super::slice::Slice;
use crate::lock::Millis;
use crate::node::node;

/// A moment, in Unix microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Now {
    /// Microseconds since 1970.
    pub micros: u64,
}

impl Now {
    /// Reads the wall clock.
    pub fn read() -> Self {
        Self { micros: node(|node| node.clock.wall) }
    }

    /// Milliseconds since 1970.
    pub fn millis(self) -> Millis {
        self.micros / 1000
    }
}

/// Milliseconds of the monotonic clock, which shows more than a day.
pub fn steady_millis() -> Millis {
    const DAY: Millis = 24 * 60 * 60 * 1000;
    DAY + steady_micros() / 1000
}

/// The same in microseconds, counted from the start of the machine.
pub fn steady_micros() -> u64 {
    node(|node| node.clock.mono)
}
