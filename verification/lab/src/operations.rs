//! Writes the clients' records in the format that other checkers read (verification/histories/README.md).

use std::env;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use histories::history::Acquire;
use histories::{Operation, Outcome, Request, write};

use crate::history::{ForcedLock, History, Hold, LEASE_MARGIN, Limit, Micros};

/// The number of files written.
static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// Writes this history into the folder `LAB_HISTORY`, which `scripts/lab` sets.
pub fn keep(history: &History, scenario: &str) {
    let Some(folder) = env::var_os("LAB_HISTORY").map(PathBuf::from) else { return };
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let file = folder.join(format!("{number:04} {scenario}.jsonl"));
    if let Err(why) = write_into(&folder, &file, history) {
        eprintln!("{}: {why}", file.display());
    }
}

fn write_into(folder: &Path, file: &Path, history: &History) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    write(&operations(history), BufWriter::new(File::create(file)?))
}

/// All outcomes that clients saw. Refusals, and renewals, which only extend a lease, are left out.
pub fn operations(history: &History) -> Vec<Operation> {
    history.holds.iter().flat_map(of_hold).chain(history.forced_locks.iter().map(of_force)).collect()
}

fn of_hold(hold: &Hold) -> Vec<Operation> {
    let grant = &hold.grant;
    let operation = |request, from, to: Option<Micros>, outcome| Operation {
        process: grant.owner.clone(),
        key: grant.key.clone(),
        request,
        from,
        to,
        outcome,
    };
    let end = || Request::End { owner: grant.owner.clone() };
    let limit = match grant.limit {
        Limit::Of(most) => most as u64,
        Limit::Shared => 0,
    };
    let lease = Some(grant.lease.saturating_sub(LEASE_MARGIN));
    let acquire = Acquire { owner: grant.owner.clone(), limit, lease, wait: true, ..Acquire::default() };
    let granted = operation(Request::Acquire(acquire), grant.sent, Some(grant.replied), Outcome::Token(grant.token));
    // The record does not contain whether the lock was still held at its release. An end is correct in both cases. A client sends
    // one request at a time, so once that request has ended, the client does not rely on the hold.
    let came = if hold.returned.is_some() { Outcome::Done } else { Outcome::Unknown };
    let ended = hold.ended.map(|at| operation(end(), at, hold.returned, came));
    let lost = hold.notified.map(|(at, _)| operation(end(), grant.sent, Some(at), Outcome::Done));
    [Some(granted), ended, lost].into_iter().flatten().collect()
}

fn of_force(broken: &ForcedLock) -> Operation {
    Operation {
        process: "another client".to_owned(),
        key: broken.key.clone(),
        request: Request::Force,
        from: broken.sent,
        to: broken.replied,
        outcome: if broken.replied.is_some() { Outcome::Done } else { Outcome::Unknown },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{Assurance, Event, Grant};

    /// Two holds of a mutex, the second granted at this time.
    fn seen(second: Micros, ended: Option<Micros>) -> History {
        let grant = |owner: &str, token, at| {
            let (key, owner, limit, assurance) = ("k".to_owned(), owner.to_owned(), Limit::Of(1), Assurance::Plain);
            let (sent, began, replied, lease) = (at, at, at + 1_000, 2_000_000);
            Event::Grant(Grant {
                hold: 1,
                key,
                owner,
                limit,
                token,
                sent,
                began,
                replied,
                lease,
                epoch: None,
                assurance,
            })
        };
        let mut history = History::default();
        let release_events = |at| {
            let (sent, ended, outcome) = (at, Some(at + 50_000), crate::history::Outcome::Granted);
            [Event::Ended { hold: 1, at }, Event::Request(crate::history::Request { sent, allowed: 0, ended, outcome })]
        };
        history.add(std::iter::once(grant("a", 1, 0)).chain(ended.into_iter().flat_map(release_events)));
        history.add([grant("b", 2, second)]);
        history
    }

    #[test]
    fn records_are_read_and_checked_by_history_checker() {
        let checked = |history: &History| {
            let mut file = Vec::new();
            write(&operations(history), &mut file).unwrap();
            histories::check(&histories::read(file.as_slice()).unwrap())
        };
        assert!(checked(&seen(1_000_000, None)).is_err());
        assert!(checked(&seen(1_000_000, Some(900_000))).is_ok());
        assert!(checked(&seen(2_000_000, None)).is_ok());
        assert!(checked(&seen(1_000_000, Some(1_100_000))).is_err());
        // Granted to another client during its release, and after its reply.
        assert!(checked(&seen(1_000_000, Some(980_000))).is_ok());
        let mut broken = seen(1_000_000, None);
        broken.forced_locks.push(ForcedLock { key: "k".to_owned(), sent: 500_000, replied: None });
        assert!(checked(&broken).is_ok());
    }
}
