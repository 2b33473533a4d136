//! What clients have left behind at the servers.

use std::time::Duration;

use redis::Value;
use support::{Server, eventually};

/// What must be gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Clients run, and have released everything: no lock is held or waited for.
    Free,
    /// All clients are closed: their sessions, too.
    Ended,
}

/// What the servers still have after this time, although it should be gone.
pub fn after(time: Duration, when: When, servers: &[&Server]) -> Option<String> {
    const FREE: [&str; 2] = ["holdfast_waiters", "holdfast_bound_holds"];
    let fields = if when == When::Ended { &[FREE[0], FREE[1], "holdfast_sessions"][..] } else { &FREE };
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
        When::Free => "all clients have given everything back",
        When::Ended => "all clients are closed",
    };
    (!is_clean).then(|| format!("{time:?} after {whose}, the server has {}", left.join(", ")))
}
