//! Sessions: connections that stand for a process. What happens to the requests and the holds of a session is put into
//! its mailbox, from which it reads.
//!
//! A connection is a session from the moment on in which it is named as one or reads its mailbox; before that, nothing
//! is kept for it.

use super::owed::{About, Ticket};
use super::{Answer, Outcome, Tie, Undo};
use crate::lock::{LockKey, Owner, Token};
use foldhash::HashMap;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// So many cancelled owners are remembered for each session, and so many grants of several keys.
const REMEMBERED: usize = 1000;

/// What a session is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: Kind,
    /// To a request or a hold of these keys.
    pub keys: Rc<[LockKey]>,
    /// Of this owner.
    pub owner: Owner,
}

/// What happened to a request or a hold of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The wait ended with a grant, under this token.
    Granted(Token),
    /// The wait was over.
    TimedOut,
    /// The wait ended with this error.
    Refused(String),
    /// The hold under this token is no more.
    Lost(Token, Why),
    /// The hold under this token is no longer this server's business.
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
    /// Its key is served elsewhere now.
    Moved,
    /// This server is a replica now.
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

/// An event, and the way back from what it tells if nobody hears of it.
type Letter = (Event, Option<Undo>);

/// One request's key: an owner asks for a key on behalf of a session at most once at a time.
type Claim = (Owner, LockKey);

#[derive(Debug, Default)]
struct Session {
    /// What waits on its behalf.
    waits: HashMap<Claim, Ticket>,
    /// How many requests those are: one may name several keys.
    requests: usize,
    /// Events that it has not read, in order.
    mail: BTreeMap<u64, Letter>,
    /// Where in the mail the grants are that it has not read.
    unread_grants: HashMap<Claim, u64>,
    next_letter: u64,
    /// The client, blocked, that waits for the next event.
    reader: Option<Ticket>,
    cancelled: Newest<Claim, ()>,
    /// The other keys of what was granted together.
    granted_together: Newest<Claim, Rc<[LockKey]>>,
}

/// A map that keeps what was put into it last.
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
            return;
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
    by_client: HashMap<u64, Session>,
    departed: VecDeque<Departed>,
    waits: usize,
    unread: usize,
}

/// What a session that has ended leaves: gone through piece by piece, for there may be a hundred thousand.
#[derive(Debug)]
struct Departed {
    mail: std::collections::btree_map::IntoValues<u64, Letter>,
    waits: std::collections::hash_map::IntoValues<Claim, Ticket>,
    grants: std::collections::hash_map::IntoValues<Claim, u64>,
}

/// What a session has of an owner's request for a key.
#[derive(Debug, PartialEq, Eq)]
pub enum Claimed {
    /// Nothing.
    Nothing,
    /// It waits.
    Waits(Ticket),
    /// The owner was cancelled.
    Cancelled,
}

/// What a session that ended leaves to be done.
#[derive(Debug)]
pub enum Remains {
    /// This request waits no more.
    Wait(Ticket),
    /// This grant was never heard of.
    Grant(Undo),
}

impl Sessions {
    /// Makes a connection a session, if it is none yet.
    pub fn open(&mut self, client: u64) {
        self.by_client.entry(client).or_default();
    }

    /// Whether a connection is a session.
    pub fn is_open(&self, client: u64) -> bool {
        self.by_client.contains_key(&client)
    }

    /// What waits for a session, and what it has not read.
    pub fn load(&self, client: u64) -> usize {
        self.by_client.get(&client).map_or(0, |it| it.requests.saturating_add(it.mail.len()))
    }

    /// How many sessions there are, how many requests wait on their behalf, and how many events are unread.
    pub fn sizes(&self) -> (usize, usize, usize) {
        (self.by_client.len(), self.waits, self.unread)
    }

    /// What a session has of an owner's request for any of `keys`: of the first for which it has something.
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

    /// Notes that a request waits on behalf of a session.
    pub fn waits(&mut self, client: u64, about: &About, ticket: Ticket) {
        let Some(session) = self.by_client.get_mut(&client) else { return };
        for key in about.keys.iter() {
            session.waits.insert((about.owner.clone(), key.clone()), ticket);
        }
        session.requests = session.requests.saturating_add(1);
        self.waits = self.waits.saturating_add(1);
    }

    /// A request waits no more on behalf of a session.
    pub fn waits_no_more(&mut self, client: u64, about: &About) {
        let Some(session) = self.by_client.get_mut(&client) else { return };
        let mut any = false;
        for key in about.keys.iter() {
            any |= session.waits.remove(&(about.owner.clone(), key.clone())).is_some();
        }
        if any {
            session.requests = session.requests.saturating_sub(1);
            self.waits = self.waits.saturating_sub(1);
        }
    }

    /// Tells a session how a request of it ended.
    ///
    /// # Errors
    ///
    /// The outcome, if there is no such session any more.
    pub fn tell(&mut self, client: u64, about: About, outcome: Outcome) -> Result<(), Outcome> {
        self.waits_no_more(client, &about);
        if !self.is_open(client) {
            return Err(outcome);
        }
        let About { keys, owner } = about;
        match outcome {
            Outcome::Granted(Answer::Token(token), undo) => {
                self.granted(client, &owner, &keys);
                self.put(client, Event { kind: Kind::Granted(token), keys, owner }, Some(undo));
            }
            Outcome::Granted(Answer::Tokens(tokens), undo) => {
                let mut undo = Some(undo);
                for (key, token) in keys.iter().zip(tokens) {
                    let kind =
                        token.map_or_else(|| Kind::Refused("NOTHELD the owner does not hold it".into()), Kind::Granted);
                    let event = Event { kind, keys: Rc::from([key.clone()]), owner: owner.clone() };
                    // What was renewed together goes back together, with the first event of it.
                    let undo = if token.is_some() { undo.take() } else { None };
                    self.put(client, event, undo);
                }
            }
            Outcome::TimedOut => self.put(client, Event { kind: Kind::TimedOut, keys, owner }, None),
            Outcome::Refused(error) => self.put(client, Event { kind: Kind::Refused(error), keys, owner }, None),
        }
        Ok(())
    }

    /// Tells a session that a hold that was tied to it is lost.
    pub fn lost(&mut self, tie: &Tie, why: Why) {
        self.ended(tie, Kind::Lost(tie.token, why));
    }

    /// Tells a session that a hold that was tied to it is tied no more, though it may live on.
    pub fn untied(&mut self, tie: &Tie, why: Why) {
        self.ended(tie, Kind::Untied(tie.token, why));
    }

    fn ended(&mut self, tie: &Tie, kind: Kind) {
        if self.is_open(tie.client) {
            let event = Event { kind, keys: Rc::from([tie.key()]), owner: tie.owner.clone() };
            self.put(tie.client, event, None);
        }
    }

    fn put(&mut self, client: u64, event: Event, undo: Option<Undo>) {
        let Some(session) = self.by_client.get_mut(&client) else { return };
        let at = session.next_letter;
        session.next_letter = at.wrapping_add(1);
        if undo.is_some() {
            for key in event.keys.iter() {
                session.unread_grants.insert((event.owner.clone(), key.clone()), at);
            }
        }
        session.mail.insert(at, (event, undo));
        self.unread = self.unread.saturating_add(1);
    }

    /// Notes which keys an owner was granted together on behalf of a session.
    pub fn granted(&mut self, client: u64, owner: &Owner, keys: &Rc<[LockKey]>) {
        if keys.len() < 2 {
            return;
        }
        let Some(session) = self.by_client.get_mut(&client) else { return };
        for key in keys.iter() {
            session.granted_together.insert((owner.clone(), key.clone()), keys.clone());
        }
    }

    /// The next event that a session has not read, and the way back from it until it is on the network.
    pub fn read(&mut self, client: u64) -> Option<Letter> {
        let session = self.by_client.get_mut(&client)?;
        let (at, letter) = session.mail.pop_first()?;
        self.unread = self.unread.saturating_sub(1);
        for key in letter.0.keys.iter().filter(|_| letter.1.is_some()) {
            let claim = (letter.0.owner.clone(), key.clone());
            if session.unread_grants.get(&claim) == Some(&at) {
                session.unread_grants.remove(&claim);
            }
        }
        Some(letter)
    }

    /// How many events a session has not read.
    pub fn unread(&self, client: u64) -> usize {
        self.by_client.get(&client).map_or(0, |it| it.mail.len())
    }

    /// How many keys the next event of a session names.
    pub fn next_size(&self, client: u64) -> usize {
        let next = self.by_client.get(&client).and_then(|it| it.mail.first_key_value());
        next.map_or(0, |(_, (event, _))| event.keys.len())
    }

    /// Notes who waits for the next event of a session; `None`: nobody.
    pub fn set_reader(&mut self, client: u64, reader: Option<Ticket>) {
        if let Some(session) = self.by_client.get_mut(&client) {
            session.reader = reader;
        }
    }

    /// Takes out who waits for the next event of a session, if there is one to be read.
    pub fn take_reader(&mut self, client: u64) -> Option<Ticket> {
        let session = self.by_client.get_mut(&client)?;
        if session.mail.is_empty() { None } else { session.reader.take() }
    }

    /// Cancels an owner's requests for a key on behalf of a session, those too that are yet to come. What of it waits,
    /// the way back from a grant that was not read, and all keys that were asked for together.
    pub fn cancel(
        &mut self,
        client: u64,
        owner: &Owner,
        key: &LockKey,
    ) -> (Option<Ticket>, Option<Undo>, Rc<[LockKey]>) {
        let just_this = || Rc::from([key.clone()]);
        let Some(session) = self.by_client.get_mut(&client) else { return (None, None, just_this()) };
        let claim = (owner.clone(), key.clone());
        let waits = session.waits.get(&claim).copied();
        let letter = session.unread_grants.get(&claim).copied().and_then(|at| session.mail.remove(&at));
        let together = session.granted_together.map.get(&claim).cloned();
        session.cancelled.insert(claim, ());
        let Some((event, undo)) = letter else {
            return (waits, None, together.unwrap_or_else(just_this));
        };
        self.unread = self.unread.saturating_sub(1);
        for key in event.keys.iter() {
            session.unread_grants.remove(&(owner.clone(), key.clone()));
        }
        (waits, undo, event.keys)
    }

    /// A connection has ended, and the session with it; whether it was one. What it leaves is to be taken out by
    /// [`Sessions::next_remains`].
    pub fn client_gone(&mut self, client: u64) -> bool {
        let Some(session) = self.by_client.remove(&client) else { return false };
        self.waits = self.waits.saturating_sub(session.requests);
        self.unread = self.unread.saturating_sub(session.mail.len());
        self.departed.push_back(Departed {
            mail: session.mail.into_values(),
            waits: session.waits.into_values(),
            grants: session.unread_grants.into_values(),
        });
        true
    }

    /// Whether sessions that ended have left something.
    pub fn has_departed(&self) -> bool {
        !self.departed.is_empty()
    }

    /// The next thing that a session which ended has left.
    pub fn next_remains(&mut self) -> Option<Remains> {
        loop {
            let departed = self.departed.front_mut()?;
            departed.grants.next();
            if let Some((_, undo)) = departed.mail.next() {
                if let Some(undo) = undo {
                    return Some(Remains::Grant(undo));
                }
            } else if let Some(ticket) = departed.waits.next() {
                return Some(Remains::Wait(ticket));
            } else if departed.grants.next().is_none() {
                self.departed.pop_front();
            }
        }
    }
}
