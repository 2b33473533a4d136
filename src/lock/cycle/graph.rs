//! Who waits for what, who holds what, and which of them can go on.

use super::arena::{Arena, index, next};
use crate::lock::{Limit, LockKey, Map, Owner, WaiterId};
use std::collections::BTreeMap;

index!(
    /// An owner.
    OwnerIx
);
index!(
    /// A request that waits.
    WaitIx
);
index!(
    /// A lock that somebody waits for.
    LockIx
);
index!(
    /// The place of one request in the queue of one lock.
    PlaceIx
);
index!(
    /// A hold of a lock by somebody who waits for another.
    HoldIx
);

/// An owner.
#[derive(Debug)]
pub struct Party {
    pub name: Owner,
    pub first_wait: Option<WaitIx>,
    pub first_hold: Option<HoldIx>,
    /// How many of its requests can't be granted yet; more than 0: it is stuck.
    pub lacking: usize,
    /// Its first and last place in the queue in which it was last met.
    places: Option<(LockIx, PlaceIx, PlaceIx)>,
    /// The lock that it was last found to hold.
    holds: Option<LockIx>,
}

/// A request.
#[derive(Debug)]
pub struct Wait {
    /// `None`: the candidate's, which does not stand in the queue yet.
    pub id: Option<WaiterId>,
    pub owner: OwnerIx,
    pub limit: Limit,
    pub first_place: Option<PlaceIx>,
    pub next_of_owner: Option<WaitIx>,
    /// In how many of its locks it has no room yet; 0: it can be granted.
    pub lacking: usize,
    /// It no longer waits, as was found out later.
    pub has_ended: bool,
}

/// A request in the queue of one lock.
#[derive(Debug)]
pub struct Place {
    pub wait: WaitIx,
    pub lock: LockIx,
    /// The first request of the same owner in this queue: perhaps this one.
    pub first_of_owner: PlaceIx,
    pub next_of_owner: Option<PlaceIx>,
    pub next_of_wait: Option<PlaceIx>,
    pub has_room: bool,
    /// For the first place of an owner: it holds the lock.
    pub owner_holds: bool,
    /// For the first place of an owner: where it gets the lock and keeps it, if it does not hold it.
    pub owner_keeps: Option<PlaceIx>,
    /// Its owner gets the lock through it and keeps it, because it is stuck elsewhere.
    pub keeps: bool,
    /// The request no longer stands here.
    pub is_gone: bool,
}

/// A hold by somebody who waits for something.
#[derive(Debug)]
pub struct Hold {
    pub owner: OwnerIx,
    pub lock: LockIx,
    pub next_of_owner: Option<HoldIx>,
    pub next_of_lock: Option<HoldIx>,
    /// Its owner is stuck and has it, as far as is known: it counts in [`Lock::stuck_holders`].
    pub counts: bool,
}

/// A lock.
#[derive(Debug)]
pub struct Lock {
    pub key: LockKey,
    pub limit: Limit,
    pub first_hold: Option<HoldIx>,
    /// Its queue: the places from here on …
    pub begin: PlaceIx,
    /// … up to here.
    pub end: PlaceIx,
    /// The first in the queue whose request can't be granted yet.
    pub head: PlaceIx,
    /// How many hold it now and are stuck.
    pub stuck_holders: usize,
    /// How many will hold it through a request ahead of the head and are stuck …
    pub stuck_ahead: usize,
    /// … and how many of them name each limit.
    pub limits_ahead: BTreeMap<Limit, usize>,
    /// A check of its holders is pending …
    pub in_doubt: bool,
    /// … and one for holders that bypassed the queue.
    pub is_foreign: bool,
}

impl Lock {
    /// Whether those who keep the lock leave no room for one more under this limit.
    pub fn is_crowded(&self, limit: Limit) -> bool {
        let now = if self.stuck_holders > 0 { self.limit } else { Limit::Shared };
        let ahead = self.limits_ahead.keys().next().copied().unwrap_or(Limit::Shared);
        let with_one_more = self.stuck_holders.saturating_add(self.stuck_ahead).saturating_add(1);
        !limit.min(now).min(ahead).allows(with_one_more)
    }
}

/// A step of the reduction. Each looks at one thing and leaves the rest to others.
#[derive(Clone, Copy, Debug)]
enum Task {
    /// The head of a lock's queue may have room now, or may be granted.
    Head(LockIx),
    /// A request is granted: others may follow it in the queue of this place and in those of its further places.
    Granted(PlaceIx),
    /// The owner has this lock: this place and its further places there need no room.
    Reenter(PlaceIx),
    /// The owner is no longer stuck: what it would have got through this request and its further ones becomes free …
    FreeWait(WaitIx),
    /// … in this place and in the request's further ones …
    FreePlace(PlaceIx),
    /// … and so does this hold, and its further ones.
    FreeHold(HoldIx),
}

/// All of it.
#[derive(Debug, Default)]
pub struct Graph {
    pub owners: Arena<OwnerIx, Party>,
    pub waits: Arena<WaitIx, Wait>,
    pub locks: Arena<LockIx, Lock>,
    pub places: Arena<PlaceIx, Place>,
    pub holds: Arena<HoldIx, Hold>,
    by_name: Map<Owner, OwnerIx>,
    by_id: Map<WaiterId, WaitIx>,
    by_key: Map<LockKey, LockIx>,
    tasks: Vec<Task>,
    /// Something has turned out to be no longer so since this was last taken.
    pub has_changed: bool,
}

/// Building it.
impl Graph {
    /// The owner of this name.
    pub fn owner(&mut self, name: &Owner) -> OwnerIx {
        if let Some(known) = self.by_name.get(name).copied() {
            return known;
        }
        let index = self.owners.push(Party {
            name: name.clone(),
            first_wait: None,
            first_hold: None,
            lacking: 0,
            places: None,
            holds: None,
        });
        self.by_name.insert(name.clone(), index);
        index
    }

    /// The lock of this name, to be explored if it is new.
    pub fn lock(&mut self, key: &LockKey) -> LockIx {
        if let Some(known) = self.by_key.get(key).copied() {
            return known;
        }
        let none = self.places.end();
        let index = self.locks.push(Lock {
            key: key.clone(),
            limit: Limit::Shared,
            first_hold: None,
            begin: none,
            end: none,
            head: none,
            stuck_holders: 0,
            stuck_ahead: 0,
            limits_ahead: BTreeMap::new(),
            in_doubt: false,
            is_foreign: false,
        });
        self.by_key.insert(key.clone(), index);
        index
    }

    /// The lock of this name, if it is known.
    pub fn known_lock(&self, key: &LockKey) -> Option<LockIx> {
        self.by_key.get(key).copied()
    }

    /// The request of this number, if it is known.
    pub fn known_wait(&self, id: WaiterId) -> Option<WaitIx> {
        self.by_id.get(&id).copied()
    }

    /// The request of this number.
    pub fn wait(&mut self, id: WaiterId, owner: &Owner, limit: Limit) -> WaitIx {
        if let Some(known) = self.by_id.get(&id).copied() {
            return known;
        }
        let owner = self.owner(owner);
        let index = self.add_wait(Some(id), owner, limit);
        self.by_id.insert(id, index);
        index
    }

    /// One more request.
    pub fn add_wait(&mut self, id: Option<WaiterId>, owner: OwnerIx, limit: Limit) -> WaitIx {
        let index = self.waits.end();
        let first = self.owners.get_mut(owner).and_then(|party| {
            party.lacking = party.lacking.saturating_add(1);
            party.first_wait.replace(index)
        });
        let next_of_owner = first;
        self.waits.push(Wait { id, owner, limit, first_place: None, next_of_owner, lacking: 0, has_ended: false })
    }

    /// Gives a request its number.
    pub fn number(&mut self, wait: WaitIx, id: WaiterId) {
        if let Some(row) = self.waits.get_mut(wait) {
            row.id = Some(id);
            self.by_id.insert(id, wait);
        }
    }

    /// The queue of this lock is read from now on, and no other until it is read.
    pub fn begin_queue(&mut self, lock: LockIx) {
        let begin = self.places.end();
        if let Some(lock) = self.locks.get_mut(lock) {
            (lock.begin, lock.end, lock.head) = (begin, begin, begin);
        }
    }

    /// Puts a request at the end of the queue of a lock, the one that is being read.
    pub fn add_place(&mut self, lock: LockIx, wait: WaitIx) {
        let index = self.places.end();
        let Some(row) = self.waits.get_mut(wait) else { return };
        row.lacking = row.lacking.saturating_add(1);
        let next_of_wait = row.first_place.replace(index);
        let Some(party) = self.owners.get_mut(row.owner) else { return };
        let before = party.places.filter(|(of, ..)| *of == lock);
        let first_of_owner = before.map_or(index, |(_, first, _)| first);
        party.places = Some((lock, first_of_owner, index));
        self.places.push(Place {
            wait,
            lock,
            first_of_owner,
            next_of_owner: None,
            next_of_wait,
            has_room: false,
            owner_holds: false,
            owner_keeps: None,
            keeps: false,
            is_gone: false,
        });
        if let Some(last) = before.and_then(|(.., last)| self.places.get_mut(last)) {
            last.next_of_owner = Some(index);
        }
        if let Some(lock) = self.locks.get_mut(lock) {
            lock.end = next(index);
        }
    }

    /// A holder of the lock that is being read.
    pub fn add_holder(&mut self, lock: LockIx, owner: OwnerIx) {
        let Some(party) = self.owners.get_mut(owner).filter(|party| party.holds != Some(lock)) else { return };
        party.holds = Some(lock);
        let first = party.places.filter(|(of, ..)| *of == lock).map(|(_, first, _)| first);
        self.add_hold(lock, owner, first);
    }

    /// One more hold; `waits_there`: some place of its owner in the lock's queue.
    pub fn add_hold(&mut self, lock: LockIx, owner: OwnerIx, waits_there: Option<PlaceIx>) {
        let index = self.holds.end();
        let (Some(row), Some(party)) = (self.locks.get_mut(lock), self.owners.get_mut(owner)) else { return };
        row.stuck_holders = row.stuck_holders.saturating_add(1);
        let next_of_owner = party.first_hold.replace(index);
        let next_of_lock = row.first_hold.replace(index);
        self.holds.push(Hold { owner, lock, next_of_owner, next_of_lock, counts: true });
        let first = waits_there.and_then(|place| self.places.get(place)).map(|place| place.first_of_owner);
        if let Some(place) = first.and_then(|first| self.places.get_mut(first)) {
            place.owner_holds = true;
            if let Some(keeps) = place.owner_keeps {
                self.keep_no_longer(keeps);
            }
        }
        self.tasks.extend(first.map(Task::Reenter));
    }
}

/// Ending it.
impl Graph {
    /// Frees a part of its memory, which takes some ten microseconds. Returns whether there was any. Freeing all of a
    /// large graph at once would take milliseconds.
    pub fn free_part(&mut self) -> bool {
        self.places.free_part()
            || self.holds.free_part()
            || self.waits.free_part()
            || self.locks.free_part()
            || self.owners.free_part()
            || self.by_id.free_part()
            || self.by_key.free_part()
            || self.by_name.free_part()
    }
}

/// Asking it.
impl Graph {
    /// Whether an owner can't go on.
    pub fn is_stuck(&self, owner: OwnerIx) -> bool {
        self.owners.get(owner).is_some_and(|party| party.lacking > 0)
    }

    /// The first place of the same owner in the same queue.
    pub fn first_of_owner(&self, place: PlaceIx) -> Option<&Place> {
        self.places.get(self.places.get(place)?.first_of_owner)
    }

    /// Whether a request is for a lock that its owner has already, or will have through another request.
    pub fn reenters(&self, place: PlaceIx) -> bool {
        self.first_of_owner(place).is_some_and(|first| first.owner_holds || first.owner_keeps.is_some())
    }

    /// Whether a request can't be granted.
    pub fn is_blocked(&self, wait: WaitIx) -> bool {
        self.waits.get(wait).is_some_and(|wait| wait.lacking > 0)
    }
}

/// Reducing it: a request that can be granted is granted, and an owner that waits for nothing more gives back what it
/// has, until nothing moves. Each thing moves once, so the cost is in proportion to how much there is.
impl Graph {
    /// Begins with an owner: one that waits for nothing is not stuck.
    pub fn begin_owner(&mut self, owner: OwnerIx) {
        let Some(party) = self.owners.get(owner) else { return };
        if party.first_wait.is_none() {
            self.tasks.extend(party.first_hold.map(Task::FreeHold));
        }
    }

    /// Begins with a request: one for nothing that may be seen is granted.
    pub fn begin_wait(&mut self, wait: WaitIx) {
        if self.waits.get(wait).is_some_and(|wait| wait.first_place.is_none()) {
            self.granted(wait);
        }
    }

    /// Begins with a lock.
    pub fn begin_lock(&mut self, lock: LockIx) {
        self.tasks.push(Task::Head(lock));
    }

    /// Takes one step; `false`: nothing moves any more.
    pub fn reduce(&mut self) -> bool {
        let Some(task) = self.tasks.pop() else { return false };
        let further = match task {
            Task::Head(lock) => self.move_head(lock).then_some(task),
            Task::Granted(place) => self.places.get(place).and_then(|row| {
                let further = row.next_of_wait.map(Task::Granted);
                self.tasks.push(Task::Head(row.lock));
                further
            }),
            Task::Reenter(place) => {
                self.give_room(place);
                self.places.get(place).and_then(|row| row.next_of_owner).map(Task::Reenter)
            }
            Task::FreeWait(wait) => self.waits.get(wait).and_then(|row| {
                self.tasks.extend(row.first_place.map(Task::FreePlace));
                row.next_of_owner.map(Task::FreeWait)
            }),
            Task::FreePlace(place) => {
                self.keep_no_longer(place);
                self.places.get(place).and_then(|row| row.next_of_wait).map(Task::FreePlace)
            }
            Task::FreeHold(hold) => {
                self.lose(hold);
                self.holds.get(hold).and_then(|row| row.next_of_owner).map(Task::FreeHold)
            }
        };
        self.tasks.extend(further);
        true
    }

    /// Moves on by one place in a lock's queue, or gives room to the first there. Returns whether that was possible.
    fn move_head(&mut self, index: LockIx) -> bool {
        let Some(head) = self.locks.get(index).filter(|lock| lock.head < lock.end).map(|lock| lock.head) else {
            return false;
        };
        let reenters = self.reenters(head);
        let (Some(lock), Some(place)) = (self.locks.get_mut(index), self.places.get(head)) else { return false };
        let Some(wait) = self.waits.get(place.wait) else { return false };
        if wait.lacking > 0 {
            let gets_room = !place.has_room && (reenters || !lock.is_crowded(wait.limit));
            if gets_room {
                self.give_room(head);
            }
            return gets_room;
        }
        lock.head = next(head);
        if !reenters && !place.is_gone && self.owners.get(wait.owner).is_some_and(|party| party.lacking > 0) {
            self.keep(head);
        }
        true
    }

    /// The owner of the request in this place gets the lock through it, and keeps it.
    fn keep(&mut self, place: PlaceIx) {
        let Some(row) = self.places.get_mut(place) else { return };
        row.keeps = true;
        let (wait, lock, first) = (row.wait, row.lock, row.first_of_owner);
        self.tasks.extend(row.next_of_owner.map(Task::Reenter));
        if let Some(first) = self.places.get_mut(first) {
            first.owner_keeps = Some(place);
        }
        if let (Some(lock), Some(wait)) = (self.locks.get_mut(lock), self.waits.get(wait)) {
            lock.stuck_ahead = lock.stuck_ahead.saturating_add(1);
            let many = lock.limits_ahead.entry(wait.limit).or_default();
            *many = many.saturating_add(1);
        }
    }

    fn give_room(&mut self, place: PlaceIx) {
        let Some(place) = self.places.get_mut(place).filter(|place| !place.has_room) else { return };
        place.has_room = true;
        let index = place.wait;
        let Some(wait) = self.waits.get_mut(index).filter(|wait| wait.lacking > 0) else { return };
        wait.lacking = wait.lacking.saturating_sub(1);
        if wait.lacking == 0 {
            self.granted(index);
        }
    }

    fn granted(&mut self, wait: WaitIx) {
        let Some(wait) = self.waits.get(wait) else { return };
        self.tasks.extend(wait.first_place.map(Task::Granted));
        let Some(party) = self.owners.get_mut(wait.owner) else { return };
        party.lacking = party.lacking.saturating_sub(1);
        if party.lacking == 0 {
            self.tasks.extend(party.first_wait.map(Task::FreeWait));
            self.tasks.extend(party.first_hold.map(Task::FreeHold));
        }
    }
}

/// Correcting it: what is no longer so.
impl Graph {
    /// A hold does not count any longer: it is lost, or its owner is free to give it back.
    pub fn lose(&mut self, hold: HoldIx) {
        let Some(hold) = self.holds.get_mut(hold).filter(|hold| hold.counts) else { return };
        hold.counts = false;
        if let Some(lock) = self.locks.get_mut(hold.lock) {
            lock.stuck_holders = lock.stuck_holders.saturating_sub(1);
        }
        self.tasks.push(Task::Head(hold.lock));
    }

    /// What an owner would have got through the request in this place does not count any longer.
    pub fn keep_no_longer(&mut self, place: PlaceIx) {
        let Some(place) = self.places.get_mut(place).filter(|place| place.keeps) else { return };
        place.keeps = false;
        let (wait, lock, first) = (place.wait, place.lock, place.first_of_owner);
        if let Some(first) = self.places.get_mut(first) {
            first.owner_keeps = None;
        }
        let Some(wait) = self.waits.get(wait) else { return };
        if let Some(lock) = self.locks.get_mut(lock)
            && let Some(many) = lock.limits_ahead.get_mut(&wait.limit)
        {
            lock.stuck_ahead = lock.stuck_ahead.saturating_sub(1);
            *many = many.saturating_sub(1);
            if *many == 0 {
                lock.limits_ahead.remove(&wait.limit);
            }
        }
        self.tasks.push(Task::Head(lock));
    }

    /// The limit of a lock, as it is now.
    pub fn set_limit(&mut self, lock: LockIx, limit: Limit) {
        let Some(row) = self.locks.get_mut(lock) else { return };
        let before = std::mem::replace(&mut row.limit, limit);
        if before < limit {
            self.has_changed = true;
            self.tasks.push(Task::Head(lock));
        }
    }

    /// A request no longer waits: it is in nobody's way. What its owner got through it is noted elsewhere.
    pub fn end(&mut self, wait: WaitIx) {
        let Some(row) = self.waits.get_mut(wait).filter(|wait| wait.lacking > 0) else { return };
        row.lacking = 0;
        self.granted(wait);
    }
}
