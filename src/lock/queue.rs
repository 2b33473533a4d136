//! The queue: strictly in order of arrival, over one key or several. Whoever has waited elsewhere arrived that much
//! earlier.

use super::{Actor, Demand, KeyMap, LockKey, Map, Millis, Owner, actor};
use foldhash::HashSet;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// A position in the order of arrival; earlier arrivals are smaller, and none is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WaiterId {
    /// When it arrived, in ms of a clock that never steps; earlier by what it has waited elsewhere.
    pub arrived: Millis,
    /// How many came to this server before it.
    pub ticket: u64,
}

impl WaiterId {
    /// Before or at all others.
    pub const FIRST: Self = Self { arrived: 0, ticket: 0 };

    /// The position behind this one.
    pub fn next(self) -> Self {
        Self { ticket: self.ticket.saturating_add(1), ..self }
    }
}

/// A waiting request.
#[derive(Clone, Debug)]
pub struct Waiter<T> {
    /// Its position.
    pub id: WaiterId,
    /// The owner.
    pub owner: Owner,
    /// What it waits for: one key, or several that it gets all at once; none is named twice.
    pub keys: Rc<[LockKey]>,
    /// What it asks for, for each key.
    pub demand: Demand,
    /// When it times out; `None`: never.
    pub until: Option<Millis>,
    /// Of several keys, one that it was last found to have to wait for: until something changes there, the others need
    /// not be looked at.
    pub(super) blocked_on: Option<usize>,
    /// What the caller needs to answer it.
    pub asker: T,
}

/// All queues. A request is in the queue of each of its keys, in each at the position of its arrival.
///
/// Joining, leaving and finding the head are logarithmic in the number of waiters.
#[derive(Debug)]
pub struct Queue<T> {
    tickets: u64,
    /// In boxes: a tree that grows at its end is hardly more than half full.
    waiters: BTreeMap<WaiterId, Box<Waiter<T>>>,
    lanes: KeyMap<Lane>,
    /// The requests of each owner, in order of arrival.
    by_owner: Map<Owner, Vec<WaiterId>>,
    /// What actors wait for under owners that are not called as they are, in order of arrival.
    by_actor: Map<Actor, Vec<WaiterId>>,
    /// The newest request of each owner for each key.
    by_claim: Map<(Owner, LockKey), WaiterId>,
    /// For how many reasons somebody may have to wait for an actor. One is a lock that somebody waits for and that one of
    /// its owners holds; another, a request for several keys.
    reasons: Map<Actor, usize>,
    /// The keys with several waiters, those with the most first, by database.
    crowds: BTreeSet<(i32, Reverse<usize>, Rc<[u8]>)>,
}

/// The queue of one key.
#[derive(Debug, Default)]
struct Lane {
    /// Who waits.
    waiting: BTreeSet<WaiterId>,
    /// Those of them that wait for other keys as well.
    several: BTreeSet<WaiterId>,
    /// Who holds the lock, as far as has been noted.
    holders: HashSet<Owner>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            tickets: 0,
            waiters: BTreeMap::new(),
            lanes: KeyMap::default(),
            by_owner: Map::default(),
            by_actor: Map::default(),
            by_claim: Map::default(),
            reasons: Map::default(),
            crowds: BTreeSet::new(),
        }
    }
}

impl<T> Queue<T> {
    /// The position that the next request to [`Queue::join`] gets if it arrived then.
    pub fn next_id(&self, arrived: Millis) -> WaiterId {
        WaiterId { arrived, ticket: self.tickets }
    }

    /// The position behind all who wait now.
    pub fn end(&self) -> WaiterId {
        self.waiters.last_key_value().map_or(WaiterId::FIRST, |(last, _)| last.next())
    }

    /// Whether somebody waits for a key behind this position.
    pub fn has_behind(&self, key: &LockKey, id: WaiterId) -> bool {
        let lane = self.lanes.get(key.db, &key.name);
        lane.and_then(|lane| lane.waiting.last()).is_some_and(|last| *last > id)
    }

    /// Adds a request behind all that arrived before it.
    pub fn join(
        &mut self,
        owner: Owner,
        keys: impl Into<Rc<[LockKey]>>,
        demand: Demand,
        arrived: Millis,
        until: Option<Millis>,
        asker: T,
    ) -> WaiterId {
        let id = self.next_id(arrived);
        let keys = keys.into();
        self.tickets = self.tickets.wrapping_add(1);
        let is_for_several = keys.len() > 1;
        for key in keys.iter() {
            let lane = self.lanes.get_or_default(key);
            let before = lane.waiting.len();
            lane.waiting.insert(id);
            if is_for_several {
                lane.several.insert(id);
            }
            self.resized(key, before, before.saturating_add(1));
            self.by_claim.insert((owner.clone(), key.clone()), id);
        }
        insert(&mut self.by_owner, owner.clone(), id);
        if actor::is_one_of_several(&owner) {
            insert(&mut self.by_actor, actor::of(&owner), id);
        }
        if is_for_several {
            self.add_reason(&owner);
        }
        let waiter = Waiter { id, owner, keys, demand, until, blocked_on: None, asker };
        self.waiters.insert(id, Box::new(waiter));
        id
    }

    /// Removes a request, whatever its position; `None` if it is gone already.
    pub fn leave(&mut self, id: WaiterId) -> Option<Waiter<T>> {
        let waiter = *self.waiters.remove(&id)?;
        for key in waiter.keys.iter() {
            let Some(lane) = self.lanes.get_mut(key.db, &key.name) else { continue };
            lane.waiting.remove(&id);
            lane.several.remove(&id);
            let left = lane.waiting.len();
            if left == 0 {
                self.held_by(key, []);
                self.lanes.remove(key.db, &key.name);
            }
            self.resized(key, left.saturating_add(1), left);
            let claim = (waiter.owner.clone(), key.clone());
            if self.by_claim.get(&claim) == Some(&id) {
                self.by_claim.remove(&claim);
            }
        }
        remove(&mut self.by_owner, &waiter.owner, id);
        if actor::is_one_of_several(&waiter.owner) {
            remove(&mut self.by_actor, actor::name(&waiter.owner), id);
        }
        if waiter.keys.len() > 1 {
            self.remove_reason(&waiter.owner);
        }
        Some(waiter)
    }

    /// There is one more reason why somebody may have to wait for an owner's actor.
    fn add_reason(&mut self, owner: &Owner) {
        let reasons = self.reasons.get_or_insert_with(actor::of(owner), || 0);
        *reasons = reasons.saturating_add(1);
    }

    /// There is one reason less.
    fn remove_reason(&mut self, owner: &[u8]) {
        let name = actor::name(owner);
        let Some(reasons) = self.reasons.get_mut(name) else { return };
        *reasons = reasons.saturating_sub(1);
        if *reasons == 0 {
            self.reasons.remove(name);
        }
    }

    /// Notes who holds a lock that somebody waits for, instead of what was noted before.
    pub fn held_by(&mut self, key: &LockKey, holders: impl IntoIterator<Item = Owner>) {
        let Some(lane) = self.lanes.get_mut(key.db, &key.name) else { return };
        for owner in std::mem::take(&mut lane.holders) {
            self.remove_reason(&owner);
        }
        holders.into_iter().for_each(|owner| self.hold_begins(key.db, &key.name, || owner));
    }

    /// Notes a new holder, if somebody waits for the lock.
    pub fn hold_begins(&mut self, db: i32, name: &[u8], owner: impl FnOnce() -> Owner) {
        let Some(lane) = self.lanes.get_mut(db, name) else { return };
        let owner = owner();
        if lane.holders.insert(owner.clone()) {
            self.add_reason(&owner);
        }
    }

    /// Notes that a holder is one no longer, if somebody waits for the lock.
    pub fn hold_ends(&mut self, db: i32, name: &[u8], owner: &[u8]) {
        if self.lanes.get_mut(db, name).is_some_and(|lane| lane.holders.remove(owner)) {
            self.remove_reason(owner);
        }
    }

    /// Whether anybody may have to wait for an actor: it holds a lock that somebody waits for, or waits for several
    /// keys, perhaps ahead of others.
    pub fn may_be_waited_for(&self, actor: &[u8]) -> bool {
        self.reasons.contains_key(actor)
    }

    /// What an actor waits for: first under its own name, then under others; each in order of arrival.
    pub fn of_actor(&self, actor: &[u8]) -> impl Iterator<Item = &Waiter<T>> {
        let own = self.by_owner.get(actor).into_iter();
        own.chain(self.by_actor.get(actor)).flatten().filter_map(|id| self.get(*id))
    }

    /// The requests for several keys that stand ahead of a position in the queue of a key.
    pub fn several_ahead(&self, key: &LockKey, of: WaiterId) -> impl Iterator<Item = &Waiter<T>> {
        let lane = self.lanes.get(key.db, &key.name).into_iter().flat_map(move |lane| lane.several.range(..of));
        lane.filter_map(|id| self.get(*id))
    }

    /// Keeps [`Queue::crowds`] up to date.
    fn resized(&mut self, key: &LockKey, before: usize, after: usize) {
        if before > 1 {
            self.crowds.remove(&(key.db, Reverse(before), key.name.clone()));
        }
        if after > 1 {
            self.crowds.insert((key.db, Reverse(after), key.name.clone()));
        }
    }

    /// Changes what a request asks for; its position stays.
    pub fn get_mut(&mut self, id: WaiterId) -> Option<&mut Waiter<T>> {
        self.waiters.get_mut(&id).map(Box::as_mut)
    }

    /// A waiting request.
    pub fn get(&self, id: WaiterId) -> Option<&Waiter<T>> {
        self.waiters.get(&id).map(Box::as_ref)
    }

    /// The request of an owner that waits for a key.
    pub fn of_owner(&self, owner: &Owner, key: &LockKey) -> Option<WaiterId> {
        if !self.waits(owner) {
            return None;
        }
        self.by_claim.get(&(owner.clone(), key.clone())).copied()
    }

    /// Who is first in the queue of a key.
    pub fn head(&self, db: i32, name: &[u8]) -> Option<WaiterId> {
        self.lanes.get(db, name)?.waiting.first().copied()
    }

    /// How many wait for a key.
    pub fn waiting(&self, db: i32, name: &[u8]) -> usize {
        self.lanes.get(db, name).map_or(0, |lane| lane.waiting.len())
    }

    /// The requests that wait for a key, in order.
    pub fn lane(&self, db: i32, name: &[u8]) -> impl Iterator<Item = &Waiter<T>> {
        self.lanes.get(db, name).into_iter().flat_map(|lane| &lane.waiting).filter_map(|id| self.get(*id))
    }

    /// Those among an owner's requests from `from` on that wait for a key, out of the next `most` candidates; and
    /// where to continue if there are more. Goes through the owner's requests or through the key's queue, whichever
    /// is shorter.
    pub fn of_owner_at(
        &self,
        owner: &Owner,
        key: &LockKey,
        from: WaiterId,
        most: usize,
    ) -> (Vec<WaiterId>, Option<WaiterId>) {
        let (Some(own), Some(lane)) = (self.by_owner.get(owner), self.lanes.get(key.db, &key.name)) else {
            return (Vec::new(), None);
        };
        let own_from = own.partition_point(|id| *id < from);
        let mut ids: Box<dyn Iterator<Item = WaiterId>> = if own.len() <= lane.waiting.len() {
            Box::new(own.iter().skip(own_from).copied())
        } else {
            Box::new(lane.waiting.range(from..).copied())
        };
        let in_both = |id: &WaiterId| {
            self.waiters.get(id).is_some_and(|waiter| waiter.owner == *owner) && lane.waiting.contains(id)
        };
        let found = ids.by_ref().take(most).filter(in_both).collect();
        (found, ids.next())
    }

    /// Whether an owner waits for anything.
    pub fn waits(&self, owner: &[u8]) -> bool {
        self.by_owner.contains_key(owner)
    }

    /// How many wait, in all.
    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// How many keys are waited for.
    pub fn contended(&self) -> usize {
        self.lanes.len()
    }

    /// The keys of one database with several waiters, and how many there are; those with the most first.
    pub fn crowds_in(&self, db: i32) -> impl Iterator<Item = (LockKey, usize)> {
        let first = (db, Reverse(usize::MAX), Rc::from([]));
        let in_db = self.crowds.range(first..).take_while(move |(of, ..)| *of == db);
        in_db.map(move |(_, Reverse(waiters), name)| (LockKey { db, name: name.clone() }, *waiters))
    }

    /// All waiting requests, beginning at one position in the order of arrival.
    pub fn from(&self, id: WaiterId) -> impl Iterator<Item = &Waiter<T>> {
        self.waiters.range(id..).map(|(_, waiter)| waiter.as_ref())
    }

    /// All waiting requests, in order of arrival.
    pub fn iter(&self) -> impl Iterator<Item = &Waiter<T>> {
        self.waiters.values().map(Box::as_ref)
    }
}

/// Puts a request into somebody's list, in order of arrival.
fn insert(lists: &mut Map<Owner, Vec<WaiterId>>, of: Owner, id: WaiterId) {
    // Most wait once.
    let ids = lists.get_or_insert_with(of, || Vec::with_capacity(1));
    let at = ids.partition_point(|it| *it < id);
    ids.insert(at, id);
}

/// Takes a request out of somebody's list.
fn remove(lists: &mut Map<Owner, Vec<WaiterId>>, of: &[u8], id: WaiterId) {
    let Some(ids) = lists.get_mut(of) else { return };
    if let Ok(at) = ids.binary_search(&id) {
        ids.remove(at);
    }
    if ids.is_empty() {
        lists.remove(of);
    }
}
