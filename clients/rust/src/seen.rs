//! What was told of a hold.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use holdfast_core::Why;

use crate::changes::Changes;

/// What was told of a hold.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) token: AtomicU64,
    pub(crate) lost: OnceLock<Why>,
    pub(crate) changes: Changes,
}

impl Seen {
    pub(crate) fn lose(&self, why: Why) {
        let _ = self.lost.set(why);
        self.changes.tell();
    }
}
