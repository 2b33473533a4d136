//! The queues: strictly in order of arrival, for requests of one key or several. A request that has waited before
//! (`WAITED`) counts as having arrived that much earlier.

use super::{Actor, Demand, KeyMap, LockKey, Millis, Owner, actor, internal_errors};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// A position in the order of arrival. Earlier arrivals are smaller. Each position is unique.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WaiterId {
    /// When the request arrived, in ms of a clock that never steps, less the time that it had waited before (`WAITED`).
    pub arrived: Millis,
    /// How many requests joined the queue of this server before it.
    pub ticket: u64,
}

impl WaiterId {
    /// The smallest position.
    pub const FIRST: Self = Self { arrived: 0, ticket: 0 };

    /// The position right behind this one.
    pub fn next(self) -> Self {
        Self { ticket: self.ticket.saturating_add(1), ..self }
    }
}

/// A waiting request.
#[derive(Clone, Debug)]
pub struct Waiter<T> {
    /// Its position in the order of arrival.
    pub id: WaiterId,
    /// The owner.
    pub owner: Owner,
    /// The keys that it waits for: one, or several that it is granted all at once. None is named twice.
    pub keys: Rc<[LockKey]>,
    /// What it requests for each key.
    pub demand: Demand,
    /// When it times out; `None`: never.
    pub until: Option<Millis>,
    /// What the caller needs to answer the request.
    pub requester: T,
}

impl<T> Waiter<T> {
    /// A request that is not in the queue: its position is a placeholder. It is boxed, as the queue stores it.
    pub fn new(owner: Owner, keys: Rc<[LockKey]>, demand: Demand, until: Option<Millis>, requester: T) -> Box<Self> {
        Box::new(Self { id: WaiterId::FIRST, owner, keys, demand, until, requester })
    }
}

/// The queues of all keys. A request is in the queue of each of its keys, at the position of its arrival.
///
/// Joining, leaving and finding the head take logarithmic time in the number of waiters.
#[derive(Debug)]
pub struct Queue<T> {
    tickets: u64,
    /// Boxed, because the nodes of a B-tree that grows at its end are hardly more than half full.
    waiters: BTreeMap<WaiterId, Box<Waiter<T>>>,
    lanes: KeyMap<Lane>,
    /// The number of the newest lane.
    lane_numbers: u64,
    /// The requests of each lane, in order.
    lane_entries: BTreeSet<(u64, WaiterId)>,
    /// The requests of each lane that also wait for other keys.
    multi_key: BTreeSet<(u64, WaiterId)>,
    /// The request of each owner for each key. An owner has at most one.
    by_owner: BTreeMap<(Owner, LockKey), WaiterId>,
    /// The requests whose owner has a `##`, by actor.
    by_actor: BTreeSet<(Actor, WaiterId)>,
    /// A key that sorts before all others.
    lowest: LockKey,
    /// The keys with several waiters, by database; within a database, the longest queue first.
    by_length: BTreeSet<(i32, Reverse<usize>, Rc<[u8]>)>,
    /// When to examine keys that no client touches: see [`Queue::look_at`].
    looks: BTreeSet<(Millis, LockKey)>,
}

/// The queue of one key. One tree contains the requests of all lanes, since a tree for each would take 200 bytes.
#[derive(Debug, Default)]
struct Lane {
    /// Unique number of the lane.
    number: u64,
    /// How many requests are in the lane.
    waiting: usize,
    /// See [`Queue::likely_holder`].
    likely_holder: Option<Owner>,
    /// See [`Queue::look_at`].
    look_at: Option<Millis>,
}

impl Lane {
    /// The requests of this lane in one of the lists, in order.
    fn ids(&self, list: &BTreeSet<(u64, WaiterId)>) -> impl Iterator<Item = WaiterId> {
        let end = (self.number.wrapping_add(1), WaiterId::FIRST);
        list.range((self.number, WaiterId::FIRST)..end).map(|(_, id)| *id)
    }

    /// The first request of this lane in the list. (One search finds the start of a range without an end; a range with
    /// both ends takes two.)
    fn first(&self, list: &BTreeSet<(u64, WaiterId)>) -> Option<WaiterId> {
        let first = list.range((self.number, WaiterId::FIRST)..).next();
        first.filter(|(lane, _)| *lane == self.number).map(|(_, id)| *id)
    }

    /// The last request of this lane in the list.
    fn last(&self, list: &BTreeSet<(u64, WaiterId)>) -> Option<WaiterId> {
        let last = list.range(..(self.number.wrapping_add(1), WaiterId::FIRST)).next_back();
        last.filter(|(lane, _)| *lane == self.number).map(|(_, id)| *id)
    }
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            tickets: 0,
            waiters: BTreeMap::new(),
            lanes: KeyMap::default(),
            lane_numbers: 0,
            lane_entries: BTreeSet::new(),
            multi_key: BTreeSet::new(),
            by_owner: BTreeMap::new(),
            by_actor: BTreeSet::new(),
            lowest: LockKey::new(i32::MIN, &[]),
            by_length: BTreeSet::new(),
            looks: BTreeSet::new(),
        }
    }
}

impl<T> Queue<T> {
    /// The position that the next call of [`Queue::join`] assigns to a request that arrived at `arrived`.
    pub fn next_id(&self, arrived: Millis) -> WaiterId {
        WaiterId { arrived, ticket: self.tickets }
    }

    /// The position behind all waiting requests.
    pub fn end(&self) -> WaiterId {
        self.waiters.last_key_value().map_or(WaiterId::FIRST, |(last, _)| last.next())
    }

    /// Whether the queue of a key has a request behind this position.
    pub fn has_behind(&self, key: &LockKey, id: WaiterId) -> bool {
        let lane = self.lanes.get(key.db, &key.name);
        lane.and_then(|lane| lane.last(&self.lane_entries)).is_some_and(|last| last > id)
    }

    /// The owner that held a contended key when it was last granted or read. Another client may have written the key
    /// since. The search for deadlocks reads this owner's field first.
    pub fn likely_holder(&self, key: &LockKey) -> Option<&Owner> {
        self.lanes.get(key.db, &key.name)?.likely_holder.as_ref()
    }

    /// Records that this owner now holds a key. Does nothing if no request waits for the key.
    pub fn note_holder(&mut self, key: &LockKey, owner: &Owner) {
        if let Some(lane) = self.lanes.get_mut(key.db, &key.name) {
            lane.likely_holder = Some(owner.clone());
        }
    }

    /// Schedules when to examine a key that no client touches: normally when the next lease of its holders ends.
    /// `None`: never. Does nothing if no request waits for the key.
    pub fn look_at(&mut self, key: &LockKey, at: Option<Millis>) {
        let Some(lane) = self.lanes.get_mut(key.db, &key.name) else { return };
        let before = std::mem::replace(&mut lane.look_at, at);
        if before != at {
            if let Some(before) = before {
                self.looks.remove(&(before, key.clone()));
            }
            self.looks.extend(at.map(|at| (at, key.clone())));
        }
    }

    /// Like [`Queue::look_at`], but keeps an earlier time.
    pub fn look_earlier(&mut self, key: &LockKey, at: Millis) {
        let before = self.lanes.get(key.db, &key.name).and_then(|lane| lane.look_at);
        if before.is_none_or(|before| at < before) {
            self.look_at(key, Some(at));
        }
    }

    /// The earliest time at which a key has to be examined.
    pub fn first_look(&self) -> Option<Millis> {
        self.looks.first().map(|(at, _)| *at)
    }

    /// Unschedules and returns the key that is due first; `None` if none is due by now.
    pub fn take_look(&mut self, now: Millis) -> Option<LockKey> {
        let (_, key) = self.looks.first().filter(|(at, _)| *at <= now)?.clone();
        self.look_at(&key, None);
        Some(key)
    }

    /// Adds a request behind all requests that arrived before it. Its owner must not wait for any of the keys yet.
    pub fn join(
        &mut self,
        owner: Owner,
        keys: impl Into<Rc<[LockKey]>>,
        demand: Demand,
        arrived: Millis,
        until: Option<Millis>,
        requester: T,
    ) -> WaiterId {
        let id = self.next_id(arrived);
        let keys = keys.into();
        self.tickets = self.tickets.wrapping_add(1);
        for key in keys.iter() {
            let lane = self.lanes.get_or_default(key);
            if lane.waiting == 0 {
                self.lane_numbers = self.lane_numbers.wrapping_add(1);
                lane.number = self.lane_numbers;
            }
            self.lane_entries.insert((lane.number, id));
            if keys.len() > 1 {
                self.multi_key.insert((lane.number, id));
            }
            let before = lane.waiting;
            lane.waiting = before.saturating_add(1);
            self.update_length(key, before, before.saturating_add(1));
            if self.by_owner.insert((owner.clone(), key.clone()), id).is_some() {
                internal_errors::report("an owner waits twice for a key");
            }
        }
        if actor::has_suffix(&owner) {
            self.by_actor.insert((actor::of(&owner), id));
        }
        let waiter = Waiter { id, owner, keys, demand, until, requester };
        self.waiters.insert(id, Box::new(waiter));
        id
    }

    /// Removes a request, whatever its position. Returns `None` if it has already left.
    pub fn leave(&mut self, id: WaiterId) -> Option<Box<Waiter<T>>> {
        let waiter = self.waiters.remove(&id)?;
        for key in waiter.keys.iter() {
            let Some(lane) = internal_errors::expect(self.lanes.get_mut(key.db, &key.name), "a waiter has no lane")
            else {
                continue;
            };
            self.lane_entries.remove(&(lane.number, id));
            self.multi_key.remove(&(lane.number, id));
            let left = lane.waiting.saturating_sub(1);
            lane.waiting = left;
            if left == 0 {
                self.look_at(key, None);
                self.lanes.remove(key.db, &key.name);
            }
            self.update_length(key, left.saturating_add(1), left);
            let listed = self.by_owner.remove(&(waiter.owner.clone(), key.clone()));
            internal_errors::expect(listed, "a waiter is not listed under its owner");
        }
        // The list is normally empty, so that the owner's name need not be searched.
        let is_listed = !self.by_actor.is_empty() && actor::has_suffix(&waiter.owner);
        if is_listed && !self.by_actor.remove(&(actor::of(&waiter.owner), id)) {
            internal_errors::report("a waiter is not listed under its actor");
        }
        Some(waiter)
    }

    /// The waiting requests of an actor: first those under its own name, then those of its owners with a `##`, each
    /// group in order of arrival. Reads at most `most` entries of each group. (In the first, a request has one entry
    /// per key.)
    pub fn of_actor(&self, actor: &Actor, most: usize) -> impl Iterator<Item = &Waiter<T>> {
        let own: BTreeSet<WaiterId> = self.of_owner(actor).take(most).collect();
        let first = (actor.clone(), WaiterId::FIRST);
        let others = self.by_actor.range(first..).take_while(move |(of, _)| *of == *actor).map(|(_, id)| *id);
        own.into_iter().chain(others.take(most)).filter_map(|id| self.get(id))
    }

    /// The ids of an owner's requests, once for each key.
    fn of_owner(&self, owner: &Owner) -> impl Iterator<Item = WaiterId> {
        let all = self.by_owner.range((owner.clone(), self.lowest.clone())..);
        all.take_while(move |((of, _), _)| *of == *owner).map(|(_, id)| *id)
    }

    /// The multi-key requests ahead of position `of` in the queue of a key, in order.
    pub fn multi_key_ahead(&self, key: &LockKey, of: WaiterId) -> impl Iterator<Item = &Waiter<T>> {
        let lane = self.lanes.get(key.db, &key.name).into_iter().flat_map(|lane| lane.ids(&self.multi_key));
        lane.take_while(move |id| *id < of).filter_map(|id| self.get(id))
    }

    /// Updates the list of keys with several waiters.
    fn update_length(&mut self, key: &LockKey, before: usize, after: usize) {
        if before > 1 {
            self.by_length.remove(&(key.db, Reverse(before), key.name.clone()));
        }
        if after > 1 {
            self.by_length.insert((key.db, Reverse(after), key.name.clone()));
        }
    }

    /// Replaces a request with another one of the same owner for the same keys, in any order. The new request takes
    /// over the position. Returns the old one.
    pub fn replace(&mut self, id: WaiterId, mut new: Box<Waiter<T>>) -> Option<Box<Waiter<T>>> {
        let place = self.waiters.get_mut(&id)?;
        new.id = id;
        Some(std::mem::replace(place, new))
    }

    /// A waiting request.
    pub fn get(&self, id: WaiterId) -> Option<&Waiter<T>> {
        self.waiters.get(&id).map(Box::as_ref)
    }

    /// The request of an owner for a key.
    pub fn request_of(&self, owner: &Owner, key: &LockKey) -> Option<WaiterId> {
        self.by_owner.get(&(owner.clone(), key.clone())).copied()
    }

    /// A contended key. Its name is the string that its waiters share.
    pub fn contended_key(&self, db: i32, name: &[u8]) -> Option<LockKey> {
        self.lanes.key(db, name)
    }

    /// The head of the queue of a key.
    pub fn head(&self, db: i32, name: &[u8]) -> Option<WaiterId> {
        self.lanes.get(db, name)?.first(&self.lane_entries)
    }

    /// How many requests wait for a key.
    pub fn waiting(&self, db: i32, name: &[u8]) -> usize {
        self.lanes.get(db, name).map_or(0, |lane| lane.waiting)
    }

    /// The requests that wait for a key, in order.
    pub fn lane(&self, db: i32, name: &[u8]) -> impl Iterator<Item = &Waiter<T>> {
        let lane = self.lanes.get(db, name).into_iter().flat_map(|lane| lane.ids(&self.lane_entries));
        lane.filter_map(|id| self.get(id))
    }

    /// Whether an owner waits for any key.
    pub fn waits(&self, owner: &Owner) -> bool {
        self.of_owner(owner).next().is_some()
    }

    /// How many requests wait, for all keys.
    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Whether no request waits.
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// How many keys are contended.
    pub fn contended(&self) -> usize {
        self.lanes.len()
    }

    /// The keys of one database with several waiters, and the number of waiters of each; the longest queue first.
    pub fn longest_queues(&self, db: i32) -> impl Iterator<Item = (LockKey, usize)> {
        let first = (db, Reverse(usize::MAX), Rc::from([]));
        let in_db = self.by_length.range(first..).take_while(move |(of, ..)| *of == db);
        in_db.map(move |(_, Reverse(waiters), name)| (LockKey { db, name: name.clone() }, *waiters))
    }

    /// All waiting requests from one position on, in order of arrival.
    pub fn from(&self, id: WaiterId) -> impl Iterator<Item = &Waiter<T>> {
        self.waiters.range(id..).map(|(_, waiter)| waiter.as_ref())
    }

    /// All waiting requests, in order of arrival.
    pub fn iter(&self) -> impl Iterator<Item = &Waiter<T>> {
        self.waiters.values().map(Box::as_ref)
    }
}
