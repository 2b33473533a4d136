//! Waking whoever waits for something to change.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::Notify;

/// Told when something changed. Clones are one: so one can wait for any of several things.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changes(Arc<Notify>);

impl Changes {
    /// Something changed.
    pub(crate) fn tell(&self) {
        self.0.notify_waiters();
    }

    /// Waits until something changes, or until then. Returns at once if it has happened.
    pub(crate) async fn wait(&self, until: Option<Instant>, happened: impl Fn() -> bool) {
        let mut changed = std::pin::pin!(self.0.notified());
        // From here on a change is not missed; what was before is seen by `happened`.
        changed.as_mut().enable();
        if happened() {
            return;
        }
        match until {
            Some(end) => drop(tokio::time::timeout_at(end.into(), changed).await),
            None => changed.await,
        }
    }
}
