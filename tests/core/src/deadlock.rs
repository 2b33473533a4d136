//! The search for cycles, compared with a plain search, and with what happens in the end.

use super::checked::World;
use super::plain::{Plain, PlainWaiter};
use super::{ELSEWHERE, cases, demand, key};
use crate::lock::actor;
use crate::lock::deadlock::{Found, Held, Link, MOST_PLACES, Request, View, WaitReason, search};
use crate::lock::serve::Change;
use crate::lock::{Actor, Limit, LockKey, Owner, Queue, Waiter, WaiterId};
use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestRunner};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

/// Holders and waiters.
#[derive(Debug, Default)]
struct WaitGraph {
    queue: Queue<()>,
    /// The limit and the holders of each lock.
    held: BTreeMap<LockKey, (Limit, BTreeSet<Owner>)>,
    /// Keys that the client may not read.
    hidden: BTreeSet<LockKey>,
    looked_at: usize,
}

fn request(waiter: &Waiter<()>) -> Request {
    Request { id: waiter.id, owner: waiter.owner.clone(), keys: waiter.keys.clone() }
}

impl View for WaitGraph {
    fn may_read(&mut self, key: &LockKey) -> bool {
        !self.hidden.contains(key)
    }

    fn held(&mut self, key: &LockKey) -> Held {
        assert!(!self.hidden.contains(key));
        self.looked_at += 1;
        self.held.get(key).map_or(Held::Free, |(limit, holders)| held(*limit, holders.first()))
    }

    fn waits_of(&mut self, actor: &Actor, most: usize) -> Vec<Request> {
        let waits: Vec<Request> = self.queue.of_actor(actor, most).take(most).map(request).collect();
        self.looked_at += waits.len();
        waits
    }

    fn multi_key_ahead(&mut self, key: &LockKey, of: WaiterId, most: usize) -> Vec<Request> {
        let ahead: Vec<Request> = self.queue.multi_key_ahead(key, of).take(most).map(request).collect();
        self.looked_at += ahead.len();
        ahead
    }
}

fn held(limit: Limit, first: Option<&Owner>) -> Held {
    match first {
        None => Held::Free,
        Some(owner) if limit == Limit::MUTEX => Held::Mutex(owner.clone()),
        Some(_) => Held::Shared,
    }
}

impl WaitGraph {
    fn holds(&mut self, owner: &str, number: u32, limit: u32) {
        let (least, holders) = self.held.entry(key(number)).or_insert((Limit::Shared, BTreeSet::new()));
        *least = (*least).min(Limit::from_number(limit));
        holders.insert(owner.as_bytes().into());
    }

    fn waits(&mut self, owner: &str, keys: &[u32], limit: u32) {
        self.queue.join(owner.as_bytes().into(), super::keys(keys), demand(limit), 0, None, ());
    }

    fn ask(&mut self, owner: &str, keys: &[u32]) -> Found {
        let requester = self.asking(owner, keys);
        search(self, &requester)
    }

    fn asking(&self, owner: &str, keys: &[u32]) -> Request {
        Request { id: self.queue.next_id(0), owner: owner.as_bytes().into(), keys: super::keys(keys).into() }
    }

    /// Why a request has to wait for another owner at a key, if it has to.
    fn reason(&self, of: &Request, requester: &Request, at: &LockKey, other: &Owner) -> Option<WaitReason> {
        let free = (Limit::MUTEX, BTreeSet::new());
        let (limit, holders) = self.held.get(at).unwrap_or(&free);
        // (The client may read its own keys.)
        let is_hidden = self.hidden.contains(at) && of.id != requester.id;
        if is_hidden || !of.keys.contains(at) || *limit != Limit::MUTEX || holders.contains(&of.owner) {
            return None;
        }
        if holders.contains(other) {
            return Some(WaitReason::Holds);
        }
        let mut all: Vec<Request> = self.queue.iter().map(request).collect();
        all.push(requester.clone());
        let is_ahead = |it: &Request| it.owner == *other && it.id < of.id && it.keys.len() > 1 && it.keys.contains(at);
        let is_other = actor::name(other) != actor::name(&of.owner);
        (is_other && all.iter().any(is_ahead)).then_some(WaitReason::Ahead)
    }

    /// All owners, and the owners that each has to wait for. Of the requesting actor, only the new request counts.
    fn waits_plainly(&self, requester: &Request) -> BTreeMap<Vec<u8>, BTreeSet<Vec<u8>>> {
        let db = requester.keys[0].db;
        let who = |owner: &Owner| actor::name(owner).to_vec();
        let mut requests: Vec<Request> = self.queue.iter().map(request).collect();
        requests.retain(|it| it.keys[0].db == db && who(&it.owner) != who(&requester.owner));
        requests.push(requester.clone());
        let mut owners: BTreeSet<Owner> = self.queue.iter().map(|it| it.owner.clone()).collect();
        owners.extend(self.held.values().flat_map(|(_, holders)| holders.iter().cloned()));
        owners.insert(requester.owner.clone());
        let mut waits: BTreeMap<Vec<u8>, BTreeSet<Vec<u8>>> = BTreeMap::new();
        for request in &requests {
            for other in &owners {
                if request.keys.iter().any(|at| self.reason(request, requester, at, other).is_some()) {
                    waits.entry(who(&request.owner)).or_default().insert(who(other));
                }
            }
        }
        waits
    }

    /// Whether the requesting actor would wait for itself.
    fn is_closed_plainly(&self, requester: &Request) -> bool {
        let mut waits = self.waits_plainly(requester);
        let me = actor::name(&requester.owner).to_vec();
        loop {
            let Some(mine) = waits.get(&me).cloned() else { return false };
            let others = mine.iter().filter(|other| **other != me).filter_map(|other| waits.get(other)).flatten();
            let further: BTreeSet<Vec<u8>> = others.cloned().chain(mine.iter().cloned()).collect();
            if further.contains(&me) || further == mine {
                return further.contains(&me);
            }
            waits.insert(me.clone(), further);
        }
    }

    /// Each link is a wait, and leads to the next one, the last to the first.
    fn check(&self, requester: &Request, links: &[Link]) -> Result<(), TestCaseError> {
        prop_assert_eq!(links.first().map(|link| &link.owner), Some(&requester.owner));
        for (link, next) in links.iter().zip(links.iter().cycle().skip(1)) {
            let is_of_asker = link == &links[0];
            let mut requests: Vec<Request> = self.queue.iter().map(request).filter(|_| !is_of_asker).collect();
            requests.extend(is_of_asker.then(|| requester.clone()));
            let reasons = requests.iter().filter(|it| it.owner == link.owner);
            let mut reasons = reasons.filter_map(|it| self.reason(it, requester, &link.key, &link.other));
            prop_assert!(reasons.any(|because| because == link.because), "{:?} is not a wait", link);
            prop_assert_eq!(actor::name(&link.other), actor::name(&next.owner));
        }
        let actors: BTreeSet<&[u8]> = links.iter().map(|link| actor::name(&link.owner)).collect();
        prop_assert_eq!(actors.len(), links.len(), "an actor occurs twice");
        Ok(())
    }
}

fn an_owner() -> impl Strategy<Value = String> {
    (0..4_u32, 0..3_u32).prop_map(|(actor, nth)| if nth == 0 { format!("{actor}") } else { format!("{actor}##{nth}") })
}

/// Keys of one database, one or several, and the limit.
fn some_keys() -> impl Strategy<Value = (Vec<u32>, u32)> {
    let of_one = (0..5_u32, prop::sample::select(vec![1, 1, 0, 2])).prop_map(|(key, limit)| (vec![key], limit));
    let several = prop::sample::subsequence(vec![0, 1, 2, 3, 4], 2..4).prop_map(|keys| (keys, 1));
    (prop_oneof![2 => of_one, 1 => several], prop::bool::weighted(0.1)).prop_map(|((mut keys, limit), elsewhere)| {
        keys.iter_mut().for_each(|key| *key += if elsewhere { ELSEWHERE } else { 0 });
        (keys, limit)
    })
}

fn wait_graph() -> impl Strategy<Value = (WaitGraph, Request)> {
    let holds = prop::collection::vec((an_owner(), 0..5_u32, prop::sample::select(vec![1, 1, 1, 0, 2])), 1..8);
    let waits = prop::collection::vec((an_owner(), some_keys()), 0..8);
    let hidden = prop::option::weighted(0.1, 0..5_u32);
    (holds, waits, hidden, (an_owner(), some_keys()), 0..10_u64).prop_map(|(holds, waits, hidden, requester, place)| {
        let asks_for = |number: &u32| requester.1.0.contains(number);
        let hidden = hidden.into_iter().filter(|number| !asks_for(number)).map(key).collect();
        let mut graph = WaitGraph { hidden, ..WaitGraph::default() };
        for (owner, number, limit) in holds {
            let is_full = |(least, holders): &(Limit, BTreeSet<Owner>)| {
                !least.min(&Limit::from_number(limit)).allows(holders.len() + 1)
            };
            if !graph.held.get(&key(number)).is_some_and(is_full) {
                graph.holds(&owner, number, limit);
            }
        }
        for (owner, (keys, limit)) in waits {
            graph.waits(&owner, &keys, limit);
        }
        let requester = graph.asking(&requester.0, &requester.1.0);
        // Before some waiters, behind others, and in empty queues.
        let place = WaiterId { arrived: u64::from(place > 0), ticket: requester.id.ticket };
        (graph, Request { id: place, ..requester })
    })
}

#[test]
fn search_agrees_with_plain_search() {
    let (closed, open) = (Cell::new(0), Cell::new(0));
    let result = TestRunner::new(cases(8_000)).run(&wait_graph(), |(mut graph, requester)| {
        let right = graph.is_closed_plainly(&requester);
        let count = if right { &closed } else { &open };
        count.set(count.get() + 1);
        match search(&mut graph, &requester) {
            Found::Nothing => prop_assert!(!right, "{:?} closes a cycle in {:?}", requester, graph),
            Found::Cycle(links) => {
                prop_assert!(right, "{:?} closes no cycle, not {:?}", requester, links);
                graph.check(&requester, &links)?;
            }
            Found::Aborted => prop_assert!(false, "the search was aborted"),
        }
        Ok(())
    });
    result.unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{} cycles, {} times none", closed.get(), open.get());
    assert!(closed.get() > 500 && open.get() > 500, "{} cycles, {} times none", closed.get(), open.get());
}

/// Searches for the same request in a world in which no hold ends.
pub fn found(world: &mut World, waiter: &PlainWaiter) -> Found {
    struct Seen<'a>(&'a mut World);
    impl View for Seen<'_> {
        fn may_read(&mut self, _: &LockKey) -> bool {
            true
        }

        fn held(&mut self, key: &LockKey) -> Held {
            let holders = self.0.locks.table.holders_of(key).filter(|holders| !holders.is_empty());
            holders.map_or(Held::Free, |all| held(all.limit(), all.iter().next().map(|(owner, _)| owner)))
        }

        fn waits_of(&mut self, actor: &Actor, most: usize) -> Vec<Request> {
            self.0.queue.of_actor(actor, most).take(most).map(request).collect()
        }

        fn multi_key_ahead(&mut self, key: &LockKey, of: WaiterId, most: usize) -> Vec<Request> {
            self.0.queue.multi_key_ahead(key, of).take(most).map(request).collect()
        }
    }
    let (id, owner, keys) =
        (world.queue.next_id(waiter.id.arrived), super::owner(waiter.owner), super::keys(&waiter.keys).into());
    search(&mut Seen(world), &Request { id, owner, keys })
}

#[derive(Clone, Debug)]
enum Step {
    Ask(PlainWaiter),
    /// An owner without a request releases all its holds.
    Finish(u32),
    /// A request is cancelled.
    Leave(usize),
}

const OWNERS: u32 = 6;
const KEYS: u32 = 4;

/// Requests. Several keys are mutexes, as in `MACQUIRE`.
fn steps(limits: &'static [u32]) -> impl Strategy<Value = Vec<Step>> {
    let of_one = (0..KEYS, prop::sample::select(limits)).prop_map(|(key, limit)| (vec![key], limit));
    let several = prop::sample::subsequence(vec![0, 1, 2, 3], 2..=3).prop_shuffle().prop_map(|keys| (keys, 1));
    let asks = (0..OWNERS, prop_oneof![4 => of_one, 1 => several], prop_oneof![2 => Just(9), 1 => 0_u64..9]);
    let asks = asks.prop_map(|(owner, (keys, limit), arrived)| {
        let id = WaiterId { arrived, ticket: u64::MAX };
        PlainWaiter { id, owner, keys, limit, to: None, lease: 1 << 40 }
    });
    let step = prop_oneof![
        14 => asks.prop_map(Step::Ask),
        1 => (0..OWNERS).prop_map(Step::Finish),
        1 => (0..6_usize).prop_map(Step::Leave),
    ];
    prop::collection::vec(step, 1..30)
}

/// Executes a step. A request that would close a cycle is refused, and returned. An actor is one thread, with one request
/// at a time.
fn execute(world: &mut World, step: Step) -> Option<PlainWaiter> {
    match step {
        Step::Ask(waiter) if world.queue.waits(&super::owner(waiter.owner)) => {}
        Step::Ask(waiter) => {
            let waits = world.locks.plain.ending_at_once(&waiter).is_none();
            if waits && found(world, &waiter) != Found::Nothing {
                return Some(waiter);
            }
            world.arrive(waiter, None);
        }
        Step::Finish(who) if !world.queue.waits(&super::owner(who)) => {
            let held: Vec<u32> = (0..KEYS).filter(|&number| world.locks.plain.holds(number, who)).collect();
            for &number in &held {
                world.locks.plain.release(number, who);
                world.locks.table.release(&key(number), &super::owner(who));
            }
            world.serve(held.into_iter().map(|number| (number, Change::Freed)).collect());
        }
        Step::Finish(_) => {}
        Step::Leave(place) => {
            let gone = world.locks.plain.waiters.get(place).map(|it| it.id);
            gone.into_iter().for_each(|id| world.leave(id));
        }
    }
    None
}

#[test]
fn admitted_wait_for_mutexes_never_deadlocks() {
    let result = TestRunner::new(cases(3_000)).run(&steps(&[1]), |steps| {
        let mut world = World::default();
        for step in steps {
            execute(&mut world, step);
            let stuck = world.locks.plain.stuck(|_| 0);
            prop_assert!(stuck.waiters.is_empty(), "{:?} wait forever in {:?}", stuck.waiters, world.locks.plain);
        }
        Ok(())
    });
    result.unwrap_or_else(|wrong| panic!("{wrong}"));
}

#[test]
fn refused_wait_would_deadlock() {
    let refused = Cell::new(0);
    let result = TestRunner::new(cases(3_000)).run(&steps(&[1, 1, 2, 0, 3]), |steps| {
        let mut world = World::default();
        for step in steps {
            let Some(waiter) = execute(&mut world, step) else { continue };
            refused.set(refused.get() + 1);
            let mut plain: Plain = world.locks.plain.clone();
            // At the position that it would get.
            let place = plain.waiters.iter().position(|it| it.id > waiter.id).unwrap_or(plain.waiters.len());
            plain.waiters.insert(place, waiter.clone());
            for seed in 0..5 {
                let end = plain.stuck(|of| seed % of);
                prop_assert!(end.place(waiter.id).is_some(), "{:?} is granted in {:?}", waiter, world.locks.plain);
            }
        }
        Ok(())
    });
    result.unwrap_or_else(|wrong| panic!("{wrong}"));
    assert!(refused.get() > 300, "{}", refused.get());
}

/// The waits of a cycle: owner, key, other owner.
fn describe(found: Found) -> Vec<(String, u32, String)> {
    let text = |owner: &Owner| String::from_utf8_lossy(owner).into_owned();
    match found {
        Found::Cycle(links) => {
            links.iter().map(|it| (text(&it.owner), super::number_of_key(&it.key), text(&it.other))).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn cycles_of_2_3_and_20_are_reported_in_order() {
    for length in [2, 3, 20] {
        let mut graph = WaitGraph::default();
        let name = |number: u32| format!("owner {}", number % length);
        (0..length).for_each(|number| graph.holds(&name(number), number, 1));
        for number in 1..length {
            assert_eq!(graph.ask(&name(number), &[(number + 1) % length]), Found::Nothing);
            graph.waits(&name(number), &[(number + 1) % length], 1);
        }
        let right: Vec<_> = (0..length).map(|it| (name(it), (it + 1) % length, name(it + 1))).collect();
        assert_eq!(describe(graph.ask(&name(0), &[1])), right);
    }
}

/// All owners of an actor are one.
#[test]
fn owners_of_one_actor_can_wait_for_themselves() {
    let mut graph = WaitGraph::default();
    graph.holds("t##1", 0, 1);
    assert_eq!(describe(graph.ask("t##2", &[0])), [("t##2".into(), 0, "t##1".into())]);
    assert_eq!(describe(graph.ask("t", &[0])), [("t".into(), 0, "t##1".into())]);
    assert_eq!(graph.ask("t#1", &[0]), Found::Nothing, "another actor");
    graph.holds("u##1", 1, 1);
    graph.waits("u##2", &[0], 1);
    let right = [("t##2".into(), 1, "u##1".into()), ("u##2".into(), 0, "t##1".into())];
    assert_eq!(describe(graph.ask("t##2", &[1])), right);
}

/// The search follows the holders of locks with limit 1, and no other holders.
#[test]
fn search_follows_holders_of_mutexes_only() {
    let mut graph = WaitGraph::default();
    graph.holds("a", 0, 1);
    graph.holds("b", 1, 1);
    graph.waits("a", &[1], 0);
    assert_eq!(describe(graph.ask("b", &[0])).len(), 2);

    let mut graph = WaitGraph::default();
    ["a", "b", "c"].iter().for_each(|reader| graph.holds(reader, 0, 0));
    graph.holds("writer", 1, 1);
    graph.waits("b", &[1], 1);
    assert_eq!(graph.ask("writer", &[0]), Found::Nothing, "the search does not follow readers");
}

/// A user can't cause refusals for another one: the search does not follow keys that the client may not read.
#[test]
fn search_does_not_follow_unreadable_keys() {
    let mut graph = WaitGraph::default();
    graph.holds("victim", 0, 1);
    graph.holds("requester", 1, 1);
    graph.waits("victim", &[1], 1);
    assert_eq!(describe(graph.ask("requester", &[0])).len(), 2);
    graph.hidden.insert(key(1));
    assert_eq!(graph.ask("requester", &[0]), Found::Nothing);
}

#[test]
fn search_follows_queued_request_for_several_keys() {
    let mut graph = WaitGraph::default();
    graph.holds("holder", 0, 1);
    graph.waits("queued", &[0, 1], 1);
    let right = [("holder".into(), 1, "queued".into()), ("queued".into(), 0, "holder".into())];
    assert_eq!(describe(graph.ask("holder", &[1])), right);
    // A request that is placed ahead of it does not wait for it, but others may wait for the new request.
    let mut graph = WaitGraph::default();
    graph.holds("h", 0, 1);
    graph.holds("y", 1, 1);
    graph.waits("h", &[1], 1);
    let first = Request { id: WaiterId::FIRST, ..graph.asking("n", &[0, 1]) };
    assert_eq!(search(&mut graph, &first), Found::Nothing, "no request is behind it");
    graph.waits("other", &[3], 1);
    graph.queue.leave(WaiterId::FIRST);
    graph.waits("h", &[1], 1);
    let right = [("n".into(), 0, "h".into()), ("h".into(), 1, "n".into())];
    assert_eq!(describe(search(&mut graph, &first)), right);
}

/// However many waits there are, the search is bounded.
#[test]
fn too_long_search_is_aborted() {
    let chain = |length: u32| {
        let mut graph = WaitGraph::default();
        for number in 0..length {
            graph.holds(&format!("{number}"), number, 1);
            graph.waits(&format!("{number}"), &[number + 1], 1);
        }
        graph.holds("end", length, 1);
        graph
    };
    let mut graph = chain(300);
    assert_eq!(describe(graph.ask("end", &[0])).len(), 301);
    assert_eq!(graph.ask("end", &[301]), Found::Nothing);
    for mut graph in [chain(600), chain(100_000)] {
        assert_eq!(graph.ask("end", &[0]), Found::Aborted);
        assert!(graph.looked_at <= MOST_PLACES + 1, "{}", graph.looked_at);
    }

    let mut crowds = WaitGraph::default();
    (0..5_000).for_each(|number| crowds.waits(&format!("several {number}"), &[1, 2], 1));
    (0..5_000).for_each(|number| crowds.waits("busy", &[100 + number], 1));
    crowds.holds("busy", 3, 1);
    for wanted in [1, 3] {
        crowds.looked_at = 0;
        assert_eq!(crowds.ask("requester", &[wanted]), Found::Aborted);
        assert!(crowds.looked_at <= MOST_PLACES + 1, "{wanted}: {}", crowds.looked_at);
    }
}

#[test]
fn actor_is_owner_up_to_first_mark() {
    const ACTORS: [(&str, &str); 6] =
        [("a", "a"), ("a##1", "a"), ("a##", "a"), ("a#1", "a#1"), ("a#b##c##d", "a#b"), ("a###", "a")];
    for (owner, actor) in ACTORS {
        let owner: Owner = owner.as_bytes().into();
        assert_eq!((actor::name(&owner), &*actor::of(&owner)), (actor.as_bytes(), actor.as_bytes()));
    }
}
