//! Nested runs: the command of `holdfast run` may run `holdfast` itself. The inner run would wait forever for a lock
//! that the outer run holds until its command ends. Owners are unique, so the inner run asks the server whether an
//! outer run's owner holds the lock. This works for every address, and also when the outer run has ended or lost its
//! lock.

use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use holdfast_client::Owner;

use crate::args::Run;
use crate::inspect::{Lock, Server};

/// The variable with the owners of all outer runs, one per line.
pub const OWNERS: &str = "HOLDFAST_OWNERS";

/// Its value for the command of this owner.
pub fn owners_with(owner: &Owner) -> Vec<u8> {
    let mut owners = owners();
    owners.push(owner.as_bytes().to_vec());
    owners.join(&b'\n')
}

fn owners() -> Vec<Vec<u8>> {
    let value = std::env::var_os(OWNERS).unwrap_or_default().into_vec();
    value.split(|byte| *byte == b'\n').filter(|owner| !owner.is_empty()).map(<[u8]>::to_vec).collect()
}

/// A key that outer runs hold, so that this run would never be granted it. `None` if this user may not read the lock.
pub async fn key_of_outer_run<'t>(server: &mut Server, task: &'t Run) -> Option<&'t OsStr> {
    let owners = owners();
    if owners.is_empty() {
        return None;
    }
    for key in &task.keys {
        if let Ok(Some(lock)) = server.lock(key.as_bytes()).await
            && is_taken(&lock, &owners, wanted(task))
        {
            return Some(key);
        }
    }
    None
}

/// How many owners may hold the lock together with this one.
fn wanted(task: &Run) -> usize {
    if task.shared { usize::MAX } else { task.limit.map_or(1, |limit| usize::try_from(limit).unwrap_or(usize::MAX)) }
}

fn is_taken(lock: &Lock, owners: &[Vec<u8>], wanted: usize) -> bool {
    let limit = match lock.limit {
        0 => usize::MAX,
        limit => usize::try_from(limit).unwrap_or(1),
    };
    let outer = lock.holders.iter().filter(|holder| owners.contains(&holder.owner)).count();
    outer > 0 && outer >= limit.min(wanted)
}
