//! Whether a server answers. One that did not is suspect: callers that can do without it skip it, and a background task
//! asks it until it answers.

use std::sync::Arc;

use tokio::sync::watch;

use crate::error::Error;

/// The health of a server, as far as this client knows it.
#[derive(Debug)]
pub(crate) struct Health(watch::Sender<Option<Error>>);

/// The guard of the task that asks a suspect server. When it is dropped, the server is not suspect any more.
pub(crate) struct Watch(Arc<Health>);

impl Health {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(watch::Sender::new(None)))
    }

    /// Why it is suspect, if it is.
    pub(crate) fn suspected(&self) -> Option<Error> {
        self.0.borrow().clone()
    }

    /// Marks the server as suspect. Returns the guard for the task that asks it again; none: such a task runs already.
    pub(crate) fn suspect(self: &Arc<Self>, why: Error) -> Option<Watch> {
        let first = self.0.send_if_modified(|suspected| {
            let first = suspected.is_none();
            *suspected = Some(why);
            first
        });
        first.then(|| Watch(self.clone()))
    }

    /// Returns when it is not suspect.
    pub(crate) fn wait_until_recovered(self: &Arc<Self>) -> impl Future<Output = ()> + Send + use<> {
        let mut changes = self.0.subscribe();
        async move {
            // An error means that the server is not needed any more.
            let _ = changes.wait_for(Option::is_none).await;
        }
    }
}

/// This also happens when the task ends with its runtime: no other task would ask the server.
impl Drop for Watch {
    fn drop(&mut self) {
        self.0.0.send_replace(None);
    }
}
