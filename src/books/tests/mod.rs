//! The books without a server.

mod alive;
mod confirmations;
mod looks;
mod owed;
mod searches;
mod sessions;
mod sweep;
mod ties;
mod together;
mod undo;

use super::ties::Home;
use super::{Step, Undo};
use crate::lock::{Deadline, Hold, LockKey, Owner};
use std::cell::Cell;
use std::rc::Rc;

fn owner(number: u8) -> Owner {
    Rc::from([b'o', number])
}

fn key(number: u8) -> LockKey {
    LockKey::new(0, &[b'k', number])
}

fn home(db: i32) -> Home {
    Rc::new(Cell::new(db))
}

fn hold(holds: u64) -> Hold {
    Hold { holds, token: Some(1), deadline: Deadline::At(100) }
}

/// The way back from a grant of these keys: `before` holds became `given`, and the answer promises so many.
fn undo(serial: u64, of: &Owner, keys: &[LockKey], (before, given, promised): (u64, u64, u64)) -> Undo {
    let step = |key: &LockKey| Step {
        name: key.name.clone(),
        before: (before > 0).then(|| hold(before)),
        tie_before: None,
        given: hold(given),
        promised,
        told: 0,
    };
    Undo { serial, home: home(0), owner: of.clone(), client: 1, steps: keys.iter().map(step).collect() }
}

/// No file of failures: what is found belongs into a test of its own.
fn config() -> proptest::test_runner::Config {
    proptest::test_runner::Config { failure_persistence: None, ..Default::default() }
}
