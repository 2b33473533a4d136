//! When a search for a cycle may go on: only when it is told of everything that has changed.

use crate::books::{Books, Expiry, TieId};
use crate::lock::cycle::{Candidate, Search};
use crate::lock::serve::Change;
use crate::lock::{Limit, LockKey, Owner, WaiterId};

fn key() -> LockKey {
    LockKey::new(0, b"key")
}

fn with_a_search() -> Books {
    let owner: Owner = b"me"[..].into();
    let search = Search::new(Candidate { owner: &owner, keys: &[key()], limit: Limit::MUTEX });
    let mut books = Books::default();
    books.searches.push_back((WaiterId(0), search));
    books
}

/// It is not given out after `change`, at 1000, and given out again after `settle`.
fn waits_for(change: impl FnOnce(&mut Books), settle: impl FnOnce(&mut Books)) {
    let mut books = with_a_search();
    change(&mut books);
    assert!(books.next_search(1000).is_none());
    settle(&mut books);
    assert!(books.next_search(1000).is_some() && books.searches.is_empty());
}

#[test]
fn a_changed_lock() {
    let looked_at = |books: &mut Books| while books.agenda.next(&mut books.queue).is_some() {};
    waits_for(|books| books.agenda.note(key(), Change::Freed), looked_at);
    waits_for(|books| books.agenda.note(key(), Change::Foreign), looked_at);
}

#[test]
fn a_lease_that_has_run_out() {
    waits_for(|books| books.looks.schedule(&key(), Some(1000)), |books| drop(books.looks.take_due(1000)));
    waits_for(|books| books.looks.schedule(&key(), Some(1)), |books| books.looks.schedule(&key(), Some(1001)));
}

#[test]
fn an_expired_key() {
    waits_for(|books| books.expired.push_back((key(), Expiry::Key)), |books| drop(books.expired.pop_front()));
}

#[test]
fn a_replaced_data_set() {
    waits_for(
        |books| books.sweep.begin(None, (WaiterId(1), TieId(0))),
        |books| {
            books.sweep.passed_waiter(None);
            books.sweep.passed_tie(None);
        },
    );
}

/// The memory of searches that are over is freed part by part.
#[test]
fn finished_searches_are_freed() {
    let mut books = with_a_search();
    let (_, search) = books.searches.pop_front().expect("it is there");
    books.searched.push_back(search);
    assert!(books.has_work());
    while books.free_searched() {}
    assert!(books.searched.is_empty() && !books.has_work());
}
