//! State that ends with its connection, as plain tables: waiting requests, pending replies, bindings of holds to
//! connections, pending confirmations, and the work that all these leave for the next event-loop iteration.
//!
//! The tables never call the server, so they can be tested alone. [`State`] contains all of them. Each call of the
//! server borrows it once ([`with`]) and hands it down as `&mut State`. What the server reports meanwhile is stored as
//! a notice (`notices`).

pub mod bindings;
pub mod confirmations;
pub mod event_bytes;
pub mod pending;
pub mod sessions;
pub mod stalls;
pub mod sweep;
pub mod undelivered;

pub use bindings::{Binding, BindingFlags, BindingId, Bindings, NewBinding};
pub use confirmations::{Confirmation, ConfirmationId, Confirmations};
pub use pending::{
    Answer, HeartbeatMode, Outcome, PendingReplies, Reading, Renewal, Requester, Stage, Terms, Ticket, TokenForm,
};
pub use sessions::{Event, Kind, LossReason, Sessions};
pub use stalls::Stalls;
pub use sweep::Sweep;
pub use undelivered::{Basis, Grant, GrantId, GrantedHold, Progress, Revocation, Undelivered};

use crate::lock::serve::{Agenda, Change};
use crate::lock::{Deadline, LockKey, Millis, Owner, Queue, Token, Waiter, WaiterId, earliest};
use crate::server::blocked::Blocked;
use crate::server::clock::{Now, steady_millis};
use crate::server::discarded::Discarded;
use crate::server::{MainThread, slice};
use std::collections::VecDeque;
use std::ops::Range;

/// All tables.
#[derive(Debug, Default)]
pub struct State {
    /// The queues of waiting requests.
    pub queue: Queue<Requester>,
    /// Locks that have changed and must be examined.
    pub agenda: Agenda,
    /// Detects stalls of the server.
    pub stalls: Stalls,
    /// Pending replies.
    pub pending: PendingReplies<Blocked>,
    /// The event queues of sessions.
    pub sessions: Sessions,
    /// Holds that are bound to connections.
    pub bindings: Bindings,
    /// Undelivered grants and renewals.
    pub undelivered: Undelivered,
    /// Grants and renewals that replicas have yet to confirm.
    pub confirmations: Confirmations,
    /// Locks of which the key or fields have expired. The holds that ended this way have yet to be reported.
    pub expired: VecDeque<(LockKey, Expiry)>,
    /// The pass over all waiters and bindings, because a data set was replaced.
    pub sweep: Sweep,
    /// Tickets of the requests that were undecided when the server's role changed, as far as they have yet to be
    /// examined.
    pub undecided: Range<Ticket>,
    /// Dropped tables that have yet to be freed.
    pub discarded: Discarded,
    /// How many ms the server's clock is ahead of the steady clock. Known only while there is a session or a binding.
    ahead: Option<i64>,
}

/// The server's clock has stepped if its lead over the steady clock has changed by at least this many ms.
const STEP: u64 = 100;

/// How many ms the server's clock is ahead of the steady clock, which never steps.
fn ahead(now: Now, steady: Millis) -> i64 {
    now.millis().cast_signed().saturating_sub(steady.cast_signed())
}

/// Measures the same. Repeats the measurement if the thread was interrupted between the readings of the two clocks.
fn ahead_now() -> i64 {
    let read = || {
        let steady = steady_millis();
        (ahead(Now::read(), steady), steady_millis().saturating_sub(steady))
    };
    let mut readings = std::iter::repeat_with(read).take(100);
    let first = read();
    readings.find(|(_, took)| *took <= 1).unwrap_or(first).0
}

/// The part of a lock that has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// The key.
    Key {
        /// How many held the lock until then.
        holders: usize,
    },
    /// Some of its fields.
    Fields {
        /// How many held the lock until then.
        holders: usize,
    },
}

static STATE: MainThread<State> = MainThread::new();

/// Lends the state to `work`; see [`MainThread::with`].
pub fn with<R>(work: impl FnOnce(&mut State) -> R) -> R {
    STATE.with(work)
}

/// As [`with`], but returns `None` if the state is already lent: the server calls the module while the module is at
/// work.
pub fn try_with<R>(work: impl FnOnce(&mut State) -> R) -> Option<R> {
    STATE.try_with(work)
}

/// A request that was withdrawn.
#[derive(Debug)]
pub struct Withdrawn {
    /// The handle that unblocks its client.
    pub block: Option<Blocked>,
    /// Whether the request had been granted.
    pub was_granted: bool,
}

/// What the caller must still do about a withdrawn grant.
#[derive(Debug)]
pub enum WithdrawnGrant {
    /// Nothing: the reply or event of the grant now reports the withdrawal.
    Answered,
    /// This request was waiting for replicas, and must still be answered.
    Unconfirmed(Box<Waiter<Requester>>),
}

impl State {
    /// Records the outcome of a request for its recipient: a blocked client, or a session. `now` is when the request
    /// ended. Returns the grant that is revoked because the recipient is gone.
    pub fn end(&mut self, request: Box<Waiter<Requester>>, outcome: Outcome, now: Now) -> Option<GrantId> {
        let ended = match request.requester.on_behalf {
            pending::OnBehalf::Itself => {
                slice::count_answer();
                self.sessions.remove_wait(&request);
                let Requester { ticket, block, .. } = request.requester;
                self.pending.end(ticket, pending::End { outcome, at: now, block })
            }
            pending::OnBehalf::Session => self.notify_outcome(request, outcome, now),
        };
        let Err(Outcome::Granted(_, grant)) = ended else { return None };
        self.revoke(grant);
        Some(grant)
    }

    /// Notifies a session of the outcome of its request. Returns the outcome as an error if the session has ended.
    fn notify_outcome(&mut self, request: Box<Waiter<Requester>>, outcome: Outcome, now: Now) -> Result<(), Outcome> {
        let session = request.requester.client;
        if self.pending.take(request.requester.ticket).is_none() {
            return Err(outcome);
        }
        let grant = match &outcome {
            Outcome::Granted(_, grant) => Some(*grant),
            _ => None,
        };
        let until = grant.and_then(|id| self.undelivered.get(id)).map_or(Deadline::At(0), Grant::deadline);
        let event = self.sessions.notify_outcome(request, (outcome, until), now)?;
        if let (Some(grant), Some(event)) = (grant, event) {
            self.undelivered.set_event(grant, event);
        }
        self.wake_reader(session);
        Ok(())
    }

    /// Revokes a grant that can't be delivered: what it added is undone as soon as the server takes writes.
    pub fn revoke(&mut self, id: GrantId) {
        self.recheck_owner_requests(id);
        self.undelivered.revoke(id);
    }

    /// Records that replicas have confirmed a grant.
    pub fn confirmed(&mut self, id: GrantId) {
        self.recheck_owner_requests(id);
        self.undelivered.confirmed(id);
    }

    /// Schedules the other requests of a grant's owner for its keys, which waited while replicas confirmed it.
    fn recheck_owner_requests(&mut self, id: GrantId) {
        let grant = self.undelivered.get(id).filter(|_| self.undelivered.is(id, Progress::Confirming));
        let Some(grant) = grant.filter(|grant| self.queue.waits(&grant.owner)) else { return };
        for hold in &grant.holds {
            let key = LockKey { db: grant.home.get(), name: hold.name.clone() };
            self.agenda.note_owner(key, grant.owner.clone());
        }
    }

    /// Whether replicas have yet to confirm a grant of this lock to `owner`, or a renewal of its hold.
    pub fn awaits_replicas(&self, db: i32, name: &[u8], owner: &[u8]) -> bool {
        !self.undelivered.is_empty() && self.undelivered.confirming(db, name, owner).is_some()
    }

    /// Sends an event about a bound hold to its session. Does nothing if the connection is not a session.
    pub fn notify(&mut self, binding: &Binding, kind: Kind) {
        self.sessions.notify(binding, kind);
        self.wake_reader(binding.client);
    }

    /// Sends `contended` to the session that holds a lock: another request waits for it, or was refused because of it.
    /// Does nothing unless the session asked for this (`CONTENTION`) and has not been notified yet.
    pub fn contended(&mut self, db: i32, name: &[u8]) {
        let Some(binding) = self.bindings.take_armed(db, name) else { return };
        let binding = binding.clone();
        self.notify(&binding, Kind::Contended(binding.token));
    }

    /// Compares the clocks. Returns whether the server's clock has stepped since the last call: then the deadlines of
    /// bound holds, and the times of sessions, have been moved by the step.
    pub fn has_stepped(&mut self, now: Now) -> bool {
        if self.bindings.is_empty() && self.sessions.is_empty() {
            self.ahead = None;
            return false;
        }
        let before = *self.ahead.get_or_insert_with(ahead_now);
        if !self.seems_stepped(now) {
            return false;
        }
        let is = ahead_now();
        let by = is.saturating_sub(before);
        if by.unsigned_abs() < STEP {
            return false; // The thread was paused between the readings of the two clocks.
        }
        self.ahead = Some(is);
        let bindings = &self.bindings;
        self.undelivered.stepped(by, |db, name, owner, token| bindings.of(db, name, owner, Some(token)).is_some());
        self.bindings.stepped(by);
        self.sessions.stepped(by);
        self.pending.stepped(by, self.sessions.readers());
        true
    }

    /// Whether the server's clock seems to have stepped since the last call of [`State::has_stepped`].
    pub fn seems_stepped(&self, now: Now) -> bool {
        self.ahead.is_some_and(|before| ahead(now, steady_millis()).abs_diff(before) >= STEP)
    }

    /// Binds a hold, as [`Bindings::bind`] does.
    pub fn bind(&mut self, new: NewBinding, now: Millis) -> Option<Binding> {
        self.ahead.get_or_insert_with(ahead_now);
        let client = new.client;
        let other = self.bindings.bind(new, now);
        self.wake_reader_early(client, now);
        self.sessions.expect_again(client, now);
        other
    }

    /// Clears the flags of a binding; its hold goes on. A session keeps the binding, so that it is notified of a loss.
    pub fn clear_flags(&mut self, id: BindingId, now: Millis) {
        let stays = self.bindings.get(id).is_some_and(|binding| self.sessions.is_open(binding.client));
        self.bindings.clear_flags(id, stays, now);
    }

    /// Whether the events of a session may take so many more bytes, if `most` are allowed.
    pub fn has_room_for(&self, session: u64, bytes: usize, most: u64) -> bool {
        let used = self.sessions.bytes(session).saturating_add(self.bindings.reserved(session));
        used.saturating_add(bytes) as u64 <= most
    }

    /// Whether a hold is bound to a session, or a request waits on its behalf: then the session must read its events.
    pub fn is_needed(&self, session: u64) -> bool {
        self.bindings.has_any(session) || self.sessions.has_waits(session)
    }

    /// Answers a session's blocked `LOCK.EVENTS` early if the answer would come too late for the session's shortest
    /// lease, which a new binding may have shortened.
    fn wake_reader_early(&mut self, session: u64, now: Millis) {
        let Some(reader) = self.sessions.reader(session) else { return };
        let Some(Stage::Reading(it)) = self.pending.get(reader) else { return };
        let latest = self.bindings.shortest_lease(session).map(|lease| now.saturating_add(sessions::pace(lease)));
        if latest.is_some_and(|latest| it.reading.until.is_none_or(|until| until > latest)) {
            self.answer_reader(session, reader);
        }
    }

    /// The interval between the heartbeats of a session, in ms. `default_lease` counts if the server renews no hold for
    /// the session.
    pub fn pace(&self, session: u64, default_lease: Millis) -> Millis {
        sessions::pace(self.bindings.shortest_lease(session).unwrap_or(default_lease))
    }

    /// The request of an owner for a key that replicas have yet to confirm.
    pub fn awaiting_replicas(&self, owner: &Owner, key: &LockKey) -> Option<&Waiter<Requester>> {
        let grant = self.undelivered.get(self.undelivered.confirming(key.db, &key.name, owner)?)?;
        let Stage::Confirming(id) = self.pending.get(grant.ticket)? else { return None };
        match self.confirmations.get(*id)? {
            confirmations::ConfirmedItem::Reply { request, .. } => Some(request),
            confirmations::ConfirmedItem::Renewal(_) => None,
        }
    }

    /// Whether the recipient of a grant's reply is still there.
    pub fn is_awaited(&self, grant: &Grant) -> bool {
        let is_open = grant.on_behalf == pending::OnBehalf::Itself || self.sessions.is_open(grant.client);
        is_open && self.pending.get(grant.ticket).is_some()
    }

    /// Removes a request whose client is gone from every table, and revokes its grant.
    pub fn withdraw(&mut self, ticket: Ticket) -> Option<Withdrawn> {
        let (request, granted, block) = match self.pending.take(ticket)? {
            Stage::Waiting(id) => (self.leave(id), None, None),
            Stage::Confirming(id) => match self.confirmations.remove(id).map(|it| it.what) {
                Some(confirmations::ConfirmedItem::Reply { request, grant, .. }) => (Some(request), Some(grant), None),
                _ => (None, None, None),
            },
            Stage::Ending(end) => match end.outcome {
                Outcome::Granted(_, grant) => (None, Some(grant), end.block),
                _ => (None, None, end.block),
            },
            Stage::Reading(reader) => {
                self.end_reading(reader.client, ticket, reader.reading.until);
                (None, None, reader.block)
            }
        };
        if let Some(request) = &request {
            self.sessions.remove_wait(request);
        }
        granted.into_iter().for_each(|grant| self.revoke(grant));
        let block = request.map_or(block, |request| request.requester.block);
        Some(Withdrawn { block, was_granted: granted.is_some() })
    }

    /// Withdraws an undelivered grant, because its owner releases this lock. The caller releases the hold of this lock;
    /// the rest of the grant is revoked. Returns what the caller must still do; `None` for a renewal that replicas have
    /// confirmed.
    pub fn withdraw_granted(&mut self, id: GrantId, key: &LockKey) -> Option<WithdrawnGrant> {
        let is_confirming = self.undelivered.is(id, Progress::Confirming);
        let Grant { ticket, client, event, basis, .. } = *self.undelivered.get(id)?;
        if basis == Basis::Renewal && !is_confirming {
            return None;
        }
        self.recheck_owner_requests(id);
        self.undelivered.remove_hold(id, &key.name);
        self.undelivered.revoke(id);
        if let Some(event) = event {
            self.sessions.refuse(client, event, id, sessions::WITHDRAWN);
            return Some(WithdrawnGrant::Answered);
        }
        if let Stage::Confirming(id) = self.pending.get(ticket)?
            && let Some(confirmations::ConfirmedItem::Reply { request, .. }) =
                self.confirmations.remove(*id).map(|it| it.what)
        {
            return Some(WithdrawnGrant::Unconfirmed(request));
        }
        self.pending.end_otherwise(ticket, Outcome::Withdrawn);
        Some(WithdrawnGrant::Answered)
    }

    /// Records that a formerly bound hold is over, so that it is ended as soon as the server takes writes.
    pub fn end_later(&mut self, binding: Binding) {
        let (name, token, deadline) = (binding.name.clone(), binding.token, binding.end());
        let hold = GrantedHold { name, token, deadline, undo: u64::MAX, binding: None };
        let grant = Grant {
            home: self.bindings.home(binding.key().db),
            owner: binding.owner,
            client: binding.client,
            on_behalf: pending::OnBehalf::Session,
            ticket: self.pending.ticket(),
            basis: Basis::New,
            holds: vec![hold],
            event: None,
        };
        let id = self.undelivered.begin(grant, Progress::Delivering);
        self.undelivered.revoke(id);
    }

    /// Whether any lock may have holds that are over but have not been ended yet. This is checked before each look at a
    /// lock. So grants that are merely undelivered do not count: when thousands of readers are granted a lock together,
    /// each grant would scan all the others.
    pub fn may_have_broken(&self) -> bool {
        self.undelivered.is_revoked() || self.bindings.have_ended() || self.has_readonly_work()
    }

    /// Whether the hold that `owner` has under this token is over but has not been ended yet.
    pub fn is_broken(&self, (db, name, owner): (i32, &[u8], &[u8]), token: Option<Token>) -> bool {
        let is_over = |binding: &Binding| binding.flags.ephemeral && !self.bindings.is_live(binding);
        self.may_have_broken()
            && (self.bindings.of(db, name, owner, token).is_some_and(is_over)
                || self.undelivered.ends(db, name, owner, |client| self.sessions.is_open(client)))
    }

    /// Removes what must be revoked of a lock, before any decision is based on the lock.
    pub fn take_revoked(&mut self, db: i32, name: &[u8]) -> Vec<Revocation> {
        // `State::revoke` also schedules the requests that wait until replicas have confirmed one of these grants.
        let sessions = &self.sessions;
        let failed = self.undelivered.failed(db, name, sessions.ends(), |client| sessions.is_open(client));
        failed.into_iter().for_each(|id| self.revoke(id));
        self.undelivered.take_revoked(db, name)
    }

    /// Records that a session reads its events.
    pub fn read_by(&mut self, session: u64) {
        let read = self.bindings.read_by(session);
        self.sessions.reads(session, read);
    }

    /// Whether a hold must not be renewed, because its session has read no events since the hold was bound or last
    /// renewed.
    pub fn is_unread(&self, binding: &Binding) -> bool {
        self.bindings.is_unread(binding, self.sessions.last_read(binding.client))
    }

    /// Answers a session's blocked `LOCK.EVENTS`, if there are unread events.
    fn wake_reader(&mut self, session: u64) {
        if let Some(reader) = self.sessions.reader(session).filter(|_| self.sessions.unread(session) > 0) {
            self.answer_reader(session, reader);
        }
    }

    /// The handle of a session that is blocked in `LOCK.EVENTS`.
    pub fn reader_block(&self, session: u64) -> Option<&Blocked> {
        match self.pending.get(self.sessions.reader(session)?)? {
            Stage::Reading(reader) => reader.block.as_ref(),
            _ => None,
        }
    }

    fn answer_reader(&mut self, session: u64, reader: Ticket) {
        self.sessions.set_reader(session, None);
        self.pending.call(reader);
    }

    /// Records that the client of `ticket` is no longer blocked in `LOCK.EVENTS`. `until` is when that call would have
    /// timed out.
    pub fn end_reading(&mut self, session: u64, ticket: Ticket, until: Option<Millis>) {
        self.sessions.set_reader(session, None);
        if let Some(until) = until {
            self.pending.timeouts.remove(&(until, ticket));
        }
    }

    /// Whether any request waits for a lock.
    pub fn is_contended(&self, db: i32, name: &[u8]) -> bool {
        self.queue.waiting(db, name) > 0
    }

    /// Removes a waiter from the queue without a grant, and schedules the requests behind it.
    pub fn leave(&mut self, id: WaiterId) -> Option<Box<Waiter<Requester>>> {
        let waiter = self.queue.leave(id)?;
        self.left_without_grant(&waiter);
        Some(waiter)
    }

    /// Records that a waiter has left the queue, for whatever reason.
    pub fn left(&mut self, waiter: &Waiter<Requester>) {
        slice::count_keys(waiter.keys.len());
        if let Some(until) = waiter.until {
            self.pending.timeouts.remove(&(until, waiter.requester.ticket));
        }
    }

    /// Records that a waiter has left the queue without a grant, and schedules the requests behind it.
    pub fn left_without_grant(&mut self, waiter: &Waiter<Requester>) {
        self.left(waiter);
        for key in waiter.keys.iter().filter(|key| self.queue.waiting(key.db, &key.name) > 0) {
            self.agenda.note(key.clone(), Change::Freed);
        }
    }

    /// When the next work is due that writes nothing: a wait times out, or a blocked `LOCK.EVENTS` must be answered.
    pub fn next_timeout(&self) -> Option<Millis> {
        self.pending.timeouts.first().map(|(at, _)| *at)
    }

    /// When the next work is due that may write; 0 if there is some now. Confirmations and silent sessions are not
    /// included.
    pub fn next_work(&self) -> Option<Millis> {
        if self.has_work() {
            return Some(0);
        }
        earliest([self.queue.first_look(), self.bindings.next_due()])
    }

    /// Whether there is work to do now.
    pub fn has_work(&self) -> bool {
        let quiet = self.agenda.is_empty() && self.expired.is_empty() && self.sweep.is_over();
        !quiet || self.undelivered.is_revoked() || self.bindings.has_work() || self.has_readonly_work()
    }

    /// Whether there is work to do now that writes nothing.
    pub fn has_readonly_work(&self) -> bool {
        let is_undecided = !self.undecided.is_empty();
        is_undecided || self.bindings.has_retired() || self.sessions.has_ended_sessions() || !self.discarded.is_empty()
    }

    /// Takes the next request that was undecided when the server's role changed.
    pub fn next_undecided(&mut self) -> Option<Ticket> {
        let next = self.pending.first_in(&self.undecided);
        self.undecided.start = next.map_or(self.undecided.end, Ticket::next);
        next
    }

    /// Drops the work that only a primary does, because the server is a replica.
    pub fn forget_changes(&mut self) {
        self.undelivered.clear();
        self.forget_touches();
    }

    fn forget_touches(&mut self) {
        self.discarded.add(std::mem::take(&mut self.expired));
        self.discarded.add(std::mem::take(&mut self.agenda).into_pieces());
    }

    /// Whether unloading the module would lose anything: a waiting request, a pending confirmation, a binding, or a
    /// session.
    pub fn are_in_use(&self) -> bool {
        !(self.queue.is_empty()
            && self.confirmations.is_empty()
            && self.bindings.is_empty()
            && self.sessions.is_empty())
    }

    /// Drops pending work, because the server's role has changed and the work belongs to another server. Keeps the
    /// grants to be revoked: the server may have been a replica for less than an event-loop iteration.
    pub fn forget_work(&mut self) {
        self.forget_touches();
        self.sweep = Sweep::default();
        self.undecided = self.pending.tickets();
        self.bindings.retire_all(&mut self.discarded);
    }
}

#[cfg(test)]
mod tests;
