//! What clients have left behind.

use std::time::Duration;

use redis::Value;
use support::{Server, eventually};

/// What is to be gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Clients live, and have given everything back: no lock is held or waited for.
    Free,
    /// All clients have ended: their sessions, too.
    Ended,
}

/// What servers still have that should be gone, when this time is over.
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
