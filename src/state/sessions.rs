//! Sessions: connections that stand for a whole process. Everything that happens to the requests and holds of a
//! session goes into its event queue, which it reads.
//!
//! A connection becomes a session by `LOCK.SESSION`, and by nothing else; nothing is kept for any other connection.
//!
//! Events that a session may yet get are reserved in bytes when a request is admitted: a waiting request reserves its event,
//! and a bound hold the two that it may cause. So a session's events never take more memory than it was admitted for,
//! whatever other clients do.

use super::bindings::Read;
use super::event_bytes::event_bytes;
use super::pending::Ticket;
use super::{Answer, Asker, Binding, GrantId, Outcome};
use crate::lock::{Deadline, LockKey, Millis, Owner, Token, Waiter};
use crate::server::clock::Now;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// A session gets this many heartbeats during its shortest lease: if it does not, enough of the lease is
/// left to do something about it.
const SIGNS_OF_LIFE_A_LEASE: Millis = 8;

/// The fewest and the most ms between two heartbeats.
const PACES: (Millis, Millis) = (10, 10_000);

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
    /// How many bytes it takes.
    fn bytes(&self) -> usize {
        event_bytes(&self.owner, self.keys.iter().map(|key| &*key.name))
    }

    /// The server's clock has stepped by so many ms, and what was granted goes along.
    fn stepped(&mut self, by: i64) {
        if let Kind::Granted(_, deadline) = &mut self.kind {
            *deadline = deadline.stepped(by);
        }
    }
}

/// What happened to a request or a hold of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The wait ended with a grant, under this token and until then.
    Granted(Token, Deadline),
    /// The wait timed out.
    TimedOut,
    /// The wait ended with this error.
    Refused(String),
    /// The hold with this token is lost.
    Lost(Token, Why),
    /// The hold with this token is no longer watched by this server.
    Unbound(Token, Why),
    /// A request waits for the lock that is held with this token.
    Contended(Token),
}

/// Why a hold was lost or unbound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its lease ran out.
    Expired,
    /// A client broke the lock.
    Forced,
    /// Another command deleted or overwrote it.
    Changed,
    /// Its key is now served elsewhere.
    Moved,
    /// This server is now a replica.
    Replica,
    /// The hold is bound to another connection now.
    Taken,
}

impl Why {
    /// As clients read it.
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

/// An event, and, if it reports a grant, that grant.
type Letter = (Event, Option<Unheard>);

/// A grant that a session has not heard of.
#[derive(Clone, Copy, Debug)]
pub struct Unheard {
    /// The grant, which is in flight until then.
    pub grant: GrantId,
    /// When it was granted.
    pub since: Now,
}

#[derive(Debug, Default)]
struct Session {
    /// What is waited for on its behalf: locks, and renewals that are being confirmed.
    waits: BTreeSet<Ticket>,
    /// The bytes that are reserved for their events and holds.
    reserved: usize,
    /// Unread events, in order.
    mail: BTreeMap<u64, Letter>,
    next_letter: u64,
    /// The bytes that unread events take.
    unread_bytes: usize,
    /// The ticket of the client that is blocked until its next event.
    reader: Option<Ticket>,
    last_read: Read,
    silence: Silence,
    /// Within how many ms the next question is answered, as the last heartbeat said.
    promised: Option<Millis>,
}

/// Whether a session that was promised a heartbeat has to ask for its events.
#[derive(Clone, Copy, Debug, Default)]
struct Silence {
    /// When it has been silent for too long, as it is kept.
    at: Option<Millis>,
    /// After how many ms that is.
    after: Millis,
    /// It had nothing bound and nothing waiting when it should have asked: the time begins anew when it has.
    is_idle: bool,
    /// It was blocked in another command of its own when it should have asked.
    was_blocked: bool,
}

/// How many ms apart the heartbeats are for a session whose shortest lease is this.
pub fn pace(lease: Millis) -> Millis {
    let (shortest, longest) = PACES;
    (lease / SIGNS_OF_LIFE_A_LEASE).clamp(shortest, longest)
}

/// All sessions.
#[derive(Debug, Default)]
pub struct Sessions {
    by_client: BTreeMap<u64, Session>,
    /// Those that have ended. What they leave behind is dealt with piece by piece, since there may be a hundred thousand
    /// pieces.
    departed: VecDeque<Session>,
    /// When sessions have been silent for too long, as it is kept.
    silences: BTreeSet<(Millis, u64)>,
    /// How far the server's clock has stepped in all, in ms. Moments are kept by the clock as it would be without its steps,
    /// so that a step moves all of them at once.
    stepped: i64,
    waits: usize,
    letters: usize,
    /// How many have ended.
    ends: u64,
}

/// What an ended session leaves to be done.
#[derive(Debug)]
pub enum Remains {
    /// This request no longer waits.
    Wait(Ticket),
    /// This grant was never heard of.
    Grant(GrantId),
    /// An event that was never read, which leaves nothing to be done.
    Event,
}

impl Sessions {
    /// Makes a connection a session, if it is not one yet.
    pub fn open(&mut self, client: u64) {
        self.by_client.entry(client).or_default();
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.by_client.is_empty()
    }

    /// How many have ended.
    pub fn ends(&self) -> u64 {
        self.ends
    }

    /// Whether a connection is a session.
    pub fn is_open(&self, client: u64) -> bool {
        self.by_client.contains_key(&client)
    }

    /// The bytes that a session's unread events take, and those that are reserved for its waiting requests.
    pub fn bytes(&self, client: u64) -> usize {
        self.by_client.get(&client).map_or(0, |it| it.reserved.saturating_add(it.unread_bytes))
    }

    /// Whether any request waits for a session.
    pub fn has_waits(&self, client: u64) -> bool {
        self.by_client.get(&client).is_some_and(|it| !it.waits.is_empty())
    }

    /// How many sessions there are, how many requests wait on their behalf, and how many events are unread.
    pub fn sizes(&self) -> (usize, usize, usize) {
        (self.by_client.len(), self.waits, self.letters)
    }

    /// Records that a request waits on behalf of a session, and reserves so many bytes for it.
    pub fn add_wait(&mut self, client: u64, ticket: Ticket, bytes: usize) {
        let Some(session) = self.by_client.get_mut(&client) else { return };
        session.waits.insert(ticket);
        session.reserved = session.reserved.saturating_add(bytes);
        self.waits = self.waits.saturating_add(1);
    }

    /// A request no longer waits on behalf of its session, if it has one.
    pub fn remove_wait(&mut self, request: &Waiter<Asker>) {
        let Some(session) = self.by_client.get_mut(&request.asker.client) else { return };
        if session.waits.remove(&request.asker.ticket) {
            session.reserved = session.reserved.saturating_sub(request.bytes());
            self.waits = self.waits.saturating_sub(1);
        }
    }

    /// Notifies a session how one of its requests ended. What was granted lasts at least until then. Returns the place of
    /// the event, if it is one.
    ///
    /// # Errors
    ///
    /// The outcome, if there is no such session any more.
    pub fn tell(
        &mut self,
        request: Box<Waiter<Asker>>,
        (outcome, until): (Outcome, Deadline),
        now: Now,
    ) -> Result<Option<u64>, Outcome> {
        self.remove_wait(&request);
        let Waiter { keys, owner, asker: Asker { client, .. }, .. } = *request;
        if !self.is_open(client) {
            return Err(outcome);
        }
        let (kind, unheard) = match outcome {
            Outcome::Granted(Answer::Token(token) | Answer::TokenAndWait(token, _), grant) => {
                (Kind::Granted(token, until), Some(Unheard { grant, since: now }))
            }
            Outcome::Granted(Answer::Tokens(tokens), grant) => {
                for (key, token) in keys.iter().zip(tokens) {
                    let kind = token.map_or_else(
                        || Kind::Refused("NOTHELD the owner does not hold this lock".into()),
                        |token| Kind::Granted(token, until),
                    );
                    let event = Event { kind, keys: Rc::from([key.clone()]), owner: owner.clone() };
                    let unheard = token.map(|_| Unheard { grant, since: now });
                    self.put(client, event, unheard);
                }
                return Ok(None);
            }
            Outcome::TimedOut => (Kind::TimedOut, None),
            Outcome::Withdrawn => (Kind::Refused(WITHDRAWN.into()), None),
            Outcome::Refused(error) => (Kind::Refused(error), None),
        };
        Ok(self.put(client, Event { kind, keys, owner }, unheard))
    }

    /// Notifies the session that a hold is bound to, if it is one, of what happened to the hold.
    pub fn notify(&mut self, binding: &Binding, kind: Kind) {
        if self.is_open(binding.client) {
            let event = Event { kind, keys: Rc::from([binding.key()]), owner: binding.owner.clone() };
            self.put(binding.client, event, None);
        }
    }

    /// Adds an event, and returns its place.
    fn put(&mut self, client: u64, mut event: Event, unheard: Option<Unheard>) -> Option<u64> {
        let stepped = self.stepped;
        let session = self.by_client.get_mut(&client)?;
        let at = session.next_letter;
        session.next_letter = at.wrapping_add(1);
        session.unread_bytes = session.unread_bytes.saturating_add(event.bytes());
        event.stepped(stepped.saturating_neg());
        session.mail.insert(at, (event, unheard));
        self.letters = self.letters.saturating_add(1);
        Some(at)
    }

    /// Removes an unread event.
    fn take(&mut self, client: u64, at: u64) -> Option<Letter> {
        let session = self.by_client.get_mut(&client)?;
        let mut letter = session.mail.remove(&at)?;
        session.unread_bytes = session.unread_bytes.saturating_sub(letter.0.bytes());
        self.letters = self.letters.saturating_sub(1);
        letter.0.stepped(self.stepped);
        Some(letter)
    }

    /// The next unread event of a session.
    pub fn read(&mut self, client: u64) -> Option<Letter> {
        let (first, _) = self.by_client.get(&client)?.mail.first_key_value()?;
        self.take(client, *first)
    }

    /// How many unread events a session has.
    pub fn unread(&self, client: u64) -> usize {
        self.by_client.get(&client).map_or(0, |it| it.mail.len())
    }

    /// How many keys the next event of a session names.
    pub fn next_size(&self, client: u64) -> usize {
        let next = self.by_client.get(&client).and_then(|it| it.mail.first_key_value());
        next.map_or(0, |(_, (event, _))| event.keys.len())
    }

    /// Records the reader that waits for the next event of a session; `None`: there is none.
    pub fn set_reader(&mut self, client: u64, reader: Option<Ticket>) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.reader = reader;
        }
    }

    /// The reader that waits for the next event of a session.
    pub fn reader(&self, client: u64) -> Option<Ticket> {
        self.by_client.get(&client)?.reader
    }

    /// A session asks for its events.
    pub fn reads(&mut self, client: u64, read: Read) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.last_read = read;
            (session.silence.is_idle, session.silence.was_blocked) = (false, false);
        }
        self.expect(client, None);
    }

    /// The last time that a session asked for its events.
    pub fn last_read(&self, client: u64) -> Read {
        self.by_client.get(&client).map_or(Read::default(), |it| it.last_read)
    }

    /// A session must ask for its events by then, or is silent; `None`: it has asked, or needs not.
    fn expect(&mut self, client: u64, by: Option<Millis>) {
        let by = by.map(|by| by.saturating_add_signed(self.stepped.saturating_neg()));
        let Some(session) = self.by_client.get_mut(&client) else { return };
        if let Some(before) = std::mem::replace(&mut session.silence.at, by) {
            self.silences.remove(&(before, client));
        }
        self.silences.extend(by.map(|by| (by, client)));
    }

    /// A session that was promised a heartbeat must ask for its events within so many ms from now on.
    pub fn expect_within(&mut self, client: u64, after: Millis, now: Millis) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.silence.after = after;
        }
        self.expect(client, Some(now.saturating_add(after)));
    }

    /// When the first session will have been silent for too long.
    pub fn first_silence(&self) -> Option<Millis> {
        self.silences.first().map(|(at, _)| at.saturating_add_signed(self.stepped))
    }

    /// A session that should have asked for its events by now.
    pub fn take_silent(&mut self, now: Millis) -> Option<u64> {
        let client = self.silences.first()?.1;
        self.first_silence().filter(|at| *at <= now)?;
        self.expect(client, None);
        Some(client)
    }

    /// A session that should have asked for its events has nothing bound and nothing waiting, so nothing is expected of it
    /// before it has: see [`Sessions::expect_again`].
    pub fn expect_nothing(&mut self, client: u64) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.silence.is_idle = true;
        }
    }

    /// A session has something bound or waiting: if nothing was expected of it, it must ask for its events from now on.
    pub fn expect_again(&mut self, client: u64, now: Millis) {
        let Some(silence) = self.by_client.get_mut(&client).map(|it| &mut it.silence) else { return };
        if std::mem::take(&mut silence.is_idle) {
            let by = now.saturating_add(silence.after);
            self.expect(client, Some(by));
        }
    }

    /// A session that should have asked for its events may have been unable to, as long as it `is_blocked` in another command
    /// of its own, and once after that. Returns whether it may: then it is expected anew.
    pub fn excuse_blocked(&mut self, client: u64, is_blocked: bool, now: Millis) -> bool {
        let Some(silence) = self.by_client.get_mut(&client).map(|it| &mut it.silence) else { return false };
        let may_be = std::mem::replace(&mut silence.was_blocked, is_blocked) || is_blocked;
        if may_be {
            let by = now.saturating_add(silence.after);
            self.expect(client, Some(by));
        }
        may_be
    }

    /// All who wait for events.
    pub fn readers(&self) -> impl Iterator<Item = Ticket> {
        self.by_client.values().filter_map(|session| session.reader)
    }

    /// The server's clock has stepped by so many ms: sessions go along, with what they were granted, which is bound.
    pub fn stepped(&mut self, by: i64) {
        self.stepped = self.stepped.saturating_add(by);
    }

    /// A heartbeat promises that the session's next question will be answered within `pace` ms.
    pub fn promise_pace(&mut self, client: u64, pace: Millis) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.promised = Some(pace);
        }
    }

    /// Within how many ms a question is to be answered: within `pace` ms, or sooner if that was promised.
    pub fn promised_pace(&self, client: u64, pace: Millis) -> Millis {
        let promised = self.by_client.get(&client).and_then(|it| it.promised);
        promised.map_or(pace, |promised| promised.min(pace))
    }

    /// The event at this place, if it reports this grant and is unread, reports this error instead.
    pub fn refuse(&mut self, client: u64, at: u64, grant: GrantId, error: &str) {
        let letter = self.by_client.get_mut(&client).and_then(|session| session.mail.get_mut(&at));
        if let Some((event, unheard)) = letter
            && unheard.take_if(|unheard| unheard.grant == grant).is_some()
        {
            event.kind = Kind::Refused(error.into());
        }
    }

    /// A connection has ended, and its session, if it was one, with it. Returns whether it was. What it leaves behind
    /// is removed by [`Sessions::next_remains`].
    pub fn client_gone(&mut self, client: u64) -> bool {
        self.expect(client, None);
        let Some(session) = self.by_client.remove(&client) else { return false };
        self.ends = self.ends.wrapping_add(1);
        self.waits = self.waits.saturating_sub(session.waits.len());
        self.letters = self.letters.saturating_sub(session.mail.len());
        self.departed.push_back(session);
        true
    }

    /// Whether ended sessions have left anything behind.
    pub fn has_departed(&self) -> bool {
        !self.departed.is_empty()
    }

    /// The next thing that an ended session has left behind.
    pub fn next_remains(&mut self) -> Option<Remains> {
        loop {
            let departed = self.departed.front_mut()?;
            if let Some((_, (_, unheard))) = departed.mail.pop_first() {
                return Some(unheard.map_or(Remains::Event, |unheard| Remains::Grant(unheard.grant)));
            }
            if let Some(ticket) = departed.waits.pop_first() {
                return Some(Remains::Wait(ticket));
            }
            self.departed.pop_front();
        }
    }
}

#[cfg(test)]
impl Sessions {
    /// Whether the counters agree with what is stored.
    pub fn is_consistent(&self) -> bool {
        let waits = self.by_client.values().map(|it| it.waits.len()).sum::<usize>();
        let letters = self.by_client.values().map(|it| it.mail.len()).sum::<usize>();
        let of_each = |it: &Session| {
            it.unread_bytes == it.mail.values().map(|(event, _)| event.bytes()).sum::<usize>()
                && (!it.waits.is_empty() || it.reserved == 0)
        };
        (waits, letters) == (self.waits, self.letters) && self.by_client.values().all(of_each)
    }
}
