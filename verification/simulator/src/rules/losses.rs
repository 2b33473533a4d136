//! Events about losses and contention, and grants that were not delivered.

use super::records::{Belief, Cause};
use super::server::is_refusing;
use super::{CONTENTION, Checker, Hold, NOTIFIED, RELEASED, TRUE_LOSS, UNDELIVERED, Violation, show};
use crate::redis::{Bytes, node};
use crate::state::{self};
use crate::stored::{self};

impl Checker {
    /// Processes `unbound` events.
    pub(super) fn process_unbound_events(&mut self) -> Result<(), Violation> {
        let role = self.role_changed();
        let bound_again = std::mem::take(&mut self.bound_again);
        for (session, db, key, owner, token, why) in std::mem::take(&mut self.unbound_events) {
            let is_bound_again = bound_again.contains(&(session, db, key.clone(), owner.clone(), token));
            let loss = (session, key.clone(), owner.clone(), token);
            self.note_reported(&loss);
            // Each `unbound` event needs a request of its own that had bound the hold.
            let times = self.times_unbound.entry((session, key.clone(), owner.clone())).or_default();
            *times += 1;
            let of_hold = self.requested_bindings.iter().filter(|((_, name, who), _)| (name, who) == (&key, &owner));
            if *times > of_hold.filter_map(|(_, requesters)| requesters.get(&session)).sum() {
                return Err(Violation::new(NOTIFIED, format!("{times} `unbound` events: {loss:?}")));
            }
            self.unbound.insert(loss, self.position);
            // The event is not about a later binding or a later hold.
            let is_raised = |it: u64| it == token || self.fences.contains(&it);
            let is_meant = |it: &Belief| is_raised(it.token) && (why != b"replica" || it.since < role);
            let unbinds = |it: &mut Belief| {
                let is_meant = is_meant(it);
                match &mut it.binding {
                    // The session may have bound the hold again before it read the event, by one of several requests.
                    Some(binding) if binding.client == session && (why == b"taken" || is_meant && is_bound_again) => {
                        binding.is_unsure = true;
                    }
                    Some(binding) if binding.client == session && is_meant => it.binding = None,
                    _ => {}
                }
            };
            self.beliefs.entry((db, key, owner)).and_modify(unbinds);
        }
        Ok(())
    }

    /// Records that an event has reported this loss. (It may name a token that was raised before the client knew it.)
    fn note_reported(&mut self, loss: &(u64, Bytes, Bytes, u64)) {
        let is_fenced = self.fences.contains(&loss.3);
        self.due_losses.retain(|it| it != loss && !(is_fenced && (&it.1, &it.2) == (&loss.1, &loss.2)));
    }

    /// Processes `lost` events.
    pub(super) fn process_lost_events(&mut self) -> Result<(), Violation> {
        for (session, db, key, owner, token) in std::mem::take(&mut self.lost) {
            let loss = (session, key.clone(), owner.clone(), token);
            // The event names the database of the loss, which may have been swapped since.
            let were_swapped = self.causes.iter().any(|(_, cause)| matches!(cause, Cause::Swapped(..)));
            let written_by_others =
                self.written_by_others.iter().any(|(on, it)| *it == key && (*on == db || were_swapped));
            // (A lease that expired continues if the clock is set back, and may expire again.)
            let times = self.lost_events.entry(loss.clone()).or_default();
            *times += 1;
            if *times > 1 + self.steps_back && !written_by_others {
                return Err(Violation::new(NOTIFIED, format!("second `lost` event: {loss:?}")));
            }
            self.note_reported(&loss);
            if !written_by_others && self.released.contains(&((db, key.clone(), owner.clone()), token)) {
                return Err(Violation::new(RELEASED, format!("{loss:?}")));
            }
            let seen = node(|node| stored::read(node, db, &key));
            if !written_by_others && let Some(holder) = seen.of(&owner).filter(|holder| holder.token == Some(token)) {
                // A lease that was over before the clock was set back, or one that ends as soon as writes are possible.
                // (`PERSIST` restores a holder that the key still lists.)
                let was_over = match holder.deadline {
                    Some(at) => at < self.set_back,
                    None => self.expiry_changed.contains(&key),
                };
                let was_over = was_over || self.left_over.contains(&(key.clone(), owner.clone(), token));
                // (So may be one whose grant had not been read yet when the role changed.)
                let role = self.role_changed();
                let belief = self.beliefs.get(&(db, key.clone(), owner.clone()));
                let was_unread = belief.and_then(|it| it.binding).is_none_or(|binding| binding.received > role);
                let was_over = was_over || self.stepped_while_refusing && role > 0 && was_unread;
                // Where nothing can be written, it ends as soon as writes are possible.
                let was_blocked = self.was_blocked(node(|node| node.clock.mono));
                if !was_over && (was_blocked || node(|node| is_refusing(node) || node.is_paused())) {
                    self.ending.push((db, key.clone(), owner.clone(), token));
                } else if !was_over {
                    return Err(Violation::new(TRUE_LOSS, format!("{loss:?} is still held: {seen:?}")));
                }
            }
            if seen.of(&owner).is_none() {
                self.ended.insert((db, key.clone(), owner.clone()), (self.position, token));
            }
            let is_it = |(on, name, who): &Hold| (*on == db || were_swapped) && (name, who) == (&key, &owner);
            self.beliefs.retain(|hold, it| !is_it(hold) || it.token != token);
        }
        Ok(())
    }

    /// No request waits for a lock whose holder has yet to be notified of contention.
    pub(super) fn contention_is_notified(&self) -> Result<(), Violation> {
        if self.has_swapped {
            return Ok(());
        }
        let unnotified = state::with(|state| {
            let is_unnotified = |key: &&crate::lock::LockKey| state.bindings.is_armed(key.db, &key.name);
            state.queue.iter().flat_map(|waiter| waiter.keys.iter()).find(is_unnotified).cloned()
        });
        unnotified.map_or(Ok(()), |key| Err(Violation::new(CONTENTION, format!("no `contended` event for {key:?}"))))
    }

    /// Every loss is in the session's event queue by now.
    pub fn losses_are_notified(&self) -> Result<(), Violation> {
        let is_here = |client: &u64| self.connections.get(client).is_some_and(|it| !it.has_vanished);
        let is_noted = |client: u64| state::with(|state| state.sessions.unread(client) > 0);
        // A key that was renamed and renamed back exists again.
        let is_there = |key: &Bytes, owner: &Bytes, token: u64| {
            let under = |db: i32| node(|node| stored::read(node, db, key).of(owner).and_then(|it| it.token));
            (0..node(|node| node.dbs.len()) as i32).any(|db| under(db) == Some(token))
        };
        let is_lost = |(_, key, owner, token): &(u64, Bytes, Bytes, u64)| !is_there(key, owner, *token);
        match self.due_losses.iter().find(|loss| is_here(&loss.0) && !is_noted(loss.0) && is_lost(loss)) {
            Some(loss) => Err(Violation::new(NOTIFIED, format!("no `lost` event: {loss:?}"))),
            None => Ok(()),
        }
    }

    /// Holds that were reported lost while writes were refused have ended by now.
    pub(super) fn lost_holds_end(&mut self) -> Result<(), Violation> {
        for (db, key, owner, token) in std::mem::take(&mut self.ending) {
            let seen = node(|node| stored::read(node, db, &key));
            let is_brought_back = self.expiry_changed.contains(&key);
            let is_it = |holder: &stored::Holder| {
                holder.token == Some(token) && holder.deadline.map_or(!is_brought_back, |at| at >= self.set_back)
            };
            if !self.written_by_others.contains(&(db, key.clone())) && seen.of(&owner).is_some_and(is_it) {
                return Err(Violation::new(TRUE_LOSS, format!("{} is still held: {seen:?}", show(&(db, key, owner)))));
            }
        }
        Ok(())
    }

    /// No undelivered grant to a waiter holds a lock.
    pub(super) fn undelivered_grants_are_revoked(&self) -> Result<(), Violation> {
        if self.deliveries_are_unknown
            || !self.fences.is_empty()
            || state::with(|state| !state.confirmations.is_empty())
        {
            return Ok(());
        }
        let unacknowledged = self.queued.iter().filter(|(token, _)| !self.sent.contains(token));
        let unacknowledged = unacknowledged.filter(|(_, owner)| !self.keeping_owners.contains(*owner));
        for (token, owner) in unacknowledged {
            let open = self.connections.values().flat_map(|it| &it.open).flat_map(|open| &open.runs);
            let waits = self.waits.iter().chain(&self.unacknowledged).map(|wait| &wait.request);
            if open.chain(waits).any(|request| request.owner == *owner) {
                continue;
            }
            let held = node(|node| {
                let mut keys = (0..).zip(&node.dbs).flat_map(|(db, keys)| keys.keys().map(move |key| (db, key)));
                keys.find(|(db, key)| {
                    let seen = stored::read(node, *db, key);
                    let is_held = seen.of(owner).is_some_and(|holder| holder.token == Some(*token));
                    is_held && !self.written_by_others.contains(&(*db, (*key).clone()))
                })
                .map(|(db, key)| (db, key.clone(), owner.clone()))
            });
            if let Some(hold) = held {
                return Err(Violation::new(UNDELIVERED, format!("{} with token {token}", show(&hold))));
            }
        }
        Ok(())
    }
}
