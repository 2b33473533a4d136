//! Two locks and three clients, every way it can go: the core's own code, explored to the end.
//!
//! A state is a plain description from which the queue and the locks are built anew for each step, so that two ways
//! to the same state are one. Time is left out: leases and waits may end at any moment. Clients have no names: states
//! that differ in who is who are one as well.

use super::broken::Fault;
use super::deadlock::found;
use super::plain::{Plain, PlainWaiter};
use super::watched::World;
use super::{key, owner};
use crate::lock::WaiterId;
use crate::lock::deadlock::Found;
use crate::lock::serve::Change;
use stateright::{Checker, Expectation, HasDiscoveries, Model, Property};
use std::collections::BTreeSet;
use std::time::Instant;

const CLIENTS: u32 = 3;
const LOCKS: u32 = 2;

/// The limits that clients may name, and what is broken.
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
    /// Locks of which a lease is over that nobody has looked at since.
    unseen: Vec<u32>,
    /// Clients that are no more.
    crashed: Vec<u32>,
    /// What the core did that is wrong.
    wrong: Option<String>,
}

/// Whether a request has waited elsewhere for longer than all who wait here. The numbers are when it arrived.
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
    /// A wait is over: its time is, or the server has found its connection closed.
    GiveUp(u32),
    /// A client ends without a word. Its place in the queue and its holds stay until they are found to be over.
    Crash(u32),
    /// A lease is over.
    Expire {
        client: u32,
        lock: u32,
    },
    /// The server looks at a lock of which a lease was over.
    Look(u32),
}

impl State {
    fn waits(&self, client: u32) -> bool {
        self.plain.waiters.iter().any(|waiter| waiter.owner == client)
    }

    fn holders(&self, lock: u32) -> usize {
        self.plain.lock(lock).holders.len()
    }

    /// The same state, where clients are numbered by what they do: two who do the same may change places.
    fn without_names(mut self) -> Self {
        let mut clients: Vec<u32> = (0..CLIENTS).collect();
        clients.sort_by_key(|&client| {
            let place = self.plain.waiters.iter().position(|waiter| waiter.owner == client);
            let held: Vec<bool> = (0..LOCKS).map(|lock| self.plain.holds(lock, client)).collect();
            (place, held, self.crashed.contains(&client))
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
        // Of grants, only which holds came by the same one matters.
        let grants: BTreeSet<u64> =
            self.plain.locks.values().flat_map(|lock| lock.holders.iter()).filter_map(|it| it.grant).collect();
        for hold in self.plain.locks.values_mut().flat_map(|lock| &mut lock.holders) {
            hold.grant = hold.grant.map(|grant| grants.range(..=grant).count() as u64);
        }
        self.plain.grants = grants.len() as u64;
        self.crashed.iter_mut().for_each(rename);
        self.crashed.sort_unstable();
        self
    }
}

impl Clients {
    fn asks(&self, state: &State, client: u32) -> Vec<Action> {
        let one = self.limits.iter().flat_map(|&limit| (0..LOCKS).map(move |lock| (vec![lock], limit)));
        let both = self.limits.contains(&1).then_some((vec![0, 1], 1));
        let all = one.chain(both).filter(|(keys, _)| keys.iter().any(|&key| !state.plain.holds(key, client)));
        let of_both = |(keys, limit): (Vec<u32>, u32)| {
            [From::Here, From::Elsewhere].map(|from| Action::Ask { client, keys: keys.clone(), limit, from })
        };
        all.flat_map(of_both).collect()
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
            Action::GiveUp(client) => {
                let id = world.locks.plain.waiters.iter().find(|it| it.owner == client).map(|it| it.id);
                world.leave(id.unwrap_or(WaiterId::FIRST));
            }
            Action::Crash(client) => {
                state.crashed.push(client);
            }
            Action::Expire { client, lock } => {
                world.locks.plain.release(lock, client);
                world.locks.table.release(&key(lock), &owner(client));
                if !state.unseen.contains(&lock) {
                    state.unseen.push(lock);
                    state.unseen.sort_unstable();
                }
            }
            Action::Look(lock) => {
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
        actions.extend(state.unseen.iter().map(|&lock| Action::Look(lock)));
        for client in 0..CLIENTS {
            let waits = state.waits(client);
            let held: Vec<u32> = (0..LOCKS).filter(|&lock| state.plain.holds(lock, client)).collect();
            actions.extend(held.iter().map(|&lock| Action::Expire { client, lock }));
            actions.extend(waits.then_some(Action::GiveUp(client)));
            if state.crashed.contains(&client) {
                continue;
            }
            actions.push(Action::Crash(client));
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
        let state = state.without_names();
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("each step is right, and in order", |_, state: &State| state.wrong.is_none()),
            Property::always("no more hold than the limit allows", |_, state: &State| {
                state.plain.locks.values().all(|lock| lock.limit == 0 || lock.holders.len() <= lock.limit as usize)
            }),
            Property::always("nobody who could be served is left waiting", |_, state: &State| {
                let left = state.plain.first_to_end();
                left.is_none_or(|(place, _)| state.plain.waiters[place].keys.iter().any(|it| state.unseen.contains(it)))
            }),
            // Where limits differ, a reader behind a writer waits for readers, too: that is not followed.
            Property::always("nobody is stuck", |model: &Self, state: &State| {
                model.limits.len() > 1 || state.plain.stuck(|_| 0).waiters.is_empty()
            }),
            Property::sometimes("as many hold as may", |model: &Self, state: &State| {
                let most = model.limits.iter().map(|&limit| if limit == 0 { CLIENTS } else { limit }).max();
                Some(state.holders(0)) == most.map(|most| most as usize)
            }),
            Property::sometimes("one who crashed holds what another waits for", |model: &Self, state: &State| {
                let crashed = |lock| state.crashed.iter().any(|&client| state.plain.holds(lock, client));
                let waits = |lock| !state.plain.lane(lock).is_empty();
                model.limits == [0] || (0..LOCKS).any(|lock| crashed(lock) && waits(lock))
            }),
            Property::sometimes("one who crashed is the next", |model: &Self, state: &State| {
                let next = state.plain.waiters.first();
                model.limits == [0] || next.is_some_and(|next| state.crashed.contains(&next.owner))
            }),
            Property::sometimes("one who could be served waits to be looked at", |model: &Self, state: &State| {
                model.limits == [0] || state.plain.first_to_end().is_some()
            }),
        ]
    }
}

/// Explores until something is wrong or nothing is left; what is wrong, and how it comes to that.
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
    assert!(failed.iter().any(|(name, _)| *name == "nobody is stuck"), "{failed:?}");
}

#[test]
fn injected_faults_are_found() {
    for fault in [
        Fault::ForgetsTheNext,
        Fault::ServesTheLastFirst,
        Fault::IgnoresTheLimit,
        Fault::LooksAtOneKey,
        Fault::ServesTwice,
        Fault::KeepsTheGone,
        Fault::DoesNotLookWhenOneLeaves,
        Fault::LetsNewcomersPass,
    ] {
        let failed = explore(Clients { limits: &[1, 0], fault: Some(fault), detection: Detection::On });
        println!("  {failed:?}");
        assert_ne!(failed, vec![], "{fault:?} is not found");
    }
}
