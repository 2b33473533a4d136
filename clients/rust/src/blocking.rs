//! For programs without tokio.

use std::sync::OnceLock;

use tokio::runtime::{Builder, Runtime};

/// Waits for a future of this crate in a program that has no runtime of its own.
///
/// Background work continues afterwards: a thread of this crate reads replies, keeps connections, and releases
/// dropped guards. It starts with the first call and lives as long as the process, but keeps no process alive.
///
/// # Panics
///
/// Within a runtime of tokio, where `.await` waits; or if the system can't start a thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("holdfast").enable_all().build();
        runtime.unwrap_or_else(|error| panic!("no thread for the connections: {error}"))
    });
    runtime.block_on(future)
}
