//! Random histories of the queue, each step compared with the plain model. Order is kept, no request is granted twice
//! or after it was cancelled, and no request that could be granted waits.

use super::broken::Fault;
use super::checked::World;
use super::plain::{Ending, PlainHold, PlainLock, PlainWaiter};
use super::{ELSEWHERE, cases, key, owner, repeatable};
use crate::lock::serve::Change;
use crate::lock::{Millis, WaiterId};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use std::collections::BTreeMap;

const OWNERS: u32 = 5;
const KEYS: [u32; 3] = [0, 1, ELSEWHERE];

/// A step.
#[derive(Clone, Debug)]
enum Step {
    /// A request arrives, with a timeout and a time that it has waited elsewhere.
    Arrive { request: PlainWaiter, patience: Option<Millis>, waited: Millis },
    /// The waiter at this position disconnects, if there is one.
    Leave(usize),
    /// Time passes: leases and waits end.
    Pass(Millis, Purge),
    /// A holder releases all its holds.
    Release { key: u32, owner: u32 },
    /// The key is deleted, or the lock forced.
    Delete(u32),
    /// Another client writes the key.
    Grab { key: u32, owner: u32, limit: u32, lease: Option<Millis> },
    /// Another client overwrites the key with something that is not a lock.
    Overwrite(u32),
}

/// Whether expired holders are removed now, or by the next write of the key.
#[derive(Clone, Copy, Debug)]
enum Purge {
    Now,
    Later,
}

fn limit() -> impl Strategy<Value = u32> {
    prop_oneof![4 => Just(1_u32), 2 => Just(2), 1 => Just(3), 3 => Just(0)]
}

fn arrival() -> impl Strategy<Value = Step> {
    let one = (prop::sample::select(&KEYS[..]), limit()).prop_map(|(key, limit)| (vec![key], limit));
    let several = prop::sample::subsequence(KEYS.to_vec(), 2..=KEYS.len()).prop_shuffle();
    let what = prop_oneof![3 => one, 2 => several.prop_map(|keys| (keys, 1))];
    let to = prop_oneof![2 => Just(None), 1 => (0_u64..4).prop_map(Some)];
    let patience = prop_oneof![1 => Just(None), 1 => (1_u64..60).prop_map(Some)];
    let waited = prop_oneof![3 => Just(0), 1 => 1_u64..60];
    (0..OWNERS, what, to, 1_u64..80, patience, waited).prop_map(
        |(owner, (keys, limit), to, lease, patience, waited)| {
            let id = WaiterId::FIRST;
            Step::Arrive { request: PlainWaiter { id, owner, keys, limit, to, lease }, patience, waited }
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let purge = prop_oneof![Just(Purge::Now), Just(Purge::Later)];
    let lease = prop_oneof![1 => Just(None), 3 => (1_u64..60).prop_map(Some)];
    let grab = (prop::sample::select(&KEYS[..]), 0..OWNERS, limit(), lease);
    prop_oneof![
        24 => arrival(),
        4 => (0..8_usize).prop_map(Step::Leave),
        8 => (0..25_u64, purge).prop_map(|(time, purge)| Step::Pass(time, purge)),
        12 => (prop::sample::select(&KEYS[..]), 0..OWNERS).prop_map(|(key, owner)| Step::Release { key, owner }),
        2 => prop::sample::select(&KEYS[..]).prop_map(Step::Delete),
        2 => grab.prop_map(|(key, owner, limit, lease)| Step::Grab { key, owner, limit, lease }),
        1 => prop::sample::select(&KEYS[..]).prop_map(Step::Overwrite),
    ]
}

fn history() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..60)
}

/// Counts of what happened in the histories, to show that they cover enough.
#[derive(Debug, Default)]
struct Coverage {
    waits: usize,
    overtook: usize,
    served: usize,
    timeouts: usize,
    ends: BTreeMap<&'static str, usize>,
}

fn execute(world: &mut World, waits_until: &mut BTreeMap<WaiterId, Millis>, step: Step, coverage: &mut Coverage) {
    let now = world.locks.table.now;
    match step {
        Step::Arrive { request, .. } if world.locks.plain.awaits(request.owner, &request.keys) => {}
        Step::Arrive { mut request, patience, waited } => {
            request.id.arrived = (1_000 + now).saturating_sub(waited);
            let id = world.queue.next_id(request.id.arrived);
            let until = patience.map(|patience| now + patience);
            match world.arrive(request, until) {
                None => {
                    coverage.waits += 1;
                    coverage.overtook += usize::from(world.locks.plain.waiters.last().is_some_and(|last| last.id > id));
                    waits_until.extend(until.map(|until| (id, until)));
                }
                Some(Ending::Granted) => *coverage.ends.entry("granted immediately").or_default() += 1,
                Some(_) => *coverage.ends.entry("refused immediately").or_default() += 1,
            }
        }
        Step::Leave(place) => {
            if let Some(id) = world.locks.plain.waiters.get(place).map(|waiter| waiter.id) {
                world.leave(id);
            }
        }
        Step::Pass(time, purge) => pass(world, waits_until, now + time, purge, coverage),
        Step::Release { key: number, owner: who } => {
            let held = world.locks.plain.holds(number, who);
            world.locks.plain.release(number, who);
            world.locks.table.release(&key(number), &owner(who));
            if held {
                world.serve(vec![(number, Change::Freed)]);
            }
        }
        Step::Delete(number) => {
            world.delete(number);
            world.serve(vec![(number, Change::Freed)]);
        }
        Step::Grab { key, owner, limit, lease } => {
            let hold = PlainHold { owner, holds: 1, until: lease.map(|lease| now + lease), grant: None };
            world.store(key, PlainLock { not_a_lock: false, holders: vec![hold], limit });
            world.serve(vec![(key, Change::Foreign)]);
        }
        Step::Overwrite(key) => {
            world.store(key, PlainLock { not_a_lock: true, ..PlainLock::default() });
            world.serve(vec![(key, Change::Foreign)]);
        }
    }
}

fn pass(
    world: &mut World,
    waits_until: &BTreeMap<WaiterId, Millis>,
    now: Millis,
    purge: Purge,
    coverage: &mut Coverage,
) {
    world.locks.table.now = now;
    let expired = world.locks.plain.expire(now);
    if matches!(purge, Purge::Now) {
        world.locks.table.purge();
    }
    world.serve(expired.into_iter().map(|key| (key, Change::Freed)).collect());
    for (&id, _) in waits_until.iter().filter(|(_, until)| **until <= now) {
        coverage.timeouts += usize::from(world.locks.plain.place(id).is_some());
        world.leave(id);
    }
}

fn run(steps: Vec<Step>, fault: Option<Fault>, coverage: &mut Coverage) -> Result<(), TestCaseError> {
    let mut world = World { fault, ..World::default() };
    let mut waits_until = BTreeMap::new();
    let mut token = 0;
    for (at, step) in steps.into_iter().enumerate() {
        let before = world.locks.plain.waiters.len();
        execute(&mut world, &mut waits_until, step.clone(), coverage);
        coverage.served += before.saturating_sub(world.locks.plain.waiters.len());
        world.check().map_err(|wrong| TestCaseError::fail(format!("step {at}, {step:?}: {wrong}")))?;
        tokens_grow(&world, &mut token)?;
    }
    Ok(())
}

/// The tokens that a step wrote are greater than all before.
fn tokens_grow(world: &World, newest: &mut u64) -> Result<(), TestCaseError> {
    let holders = world.locks.table.stored.keys().filter_map(|key| world.locks.table.holders_of(key));
    let tokens = holders.flat_map(|it| it.iter().filter_map(|(_, hold)| hold.token)).collect::<Vec<u64>>();
    let given = world.locks.table.fence.clone().next(0) - 1;
    prop_assert!(tokens.iter().all(|token| *token <= given) && given >= *newest);
    *newest = given;
    Ok(())
}

#[test]
fn random_histories_satisfy_the_rule() {
    let mut runner = proptest::test_runner::TestRunner::new(cases(1500));
    let coverage = std::cell::RefCell::new(Coverage::default());
    let result = runner.run(&history(), |steps| run(steps, None, &mut coverage.borrow_mut()));
    println!("{:?}", coverage.borrow());
    result.unwrap_or_else(|wrong| panic!("{wrong}"));
    let coverage = coverage.into_inner();
    assert!(coverage.overtook > 500, "{coverage:?}");
    assert!(coverage.waits > 1000 && coverage.served > 500 && coverage.timeouts > 50, "{coverage:?}");
}

#[test]
fn plain_serving_satisfies_the_rule() {
    let result = repeatable(300).run(&history(), |steps| run(steps, Some(Fault::Nothing), &mut Coverage::default()));
    result.unwrap_or_else(|wrong| panic!("{wrong}"));
}

#[test]
fn injected_faults_are_found() {
    for fault in Fault::ALL {
        let result = repeatable(1000).run(&history(), |steps| run(steps, Some(fault), &mut Coverage::default()));
        let wrong = result.err().unwrap_or_else(|| panic!("{fault:?} is not detected"));
        println!("{fault:?}: {}", wrong.to_string().lines().next().unwrap_or_default());
    }
}
