//! Facts that the module need not ask the server for each time. It finds them out at load, and the server reports
//! changes.

use crate::lock::Fence;
use crate::server::MainThread;

/// Whether anything may receive the writes of this server: a replica, an append-only file or a monitor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Followers {
    /// Something may receive them.
    #[default]
    Possible,
    /// Certainly nothing receives them.
    None,
}

/// The known facts, and the last token.
#[derive(Debug, Default)]
pub struct Known {
    /// Whether anything may receive the writes of this server.
    pub followers: Followers,
    /// Whether the server is part of a cluster.
    pub in_cluster: bool,
    /// How many other modules are loaded.
    pub other_modules: usize,
    /// Whether fields can have their own expiry (`HPEXPIRE`).
    pub has_field_expiry: bool,
    /// Whether a new mutex can be written as one command (`RESTORE`).
    pub has_restore: bool,
    /// While the module sends a notification about its own write: the address of the key's bytes.
    pub notifying: Option<usize>,
    /// The last token.
    pub fence: Fence,
}

static KNOWN: MainThread<Known> = MainThread::new();

/// Calls `work` with the facts; see [`MainThread::with`].
pub fn known<R>(work: impl FnOnce(&mut Known) -> R) -> R {
    KNOWN.with(work)
}
