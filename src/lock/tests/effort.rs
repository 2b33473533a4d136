//! How much is looked at.

use super::table::Table;
use super::{Locks, demand, key, keys, owner, serve};
use crate::lock::cycle::{Candidate, LOOK, OVERRUN, PAGE, Progress, Search, Visible};
use crate::lock::serve::{Change, Sight, View, WaitEnd};
use crate::lock::{Ahead, Deadline, Limit, LockKey, Millis, Owner, Queue, Standing, Waiter, decide};

/// Locks that count how often they are looked at.
#[derive(Default)]
struct Counting {
    table: Table,
    looks: usize,
    /// What each look of a search costs beyond the usual, and what that has come to since it was asked for.
    extra: usize,
    owed: usize,
    granted: Vec<Owner>,
}

impl View for Counting {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight {
        self.looks += 1;
        View::look(&mut self.table, key, owner)
    }

    fn holders(&mut self, key: &LockKey) -> Vec<Owner> {
        View::holders(&mut self.table, key)
    }
}

impl Locks for Counting {
    fn settle(&mut self, waiter: Waiter<()>, end: WaitEnd) {
        self.granted.push(waiter.owner.clone());
        self.table.settle(waiter, end);
    }
}

/// Several clients wait for the same thousand locks, which are given back together: one gets them, and the next, who
/// now heads all thousand queues, is looked at once and not a thousand times.
#[test]
fn a_thousand_locks_given_back_together_are_looked_at_a_few_times_each() {
    const LOCKS: u32 = 1000;
    const NOW: Millis = 1;
    let numbers: Vec<u32> = (0..LOCKS).collect();
    let all = keys(&numbers);
    let mut locks = Counting { table: Table { now: NOW, ..Table::default() }, ..Counting::default() };
    let decision = decide(&Standing::FREE, &demand(1), Ahead::Nobody, NOW);
    locks.table.write(&all, &owner(0), &vec![decision; all.len()]);
    let mut queue = Queue::default();
    for waiter in 1..=3 {
        queue.join(owner(waiter), all.clone(), demand(1), NOW, None, ());
    }
    // One of them is still held at first: nobody is served, and that costs a single pass.
    for &number in numbers.iter().skip(1) {
        locks.table.release(&key(number), &owner(0));
    }
    let freed = |from: usize| numbers.iter().skip(from).map(|&number| (key(number), Change::Freed));
    serve(&mut queue, &mut locks, freed(1), NOW);
    assert!(locks.granted.is_empty());
    assert!(locks.looks <= all.len(), "{}", locks.looks);
    locks.looks = 0;
    locks.table.release(&key(0), &owner(0));
    serve(&mut queue, &mut locks, freed(0), NOW);
    assert_eq!(locks.granted, [owner(1)]);
    assert!(locks.looks <= all.len() + 1, "{}", locks.looks);
}

/// Locks and those who wait for them, for a search that is measured.
#[derive(Default)]
struct Scene {
    queue: Queue<()>,
    locks: Counting,
}

impl Visible for Counting {
    fn may_read(&mut self, key: &LockKey) -> bool {
        self.table.may_read(key)
    }

    fn look(&mut self, key: &LockKey, owner: &Owner) -> Option<Standing> {
        self.looks += 1;
        self.owed += self.extra;
        Visible::look(&mut self.table, key, owner)
    }

    fn holders(&mut self, key: &LockKey, after: Option<&(Deadline, Owner)>, most: usize) -> Vec<(Deadline, Owner)> {
        assert!(most <= PAGE);
        self.looks += 1;
        Visible::holders(&mut self.table, key, after, most)
    }

    fn extra_cost(&mut self) -> usize {
        std::mem::take(&mut self.owed)
    }
}

/// What a search cost.
#[derive(Debug)]
struct Cost {
    units: u64,
    looks: usize,
    is_cycle: bool,
}

impl Scene {
    fn holds(&mut self, who: u32, numbers: &[u32], limit: u32) {
        let decision = decide(&Standing::FREE, &demand(limit), Ahead::Nobody, 0);
        self.locks.table.write(&keys(numbers), &owner(who), &vec![decision; numbers.len()]);
    }

    fn waits(&mut self, who: u32, numbers: &[u32], limit: u32) {
        self.queue.join(owner(who), keys(numbers), demand(limit), 0, None, ());
    }

    /// Searches for a cycle in steps of a thousand units, none of which may cost more than that and one look.
    fn search(&mut self, who: u32, wanted: u32) -> Cost {
        const BUDGET: usize = 1000;
        let (owner, wanted) = (owner(who), keys(&[wanted]));
        let mut search = Search::new(Candidate { owner: &owner, keys: &wanted, limit: Limit::MUTEX });
        self.locks.looks = 0;
        let mut id = None;
        loop {
            let before = search.spent();
            let progress = search.advance(&self.queue, &mut self.locks, BUDGET);
            let step = search.spent() - before;
            let most = BUDGET + OVERRUN + 2 * self.locks.extra;
            assert!(step <= most as u64, "a step of {step} units");
            if progress != Progress::More {
                id.map(|id| self.queue.leave(id));
                let is_cycle = matches!(progress, Progress::Cycle(_));
                return Cost { units: search.spent(), looks: self.locks.looks, is_cycle };
            }
            id.get_or_insert_with(|| {
                let id = self.queue.join(owner.clone(), wanted.clone(), demand(1), 0, None, ());
                search.joined(id);
                id
            });
        }
    }
}

/// Ten times as much to search costs about ten times as much.
fn is_linear(scene: impl Fn(u32) -> Cost) {
    let (small, large) = (scene(1000), scene(10_000));
    println!("{small:?}, {large:?}");
    assert_eq!(small.is_cycle, large.is_cycle);
    assert!(large.units <= 11 * small.units, "{small:?}, {large:?}");
    assert!(large.units >= 5 * small.units, "it is not searched: {small:?}, {large:?}");
    assert!(large.looks <= 11 * small.looks, "{small:?}, {large:?}");
    assert!(large.units as usize >= large.looks * LOOK / 2, "looks are not counted: {large:?}");
}

#[test]
fn a_chain_of_waits_costs_what_it_is_long() {
    for is_cycle in [false, true] {
        is_linear(|many| {
            let mut scene = Scene::default();
            (0..=many).for_each(|number| scene.holds(number, &[number], 1));
            (0..many).for_each(|number| scene.waits(number, &[number + 1], 1));
            // Somebody waits for several keys: or else the first look would tell that the queue flows.
            scene.waits(many + 2, &[many, many + 1], 1);
            let last = if is_cycle { many } else { many + 1 };
            scene.holds(many + 1, &[many + 2], 1);
            scene.waits(many + 3, &[many + 2], 1);
            let cost = scene.search(last, 0);
            assert_eq!(cost.is_cycle, is_cycle);
            cost
        });
    }
}

/// Locks that are dear to look at, since others have written them, are counted as what they are.
#[test]
fn what_a_look_costs_beyond_the_usual_is_counted() {
    const EXTRA: usize = 5_000;
    let scene = |extra: usize| {
        let mut scene = Scene::default();
        scene.locks.extra = extra;
        (0..=100).for_each(|number| scene.holds(number, &[number], 1));
        (0..100).for_each(|number| scene.waits(number, &[number + 1], 1));
        scene.waits(102, &[100, 101], 1);
        scene.search(100, 0)
    };
    let (cheap, dear) = (scene(0), scene(EXTRA));
    assert!(cheap.is_cycle && dear.is_cycle);
    assert!(dear.units >= cheap.units + (100 * EXTRA) as u64, "{cheap:?}, {dear:?}");
}

/// Each of many owners shares two locks and waits for one of its own: one after the other can go on.
#[test]
fn many_who_share_two_locks_cost_what_they_are() {
    is_linear(|many| {
        const SHARED: [u32; 2] = [100_000, 100_001];
        let mut scene = Scene::default();
        let (free, last, me) = (many, many + 1, many + 2);
        for number in 0..many {
            scene.holds(number, &SHARED, 0);
            scene.holds(free, &[number], 1);
            scene.waits(number, &[number], 1);
        }
        scene.waits(last, &[0], 1);
        scene.waits(last, &[SHARED[1]], 1);
        scene.holds(me, &[200_000], 1);
        scene.waits(last, &[200_000], 1);
        scene.search(me, SHARED[0])
    });
}

/// A request for many keys is read once, however many wait for one of them.
#[test]
fn a_request_for_many_keys_costs_its_keys_once() {
    const HOT: u32 = 100_000;
    let scene = |wanted: u32, others: u32| {
        let mut scene = Scene::default();
        scene.holds(0, &[HOT], 1);
        let all: Vec<u32> = (0..wanted).chain([HOT]).collect();
        scene.waits(1, &all, 1);
        // Others wait for one of these keys each, behind it.
        (0..others).for_each(|number| scene.waits(10 + number, &[number % wanted], 1));
        // The candidate is waited for, or else that would be found out first.
        scene.holds(2, &[HOT + 1], 1);
        scene.waits(3, &[HOT + 1], 1);
        let cost = scene.search(2, HOT);
        assert!(!cost.is_cycle);
        cost
    };
    let (alone, beside, tenfold) = (scene(1000, 0), scene(1000, 1000), scene(1000, 10_000));
    println!("{alone:?}, {beside:?}, {tenfold:?}");
    assert!(alone.looks <= 3 * 1003 && beside.looks == tenfold.looks, "{alone:?}, {beside:?}, {tenfold:?}");
    assert!(beside.units - alone.units <= 1000 * 60, "{alone:?}, {beside:?}");
    assert!(tenfold.units - alone.units <= 10_000 * 60, "{alone:?}, {tenfold:?}");
    is_linear(|many| scene(many / 10, many));
}

#[test]
fn a_queue_of_a_hundred_thousand_costs_its_places_and_only_if_it_must_be_read() {
    let mut scene = Scene::default();
    scene.holds(0, &[0], 1);
    (1..=100_000).for_each(|number| scene.waits(number, &[0], 1));
    let simple = scene.search(200_000, 0);
    assert!(simple.units <= 4 * LOOK as u64, "{simple:?}");
    // Others wait for several keys: the newcomer holds nothing that anybody waits for.
    scene.waits(300_000, &[1, 2], 1);
    let free = scene.search(200_000, 0);
    assert!(free.units <= 20 * LOOK as u64, "{free:?}");
    // Somebody waits for the newcomer.
    scene.holds(200_000, &[3], 1);
    scene.waits(400_000, &[3], 1);
    let read = scene.search(200_000, 0);
    println!("{simple:?}, {free:?}, {read:?}");
    assert!(!read.is_cycle && read.units > 300_000 && read.units < 3_000_000, "{read:?}");
    // The last of all waits for the newcomer, too.
    scene.waits(100_000, &[3], 1);
    assert!(scene.search(200_000, 0).is_cycle);
}

/// Behind a deadlock of two others stands a crowd, each of them stuck behind all who are ahead: each part of the queue is
/// walked once.
#[test]
fn a_crowd_behind_a_deadlock_costs_what_it_is() {
    is_linear(|many| {
        let mut scene = Scene::default();
        let (one, other, me) = (many, many + 1, many + 2);
        scene.holds(one, &[0], 1);
        scene.holds(other, &[1], 1);
        scene.waits(one, &[1], 1);
        scene.waits(other, &[0], 1);
        (0..many).for_each(|number| scene.waits(number, &[0], 1));
        // The candidate is waited for, or else that would be found out first.
        scene.holds(me, &[2], 1);
        scene.waits(many + 3, &[2], 1);
        let cost = scene.search(me, 0);
        assert!(!cost.is_cycle, "it is not in the cycle itself");
        cost
    });
}

/// What a search has read is given back in parts.
#[test]
fn a_large_search_ends_in_small_parts() {
    const MANY: u32 = 100_000;
    let mut scene = Scene::default();
    scene.holds(0, &[0], 1);
    scene.holds(1, &[1], 1);
    (1..=MANY).for_each(|number| scene.waits(0, &[number], 1));
    let (owner, wanted) = (owner(1), keys(&[0]));
    let mut search = Search::new(Candidate { owner: &owner, keys: &wanted, limit: Limit::MUTEX });
    assert!(matches!(search.advance(&scene.queue, &mut scene.locks, usize::MAX), Progress::Cycle(_)));
    let parts = std::iter::from_fn(|| search.free_part().then_some(())).count();
    // A lock, a request and a place for each, a thousand of which are a part, and two indices of 256 parts.
    assert!(parts >= 3 * (MANY as usize / 1024) + 2 * 256, "{parts}");
}

/// A single owner that waits a hundred thousand times, for as many keys.
#[test]
fn an_owner_with_a_hundred_thousand_waits_is_searched_in_steps() {
    let mut scene = Scene::default();
    scene.holds(0, &[0], 1);
    scene.holds(1, &[1], 1);
    scene.holds(2, &[100_002], 1);
    (1..=100_000).for_each(|number| scene.waits(0, &[number], 1));
    scene.waits(3, &[100_002], 1);
    let cost = scene.search(1, 0);
    println!("{cost:?}");
    assert!(cost.is_cycle);
}
