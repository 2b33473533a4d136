//! What the server did, in order: requests that began, and everything that may end a hold.

use super::records::{Cause, OpenRequest, PossibleMove, Wait};
use super::{Checker, Hold, Position};
use crate::redis::{Bytes, LogEntry, node};
use crate::request::Request;
use crate::resp::Reply;
use crate::state::{self};
use std::collections::BTreeMap;
use std::collections::BTreeSet;

impl Checker {
    /// Records the order in which requests began and other events happened.
    pub(super) fn record_log(&mut self) {
        for entry in node(|node| std::mem::take(&mut node.log)) {
            self.position += 1;
            let position = self.position;
            // A grant that has not been delivered may be revoked in part after the release.
            let unacknowledged = match &entry {
                LogEntry::Started { commands, .. } if releases(commands) => self.owners_without_reply(),
                _ => BTreeSet::new(),
            };
            let (causes, lasting) = (&mut self.causes, &mut self.lasting);
            let mut cause = |cause| causes.push((position, cause));
            match entry {
                LogEntry::Started { client, db, at, steady, is_session, commands } => {
                    // (The request may have arrived long before, behind one that had to wait.)
                    self.busy_until = self.busy_until.max(node(|node| node.clock.mono));
                    let over_session = |argv: &Vec<Bytes>| is_session && !argv[0].eq_ignore_ascii_case(b"eval");
                    let read =
                        |argv: &Vec<Bytes>| Request { over_session: over_session(argv), ..Request::read(client, argv) };
                    let runs: Vec<Request> = commands.iter().map(read).collect();
                    for (position, request) in (position..).zip(&runs) {
                        let own = || (position, Cause::Own(Box::new(request.clone()), db, at));
                        match request.command.as_str() {
                            "force" => {
                                causes
                                    .extend(request.keys.iter().map(|key| (position, Cause::Forced(db, key.clone()))));
                            }
                            _ if request.command.ends_with("release") && unacknowledged.contains(&request.owner) => {
                                lasting.push(own());
                            }
                            "release" | "mrelease" | "renew" | "mrenew" => causes.push(own()),
                            _ => {}
                        }
                    }
                    self.position += runs.len();
                    self.current_requesters.extend(runs.iter().map(|request| request.owner.clone()));
                    self.requests_since_step.extend_from_slice(&runs);
                    self.fences.extend(runs.iter().filter_map(|request| request.fence));
                    // A session is not notified of a loss if the owner releases the hold before the loss is noticed.
                    for request in runs.iter().filter(|request| request.command.ends_with("release")) {
                        // A release to a named count also keeps grants that were not delivered.
                        if request.holds.is_some_and(|holds| holds > 0) {
                            self.keeping_owners.insert(request.owner.clone());
                        }
                        self.due_losses.retain(|(_, key, owner, _)| !request.concerns(key, owner));
                    }
                    for request in runs.iter().filter(|request| request.replicas > 0) {
                        let of_owner = |key: &Bytes| (key.clone(), request.owner.clone());
                        self.replicated.extend(request.keys.iter().map(of_owner));
                    }
                    let renewals =
                        runs.iter().filter(|request| request.command.ends_with("renew") && request.replicas > 0);
                    self.keeping_owners.extend(renewals.map(|request| request.owner.clone()));
                    let acquires = |(_, request): &(usize, &Request)| request.command.ends_with("acquire");
                    for (index, request) in runs.iter().enumerate().filter(acquires) {
                        self.record_repetition(db, request, &runs[..index]);
                        // (A request with `WAITED` that was granted immediately, ahead of others, is not in the queue.)
                        let is_elsewhere =
                            |key: &crate::lock::LockKey| request.keys.iter().all(|name| name[..] != *key.name);
                        let owner = request.owner.as_slice().into();
                        let has_concurrent_waits = state::with(|state| {
                            let waits = || state.queue.of_actor(&owner, 100);
                            let is_another = |it: &crate::lock::Waiter<_>| it.keys.iter().all(is_elsewhere);
                            waits().nth(1).is_some() || request.waited > 0 && waits().any(is_another)
                        });
                        if has_concurrent_waits {
                            self.concurrent_waiters.insert(request.owner.clone());
                        }
                        for key in &request.keys {
                            let (ones, most) =
                                self.requested_holds.entry((key.clone(), request.owner.clone())).or_default();
                            match request.holds {
                                None => *ones += 1,
                                Some(holds) => *most = holds.max(*most),
                            }
                        }
                    }
                    // Only the reply shows which bindings these requests move.
                    for (position, request) in (position..).zip(&runs).filter(|(_, request)| request.binds()) {
                        let possible_move = (position, PossibleMove::of(request, at));
                        for key in &request.keys {
                            let hold = (db, key.clone(), request.owner.clone());
                            *self.requested_bindings.entry(hold).or_default().entry(request.client).or_default() += 1;
                            let belief = self.beliefs.get_mut(&(db, key.clone(), request.owner.clone()));
                            let belief = belief.filter(|belief| {
                                belief.binding.is_some_and(|binding| binding.client != request.client)
                            });
                            belief.into_iter().for_each(|belief| belief.possible_moves.extend([possible_move]));
                        }
                    }
                    let connection = self.connections.entry(client).or_default();
                    let has_vanished = connection.has_vanished;
                    if runs.iter().any(|request| request.command == "events") {
                        (connection.read_at, connection.read_place) = (at, position);
                    }
                    if let Some(open) = connection.open.iter_mut().find(|open| open.began.is_none()) {
                        (open.began, open.db, open.at, open.steady) = (Some(position), db, at, steady);
                        if open.is_exec || commands.is_empty() {
                            open.runs = runs;
                        } else {
                            let begun = open.runs.iter_mut().zip(&runs);
                            begun.for_each(|(request, run)| request.over_session = run.over_session);
                        }
                        if has_vanished {
                            self.abandoned.extend(open.runs.iter().map(|request| (db, request.clone())));
                        }
                        let waits =
                            |request: &Request| request.of_session && (request.wait.is_some() || request.replicas > 0);
                        let of_session = (position..).zip(&open.runs).filter(|(_, request)| waits(request));
                        self.unacknowledged.extend(of_session.map(|(at, request)| Wait::of(at, open, request)));
                    }
                }
                LogEntry::Written { db, key, expired } => {
                    if !expired {
                        self.written_by_others.insert((db, key.clone()));
                    } else if self.has_stepped {
                        // Timers that were set before a forward clock step fire late by the length of the step.
                        self.busy_until = self.busy_until.max(node(|node| node.clock.mono));
                    }
                    cause(Cause::Written(db, key, expired));
                }
                LogEntry::ExpiryChanged { db, key, at } => {
                    self.expiry_changed.insert(key.clone());
                    cause(Cause::ExpiryChanged(db, key, at));
                }
                LogEntry::Flushed(db) => cause(Cause::Flushed(db)),
                LogEntry::Swapped(one, other) => {
                    cause(Cause::Swapped(one, other));
                    self.has_swapped = true;
                    self.swap(one, other);
                }
                LogEntry::Disconnected(client, unsent) => {
                    lasting.push((position, Cause::Disconnected(client)));
                    self.closed.push(client);
                    self.record_unsent_grants(unsent);
                }
                LogEntry::RoleChanged => {
                    lasting.push((position, Cause::Role));
                    self.deliveries_are_unknown = true;
                    // Bindings end. The keys of two kinds of holds stay unchanged: those that are over but could not be
                    // ended, because nothing could be written, and those that have not followed the clock step yet.
                    self.ending.clear();
                    let (began, _) = self.before;
                    let was_blocked = self.was_blocked(began);
                    let before = node(|node| node.millis().saturating_sub((node.clock.mono - began) / 1000));
                    let undecided = self.undecided_bindings(began);
                    for ((_, key, owner), belief) in &mut self.beliefs {
                        let confirmed = belief.binding.take().and_then(|binding| binding.confirmed);
                        // (A request without a received reply may have bound it.)
                        let binds = |it: &Request| it.replicas > 0 && it.binds() && it.concerns(key, owner);
                        let others = undecided.iter().filter(|(.., it)| binds(it));
                        let mut ends =
                            confirmed.into_iter().chain(others.map(|(_, at, it)| at + it.lease.unwrap_or(30_000)));
                        let is_over = was_blocked && ends.any(|at| at < before);
                        let lags = belief.follows.take().is_some();
                        if is_over || lags {
                            self.left_over.insert((key.clone(), owner.clone(), belief.token));
                        }
                        if lags {
                            (belief.promised, belief.deadline) = (0, Some(0));
                        }
                    }
                }
                LogEntry::Unblocked(_) => {}
            }
        }
    }

    /// A connection closed after the server had written a grant to it, but before the bytes were sent. The grant counts
    /// as delivered.
    pub(super) fn record_unsent_grants(&mut self, mut written: Bytes) {
        while let Some(reply) = Reply::take(&mut written) {
            reply.tokens(&mut self.sent);
        }
    }

    /// Records that an owner requests locks for which an earlier request of it may be queued. The new request may take
    /// over that position. `earlier` are the commands before it in its transaction.
    pub(super) fn record_repetition(&mut self, db: i32, request: &Request, earlier: &[Request]) {
        for key in &request.keys {
            let is_like = |it: &Request| it.command.ends_with("acquire") && it.concerns(key, &request.owner);
            let is_open = self.undecided().any(|(_, open, it)| open.db == db && is_like(it));
            let is_open = is_open || earlier.iter().any(is_like);
            let of_key = (db, key.clone(), request.owner.clone());
            if is_open || self.abandoned.iter().any(|(on, it)| *on == db && is_like(it)) {
                self.repeated_requests.insert(of_key);
            } else {
                self.repeated_requests.remove(&of_key);
            }
        }
    }

    /// Owners with a request whose outcome they have not received, or never will.
    pub(super) fn owners_without_reply(&self) -> BTreeSet<Bytes> {
        let abandoned = self.abandoned.iter().map(|(_, request)| request);
        let all = self.undecided().map(|(.., request)| request).chain(abandoned);
        all.map(|request| request.owner.clone()).filter(|owner| !owner.is_empty()).collect()
    }

    /// Two databases were swapped: recorded holds move with them.
    pub(super) fn swap(&mut self, one: i32, other: i32) {
        let moved = |db: i32| {
            if db == one {
                other
            } else if db == other {
                one
            } else {
                db
            }
        };
        fn swap<V>(map: &mut BTreeMap<Hold, V>, moved: impl Fn(i32) -> i32) {
            *map =
                std::mem::take(map).into_iter().map(|((db, key, owner), it)| ((moved(db), key, owner), it)).collect();
        }
        swap(&mut self.beliefs, moved);
        swap(&mut self.expired_holds, moved);
        swap(&mut self.ended, moved);
        swap(&mut self.newest, moved);
        swap(&mut self.requested_bindings, moved);
        for (_, cause) in &mut self.lasting {
            if let Cause::Own(_, db, _) = cause {
                *db = moved(*db);
            }
        }
        // A waiter stays in its database. It may now move the binding of the hold that the swap brought there.
        let may_bind = |(_, open, request): &(Position, &OpenRequest, &Request)| {
            request.binds() && request.wait.is_some() && [one, other].contains(&open.db)
        };
        let waits: Vec<(Position, PossibleMove, i32, Request)> = self
            .undecided()
            .filter(may_bind)
            .map(|(at, open, request)| (at, PossibleMove::of(request, open.at), open.db, request.clone()))
            .collect();
        for (position, possible_move, db, request) in waits {
            for key in &request.keys {
                let belief = self.beliefs.get_mut(&(db, key.clone(), request.owner.clone()));
                let belief =
                    belief.filter(|belief| belief.binding.is_some_and(|binding| binding.client != request.client));
                belief.into_iter().for_each(|belief| belief.possible_moves.extend([(position, possible_move)]));
            }
        }
        self.written_by_others =
            std::mem::take(&mut self.written_by_others).into_iter().map(|(db, key)| (moved(db), key)).collect();
        self.carried.clear();
    }
}

/// Whether any of these commands releases something.
pub(super) fn releases(commands: &[Vec<Bytes>]) -> bool {
    let is_release = |word: &Bytes| word.to_ascii_lowercase().ends_with(b"release");
    commands.iter().flatten().any(is_release)
}
