//! redis-py's own `Lock`: a real client beside the imitated ones.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Its name in tables.
pub const REDIS_PY: &str = "redis-py Lock";

/// Runs `redis_py_lock.py`.
pub struct RedisPy {
    python: PathBuf,
}

/// Its results for clients that hand one lock on.
#[derive(Debug, Deserialize)]
pub struct HandOffs {
    /// From each release to the next holder's reply, in microseconds.
    pub times_us: Vec<f64>,
    /// The duration of the measurement.
    pub seconds: f64,
    /// The number of grants of each client.
    pub acquisitions: Vec<u64>,
    /// Seconds of the server's main thread.
    pub server_cpu: f64,
}

impl RedisPy {
    /// Uses this Python, which has redis-py.
    pub fn new(python: &Path) -> Self {
        Self { python: python.to_owned() }
    }

    /// The times of `count` pairs of acquire and release, in microseconds.
    pub fn pairs(&self, port: u16, count: usize) -> Result<Vec<f64>> {
        self.run(&["pairs".to_owned(), port.to_string(), count.to_string()])
    }

    /// Measures `waiters` clients that wait for a lock, and one more that holds it.
    pub fn hand_offs(&self, port: u16, waiters: usize, length: Duration) -> Result<HandOffs> {
        self.run(&["handoffs".to_owned(), port.to_string(), waiters.to_string(), length.as_secs_f64().to_string()])
    }

    fn run<T: DeserializeOwned>(&self, arguments: &[String]) -> Result<T> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("redis_py_lock.py");
        let output = Command::new(&self.python).arg(&script).args(arguments).output();
        let output = output.with_context(|| format!("running {}", self.python.display()))?;
        if !output.status.success() {
            bail!("redis_py_lock.py: {}", String::from_utf8_lossy(&output.stderr));
        }
        serde_json::from_slice(&output.stdout).context("the output of redis_py_lock.py")
    }
}
