//! The present.

use crate::lock::Millis;
use std::time::{SystemTime, UNIX_EPOCH};

/// A moment, in Unix microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Now {
    /// Microseconds since 1970.
    pub micros: u64,
}

impl Now {
    /// Reads the system's clock, the one that key expiry goes by.
    pub fn read() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { micros: u64::try_from(since.as_micros()).unwrap_or(u64::MAX) }
    }

    /// Milliseconds since 1970.
    pub fn millis(self) -> Millis {
        self.micros / 1000
    }
}
