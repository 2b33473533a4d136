//! `holdfast ls`: locks that are held or waited for, found by SCAN in slices.

use std::io::{IsTerminal, Write, stderr};

use holdfast_client::Locks;

use crate::failure::Failure;
use crate::report::table;
use crate::seen::{Lock, failed, servers, shown};
use crate::times;

/// Lists the locks whose keys match.
pub async fn list(locks: &Locks, pattern: &str, json: bool) -> Result<u8, Failure> {
    let mut found = Vec::new();
    for mut server in servers(locks).await? {
        let fail = |server: &_, error: &_| failed(server, pattern.as_bytes(), error);
        let total = server.size().await.map_err(|error| fail(&server, &error))?;
        let (mut cursor, mut looked) = (0, 0);
        loop {
            let (next, keys) = server.scan(cursor, pattern).await.map_err(|error| fail(&server, &error))?;
            let slice = server.locks(&keys).await.map_err(|error| fail(&server, &error))?;
            looked += 1000;
            progress(&format!("{}: {} of {total} keys, {} locks", server.name, looked.min(total), found.len()));
            for lock in slice {
                if json {
                    // Where both go to one terminal, it would stand behind the progress.
                    progress("");
                    println!("{}", serde_json::Value::from(lock.json()));
                } else {
                    found.push(lock);
                }
            }
            cursor = next;
            if cursor == 0 {
                break;
            }
        }
    }
    progress("");
    if !json {
        // A key that moves while it is looked for is seen twice.
        found.sort_by(|a, b| a.key.cmp(&b.key));
        found.dedup_by(|a, b| a.key == b.key);
        print!("{}", text(&found));
    }
    Ok(0)
}

fn text(locks: &[Lock]) -> String {
    let row = |lock: &Lock| {
        let holders = match lock.holders.as_slice() {
            [] => "-".to_owned(),
            [one] => shown(&one.owner),
            [first, others @ ..] => format!("{} and {} more", shown(&first.owner), others.len()),
        };
        vec![shown(&lock.key), lock.kind(), lock.waiters.to_string(), times::show(lock.ttl), holders]
    };
    table(&["KEY", "KIND", "WAITERS", "LEASE", "HOLDER"], &locks.iter().map(row).collect::<Vec<_>>())
}

/// How far it is, for whoever sits at the terminal.
fn progress(line: &str) {
    let mut out = stderr();
    if out.is_terminal() {
        let _ = write!(out, "\r\x1b[K{line}");
        let _ = out.flush();
    }
}
