//! Whether a server answers. One that did not is suspect: a caller that can do without it does not wait for it until it has
//! answered again. It is asked in the background.

use std::sync::Arc;

use tokio::sync::watch;

use crate::error::Error;

/// What is known of a server's health.
#[derive(Debug)]
pub(crate) struct Health(watch::Sender<Option<Error>>);

/// A task that asks a suspect server whether it is back. When this is dropped, the server is suspect no more.
pub(crate) struct Watch(Arc<Health>);

impl Health {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(watch::Sender::new(None)))
    }

    /// Why it is suspect, if it is.
    pub(crate) fn suspected(&self) -> Option<Error> {
        self.0.borrow().clone()
    }

    /// It did not answer. Returns the guard to keep while it is asked again; none: it is asked already.
    pub(crate) fn suspect(self: &Arc<Self>, why: Error) -> Option<Watch> {
        let first = self.0.send_if_modified(|suspected| {
            let first = suspected.is_none();
            *suspected = Some(why);
            first
        });
        first.then(|| Watch(self.clone()))
    }

    /// Returns when it is not suspect.
    pub(crate) fn well(self: &Arc<Self>) -> impl Future<Output = ()> + Send + use<> {
        let mut changes = self.0.subscribe();
        async move {
            // An error is a server that is needed no more.
            let _ = changes.wait_for(Option::is_none).await;
        }
    }
}

/// Also when the asking task is gone with its runtime: no other task would ask.
impl Drop for Watch {
    fn drop(&mut self) {
        self.0.0.send_replace(None);
    }
}
