//! What the server reported of a hold.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use holdfast_core::LossReason;

use crate::changes::Changes;

/// What the server reported of a hold.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) token: AtomicU64,
    pub(crate) lost: OnceLock<LossReason>,
    pub(crate) changes: Changes,
}

impl Seen {
    pub(crate) fn lose(&self, why: LossReason) {
        let _ = self.lost.set(why);
        self.changes.tell();
    }
}
