//! The order of grants, waits for free locks, and cycles of waits.

use super::records::{Arrival, Belief, Binding, Connection, DAY, OpenRequest, Wait};
use super::{CYCLES, Checker, FREE, ORDER, Position, Violation};
use crate::redis::{Bytes, node};
use crate::request::Request;
use crate::state::pending::OnBehalf;
use crate::state::{self};
use crate::stored::{self, StoredValue};
use std::collections::BTreeMap;
use std::collections::BTreeSet;

impl Checker {
    pub(super) fn check_order(&mut self) -> Result<(), Violation> {
        let granted = std::mem::take(&mut self.granted);
        if granted.is_empty() {
            return Ok(());
        }
        let waiting = self.waiting();
        let mut first: BTreeMap<u64, Position> = BTreeMap::new();
        let mut dbs: BTreeMap<u64, BTreeSet<i32>> = BTreeMap::new();
        for (Arrival { position, .. }, db, .., token) in &granted {
            first.entry(*token).and_modify(|it| *it = (*it).min(*position)).or_insert(*position);
            dbs.entry(*token).or_default().insert(*db);
        }
        let claimed = granted.iter().filter(|(arrival, ..)| arrival.claimed.is_some());
        let claims: BTreeSet<u64> = claimed.map(|(.., token)| *token).collect();
        for (arrival, db, request, several, token) in granted {
            let position = arrival.position;
            // If the owner already held some of several keys, the whole request is a re-entry.
            if request.keys.len() < several {
                continue;
            }
            // A token from an earlier iteration belongs to a re-entry, or to a grant that was checked then. In this
            // iteration, the first reply with a token is the grant.
            // (It is unknown which reply that was if one of the requests has `WAITED`.)
            // (Nor if a swap of databases has taken the hold to a queued request of its owner, which re-enters it.)
            // A token that `FENCE` named belongs to a re-entry, too.
            let is_known = self.tokens.contains_key(&token) || self.fences.contains(&token);
            let is_new = !is_known && first.get(&token) == Some(&position);
            let is_new = is_new && (arrival.claimed.is_some() || !claims.contains(&token));
            let is_new = is_new && dbs.get(&token).is_none_or(|dbs| dbs.len() == 1);
            // An unread grant to the same owner makes it a re-entry.
            let again = |wait: &Wait| {
                wait.request.owner == request.owner && wait.request.keys.iter().any(|key| request.keys.contains(key))
            };
            // So does a granted request of the same owner whose reply has not been received.
            let owners =
                |it: &Request| it.owner == request.owner && it.keys.iter().any(|key| request.keys.contains(key));
            let mut open = self.connections.values().flat_map(|it| it.open.iter());
            if self.abandoned.iter().any(|(on, request)| *on == db && owners(request)) {
                continue;
            }
            if open.any(|open| open.began.is_some_and(|at| at < position) && open.runs.iter().any(owners)) {
                continue;
            }
            // In any database, because they may have been swapped since.
            let written_by_others = |key: &Bytes| self.written_by_others.iter().any(|(_, it)| it == key);
            if self.waits.iter().any(again) || request.keys.iter().any(written_by_others) {
                continue;
            }
            // A request that took over an earlier position keeps that position.
            let of_key = |key: &Bytes| self.repeated_requests.contains(&(db, key.clone(), request.owner.clone()));
            if request.keys.iter().any(of_key) {
                continue;
            }
            // The reply may have been received after the hold had already ended.
            let held = |key: &Bytes| node(|node| stored::read(node, db, key).of(&request.owner)?.token);
            let is_there = |key: &Bytes| held(key) == Some(token);
            let is_of_now = position > self.iteration || request.keys.iter().any(is_there);
            let iteration = if is_of_now { self.iteration } else { 0 };
            for (_, on, waits) in waiting.iter().filter(|(other, ..)| is_new && other.is_before(arrival, iteration)) {
                let common = waits.keys.iter().any(|key| request.keys.contains(key));
                if *on == db && common && waits.owner != request.owner {
                    return Err(Violation::new(ORDER, format!("{request:?} before {waits:?}")));
                }
            }
        }
        Ok(())
    }

    /// The queued requests, with the position where each began and the limit that applies to it in the queue.
    pub(super) fn waiting(&self) -> Vec<(Arrival, i32, Request)> {
        type Queued = (u64, bool, Bytes, i32, Vec<Bytes>);
        let queued: BTreeMap<Queued, u32> = state::with(|state| {
            let one = |waiter: &crate::lock::Waiter<state::Requester>| {
                let keys = waiter.keys.iter().map(|key| key.name.to_vec()).collect();
                let limit = match waiter.demand.limit.number() {
                    0 => u32::MAX,
                    limit => limit,
                };
                let of_session = waiter.requester.on_behalf == OnBehalf::Session;
                ((waiter.requester.client, of_session, waiter.owner.to_vec(), waiter.keys[0].db, keys), limit)
            };
            state.queue.iter().map(one).collect()
        });
        // If a request was repeated and its client has not received `WAITING`, it is unknown which of them is queued.
        let is_like = |one: &Request, other: &Request| {
            (one.client, &one.owner, &one.keys) == (other.client, &other.owner, &other.keys)
        };
        let is_sure = |wait: &&Wait| !self.unacknowledged.iter().any(|other| is_like(&wait.request, &other.request));
        // The queued one of several similar requests may be the last of them.
        let is_clear = |wait: &Wait| wait.repeats == 0 && !wait.is_optional;
        let of_session = |wait: &Wait| match is_clear(wait) {
            true => Some(Arrival::of(wait.latest, &wait.open, &wait.request)),
            false if wait.request.waited == 0 => {
                Some(Arrival { position: wait.latest, claimed: None, steady: u64::MAX - DAY })
            }
            false => None,
        };
        let sessions = self.waits.iter().filter(is_sure);
        let sessions = sessions.filter_map(|wait| Some((of_session(wait)?, &wait.open, &wait.request)));
        let last = |it: &'_ Connection| it.open.iter().rfind(|open| open.began.is_some()).cloned();
        let here = self.connections.values().filter(|it| !it.has_vanished);
        let blocked: Vec<OpenRequest> = here.filter_map(last).filter(|open| !open.is_exec).collect();
        let blocked = blocked.iter().filter_map(|open| {
            let request = open.runs.first().filter(|request| !request.of_session)?;
            Some((Arrival::of(open.began?, open, request), open, request))
        });
        let role = self.role_changed();
        let acquires = sessions.chain(blocked).filter(|(arrival, ..)| arrival.position > role);
        let acquires = acquires.filter(|(_, _, request)| request.command.ends_with("acquire"));
        let queued = |(arrival, open, request): (Arrival, &OpenRequest, &Request)| {
            let of_wait = (request.client, request.of_session, request.owner.clone(), open.db, request.keys.clone());
            let limit = *queued.get(&of_wait)?;
            // A request that took over an earlier position keeps it, whatever it claims.
            let of_key = |key: &Bytes| self.repeated_requests.contains(&(open.db, key.clone(), request.owner.clone()));
            let is_again = request.keys.iter().any(of_key);
            let arrival = Arrival { claimed: arrival.claimed.filter(|_| !is_again), ..arrival };
            Some((arrival, open.db, Request { limit, ..request.clone() }))
        };
        acquires.filter_map(queued).collect()
    }

    pub(super) fn check_cycles(&self) -> Result<(), Violation> {
        let waits = self.waiting();
        let alone = |owner: &Bytes| waits.iter().filter(|(_, _, it)| it.owner == *owner).count() == 1;
        // Which owner waits for which, where that is certain: for a mutex whose holder will not release it by itself.
        // The search does not look into other databases.
        // (And since when: a hold that waits for confirmation is not renewed before.)
        let mut edges: BTreeMap<(i32, &Bytes), BTreeMap<Bytes, Position>> = BTreeMap::new();
        let mut began: BTreeMap<(i32, &Bytes), Position> = BTreeMap::new();
        for (arrival, db, request) in waits.iter().filter(|(_, _, it)| it.limit == 1 && alone(&it.owner)) {
            if self.renewed.contains(&request.owner) || self.concurrent_waiters.contains(&request.owner) {
                continue;
            }
            for key in &request.keys {
                let seen = node(|node| stored::read(node, *db, key));
                // The search follows only holders of mutexes.
                if !matches!(&seen, StoredValue::Lock(lock) if lock.limit == 1) {
                    continue;
                }
                for holder in seen.holders().iter().filter(|it| it.owner != request.owner) {
                    let hold = (*db, key.clone(), holder.owner.clone());
                    let is_connected = |binding: Binding| {
                        binding.watchdog && !binding.is_unsure && self.connections.contains_key(&binding.client)
                    };
                    let binding = self.beliefs.get(&hold).and_then(Belief::binding);
                    let watched = binding.is_some_and(is_connected);
                    // (A hold whose expiry was removed was not followed when the others began to wait.)
                    let long = holder.deadline.is_none() && !self.expiry_changed.contains(key);
                    let since = binding
                        .filter(|binding| !long && binding.confirmed.is_some())
                        .map_or(0, |binding| binding.received);
                    if (watched || long) && !self.written_by_others.contains(&(*db, key.clone())) {
                        let to = edges.entry((*db, &request.owner)).or_default();
                        to.entry(holder.owner.clone()).and_modify(|it| *it = since.min(*it)).or_insert(since);
                        began.insert((*db, &request.owner), arrival.position);
                    }
                }
            }
        }
        // Each cycle is searched from the wait that began last and would have closed it.
        for start in edges.keys() {
            let mut seen = BTreeSet::new();
            let last = began[start];
            let mut todo: Vec<&Bytes> = vec![start.1];
            while let Some(owner) = todo.pop() {
                let was_there = |(_, since): &(&Bytes, &Position)| began[&(start.0, owner)] <= last && **since < last;
                let ways = edges.get(&(start.0, owner)).into_iter().flatten();
                for (next, _) in ways.filter(was_there) {
                    if next == start.1 {
                        return Err(Violation::new(CYCLES, format!("{edges:?}")));
                    }
                    if seen.insert(next) {
                        todo.push(next);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Whether these are the same keys, in any order.
pub(super) fn is_same_set(some: &[Bytes], others: &[Bytes]) -> bool {
    some.len() == others.len() && some.iter().all(|key| others.contains(key))
}

/// With everything idle, no request waits for a free lock.
pub(super) fn no_wait_for_free_lock(late: u64) -> Result<(), Violation> {
    let waiters: Vec<(Bytes, u32, i32, Vec<Bytes>)> = state::with(|state| {
        let one = |waiter: &crate::lock::Waiter<state::Requester>| {
            let limit = match waiter.demand.limit.number() {
                0 => u32::MAX,
                limit => limit,
            };
            let keys = waiter.keys.iter().map(|key| key.name.to_vec()).collect();
            (waiter.owner.to_vec(), limit, waiter.keys[0].db, keys)
        };
        state.queue.iter().map(one).collect()
    });
    let mut ahead: BTreeSet<(i32, Bytes)> = BTreeSet::new();
    for (owner, limit, db, keys) in waiters {
        let can = keys.iter().all(|key| {
            let is_here = node(|node| node.serves(db, key));
            let seen = node(|node| stored::read_at(node, db, key, node.millis() - late));
            let is_first = !ahead.contains(&(db, key.clone()));
            // A request waits until replicas have confirmed another request of its owner, at any position.
            let awaits = state::with(|state| state.awaits_replicas(db, key, &owner));
            is_here
                && !awaits
                && match &seen {
                    StoredValue::NotALock => is_first,
                    // A re-entry, at any position.
                    StoredValue::Lock(_) if seen.of(&owner).is_some() => true,
                    StoredValue::Lock(lock) => {
                        is_first && (lock.holders.len() as u64) < u64::from(limit.min(lock.limit))
                    }
                }
        });
        if can {
            let keys: Vec<String> = keys.iter().map(|key| key.escape_ascii().to_string()).collect();
            return Err(Violation::new(FREE, format!("{} waits for {keys:?}", owner.escape_ascii())));
        }
        ahead.extend(keys.into_iter().map(|key| (db, key)));
    }
    Ok(())
}
