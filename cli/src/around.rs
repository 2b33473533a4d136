//! The runs around this one: a command that is run under a lock may run `holdfast` itself, and would wait for ever for a lock
//! that a run around it holds until its command ends. Owners are unique, so the server can be asked whether one of theirs holds
//! the lock: whatever the address is called, and also if the run around it has ended, or lost its lock, long since.

use std::os::unix::ffi::OsStringExt;

use holdfast_client::{Locks, Owner};

use crate::args::Run;
use crate::seen::{Lock, server_of};

/// The variable that has the owners of all runs around a command, one a line.
pub const OWNERS: &str = "HOLDFAST_OWNERS";

/// Its value for a command that is run by this owner.
pub fn owners_with(owner: &Owner) -> Vec<u8> {
    let mut owners = owners();
    owners.push(owner.as_bytes().to_vec());
    owners.join(&b'\n')
}

fn owners() -> Vec<Vec<u8>> {
    let value = std::env::var_os(OWNERS).unwrap_or_default().into_vec();
    value.split(|byte| *byte == b'\n').filter(|owner| !owner.is_empty()).map(<[u8]>::to_vec).collect()
}

/// One of the keys that runs around this one hold, so often that there is no room before they end. Who may not look, or can't
/// reach the server, is told none.
pub async fn never_free(locks: &Locks, task: &Run) -> Option<String> {
    let owners = owners();
    if owners.is_empty() {
        return None;
    }
    for key in &task.keys {
        let Ok(mut server) = server_of(locks, key).await else { continue };
        if let Ok(Some(lock)) = server.lock(key.as_bytes()).await
            && is_taken(&lock, &owners, wanted(task))
        {
            return Some(key.clone());
        }
    }
    None
}

/// How many may hold together with this one.
fn wanted(task: &Run) -> usize {
    if task.shared { usize::MAX } else { task.limit.map_or(1, |limit| usize::try_from(limit).unwrap_or(usize::MAX)) }
}

fn is_taken(lock: &Lock, owners: &[Vec<u8>], wanted: usize) -> bool {
    let limit = match lock.limit {
        0 => usize::MAX,
        limit => usize::try_from(limit).unwrap_or(1),
    };
    let around = lock.holders.iter().filter(|holder| owners.contains(&holder.owner)).count();
    around > 0 && around >= limit.min(wanted)
}
