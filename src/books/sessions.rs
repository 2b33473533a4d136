//! Sessions: connections that stand for a whole process. Everything that happens to the requests and holds of a
//! session goes into its mailbox, which it reads.
//!
//! A connection becomes a session when a request names it as one or when it reads its mailbox; before that, nothing
//! is kept for it.

use super::owed::{About, Purpose, Ticket};
use super::{Answer, Outcome, Tie, Undo};
use crate::lock::map::IntoValues;
use crate::lock::{LockKey, Map, Millis, Owner, Token};
use crate::server::clock::Now;
use foldhash::HashMap;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// This many times during its shortest lease, a session hears that it is alive: if it does not, enough of the lease is
/// left to do something about it.
const SIGNS_OF_LIFE_A_LEASE: Millis = 8;

/// The fewest and the most ms between two signs of life.
const PACES: (Millis, Millis) = (10, 10_000);

/// How many cancelled owners are remembered for each session, and how many grants of several keys.
const REMEMBERED: usize = 1000;

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
    /// The wait ended with a grant, under this token.
    Granted(Token),
    /// The wait timed out.
    TimedOut,
    /// The wait ended with this error.
    Refused(String),
    /// The hold with this token is lost.
    Lost(Token, Why),
    /// The hold with this token is no longer watched by this server.
    Untied(Token, Why),
}

/// Why a hold was lost or untied.
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
        }
    }
}

/// An event, and, if it reports a grant, how to roll that back if nobody hears of it.
type Letter = (Event, Option<Unheard>);

/// A grant that a session has not heard of.
#[derive(Clone, Debug)]
pub struct Unheard {
    /// How to roll it back.
    pub undo: Undo,
    /// When it was granted.
    pub since: Now,
}

/// Identifies a request: an owner asks for a key on behalf of a session at most once at a time.
type Claim = (Owner, LockKey);

#[derive(Debug, Default)]
struct Session {
    /// The locks waited for on its behalf.
    waits: Map<Claim, Ticket>,
    /// The renewals being confirmed.
    renewals: BTreeMap<Claim, BTreeSet<Ticket>>,
    /// How many requests these are, since one may name several keys.
    requests: usize,
    /// Unread events, in order.
    mail: BTreeMap<u64, Letter>,
    next_letter: u64,
    reader: Option<Reader>,
    /// Within how many ms the next question is answered, as the last sign of life said.
    promised: Option<Millis>,
    cancelled: Newest<Claim, ()>,
    /// The other keys that were granted together with a key.
    granted_together: Newest<Claim, Rc<[LockKey]>>,
}

/// The blocked client that waits for a session's next event.
#[derive(Clone, Copy, Debug)]
pub struct Reader {
    /// The name of the answer that it is owed.
    pub ticket: Ticket,
    /// When it is told that the session is alive, if it wants to know.
    pub alive_at: Option<Millis>,
}

/// How many ms apart the signs of life are for a session whose shortest lease is this.
pub fn pace(lease: Millis) -> Millis {
    let (shortest, longest) = PACES;
    (lease / SIGNS_OF_LIFE_A_LEASE).clamp(shortest, longest)
}

/// Where the unread events are: by owner and name of the lock, the session and the position in its mailbox.
///
/// One index for all sessions, since an owner may be told over one connection what it has not read on another.
#[derive(Debug, Default)]
struct Unread(Map<(Owner, Rc<[u8]>), BTreeSet<Place>>);

/// A session, and the position of an event in its mailbox.
type Place = (u64, u64);

impl Unread {
    fn add(&mut self, event: &Event, client: u64, at: u64) {
        for key in event.keys.iter() {
            self.0.get_or_insert_with((event.owner.clone(), key.name.clone()), BTreeSet::new).insert((client, at));
        }
    }

    fn remove(&mut self, event: &Event, client: u64, at: u64) {
        for key in event.keys.iter() {
            let name = (event.owner.clone(), key.name.clone());
            if let Some(places) = self.0.get_mut(&name) {
                places.remove(&(client, at));
                if places.is_empty() {
                    self.0.remove(&name);
                }
            }
        }
    }

    fn of(&self, owner: &[u8], name: &[u8]) -> impl Iterator<Item = (u64, u64)> {
        let places = if self.0.is_empty() { None } else { self.0.get(&(Rc::from(owner), Rc::from(name))) };
        places.into_iter().flatten().copied()
    }
}

/// A map that keeps the newest entries.
#[derive(Debug)]
struct Newest<K, V> {
    map: HashMap<K, V>,
    order: VecDeque<K>,
}

impl<K, V> Default for Newest<K, V> {
    fn default() -> Self {
        Self { map: HashMap::default(), order: VecDeque::new() }
    }
}

impl<K: Clone + Eq + std::hash::Hash, V> Newest<K, V> {
    fn insert(&mut self, key: K, value: V) {
        if self.map.insert(key.clone(), value).is_some() {
            self.order.retain(|it| *it != key); // Some microseconds, and rare.
        }
        self.order.push_back(key);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.map.remove(&oldest);
        }
    }
}

/// All sessions.
#[derive(Debug, Default)]
pub struct Sessions {
    by_client: Map<u64, Session>,
    departed: VecDeque<Departed>,
    unread: Unread,
    waits: usize,
    letters: usize,
}

/// What a session that has ended leaves behind. It is dealt with piece by piece, since there may be a hundred thousand
/// pieces.
#[derive(Debug)]
struct Departed {
    client: u64,
    mail: BTreeMap<u64, Letter>,
    waits: IntoValues<Claim, Ticket>,
    renewals: std::collections::btree_map::IntoValues<Claim, BTreeSet<Ticket>>,
}

/// What a session knows of an owner's request for a key.
#[derive(Debug, PartialEq, Eq)]
pub enum Claimed {
    /// Nothing.
    Nothing,
    /// It waits.
    Waits(Ticket),
    /// The owner was cancelled.
    Cancelled,
}

/// What is left of an owner's requests that are given up.
#[derive(Debug, Default)]
pub struct Cancelled {
    /// Those that wait, or are being confirmed.
    pub tickets: Vec<Ticket>,
    /// All keys that were granted together with the one that was named.
    pub granted_together: Option<Rc<[LockKey]>>,
}

/// What an ended session leaves to be done.
#[derive(Debug)]
pub enum Remains {
    /// These requests no longer wait.
    Waits(BTreeSet<Ticket>),
    /// This grant was never heard of.
    Grant(Undo),
}

impl Sessions {
    /// Makes a connection a session, if it is not one yet.
    pub fn open(&mut self, client: u64) {
        self.by_client.get_or_insert_with(client, Session::default);
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

    /// What a session knows of an owner's request for any of `keys`: of the first of them that it knows anything about.
    pub fn claimed(&self, client: u64, owner: &Owner, keys: &[LockKey]) -> Claimed {
        let Some(session) = self.by_client.get(&client) else { return Claimed::Nothing };
        if session.waits.is_empty() && session.cancelled.map.is_empty() {
            return Claimed::Nothing;
        }
        let mut claims = keys.iter().map(|key| (owner.clone(), key.clone()));
        let found = claims.find_map(|claim| {
            let cancelled = session.cancelled.map.contains_key(&claim).then_some(Claimed::Cancelled);
            cancelled.or_else(|| session.waits.get(&claim).copied().map(Claimed::Waits))
        });
        found.unwrap_or(Claimed::Nothing)
    }

    /// Records that a request waits on behalf of a session.
    pub fn add_wait(&mut self, client: u64, about: &About, ticket: Ticket) {
        let Some(session) = self.by_client.get_mut(&client) else { return };
        for key in about.keys.iter() {
            let claim = (about.owner.clone(), key.clone());
            match about.purpose {
                Purpose::Acquire => drop(session.waits.insert(claim, ticket)),
                Purpose::Renew => drop(session.renewals.entry(claim).or_default().insert(ticket)),
            }
        }
        session.requests = session.requests.saturating_add(1);
        self.waits = self.waits.saturating_add(1);
    }

    /// A request no longer waits on behalf of a session.
    pub fn remove_wait(&mut self, client: u64, about: &About, ticket: Ticket) {
        let Some(session) = self.by_client.get_mut(&client) else { return };
        for key in about.keys.iter() {
            let claim = (about.owner.clone(), key.clone());
            match about.purpose {
                Purpose::Acquire => drop(session.waits.remove(&claim)),
                Purpose::Renew => {
                    if let Entry::Occupied(mut tickets) = session.renewals.entry(claim) {
                        tickets.get_mut().remove(&ticket);
                        if tickets.get().is_empty() {
                            tickets.remove();
                        }
                    }
                }
            }
        }
        session.requests = session.requests.saturating_sub(1);
        self.waits = self.waits.saturating_sub(1);
    }

    /// Notifies a session how one of its requests ended.
    ///
    /// # Errors
    ///
    /// The outcome, if there is no such session any more.
    pub fn tell(
        &mut self,
        client: u64,
        ticket: Ticket,
        about: About,
        outcome: Outcome,
        now: Now,
    ) -> Result<(), Outcome> {
        self.remove_wait(client, &about, ticket);
        if !self.is_open(client) {
            return Err(outcome);
        }
        let About { keys, owner, .. } = about;
        match outcome {
            Outcome::Granted(Answer::Token(token), undo) => {
                self.granted(client, &owner, &keys);
                self.put(client, Event { kind: Kind::Granted(token), keys, owner }, Some(Unheard { undo, since: now }));
            }
            Outcome::Granted(Answer::Tokens(tokens), undo) => {
                let mut unheard = Some(Unheard { undo, since: now });
                for (key, token) in keys.iter().zip(tokens) {
                    let kind = token.map_or_else(
                        || Kind::Refused("NOTHELD the owner does not hold this lock".into()),
                        Kind::Granted,
                    );
                    let event = Event { kind, keys: Rc::from([key.clone()]), owner: owner.clone() };
                    // What was renewed together is rolled back together, with the first of its events.
                    let unheard = if token.is_some() { unheard.take() } else { None };
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
        self.ended(tie, Kind::Lost(tie.token, why));
    }

    /// Notifies a session that a hold is no longer tied to it, though it may live on.
    pub fn untied(&mut self, tie: &Tie, why: Why) {
        self.ended(tie, Kind::Untied(tie.token, why));
    }

    fn ended(&mut self, tie: &Tie, kind: Kind) {
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

    /// Lends the roll-backs of what an owner was given of a lock of this name and has not read, on behalf of any
    /// session.
    pub fn unread_grants(&mut self, name: &[u8], owner: &[u8], mut work: impl FnMut(&mut Undo)) {
        for (client, at) in self.unread.of(owner, name) {
            let mail = match self.by_client.get_mut(&client) {
                Some(session) => Some(&mut session.mail),
                None => self.departed.iter_mut().find(|it| it.client == client).map(|it| &mut it.mail),
            };
            if let Some((_, Some(unheard))) = mail.and_then(|mail| mail.get_mut(&at)) {
                work(&mut unheard.undo);
            }
        }
    }

    /// Records which keys an owner was granted together on behalf of a session.
    pub fn granted(&mut self, client: u64, owner: &Owner, keys: &Rc<[LockKey]>) {
        if keys.len() < 2 {
            return;
        }
        let Some(session) = self.by_client.get_mut(&client) else { return };
        for key in keys.iter() {
            session.granted_together.insert((owner.clone(), key.clone()), keys.clone());
        }
    }

    /// The next unread event of a session, and how to roll it back until it has been handed to the network.
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

    /// Removes and returns the reader that waits to be told that a session is alive, if it would be told after
    /// `latest`.
    pub fn take_late_reader(&mut self, client: u64, latest: impl FnOnce() -> Option<Millis>) -> Option<Ticket> {
        let session = self.by_client.get_mut(&client)?;
        let alive_at = session.reader?.alive_at?;
        if alive_at > latest()? { session.reader.take().map(|reader| reader.ticket) } else { None }
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

    /// Cancels an owner's requests for a key on behalf of a session, including those yet to arrive. Returns what is
    /// left of them.
    pub fn cancel(&mut self, client: u64, owner: &Owner, key: &LockKey) -> Cancelled {
        let claim = (owner.clone(), key.clone());
        let Some(session) = self.by_client.get_mut(&client) else { return Cancelled::default() };
        let renewals = session.renewals.get(&claim).into_iter().flatten();
        let cancelled = Cancelled {
            tickets: session.waits.get(&claim).into_iter().chain(renewals).copied().collect(),
            granted_together: session.granted_together.map.get(&claim).cloned(),
        };
        session.cancelled.insert(claim, ());
        cancelled
    }

    /// Removes a session's unread events about an owner's requests for a key. Returns the roll-backs of those that
    /// are grants.
    pub fn forget_events(&mut self, client: u64, owner: &Owner, key: &LockKey) -> Vec<Undo> {
        let places: Vec<(u64, u64)> = self.unread.of(owner, &key.name).filter(|(of, _)| *of == client).collect();
        let undos = places.into_iter().filter_map(|(_, at)| {
            let (event, _) = self.by_client.get(&client)?.mail.get(&at)?;
            if event.keys.contains(key) { self.take(client, at)?.1.map(|unheard| unheard.undo) } else { None }
        });
        undos.collect()
    }

    /// A connection has ended, and its session, if it was one, with it. Returns whether it was. What it leaves behind
    /// is removed by [`Sessions::next_remains`].
    pub fn client_gone(&mut self, client: u64) -> bool {
        let Some(session) = self.by_client.remove(&client) else { return false };
        self.waits = self.waits.saturating_sub(session.requests);
        self.letters = self.letters.saturating_sub(session.mail.len());
        let Session { mail, waits, renewals, .. } = session;
        let (waits, renewals) = (waits.into_values(), renewals.into_values());
        self.departed.push_back(Departed { client, mail, waits, renewals });
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
                    return Some(Remains::Grant(unheard.undo));
                }
            } else if let Some(ticket) = departed.waits.next() {
                return Some(Remains::Waits([ticket].into()));
            } else if let Some(tickets) = departed.renewals.next() {
                return Some(Remains::Waits(tickets));
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
                event.keys.iter().all(|key| self.unread.of(&event.owner, &key.name).any(|place| place == (client, *at)))
            });
        let nothing_else = self.unread.0.iter().all(|((owner, name), places)| {
            let is_there = |(client, at): &(u64, u64)| {
                let event = mail_of(client).and_then(|mail| mail.get(at));
                event.is_some_and(|(event, _)| event.owner == *owner && event.keys.iter().any(|it| it.name == *name))
            };
            !places.is_empty() && places.iter().all(is_there)
        });
        let waits = self.by_client.values().map(|it| it.requests).sum::<usize>();
        let letters = self.by_client.values().map(|it| it.mail.len()).sum::<usize>();
        let tickets = |it: &Session| -> BTreeSet<Ticket> {
            it.waits.values().copied().chain(it.renewals.values().flatten().copied()).collect()
        };
        each_is_found
            && nothing_else
            && (waits, letters) == (self.waits, self.letters)
            && self.by_client.values().all(|it| tickets(it).len() == it.requests)
    }
}
