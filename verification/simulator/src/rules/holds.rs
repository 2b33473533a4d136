//! Holds: each lasts as long as its owner was promised, and no longer than its binding allows.

use super::records::{Belief, Binding, Cause, PossibleMove, earliest_requested, holds_at_least};
use super::server::is_refusing;
use super::{
    CONFIRMED, COUNTED, Checker, EPHEMERAL, HANDLED_WITHIN, HELD, Hold, IDLE_TIME, LEASE, LIMIT, Position, REQUESTED,
    STEPPED, Violation, WATCHED, show,
};
use crate::redis::{Bytes, Node, node, slot_of};
use crate::request::Request;
use crate::server::Role;
use crate::server::clock::Now;
use crate::state::{self};
use crate::stored::{self};
use std::collections::BTreeMap;
use std::collections::BTreeSet;

impl Checker {
    /// A bound hold with `REPLICAS` ends at the deadline that its replicas have confirmed.
    pub(super) fn unconfirmed_holds_end(&self) -> Result<(), Violation> {
        if self.confirms_at == u64::MAX {
            return Ok(()); // They still confirm.
        }
        let now = node(|node| node.millis());
        let is_over = |belief: &Belief| {
            // (After its client has disconnected, the key's own expiry counts.)
            let is_connected = |binding: &Binding| !binding.is_unsure && self.connections.contains_key(&binding.client);
            let confirmed = belief.binding().filter(is_connected).and_then(|binding| binding.confirmed);
            confirmed.is_some() && belief.known.is_some_and(|known| known.saturating_add(HANDLED_WITHIN) < now)
        };
        for (hold, belief) in self.beliefs.iter().filter(|(_, belief)| is_over(belief)) {
            let (db, key, owner) = hold;
            // A request without a received reply may have bound it without replicas.
            let bindings = |request: &Request| request.binds() && request.concerns(key, owner);
            if self.abandoned.iter().any(|(_, request)| bindings(request))
                || self.undecided().any(|(.., request)| bindings(request))
            {
                continue;
            }
            let seen = node(|node| stored::read(node, *db, key));
            let is_there = seen.of(owner).is_some_and(|holder| holder.token == Some(belief.token));
            if is_there && !self.written_by_others.contains(&(*db, key.clone())) {
                return Err(Violation::new(CONFIRMED, format!("{}: {belief:?}", show(hold))));
            }
        }
        Ok(())
    }

    /// The requests without an outcome that may bind a hold so that it ends early: where each began, when, and the request. Of
    /// connections that have just closed, only those whose lease was not over at the `last` iteration: a hold that was still there
    /// did not end by that. (Unless nothing could be written, it has another lease, which goes on, or the watchdog has
    /// renewed it since.)
    pub(super) fn undecided_bindings(&self, last: u64) -> Vec<(Position, u64, Request)> {
        let seen_at = node(|node| node.millis().saturating_sub(node.clock.mono.saturating_sub(last) / 1000));
        // (One of several like requests: the last of them came later.)
        let is_repeated =
            |began: Position| self.waits.iter().any(|wait| wait.open.began == Some(began) && wait.latest > began);
        let undecided = self.undecided().filter(|(began, open, it)| {
            let lasted = self.has_stepped
                || self.was_blocked(last)
                || is_repeated(*began)
                || open.at + it.lease.unwrap_or(30_000) + HANDLED_WITHIN >= seen_at;
            let goes_on = |((_, key, owner), belief): (&Hold, &Belief)| {
                let is_watched = belief.binding.is_some_and(|binding| binding.watchdog);
                (it.ephemeral || it.watchdog || is_watched) && it.concerns(key, owner)
            };
            (it.replicas > 0 || it.ephemeral)
                && (lasted || !self.closed.contains(&it.client) || self.beliefs.iter().any(goes_on))
        });
        undecided.map(|(at, open, it)| (at, open.at, it.clone())).collect()
    }

    /// Checks each hold. `undecided` are the [`Checker::undecided_bindings`], those of connections included that closed in this
    /// iteration.
    pub(super) fn check_holds(&mut self, undecided: &[(Position, u64, Request)]) -> Result<(), Violation> {
        let (role, now, mono) = node(|node| (node.role, node.millis(), node.clock.mono));
        let confirms = mono <= self.confirms_at;
        let (mut ended, mut expired_holds) = (Vec::new(), Vec::new());
        let changes_binding = |request: &Request| request.binds() || request.unbind;
        let unacknowledged: Vec<Request> =
            self.undecided().map(|(.., request)| request.clone()).filter(changes_binding).collect();
        let is_blocked = node(|node| is_refusing(node) || node.is_paused()) || self.before.1;
        let lags = |(db, key, owner): &Hold| {
            state::with(|state| {
                let is_bound = state.bindings.client_of(*db, key, owner).is_some();
                state.bindings.lags_of(*db, key, owner) || is_bound && state.seems_stepped(Now::read())
            })
        };
        for (hold, belief) in &mut self.beliefs {
            let (db, key, owner) = hold;
            let bound = belief.binding();
            let seen = node(|node| stored::read(node, *db, key));
            let (since, last) = (belief.since, belief.seen);
            let causes = || {
                let at_once = self.causes.iter().rev().take_while(move |(position, _)| *position > last);
                let later = self.lasting.iter().rev().take_while(move |(position, _)| *position > since);
                at_once.chain(later)
            };
            // If another command changed the expiry, or wrote the key with one, replicas may have confirmed any value in
            // between.
            let may_be_any = self.expiry_changed.contains(key) || self.written_by_others.contains(&(*db, key.clone()));
            let requested_since = |position: Position| {
                earliest_requested(self.causes.iter().chain(&self.lasting), (key, owner), position)
            };
            // A bound hold with `REPLICAS` ends at the confirmed deadline, whatever was written since.
            // (The same applies if a request without a received reply bound it: no earlier than that request's lease,
            // nor than the earlier promise.)
            let has_bound = |(began, at, it): &(Position, u64, Request)| {
                // (A renewal with a lease may shorten it.)
                let sets = it.command.contains("renew") && it.lease.is_some();
                // (A later request with a lease may have raised the promise since.)
                let later = requested_since(*began);
                let promised = if since < *began && !sets && later.is_none() { belief.promised } else { 0 };
                let confirmed = promised.max(at + it.lease.unwrap_or(30_000));
                let confirmed = later.map_or(confirmed, |at| at.min(confirmed));
                it.replicas > 0 && it.binds() && it.concerns(key, owner) && (confirmed < now || may_be_any)
            };
            // (Or a request that may have received the outcome of a similar one.)
            let may_have_bound = |(began, possible_move): (&Position, &PossibleMove)| {
                let promised = if since < *began { belief.promised } else { 0 };
                possible_move.confirmed.is_some_and(|at| promised.max(at) < now || may_be_any)
            };
            let is_past = |binding: Binding| {
                let requested = || requested_since(binding.at).is_some_and(|at| at < now);
                binding.confirmed.is_some_and(|at| at < now || may_be_any || requested())
            };
            let is_unconfirmed = belief.binding.is_some_and(is_past)
                || undecided.iter().any(has_bound)
                || belief.possible_moves.iter().any(may_have_bound);
            // A greater token belongs to a request that has no reply yet. It is another hold, unless `FENCE` named the
            // token. If the lease of this hold was over by then, or what replicas have confirmed of it, the other hold's
            // deadline must not be taken for its own.
            let confirmed = belief.binding.and_then(|binding| binding.confirmed);
            let was_over = [belief.deadline, confirmed].into_iter().flatten().any(|at| at < now) || is_unconfirmed;
            let is_its = |token: u64| {
                token == belief.token || token > belief.token && (!was_over || self.fences.contains(&token))
            };
            let holder = seen.of(owner).filter(|holder| holder.token.is_none_or(is_its));
            // An expiry that was changed in this iteration may be over already.
            let changes_expiry = |(_, cause): &(Position, Cause)| match cause {
                Cause::ExpiryChanged(on, expiry_changed, _) => on == db && expiry_changed == key,
                _ => false,
            };
            let is_over = belief.had_expired
                || belief.deadline.is_some_and(|at| at < now)
                || is_unconfirmed
                || causes().any(changes_expiry);
            let has_requested = |client: u64| {
                let of_hold = self.requested_bindings.iter().filter(|((_, name, who), _)| (name, who) == (key, owner));
                of_hold.flat_map(|(_, requesters)| requesters.keys()).any(|asker| *asker == client)
            };
            // Holds that other commands wrote are not counted, nor are releases if databases were swapped.
            let counts = !self.written_by_others.iter().any(|(_, it)| it == key);
            let least = || {
                let all = self.causes.iter().chain(&self.lasting);
                if counts {
                    holds_at_least(&belief.raises, all.filter(|(_, cause)| cause.releases(key, owner)))
                } else {
                    0
                }
            };
            let may_end_by = |(_, cause): &(Position, Cause), time: u64| match cause {
                Cause::Own(request, on, at) => {
                    // Each release ends one of the holds that the owner received. A renewal, or a release with `LEASE`,
                    // may shorten the lease.
                    // (A clock step moves the deadline.)
                    let is_past = |lease: u64| at + lease <= time || self.has_stepped;
                    let has_shortened = request.lease.is_some_and(is_past);
                    let releases_all = has_shortened || request.command.ends_with("release") && least() == 0;
                    // A hold with a raised token is also found by its old token.
                    let is_named =
                        |token: u64| token == belief.token || self.fences.iter().any(|fence| *fence >= token);
                    on == db && request.concerns(key, owner) && request.token.is_none_or(is_named) && releases_all
                }
                Cause::Forced(on, forced) => on == db && forced == key,
                Cause::Written(on, written, expired) => on == db && written == key && (!expired || is_over),
                Cause::ExpiryChanged(..) => false,
                Cause::Flushed(on) => on.is_none_or(|on| on == *db),
                Cause::Swapped(one, other) => one == db || other == db,
                Cause::Disconnected(client) => {
                    let ends = |binding: Binding| {
                        binding.is_unsure && has_requested(*client) || binding.ephemeral && binding.client == *client
                    };
                    let written_by_others = self.written_by_others.contains(&(*db, key.clone()));
                    // A request without a received reply may have bound the hold to that connection.
                    let abandoned = self.abandoned.iter().map(|(_, request)| request);
                    let unacknowledged = abandoned
                        .chain(undecided.iter().map(|(.., request)| request))
                        .any(|request| request.ephemeral && request.client == *client && request.concerns(key, owner));
                    written_by_others || unacknowledged || bound.is_some_and(ends)
                }
                Cause::Role => true,
            };
            let may_end = |it: &&(Position, Cause)| may_end_by(it, now);
            if let Some(holder) = holder.filter(|it| it.token == Some(belief.token))
                && holder.holds < belief.raises.iter().map(|(_, to)| to.unwrap_or(1)).sum()
                && holder.holds < least()
            {
                let what = format!("{}: {} of {} holds", show(hold), holder.holds, least());
                return Err(Violation::new(COUNTED, what));
            }
            if let Some(holder) = holder.filter(|it| it.holds > 1 && counts) {
                let (ones, most) = self.requested_holds.get(&(key.clone(), owner.clone())).copied().unwrap_or_default();
                if holder.holds > ones + most {
                    return Err(Violation::new(REQUESTED, format!("{}: {} holds", show(hold), holder.holds)));
                }
            }
            if let Some(holder) = holder {
                let owns = |(_, cause): &(Position, Cause)| match cause {
                    Cause::Own(request, on, _) => on == db && request.concerns(key, owner),
                    Cause::Written(on, written, _) | Cause::ExpiryChanged(on, written, _) => on == db && written == key,
                    Cause::Flushed(_) | Cause::Swapped(..) | Cause::Role => true,
                    Cause::Forced(..) | Cause::Disconnected(_) => false,
                };
                // A renewal that raised the token has ended nothing, whether or not its reply is read.
                let raises = |cause: &Cause| match cause {
                    Cause::Own(by, ..) => by.fence.is_some() && by.fence == holder.token,
                    _ => false,
                };
                let raised = causes().filter_map(|(at, cause)| match cause {
                    Cause::Own(_, _, time) if raises(cause) => Some((*at, *time)),
                    _ => None,
                });
                let (raised, time) = raised.min().unwrap_or((Position::MAX, now));
                let mut ends = causes().filter(|it| it.0 < raised && !raises(&it.1) && may_end_by(it, time));
                if holder.token.is_some_and(|token| token > belief.token) && ends.next().is_some() {
                    ended.push(hold.clone());
                    continue;
                }
                // If another command has written a hold of the same owner after this one was released or forced, that one is
                // not bound.
                let writes = |cause: &Cause| match cause {
                    Cause::Written(on, written, expired) => on == db && written == key && !expired,
                    _ => false,
                };
                let written = causes().filter(|(_, cause)| writes(cause)).map(|(at, _)| *at).max();
                let ends = |cause: &Cause| matches!(cause, Cause::Own(..) | Cause::Forced(..) | Cause::Flushed(_));
                let mut ends = causes().filter(may_end).filter(|(_, cause)| ends(cause));
                if ends.any(|(at, _)| Some(*at) < written) {
                    belief.binding.iter_mut().for_each(|binding| binding.is_unsure = true);
                }
                // (A hold that has expired by now ends as soon as writes are possible.)
                let lags = lags(hold) || belief.follows.is_some_and(|at| is_blocked || at < now);
                belief.is_left &= lags || is_blocked;
                // A hold with a deadline of its own lasts no longer than the expiry that another command gave the key, even if
                // the grant of another holder has replaced that expiry since.
                let shortens = |cause: &Cause| match cause {
                    Cause::ExpiryChanged(on, changed, at) => at.filter(|_| on == db && changed == key),
                    _ => None,
                };
                let shortest = causes().filter_map(|(_, cause)| shortens(cause)).min().filter(|_| belief.limit > 1);
                belief.promised = shortest.map_or(belief.promised, |at| at.min(belief.promised));
                if let Some(at) = holder.deadline.filter(|at| *at < belief.promised && !lags) {
                    if !causes().any(owns) {
                        let what = format!("{}: expires at {at}, promised {}", show(hold), belief.promised);
                        let rule = if belief.has_stepped { STEPPED } else { LEASE };
                        return Err(Violation::new(rule, what));
                    }
                    belief.promised = at;
                }
                if let Some(at) = belief.follows.take_if(|_| !lags)
                    && holder.deadline.is_some_and(|later| later > at)
                    && bound.is_some_and(|binding| !binding.watchdog && !binding.is_unsure)
                    && !causes().any(owns)
                    && !may_be_any
                    && !self.stepped_while_refusing
                    && !self.requests_since_step.iter().any(|request| request.concerns(key, owner))
                {
                    let what = format!("{}: expires at {:?}, expected {at}", show(hold), holder.deadline);
                    return Err(Violation::new(STEPPED, what));
                }
                // What is over is reported even while writes are refused: not at all if its connection is no session yet. (Another
                // command may have removed the token, which ends the binding.)
                let is_session =
                    |binding: Binding| self.connections.get(&binding.client).is_some_and(|it| it.was_session);
                let is_over =
                    is_unconfirmed || holder.token.is_none() || lags && belief.deadline.is_some_and(|at| at < now);
                belief.ended_unreported |= is_over && !bound.is_some_and(is_session);
                // (While nothing can be written, it is still there.)
                belief.had_expired |= is_unconfirmed && is_blocked;
                if lags {
                    continue;
                }
                // If the grant was received only after a clock step, the lease may have ended before the key could
                // follow. The hold is then unbound, and ends as soon as writes are possible, whatever its key says.
                let received_late = |binding: Binding| {
                    self.steps.iter().any(|at| (binding.at..binding.received).contains(at))
                        && (self.connections.contains_key(&binding.client) || self.closed.contains(&binding.client))
                };
                let is_bound = || state::with(|state| state.bindings.client_of(*db, key, owner).is_some());
                let stays_over = belief.had_expired || bound.is_some_and(received_late);
                // (So does one that is over when another command changes the expiry of its key.)
                let was_over = self.expiry_changed.contains(key) && belief.deadline.is_some_and(|at| at < now);
                if stays_over && !is_bound() {
                    // (It stays over when its connection closes.)
                    belief.had_expired |= belief.deadline.is_some_and(|at| at < now);
                    // (An earlier expiry of its key still counts.)
                    belief.deadline = belief.deadline.into_iter().chain(holder.deadline).min();
                } else if !was_over {
                    belief.deadline = holder.deadline;
                }
                if confirms || belief.known.is_none() {
                    belief.known = Some(belief.known.unwrap_or(0).max(holder.deadline.unwrap_or(u64::MAX)));
                }
                // A request without a received reply may have given it a shorter lease.
                let shortest = |binding: Binding| {
                    let request = self
                        .abandoned
                        .iter()
                        .map(|(_, request)| request)
                        .filter(|request| request.binds())
                        .chain(&unacknowledged);
                    let request =
                        request.filter(|request| request.client == binding.client && request.concerns(key, owner));
                    request.map(|request| request.lease.unwrap_or(30_000)).chain([binding.lease]).min()
                };
                let lease = belief.binding.and_then(shortest).unwrap_or(0);
                let renewed = holder.deadline.unwrap_or(0).saturating_sub(lease);
                belief.renewed = belief.renewed.max(renewed.min(now));
                if let Some(Binding { confirmed: Some(confirmed), .. }) = &mut belief.binding {
                    *confirmed = (*confirmed).min(holder.deadline.unwrap_or(u64::MAX));
                }
                // A hold that another command wrote can't be identified.
                if holder.token == Some(belief.token) && !self.written_by_others.contains(&(*db, key.clone())) {
                    belief.seen = self.position;
                }
                continue;
            }
            let found: Vec<&Cause> = causes().filter(may_end).map(|(_, cause)| cause).collect();
            // The key can't follow the clock step while writes are refused.
            if lags(hold) {
                continue;
            }
            // A key that another node may serve is not written here, and keys that other commands wrote are left
            // unchanged.
            let may_be_left = node(|node| node.slots.is_some()) || may_be_any;
            if found.is_empty() && belief.has_stepped && may_be_left {
                ended.push(hold.clone());
                continue;
            }
            if found.is_empty() && !is_over {
                let what = format!("{} with token {}: {seen:?}", show(hold), belief.token);
                let rule = if belief.has_stepped { STEPPED } else { HELD };
                return Err(Violation::new(rule, what));
            }
            // Every renewal counts if replicas have confirmed promptly for a whole lease.
            let is_confirmed_in_time =
                |binding: Binding| binding.lease >= 400 && mono > self.slow_at + (binding.lease + IDLE_TIME) * 1000;
            let watched = bound.filter(|binding| {
                let is_connected =
                    binding.watchdog && !binding.is_unsure && self.connections.contains_key(&binding.client);
                is_connected && (binding.confirmed.is_none() || is_confirmed_in_time(*binding))
            });
            // A session's hold is renewed only if the session has sent `LOCK.EVENTS` since the last renewal, and in
            // time.
            let was_due = |binding: Binding| {
                let reader = self.connections.get(&binding.client).filter(|it| it.read_place > binding.received);
                let read_at = reader.map_or(0, |it| it.read_at);
                let end = belief.deadline.unwrap_or(u64::MAX);
                // (A request of the session that waits for replicas binds the hold again once they confirm, before its
                // outcome is received.)
                let bindings_anew =
                    |it: &Request| it.replicas > 0 && it.client == binding.client && it.concerns(key, owner);
                let is_known = !unacknowledged.iter().any(bindings_anew);
                !binding.of_session || is_known && read_at > belief.renewed + 2 && read_at + 5 < end
            };
            // (A node does not renew holds in slots that it does not serve.)
            let is_served =
                |node: &mut Node| node.slots.as_ref().is_none_or(|slots| slots.refusal(slot_of(key), false).is_none());
            let is_left_alone = !self.renewals_are_delayed
                && !self.expiry_changed.contains(key)
                && !bound.is_some_and(|binding| binding.has_moved(&self.moved_slots, key))
                && node(is_served);
            // (A renewal without a received reply may have ended the watch.)
            let renews = |cause: &Cause| match cause {
                Cause::Own(by, on, _) => on == db && by.command.contains("renew") && by.concerns(key, owner),
                _ => false,
            };
            let by_its_lease = found.iter().all(|cause| matches!(cause, Cause::Written(.., true)))
                && !causes().any(|(_, cause)| renews(cause));
            if by_its_lease && watched.is_some_and(was_due) && is_left_alone {
                return Err(Violation::new(WATCHED, format!("{} expired", show(hold))));
            }
            if is_over {
                expired_holds.push(hold.clone());
            }
            let is_release = |cause: &&Cause| match cause {
                Cause::Own(request, ..) => request.lease.is_none(),
                _ => false,
            };
            // (If the hold had expired before the clock was set back, its session was notified then, and may read the
            // event later.)
            let had_expired = self.expired_holds.get(hold).is_some_and(|it| it.token == belief.token);
            // (If it was still there after an earlier release, the revocation of another grant has ended it. So it may be if a
            // grant of several locks is withdrawn by another of them.)
            let withdraws = |cause: &Cause| match cause {
                Cause::Own(by, ..) if by.owner == *owner && by.holds == Some(0) => {
                    let concerns = |it: &Request, key: &[u8]| it.concerns(key, owner);
                    let is_of_both =
                        |it: &Request| concerns(it, key) && by.keys.iter().any(|other| concerns(it, other));
                    !concerns(by, key) && unacknowledged.iter().any(is_of_both)
                }
                _ => false,
            };
            let is_of_now = causes().filter(may_end).all(|(at, _)| *at > self.iteration);
            // (Nor need the key have followed the clock step.)
            let is_of_now = is_of_now && !(belief.has_stepped && may_be_left);
            let is_of_now = is_of_now && !causes().any(|(_, cause)| withdraws(cause));
            // (Nor is it known whether the release came first if a connection with an undelivered grant has just closed.)
            let is_undelivered =
                |request: &Request| self.closed.contains(&request.client) && request.concerns(key, owner);
            let is_of_now = is_of_now && !self.abandoned.iter().any(|(_, request)| is_undelivered(request));
            if !found.is_empty() && is_of_now && !is_over && !had_expired && found.iter().all(is_release) {
                self.released.insert((hold.clone(), belief.token));
            }
            let others_end =
                found.iter().all(|cause| matches!(cause, Cause::Forced(..) | Cause::Written(..) | Cause::Flushed(_)));
            if let Some(binding) = bound.filter(|binding| !binding.is_unsure)
                && others_end
                && !belief.ended_unreported
                && role == Role::Primary
                // (A hold in a slot of another node is unbound, not lost.)
                && !node(|node| node.slots.as_ref().is_some_and(|slots| slots.elsewhere.contains(&slot_of(key))))
                && self.connections.get(&binding.client).is_some_and(|it| it.was_session && !it.has_vanished)
            {
                let loss = (binding.client, key.clone(), owner.clone(), belief.token);
                // A request without a received reply may have bound it to another connection, or unbound it.
                let abandoned = self.abandoned.iter().map(|(_, request)| request);
                let abandoned = abandoned.filter(|request| changes_binding(request));
                let is_sure = !abandoned.chain(&unacknowledged).any(|request| request.concerns(key, owner));
                // (The event names the token that a request without a received reply has raised.)
                let is_event = |(client, name, who, token): &(u64, Bytes, Bytes, u64)| {
                    let is_its = *token == belief.token || self.fences.contains(token);
                    is_its && (client, name, who) == (&binding.client, key, owner)
                };
                let is_lost = self.lost_events.keys().any(is_event);
                // (Not one that was read before the hold was bound.)
                let mut unbound = self.unbound.iter();
                let is_unbound = unbound.any(|(of, at)| *of == loss || is_event(of) && *at > binding.at);
                if is_sure && !is_lost && !is_unbound {
                    self.due_losses.insert(loss);
                }
            }
            ended.push(hold.clone());
        }
        let expired_holds =
            expired_holds.into_iter().filter_map(|hold| Some((hold.clone(), self.beliefs.get(&hold)?.clone())));
        self.expired_holds.extend(expired_holds);
        for hold in ended {
            let belief = self.beliefs.remove(&hold);
            if let Some(Belief { token, .. }) = belief
                && node(|node| stored::read(node, hold.0, &hold.1)).of(&hold.2).is_none()
            {
                self.ended.insert(hold, (self.position, token));
            }
        }
        self.connections.values_mut().for_each(|it| it.was_session = it.is_session);
        Ok(())
    }

    pub(super) fn check_limits(&self) -> Result<(), Violation> {
        let mut locks: BTreeMap<(i32, &Bytes), Vec<(&Bytes, &Belief)>> = BTreeMap::new();
        for ((db, key, owner), belief) in &self.beliefs {
            locks.entry((*db, key)).or_default().push((owner, belief));
        }
        for ((db, key), holders) in locks {
            let limit = holders.iter().map(|(_, it)| it.limit).min().unwrap_or(u32::MAX);
            if holders.len() > limit as usize && !self.written_by_others.contains(&(db, key.clone())) {
                let owners: Vec<String> = holders.iter().map(|(owner, _)| owner.escape_ascii().to_string()).collect();
                return Err(Violation::new(LIMIT, format!("{} is held by {owners:?}", key.escape_ascii())));
            }
        }
        Ok(())
    }

    /// An ephemeral hold ends with its connection.
    pub(super) fn ephemeral_holds_end(&self) -> Result<(), Violation> {
        let ended = |binding: &Binding| {
            binding.ephemeral && !binding.is_unsure && !self.connections.contains_key(&binding.client)
        };
        for (hold, belief) in self.beliefs.iter().filter(|(_, belief)| belief.binding().as_ref().is_some_and(ended)) {
            let (db, key, owner) = hold;
            let seen = node(|node| stored::read(node, *db, key));
            let is_there = seen.of(owner).is_some_and(|holder| holder.token == Some(belief.token));
            // If several connections requested a binding, an undelivered grant may have moved it.
            // (In any database: a waiter stays in its own when they are swapped.)
            let of_hold = self.requested_bindings.iter().filter(|((_, name, who), _)| (name, who) == (key, owner));
            let alone = of_hold.flat_map(|(_, requesters)| requesters.keys()).collect::<BTreeSet<_>>().len() == 1;
            if is_there
                && alone
                && !self.written_by_others.contains(&(*db, key.clone()))
                // (While a slot migrates, only expiry ends the hold.)
                && !self.expiry_changed.contains(key)
                // (When its slot has moved, the hold is unbound, even if the slot has come back since.)
                && !belief.binding.is_some_and(|binding| binding.has_moved(&self.moved_slots, key))
                && node(|node| node.serves(*db, key))
            {
                return Err(Violation::new(EPHEMERAL, format!("{}: {belief:?}", show(hold))));
            }
        }
        Ok(())
    }
}
