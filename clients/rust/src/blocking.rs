//! For programs without tokio.

use std::sync::OnceLock;

use tokio::runtime::{Builder, Runtime};

/// Waits for what a future of this crate brings, in a program that has no runtime of its own.
///
/// What it begins goes on in the background: a thread of this crate's reads what the servers say, keeps connections, and gives back
/// what was dropped. It starts with the first call and lives as long as the process, but keeps no process alive.
///
/// # Panics
///
/// Within a runtime of tokio, where `.await` waits; or if the system gives no thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("holdfast").enable_all().build();
        runtime.unwrap_or_else(|error| panic!("no thread for the connections: {error}"))
    });
    runtime.block_on(future)
}
