//! What the environment says about the run: which server, which module, where.

use std::env;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;

/// The root of the workspace.
pub fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("tests/support lies in the workspace").to_owned()
}

/// The module under test: `HOLDFAST_MODULE`, or what `make build` leaves behind.
pub fn module_path() -> PathBuf {
    env::var_os("HOLDFAST_MODULE").map_or_else(|| workspace().join("target/release/libholdfast.so"), PathBuf::from)
}

/// The server program: `HOLDFAST_SERVER`, or `redis-server` from the `PATH`.
pub fn server_program() -> PathBuf {
    env::var_os("HOLDFAST_SERVER").map_or_else(|| PathBuf::from("redis-server"), PathBuf::from)
}

/// How many I/O threads servers have that neither a file nor a test gives any: `HOLDFAST_IO_THREADS`.
pub fn io_threads() -> Option<String> {
    env::var("HOLDFAST_IO_THREADS").ok()
}

/// Whether servers are started in containers: `HOLDFAST_CONTAINER=1`.
pub fn in_containers() -> bool {
    env::var_os("HOLDFAST_CONTAINER").is_some_and(|value| value == "1")
}

/// Says by name that the running test leaves something out, and why. The test returns after it.
///
/// It goes past the test harness' capturing to standard error, and as a line `test<TAB>why` to the file that
/// `HOLDFAST_SKIPS` names, so that a summary can list it.
pub fn skip(why: &str) {
    let thread = thread::current();
    let test = thread.name().unwrap_or("(unnamed thread)");
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
    if let Some(path) = env::var_os("HOLDFAST_SKIPS") {
        let mut file = OpenOptions::new().create(true).append(true).open(path).expect("HOLDFAST_SKIPS can be written");
        // One write, so that lines of tests that run side by side don't mix.
        file.write_all(format!("{test}\t{why}\n").as_bytes()).expect("HOLDFAST_SKIPS can be written");
    }
}
