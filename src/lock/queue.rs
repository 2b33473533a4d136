//! Who waits: strictly in order of arrival, over one key or several.

use super::changes::{Changed, Changes};
use super::serve::Change;
use super::{KeyMap, LockKey, Millis, Owner, Request};
use foldhash::HashMap;
use std::collections::{BTreeMap, BTreeSet};

/// A place in the order of arrival; earlier arrivals are smaller. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WaiterId(pub u64);

/// One request that waits.
#[derive(Clone, Debug)]
pub struct Waiter<T> {
    /// Its place.
    pub id: WaiterId,
    /// For whom.
    pub owner: Owner,
    /// For what: one key, or several that it gets all at once. None twice.
    pub keys: Box<[LockKey]>,
    /// What it asks for, of each key.
    pub request: Request,
    /// When it came.
    pub since: Millis,
    /// When it gives up; `None`: never.
    pub until: Option<Millis>,
    /// What the caller needs to answer it.
    pub ask: T,
}

/// All queues. A waiter stands in the queue of each of its keys, in every one at the place of its arrival.
///
/// Joining, leaving and asking for the head are logarithmic in the number of waiters.
#[derive(Debug)]
pub struct Queue<T> {
    arrivals: u64,
    waiters: BTreeMap<WaiterId, Waiter<T>>,
    lanes: KeyMap<BTreeSet<WaiterId>>,
    by_owner: HashMap<Owner, BTreeSet<WaiterId>>,
    /// How many wait for several keys.
    several: usize,
    changes: Changes,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            arrivals: 0,
            waiters: BTreeMap::new(),
            lanes: KeyMap::default(),
            by_owner: HashMap::default(),
            several: 0,
            changes: Changes::default(),
        }
    }
}

impl<T> Queue<T> {
    /// The place that the next to [`Queue::join`] gets.
    pub fn next_id(&self) -> WaiterId {
        WaiterId(self.arrivals)
    }

    /// Lets a request wait, behind all who came before it.
    pub fn join(
        &mut self,
        owner: Owner,
        keys: Box<[LockKey]>,
        request: Request,
        since: Millis,
        until: Option<Millis>,
        ask: T,
    ) -> WaiterId {
        let id = self.next_id();
        self.arrivals = self.arrivals.wrapping_add(1);
        for key in &keys {
            self.lanes.get_or_default(key).insert(id);
        }
        self.by_owner.entry(owner.clone()).or_default().insert(id);
        if keys.len() > 1 {
            self.several = self.several.saturating_add(1);
        }
        self.waiters.insert(id, Waiter { id, owner, keys, request, since, until, ask });
        id
    }

    /// Takes a waiter out, whatever its place; `None` if it is gone already.
    pub fn leave(&mut self, id: WaiterId) -> Option<Waiter<T>> {
        let waiter = self.waiters.remove(&id)?;
        for key in &waiter.keys {
            if let Some(lane) = self.lanes.get_mut(key.db, &key.name) {
                lane.remove(&id);
                if lane.is_empty() {
                    self.lanes.remove(key.db, &key.name);
                }
            }
        }
        if waiter.keys.len() > 1 {
            self.several = self.several.saturating_sub(1);
        }
        if let Some(of_owner) = self.by_owner.get_mut(&waiter.owner) {
            of_owner.remove(&id);
            if of_owner.is_empty() {
                self.by_owner.remove(&waiter.owner);
            }
        }
        self.changes.push(Changed::Left(id));
        Some(waiter)
    }

    /// Notes that a lock has changed: somebody may have lost a hold of it or, at a foreign hand, come to one. Searches
    /// for cycles that take several steps rely on it.
    pub fn note(&mut self, key: &LockKey, change: Change) {
        self.changes.push(Changed::Lock(key.clone(), change));
    }

    /// What has changed lately.
    pub(super) fn changes(&self) -> &Changes {
        &self.changes
    }

    /// A waiter.
    pub fn get(&self, id: WaiterId) -> Option<&Waiter<T>> {
        self.waiters.get(&id)
    }

    /// Who is first in the queue of a key.
    pub fn head(&self, db: i32, name: &[u8]) -> Option<WaiterId> {
        self.lanes.get(db, name)?.first().copied()
    }

    /// How many wait for a key.
    pub fn waiting(&self, db: i32, name: &[u8]) -> usize {
        self.lanes.get(db, name).map_or(0, BTreeSet::len)
    }

    /// Those who wait for a key, in order.
    pub fn lane(&self, db: i32, name: &[u8]) -> impl Iterator<Item = &Waiter<T>> {
        self.lanes.get(db, name).into_iter().flatten().filter_map(|id| self.waiters.get(id))
    }

    /// As [`Queue::lane`], from one place in the order of arrival on.
    pub(super) fn lane_from(&self, key: &LockKey, from: WaiterId) -> impl Iterator<Item = &Waiter<T>> {
        let lane = self.lanes.get(key.db, &key.name).into_iter().flat_map(move |lane| lane.range(from..));
        lane.filter_map(|id| self.waiters.get(id))
    }

    /// As [`Queue::of_owner`], from one place in the order of arrival on.
    pub(super) fn of_owner_from(&self, owner: &[u8], from: WaiterId) -> impl Iterator<Item = &Waiter<T>> {
        let own = self.by_owner.get(owner).into_iter().flat_map(move |own| own.range(from..));
        own.filter_map(|id| self.waiters.get(id))
    }

    /// What an owner waits for, in order of arrival.
    pub fn of_owner(&self, owner: &[u8]) -> impl Iterator<Item = &Waiter<T>> {
        self.by_owner.get(owner).into_iter().flatten().filter_map(|id| self.waiters.get(id))
    }

    /// Whether an owner waits for anything.
    pub fn waits(&self, owner: &[u8]) -> bool {
        self.by_owner.contains_key(owner)
    }

    /// All who wait for anything, in no order.
    pub fn owners(&self) -> impl ExactSizeIterator<Item = &Owner> {
        self.by_owner.keys()
    }

    /// Whether each waiter waits for one key, and each owner once: then a wait for one key depends on another key
    /// through the holders only. See [`super::cycle`].
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

    /// The keys of one database that are waited for, and by how many.
    pub fn contended_in(&self, db: i32) -> impl Iterator<Item = (LockKey, usize)> {
        self.lanes.in_db(db).map(move |(name, lane)| (LockKey { db, name: name.clone() }, lane.len()))
    }

    /// All who wait, from one place in the order of arrival on.
    pub fn from(&self, id: WaiterId) -> impl Iterator<Item = &Waiter<T>> {
        self.waiters.range(id..).map(|(_, waiter)| waiter)
    }

    /// All keys that are waited for.
    pub fn contended_keys(&self) -> impl Iterator<Item = LockKey> {
        self.lanes.keys()
    }

    /// All who wait, in order of arrival.
    pub fn iter(&self) -> impl Iterator<Item = &Waiter<T>> {
        self.waiters.values()
    }
}
