//! The state of a hold, as the server reported it.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use holdfast_core::LossReason;

use crate::changes::Changes;

/// The state of a hold, as the server reported it.
#[derive(Debug, Default)]
pub(crate) struct HoldStatus {
    pub(crate) token: AtomicU64,
    pub(crate) lost: OnceLock<LossReason>,
    pub(crate) changes: Changes,
}

impl HoldStatus {
    pub(crate) fn lose(&self, why: LossReason) {
        let _ = self.lost.set(why);
        self.changes.notify();
    }
}
