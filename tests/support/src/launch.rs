//! How a server is started, and operations on it wherever it runs.

use std::net::SocketAddr;
use std::path::PathBuf;

/// How a server is started.
pub(crate) struct Launch {
    pub(crate) program: PathBuf,
    pub(crate) config_file: Option<PathBuf>,
    pub(crate) settings: Vec<(String, String)>,
    /// Whether it is a sentinel.
    pub(crate) sentinel: bool,
    pub(crate) module: Option<Module>,
    pub(crate) dir: PathBuf,
}

/// The module and its arguments, as `--loadmodule` takes them.
pub(crate) struct Module {
    pub(crate) path: PathBuf,
    pub(crate) arguments: Vec<String>,
}

/// A started server, wherever it runs.
pub(crate) trait Running: Send + Sync {
    fn addr(&self) -> SocketAddr;
    fn pid(&self) -> u32;
    /// Has no effect on a server that has ended.
    fn signal(&self, signal: i32);
    fn ended(&self) -> bool;
    fn start_again(&self);
    fn log(&self) -> String;
}
