//! Tests of the state, without a server.

mod bindings;
mod confirmations;
mod heartbeat;
mod pending;
mod sessions;
mod stalls;
mod sweep;
mod together;
mod undelivered;

use super::bindings::Home;
use super::pending::{OnBehalf, Ticket};
use super::{Answer, BindingFlags, GrantId, NewBinding, Outcome, Requester, Terms, TokenForm};
use crate::lock::{Deadline, Demand, Limit, LockKey, Owner, Raise, Token, Waiter};
use std::cell::Cell;
use std::rc::Rc;

const TERMS: Terms = Terms {
    demand: Demand { limit: Limit::MUTEX, raise: Raise::ByOne, lease: 1000 },
    flags: BindingFlags::NONE,
    replicas: 0,
};

/// The recipient of a request's outcome.
fn requester(client: u64, on_behalf: OnBehalf, ticket: Ticket) -> Requester {
    let Terms { flags, replicas, .. } = TERMS;
    let (form, arrived, reserved) = (TokenForm::Alone, 1, 0);
    Requester { ticket, client, on_behalf, block: None, flags, replicas, renewal: None, form, arrived, reserved }
}

/// A session's request for locks.
fn request(client: u64, ticket: Ticket, owner: Owner, keys: impl Into<Rc<[LockKey]>>) -> Box<Waiter<Requester>> {
    Waiter::new(owner, keys.into(), TERMS.demand, None, requester(client, OnBehalf::Session, ticket))
}

fn owner(number: u8) -> Owner {
    Rc::from([b'o', number])
}

fn key(number: u8) -> LockKey {
    LockKey::new(0, &[b'k', number])
}

fn home(db: i32) -> Home {
    Rc::new(Cell::new(db))
}

/// The binding of a session's watched hold: renewed for 30 ms at a time, held until 50.
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

/// A grant whose token is also its id.
fn granted(number: u64) -> Outcome {
    Outcome::Granted(Answer::Token(number), GrantId(number))
}

/// Writes no file of failures: a failure that is found gets a test of its own.
fn config() -> proptest::test_runner::Config {
    proptest::test_runner::Config { failure_persistence: None, ..Default::default() }
}
