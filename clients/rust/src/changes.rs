//! Wakes tasks that wait for a change.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::Notify;

/// Notified of changes. Clones are one, so that a task can wait for any of several things.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changes(Arc<Notify>);

impl Changes {
    /// Notifies all waiting tasks.
    pub(crate) fn tell(&self) {
        self.0.notify_waiters();
    }

    /// Waits until this has happened, or until this time. It is asked at once, and after each change.
    pub(crate) async fn wait(&self, until: Option<Instant>, happened: impl Fn() -> bool) {
        let happens = async {
            loop {
                let mut changed = std::pin::pin!(self.0.notified());
                // From here on no change is missed; `happened` sees what was before.
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
