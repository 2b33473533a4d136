//! Two locks and three clients: the code of the core, explored exhaustively.
//!
//! A state is a plain description, from which queue and locks are rebuilt for each step, so that equal states are found.
//! There is no time: leases and waits may end at any moment, and a crashed client is one that does nothing more. States
//! that differ only in the clients' names are equal.

use super::broken::Fault;
use super::checked::World;
use super::deadlock::found;
use super::plain::{Plain, PlainWaiter};
use super::{key, owner};
use crate::lock::WaiterId;
use crate::lock::deadlock::Found;
use crate::lock::serve::Change;
use stateright::{Checker, Expectation, HasDiscoveries, Model, Property};
use std::collections::BTreeSet;
use std::time::Instant;

const CLIENTS: u32 = 3;
const LOCKS: u32 = 2;

/// The limits that clients may name, and the injected fault.
#[derive(Clone, Debug)]
struct Clients {
    limits: &'static [u32],
    fault: Option<Fault>,
    detection: Detection,
}

/// Whether requests that close a cycle are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Detection {
    On,
    Off,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    plain: Plain,
    /// Locks with an expired lease that has not been noticed yet.
    unseen: Vec<u32>,
    /// The first mistake of the core.
    wrong: Option<String>,
}

/// Whether a request waited elsewhere for longer than all waiters here. The number is its arrival time.
#[derive(Clone, Copy, Debug, PartialEq)]
enum From {
    Elsewhere = 0,
    Here = 1,
}

#[derive(Clone, Debug, PartialEq)]
enum Action {
    Ask {
        client: u32,
        keys: Vec<u32>,
        limit: u32,
        from: From,
    },
    Release {
        client: u32,
        lock: u32,
    },
    /// A wait ends: by its timeout, or because the server found its connection closed.
    EndWait(u32),
    /// A lease ends.
    Expire {
        client: u32,
        lock: u32,
    },
    /// The server notices an expired lease.
    NoticeExpiry(u32),
}

impl State {
    fn waits(&self, client: u32) -> bool {
        self.plain.waiters.iter().any(|waiter| waiter.owner == client)
    }

    fn holders(&self, lock: u32) -> usize {
        self.plain.lock(lock).holders.len()
    }

    /// The same state with clients numbered by their state: two clients with equal states may change places.
    fn canonical(mut self) -> Self {
        let mut clients: Vec<u32> = (0..CLIENTS).collect();
        clients.sort_by_key(|&client| {
            let place = self.plain.waiters.iter().position(|waiter| waiter.owner == client);
            let held: Vec<bool> = (0..LOCKS).map(|lock| self.plain.holds(lock, client)).collect();
            (place, held)
        });
        let rename =
            |name: &mut u32| *name = clients.iter().zip(0..).find(|(it, _)| *it == name).map_or(*name, |it| it.1);
        for lock in self.plain.locks.values_mut() {
            lock.holders.iter_mut().for_each(|hold| rename(&mut hold.owner));
            lock.holders.sort_by_key(|hold| hold.owner);
        }
        for (waiter, id) in self.plain.waiters.iter_mut().zip(0..) {
            waiter.id = WaiterId { arrived: 1, ticket: id };
            rename(&mut waiter.owner);
        }
        // Of grants, only the holds that one grant made together matter.
        let grants: BTreeSet<u64> =
            self.plain.locks.values().flat_map(|lock| lock.holders.iter()).filter_map(|it| it.grant).collect();
        for hold in self.plain.locks.values_mut().flat_map(|lock| &mut lock.holders) {
            hold.grant = hold.grant.map(|grant| grants.range(..=grant).count() as u64);
        }
        self.plain.grants = grants.len() as u64;
        self
    }
}

impl Clients {
    fn asks(&self, state: &State, client: u32) -> Vec<Action> {
        let one = self.limits.iter().flat_map(|&limit| (0..LOCKS).map(move |lock| (vec![lock], limit)));
        let both = self.limits.contains(&1).then_some((vec![0, 1], 1));
        let all = one.chain(both).filter(|(keys, _)| keys.iter().any(|&key| !state.plain.holds(key, client)));
        // Where a request comes from matters only if others wait.
        let places = if state.plain.waiters.is_empty() { &[From::Here][..] } else { &[From::Here, From::Elsewhere] };
        let of_each = |(keys, limit): (Vec<u32>, u32)| {
            places.iter().map(move |&from| Action::Ask { client, keys: keys.clone(), limit, from })
        };
        all.flat_map(of_each).collect()
    }

    fn act(&self, world: &mut World, state: &mut State, action: Action) {
        match action {
            Action::Ask { client, keys, limit, from } => {
                let id = WaiterId { arrived: from as u64, ticket: u64::MAX };
                let waiter = PlainWaiter { id, owner: client, keys, limit, to: Some(1), lease: 1 };
                let waits = state.plain.ending_at_once(&waiter).is_none();
                if !(waits && self.detection == Detection::On && found(world, &waiter) != Found::Nothing) {
                    world.arrive(waiter, None);
                }
            }
            Action::Release { client, lock } => {
                world.locks.plain.release(lock, client);
                world.locks.table.release(&key(lock), &owner(client));
                world.serve(vec![(lock, Change::Freed)]);
            }
            Action::EndWait(client) => {
                let id = world.locks.plain.waiters.iter().find(|it| it.owner == client).map(|it| it.id);
                world.leave(id.unwrap_or(WaiterId::FIRST));
            }
            Action::Expire { client, lock } => {
                world.locks.plain.release(lock, client);
                world.locks.table.release(&key(lock), &owner(client));
                if !state.unseen.contains(&lock) {
                    state.unseen.push(lock);
                    state.unseen.sort_unstable();
                }
            }
            Action::NoticeExpiry(lock) => {
                state.unseen.retain(|it| *it != lock);
                world.serve(vec![(lock, Change::Freed)]);
            }
        }
    }
}

impl Model for Clients {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::default()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        actions.extend(state.unseen.iter().map(|&lock| Action::NoticeExpiry(lock)));
        let mut idle = false;
        for client in 0..CLIENTS {
            let waits = state.waits(client);
            let held: Vec<u32> = (0..LOCKS).filter(|&lock| state.plain.holds(lock, client)).collect();
            // Idle clients are equal.
            if !waits && held.is_empty() && std::mem::replace(&mut idle, true) {
                continue;
            }
            actions.extend(held.iter().map(|&lock| Action::Expire { client, lock }));
            actions.extend(waits.then_some(Action::EndWait(client)));
            if !waits {
                actions.extend(held.iter().map(|&lock| Action::Release { client, lock }));
                actions.extend(self.asks(state, client));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        let mut world = World::from_plain(&last.plain, self.fault);
        self.act(&mut world, &mut state, action);
        state.wrong = world.locks.wrong;
        state.plain = world.locks.plain;
        let state = state.canonical();
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("each step is correct, and in order", |_, state: &State| state.wrong.is_none()),
            Property::always("holders never exceed the limit", |_, state: &State| {
                state.plain.locks.values().all(|lock| lock.limit == 0 || lock.holders.len() <= lock.limit as usize)
            }),
            Property::always("no request that could be granted waits", |_, state: &State| {
                let left = state.plain.first_to_end();
                left.is_none_or(|(place, _)| state.plain.waiters[place].keys.iter().any(|it| state.unseen.contains(it)))
            }),
            // If limits differ, a reader behind a writer also waits for readers. The search does not follow these waits.
            Property::always("no request waits forever", |model: &Self, state: &State| {
                model.limits.len() > 1 || state.plain.stuck(|_| 0).waiters.is_empty()
            }),
            Property::sometimes("holders reach the limit", |model: &Self, state: &State| {
                let most = model.limits.iter().map(|&limit| if limit == 0 { CLIENTS } else { limit }).max();
                Some(state.holders(0)) == most.map(|most| most as usize)
            }),
            Property::sometimes("a request that could be granted waits to be served", |model: &Self, state: &State| {
                model.limits == [0] || state.plain.first_to_end().is_some()
            }),
        ]
    }
}

/// Explores all states, or until a property fails. Returns the failures with their steps.
fn explore(clients: Clients) -> Vec<(&'static str, Vec<Action>)> {
    let (label, begin) = (format!("{clients:?}"), Instant::now());
    let checker = clients.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    println!("{label}: {} states in {:?}", checker.unique_state_count(), begin.elapsed());
    let always = |name: &&'static str| checker.model().property(name).expectation == Expectation::Always;
    let failed = checker.discoveries().into_iter().filter(|(name, _)| always(name));
    let failed: Vec<_> = failed.map(|(name, path)| (name, path.into_actions())).collect();
    if failed.is_empty() {
        checker.assert_properties();
    }
    failed
}

#[test]
fn model_of_three_clients_and_two_locks_has_no_violation() {
    for limits in [&[1][..], &[2], &[0], &[1, 0], &[1, 2]] {
        assert_eq!(explore(Clients { limits, fault: None, detection: Detection::On }), vec![]);
    }
}

#[test]
fn clients_deadlock_without_search_for_cycles() {
    let failed = explore(Clients { limits: &[1], fault: None, detection: Detection::Off });
    println!("  {failed:?}");
    assert!(failed.iter().any(|(name, _)| *name == "no request waits forever"), "{failed:?}");
}

#[test]
fn injected_faults_are_found() {
    for fault in [
        Fault::SkipsNextWaiter,
        Fault::ServesLastFirst,
        Fault::IgnoresLimit,
        Fault::ChecksFirstKeyOnly,
        Fault::GrantsTwice,
        Fault::KeepsCancelled,
        Fault::IgnoresCancellation,
        Fault::GrantsNewRequestFirst,
    ] {
        let failed = explore(Clients { limits: &[1, 0], fault: Some(fault), detection: Detection::On });
        println!("  {failed:?}");
        assert_ne!(failed, vec![], "{fault:?} is not detected");
    }
}
