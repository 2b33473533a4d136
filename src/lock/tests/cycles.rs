//! The search for cycles, against a plain search that lets everybody finish who can.

use super::plain::{Plain, PlainWaiter};
use super::watched::World;
use super::{cases, key, number_of, number_of_key, owner};
use crate::lock::cycle::{Because, Candidate, Link, Progress, Search, is_possible};
use crate::lock::{Limit, Queue};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

pub const OWNERS: u32 = 6;
pub const KEYS: u32 = 4;

/// A request of this owner, for these keys, under this limit.
pub fn ask(owner: u32, keys: &[u32], limit: u32) -> PlainWaiter {
    PlainWaiter { id: u64::MAX, owner, keys: keys.to_vec(), limit, to: None, lease: 1 << 40 }
}

/// Whether `waiter` would close a cycle if it waited.
pub fn closes_a_cycle(world: &mut World, waiter: &PlainWaiter) -> bool {
    found(world, waiter).is_some()
}

/// The cycle that `waiter` would close: who waits, for what, because of whom.
pub fn found(world: &mut World, waiter: &PlainWaiter) -> Option<Vec<Link>> {
    let (owner, keys) = (owner(waiter.owner), super::keys(&waiter.keys));
    let candidate = Candidate { owner: &owner, keys: &keys, limit: Limit::from_number(waiter.limit) };
    match Search::new(candidate).advance(&world.queue, &mut world.locks.table, usize::MAX) {
        Progress::Cycle(links) => Some(links),
        Progress::None => None,
        Progress::More => panic!("the budget has no end"),
    }
}

pub fn with(plain: &Plain, waiter: &PlainWaiter) -> Plain {
    let mut plain = plain.clone();
    plain.waiters.push(waiter.clone());
    plain
}

/// Whether `waiter` would wait for ever in a cycle: it is stuck, and so is everybody on some way from it back to it.
fn plainly_in_a_cycle(plain: &Plain, waiter: &PlainWaiter, seed: u64) -> bool {
    plainly_waits_in_a_cycle(&with(plain, waiter), waiter, seed)
}

/// The same of one that waits already.
pub fn plainly_waits_in_a_cycle(all: &Plain, waiter: &PlainWaiter, seed: u64) -> bool {
    let mut order = Order(seed);
    let end = all.stuck(|of| order.choose(of));
    let is_stuck = |owner: u32| end.waiters.iter().any(|it| it.owner == owner);
    let mut seen = BTreeSet::new();
    let mut todo: Vec<u64> = end.place(waiter.id).map(|_| waiter.id).into_iter().collect();
    while let Some(id) = todo.pop() {
        for next in waits_for(all, id).into_iter().filter(|&next| is_stuck(next)) {
            if next == waiter.owner {
                return true;
            }
            if seen.insert(next) {
                todo.extend(end.waiters.iter().filter(|it| it.owner == next).map(|it| it.id));
            }
        }
    }
    false
}

/// Some order in which owners finish.
struct Order(u64);

impl Order {
    fn choose(&mut self, of: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % of
    }
}

/// Whom this request waits for: who holds a key of it, or waits for one ahead.
fn waits_for(plain: &Plain, id: u64) -> Vec<u32> {
    let Some(place) = plain.place(id) else { return Vec::new() };
    let it = &plain.waiters[place];
    let mut others = Vec::new();
    for &key in it.keys.iter().filter(|&&key| !plain.holds(key, it.owner)) {
        others.extend(plain.lock(key).holders.iter().map(|hold| hold.owner));
        others.extend(plain.waiters[..place].iter().filter(|it| it.keys.contains(&key)).map(|it| it.owner));
    }
    others.retain(|&other| other != it.owner);
    others
}

/// Each link is true, each leads to the next, the last to the first, and nobody is in it twice.
fn check_links(plain: &Plain, waiter: &PlainWaiter, links: &[Link]) -> Result<(), TestCaseError> {
    check_links_of(&with(plain, waiter), waiter.owner, links)
}

/// The same of one that waits already.
pub fn check_links_of(all: &Plain, owner: u32, links: &[Link]) -> Result<(), TestCaseError> {
    prop_assert_eq!(links.first().map(|link| number_of(&link.owner)), Some(owner));
    let owners: BTreeSet<u32> = links.iter().map(|link| number_of(&link.owner)).collect();
    prop_assert_eq!(owners.len(), links.len());
    for (link, next) in links.iter().zip(links.iter().cycle().skip(1)) {
        let (one, next, key) = (number_of(&link.owner), number_of(&next.owner), number_of_key(&link.key));
        let lane: Vec<u32> = all.waiters.iter().filter(|it| it.keys.contains(&key)).map(|it| it.owner).collect();
        let last = lane.iter().rposition(|&it| it == one);
        let ahead = last.is_some_and(|place| lane[..place].contains(&next));
        prop_assert!(last.is_some() && one != next && !all.holds(key, one), "{:?} is no wait", link);
        let true_reason = match link.because {
            Because::Holds => all.holds(key, next),
            Because::Ahead => ahead,
        };
        prop_assert!(true_reason, "{:?}: {} is no reason", link, next);
    }
    Ok(())
}

#[derive(Clone, Debug)]
pub enum Step {
    Ask(PlainWaiter),
    /// An owner that waits for nothing gives everything back.
    Finish(u32),
    /// A request gives up, unless its owner has another one for the same key.
    Leave(usize),
}

/// Which limits meet on one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limits {
    /// Each key has one.
    OfTheKey,
    /// Each owner reads a key, or writes it.
    ReadersAndWriters,
    /// Each owner has its own.
    Mixed,
}

pub fn limits() -> impl Strategy<Value = Limits> {
    prop_oneof![Just(Limits::OfTheKey), Just(Limits::ReadersAndWriters)]
}

/// Requests under limits that fit: several keys are mutexes, as `MACQUIRE` has them.
pub fn asking(limits: Limits, shape: u64) -> impl Strategy<Value = PlainWaiter> {
    let numbers: Vec<u32> = (0..KEYS).collect();
    let keys = prop_oneof![
        4 => (0..KEYS).prop_map(|key| vec![key]),
        1 => prop::sample::subsequence(numbers, 2..=3).prop_shuffle(),
    ];
    (0..OWNERS, keys).prop_map(move |(owner, mut keys)| {
        let limit = |key: u32| match limits {
            Limits::OfTheKey => [1, 1, 2, 0, 1, 3][(shape >> (4 * key)) as usize % 6],
            Limits::ReadersAndWriters => u32::from(shape >> ((owner * KEYS + key) % 64) & 1 == 1),
            Limits::Mixed => [1, 2, 3, 0][(shape.rotate_right(2 * (owner * KEYS + key)) & 3) as usize],
        };
        let first = limit(keys[0]);
        if first != 1 {
            keys.truncate(1);
        }
        keys.retain(|&key| limit(key) == first);
        ask(owner, &keys, first)
    })
}

pub fn steps(limits: Limits, shape: u64) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        14 => asking(limits, shape).prop_map(Step::Ask),
        1 => (0..OWNERS).prop_map(Step::Finish),
        1 => (0..6_usize).prop_map(Step::Leave),
    ];
    prop::collection::vec(step, 1..30)
}

fn graph(limits: impl Strategy<Value = Limits>) -> impl Strategy<Value = (Vec<Step>, PlainWaiter)> {
    (limits, any::<u64>()).prop_flat_map(|(limits, shape)| (steps(limits, shape), asking(limits, shape)))
}

/// Whether requests that close a cycle are refused, as they are by default.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Detection {
    On,
    Off,
}

pub fn take(world: &mut World, step: Step, detection: Detection) {
    match step {
        Step::Ask(waiter) => {
            let waits = world.locks.plain.ending_at_once(&waiter).is_none();
            if !(waits && detection == Detection::On && found(world, &waiter).is_some()) {
                world.arrive(waiter, None);
            }
        }
        Step::Finish(who) if !world.queue.waits(&owner(who)) => {
            let held: Vec<u32> = (0..KEYS).filter(|&number| world.locks.plain.holds(number, who)).collect();
            for &number in &held {
                world.locks.plain.release(number, who);
                world.locks.table.release(&key(number), &owner(who));
            }
            world.serve(held.into_iter().map(|number| (number, crate::lock::serve::Change::Freed)).collect());
        }
        Step::Finish(_) => {}
        Step::Leave(place) => {
            let waiters = &world.locks.plain.waiters;
            let Some(gone) = waiters.get(place) else { return };
            let others = waiters.iter().filter(|it| it.owner == gone.owner && it.id != gone.id);
            if !others.flat_map(|it| &it.keys).any(|key| gone.keys.contains(key)) {
                world.leave(gone.id);
            }
        }
    }
}

pub fn built(steps: Vec<Step>, detection: Detection) -> World {
    let mut world = World::default();
    for step in steps {
        take(&mut world, step, detection);
    }
    world
}

#[test]
fn the_answer_is_that_of_a_plain_search() {
    let (mut yes, mut no) = (0, 0);
    let mut runner = proptest::test_runner::TestRunner::new(cases(6000));
    let counts = std::cell::RefCell::new((&mut yes, &mut no));
    let result = runner.run(&graph(limits()), |(steps, candidate)| {
        let mut world = built(steps, Detection::Off);
        if world.locks.plain.ending_at_once(&candidate).is_some() {
            return Ok(());
        }
        let links = found(&mut world, &candidate);
        let right = plainly_in_a_cycle(&world.locks.plain, &candidate, 1);
        let mut counts = counts.borrow_mut();
        *(if right { &mut *counts.0 } else { &mut *counts.1 }) += 1;
        prop_assert_eq!(links.is_some(), right, "{:?} in {:?}", links, world.locks.plain);
        links.map_or(Ok(()), |links| check_links(&world.locks.plain, &candidate, &links))
    });
    result.unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{yes} cycles, {no} times none");
    assert!(yes > 500 && no > 500, "{yes} cycles, {no} times none");
}

#[test]
fn with_limits_that_meet_anyhow_there_is_no_false_alarm() {
    let mut runner = proptest::test_runner::TestRunner::new(cases(3000));
    let result = runner.run(&graph(Just(Limits::Mixed)), |(steps, candidate)| {
        let mut world = built(steps, Detection::Off);
        if world.locks.plain.ending_at_once(&candidate).is_some() {
            return Ok(());
        }
        let Some(links) = found(&mut world, &candidate) else { return Ok(()) };
        for seed in 0..10 {
            prop_assert!(plainly_in_a_cycle(&world.locks.plain, &candidate, seed), "{:?} {:?}", links, world.locks);
        }
        check_links(&world.locks.plain, &candidate, &links)
    });
    result.unwrap_or_else(|wrong| panic!("{wrong}"));
}

#[test]
fn whoever_may_wait_is_never_stuck() {
    let mut runner = proptest::test_runner::TestRunner::new(cases(2000));
    let result = runner.run(&graph(limits()), |(steps, _)| {
        let mut world = World::default();
        for step in steps {
            take(&mut world, step, Detection::On);
            let stuck = world.locks.plain.stuck(|_| 0);
            prop_assert!(stuck.waiters.is_empty(), "{:?} are stuck in {:?}", stuck.waiters, world.locks.plain);
        }
        Ok(())
    });
    result.unwrap_or_else(|wrong| panic!("{wrong}"));
}

/// A world where these requests came in this order; none of them is refused.
fn after(asks: &[(u32, &[u32], u32)]) -> World {
    built(asks.iter().map(|&(owner, keys, limit)| Step::Ask(ask(owner, keys, limit))).collect(), Detection::Off)
}

/// Who is in the cycle that a request would close, and for which key each of them waits.
fn cycle_of(world: &mut World, owner: u32, keys: &[u32], limit: u32) -> Option<Vec<(u32, u32, Because)>> {
    let candidate = ask(owner, keys, limit);
    assert_eq!(world.locks.plain.ending_at_once(&candidate), None, "it has to wait");
    let links = found(world, &candidate)?;
    check_links(&world.locks.plain, &candidate, &links).unwrap_or_else(|wrong| panic!("{wrong}"));
    Some(links.iter().map(|it| (number_of(&it.owner), number_of_key(&it.key), it.because)).collect())
}

#[test]
fn cycles_of_2_3_and_20() {
    for length in [2, 3, 20] {
        let mut world = World::default();
        for number in 0..length {
            world.arrive(ask(number, &[number], 1), None);
        }
        for number in 1..length {
            assert_eq!(cycle_of(&mut world, number, &[(number + 1) % length], 1), None);
            world.arrive(ask(number, &[(number + 1) % length], 1), None);
        }
        let right = (0..length).map(|number| (number, (number + 1) % length, Because::Holds)).collect();
        assert_eq!(cycle_of(&mut world, 0, &[1], 1), Some(right));
    }
}

#[test]
fn a_cycle_through_a_queue() {
    // 0 holds a. 1 waits for b, behind it would stand 0; 1 waits for a in another connection.
    let mut world = after(&[(2, &[1], 1), (0, &[0], 1), (1, &[1], 1), (1, &[0], 1)]);
    assert_eq!(cycle_of(&mut world, 0, &[1], 1), Some(vec![(0, 1, Because::Ahead), (1, 0, Because::Holds)]));
}

#[test]
fn a_place_in_a_semaphore_that_will_be_free_breaks_the_cycle() {
    let held = [(0, &[0][..], 2), (1, &[0], 2), (2, &[1], 1)];
    let mut one_free = after(&[held[0], held[1], held[2], (0, &[1], 1)]);
    assert_eq!(cycle_of(&mut one_free, 2, &[0], 2), None, "1 will finish");
    let mut all_stuck = after(&[held[0], held[1], held[2], (0, &[1], 1), (1, &[1], 1)]);
    let cycle = cycle_of(&mut all_stuck, 2, &[0], 2).expect("a cycle");
    let through = |holder| vec![(2, 0, Because::Holds), (holder, 1, Because::Holds)];
    assert!(cycle == through(0) || cycle == through(1), "{cycle:?}");
}

#[test]
fn a_writer_behind_readers_waits_for_each_of_them() {
    let mut world = after(&[(0, &[0], 0), (1, &[0], 0), (2, &[1], 1), (1, &[1], 1)]);
    assert_eq!(cycle_of(&mut world, 2, &[0], 1), Some(vec![(2, 0, Because::Holds), (1, 1, Because::Holds)]));
    assert_eq!(cycle_of(&mut after(&[(0, &[0], 0), (1, &[0], 0), (2, &[1], 1)]), 2, &[0], 1), None);
}

#[test]
fn a_reader_behind_a_writer_waits_for_it() {
    let mut world = after(&[(0, &[0], 0), (2, &[1], 1), (1, &[0], 1), (1, &[1], 1)]);
    assert_eq!(cycle_of(&mut world, 2, &[0], 0), Some(vec![(2, 0, Because::Ahead), (1, 1, Because::Holds)]));
}

#[test]
fn requests_for_several_keys() {
    let mut world = after(&[(0, &[0], 1), (1, &[1], 1), (0, &[2, 1], 1)]);
    assert_eq!(cycle_of(&mut world, 1, &[3, 0], 1), Some(vec![(1, 0, Because::Holds), (0, 1, Because::Holds)]));
    assert_eq!(cycle_of(&mut world, 1, &[3, 2], 1), Some(vec![(1, 2, Because::Ahead), (0, 1, Because::Holds)]));
    let mut in_order = after(&[(0, &[0, 1], 1), (1, &[1, 0], 1)]);
    assert_eq!(cycle_of(&mut in_order, 2, &[0, 1], 1), None);
}

#[test]
fn a_cycle_of_others_is_not_reported() {
    let mut world = after(&[(0, &[0], 1), (1, &[1], 1), (0, &[1], 1), (1, &[0], 1), (2, &[2], 1)]);
    assert!(!world.locks.plain.stuck(|_| 0).waiters.is_empty());
    assert_eq!(cycle_of(&mut world, 2, &[0], 1), None);
    assert_eq!(cycle_of(&mut world, 2, &[3, 1], 1), None);
}

#[test]
fn an_owner_who_waits_twice_enters_again_once_it_holds() {
    // 0 gets the key before 1 does, and with it its second request: nobody is stuck.
    let mut world = after(&[(9, &[0], 1), (0, &[0], 1), (1, &[0], 1), (7, &[2], 1), (8, &[2, 3], 1)]);
    assert_eq!(cycle_of(&mut world, 0, &[0], 1), None);
}

#[test]
fn an_owner_who_waits_twice_may_block_itself() {
    // 0 will hold key 0 before 1 does, and keep it while it waits for key 1, which 1 holds.
    let mut world = after(&[(9, &[0], 1), (1, &[1], 1), (0, &[0], 1), (1, &[0], 1)]);
    assert!(cycle_of(&mut world, 0, &[0, 1], 1).is_some());
}

/// A label, a number of waiters, what happened before, and the request that is measured.
type Case = (&'static str, Vec<(u32, Vec<u32>, u32)>, (u32, u32));

fn measured(many: u32) -> Vec<Case> {
    let line = |key: u32| (1..=many).map(move |it| (it, vec![key], 1));
    let first = many + 1;
    let held = [(0, vec![0], 1)];
    let own = (1..=many).map(|it| (it, vec![it], 1));
    vec![
        ("one queue, its holder is free", held.iter().cloned().chain(line(0)).collect(), (first, 0)),
        (
            "the same, while others wait for several keys",
            held.iter().cloned().chain([(first, vec![1], 1), (first + 1, vec![1, 2], 1)]).chain(line(0)).collect(),
            (first + 2, 0),
        ),
        (
            "the same, and the newcomer holds what somebody waits for",
            held.iter().cloned().chain([(first, vec![1], 1), (first + 1, vec![1, 2], 1)]).chain(line(0)).collect(),
            (first, 0),
        ),
        (
            "the holder waits for the newcomer",
            held.iter().cloned().chain([(first, vec![1], 1), (0, vec![1], 1)]).chain(line(0)).collect(),
            (first, 0),
        ),
        (
            "the last in the queue waits for the newcomer",
            held.iter().cloned().chain([(first, vec![1], 1)]).chain(line(0)).chain([(many, vec![1], 1)]).collect(),
            (first, 0),
        ),
        (
            "each holds a lock and waits for that of the next",
            own.clone().chain((1..many).map(|it| (it, vec![it + 1], 1))).collect(),
            (many, 1),
        ),
        (
            "the same, but the last of them is free",
            own.chain([(first, vec![first], 1)]).chain((1..many).map(|it| (it, vec![it + 1], 1))).collect(),
            (first, 1),
        ),
    ]
}

/// Never judged, only told.
#[test]
fn what_a_search_costs() {
    for many in [100, 10_000] {
        for (label, asks, (who, wanted)) in measured(many) {
            let mut queue = crate::lock::Queue::<()>::default();
            let mut table = super::table::Table::default();
            for (number, keys, limit) in asks {
                let (owner, keys, demand) = (owner(number), super::keys(&keys), super::demand(limit));
                let free = |key| !table.stored.contains_key(key);
                if keys.iter().all(free) {
                    let granted =
                        crate::lock::decide(&crate::lock::Standing::FREE, &demand, crate::lock::Ahead::Nobody, 0);
                    table.write(&keys, &owner, &vec![granted; keys.len()]);
                } else {
                    queue.join(owner, keys, demand, 0, None, ());
                }
            }
            let (owner, keys) = (owner(who), [key(wanted)]);
            let candidate = Candidate { owner: &owner, keys: &keys, limit: Limit::MUTEX };
            let mut search = Search::new(candidate);
            let (mut total, mut longest, mut progress) = (Duration::ZERO, Duration::ZERO, Progress::More);
            while progress == Progress::More {
                let begin = Instant::now();
                progress = search.advance(&queue, &mut table, 10_000);
                let step = begin.elapsed();
                (total, longest) = (total + step, longest.max(step));
            }
            let links = if let Progress::Cycle(links) = progress { links.len() } else { 0 };
            let units = search.spent();
            println!("{many} waiters, {label}: {total:?}, {units} units, a step {longest:?}, cycle of {links}");
            let begin = Instant::now();
            drop(search);
            println!("    to forget it: {:?}", begin.elapsed());
        }
    }
}

/// Most requests need no search: nobody waits but for the one key that they want.
#[test]
fn where_nobody_waits_for_anything_else_nothing_is_to_be_searched() {
    let possible = |queue: &Queue<()>, who: u32, wanted: &[u32]| {
        let (owner, keys) = (owner(who), super::keys(wanted));
        is_possible(queue, Candidate { owner: &owner, keys: &keys, limit: Limit::MUTEX })
    };
    let mut queue = Queue::default();
    assert!(!possible(&queue, 0, &[0]) && !possible(&queue, 0, &[0, 1]));
    for who in [1, 2] {
        queue.join(owner(who), super::keys(&[0]), super::demand(1), 0, None, ());
        assert!(!possible(&queue, 0, &[0]));
    }
    assert!(possible(&queue, 0, &[1]), "they wait for another key");
    assert!(possible(&queue, 0, &[0, 1]), "it may hold one of several keys that it asks for");
    assert!(possible(&queue, 1, &[0]), "it waits already");
    queue.join(owner(3), super::keys(&[1]), super::demand(1), 0, None, ());
    assert!(possible(&queue, 0, &[0]));
}
