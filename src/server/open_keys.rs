//! How many keys are open: none may be while a command of the server's is run. The command could find that a key has expired,
//! and free what an open handle points to (seen before Redis 7.2, where time goes on while a timer runs).

use crate::lock::internal_errors;
use std::cell::Cell;

thread_local! {
    static OPEN: Cell<usize> = const { Cell::new(0) };
}

/// A key was opened.
pub(super) fn opened() {
    OPEN.set(OPEN.get().saturating_add(1));
}

/// A key was closed.
pub(super) fn closed() {
    OPEN.set(OPEN.get().saturating_sub(1));
}

/// A command is about to be run: reports an internal error if a key is open.
pub(super) fn none_may_be_open() {
    if OPEN.get() > 0 {
        internal_errors::report("a command of the server is run while a key is open");
    }
}
