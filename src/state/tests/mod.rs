//! The state without a server.

mod bindings;
mod confirmations;
mod heartbeat;
mod lease_timers;
mod pending;
mod sessions;
mod sweep;
mod together;
mod undelivered;

use super::bindings::Home;
use super::pending::Purpose;
use super::{Answer, BindingFlags, GrantId, NewBinding, Outcome, Terms};
use crate::lock::{Deadline, Demand, Limit, LockKey, Owner, Raise, Token};
use std::cell::Cell;
use std::rc::Rc;

const TERMS: Terms = Terms {
    demand: Demand { limit: Limit::MUTEX, raise: Raise::ByOne, lease: 1000 },
    flags: BindingFlags::NONE,
    replicas: 0,
};

/// A request for a lock.
const ACQUIRE: Purpose = Purpose::Acquire(TERMS);

fn owner(number: u8) -> Owner {
    Rc::from([b'o', number])
}

fn key(number: u8) -> LockKey {
    LockKey::new(0, &[b'k', number])
}

fn home(db: i32) -> Home {
    Rc::new(Cell::new(db))
}

/// What a watched hold of a session is bound by: for 30 ms at a time, until 50.
fn new_binding(client: u64, key: LockKey, owner: Owner, token: Token) -> NewBinding {
    NewBinding {
        client,
        flags: BindingFlags { watchdog: true, ephemeral: false, contention: false },
        key,
        owner,
        token,
        lease: 30,
        replicas: 0,
        deadline: Deadline::At(50),
        holds: 1,
        limit: Limit::MUTEX,
    }
}

/// A request that was granted a lock, under the token that is also the name of the grant.
fn granted(number: u64) -> Outcome {
    Outcome::Granted(Answer::Token(number), GrantId(number))
}

/// No file of failures: what is found belongs into a test of its own.
fn config() -> proptest::test_runner::Config {
    proptest::test_runner::Config { failure_persistence: None, ..Default::default() }
}
