//! Sessions: connections that represent a process. The event queue of a session reports what happens to its requests
//! and holds.
//!
//! A connection becomes a session only by `LOCK.SESSION`. Other connections have no entry here.
//!
//! Bytes for possible events are reserved when a request is admitted: a waiting request reserves its event, and a bound
//! hold the two events that it may cause. So a session's events never take more memory than was admitted for
//! it, whatever other clients do.

use super::bindings::Read;
use super::event_bytes::event_bytes;
use super::pending::{OnBehalf, Ticket};
use super::{Answer, Binding, GrantId, Outcome, Requester};
use crate::lock::{Deadline, LockKey, Millis, Owner, Token, Waiter};
use crate::server::clock::Now;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// A session gets this many heartbeats during its shortest lease. If one does not arrive, enough of the lease is left
/// for the client to react.
const HEARTBEATS_PER_LEASE: Millis = 8;

/// The shortest and the longest interval between two heartbeats, in ms.
const PACE_LIMITS: (Millis, Millis) = (10, 10_000);

/// The error in the event of a request that its owner withdrew.
pub const WITHDRAWN: &str = "CANCELLED the request was withdrawn by LOCK.RELEASE with ALL";

/// An event for a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: Kind,
    /// The keys of the request or hold.
    pub keys: Rc<[LockKey]>,
    /// The owner.
    pub owner: Owner,
}

impl Event {
    /// The bytes that the event takes.
    fn bytes(&self) -> usize {
        event_bytes(&self.owner, self.keys.iter().map(|key| &*key.name))
    }

    /// Moves the deadline of a grant by a step of the server's clock, in ms.
    fn stepped(&mut self, by: i64) {
        if let Kind::Granted(_, deadline) = &mut self.kind {
            *deadline = deadline.stepped(by);
        }
    }
}

/// What happened to a request or a hold of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request was granted, or the renewal confirmed. The hold has this token, and lasts at least until this
    /// deadline.
    Granted(Token, Deadline),
    /// The wait timed out.
    TimedOut,
    /// The request ended with this error.
    Refused(String),
    /// The hold with this token is lost.
    Lost(Token, LossReason),
    /// The hold with this token is no longer watched by this server.
    Unbound(Token, LossReason),
    /// Another request waits for the lock that is held with this token, or was refused because of it.
    Contended(Token),
}

/// Why a hold was lost or unbound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossReason {
    /// Its lease ran out.
    Expired,
    /// A client released the lock by force (`LOCK.FORCE`).
    Forced,
    /// Another command deleted or overwrote it.
    Changed,
    /// Its key is now served by another node.
    Moved,
    /// This server is now a replica.
    Replica,
    /// The hold is now bound to another connection.
    Taken,
}

impl LossReason {
    /// The name that clients read.
    pub fn name(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Forced => "forced",
            Self::Changed => "changed",
            Self::Moved => "moved",
            Self::Replica => "replica",
            Self::Taken => "taken",
        }
    }
}

/// An unread event, and the grant that it reports, if any.
type QueuedEvent = (Event, Option<UnreadGrant>);

/// A grant whose event the session has not read.
#[derive(Clone, Copy, Debug)]
pub struct UnreadGrant {
    /// The grant, which is undelivered until the event is read.
    pub grant: GrantId,
    /// When it was granted.
    pub since: Now,
}

#[derive(Debug, Default)]
struct Session {
    /// The tickets of the session's pending requests: those for locks, and renewals that are being confirmed.
    waits: BTreeSet<Ticket>,
    /// The bytes reserved for the events of these requests, and of their holds; and for the holds of the request in
    /// which its own connection is blocked.
    reserved: usize,
    /// Unread events by position.
    events: BTreeMap<u64, QueuedEvent>,
    next_position: u64,
    /// The bytes that the unread events take.
    unread_bytes: usize,
    /// The ticket of the `LOCK.EVENTS` that is blocked until the next event.
    reader: Option<Ticket>,
    last_read: Read,
    silence: Silence,
    /// Within how many ms the next `LOCK.EVENTS` is answered, as the last heartbeat said.
    promised: Option<Millis>,
}

/// Detects that a session which was promised a heartbeat no longer reads its events.
#[derive(Clone, Copy, Debug, Default)]
struct Silence {
    /// When the session counts as silent, in unstepped time (see `Sessions::stepped`).
    deadline: Option<Millis>,
    /// The time from a heartbeat until then, in ms.
    patience: Millis,
    /// When the session should have read, it had no bound hold and no waiting request. Its time starts anew when it has
    /// one.
    is_idle: bool,
    /// When the session should have read, it was blocked in another command of its own.
    was_blocked: bool,
}

/// The interval between the heartbeats of a session whose shortest lease is `lease`, in ms.
pub fn pace(lease: Millis) -> Millis {
    let (shortest, longest) = PACE_LIMITS;
    (lease / HEARTBEATS_PER_LEASE).clamp(shortest, longest)
}

/// All sessions.
#[derive(Debug, Default)]
pub struct Sessions {
    by_client: BTreeMap<u64, Session>,
    /// Ended sessions. What they leave behind is removed in slices, since it may be a hundred thousand entries.
    ended: VecDeque<Session>,
    /// When sessions count as silent, in unstepped time.
    silences: BTreeSet<(Millis, u64)>,
    /// The sum of all steps of the server's clock, in ms. Times are stored as *unstepped* time: as a clock without
    /// these steps would show them. So a step moves all of them at once.
    stepped: i64,
    waits: usize,
    unread_events: usize,
    /// How many sessions have ended.
    ends: u64,
}

/// What an ended session leaves behind.
#[derive(Debug)]
pub enum Remains {
    /// A pending request, which must be withdrawn.
    Wait(Ticket),
    /// A grant whose event was not read, which must be revoked.
    Grant(GrantId),
    /// Any other unread event, which needs no work.
    Event,
}

impl Sessions {
    /// Makes a connection a session, if it is not one yet.
    pub fn open(&mut self, client: u64) {
        self.by_client.entry(client).or_default();
    }

    /// Whether there are no sessions.
    pub fn is_empty(&self) -> bool {
        self.by_client.is_empty()
    }

    /// How many sessions have ended.
    pub fn ends(&self) -> u64 {
        self.ends
    }

    /// Whether a connection is a session.
    pub fn is_open(&self, client: u64) -> bool {
        self.by_client.contains_key(&client)
    }

    /// The bytes that a session's unread events take, and those that are reserved for its pending requests.
    pub fn bytes(&self, client: u64) -> usize {
        self.by_client.get(&client).map_or(0, |it| it.reserved.saturating_add(it.unread_bytes))
    }

    /// Whether a session has any pending request.
    pub fn has_waits(&self, client: u64) -> bool {
        self.by_client.get(&client).is_some_and(|it| !it.waits.is_empty())
    }

    /// How many sessions there are, how many requests they have pending, and how many events are unread.
    pub fn sizes(&self) -> (usize, usize, usize) {
        (self.by_client.len(), self.waits, self.unread_events)
    }

    /// Reserves the bytes of a pending request, if its client is a session, and records it if it is made on behalf of
    /// the session.
    pub fn add_wait(&mut self, requester: &Requester) {
        let Some(session) = self.by_client.get_mut(&requester.client) else { return };
        session.reserved = session.reserved.saturating_add(requester.reserved);
        if requester.on_behalf == OnBehalf::Session {
            session.waits.insert(requester.ticket);
            self.waits = self.waits.saturating_add(1);
        }
    }

    /// Removes a pending request that [`Sessions::add_wait`] added.
    pub fn remove_wait(&mut self, request: &Waiter<Requester>) {
        let requester = &request.requester;
        let Some(session) = self.by_client.get_mut(&requester.client) else { return };
        session.reserved = session.reserved.saturating_sub(requester.reserved);
        if session.waits.remove(&requester.ticket) {
            self.waits = self.waits.saturating_sub(1);
        }
    }

    /// Notifies a session of the outcome of one of its requests. What was granted lasts at least until the given
    /// deadline. Returns the event's position in the queue; `None` if each key has an event of its own.
    ///
    /// # Errors
    ///
    /// The outcome, if the session has ended.
    pub fn notify_outcome(
        &mut self,
        request: Box<Waiter<Requester>>,
        (outcome, until): (Outcome, Deadline),
        now: Now,
    ) -> Result<Option<u64>, Outcome> {
        self.remove_wait(&request);
        let Waiter { keys, owner, requester: Requester { client, .. }, .. } = *request;
        if !self.is_open(client) {
            return Err(outcome);
        }
        let (kind, unread_grant) = match outcome {
            Outcome::Granted(Answer::Token(token) | Answer::TokenAndWait(token, _), grant) => {
                (Kind::Granted(token, until), Some(UnreadGrant { grant, since: now }))
            }
            Outcome::Granted(Answer::Tokens(tokens), grant) => {
                for (key, token) in keys.iter().zip(tokens) {
                    let kind = token.map_or_else(
                        || Kind::Refused("NOTHELD the owner does not hold this lock".into()),
                        |token| Kind::Granted(token, until),
                    );
                    let event = Event { kind, keys: Rc::from([key.clone()]), owner: owner.clone() };
                    let unread_grant = token.map(|_| UnreadGrant { grant, since: now });
                    self.put(client, event, unread_grant);
                }
                return Ok(None);
            }
            Outcome::TimedOut => (Kind::TimedOut, None),
            Outcome::Withdrawn => (Kind::Refused(WITHDRAWN.into()), None),
            Outcome::Refused(error) => (Kind::Refused(error), None),
        };
        Ok(self.put(client, Event { kind, keys, owner }, unread_grant))
    }

    /// Sends an event about a bound hold to its session. Does nothing if the connection is not a session.
    pub fn notify(&mut self, binding: &Binding, kind: Kind) {
        if self.is_open(binding.client) {
            let event = Event { kind, keys: Rc::from([binding.key()]), owner: binding.owner.clone() };
            self.put(binding.client, event, None);
        }
    }

    /// Appends an event to the queue, and returns its position.
    fn put(&mut self, client: u64, mut event: Event, unread_grant: Option<UnreadGrant>) -> Option<u64> {
        let stepped = self.stepped;
        let session = self.by_client.get_mut(&client)?;
        let at = session.next_position;
        session.next_position = at.wrapping_add(1);
        session.unread_bytes = session.unread_bytes.saturating_add(event.bytes());
        event.stepped(stepped.saturating_neg());
        session.events.insert(at, (event, unread_grant));
        self.unread_events = self.unread_events.saturating_add(1);
        Some(at)
    }

    /// Removes an unread event.
    fn take(&mut self, client: u64, at: u64) -> Option<QueuedEvent> {
        let session = self.by_client.get_mut(&client)?;
        let mut queued = session.events.remove(&at)?;
        session.unread_bytes = session.unread_bytes.saturating_sub(queued.0.bytes());
        self.unread_events = self.unread_events.saturating_sub(1);
        queued.0.stepped(self.stepped);
        Some(queued)
    }

    /// Takes the next unread event of a session.
    pub fn read(&mut self, client: u64) -> Option<QueuedEvent> {
        let (first, _) = self.by_client.get(&client)?.events.first_key_value()?;
        self.take(client, *first)
    }

    /// How many unread events a session has.
    pub fn unread(&self, client: u64) -> usize {
        self.by_client.get(&client).map_or(0, |it| it.events.len())
    }

    /// How many keys the next event of a session names.
    pub fn next_size(&self, client: u64) -> usize {
        let next = self.by_client.get(&client).and_then(|it| it.events.first_key_value());
        next.map_or(0, |(_, (event, _))| event.keys.len())
    }

    /// Records the `LOCK.EVENTS` that is blocked until the next event of a session; `None`: there is none.
    pub fn set_reader(&mut self, client: u64, reader: Option<Ticket>) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.reader = reader;
        }
    }

    /// The ticket of the `LOCK.EVENTS` that is blocked until the next event of a session.
    pub fn reader(&self, client: u64) -> Option<Ticket> {
        self.by_client.get(&client)?.reader
    }

    /// Records that a session reads its events.
    pub fn reads(&mut self, client: u64, read: Read) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.last_read = read;
            (session.silence.is_idle, session.silence.was_blocked) = (false, false);
        }
        self.expect(client, None);
    }

    /// The last time that a session read its events.
    pub fn last_read(&self, client: u64) -> Read {
        self.by_client.get(&client).map_or(Read::default(), |it| it.last_read)
    }

    /// Sets the time by which a session must read its events, or else counts as silent; `None`: it has read, or need
    /// not.
    fn expect(&mut self, client: u64, by: Option<Millis>) {
        let by = by.map(|by| by.saturating_add_signed(self.stepped.saturating_neg()));
        let Some(session) = self.by_client.get_mut(&client) else { return };
        if let Some(before) = std::mem::replace(&mut session.silence.deadline, by) {
            self.silences.remove(&(before, client));
        }
        self.silences.extend(by.map(|by| (by, client)));
    }

    /// Requires a session, which was promised a heartbeat, to read its events within so many ms from now.
    pub fn expect_within(&mut self, client: u64, after: Millis, now: Millis) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.silence.patience = after;
        }
        self.expect(client, Some(now.saturating_add(after)));
    }

    /// When the first session counts as silent.
    pub fn first_silence(&self) -> Option<Millis> {
        self.silences.first().map(|(at, _)| at.saturating_add_signed(self.stepped))
    }

    /// Takes a session that has not read its events in time.
    pub fn take_silent(&mut self, now: Millis) -> Option<u64> {
        let client = self.silences.first()?.1;
        self.first_silence().filter(|at| *at <= now)?;
        self.expect(client, None);
        Some(client)
    }

    /// Records that a silent session has no bound hold and no waiting request. It need not read its events before it
    /// has one: see [`Sessions::expect_again`].
    pub fn expect_nothing(&mut self, client: u64) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.silence.is_idle = true;
        }
    }

    /// Records that a session has a bound hold or a waiting request. If it did not have to read its events, its time
    /// starts now.
    pub fn expect_again(&mut self, client: u64, now: Millis) {
        let Some(silence) = self.by_client.get_mut(&client).map(|it| &mut it.silence) else { return };
        if std::mem::take(&mut silence.is_idle) {
            let by = now.saturating_add(silence.patience);
            self.expect(client, Some(by));
        }
    }

    /// Excuses a silent session that `is_blocked` in another command of its own, or was when it was last checked: it
    /// could not read. Its time then starts anew. Returns whether it is excused.
    pub fn excuse_blocked(&mut self, client: u64, is_blocked: bool, now: Millis) -> bool {
        let Some(silence) = self.by_client.get_mut(&client).map(|it| &mut it.silence) else { return false };
        let may_be = std::mem::replace(&mut silence.was_blocked, is_blocked) || is_blocked;
        if may_be {
            let by = now.saturating_add(silence.patience);
            self.expect(client, Some(by));
        }
        may_be
    }

    /// The tickets of all sessions that are blocked in `LOCK.EVENTS`.
    pub fn readers(&self) -> impl Iterator<Item = Ticket> {
        self.by_client.values().filter_map(|session| session.reader)
    }

    /// Records that the server's clock has stepped by so many ms. The times of sessions, and the deadlines in their
    /// events, which are those of bound holds, move by the step.
    pub fn stepped(&mut self, by: i64) {
        self.stepped = self.stepped.saturating_add(by);
    }

    /// Records that a heartbeat promised to answer the session's next `LOCK.EVENTS` within `pace` ms.
    pub fn promise_pace(&mut self, client: u64, pace: Millis) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.promised = Some(pace);
        }
    }

    /// Within how many ms a `LOCK.EVENTS` must be answered: `pace`, or less if the last heartbeat promised that.
    pub fn promised_pace(&self, client: u64, pace: Millis) -> Millis {
        let promised = self.by_client.get(&client).and_then(|it| it.promised);
        promised.map_or(pace, |promised| promised.min(pace))
    }

    /// Lets the event at this position report this error, if it is unread and reports this grant.
    pub fn refuse(&mut self, client: u64, at: u64, grant: GrantId, error: &str) {
        let queued = self.by_client.get_mut(&client).and_then(|session| session.events.get_mut(&at));
        if let Some((event, unread_grant)) = queued
            && unread_grant.take_if(|unread_grant| unread_grant.grant == grant).is_some()
        {
            event.kind = Kind::Refused(error.into());
        }
    }

    /// Records that a connection has ended, and its session with it. [`Sessions::next_remains`] removes what the
    /// session leaves behind. Returns whether the connection was a session.
    pub fn client_gone(&mut self, client: u64) -> bool {
        self.expect(client, None);
        let Some(session) = self.by_client.remove(&client) else { return false };
        self.ends = self.ends.wrapping_add(1);
        self.waits = self.waits.saturating_sub(session.waits.len());
        self.unread_events = self.unread_events.saturating_sub(session.events.len());
        self.ended.push_back(session);
        true
    }

    /// Whether ended sessions must still be removed.
    pub fn has_ended_sessions(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Takes the next entry that an ended session has left behind.
    pub fn next_remains(&mut self) -> Option<Remains> {
        loop {
            let ended = self.ended.front_mut()?;
            if let Some((_, (_, unread_grant))) = ended.events.pop_first() {
                return Some(unread_grant.map_or(Remains::Event, |unread_grant| Remains::Grant(unread_grant.grant)));
            }
            if let Some(ticket) = ended.waits.pop_first() {
                return Some(Remains::Wait(ticket));
            }
            self.ended.pop_front();
        }
    }
}

#[cfg(test)]
impl Sessions {
    /// Whether the counters agree with what is stored.
    pub fn is_consistent(&self) -> bool {
        let waits = self.by_client.values().map(|it| it.waits.len()).sum::<usize>();
        let unread_events = self.by_client.values().map(|it| it.events.len()).sum::<usize>();
        let of_each = |it: &Session| {
            it.unread_bytes == it.events.values().map(|(event, _)| event.bytes()).sum::<usize>()
                && (!it.waits.is_empty() || it.reserved == 0)
        };
        (waits, unread_events) == (self.waits, self.unread_events) && self.by_client.values().all(of_each)
    }
}
