//! Which request is served next, whatever it was that changed a lock.
//!
//! The [`Agenda`] hands out one [`Job`] at a time and is told its result, so the caller, who does the jobs, may stop
//! between any two of them, let others in, and continue later. No request overtakes meanwhile: a newcomer queues behind all
//! who wait, served or about to be.

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
    /// The lock as the asking owner sees it.
    Lock(Standing),
    /// The key holds something that is not a lock.
    NotALock,
    /// Replicas have yet to confirm what the asking owner was granted, or a renewal of it.
    BeingConfirmed,
    /// Another server decides on this key, or soon will: no request is granted here.
    Elsewhere,
    /// It can't be read in this step: it has too many holders for one of several locks.
    TooMuch,
}

/// The locks: the keyspace, or a model of it.
pub trait View {
    /// The lock as `owner` sees it. A view used for serving may remove what has run out on the way, which changes
    /// nothing about what is seen.
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight;
}

impl<F: FnMut(&LockKey, &Owner) -> Sight> View for F {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight {
        self(key, owner)
    }
}

/// How a wait ends in the queue itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// Granted: a [`Decision::Grant`] or [`Decision::Reenter`] for each key, in the order of the waiter's keys.
    Granted(Vec<Decision>),
    /// The key became something that is not a lock.
    NotALock,
    /// The locks can't be read in one step: the one at this place has too many holders for one of several.
    TooMuch(usize),
    /// The owner came to hold a lock in another way, which contradicts the request.
    Refused(Decision),
}

/// Who changed a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// A place may have become free, or the queue's head has left.
    Freed,
    /// Another client wrote the key without this module, so any owner may hold it now.
    Foreign,
}

/// What is still to be examined.
#[derive(Clone, Debug)]
enum Task {
    /// The head of a key's queue.
    Head(LockKey, Change),
    /// Those who hold the key and also wait for it.
    Holders(LockKey),
    /// The request of this owner, who now holds the key, or may hold it.
    Owner(LockKey, Owner),
}

/// What has to be done next.
#[derive(Debug)]
pub enum Job {
    /// Judge a waiting request: [`Attempt::judge`], then [`Agenda::ended`] if that ends its wait.
    Judge(Attempt),
    /// Find out who holds a lock, then call [`Agenda::held_by`].
    FindHolders(LockKey),
    /// Nothing: what was noted makes no difference any more. (A job of its own, so that the caller may stop between any two.)
    Nothing,
}

/// A waiting request that may not have to wait any longer.
#[derive(Debug)]
pub struct Attempt {
    id: WaiterId,
    owner: Owner,
    keys: Rc<[LockKey]>,
    demand: Demand,
    /// Whether others are ahead of it in the queue of any of its keys: then it gets none of them.
    ahead: Ahead,
}

impl Attempt {
    /// Whose request it is.
    pub fn id(&self) -> WaiterId {
        self.id
    }

    /// How many keys it is for.
    pub fn keys(&self) -> usize {
        self.keys.len()
    }

    /// Its only key, if it has just one, and its owner.
    pub fn only_key(&self) -> Option<(LockKey, Owner)> {
        match &*self.keys {
            [key] => Some((key.clone(), self.owner.clone())),
            _ => None,
        }
    }

    /// Looks at the locks and decides: all of the keys or none. `None`: it goes on waiting.
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

    /// Decides on one of the keys; `None`: what its owner has of it will be known later.
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
            Sight::TooMuch => return Err(WaitEnd::TooMuch(place)),
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
    /// The changed locks, the one that has waited longest first: under a standing backlog, each has its turn.
    order: VecDeque<LockKey>,
    tasks: Vec<Task>,
}

impl Agenda {
    /// Its pieces, for who drops it as a whole.
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

    /// Records that what an owner waits for may not have to wait for its own grant any more.
    pub fn note_owner(&mut self, key: LockKey, owner: Owner) {
        self.tasks.push(Task::Owner(key, owner));
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty() && self.tasks.is_empty()
    }

    /// The next thing to do; `None`: nothing is left.
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

    /// Reports who holds a lock. Those of them who wait for it may re-enter it, or never get it.
    pub fn held_by<T>(&mut self, queue: &Queue<T>, key: &LockKey, holders: Vec<Owner>) {
        let waiting = holders.into_iter().filter(|owner| queue.request_of(owner, key).is_some());
        self.tasks.extend(waiting.map(|owner| Task::Owner(key.clone(), owner)));
    }

    /// The wait of a request has ended: it leaves the queue. `None` if it has left already.
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

/// What must be examined in a request because one of its keys has changed; `None` if that can't make a difference to it.
fn attempt<T>(queue: &Queue<T>, id: WaiterId, change: Change) -> Option<Attempt> {
    let Waiter { owner, keys, demand, .. } = queue.get(id)?;
    let is_first = keys.iter().all(|key| queue.head(key.db, &key.name) == Some(id));
    let ahead = if is_first { Ahead::Nobody } else { Ahead::Somebody };
    // A place that has become free ends the wait of a request only by a grant.
    let makes_difference = is_first || change == Change::Foreign;
    makes_difference.then(|| Attempt { id, owner: owner.clone(), keys: keys.clone(), demand: *demand, ahead })
}
