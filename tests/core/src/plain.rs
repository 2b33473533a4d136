//! The protocol's rule, implemented a second time with lists and loops, without optimisation.

use crate::lock::{Millis, WaiterId};
use std::collections::BTreeMap;
use std::fmt;

/// All locks and waiters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Plain {
    pub locks: BTreeMap<u32, PlainLock>,
    /// In order of arrival.
    pub waiters: Vec<PlainWaiter>,
    /// The number of grants.
    pub grants: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PlainLock {
    /// The key holds something else.
    pub not_a_lock: bool,
    /// In order of their numbers.
    pub holders: Vec<PlainHold>,
    /// The smallest limit named since the lock was last free; 0: none.
    pub limit: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PlainHold {
    pub owner: u32,
    pub holds: u64,
    /// The last millisecond of its lease.
    pub until: Option<Millis>,
    /// The number of its grant, for one key or several; `None`: another client wrote it.
    pub grant: Option<u64>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub struct PlainWaiter {
    /// Its position. Before it has one, only the arrival time counts.
    pub id: WaiterId,
    pub owner: u32,
    pub keys: Vec<u32>,
    pub limit: u32,
    /// Raises the hold count to this value; `None`: by one; 0: only for owners without a hold.
    pub to: Option<u64>,
    pub lease: Millis,
}

impl fmt::Debug for PlainWaiter {
    /// On one line, because histories are long.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { id, owner, keys, limit, to, lease } = self;
        let WaiterId { arrived, ticket } = id;
        write!(f, "#{ticket} of {arrived}: owner {owner}, keys {keys:?}, limit {limit}, holds {to:?}, lease {lease}")
    }
}

/// How a wait ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Granted,
    /// A key is not a lock.
    NotALock,
    /// The owner holds a key, with another limit.
    OtherLimit,
    /// Of several keys, the owner holds some, or all by several grants.
    HoldsSome,
    /// The owner holds a key, and the request is for owners without a hold.
    NotNew,
}

static FREE: PlainLock = PlainLock { not_a_lock: false, holders: Vec::new(), limit: 0 };

/// The smaller limit, where 0 is none.
pub fn stricter(one: u32, other: u32) -> u32 {
    match (one, other) {
        (0, limit) | (limit, 0) => limit,
        (one, other) => one.min(other),
    }
}

impl PlainLock {
    pub fn hold(&self, owner: u32) -> Option<&PlainHold> {
        self.holders.iter().find(|hold| hold.owner == owner)
    }

    /// The lock's limit if `limit` joined now.
    fn limit_with(&self, limit: u32) -> u32 {
        if self.holders.is_empty() { limit } else { stricter(self.limit, limit) }
    }

    fn has_room(&self, limit: u32) -> bool {
        let limit = self.limit_with(limit);
        limit == 0 || self.holders.len() < limit as usize
    }
}

impl Plain {
    pub fn lock(&self, key: u32) -> &PlainLock {
        self.locks.get(&key).unwrap_or(&FREE)
    }

    pub fn holds(&self, key: u32, owner: u32) -> bool {
        self.lock(key).hold(owner).is_some()
    }

    pub fn place(&self, id: WaiterId) -> Option<usize> {
        self.waiters.iter().position(|waiter| waiter.id == id)
    }

    /// Whether an owner waits for one of these keys. Then it makes no further request for any of them.
    pub fn awaits(&self, owner: u32, keys: &[u32]) -> bool {
        self.waiters.iter().any(|waiter| waiter.owner == owner && waiter.keys.iter().any(|key| keys.contains(key)))
    }

    /// The waiters for a key, in order.
    pub fn lane(&self, key: u32) -> Vec<WaiterId> {
        self.waiters.iter().filter(|waiter| waiter.keys.contains(&key)).map(|waiter| waiter.id).collect()
    }

    /// How a wait must end, or `None` if it continues.
    pub fn ending(&self, place: usize) -> Option<Ending> {
        let ahead = self.waiters.get(..place)?;
        self.ending_of(self.waiters.get(place)?, ahead)
    }

    /// How a new request ends immediately, or `None` if it waits.
    pub fn ending_at_once(&self, waiter: &PlainWaiter) -> Option<Ending> {
        self.ending_of(waiter, &self.waiters)
    }

    fn ending_of(&self, waiter: &PlainWaiter, ahead: &[PlainWaiter]) -> Option<Ending> {
        let locks = || waiter.keys.iter().map(|&key| self.lock(key));
        // A repetition (`HOLDS`) may name a larger limit than the lock has now, but no smaller one.
        let is_other = |lock: &PlainLock| {
            let is_repetition = |hold: &PlainHold| {
                waiter.to.is_some_and(|to| hold.holds >= to) && stricter(lock.limit, waiter.limit) == lock.limit
            };
            lock.limit != waiter.limit && lock.hold(waiter.owner).is_some_and(|hold| !is_repetition(hold))
        };
        let forbids = |lock: &PlainLock| {
            if lock.not_a_lock {
                Some(Ending::NotALock)
            } else if lock.hold(waiter.owner).is_some() && waiter.to == Some(0) {
                Some(Ending::NotNew)
            } else {
                is_other(lock).then_some(Ending::OtherLimit)
            }
        };
        if let Some(ending) = locks().find_map(forbids) {
            return Some(ending);
        }
        let held: Vec<&PlainHold> = locks().filter_map(|lock| lock.hold(waiter.owner)).collect();
        if let Some(first) = held.first() {
            return Some(if held.len() < waiter.keys.len() || held.iter().any(|hold| hold.grant != first.grant) {
                Ending::HoldsSome
            } else {
                Ending::Granted
            });
        }
        let is_behind = |key| ahead.iter().any(|other| other.keys.contains(key));
        let all = !waiter.keys.iter().any(is_behind) && locks().all(|lock| lock.has_room(waiter.limit));
        all.then_some(Ending::Granted)
    }

    /// Queues a request behind all that arrived before it.
    pub fn join(&mut self, waiter: PlainWaiter) {
        self.waiters.push(waiter);
        self.waiters.sort_by_key(|it| it.id);
    }

    /// Ends a wait.
    pub fn end(&mut self, place: usize, ending: Ending, now: Millis) {
        let waiter = self.waiters.remove(place);
        if ending == Ending::Granted {
            self.grant(&waiter, now);
        }
    }

    /// Writes a grant of all keys.
    pub fn grant(&mut self, waiter: &PlainWaiter, now: Millis) {
        self.grants += 1;
        for &key in &waiter.keys {
            let lock = self.locks.entry(key).or_default();
            let until = now + waiter.lease;
            if let Some(hold) = lock.holders.iter_mut().find(|hold| hold.owner == waiter.owner) {
                hold.holds = waiter.to.map_or(hold.holds + 1, |to| hold.holds.max(to));
                hold.until = hold.until.map(|before| before.max(until));
                hold.grant = hold.grant.or(Some(self.grants));
                continue;
            }
            lock.limit = lock.limit_with(waiter.limit);
            let holds = waiter.to.unwrap_or(1).max(1);
            lock.holders.push(PlainHold { owner: waiter.owner, holds, until: Some(until), grant: Some(self.grants) });
            lock.holders.sort_by_key(|hold| hold.owner);
        }
    }

    /// Removes a holder.
    pub fn release(&mut self, key: u32, owner: u32) {
        self.retain(key, |hold| hold.owner != owner);
    }

    /// Removes expired holders, and returns the keys that had any.
    pub fn expire(&mut self, now: Millis) -> Vec<u32> {
        let over = |hold: &PlainHold| hold.until.is_some_and(|until| until < now);
        let mut expired: Vec<u32> = self.locks.keys().copied().collect();
        expired.retain(|key| self.lock(*key).holders.iter().any(over));
        for &key in &expired {
            self.retain(key, |hold| !over(hold));
        }
        expired
    }

    fn retain(&mut self, key: u32, keep: impl Fn(&PlainHold) -> bool) {
        if let Some(lock) = self.locks.get_mut(&key) {
            lock.holders.retain(keep);
            if lock.holders.is_empty() && !lock.not_a_lock {
                self.locks.remove(&key);
            }
        }
    }

    /// Grants requests as far as possible, and returns them.
    pub fn serve(&mut self, now: Millis) -> Vec<WaiterId> {
        let mut served = Vec::new();
        while let Some((place, ending)) = self.first_to_end() {
            served.push(self.waiters[place].id);
            self.end(place, ending, now);
        }
        served
    }

    /// The first request, in order of arrival, whose wait must end.
    pub fn first_to_end(&self) -> Option<(usize, Ending)> {
        (0..self.waiters.len()).find_map(|place| Some((place, self.ending(place)?)))
    }

    /// The requests that wait forever if only owners without a request release their holds. `choose` picks which of them
    /// releases next.
    pub fn stuck(&self, mut choose: impl FnMut(usize) -> usize) -> Plain {
        let mut plain = self.clone();
        loop {
            plain.serve(0);
            let waits = |owner| plain.waiters.iter().any(|waiter| waiter.owner == owner);
            let holds = plain.locks.iter().flat_map(|(&key, lock)| lock.holders.iter().map(move |it| (key, it.owner)));
            let free: Vec<(u32, u32)> = holds.filter(|&(_, owner)| !waits(owner)).collect();
            let Some(&(key, owner)) = free.get(choose(free.len().max(1))) else { return plain };
            plain.release(key, owner);
        }
    }
}
