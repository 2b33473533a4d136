//! Events that sessions read: outcomes of waits, and heartbeats.

use super::fairness::is_same_set;
use super::records::{Binding, Cause, OpenRequest, Wait};
use super::{CONTENTION, Checker, LEASE, ONE_REPLY, Position, Violation};
use crate::redis::{Bytes, Generation, node};
use crate::request::Request;
use crate::resp::Reply;
use std::collections::BTreeSet;

impl Checker {
    /// A session read an event, in the reply to `next`.
    pub(super) fn read_event(&mut self, session: u64, event: &[Reply], next: &OpenRequest) -> Result<(), Violation> {
        let [kind, db, keys, owner, token, detail, ..] = event else {
            return Err(Violation::new(ONE_REPLY, format!("malformed event: {event:?}")));
        };
        let db = db.number().unwrap_or(0) as i32;
        let keys: Vec<Bytes> = keys.elements().iter().map(|key| key.bytes().to_vec()).collect();
        let owner = owner.bytes().to_vec();
        match kind.bytes() {
            b"heartbeat" => {
                let request = (next.began.unwrap_or(0), next.at);
                let said = String::from_utf8_lossy(detail.bytes()).into_owned();
                let next = said.split(' ').next().and_then(|next| next.parse().ok());
                self.connections.get_mut(&session).into_iter().for_each(|it| it.promised = next);
                self.heartbeats.push((session, said, request));
            }
            b"lost" => {
                let key = keys.first().cloned().unwrap_or_default();
                self.lost.push((session, db, key, owner, token.number().unwrap_or(0)));
            }
            b"unbound" => {
                for key in keys {
                    let why = detail.bytes().to_vec();
                    self.unbound_events.push((session, db, key, owner.clone(), token.number().unwrap_or(0), why));
                }
            }
            b"contended" => {
                let key = keys.first().cloned().unwrap_or_default();
                let (requests, events) = self.contended.entry((session, key, owner)).or_default();
                *events += 1;
                if events > requests {
                    return Err(Violation::new(CONTENTION, format!("session {session} received {event:?}")));
                }
            }
            what => {
                // Only a renewal can find that its owner does not hold the lock. (If no renewal is left, its outcome
                // was counted for another request.)
                let renews = |wait: &Wait| {
                    let it = &wait.request;
                    let is_its = it.command.contains("renew") && it.client == session && it.owner == owner;
                    is_its && wait.open.db == db && keys.iter().any(|key| wait.left.contains(key))
                };
                let is_of_renewal =
                    detail.bytes().starts_with(b"NOTHELD") && self.waits.iter().chain(&self.unacknowledged).any(renews);
                // What the session has sent since over its own connection had not begun then.
                let is_later =
                    |wait: &Wait| wait.open.client == session && !next.is_exec && wait.open.began > next.began;
                let fits = |wait: &Wait| {
                    let it = &wait.request;
                    let is_left = || keys.iter().any(|key| wait.left.contains(key));
                    // (Renewals do not time out.)
                    let keys_fit = match it.command.contains("renew") {
                        // (A renewal is refused as a whole, unless its owner does not hold one of the locks.)
                        true if what == b"refused" && !detail.bytes().starts_with(b"NOTHELD") => it.keys == keys,
                        true => what != b"timeout" && is_left(),
                        false => !is_of_renewal && is_same_set(&it.keys, &keys),
                    };
                    wait.open.db == db && it.client == session && it.owner == owner && keys_fit && !is_later(wait)
                };
                let unacknowledged = self.unacknowledged.iter().filter(|wait| fits(wait)).count();
                let is_known = self.waits.iter().any(fits);
                if !is_known && let Some(at) = self.unacknowledged.iter().position(fits) {
                    let wait = self.unacknowledged.remove(at);
                    // If several requests match, each may have had another outcome.
                    self.waits.push(Wait { is_optional: wait.is_optional || unacknowledged > 1, ..wait });
                }
                // It is unknown which of several similar requests ended.
                if unacknowledged > usize::from(!is_known)
                    && let Some(wait) = self.waits.iter_mut().find(|wait| fits(wait))
                {
                    wait.request.forget_terms();
                    self.unacknowledged
                        .iter_mut()
                        .filter(|wait| fits(wait))
                        .for_each(|wait| wait.request.forget_terms());
                }
                // Only a request with `REPLICAS` can lack confirmations. A request that needs an outcome is preferred
                // to one that may have been a repetition. (A renewal of what its owner does not hold fails at once, so
                // the earliest one is meant.)
                let lacks_replicas = String::from_utf8_lossy(detail.bytes()).contains(" replicas confirmed ");
                let rank = |wait: &Wait| {
                    let began = wait.open.began.filter(|_| is_of_renewal);
                    (lacks_replicas && wait.request.replicas == 0, began, wait.is_optional)
                };
                let fitting = self.waits.iter().enumerate().filter(|(_, wait)| fits(wait));
                let Some((at, _)) = fitting.min_by_key(|(_, wait)| rank(wait)) else {
                    return Err(Violation::new(
                        ONE_REPLY,
                        format!("session {session} received {event:?} without a matching request"),
                    ));
                };
                // Similar requests whose clients have not received `WAITING` yet may have been repetitions.
                self.unacknowledged.iter_mut().filter(|wait| fits(wait)).for_each(|wait| wait.is_optional = true);
                // It is unknown which of several requests ended.
                let others = self.waits.iter_mut().enumerate().filter(|(other, wait)| *other != at && fits(wait));
                let (mut like, mut replicas): (Vec<(Position, u64)>, u64) = (Vec::new(), 0);
                let begin = |open: &OpenRequest| Some((open.began?, open.at));
                let mut kinds: BTreeSet<bool> = BTreeSet::new();
                for (_, wait) in others {
                    kinds.insert(wait.request.command.contains("renew"));
                    wait.is_optional = true;
                    like.extend(begin(&wait.open));
                    replicas = replicas.max(wait.request.replicas);
                }
                kinds.extend(
                    self.unacknowledged
                        .iter()
                        .filter(|wait| fits(wait))
                        .map(|wait| wait.request.command.contains("renew")),
                );
                let Wait { mut open, mut request, mut left, repeats, .. } = self.waits[at].clone();
                if !like.is_empty() {
                    request.forget_terms();
                    request.replicas = request.replicas.max(replicas);
                }
                if request.command.contains("renew") {
                    for key in &keys {
                        left.iter().position(|it| it == key).into_iter().for_each(|at| drop(left.remove(at)));
                    }
                } else {
                    left.retain(|key| !keys.contains(key));
                }
                if repeats == 0 && left.is_empty() && what != b"granted" {
                    self.forget_move(open.began.unwrap_or(0), &request, &keys);
                }
                let is_others =
                    kinds.contains(&!request.command.contains("renew")) || self.unacknowledged.iter().any(fits);
                if is_others {
                    // It may have been the outcome of a request of the other kind, or of one whose `WAITING` was not read,
                    // and this one is still pending.
                    self.waits[at].is_optional = true;
                } else if !left.is_empty() {
                    self.waits[at].left = left;
                    self.waits[at].is_optional |= repeats > 0;
                } else if repeats > 0 && !request.command.contains("renew") {
                    self.waits[at].repeats = repeats - 1;
                    self.waits[at].is_optional = true;
                } else {
                    self.waits.remove(at);
                }
                // Another request of this owner may have re-entered the withdrawn grant over the same connection: the flags stay.
                let re_enters = |wait: &Wait| {
                    wait.open.db == db && wait.request.client == request.client && wait.request.owner == owner
                };
                if request.binds() && detail.bytes().starts_with(b"CANCELLED") && self.waits.iter().any(re_enters) {
                    self.abandoned.push((db, request.clone()));
                }
                if what == b"granted" {
                    // A hold that was unbound before this event was read is bound again.
                    let granted = token.number().unwrap_or(0);
                    let is_it = |(to, on, key, who, of, _): &&(u64, i32, Bytes, Bytes, u64, Bytes)| {
                        (*to, *on, who, *of) == (session, db, &owner, granted) && keys.contains(key)
                    };
                    let again = self.unbound_events.iter().filter(is_it);
                    let again = again.map(|(to, on, key, who, of, _)| (*to, *on, key.clone(), who.clone(), *of));
                    self.bound_again.extend(again);
                    // The event names how long the grant lasts, from when `LOCK.EVENTS` was sent.
                    let lasts = String::from_utf8_lossy(detail.bytes()).parse::<u64>();
                    let Ok(lasts) = lasts else {
                        return Err(Violation::new(LEASE, format!("malformed grant: {event:?}")));
                    };
                    let least = open.at + request.lease.unwrap_or(30_000);
                    // (The event may be the outcome of a similar request, or of one that was cancelled since: which one
                    // is unknown.)
                    // (The owner may have requested another lease since.)
                    let leases = |(at, cause): &(Position, Cause)| match cause {
                        Cause::Own(by, ..) => {
                            *at > open.began.unwrap_or(0) && keys.iter().any(|key| by.concerns(key, &owner))
                        }
                        _ => false,
                    };
                    let is_plain = request.command.ends_with("acquire") && request.replicas == 0 && !request.is_unsure;
                    let is_plain = is_plain && !self.causes.iter().chain(&self.lasting).any(leases);
                    // (A hold with `REPLICAS` ends at the confirmed deadline, even if this request re-entered it.)
                    let is_replicated = |key: &Bytes| self.replicated.contains(&(key.clone(), owner.clone()));
                    let is_plain = is_plain && !keys.iter().any(is_replicated);
                    if is_plain && !self.renewals_are_delayed && next.at + lasts + 2 < least {
                        let what =
                            format!("{event:?} at {} lasts until {}, expected {least}", next.at, next.at + lasts);
                        return Err(Violation::new(LEASE, what));
                    }
                    // It may have been the outcome of any similar request: its lease counts from the first of them.
                    like.extend(
                        self.unacknowledged.iter().filter(|wait| fits(wait)).filter_map(|wait| begin(&wait.open)),
                    );
                    let (position, at) = like.into_iter().chain(begin(&open)).min().unwrap_or((0, open.at));
                    open.at = at;
                    // (The clock may have stepped between the grant and the reading of its event.)
                    if lasts > 0 && !self.renewals_are_delayed {
                        open.at = open.at.max((next.at + lasts).saturating_sub(request.lease.unwrap_or(30_000)));
                    }
                    self.received.push((position, open, request, keys, token.clone()));
                }
            }
        }
        Ok(())
    }

    /// A heartbeat promises that renewed holds of the session last for a number of thousandths of the lease, counted
    /// from when `LOCK.EVENTS` was sent.
    pub(super) fn apply_heartbeat(&mut self, session: u64, said: &str, (began, request): (Position, u64)) {
        let Some(sure) = said.split(' ').nth(2).and_then(|sure| sure.parse::<u64>().ok()) else { return };
        let is_late = node(|node| node.generation == Generation::Redis70);
        let unseen = self.iterations.front().map_or(0, |(_, position)| *position);
        let abandoned = self.abandoned.iter().map(|(_, request)| request);
        let undecided: Vec<Request> = self.undecided().map(|(.., it)| it).chain(abandoned).cloned().collect();
        for ((_, key, owner), belief) in &mut self.beliefs {
            // A request without a received outcome may have changed the lease, or what replicas must confirm.
            // (Nor does a heartbeat cover a hold whose outcome had not been received when `LOCK.EVENTS` was sent.)
            let is_its = |binding: &Binding| {
                binding.client == session && binding.watchdog && !binding.is_unsure && binding.received < began
            };
            let is_known = !undecided.iter().any(|request| request.concerns(key, owner));
            // The heartbeat may have been composed before the last renewal. If the client read late, another command
            // may have changed the expiry since.
            let is_current =
                belief.since < began && !(self.deliveries_are_unknown && self.expiry_changed.contains(key));
            // (What a command writes at the end of an iteration, a module of Redis 7.0 sees only after those that arrive
            // next, and up to a millisecond later.)
            let mut last = self.causes.iter().rev().take_while(|(at, _)| is_late && *at > unseen);
            let is_current =
                is_current && !last.any(|(_, cause)| matches!(cause, Cause::ExpiryChanged(_, it, _) if it == key));
            if let Some(binding) = belief.binding().filter(is_its).filter(|_| is_known && is_current) {
                belief.promised = belief.promised.max(request + binding.lease * sure / 1000);
            }
        }
    }
}
