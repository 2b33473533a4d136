//! Counts the open keys. None may be open while the module runs a command of the server. The command could find that a
//! key has expired, and free the value of an open handle. This happened before Redis 7.2, where time advances during a
//! timer callback.

use crate::lock::internal_errors;
use std::cell::Cell;

thread_local! {
    static OPEN: Cell<usize> = const { Cell::new(0) };
}

/// Counts a key that was opened.
pub(super) fn opened() {
    OPEN.set(OPEN.get().saturating_add(1));
}

/// Counts a key that was closed.
pub(super) fn closed() {
    OPEN.set(OPEN.get().saturating_sub(1));
}

/// Reports an internal error if a key is open. Called before the module runs a command of the server.
pub(super) fn check_none_open() {
    if OPEN.get() > 0 {
        internal_errors::report("a command of the server is run while a key is open");
    }
}
