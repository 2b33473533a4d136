//! Random histories of the queue, each step judged by the plain model: order is kept, nobody is served twice, nobody
//! who left is served, nobody who could be served is left waiting.

use super::broken::Fault;
use super::plain::{Ending, PlainHold, PlainLock, PlainWaiter};
use super::watched::World;
use super::{ELSEWHERE, cases, key, owner, repeatable};
use crate::lock::serve::Change;
use crate::lock::{Millis, WaiterId};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use std::collections::BTreeMap;

const OWNERS: u32 = 5;
const KEYS: [u32; 3] = [0, 1, ELSEWHERE];

/// Something happens.
#[derive(Clone, Debug)]
enum Step {
    /// A request comes, that waits for at most so long, and has waited for so long elsewhere.
    Arrive { request: PlainWaiter, patience: Option<Millis>, waited: Millis },
    /// Of those who wait, the one at this place (as far as there are so many) loses its connection.
    Leave(usize),
    /// Time goes by: leases and waits end.
    Pass(Millis, Purge),
    /// A holder gives all its holds back.
    Release { key: u32, owner: u32 },
    /// The key is deleted, or the lock forced.
    Delete(u32),
    /// Another client writes the key.
    Grab { key: u32, owner: u32, limit: u32, lease: Option<Millis> },
    /// Something that is no lock is written over the key.
    Overwrite(u32),
}

/// Whether holders past their deadline are taken out: the server does when it writes the key the next time.
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

/// How often what happened in the histories: that they are worth something.
#[derive(Debug, Default)]
struct Seen {
    waits: usize,
    overtook: usize,
    served: usize,
    timeouts: usize,
    ends: BTreeMap<&'static str, usize>,
}

fn take(world: &mut World, waits_until: &mut BTreeMap<WaiterId, Millis>, step: Step, seen: &mut Seen) {
    let now = world.locks.table.now;
    match step {
        Step::Arrive { request, .. } if world.locks.plain.awaits(request.owner, &request.keys) => {}
        Step::Arrive { mut request, patience, waited } => {
            request.id.arrived = (1_000 + now).saturating_sub(waited);
            let id = world.queue.next_id(request.id.arrived);
            let until = patience.map(|patience| now + patience);
            match world.arrive(request, until) {
                None => {
                    seen.waits += 1;
                    seen.overtook += usize::from(world.locks.plain.waiters.last().is_some_and(|last| last.id > id));
                    waits_until.extend(until.map(|until| (id, until)));
                }
                Some(Ending::Granted) => *seen.ends.entry("granted at once").or_default() += 1,
                Some(_) => *seen.ends.entry("refused at once").or_default() += 1,
            }
        }
        Step::Leave(place) => {
            if let Some(id) = world.locks.plain.waiters.get(place).map(|waiter| waiter.id) {
                world.leave(id);
            }
        }
        Step::Pass(time, purge) => pass(world, waits_until, now + time, purge, seen),
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

fn pass(world: &mut World, waits_until: &BTreeMap<WaiterId, Millis>, now: Millis, purge: Purge, seen: &mut Seen) {
    world.locks.table.now = now;
    let expired = world.locks.plain.expire(now);
    if matches!(purge, Purge::Now) {
        world.locks.table.purge();
    }
    world.serve(expired.into_iter().map(|key| (key, Change::Freed)).collect());
    for (&id, _) in waits_until.iter().filter(|(_, until)| **until <= now) {
        seen.timeouts += usize::from(world.locks.plain.place(id).is_some());
        world.leave(id);
    }
}

fn run(steps: Vec<Step>, fault: Option<Fault>, seen: &mut Seen) -> Result<(), TestCaseError> {
    let mut world = World { fault, ..World::default() };
    let mut waits_until = BTreeMap::new();
    let mut token = 0;
    for (at, step) in steps.into_iter().enumerate() {
        let before = world.locks.plain.waiters.len();
        take(&mut world, &mut waits_until, step.clone(), seen);
        seen.served += before.saturating_sub(world.locks.plain.waiters.len());
        world.check().map_err(|wrong| TestCaseError::fail(format!("step {at}, {step:?}: {wrong}")))?;
        tokens_grow(&world, &mut token)?;
    }
    Ok(())
}

/// What a step wrote has newer tokens than all before it.
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
    let seen = std::cell::RefCell::new(Seen::default());
    let result = runner.run(&history(), |steps| run(steps, None, &mut seen.borrow_mut()));
    println!("{:?}", seen.borrow());
    result.unwrap_or_else(|wrong| panic!("{wrong}"));
    let seen = seen.into_inner();
    assert!(seen.overtook > 500, "{seen:?}");
    assert!(seen.waits > 1000 && seen.served > 500 && seen.timeouts > 50, "{seen:?}");
}

#[test]
fn plain_serving_satisfies_the_rule() {
    let result = repeatable(300).run(&history(), |steps| run(steps, Some(Fault::Nothing), &mut Seen::default()));
    result.unwrap_or_else(|wrong| panic!("{wrong}"));
}

#[test]
fn injected_faults_are_found() {
    for fault in Fault::ALL {
        let result = repeatable(1000).run(&history(), |steps| run(steps, Some(fault), &mut Seen::default()));
        let wrong = result.err().unwrap_or_else(|| panic!("{fault:?} is not caught"));
        println!("{fault:?}: {}", wrong.to_string().lines().next().unwrap_or_default());
    }
}
