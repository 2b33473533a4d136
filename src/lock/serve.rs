//! Decides which request is served next after a lock has changed, whatever changed it.
//!
//! The [`Agenda`] hands out one [`Job`] at a time. The caller does the job and reports its result. It may pause between
//! two jobs, let the server run other commands, and continue later. No request overtakes meanwhile: a new request
//! queues behind all that wait, whether or not they have been examined.

use super::{
    Ahead, Decision, Demand, Limit, LockKey, Millis, Owner, Queue, Standing, Waiter, WaiterId, all_or_none, decide,
};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// The key holds something that is not a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotALock;

/// What can be seen of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// The lock as the requesting owner sees it.
    Lock(Standing),
    /// The key holds something that is not a lock.
    NotALock,
    /// Replicas are still confirming the requesting owner's grant or renewal.
    BeingConfirmed,
    /// Another server decides on this key, or soon will: this one grants no request for it.
    Elsewhere,
    /// The lock has too many holders to be read together with the other locks of its request.
    TooLarge,
}

/// The source of locks: the keyspace, or a model of it.
pub trait View {
    /// The lock as `owner` sees it. An implementation may remove expired holds while it reads, since that doesn't
    /// change what it returns.
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight;
}

impl<F: FnMut(&LockKey, &Owner) -> Sight> View for F {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight {
        self(key, owner)
    }
}

/// How the queue ends a wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// Granted: a [`Decision::Grant`] or [`Decision::Reenter`] for each key, in the order of the waiter's keys.
    Granted(Vec<Decision>),
    /// The key now holds something that is not a lock.
    NotALock,
    /// The locks can't be read together: the one with this index has too many holders.
    TooLarge(usize),
    /// The owner was granted a lock by another request, and that contradicts this one.
    Refused(Decision),
}

/// What kind of change a lock has had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// A place may have become free, or the head of the queue has left.
    Freed,
    /// Another client wrote the key without this module, so any owner may hold it now.
    Foreign,
}

/// A part of the queues that is still to be examined.
#[derive(Clone, Debug)]
enum Task {
    /// The head of a key's queue.
    Head(LockKey, Change),
    /// The owners that hold the key and also wait for it.
    Holders(LockKey),
    /// The request of this owner, which now holds the key, or may hold it.
    Owner(LockKey, Owner),
}

/// What the caller has to do next.
#[derive(Debug)]
pub enum Job {
    /// Decide on a waiting request: call [`Attempt::judge`], then [`Agenda::ended`] if that ends the wait.
    Judge(Attempt),
    /// Find out which owners hold a lock, then call [`Agenda::held_by`].
    FindHolders(LockKey),
    /// Nothing: the recorded change no longer matters. (A job of its own, so that the caller may pause between any
    /// two.)
    Nothing,
}

/// A waiting request that may not have to wait any longer.
#[derive(Debug)]
pub struct Attempt {
    id: WaiterId,
    owner: Owner,
    keys: Rc<[LockKey]>,
    demand: Demand,
    /// Whether another request is ahead of it in the queue of any of its keys. Then it is granted none of them.
    ahead: Ahead,
}

impl Attempt {
    /// Id of the request.
    pub fn id(&self) -> WaiterId {
        self.id
    }

    /// How many keys the request is for.
    pub fn keys(&self) -> usize {
        self.keys.len()
    }

    /// The key and the owner of a single-key request.
    pub fn only_key(&self) -> Option<(LockKey, Owner)> {
        match &*self.keys {
            [key] => Some((key.clone(), self.owner.clone())),
            _ => None,
        }
    }

    /// Reads the locks and decides: all of the keys or none. Returns `None` if the request has to go on waiting.
    pub fn judge(&self, locks: &mut impl View, now: Millis) -> Option<WaitEnd> {
        let keys = self.keys.iter().enumerate();
        let decisions: Result<Vec<_>, _> = keys.map(|(place, key)| self.decide(locks, place, key, now)).collect();
        let decisions = match decisions {
            Ok(decisions) => decisions.into_iter().collect::<Option<Vec<_>>>()?,
            Err(end) => return Some(end),
        };
        match all_or_none(&decisions) {
            Ok(()) => Some(WaitEnd::Granted(decisions)),
            Err(Decision::Wait) => None,
            Err(refusal) => Some(WaitEnd::Refused(refusal)),
        }
    }

    /// Decides on one of the keys. Returns `None` if that has to wait for the replicas, or for another server.
    fn decide(
        &self,
        locks: &mut impl View,
        place: usize,
        key: &LockKey,
        now: Millis,
    ) -> Result<Option<Decision>, WaitEnd> {
        let standing = match locks.look(key, &self.owner) {
            Sight::Lock(standing) => standing,
            Sight::NotALock => return Err(WaitEnd::NotALock),
            Sight::BeingConfirmed | Sight::Elsewhere => return Ok(None),
            Sight::TooLarge => return Err(WaitEnd::TooLarge(place)),
        };
        match decide(&standing, &self.demand, self.ahead, now) {
            refusal if refusal.is_refusal() => Err(WaitEnd::Refused(refusal)),
            decision => Ok(Some(decision)),
        }
    }
}

/// What must be examined because locks have changed.
#[derive(Debug, Default)]
pub struct Agenda {
    changed: BTreeMap<LockKey, Change>,
    /// The changed locks, in the order in which they changed, so that a constant backlog starves none of them.
    order: VecDeque<LockKey>,
    tasks: Vec<Task>,
}

impl Agenda {
    /// Takes the agenda apart, one entry at a time, so that the caller can free a large one in slices.
    pub fn into_pieces(self) -> impl Iterator<Item = ()> {
        let noted = self.changed.into_iter().map(drop).chain(self.order.into_iter().map(drop));
        noted.chain(self.tasks.into_iter().map(drop))
    }

    /// Records that a lock has changed.
    pub fn note(&mut self, key: LockKey, change: Change) {
        match self.changed.entry(key) {
            Entry::Occupied(mut noted) => {
                let noted = noted.get_mut();
                *noted = change.max(*noted);
            }
            Entry::Vacant(place) => {
                self.order.push_back(place.key().clone());
                place.insert(change);
            }
        }
    }

    /// Records that this owner's request for the key has to be examined: the owner's own hold no longer blocks it, or
    /// has changed.
    pub fn note_owner(&mut self, key: LockKey, owner: Owner) {
        self.tasks.push(Task::Owner(key, owner));
    }

    /// Whether there is nothing to examine.
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty() && self.tasks.is_empty()
    }

    /// The next job; `None` if nothing is left.
    pub fn next<T>(&mut self, queue: &Queue<T>) -> Option<Job> {
        let task = match self.tasks.pop() {
            Some(task) => task,
            None => {
                let key = self.order.pop_front()?;
                let Some(change) = self.changed.remove(&key) else { return Some(Job::Nothing) };
                if change == Change::Foreign {
                    self.tasks.push(Task::Holders(key.clone()));
                }
                Task::Head(key, change)
            }
        };
        let judge = |attempt: Option<Attempt>| attempt.map_or(Job::Nothing, Job::Judge);
        Some(match task {
            Task::Head(key, change) => {
                let head = queue.head(key.db, &key.name);
                judge(head.and_then(|head| attempt(queue, head, change)))
            }
            Task::Holders(key) if queue.head(key.db, &key.name).is_some() => Job::FindHolders(key),
            Task::Holders(_) => Job::Nothing,
            Task::Owner(key, owner) => {
                let request = queue.request_of(&owner, &key);
                judge(request.and_then(|id| attempt(queue, id, Change::Foreign)))
            }
        })
    }

    /// Takes the owners that hold a lock. Those that also wait for it are examined next: such a request re-enters the
    /// lock, or can never be granted.
    pub fn held_by<T>(&mut self, queue: &Queue<T>, key: &LockKey, holders: Vec<Owner>) {
        let waiting = holders.into_iter().filter(|owner| queue.request_of(owner, key).is_some());
        self.tasks.extend(waiting.map(|owner| Task::Owner(key.clone(), owner)));
    }

    /// Records that a request's wait has ended, and removes it from the queue. Returns `None` if it has already left.
    pub fn ended<T>(&mut self, queue: &mut Queue<T>, id: WaiterId, end: &WaitEnd) -> Option<Box<Waiter<T>>> {
        let waiter = queue.leave(id)?;
        for (place, key) in waiter.keys.iter().enumerate() {
            // A mutex that was just granted has no room for the next request.
            let is_full = matches!(end, WaitEnd::Granted(decisions)
                if matches!(decisions.get(place), Some(Decision::Grant(_, Limit::MUTEX))));
            if !is_full {
                let change = if *end == WaitEnd::NotALock { Change::Foreign } else { Change::Freed };
                self.tasks.push(Task::Head(key.clone(), change));
            } else if self.changed.get(key) == Some(&Change::Freed) {
                self.changed.remove(key);
            }
        }
        Some(waiter)
    }
}

/// The attempt to serve a request after one of its keys has changed; `None` if the change can't matter to it.
fn attempt<T>(queue: &Queue<T>, id: WaiterId, change: Change) -> Option<Attempt> {
    let Waiter { owner, keys, demand, .. } = queue.get(id)?;
    let is_first = keys.iter().all(|key| queue.head(key.db, &key.name) == Some(id));
    let ahead = if is_first { Ahead::NoRequest } else { Ahead::Requests };
    // A place that has become free can only lead to a grant, and only a request at the head of all its queues is
    // granted.
    let makes_difference = is_first || change == Change::Foreign;
    makes_difference.then(|| Attempt { id, owner: owner.clone(), keys: keys.clone(), demand: *demand, ahead })
}
