//! Tests of the core: properties, random histories against a plain model, and exhaustive models.
//!
//! Every result is compared with `plain`, which implements the rule a second time, as simply as possible and without the
//! core's code.
//!
//! The core needs no server, so it is compiled here alone, with optimisation: unoptimised, in the module's own package, the
//! tests are six times as slow.

#![cfg(test)]

#[path = "../../../src/lock/mod.rs"]
pub mod lock;

mod agenda;
mod broken;
mod checked;
mod deadlock;
mod exhaustive;
mod histories;
mod holding;
mod names;
mod plain;
mod queue;
mod table;

use lock::serve::{Agenda, Change, Job, View, WaitEnd};
use lock::{Demand, Limit, LockKey, Millis, Owner, Queue, Waiter};
use proptest::test_runner::{Config, TestRunner};

/// The owner with this number.
fn owner(number: u32) -> Owner {
    number.to_be_bytes().as_slice().into()
}

fn number_of(owner: &Owner) -> u32 {
    owner.as_ref().try_into().map_or(u32::MAX, u32::from_be_bytes)
}

/// Keys from this number on are in a second database, with the names of those from 0 on in the first.
const ELSEWHERE: u32 = 1 << 24;

/// The key with this number.
fn key(number: u32) -> LockKey {
    LockKey::new(i32::from(number >= ELSEWHERE), &(number % ELSEWHERE).to_be_bytes())
}

fn number_of_key(key: &LockKey) -> u32 {
    let name: u32 = key.name.as_ref().try_into().map_or(ELSEWHERE - 1, u32::from_be_bytes);
    name + if key.db == 0 { 0 } else { ELSEWHERE }
}

fn keys(numbers: &[u32]) -> Box<[LockKey]> {
    numbers.iter().map(|&number| key(number)).collect()
}

/// A demand with this limit, 0 for none.
fn demand(limit: u32) -> Demand {
    Demand { limit: Limit::from_number(limit), raise: lock::Raise::ByOne, lease: 1000 }
}

/// This number of cases, or more with `PROPTEST_CASES`. Fewer would be too few for the tests that count what happened.
fn cases(cases: u32) -> Config {
    let cases = Config::default().cases.max(cases);
    Config { cases, failure_persistence: None, max_shrink_iters: 4_000, ..Config::default() }
}

/// Always the same cases, for faults that must be detected.
fn repeatable(cases: u32) -> TestRunner {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
    TestRunner::new_with_rng(config, proptest::test_runner::TestRng::deterministic_rng(Default::default()))
}

/// Locks with waiters.
trait Locks: View {
    /// The holders of a lock.
    fn holders(&mut self, key: &LockKey) -> Vec<Owner>;

    /// Applies the end of a wait: a grant is written.
    fn settle(&mut self, waiter: &Waiter<()>, end: WaitEnd);
}

/// Serves all requests that can be granted after the `changed` locks have changed.
fn serve(
    queue: &mut Queue<()>,
    locks: &mut impl Locks,
    changed: impl IntoIterator<Item = (LockKey, Change)>,
    now: Millis,
) {
    let mut agenda = Agenda::default();
    changed.into_iter().for_each(|(key, change)| agenda.note(key, change));
    while let Some(job) = agenda.next(queue) {
        match job {
            Job::Nothing => {}
            Job::FindHolders(key) => {
                let holders = locks.holders(&key);
                agenda.held_by(queue, &key, holders);
            }
            Job::Judge(attempt) => {
                if let Some(end) = attempt.judge(locks, now)
                    && let Some(waiter) = agenda.ended(queue, attempt.id(), &end)
                {
                    locks.settle(&waiter, end);
                }
            }
        }
    }
    assert!(agenda.is_empty());
}
