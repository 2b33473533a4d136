//! What clients have left behind.

use std::time::Duration;

use redis::Value;
use support::{Raw, Server, eventually};

/// What a server still has this long after all clients have ended: no lock should be held or waited for, and no session be there.
pub fn after(time: Duration, server: &Server, raw: &mut Raw) -> Option<String> {
    let mut left = Vec::new();
    let is_clean = eventually(time, || {
        left.clear();
        if let Value::Int(keys @ 1..) = raw.call(&[b"DBSIZE"]) {
            left.push(format!("{keys} keys"));
        }
        for field in ["holdfast_waiters", "holdfast_tied_holds", "holdfast_sessions"] {
            let count = server.info("holdfast", field).unwrap_or_default();
            if count != "0" {
                left.push(format!("{field} {count}"));
            }
        }
        left.is_empty()
    });
    (!is_clean).then(|| format!("{time:?} after all clients are closed, the server has {}", left.join(", ")))
}
