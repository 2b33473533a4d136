//! Sessions: connections that stand for a whole process. Everything that happens to the requests and holds of a
//! session goes into its mailbox, which it reads.
//!
//! A connection becomes a session when a request names it as one or when it reads its mailbox; before that, nothing
//! is kept for it.

use super::owed::{About, Ticket};
use super::ties::Read;
use super::{Answer, GrantId, Outcome, Tie};
use crate::lock::{Deadline, LockKey, Map, Millis, Owner, Token};
use crate::server::clock::Now;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// This many times during its shortest lease, a session hears that it is alive: if it does not, enough of the lease is
/// left to do something about it.
const SIGNS_OF_LIFE_A_LEASE: Millis = 8;

/// The fewest and the most ms between two signs of life.
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
    /// Somebody waits for what is held under this token.
    Contended(Token),
}

/// Why a hold was lost or unbound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its lease ran out.
    Expired,
    /// Somebody broke the lock.
    Forced,
    /// Another command deleted or overwrote it.
    Changed,
    /// Its key is now served elsewhere.
    Moved,
    /// This server is now a replica.
    Replica,
    /// The hold is tied to another connection now.
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
    /// Unread events, in order.
    mail: BTreeMap<u64, Letter>,
    next_letter: u64,
    reader: Option<Reader>,
    last_read: Read,
    /// When it has been silent for too long, having been promised a sign of life.
    silent_at: Option<Millis>,
    /// Within how many ms the next question is answered, as the last sign of life said.
    promised: Option<Millis>,
}

/// The blocked client that waits for a session's next event.
#[derive(Clone, Copy, Debug)]
pub struct Reader {
    /// The name of the answer that it is owed.
    pub ticket: Ticket,
    /// When it is answered if nothing happens; `None`: not at all.
    pub until: Option<Millis>,
}

/// How many ms apart the signs of life are for a session whose shortest lease is this.
pub fn pace(lease: Millis) -> Millis {
    let (shortest, longest) = PACES;
    (lease / SIGNS_OF_LIFE_A_LEASE).clamp(shortest, longest)
}

/// All sessions.
#[derive(Debug, Default)]
pub struct Sessions {
    by_client: Map<u64, Session>,
    departed: VecDeque<Departed>,
    /// When sessions have been silent for too long.
    silences: BTreeSet<(Millis, u64)>,
    waits: usize,
    letters: usize,
    /// How many have ended.
    ends: u64,
}

/// What a session that has ended leaves behind. It is dealt with piece by piece, since there may be a hundred thousand
/// pieces.
#[derive(Debug)]
struct Departed {
    mail: BTreeMap<u64, Letter>,
    waits: BTreeSet<Ticket>,
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
    /// Makes a connection a session, if it is not one yet. Returns how many unread events it has.
    pub fn open(&mut self, client: u64) -> usize {
        self.by_client.get_or_insert_with(client, Session::default).mail.len()
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

    /// The requests that wait for a session, and its unread events.
    pub fn load(&self, client: u64) -> usize {
        self.by_client.get(&client).map_or(0, |it| it.waits.len().saturating_add(it.mail.len()))
    }

    /// How many sessions there are, how many requests wait on their behalf, and how many events are unread.
    pub fn sizes(&self) -> (usize, usize, usize) {
        (self.by_client.len(), self.waits, self.letters)
    }

    /// Records that a request waits on behalf of a session.
    pub fn add_wait(&mut self, client: u64, ticket: Ticket) {
        let Some(session) = self.by_client.get_mut(&client) else { return };
        session.waits.insert(ticket);
        self.waits = self.waits.saturating_add(1);
    }

    /// A request no longer waits on behalf of a session.
    pub fn remove_wait(&mut self, client: u64, ticket: Ticket) {
        if self.by_client.get_mut(&client).is_some_and(|session| session.waits.remove(&ticket)) {
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
        (client, ticket): (u64, Ticket),
        about: About,
        (outcome, until): (Outcome, Deadline),
        now: Now,
    ) -> Result<Option<u64>, Outcome> {
        self.remove_wait(client, ticket);
        if !self.is_open(client) {
            return Err(outcome);
        }
        let About { keys, owner, .. } = about;
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

    /// Notifies a session that a hold tied to it is lost.
    pub fn lost(&mut self, tie: &Tie, why: Why) {
        self.tell_of(tie, Kind::Lost(tie.token, why));
    }

    /// Notifies a session that a hold is no longer tied to it, though it may live on.
    pub fn unbound(&mut self, tie: &Tie, why: Why) {
        self.tell_of(tie, Kind::Unbound(tie.token, why));
    }

    /// Notifies a session that somebody waits for what it holds.
    pub fn contended(&mut self, tie: &Tie) {
        self.tell_of(tie, Kind::Contended(tie.token));
    }

    fn tell_of(&mut self, tie: &Tie, kind: Kind) {
        if self.is_open(tie.client) {
            let event = Event { kind, keys: Rc::from([tie.key()]), owner: tie.owner.clone() };
            self.put(tie.client, event, None);
        }
    }

    /// Adds an event, and returns its place.
    fn put(&mut self, client: u64, event: Event, unheard: Option<Unheard>) -> Option<u64> {
        let session = self.by_client.get_mut(&client)?;
        let at = session.next_letter;
        session.next_letter = at.wrapping_add(1);
        session.mail.insert(at, (event, unheard));
        self.letters = self.letters.saturating_add(1);
        Some(at)
    }

    /// Removes an unread event.
    fn take(&mut self, client: u64, at: u64) -> Option<Letter> {
        let letter = self.by_client.get_mut(&client)?.mail.remove(&at)?;
        self.letters = self.letters.saturating_sub(1);
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

    /// Records who waits for the next event of a session; `None`: nobody.
    pub fn set_reader(&mut self, client: u64, reader: Option<Reader>) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.reader = reader;
        }
    }

    /// Removes and returns the reader that waits for the next event of a session, if there is an event.
    pub fn take_reader(&mut self, client: u64) -> Option<Ticket> {
        let session = self.by_client.get_mut(&client)?;
        if session.mail.is_empty() { None } else { session.reader.take().map(|reader| reader.ticket) }
    }

    /// Removes and returns the reader that waits for the next event of a session, if it would be answered after `latest`.
    pub fn take_late_reader(&mut self, client: u64, latest: impl FnOnce() -> Option<Millis>) -> Option<Ticket> {
        let session = self.by_client.get_mut(&client)?;
        let until = session.reader?.until.unwrap_or(Millis::MAX);
        if until > latest()? { session.reader.take().map(|reader| reader.ticket) } else { None }
    }

    /// A session asks for its events.
    pub fn reads(&mut self, client: u64, read: Read) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.last_read = read;
        }
        self.expect(client, None);
    }

    /// The last time that a session asked for its events.
    pub fn last_read(&self, client: u64) -> Read {
        self.by_client.get(&client).map_or(Read::default(), |it| it.last_read)
    }

    /// A session must ask for its events by then, or is silent; `None`: it has asked, or needs not.
    pub fn expect(&mut self, client: u64, by: Option<Millis>) {
        let Some(session) = self.by_client.get_mut(&client) else { return };
        if let Some(before) = std::mem::replace(&mut session.silent_at, by) {
            self.silences.remove(&(before, client));
        }
        self.silences.extend(by.map(|by| (by, client)));
    }

    /// When the first session will have been silent for too long.
    pub fn first_silence(&self) -> Option<Millis> {
        self.silences.first().map(|(at, _)| *at)
    }

    /// A session that has been silent for too long.
    pub fn take_silent(&mut self, now: Millis) -> Option<u64> {
        let (_, client) = *self.silences.first().filter(|(at, _)| *at <= now)?;
        self.expect(client, None);
        Some(client)
    }

    /// All who wait for events.
    pub fn readers(&self) -> impl Iterator<Item = Ticket> {
        self.by_client.values().filter_map(|session| Some(session.reader?.ticket))
    }

    /// The server's clock has stepped by so many ms: sessions go along, with what they were granted, which is tied.
    pub fn stepped(&mut self, by: i64) {
        let moved = |at: Millis| at.saturating_add_signed(by);
        self.silences.clear();
        for (client, session) in self.by_client.iter_mut() {
            session.silent_at = session.silent_at.map(moved);
            self.silences.extend(session.silent_at.map(|at| (at, *client)));
            if let Some(reader) = &mut session.reader {
                reader.until = reader.until.map(moved);
            }
            for (event, _) in session.mail.values_mut() {
                if let Kind::Granted(_, deadline) = &mut event.kind {
                    *deadline = deadline.stepped(by);
                }
            }
        }
    }

    /// A session is being told that its next question will be answered within `pace` ms.
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
        let Session { mail, waits, .. } = session;
        self.departed.push_back(Departed { mail, waits });
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
        (waits, letters) == (self.waits, self.letters)
    }
}
