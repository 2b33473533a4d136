//! The search for cycles in many small steps, while the queue and the locks change between them.

use super::cycles::{
    Detection, KEYS, Limits, OWNERS, Step, ask, asking, built, check_links_of, limits, plainly_waits_in_a_cycle, steps,
    take,
};
use super::plain::{Plain, PlainHold, PlainLock, PlainWaiter};
use super::table::Table;
use super::watched::World;
use super::{ELSEWHERE, cases, demand, key, keys, number_of_key, owner, repeatable};
use crate::lock::cycle::{Candidate, Link, PAGE, Progress, Search, Visible};
use crate::lock::serve::Change;
use crate::lock::{Ahead, Deadline, Limit, LockKey, Owner, Queue, Standing, WaiterId, decide};
use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestError, TestRunner};
use std::collections::{BTreeSet, HashMap};

/// What is wrong with the way the search is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Nothing.
    Nothing,
    /// The search is not told that a hold was lost.
    LossesAreNotNoted,
    /// A lock looks as it did when it was looked at first.
    LooksOnce,
    /// The search is not told that the candidate waits.
    DoesNotTellOfTheWait,
    /// Who holds a lock is told of the first holder only.
    TellsOneHolder,
    /// The end of the search is not waited for.
    GivesUp,
    /// Keys may be read that may not.
    ReadsAll,
}

/// The locks as the search sees them, with a fault.
struct Faulty<'a> {
    table: &'a mut Table,
    fault: Fault,
    seen: &'a mut HashMap<(LockKey, Owner), Option<Standing>>,
}

impl Visible for Faulty<'_> {
    fn may_read(&mut self, key: &LockKey) -> bool {
        self.fault == Fault::ReadsAll || self.table.may_read(key)
    }

    fn look(&mut self, key: &LockKey, owner: &Owner) -> Option<Standing> {
        let now = Visible::look(self.table, key, owner);
        let first = *self.seen.entry((key.clone(), owner.clone())).or_insert(now);
        if self.fault == Fault::LooksOnce { first } else { now }
    }

    fn holders(&mut self, key: &LockKey, after: Option<&(Deadline, Owner)>, most: usize) -> Vec<(Deadline, Owner)> {
        let mut holders = Visible::holders(self.table, key, after, most);
        if self.fault == Fault::TellsOneHolder {
            holders.truncate(1);
        }
        holders
    }
}

/// A search under way.
struct Searching {
    search: Search,
    fault: Fault,
    seen: HashMap<(LockKey, Owner), Option<Standing>>,
    advances: usize,
}

impl Searching {
    fn new(waiter: &PlainWaiter, fault: Fault) -> Self {
        let (owner, keys) = (owner(waiter.owner), keys(&waiter.keys));
        let candidate = Candidate { owner: &owner, keys: &keys, limit: Limit::from_number(waiter.limit) };
        Self { search: Search::new(candidate), fault, seen: HashMap::new(), advances: 0 }
    }

    fn advance(&mut self, world: &mut World, budget: usize) -> Progress {
        self.advances += 1;
        let mut locks = Faulty { table: &mut world.locks.table, fault: self.fault, seen: &mut self.seen };
        self.search.advance(&world.queue, &mut locks, budget)
    }

    fn joined(&mut self, id: u64) {
        if self.fault != Fault::DoesNotTellOfTheWait {
            self.search.joined(WaiterId(id));
        }
    }
}

/// What happens between two steps of a search.
#[derive(Clone, Debug)]
enum Event {
    /// What clients do who know what they do.
    Step(Step),
    /// Somebody gives up waiting.
    Leave(usize),
    /// A hold is lost: forced, or expired.
    Lose { key: u32, owner: u32 },
    /// Another client writes the key.
    Grab { key: u32, owner: u32, limit: u32 },
    /// The key becomes something that is no lock.
    Overwrite(u32),
    /// A lease gets longer.
    Renew { key: u32, owner: u32 },
}

fn event(limits: Limits, shape: u64) -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => asking(limits, shape).prop_map(|waiter| Event::Step(Step::Ask(waiter))),
        4 => (0..OWNERS).prop_map(|owner| Event::Step(Step::Finish(owner))),
        4 => (0..8_usize).prop_map(Event::Leave),
        4 => (0..KEYS, 0..OWNERS).prop_map(|(key, owner)| Event::Lose { key, owner }),
        1 => (0..KEYS, 0..OWNERS, 0..3_u32).prop_map(|(key, owner, limit)| Event::Grab { key, owner, limit }),
        1 => (0..KEYS).prop_map(Event::Overwrite),
        2 => (0..KEYS, 0..OWNERS).prop_map(|(key, owner)| Event::Renew { key, owner }),
    ]
}

/// Whether nobody who is stuck has anything to do with an event.
fn is_unrelated(world: &World, event: &Event) -> bool {
    let plain = &world.locks.plain;
    let stuck: BTreeSet<u32> = plain.stuck(|_| 0).waiters.iter().map(|waiter| waiter.owner).collect();
    match event {
        Event::Step(Step::Leave(place)) | Event::Leave(place) => {
            plain.waiters.get(*place).is_some_and(|waiter| !stuck.contains(&waiter.owner))
        }
        Event::Step(_) | Event::Renew { .. } => true,
        Event::Lose { owner, .. } => !stuck.contains(owner),
        Event::Grab { .. } | Event::Overwrite(_) => false,
    }
}

fn happen(world: &mut World, event: Event, fault: Fault) {
    match event {
        Event::Step(step) => take(world, step, Detection::Off),
        Event::Leave(place) => {
            if let Some(id) = world.locks.plain.waiters.get(place).map(|waiter| waiter.id) {
                world.leave(id);
            }
        }
        Event::Lose { key: number, owner: who } => {
            world.locks.plain.release(number, who);
            world.locks.table.release(&key(number), &owner(who));
            if fault != Fault::LossesAreNotNoted {
                world.serve(vec![(number, Change::Freed)]);
            }
        }
        Event::Grab { key, owner, limit } => {
            let hold = PlainHold { owner, holds: 1, until: None };
            world.store(key, PlainLock { not_a_lock: false, holders: vec![hold], limit });
            world.serve(vec![(key, Change::Foreign)]);
        }
        Event::Overwrite(key) => {
            world.store(key, PlainLock { not_a_lock: true, ..PlainLock::default() });
            world.serve(vec![(key, Change::Foreign)]);
        }
        Event::Renew { key: number, owner: who } => {
            if let Some(super::table::Stored::Lock(holders)) = world.locks.table.stored.get_mut(&key(number))
                && let Some(hold) = holders.get(&owner(who)).copied()
                && let Deadline::At(at) = hold.deadline
            {
                holders.insert(owner(who), crate::lock::Hold { deadline: Deadline::At(at + 1), ..hold });
            }
        }
    }
}

/// What there is before the search, the request, what happens meanwhile, and how much is searched in between.
type Case = (Vec<Step>, PlainWaiter, Vec<Event>, usize);

fn case() -> impl Strategy<Value = Case> {
    let budget = prop_oneof![Just(1_usize), Just(2), Just(3), 4..60_usize, 60..400_usize];
    (limits(), any::<u64>(), budget).prop_flat_map(|(limits, shape, budget)| {
        let events = prop::collection::vec(event(limits, shape), 0..40);
        (steps(limits, shape), asking(limits, shape), events, Just(budget))
    })
}

/// What came of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The request had not to wait at all.
    NoWait,
    /// It closed a cycle, known before it waited.
    AtOnce,
    /// It closed a cycle, found while it waited, after so many steps.
    Later(usize),
    /// It closes none.
    None,
}

fn judge(all: &Plain, waiter: &PlainWaiter, links: &[Link]) -> Result<(), TestCaseError> {
    prop_assert!(all.place(waiter.id).is_some(), "{waiter:?} no longer waits");
    prop_assert!(plainly_waits_in_a_cycle(all, waiter, 1), "false alarm: {links:?} in {all:?}");
    check_links_of(all, waiter.owner, links)
}

/// Searches to the end. Whatever happens, a cycle that is told is there at that moment. If only that happens which has
/// nothing to do with a deadlock, a deadlock is found.
fn run((steps, candidate, events, budget): Case, only_unrelated: bool, fault: Fault) -> Result<Outcome, TestCaseError> {
    let mut world = built(steps, Detection::Off);
    if world.locks.plain.ending_at_once(&candidate).is_some() {
        return Ok(Outcome::NoWait);
    }
    let waiter = PlainWaiter { id: world.queue.next_id().0, ..candidate.clone() };
    let mut searching = Searching::new(&candidate, fault);
    let mut progress = searching.advance(&mut world, budget);
    world.arrive(candidate, None);
    let is_deadlock = plainly_waits_in_a_cycle(&world.locks.plain, &waiter, 2);
    if let Progress::Cycle(links) = &progress {
        judge(&world.locks.plain, &waiter, links)?;
        return Ok(Outcome::AtOnce);
    }
    searching.joined(waiter.id);
    let mut events = events.into_iter().cycle().take(2000);
    while progress == Progress::More {
        if let Some(event) = events.next().filter(|event| !only_unrelated || is_unrelated(&world, event)) {
            happen(&mut world, event, fault);
        }
        progress = if fault == Fault::GivesUp { Progress::None } else { searching.advance(&mut world, budget) };
        prop_assert!(searching.advances < 20_000, "no end");
    }
    if let Progress::Cycle(links) = &progress {
        judge(&world.locks.plain, &waiter, links)?;
        return Ok(Outcome::Later(searching.advances));
    }
    // Also at the end, and without those who came later: a deadlock stays, but the candidate may leave the cycle and be
    // stuck behind one of others, when somebody comes to hold what it waited for behind the candidate.
    let mut end = world.locks.plain;
    end.waiters.retain(|it| it.id <= waiter.id);
    let stays = is_deadlock && plainly_waits_in_a_cycle(&end, &waiter, 3);
    prop_assert!(!(stays && only_unrelated), "missed: {waiter:?} in {end:?}");
    Ok(Outcome::None)
}

/// Runs such cases; how many cycles were found at once, how many later, how many times there was none.
fn count(mut runner: TestRunner, only_unrelated: bool, fault: Fault) -> Result<[usize; 3], Box<TestError<Case>>> {
    let counts = std::cell::Cell::new([0; 3]);
    runner.run(&case(), |case| {
        let [at_once, later, none] = counts.get();
        counts.set(match run(case, only_unrelated, fault)? {
            Outcome::NoWait => [at_once, later, none],
            Outcome::AtOnce => [at_once + 1, later, none],
            Outcome::Later(_) => [at_once, later + 1, none],
            Outcome::None => [at_once, later, none + 1],
        });
        Ok(())
    })?;
    Ok(counts.get())
}

#[test]
fn a_cycle_that_is_told_is_there_whatever_happened_meanwhile() {
    let runner = TestRunner::new(cases(4000));
    let counts = count(runner, false, Fault::Nothing).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("at once, later, none: {counts:?}");
    assert!(counts.iter().skip(1).all(|&count| count > 100), "{counts:?}");
}

#[test]
fn a_deadlock_that_stays_is_found_whatever_else_happens() {
    let runner = TestRunner::new(cases(4000));
    let counts = count(runner, true, Fault::Nothing).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("at once, later, none: {counts:?}");
    assert!(counts.iter().skip(1).all(|&count| count > 100), "{counts:?}");
}

#[test]
fn each_fault_is_caught() {
    use Fault::{DoesNotTellOfTheWait, GivesUp, LooksOnce, LossesAreNotNoted, TellsOneHolder};
    let faults = [
        (LossesAreNotNoted, false),
        (LooksOnce, false),
        (DoesNotTellOfTheWait, false),
        (TellsOneHolder, true),
        (GivesUp, true),
    ];
    for (fault, only_unrelated) in faults {
        let counts = count(repeatable(20_000), only_unrelated, fault);
        assert!(counts.is_err(), "{fault:?} is not caught: {counts:?}");
    }
}

/// The locks and requests of one database, without these keys: what the search may know of.
fn seen_from(plain: &Plain, db: i32, hidden: &BTreeSet<u32>) -> Plain {
    let mut seen = plain.clone();
    let is_seen = |number: &u32| key(*number).db == db && !hidden.contains(number);
    seen.locks.retain(|number, _| is_seen(number));
    for waiter in &mut seen.waiters {
        waiter.keys.retain(is_seen);
    }
    seen.waiters.retain(|waiter| !waiter.keys.is_empty());
    seen
}

/// Two databases with the same names in them, and keys that the one who asks may not read.
fn apart() -> impl Strategy<Value = (Vec<(Step, bool)>, PlainWaiter, BTreeSet<u32>)> {
    let hidden = prop_oneof![1 => Just(BTreeSet::new()), 2 => prop::collection::btree_set(0..KEYS, 1..3)];
    (limits(), any::<u64>()).prop_flat_map(move |(limits, shape)| {
        let steps = (steps(limits, shape), prop::collection::vec(any::<bool>(), 30));
        let steps = steps.prop_map(|(steps, elsewhere)| steps.into_iter().zip(elsewhere).collect());
        (steps, asking(limits, shape), hidden.clone())
    })
}

fn seen_is_right(
    (steps, candidate, hidden): (Vec<(Step, bool)>, PlainWaiter, BTreeSet<u32>),
    fault: Fault,
) -> Result<Option<bool>, TestCaseError> {
    let mut world = World::default();
    for (mut step, elsewhere) in steps {
        if let Step::Ask(waiter) = &mut step
            && elsewhere
        {
            waiter.keys.iter_mut().for_each(|number| *number += ELSEWHERE);
        }
        take(&mut world, step, Detection::Off);
    }
    if world.locks.plain.ending_at_once(&candidate).is_some() {
        return Ok(None);
    }
    world.locks.table.hidden = hidden.iter().map(|&number| key(number)).collect();
    let progress = Searching::new(&candidate, fault).advance(&mut world, usize::MAX);
    world.locks.plain.waiters.push(candidate.clone());
    let seen = seen_from(&world.locks.plain, 0, &hidden);
    let right = plainly_waits_in_a_cycle(&seen, &candidate, 1);
    prop_assert_eq!(matches!(progress, Progress::Cycle(_)), right, "{:?} in {:?}", progress, seen);
    if let Progress::Cycle(links) = progress {
        check_links_of(&seen, candidate.owner, &links)?;
        prop_assert!(links.iter().all(|link| !hidden.contains(&number_of_key(&link.key))), "{:?} shows a key", links);
    }
    Ok(Some(right))
}

#[test]
fn other_databases_and_keys_that_may_not_be_read_are_as_if_they_were_not_there() {
    let counts = std::cell::Cell::new([0; 2]);
    let mut runner = TestRunner::new(cases(4000));
    let result = runner.run(&apart(), |case| {
        let [yes, no] = counts.get();
        counts.set(match seen_is_right(case, Fault::Nothing)? {
            Some(true) => [yes + 1, no],
            Some(false) => [yes, no + 1],
            None => [yes, no],
        });
        Ok(())
    });
    result.unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{:?} cycles and none", counts.get());
    assert!(counts.get().iter().all(|&count| count > 100), "{:?}", counts.get());
    let broken = repeatable(4000).run(&apart(), |case| seen_is_right(case, Fault::ReadsAll).map(drop));
    assert!(broken.is_err(), "reading what may not be read is not caught");
}

/// `holders` hold key 0, shared; the last of them waits for key 1, and the owner of key 1 wants key 0.
fn many_readers(holders: u32, waiters: u32) -> (Queue<()>, Table, Owner) {
    let (mut queue, mut table) = (Queue::default(), Table::default());
    let granted = |limit| decide(&Standing::FREE, &demand(limit), Ahead::Nobody, 0);
    for number in 0..holders {
        table.write(&[key(0)], &owner(number), &[granted(0)]);
    }
    let writer = owner(holders);
    table.write(&[key(1)], &writer, &[granted(1)]);
    table.write(&[key(2)], &owner(holders + 1), &[granted(1)]);
    for number in 0..waiters {
        queue.join(owner(holders + 2 + number), keys(&[2, 3]), demand(1), 0, None, ());
    }
    queue.join(owner(holders - 1), keys(&[1]), demand(1), 0, None, ());
    (queue, table, writer)
}

/// Found whether the holders are listed, in one page or in many, or whether those who wait are asked.
#[test]
fn a_stuck_holder_is_found_among_many() {
    let page = PAGE as u32;
    for (holders, waiters) in [(1, 0), (page - 1, 0), (page, 0), (page + 1, 0), (5000, 0), (5000, 1), (5000, 6000)] {
        for budget in [1, 7, usize::MAX] {
            let (mut queue, mut table, writer) = many_readers(holders, waiters);
            let wanted = [key(0)];
            let mut search = Search::new(Candidate { owner: &writer, keys: &wanted, limit: Limit::MUTEX });
            let mut progress = search.advance(&queue, &mut table, budget);
            if progress == Progress::More {
                search.joined(queue.join(writer.clone(), keys(&[0]), demand(1), 0, None, ()));
            }
            while progress == Progress::More {
                progress = search.advance(&queue, &mut table, budget);
            }
            let Progress::Cycle(links) = progress else { panic!("{holders} holders, {waiters} waiters: {progress:?}") };
            let owners: Vec<Owner> = links.into_iter().map(|link| link.owner).collect();
            assert_eq!(owners, [writer, owner(holders - 1)]);
        }
    }
}

/// Two owners hold a lock each and wait for that of the other, the second as the candidate; found or not in steps of
/// this budget while `noise` is noted between them, and `undo` happens after so many steps.
fn pair(budget: usize, noise: usize, undo: impl Fn(&mut World, usize)) -> Option<usize> {
    let steps = vec![ask(0, &[0], 1), ask(1, &[1], 1), ask(0, &[1], 1)];
    let mut world = built(steps.into_iter().map(Step::Ask).collect(), Detection::Off);
    let candidate = ask(1, &[0], 1);
    let mut searching = Searching::new(&candidate, Fault::Nothing);
    let mut progress = searching.advance(&mut world, budget);
    let id = world.queue.next_id().0;
    world.arrive(candidate, None);
    searching.joined(id);
    for step in 1..2000 {
        if progress != Progress::More {
            return matches!(progress, Progress::Cycle(_)).then_some(step);
        }
        for number in 0..noise {
            world.queue.note(&key(100 + number as u32 % 50), Change::Freed);
        }
        undo(&mut world, step);
        progress = searching.advance(&mut world, budget);
    }
    panic!("no end");
}

/// A search by this candidate in steps of one unit until `until` of them are done; then `event`, and the rest at once.
/// Whether it had begun to look at everything again when that happened, and what came of it; `None`: it was over before.
fn interrupted(
    steps: &[PlainWaiter],
    candidate: &PlainWaiter,
    until: usize,
    event: impl Fn(&mut World),
) -> Option<(bool, Progress)> {
    let mut world = built(steps.iter().cloned().map(Step::Ask).collect(), Detection::Off);
    let mut searching = Searching::new(candidate, Fault::Nothing);
    let mut progress = searching.advance(&mut world, 1);
    let id = world.queue.next_id().0;
    world.arrive(candidate.clone(), None);
    searching.joined(id);
    for _ in 0..until {
        if progress != Progress::More {
            return None;
        }
        progress = searching.advance(&mut world, 1);
    }
    let is_rechecked = searching.search.is_rechecked();
    event(&mut world);
    (progress == Progress::More).then(|| (is_rechecked, searching.advance(&mut world, usize::MAX)))
}

/// For each moment of a search that finds a cycle: what comes of it if `event` happens then.
fn at_each_moment(steps: &[PlainWaiter], candidate: &PlainWaiter, event: impl Fn(&mut World)) -> Vec<(bool, Progress)> {
    let moments = |event: &dyn Fn(&mut World)| -> Vec<(bool, Progress)> {
        (0..).map_while(|until| interrupted(steps, candidate, until, event)).collect()
    };
    let alone = moments(&|_| {});
    assert!(alone.len() > 10 && alone.iter().all(|(_, progress)| matches!(progress, Progress::Cycle(_))), "{alone:?}");
    moments(&event)
}

/// One of two places in a semaphore is held by somebody in the cycle, the other by somebody stuck elsewhere, whose
/// lease runs out unnoticed. Nothing but looking at everything again finds that out. (After that, a search is told:
/// [`Queue::note`] comes for each lease that runs out before a search goes on.)
#[test]
fn a_lease_that_runs_out_unnoticed_is_found_out() {
    let steps = [
        ask(0, &[0], 2),
        ask(1, &[0], 2),
        ask(2, &[1], 1),
        ask(3, &[2], 1),
        ask(1, &[3], 1),
        ask(0, &[1], 1),
        ask(1, &[2], 1),
        ask(3, &[3], 1),
    ];
    let candidate = ask(2, &[0], 2);
    let lost = |world: &mut World| assert!(world.locks.table.release(&key(0), &owner(1)).is_some());
    let unnoticed = at_each_moment(&steps, &candidate, lost);
    let before = unnoticed.iter().take_while(|(is_rechecked, _)| !is_rechecked);
    assert!(before.clone().count() > 10);
    assert!(before.clone().all(|(_, progress)| !matches!(progress, Progress::Cycle(_))), "{unnoticed:?}");
    let noted = at_each_moment(&steps, &candidate, |world| {
        lost(world);
        world.queue.note(&key(0), Change::Freed);
    });
    assert!(noted.iter().all(|(_, progress)| !matches!(progress, Progress::Cycle(_))), "{noted:?}");
}

/// Another client lets somebody hold a key that it waits for together with a further one: now it waits for that alone.
#[test]
fn a_hold_that_came_past_the_queue_is_found_out() {
    let steps = [
        ask(0, &[0], 1),
        ask(1, &[1], 1),
        ask(3, &[2], 1),
        ask(4, &[3], 1),
        ask(3, &[3], 1),
        ask(4, &[2], 1),
        ask(0, &[1, 2], 1),
    ];
    let given = at_each_moment(&steps, &ask(1, &[0], 1), |world| {
        let holders = [0, 1].map(|owner| PlainHold { owner, holds: 1, until: None }).to_vec();
        world.store(1, PlainLock { not_a_lock: false, holders, limit: 1 });
        world.serve(vec![(1, Change::Foreign)]);
    });
    assert!(given.iter().all(|(_, progress)| !matches!(progress, Progress::Cycle(_))), "{given:?}");
}

/// A mutex becomes a lock without a limit, and its holder stays: there is room for the candidate, which waits for
/// something else.
#[test]
fn a_limit_that_is_raised_is_found_out() {
    let steps = [ask(0, &[0], 1), ask(1, &[1], 1), ask(2, &[2], 1), ask(0, &[1], 1)];
    let raised = at_each_moment(&steps, &ask(1, &[0, 2], 0), |world| {
        let holders = vec![PlainHold { owner: 0, holds: 1, until: None }];
        world.store(0, PlainLock { not_a_lock: false, holders, limit: 0 });
        world.serve(vec![(0, Change::Foreign)]);
    });
    assert!(raised.iter().all(|(_, progress)| !matches!(progress, Progress::Cycle(_))), "{raised:?}");
}

#[test]
fn more_changes_than_are_remembered_make_the_search_look_again() {
    assert!(pair(1, 0, |_, _| {}).is_some());
    assert!(pair(1, 500, |_, _| {}).is_some());
    assert!(pair(400, 10_000, |_, _| {}).is_some_and(|steps| steps > 1));
}

/// A hold that is lost at any moment of the search, or a wait that ends, even under more changes than are remembered.
#[test]
fn what_ends_at_any_moment_is_noticed() {
    let last = pair(1, 0, |_, _| {}).expect("a cycle");
    for noise in [0, 5000] {
        let budget = if noise == 0 { 1 } else { 120 };
        for at in 1..last - 1 {
            let lost = |world: &mut World, step: usize| {
                if step == at {
                    happen(world, Event::Lose { key: 1, owner: 1 }, Fault::Nothing);
                }
            };
            let gave_up = |world: &mut World, step: usize| {
                if step == at {
                    let id = world.locks.plain.waiters.iter().find(|it| it.owner == 0).map(|it| it.id);
                    world.leave(id.unwrap_or(u64::MAX));
                }
            };
            let (lost, gave_up) = (pair(budget, noise, lost), pair(budget, noise, gave_up));
            assert!(lost.is_none_or(|step| step <= at), "lost at {at}, told at {lost:?}");
            assert!(gave_up.is_none_or(|step| step <= at), "given up at {at}, told at {gave_up:?}");
        }
    }
}
