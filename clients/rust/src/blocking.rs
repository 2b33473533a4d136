//! The runtime of this crate: for programs without tokio, and for what is left to do when a runtime ends.

use std::io;
use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Id, Runtime};
use tokio::time::timeout;

/// The name of its thread.
const THREAD: &str = "holdfast";

/// Waits for a future of this crate in a program that has no runtime of its own.
///
/// Background work continues afterwards: a thread of this crate reads replies, keeps connections, and releases
/// dropped guards. It starts with the first call and lives as long as the process, but keeps no process alive.
///
/// # Panics
///
/// Within a runtime of tokio, where `.await` waits; or if the system can't start a thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    match runtime() {
        Ok(runtime) => runtime.block_on(future),
        Err(error) => panic!("no thread for the connections: {error}"),
    }
}

static RUNTIME: OnceLock<io::Result<Runtime>> = OnceLock::new();

fn runtime() -> &'static io::Result<Runtime> {
    RUNTIME.get_or_init(|| Builder::new_multi_thread().worker_threads(1).thread_name(THREAD).enable_all().build())
}

/// This crate's runtime, which never ends. None: the system can't start a thread.
pub(crate) fn own() -> Option<&'static Handle> {
    runtime().as_ref().ok().map(Runtime::handle)
}

/// Whether this is the id of this crate's runtime.
pub(crate) fn is_own(id: Id) -> bool {
    RUNTIME.get().and_then(|it| it.as_ref().ok()).is_some_and(|own| own.handle().id() == id)
}

/// Blocks this thread until the future, which runs in this crate's runtime, is done, but no longer than this.
pub(crate) fn wait_for(future: impl Future<Output = ()> + Send + 'static, at_most: Duration) {
    // That thread would wait for itself.
    let Some(own) = own().filter(|_| thread::current().name() != Some(THREAD)) else { return };
    let (running, done) = mpsc::channel::<()>();
    own.spawn(async move {
        let _ = timeout(at_most, future).await;
        drop(running);
    });
    let _ = done.recv();
}
