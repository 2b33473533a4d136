//! Sessions: connections that stand for a whole process. Everything that happens to the requests and holds of a
//! session goes into its mailbox, which it reads.
//!
//! A connection becomes a session when a request names it as one or when it reads its mailbox; before that, nothing
//! is kept for it.

use super::owed::{About, Ticket};
use super::ties::Read;
use super::{Answer, GrantId, Outcome, Tie};
use crate::lock::map::IntoValues;
use crate::lock::{Deadline, LockKey, Map, Millis, Owner, Token};
use crate::server::clock::Now;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// This many times during its shortest lease, a session hears that it is alive: if it does not, enough of the lease is
/// left to do something about it.
const SIGNS_OF_LIFE_A_LEASE: Millis = 8;

/// The fewest and the most ms between two signs of life.
const PACES: (Millis, Millis) = (10, 10_000);

/// With so many unread events of an owner for a key, a session asks for nothing more on behalf of this owner there. What
/// looks for these events (`LOCK.CANCEL`) finds no more than a step has room for, even if each names 128 keys.
pub const MOST_UNREAD: usize = 100;

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

impl Kind {
    /// The token of the hold that it is about.
    fn token(&self) -> Option<Token> {
        match self {
            Self::Granted(token, _) | Self::Lost(token, _) | Self::Unbound(token, _) | Self::Contended(token) => {
                Some(*token)
            }
            Self::TimedOut | Self::Refused(_) => None,
        }
    }
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

/// Identifies a request: an owner asks for a key on behalf of a session at most once at a time.
type Claim = (Owner, LockKey);

#[derive(Debug, Default)]
struct Session {
    /// What is waited for on its behalf: locks, and renewals that are being confirmed.
    waits: Map<Claim, Ticket>,
    /// How many requests these are, since one may name several keys.
    requests: usize,
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

/// Where the unread events are: the session, the owner and the name of the lock, and the position in its mailbox.
#[derive(Debug, Default)]
struct Unread(BTreeSet<Place>);

type Place = (u64, Owner, Rc<[u8]>, u64);

impl Unread {
    fn add(&mut self, event: &Event, client: u64, at: u64) {
        self.0.extend(event.keys.iter().map(|key| (client, event.owner.clone(), key.name.clone(), at)));
    }

    fn remove(&mut self, event: &Event, client: u64, at: u64) {
        for key in event.keys.iter() {
            self.0.remove(&(client, event.owner.clone(), key.name.clone(), at));
        }
    }

    fn of(&self, client: u64, owner: &Owner, name: &Rc<[u8]>) -> impl Iterator<Item = u64> {
        let place = |at| (client, owner.clone(), name.clone(), at);
        self.0.range(place(0)..=place(u64::MAX)).map(|(.., at)| *at)
    }
}

/// All sessions.
#[derive(Debug, Default)]
pub struct Sessions {
    by_client: Map<u64, Session>,
    departed: VecDeque<Departed>,
    /// When sessions have been silent for too long.
    silences: BTreeSet<(Millis, u64)>,
    unread: Unread,
    waits: usize,
    letters: usize,
    /// How many have ended.
    ends: u64,
}

/// What a session that has ended leaves behind. It is dealt with piece by piece, since there may be a hundred thousand
/// pieces.
#[derive(Debug)]
struct Departed {
    client: u64,
    mail: BTreeMap<u64, Letter>,
    waits: IntoValues<Claim, Ticket>,
}

/// What a session knows of an owner's request for a key.
#[derive(Debug, PartialEq, Eq)]
pub enum Claimed {
    /// Nothing.
    Nothing,
    /// It waits.
    Waits(Ticket),
    /// The session has not read what became of [`MOST_UNREAD`] others.
    Unread,
}

/// What an ended session leaves to be done.
#[derive(Debug)]
pub enum Remains {
    /// This request no longer waits.
    Wait(Ticket),
    /// This grant was never heard of.
    Grant(GrantId),
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
        self.by_client.get(&client).map_or(0, |it| it.requests.saturating_add(it.mail.len()))
    }

    /// How many sessions there are, how many requests wait on their behalf, and how many events are unread.
    pub fn sizes(&self) -> (usize, usize, usize) {
        (self.by_client.len(), self.waits, self.letters)
    }

    /// Whether a session knows anything that may concern a request: something waits, or much is unread.
    pub fn knows(&self, client: u64) -> bool {
        self.by_client.get(&client).is_some_and(|it| !it.waits.is_empty() || it.mail.len() >= MOST_UNREAD)
    }

    /// What a session knows of an owner's request for any of `keys`: of the first of them that it knows anything about.
    pub fn claimed(&self, client: u64, owner: &Owner, keys: &[LockKey]) -> Claimed {
        let Some(session) = self.by_client.get(&client).filter(|_| self.knows(client)) else { return Claimed::Nothing };
        let waits = |key: &LockKey| session.waits.get(&(owner.clone(), key.clone())).copied();
        let unread = |key: &LockKey| self.unread.of(client, owner, &key.name).take(MOST_UNREAD).count();
        let is_full = || session.mail.len() >= MOST_UNREAD && keys.iter().any(|key| unread(key) == MOST_UNREAD);
        match keys.iter().find_map(waits) {
            Some(ticket) => Claimed::Waits(ticket),
            None if is_full() => Claimed::Unread,
            None => Claimed::Nothing,
        }
    }

    /// Records that a request waits on behalf of a session.
    pub fn add_wait(&mut self, client: u64, about: &About, ticket: Ticket) {
        let Some(session) = self.by_client.get_mut(&client) else { return };
        for key in about.keys.iter() {
            session.waits.insert((about.owner.clone(), key.clone()), ticket);
        }
        session.requests = session.requests.saturating_add(1);
        self.waits = self.waits.saturating_add(1);
    }

    /// A request no longer waits on behalf of a session.
    pub fn remove_wait(&mut self, client: u64, about: &About) {
        let Some(session) = self.by_client.get_mut(&client) else { return };
        for key in about.keys.iter() {
            session.waits.remove(&(about.owner.clone(), key.clone()));
        }
        session.requests = session.requests.saturating_sub(1);
        self.waits = self.waits.saturating_sub(1);
    }

    /// Notifies a session how one of its requests ended. What was granted lasts at least until then.
    ///
    /// # Errors
    ///
    /// The outcome, if there is no such session any more.
    pub fn tell(
        &mut self,
        client: u64,
        about: About,
        (outcome, until): (Outcome, Deadline),
        now: Now,
    ) -> Result<(), Outcome> {
        self.remove_wait(client, &about);
        if !self.is_open(client) {
            return Err(outcome);
        }
        let About { keys, owner, .. } = about;
        match outcome {
            Outcome::Granted(Answer::Token(token), grant) => {
                let kind = Kind::Granted(token, until);
                self.put(client, Event { kind, keys, owner }, Some(Unheard { grant, since: now }));
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
            }
            Outcome::TimedOut => self.put(client, Event { kind: Kind::TimedOut, keys, owner }, None),
            Outcome::Refused(error) => self.put(client, Event { kind: Kind::Refused(error), keys, owner }, None),
        }
        Ok(())
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

    fn put(&mut self, client: u64, event: Event, unheard: Option<Unheard>) {
        let Some(session) = self.by_client.get_mut(&client) else { return };
        let at = session.next_letter;
        session.next_letter = at.wrapping_add(1);
        self.unread.add(&event, client, at);
        session.mail.insert(at, (event, unheard));
        self.letters = self.letters.saturating_add(1);
    }

    /// Removes an unread event.
    fn take(&mut self, client: u64, at: u64) -> Option<Letter> {
        let letter = self.by_client.get_mut(&client)?.mail.remove(&at)?;
        self.unread.remove(&letter.0, client, at);
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

    /// The request of an owner for a key that waits on behalf of a session.
    pub fn waiting(&self, client: u64, owner: &Owner, key: &LockKey) -> Option<Ticket> {
        self.by_client.get(&client)?.waits.get(&(owner.clone(), key.clone())).copied()
    }

    /// Removes a session's unread events about an owner's requests for a key, and about what else it was granted with it.
    /// Returns the grants among them.
    pub fn forget_events(&mut self, client: u64, owner: &Owner, key: &LockKey) -> Vec<GrantId> {
        let forgotten = self.take_all(client, owner, key, |_| true);
        let tokens: BTreeSet<Token> = forgotten.iter().filter_map(|(event, _)| event.kind.token()).collect();
        let keys: BTreeSet<LockKey> = forgotten.iter().flat_map(|(event, _)| event.keys.iter().cloned()).collect();
        let mut grants: Vec<GrantId> = forgotten.into_iter().filter_map(|(_, it)| Some(it?.grant)).collect();
        for other in &keys {
            grants.extend(self.forget_events_of(client, owner, other, &tokens));
        }
        grants
    }

    /// Removes a session's unread events about what an owner has of a key under these tokens. Returns the grants among them.
    pub fn forget_events_of(
        &mut self,
        client: u64,
        owner: &Owner,
        key: &LockKey,
        tokens: &BTreeSet<Token>,
    ) -> Vec<GrantId> {
        let is_its = |event: &Event| event.kind.token().is_some_and(|token| tokens.contains(&token));
        let letters = self.take_all(client, owner, key, is_its);
        letters.into_iter().filter_map(|(_, unheard)| Some(unheard?.grant)).collect()
    }

    fn take_all(&mut self, client: u64, owner: &Owner, key: &LockKey, which: impl Fn(&Event) -> bool) -> Vec<Letter> {
        let places: Vec<u64> = self.unread.of(client, owner, &key.name).collect();
        let letters = places.into_iter().filter_map(|at| {
            let (event, _) = self.by_client.get(&client)?.mail.get(&at)?;
            if which(event) && event.keys.contains(key) { self.take(client, at) } else { None }
        });
        letters.collect()
    }

    /// A session that has not heard of a grant of this key is told this error instead. Returns whether it had not.
    pub fn refuse_unread(
        &mut self,
        client: u64,
        grant: GrantId,
        (owner, key): (&Owner, &LockKey),
        error: &str,
    ) -> bool {
        let places: Vec<u64> = self.unread.of(client, owner, &key.name).collect();
        let Some(session) = self.by_client.get_mut(&client) else { return false };
        let mut any = false;
        for at in places {
            if let Some((event, unheard)) = session.mail.get_mut(&at)
                && unheard.is_some_and(|unheard| unheard.grant == grant)
            {
                (event.kind, *unheard) = (Kind::Refused(error.into()), None);
                any = true;
            }
        }
        any
    }

    /// A connection has ended, and its session, if it was one, with it. Returns whether it was. What it leaves behind
    /// is removed by [`Sessions::next_remains`].
    pub fn client_gone(&mut self, client: u64) -> bool {
        self.expect(client, None);
        let Some(session) = self.by_client.remove(&client) else { return false };
        self.ends = self.ends.wrapping_add(1);
        self.waits = self.waits.saturating_sub(session.requests);
        self.letters = self.letters.saturating_sub(session.mail.len());
        let Session { mail, waits, .. } = session;
        self.departed.push_back(Departed { client, mail, waits: waits.into_values() });
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
            if let Some((at, (event, unheard))) = departed.mail.pop_first() {
                self.unread.remove(&event, departed.client, at);
                if let Some(unheard) = unheard {
                    return Some(Remains::Grant(unheard.grant));
                }
            } else if let Some(ticket) = departed.waits.next() {
                return Some(Remains::Wait(ticket));
            } else {
                self.departed.pop_front();
            }
        }
    }
}

#[cfg(test)]
impl Sessions {
    /// Whether each unread event is in the index under each of its keys, nothing else is, and the counters agree.
    pub fn is_consistent(&self) -> bool {
        let mail_of = |client: &u64| {
            let departed = || self.departed.iter().find(|it| it.client == *client).map(|it| &it.mail);
            self.by_client.get(client).map(|it| &it.mail).or_else(departed)
        };
        let live = self.by_client.iter().map(|(client, it)| (*client, &it.mail));
        let all = live.chain(self.departed.iter().map(|it| (it.client, &it.mail)));
        let each_is_found =
            all.flat_map(|(client, mail)| mail.iter().map(move |it| (client, it))).all(|(client, it)| {
                let (at, (event, _)) = it;
                event.keys.iter().all(|key| self.unread.of(client, &event.owner, &key.name).any(|place| place == *at))
            });
        let nothing_else = self.unread.0.iter().all(|(client, owner, name, at)| {
            let event = mail_of(client).and_then(|mail| mail.get(at));
            event.is_some_and(|(event, _)| event.owner == *owner && event.keys.iter().any(|it| it.name == *name))
        });
        let waits = self.by_client.values().map(|it| it.requests).sum::<usize>();
        let letters = self.by_client.values().map(|it| it.mail.len()).sum::<usize>();
        let tickets = |it: &Session| it.waits.values().copied().collect::<BTreeSet<Ticket>>();
        each_is_found
            && nothing_else
            && (waits, letters) == (self.waits, self.letters)
            && self.by_client.values().all(|it| tickets(it).len() == it.requests)
    }
}
