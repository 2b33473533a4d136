//! What is known without asking the server each time: found out at load, and kept up to date by what it reports.

use crate::lock::Fence;
use crate::server::MainThread;

/// Who may follow the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Followers {
    /// Something may.
    #[default]
    Possible,
    /// Certainly nothing does.
    None,
}

/// All of it.
#[derive(Debug, Default)]
pub struct Known {
    /// Who may follow the data.
    pub followers: Followers,
    /// Whether the server is part of a cluster.
    pub in_cluster: bool,
    /// How many other modules are loaded.
    pub other_modules: usize,
    /// Whether fields can have an expiry of their own (`HPEXPIRE`).
    pub has_field_expiry: bool,
    /// Whether a new mutex can be written as one command (`RESTORE`).
    pub has_restore: bool,
    /// While a notification about a write of this module is being sent: where the bytes of its key are.
    pub notifying: Option<usize>,
    /// The last token.
    pub fence: Fence,
}

static KNOWN: MainThread<Known> = MainThread::new();

/// Lends it; see [`MainThread::with`].
pub fn known<R>(work: impl FnOnce(&mut Known) -> R) -> R {
    KNOWN.with(work)
}
