//! With `LAB_TRACE` set, prints events as they happen.

use std::env;
use std::sync::LazyLock;

use crate::clock::now;

static IS_ENABLED: LazyLock<bool> = LazyLock::new(|| env::var_os("LAB_TRACE").is_some());

/// Prints a line with the time, if tracing is enabled.
pub fn trace(line: impl FnOnce() -> String) {
    if *IS_ENABLED {
        eprintln!("{} {}", now(), line());
    }
}
