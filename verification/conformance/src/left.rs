//! State that clients leave on the servers.

use std::time::Duration;

use redis::Value;
use support::{Server, eventually};

/// What must be gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Clients run, and have released everything: no lock is held or waited for.
    Free,
    /// All clients are closed: their sessions, too.
    Ended,
}

/// The state that the servers still have after this time.
pub fn after(time: Duration, when: Moment, servers: &[&Server]) -> Option<String> {
    const FREE: [&str; 2] = ["holdfast_waiters", "holdfast_bound_holds"];
    let fields = if when == Moment::Ended { &[FREE[0], FREE[1], "holdfast_sessions"][..] } else { &FREE };
    let mut left = Vec::new();
    let is_clean = eventually(time, || {
        left.clear();
        for server in servers {
            if let Value::Int(keys @ 1..) = server.raw().call(&[b"DBSIZE"]) {
                left.push(format!("{keys} keys"));
            }
            for field in fields {
                let count = server.info("holdfast", field).unwrap_or_default();
                if count != "0" {
                    left.push(format!("{field} {count}"));
                }
            }
        }
        left.is_empty()
    });
    let whose = match when {
        Moment::Free => "all clients have released everything",
        Moment::Ended => "all clients are closed",
    };
    (!is_clean).then(|| format!("{time:?} after {whose}, the server has {}", left.join(", ")))
}
