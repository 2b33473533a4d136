//! The queue: strictly in order of arrival, over one key or several.

use super::changes::{Changed, Changes};
use super::serve::Change;
use super::{Demand, KeyMap, LockKey, Map, Millis, Owner};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// A position in the order of arrival; earlier arrivals are smaller, and none is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WaiterId(pub u64);

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
    /// When it arrived.
    pub since: Millis,
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
    arrivals: u64,
    /// In boxes: a tree that grows at its end is hardly more than half full.
    waiters: BTreeMap<WaiterId, Box<Waiter<T>>>,
    lanes: KeyMap<BTreeSet<WaiterId>>,
    /// The requests of each owner, in order of arrival.
    by_owner: Map<Owner, Vec<WaiterId>>,
    /// The keys with several waiters, those with the most first, by database.
    crowds: BTreeSet<(i32, Reverse<usize>, Rc<[u8]>)>,
    /// How many requests wait for several keys.
    several: usize,
    changes: Changes,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            arrivals: 0,
            waiters: BTreeMap::new(),
            lanes: KeyMap::default(),
            by_owner: Map::default(),
            crowds: BTreeSet::new(),
            several: 0,
            changes: Changes::default(),
        }
    }
}

impl<T> Queue<T> {
    /// The position that the next request to [`Queue::join`] gets.
    pub fn next_id(&self) -> WaiterId {
        WaiterId(self.arrivals)
    }

    /// Adds a request behind all that arrived before it.
    pub fn join(
        &mut self,
        owner: Owner,
        keys: impl Into<Rc<[LockKey]>>,
        demand: Demand,
        since: Millis,
        until: Option<Millis>,
        asker: T,
    ) -> WaiterId {
        let id = self.next_id();
        let keys = keys.into();
        self.arrivals = self.arrivals.wrapping_add(1);
        for key in keys.iter() {
            let lane = self.lanes.get_or_default(key);
            let before = lane.len();
            lane.insert(id);
            self.resized(key, before, before.saturating_add(1));
        }
        // Most owners wait once.
        self.by_owner.get_or_insert_with(owner.clone(), || Vec::with_capacity(1)).push(id);
        if keys.len() > 1 {
            self.several = self.several.saturating_add(1);
        }
        let waiter = Waiter { id, owner, keys, demand, since, until, blocked_on: None, asker };
        self.waiters.insert(id, Box::new(waiter));
        id
    }

    /// Removes a request, whatever its position; `None` if it is gone already.
    pub fn leave(&mut self, id: WaiterId) -> Option<Waiter<T>> {
        let waiter = *self.waiters.remove(&id)?;
        for key in waiter.keys.iter() {
            let Some(lane) = self.lanes.get_mut(key.db, &key.name) else { continue };
            lane.remove(&id);
            let left = lane.len();
            if left == 0 {
                self.lanes.remove(key.db, &key.name);
            }
            self.resized(key, left.saturating_add(1), left);
        }
        if waiter.keys.len() > 1 {
            self.several = self.several.saturating_sub(1);
        }
        if let Some(of_owner) = self.by_owner.get_mut(&waiter.owner) {
            if let Ok(at) = of_owner.binary_search(&id) {
                of_owner.remove(at);
            }
            if of_owner.is_empty() {
                self.by_owner.remove(&waiter.owner);
            }
        }
        self.changes.push(Changed::Left(id));
        Some(waiter)
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

    /// Records that a lock has changed: somebody may have lost a hold of it or, if another client wrote it, gained
    /// one. Searches for cycles that take several steps rely on this.
    pub fn note(&mut self, key: &LockKey, change: Change) {
        self.changes.push(Changed::Lock(key.clone(), change));
    }

    /// What has changed lately.
    pub(super) fn changes(&self) -> &Changes {
        &self.changes
    }

    /// A waiting request.
    pub fn get(&self, id: WaiterId) -> Option<&Waiter<T>> {
        self.waiters.get(&id).map(Box::as_ref)
    }

    /// Who is first in the queue of a key.
    pub fn head(&self, db: i32, name: &[u8]) -> Option<WaiterId> {
        self.lanes.get(db, name)?.first().copied()
    }

    /// How many wait for a key.
    pub fn waiting(&self, db: i32, name: &[u8]) -> usize {
        self.lanes.get(db, name).map_or(0, BTreeSet::len)
    }

    /// The requests that wait for a key, in order.
    pub fn lane(&self, db: i32, name: &[u8]) -> impl Iterator<Item = &Waiter<T>> {
        self.lanes.get(db, name).into_iter().flatten().filter_map(|id| self.get(*id))
    }

    /// Like [`Queue::lane`], beginning at one position in the order of arrival.
    pub(super) fn lane_from(&self, key: &LockKey, from: WaiterId) -> impl Iterator<Item = &Waiter<T>> {
        let lane = self.lanes.get(key.db, &key.name).into_iter().flat_map(move |lane| lane.range(from..));
        lane.filter_map(|id| self.get(*id))
    }

    /// Like [`Queue::of_owner`], beginning at one position in the order of arrival.
    pub(super) fn of_owner_from(&self, owner: &[u8], from: WaiterId) -> impl Iterator<Item = &Waiter<T>> {
        let own = self
            .by_owner
            .get(owner)
            .into_iter()
            .flat_map(move |own| own.iter().skip(own.partition_point(|id| *id < from)));
        own.filter_map(|id| self.get(*id))
    }

    /// What an owner waits for, in order of arrival.
    pub fn of_owner(&self, owner: &[u8]) -> impl Iterator<Item = &Waiter<T>> {
        self.by_owner.get(owner).into_iter().flatten().filter_map(|id| self.get(*id))
    }

    /// Those among an owner's requests from `from` on that wait for a key, out of the next `most` candidates; and
    /// where to continue if there are more. Goes through the owner's requests or through the key's queue, whichever
    /// is shorter.
    pub(super) fn of_owner_at(
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
        let mut ids: Box<dyn Iterator<Item = WaiterId>> = if own.len() <= lane.len() {
            Box::new(own.iter().skip(own_from).copied())
        } else {
            Box::new(lane.range(from..).copied())
        };
        let in_both =
            |id: &WaiterId| self.waiters.get(id).is_some_and(|waiter| waiter.owner == *owner) && lane.contains(id);
        let found = ids.by_ref().take(most).filter(in_both).collect();
        (found, ids.next())
    }

    /// Whether an owner waits for anything.
    pub fn waits(&self, owner: &[u8]) -> bool {
        self.by_owner.contains_key(owner)
    }

    /// All who wait, in no particular order.
    pub fn owners(&self) -> impl Iterator<Item = &Owner> {
        self.by_owner.keys()
    }

    /// How many owners wait.
    pub fn owner_count(&self) -> usize {
        self.by_owner.len()
    }

    /// Whether each request waits for one key, and each owner waits once: then a wait for one key depends on other
    /// keys only through the holders. See [`super::cycle`].
    pub fn is_simple(&self) -> bool {
        self.several == 0 && self.by_owner.len() == self.waiters.len()
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

    /// All keys that are waited for.
    pub fn contended_keys(&self) -> impl Iterator<Item = LockKey> {
        self.lanes.keys()
    }

    /// All waiting requests, in order of arrival.
    pub fn iter(&self) -> impl Iterator<Item = &Waiter<T>> {
        self.waiters.values().map(Box::as_ref)
    }
}
