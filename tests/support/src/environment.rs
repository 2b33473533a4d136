//! The environment of a test run: which server, which module, where.

use std::env;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;

/// The root of the workspace.
pub fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("tests/support is in the workspace").to_owned()
}

/// The module under test: `HOLDFAST_MODULE`, or the result of `make build`.
pub fn module_path() -> PathBuf {
    env::var_os("HOLDFAST_MODULE").map_or_else(|| workspace().join("target/release/libholdfast.so"), PathBuf::from)
}

/// The server program: `HOLDFAST_SERVER`, or `redis-server` from the `PATH`.
pub fn server_program() -> PathBuf {
    env::var_os("HOLDFAST_SERVER").map_or_else(|| PathBuf::from("redis-server"), PathBuf::from)
}

/// The number of I/O threads of servers for which neither a file nor a test sets it: `HOLDFAST_IO_THREADS`.
pub fn io_threads() -> Option<String> {
    env::var("HOLDFAST_IO_THREADS").ok()
}

/// Whether servers are started in containers: `HOLDFAST_CONTAINER=1`.
pub fn in_containers() -> bool {
    env::var_os("HOLDFAST_CONTAINER").is_some_and(|value| value == "1")
}

/// Reports that the running test leaves something out, and why. The test returns after it.
///
/// It writes to standard error, which the test harness does not capture here, and a line `test<TAB>why` to the file that
/// `HOLDFAST_SKIPS` names, for the summary.
pub fn skip(why: &str) {
    let thread = thread::current();
    let test = thread.name().unwrap_or("(unnamed thread)");
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
    if let Some(path) = env::var_os("HOLDFAST_SKIPS") {
        let mut file = OpenOptions::new().create(true).append(true).open(path).expect("HOLDFAST_SKIPS can be written");
        // One write, so that lines of parallel tests do not mix.
        file.write_all(format!("{test}\t{why}\n").as_bytes()).expect("HOLDFAST_SKIPS can be written");
    }
}
