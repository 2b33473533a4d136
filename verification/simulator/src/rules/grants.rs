//! Grants and renewals: what a hold's owner may rely on after each.

use super::records::{
    Belief, Binding, Cause, OpenRequest, PossibleMove, PossibleMoves, ReceivedToken, earliest_requested,
};
use super::{Checker, Hold, Position};
use crate::redis::{Bytes, node};
use crate::request::Request;
use crate::stored::{self};

impl Checker {
    /// Requests without a received reply that bind the same hold to another connection: later ones, and queued ones,
    /// which may be granted later.
    pub(super) fn bound_later(&self, position: Position, request: &Request, key: &[u8]) -> PossibleMoves {
        let binds = |it: &Request| it.binds() && it.client != request.client && it.concerns(key, &request.owner);
        let may_be_later = |at: Position, it: &Request| at > position || at < position && it.wait.is_some();
        let later = self.undecided().filter(|(at, _, it)| may_be_later(*at, it) && binds(it));
        // The outcome of a wait may be that of an earlier similar request, or of the last one.
        let repeated = self.waits.iter().filter(|wait| wait.latest > position && binds(&wait.request));
        let repeated = repeated.map(|wait| (wait.latest, PossibleMove::of(&wait.request, wait.open.at)));
        later.map(|(at, open, it)| (at, PossibleMove::of(it, open.at))).chain(repeated).collect()
    }

    /// Whether another connection received the outcome of a queued request in this iteration. It may have been granted
    /// after this one, although it was sent before.
    pub(super) fn has_concurrent_binding(&self, request: &Request, key: &[u8]) -> bool {
        let binds = |it: &Request| it.binds() && it.client != request.client && it.concerns(key, &request.owner);
        self.replied.iter().any(|(_, it)| it.wait.is_some() && binds(it))
    }

    /// The database of a hold that was requested in `db`. Otherwise, the databases that were swapped since. None has this
    /// token: it may have been raised, or the hold has ended and what is there is another one of this owner. Or several
    /// have it, because the lock was copied.
    fn current_db(&self, (request, db): (Position, i32), hold: (&[u8], &[u8]), token: u64) -> Result<i32, Vec<i32>> {
        let (key, owner) = hold;
        let other = |(at, cause): &(Position, Cause)| match cause {
            Cause::Swapped(one, two) if *at > request && *one == db => Some(*two),
            Cause::Swapped(one, two) if *at > request && *two == db => Some(*one),
            _ => None,
        };
        let mut dbs: Vec<i32> = [db].into_iter().chain(self.causes.iter().filter_map(other)).collect();
        dbs.sort_unstable();
        dbs.dedup();
        let is_there = |db: &&i32| node(|node| stored::read(node, **db, key).of(owner)?.token) == Some(token);
        match dbs.iter().filter(is_there).collect::<Vec<_>>()[..] {
            [there] => Ok(*there),
            [] if dbs.len() == 1 => Ok(db),
            _ => Err(dbs),
        }
    }

    /// Whether a request without a received reply may have bound a hold.
    fn may_be_bound(&self, (key, owner): (&[u8], &[u8])) -> bool {
        let abandoned = self.abandoned.iter().map(|(_, request)| request);
        let mut requests = self.undecided().map(|(.., request)| request).chain(abandoned);
        requests.any(|request| request.binds() && request.concerns(key, owner))
    }

    /// The least lease of a request that names none. A renewal uses the lease of the binding, as far as it is known.
    pub(super) fn default_lease(&self, hold: &Hold, request: &Request) -> u64 {
        let binding = self.beliefs.get(hold).and_then(Belief::binding);
        match binding {
            Some(binding) if request.command.contains("renew") && binding.is_unsure => 0,
            Some(binding) if request.command.contains("renew") => binding.lease.min(30_000),
            // (A request without a received reply may have bound it.)
            None if request.command.contains("renew") && self.may_be_bound((&hold.1, &hold.2)) => 0,
            _ => 30_000,
        }
    }

    /// An owner received a grant or a renewal.
    pub(super) fn record_grant(
        &mut self,
        position: Position,
        open: &OpenRequest,
        request: &Request,
        key: &[u8],
        token: u64,
    ) {
        let db = match self.current_db((position, open.db), (key, &request.owner), token) {
            Ok(db) => db,
            Err(dbs) => {
                if request.binds() {
                    self.perhaps_bound.insert((key.to_vec(), request.owner.clone()));
                }
                for db in dbs {
                    let Some(belief) = self.beliefs.get_mut(&(db, key.to_vec(), request.owner.clone())) else {
                        continue;
                    };
                    belief.raises.clear();
                    belief.limit = u32::MAX;
                    if request.binds() {
                        belief.note_possible_binding(Binding::of(request, (position, self.position), open.at));
                    }
                }
                return;
            }
        };
        let hold = (db, key.to_vec(), request.owner.clone());
        // A late reply about a hold that has ended since. (A queued request is granted later than it was sent, but
        // never under the token of a hold that had ended by then.)
        let is_old = |(ended, of): &(Position, u64)| *ended > position && (request.wait.is_none() || *of == token);
        if self.ended.get(&hold).is_some_and(is_old) {
            return;
        }
        // Nor is it news if a swap has brought back an earlier hold of the owner: the granted one had ended before.
        let there = node(|node| stored::read(node, hold.0, key).of(&request.owner).and_then(|holder| holder.token));
        let is_earlier = |it: u64| it < token && !self.fences.contains(&token);
        if self.has_swapped && there.is_some_and(is_earlier) {
            return;
        }
        let of_binding = (request.client, key.to_vec(), request.owner.clone(), token);
        if request.is_unsure && request.ephemeral {
            self.perhaps_ephemeral.insert(of_binding.clone());
        }
        let ends = open.at + request.lease.unwrap_or_else(|| self.default_lease(&hold, request));
        if let Some(newer) = self.beliefs.get_mut(&hold).filter(|it| it.token > token) {
            // A late reply about a hold that has ended since, or about this one, bound before its token was raised.
            if request.binds() && self.fences.contains(&newer.token) {
                newer.note_possible_binding(Binding::of(request, (position, self.position), ends));
            }
            return;
        }
        let is_raised = |it: &&Belief| it.token == token || request.fence == Some(token);
        // (Unless the owner has requested the lock again, and may hold it under another limit.)
        let acquires = |it: &Request| it.command.ends_with("acquire") && it.concerns(key, &request.owner);
        // (By a request without a received reply, by one whose client will never receive any, or by one whose reply came in
        // this iteration: the swap of databases may hide which hold it was granted.)
        let may_be_another = || {
            let others = self.abandoned.iter().chain(&self.replied).map(|(_, it)| it);
            self.undecided().map(|(.., it)| it).chain(others).any(acquires)
        };
        let is_again = |it: &&Belief| self.set_back > 0 && (it.token == token || !may_be_another());
        let known = self.beliefs.get(&hold).or_else(|| self.expired_holds.get(&hold).filter(is_again));
        let mut before = known.filter(is_raised).cloned();
        // (It was over, and reported lost, but still there: another command has changed its expiry.)
        let over = before.clone().filter(|it| it.deadline.is_some_and(|at| at < open.at));
        self.expired_holds.extend(over.map(|it| (hold.clone(), it)));
        if let Some(before) = &mut before {
            let since = before.since;
            let since = |(at, _): &&(Position, Cause)| *at > since;
            let later = self.causes.iter().rev().take_while(since).chain(self.lasting.iter().rev().take_while(since));
            let later = later.filter(|(at, _)| *at < position);
            // (In any database, because they may have been swapped since.)
            let later: Vec<&Cause> = later.map(|(_, cause)| cause).collect();
            let were_swapped = later.iter().any(|cause| matches!(cause, Cause::Swapped(..)));
            let here = |db: i32| db == open.db || were_swapped;
            let shortens = |cause: &&Cause| match cause {
                Cause::Own(by, db, _) => here(*db) && by.concerns(key, &request.owner),
                Cause::Written(db, written, _) | Cause::ExpiryChanged(db, written, _) => here(*db) && written == key,
                _ => false,
            };
            if later.iter().any(shortens) {
                (before.promised, before.deadline) = (0, None);
                // Replicas may have confirmed the value that the expiry had in between.
                let shortest = |cause: &&&Cause| match cause {
                    Cause::Own(by, _, at) if by.command.contains("renew") => Some(at + by.lease.unwrap_or(30_000)),
                    Cause::Own(by, _, at) => Some(at + by.lease?),
                    _ => Some(0),
                };
                let shortest = later.iter().filter(|cause| shortens(cause)).filter_map(|it| shortest(&it)).min();
                if let Some(Binding { confirmed: Some(confirmed), .. }) = &mut before.binding {
                    *confirmed = shortest.map_or(*confirmed, |shortest| shortest.min(*confirmed));
                }
            }
        }
        // It was released, and another command has written it again: the new one is not bound.
        let is_rewritten = before.as_ref().filter(|before| before.token == token).is_some_and(|before| {
            let (first, last) = (position.min(before.since), position.max(before.since));
            let causes = || self.causes.iter().chain(&self.lasting).filter(|(at, _)| (first + 1..last).contains(at));
            let releases = |cause: &Cause| cause.releases(key, &request.owner);
            let writes = |cause: &Cause| matches!(cause, Cause::Written(_, written, false) if written == key);
            let released = causes().filter(|(_, cause)| releases(cause)).map(|(at, _)| *at).min();
            released.is_some_and(|released| causes().any(|(at, cause)| *at > released && writes(cause)))
        });
        if let Some(Binding { is_unsure, .. }) = before.as_mut().and_then(|it| it.binding.as_mut()) {
            *is_unsure |= is_rewritten;
        }
        let is_before = before.as_ref().is_some_and(|before| before.since > position);
        if let Some(before) = before.as_mut().filter(|before| before.token != token) {
            // If another command has written the key since, the raised token may belong to another hold, which is not
            // bound.
            let written_by_others = |(at, cause): &(Position, Cause)| match cause {
                Cause::Written(_, written, expired) => *at > before.since && written == key && !expired,
                _ => false,
            };
            let is_another = self.causes.iter().any(written_by_others);
            let bound = before.binding;
            // The same applies if the hold ended and a request without a received reply acquired the lock again.
            let ends = |cause: &Cause| match cause {
                Cause::Forced(_, ended) | Cause::Written(_, ended, _) => ended == key,
                Cause::Flushed(_) => true,
                Cause::Own(by, ..) => !by.command.contains("renew") && by.concerns(key, &request.owner),
                Cause::Disconnected(client) => bound.is_some_and(|it| it.ephemeral && it.client == *client),
                _ => false,
            };
            let ended = self.causes.iter().chain(&self.lasting).filter(|(at, it)| *at > before.since && ends(it));
            let ended = ended.map(|(at, _)| *at).min();
            let is_acquired_again = ended.is_some_and(|ended| {
                self.undecided().any(|(at, _, it)| at > ended && acquires(it))
                    || self.waits.iter().any(|wait| wait.latest > ended && acquires(&wait.request))
                    || self.abandoned.iter().any(|(_, it)| acquires(it))
            });
            if is_another || is_acquired_again {
                before.binding.iter_mut().for_each(|binding| binding.is_unsure = true);
                before.raises.clear();
                before.limit = u32::MAX;
            }
        }
        if before.is_some() {
            self.renewed.insert(request.owner.clone());
        }
        let lease = request.lease.unwrap_or(30_000);
        let renews = request.command.contains("renew");
        let promised = match &before {
            // Sent before the reply that is already recorded: its promise no longer counts.
            Some(before) if before.since > position => before.promised,
            Some(before) if !renews || request.lease.is_none() => before.promised.max(ends),
            _ => ends,
        };
        let bound = request.binds() || request.is_unsure;
        // Bindings end when the role changes, and this request may have been granted afterwards.
        // A request of another connection without a received reply may have moved the binding.
        // A request of the same connection without a received reply, or one of several like requests, may have made the hold
        // ephemeral.
        let may_be_ephemeral = |it: &Request| {
            it.client == request.client && it.ephemeral && !request.ephemeral && it.concerns(key, &request.owner)
        };
        let is_unsure = request.is_unsure
            || is_rewritten && is_before
            || self.role_changed() > position
            || self.has_concurrent_binding(request, key)
            || self.undecided().any(|(.., it)| may_be_ephemeral(it))
            || !request.ephemeral && self.perhaps_ephemeral.contains(&of_binding);
        let mut possible_moves = self.bound_later(position, request, key);
        let binding = Binding { is_unsure, ..Binding::of(request, (position, self.position), ends) };
        // Another request raised the token. It is the same hold, unless that one ended unseen.
        let is_raised_since = |it: &&Belief| before.is_none() && it.token < token && self.fences.contains(&token);
        let binding_before = self.beliefs.get(&hold).filter(is_raised_since).and_then(|it| it.binding);
        // (What binds a hold whose grant is not on record is unknown: that of a raised token might have ended, and a token that
        // another command wrote may be less than that of an earlier hold.)
        let is_perhaps_bound = self.perhaps_bound.contains(&(hold.1.clone(), hold.2.clone()));
        let is_requested = self.requested_bindings.contains_key(&hold);
        // (A hold that was on record under this token has not ended, although another token showed there.)
        let was_known = self.newest.get(&hold).is_some_and(|it| it.token == token);
        let may_be_bound = is_perhaps_bound || is_requested && (renews || was_known || self.fences.contains(&token));
        let binds_it = || before.is_none() && may_be_bound;
        // (Nor is it known since when, how, and what its replicas have confirmed.)
        let is_replicated = self.replicated.contains(&(hold.1.clone(), hold.2.clone()));
        let confirmed = is_replicated.then_some(0);
        let unknown = Binding { at: 0, watchdog: true, ephemeral: true, confirmed, ..binding };
        let binding_before = binding_before.or_else(|| binds_it().then_some(unknown));
        let binding_before = binding_before.map(|binding| Binding { is_unsure: true, ..binding });
        let old_binding = before.as_ref().and_then(|it| it.binding).or(binding_before);
        let mut raises = before.as_mut().map_or_else(Vec::new, |it| std::mem::take(&mut it.raises));
        // The count that a queued request sets depends on when it was granted.
        if !renews && !request.is_unsure && (request.holds.is_none() || request.wait.is_none()) {
            raises.push((position, request.holds));
            raises.sort_by_key(|(position, _)| *position);
        }
        let since = position.max(before.as_ref().map_or(0, |it| it.since));
        let limit = before.as_ref().map_or(u32::MAX, |it| it.limit).min(if renews { u32::MAX } else { request.limit });
        let known = before.as_ref().and_then(|it| it.deadline);
        let sets = renews && request.lease.is_some();
        // (Of a request that was sent before one whose reply is recorded already, the deadline has been seen since.)
        let is_late = before.as_ref().is_some_and(|before| before.since >= position);
        let deadline = match known {
            Some(known) if is_late => Some(known),
            Some(known) if !sets => Some(known.max(ends)),
            _ => Some(ends),
        };
        // (A queued request may have made its binding after its outcome was received.)
        let has_ended = |old: &Binding| {
            let role = self.role_changed();
            (old.at..position).contains(&role) && !(old.is_unsure && old.received > role)
        };
        let same = old_binding.filter(|old| old.client == binding.client && !has_ended(old));
        let both = |old: Binding| {
            let (watchdog, ephemeral) = (binding.watchdog || old.watchdog, binding.ephemeral || old.ephemeral);
            // A request that does not name a flag adds no knowledge about the flag.
            let keeps = old.watchdog && !binding.watchdog || old.ephemeral && !binding.ephemeral;
            let is_unsure = binding.is_unsure || old.is_unsure && keeps;
            Binding { watchdog, ephemeral, is_unsure, ..binding }
        };
        let flagless = !request.watchdog && !request.ephemeral;
        // (Its binding may have been made before or after that of a later request with another lease.)
        let is_older = |old: &Binding| old.at > position && old.lease != lease;
        let both = |old: Binding| {
            let both = both(old);
            // (What replicas have confirmed of a later request counts. One of several like requests may have had no
            // flags, and have left the binding as it was.)
            let confirmed = match old.confirmed {
                Some(before) if request.is_unsure => Some(both.confirmed.map_or(before, |at| at.min(before))),
                before => before.filter(|_| old.at >= position).or(both.confirmed),
            };
            Binding {
                at: old.at.max(position),
                lease: if flagless { old.lease } else { lease },
                longest: if flagless { old.longest } else { binding.longest },
                is_unsure: both.is_unsure || is_older(&old),
                confirmed,
                ..both
            }
        };
        let shortened = |old: Binding| Binding { confirmed: old.confirmed.map(|at| at.min(ends)), ..old };
        let waited =
            self.replied.iter().any(|(_, it)| it.wait.is_some() && it.binds() && it.concerns(key, &request.owner));
        let binding =
            Binding { is_unsure: is_unsure || waited && old_binding.is_some_and(|old| old.is_unsure), ..binding };
        let earliest = |of_last: Option<u64>, of_other: Option<u64>| {
            of_last.into_iter().chain(of_other.map(|at| at.max(promised))).min()
        };
        let was_queued_elsewhere = |(_, it): &(i32, Request)| {
            let is_queued = it.wait.is_some() && it.replicas > 0 && it.binds();
            is_queued && it.client != request.client && it.concerns(key, &request.owner)
        };
        let binding = match old_binding {
            _ if request.unbind => None,
            _ if !bound => old_binding.map(shortened),
            // A request without flags keeps the binding of its session.
            Some(old) if same.is_some() && flagless && request.replicas == 0 => Some(shortened(old)),
            // (A queued request may have been granted after a request that was sent later. Its replicas have then
            // confirmed no less than was promised before.)
            Some(old) if old.at > position && old.client != binding.client => {
                let was_queued = request.wait.is_some();
                let confirmed = earliest(old.confirmed, binding.confirmed.filter(|_| was_queued));
                Some(Binding { is_unsure: old.is_unsure || was_queued, confirmed, ..old })
            }
            // (So may the earlier request, if its outcome was received in this iteration.)
            Some(old) if old.client != binding.client && self.replied.iter().any(was_queued_elsewhere) => {
                Some(Binding { confirmed: earliest(binding.confirmed, old.confirmed), ..binding })
            }
            _ => Some(same.map_or(binding, both)),
        };
        // A late reply about a hold that has ended since. (A queued request may be granted after a request that was
        // sent later.)
        let is_news = self.newest.get(&hold).is_none_or(|it| it.at <= position || it.token < token);
        if !is_news && !self.beliefs.contains_key(&hold) {
            return;
        }
        if is_news {
            self.newest.insert(hold.clone(), ReceivedToken { token, at: position });
        }
        if self.unbound.get(&of_binding).is_some_and(|at| *at <= position) {
            self.unbound.remove(&of_binding);
        }
        possible_moves.extend(self.beliefs.get(&hold).into_iter().flat_map(|it| it.possible_moves.clone()));
        // A request without flags keeps a binding of its session, even one that the checker is unsure about.
        let is_its = |possible_move: &&PossibleMove| {
            binding.is_some_and(|binding| {
                binding.client == possible_move.client && !binding.watchdog && !binding.ephemeral
            })
        };
        let confirmed = possible_moves
            .values()
            .filter(is_its)
            .find_map(|possible_move| possible_move.confirmed)
            .filter(|_| request.replicas == 0);
        let binding = match confirmed {
            Some(confirmed) => binding.map(|binding| {
                let confirmed = binding.confirmed.map_or(confirmed, |at| at.min(confirmed));
                Binding { confirmed: Some(confirmed), is_unsure: true, ..binding }
            }),
            None => binding,
        };
        // A request that the owner sent before this reply may have shortened the lease.
        let causes = self.causes.iter().chain(&self.lasting);
        let shortest = earliest_requested(causes, (key, &request.owner), position);
        let binding = binding.map(|binding| Binding {
            confirmed: binding.confirmed.map(|at| shortest.map_or(at, |it| it.min(at))),
            ..binding
        });
        possible_moves.retain(|at, possible_move| {
            *at != position && binding.is_some_and(|binding| binding.client != possible_move.client)
        });
        // For a request with `REPLICAS`, the replicas have confirmed its deadline; for others, only the earlier one.
        let known = before.as_ref().and_then(|it| it.known).filter(|_| request.replicas == 0);
        let seen = position;
        // (Another deadline hides whether the watchdog had renewed the hold right before.)
        let renewed = before.as_ref().map_or(0, |it| it.renewed).max(if bound || sets { open.at } else { 0 });
        // If databases were swapped, the binding moved here and not in the other database.
        self.forget_move(position, request, std::slice::from_ref(&hold.1));
        self.beliefs.insert(
            hold,
            Belief {
                token,
                since,
                seen,
                promised,
                deadline,
                renewed,
                limit,
                raises,
                binding,
                known,
                follows: None,
                has_stepped: before.as_ref().is_some_and(|it| it.has_stepped),
                had_expired: false,
                ended_unreported: false,
                is_left: before.as_ref().is_some_and(|it| it.is_left),
                possible_moves,
            },
        );
    }

    /// A refused request has moved no binding of these keys.
    pub(super) fn forget_move(&mut self, position: Position, request: &Request, keys: &[Bytes]) {
        for ((_, key, owner), belief) in &mut self.beliefs {
            if request.owner == *owner && keys.contains(key) {
                belief.possible_moves.remove(&position);
            }
        }
    }
}
