//! With `LAB_TRACE` set, what happens is printed as it happens.

use std::env;
use std::sync::LazyLock;

use crate::clock::now;

static CONTENTION: LazyLock<bool> = LazyLock::new(|| env::var_os("LAB_TRACE").is_some());

/// Prints a line, with the time at which it was said, if such lines are wanted.
pub fn trace(line: impl FnOnce() -> String) {
    if *CONTENTION {
        eprintln!("{} {}", now(), line());
    }
}
