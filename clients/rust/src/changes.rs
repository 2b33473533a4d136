//! Wakes tasks that wait for a change.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::Notify;

/// Notifies tasks of changes. Clones share one list of waiting tasks, so that a task can wait for any of several
/// changes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changes(Arc<Notify>);

impl Changes {
    /// Notifies all waiting tasks.
    pub(crate) fn notify(&self) {
        self.0.notify_waiters();
    }

    /// Waits until `happened` returns true, or until this time. Calls `happened` immediately, and after each change.
    pub(crate) async fn wait(&self, until: Option<Instant>, happened: impl Fn() -> bool) {
        let happens = async {
            loop {
                let mut changed = std::pin::pin!(self.0.notified());
                // From here on no change is missed. `happened` sees earlier changes.
                changed.as_mut().enable();
                if happened() {
                    return;
                }
                changed.await;
            }
        };
        match until {
            Some(end) => drop(tokio::time::timeout_at(end.into(), happens).await),
            None => happens.await,
        }
    }
}
