//! `holdfast ls`: locks that are held or waited for, found by SCAN in slices.

use std::collections::HashSet;
use std::io::{IsTerminal, Write, stderr};

use holdfast_client::Locks;

use crate::failure::Failure;
use crate::inspect::{Lock, failed, servers, shown};
use crate::report::{print, print_message, table};
use crate::times;

/// Lists the locks whose keys match.
pub async fn list(locks: &Locks, pattern: &[u8], json: bool) -> Result<u8, Failure> {
    let mut found = Vec::new();
    let mut hidden = 0;
    for mut server in servers(locks).await? {
        let fail = |server: &_, error: &_| failed(server, pattern, error);
        // Only for the progress.
        let total = server.size().await.unwrap_or(u64::MAX);
        let (mut cursor, mut looked, mut seen) = (0, 0, HashSet::new());
        loop {
            let (next, keys) = server.scan(cursor, pattern).await.map_err(|error| fail(&server, &error))?;
            let (mut slice, not_ours) = server.locks(&keys).await.map_err(|error| fail(&server, &error))?;
            looked += 1000;
            hidden += not_ours;
            progress(&how_far(&server.name, looked, total, found.len()));
            // SCAN may return a key twice.
            slice.retain(|lock| seen.insert(lock.key.clone()));
            if json && !slice.is_empty() {
                // On one terminal, the list would follow the progress on the same line.
                progress("");
                print(&slice.iter().map(|lock| lock.json().to_string()).collect::<String>())?;
            } else {
                found.extend(slice);
            }
            cursor = next;
            if cursor == 0 {
                break;
            }
        }
    }
    progress("");
    if !json {
        found.sort_by(|a, b| a.key.cmp(&b.key));
        print(&text(&found))?;
    }
    if hidden > 0 {
        print_message(format_args!("{hidden} keys are not shown: this user has no right to them"));
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

fn how_far(server: &str, looked: u64, total: u64, locks: usize) -> String {
    match total {
        u64::MAX => format!("{server}: {locks} locks"),
        total => format!("{server}: {} of {total} keys, {locks} locks", looked.min(total)),
    }
}

/// Shows the progress at a terminal.
fn progress(line: &str) {
    let mut out = stderr();
    if out.is_terminal() {
        let _ = write!(out, "\r\x1b[K{line}");
        let _ = out.flush();
    }
}
