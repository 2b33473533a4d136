//! The queue: strictly in order of arrival, over one key or several. A request that waited elsewhere arrived that much
//! earlier.

use super::{Actor, Demand, KeyMap, LockKey, Millis, Owner, actor, internal_errors};
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
    /// What the caller needs to answer it.
    pub asker: T,
}

impl<T> Waiter<T> {
    /// A request that is not in the queue. It is handed on in a box.
    pub fn new(owner: Owner, keys: Rc<[LockKey]>, demand: Demand, until: Option<Millis>, asker: T) -> Box<Self> {
        Box::new(Self { id: WaiterId::FIRST, owner, keys, demand, until, asker })
    }
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
    /// How many lanes there have been.
    lane_numbers: u64,
    /// The requests of each lane, in order.
    in_lanes: BTreeSet<(u64, WaiterId)>,
    /// Those of them that wait for other keys as well.
    of_several: BTreeSet<(u64, WaiterId)>,
    /// The request of each owner for each key: an owner has one at most.
    by_owner: BTreeMap<(Owner, LockKey), WaiterId>,
    /// Those whose owner is not called as its actor is, by actor.
    by_actor: BTreeSet<(Actor, WaiterId)>,
    /// No key comes before this one.
    lowest: LockKey,
    /// The keys with several waiters, those with the most first, by database.
    crowds: BTreeSet<(i32, Reverse<usize>, Rc<[u8]>)>,
    /// When keys have to be looked at although no client touches them: see [`Queue::look_at`].
    looks: BTreeSet<(Millis, LockKey)>,
}

/// The queue of one key. The requests of all lanes are in one tree, since a tree for each would take 200 bytes.
#[derive(Debug, Default)]
struct Lane {
    /// Its number; none is used twice.
    number: u64,
    /// How many requests it has.
    waiting: usize,
    /// See [`Queue::likely_holder`].
    likely_holder: Option<Owner>,
    /// See [`Queue::look_at`].
    look_at: Option<Millis>,
}

impl Lane {
    /// Those of its requests that are in a list, in order.
    fn ids(&self, list: &BTreeSet<(u64, WaiterId)>) -> impl Iterator<Item = WaiterId> {
        let end = (self.number.wrapping_add(1), WaiterId::FIRST);
        list.range((self.number, WaiterId::FIRST)..end).map(|(_, id)| *id)
    }

    /// The first of its requests. (A range that is open at its end is found by one search instead of two.)
    fn first(&self, list: &BTreeSet<(u64, WaiterId)>) -> Option<WaiterId> {
        let first = list.range((self.number, WaiterId::FIRST)..).next();
        first.filter(|(lane, _)| *lane == self.number).map(|(_, id)| *id)
    }

    /// The last of its requests.
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
            in_lanes: BTreeSet::new(),
            of_several: BTreeSet::new(),
            by_owner: BTreeMap::new(),
            by_actor: BTreeSet::new(),
            lowest: LockKey::new(i32::MIN, &[]),
            crowds: BTreeSet::new(),
            looks: BTreeSet::new(),
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

    /// Whether a request waits for a key behind this position.
    pub fn has_behind(&self, key: &LockKey, id: WaiterId) -> bool {
        let lane = self.lanes.get(key.db, &key.name);
        lane.and_then(|lane| lane.last(&self.in_lanes)).is_some_and(|last| last > id)
    }

    /// Who held a key that is waited for when it was last granted or read: the one to look for first, since others may have
    /// written the key.
    pub fn likely_holder(&self, key: &LockKey) -> Option<&Owner> {
        self.lanes.get(key.db, &key.name)?.likely_holder.as_ref()
    }

    /// A key is held by this owner now. Nothing is noted if no request waits for it.
    pub fn note_holder(&mut self, key: &LockKey, owner: &Owner) {
        if let Some(lane) = self.lanes.get_mut(key.db, &key.name) {
            lane.likely_holder = Some(owner.clone());
        }
    }

    /// Has a key looked at then, although no client touches it: when the next lease of its holders ends. `None`: no lease ends.
    /// Nothing is noted if no request waits for it.
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

    /// The same, unless it is looked at earlier.
    pub fn look_earlier(&mut self, key: &LockKey, at: Millis) {
        let before = self.lanes.get(key.db, &key.name).and_then(|lane| lane.look_at);
        if before.is_none_or(|before| at < before) {
            self.look_at(key, Some(at));
        }
    }

    /// When the first key has to be looked at.
    pub fn first_look(&self) -> Option<Millis> {
        self.looks.first().map(|(at, _)| *at)
    }

    /// The first key that has to be looked at by now.
    pub fn take_look(&mut self, now: Millis) -> Option<LockKey> {
        let (_, key) = self.looks.first().filter(|(at, _)| *at <= now)?.clone();
        self.look_at(&key, None);
        Some(key)
    }

    /// Adds a request behind all that arrived before it. Its owner waits for none of the keys yet.
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
        for key in keys.iter() {
            let lane = self.lanes.get_or_default(key);
            if lane.waiting == 0 {
                self.lane_numbers = self.lane_numbers.wrapping_add(1);
                lane.number = self.lane_numbers;
            }
            self.in_lanes.insert((lane.number, id));
            if keys.len() > 1 {
                self.of_several.insert((lane.number, id));
            }
            let before = lane.waiting;
            lane.waiting = before.saturating_add(1);
            self.resized(key, before, before.saturating_add(1));
            if self.by_owner.insert((owner.clone(), key.clone()), id).is_some() {
                internal_errors::report("an owner waits twice for a key");
            }
        }
        if actor::is_one_of_several(&owner) {
            self.by_actor.insert((actor::of(&owner), id));
        }
        let waiter = Waiter { id, owner, keys, demand, until, asker };
        self.waiters.insert(id, Box::new(waiter));
        id
    }

    /// Removes a request, whatever its position; `None` if it is gone already.
    pub fn leave(&mut self, id: WaiterId) -> Option<Box<Waiter<T>>> {
        let waiter = self.waiters.remove(&id)?;
        for key in waiter.keys.iter() {
            let Some(lane) = internal_errors::expect(self.lanes.get_mut(key.db, &key.name), "a waiter has no lane")
            else {
                continue;
            };
            self.in_lanes.remove(&(lane.number, id));
            self.of_several.remove(&(lane.number, id));
            let left = lane.waiting.saturating_sub(1);
            lane.waiting = left;
            if left == 0 {
                self.look_at(key, None);
                self.lanes.remove(key.db, &key.name);
            }
            self.resized(key, left.saturating_add(1), left);
            let listed = self.by_owner.remove(&(waiter.owner.clone(), key.clone()));
            internal_errors::expect(listed, "a waiter is not listed under its owner");
        }
        // Mostly there are none, and the owner's name need not be searched.
        let is_listed = !self.by_actor.is_empty() && actor::is_one_of_several(&waiter.owner);
        if is_listed && !self.by_actor.remove(&(actor::of(&waiter.owner), id)) {
            internal_errors::report("a waiter is not listed under its actor");
        }
        Some(waiter)
    }

    /// What an actor waits for: first under its own name, then under others; each in order of arrival. Of the entries under
    /// each, no more than `most` are looked at: a request has one for each key.
    pub fn of_actor(&self, actor: &Actor, most: usize) -> impl Iterator<Item = &Waiter<T>> {
        let own: BTreeSet<WaiterId> = self.of_owner(actor).take(most).collect();
        let first = (actor.clone(), WaiterId::FIRST);
        let others = self.by_actor.range(first..).take_while(move |(of, _)| *of == *actor).map(|(_, id)| *id);
        own.into_iter().chain(others.take(most)).filter_map(|id| self.get(id))
    }

    /// The request of an owner for each key that it waits for.
    fn of_owner(&self, owner: &Owner) -> impl Iterator<Item = WaiterId> {
        let all = self.by_owner.range((owner.clone(), self.lowest.clone())..);
        all.take_while(move |((of, _), _)| *of == *owner).map(|(_, id)| *id)
    }

    /// The requests for several keys that stand ahead of a position in the queue of a key.
    pub fn several_ahead(&self, key: &LockKey, of: WaiterId) -> impl Iterator<Item = &Waiter<T>> {
        let lane = self.lanes.get(key.db, &key.name).into_iter().flat_map(|lane| lane.ids(&self.of_several));
        lane.take_while(move |id| *id < of).filter_map(|id| self.get(id))
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

    /// Puts another request of the same owner for the same keys, in whatever order, in the place of this one, which is returned.
    pub fn replace(&mut self, id: WaiterId, mut new: Box<Waiter<T>>) -> Option<Box<Waiter<T>>> {
        let place = self.waiters.get_mut(&id)?;
        new.id = id;
        Some(std::mem::replace(place, new))
    }

    /// A waiting request.
    pub fn get(&self, id: WaiterId) -> Option<&Waiter<T>> {
        self.waiters.get(&id).map(Box::as_ref)
    }

    /// The request of an owner that waits for a key.
    pub fn request_of(&self, owner: &Owner, key: &LockKey) -> Option<WaiterId> {
        self.by_owner.get(&(owner.clone(), key.clone())).copied()
    }

    /// A key that is waited for. All who wait for it share its name.
    pub fn contended_key(&self, db: i32, name: &[u8]) -> Option<LockKey> {
        self.lanes.key(db, name)
    }

    /// Who is first in the queue of a key.
    pub fn head(&self, db: i32, name: &[u8]) -> Option<WaiterId> {
        self.lanes.get(db, name)?.first(&self.in_lanes)
    }

    /// How many wait for a key.
    pub fn waiting(&self, db: i32, name: &[u8]) -> usize {
        self.lanes.get(db, name).map_or(0, |lane| lane.waiting)
    }

    /// The requests that wait for a key, in order.
    pub fn lane(&self, db: i32, name: &[u8]) -> impl Iterator<Item = &Waiter<T>> {
        let lane = self.lanes.get(db, name).into_iter().flat_map(|lane| lane.ids(&self.in_lanes));
        lane.filter_map(|id| self.get(id))
    }

    /// Whether an owner waits for anything.
    pub fn waits(&self, owner: &Owner) -> bool {
        self.of_owner(owner).next().is_some()
    }

    /// How many wait, in all.
    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Whether no request waits.
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
