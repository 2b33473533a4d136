//! Collecting everything that a request depends on.
//!
//! Each owner that is met is asked what it waits for; each lock, who waits for it and who holds it. Each is met only
//! once. The queue of a lock is read before its holders, so that an owner who is granted the lock in between is found
//! twice rather than not at all.

use super::arena::{Index, next};
use super::graph::{Graph, LockIx, OwnerIx, WaitIx};
use super::{Budget, LOOK, PAGE, PLACE, Present, Visible};
use crate::lock::{Deadline, LockKey, Owner, WaiterId};
use std::collections::BTreeSet;

/// The progress of the exploration.
#[derive(Debug)]
pub struct Explorer {
    /// The request that the search is for.
    candidate: WaitIx,
    /// The database it is in: what is elsewhere does not matter.
    db: i32,
    /// Whether it stands in the queue itself.
    has_joined: bool,
    /// Requests that came later do not matter: if one of them closes a cycle, its own search finds it. So what can be
    /// met is finite.
    newest: WaiterId,
    next_owner: OwnerIx,
    next_lock: LockIx,
    current: Current,
}

/// What is being read.
#[derive(Debug)]
enum Current {
    /// Nothing: the next owner or lock is to be chosen.
    Nothing,
    /// The candidate's keys, from this one on.
    Wanted(usize),
    /// An owner's requests, from this one on.
    Requests(OwnerIx, WaiterId),
    /// The keys of one of them, from this one on.
    Keys(OwnerIx, WaiterId, usize),
    /// A lock's queue, from this request on.
    Queue(LockIx, WaiterId),
    /// A lock, and its first holders.
    Lock(LockIx),
    /// Its further holders.
    Holders(Holders),
}

/// A lock's holders, while they are being found.
#[derive(Debug)]
struct Holders {
    lock: LockIx,
    way: Way,
}

/// How they are found.
#[derive(Debug)]
enum Way {
    /// All who hold it are listed, from here on, and those who wait are picked out.
    List(Option<(Deadline, Owner)>),
    /// All who wait are asked whether they hold it, from this request on; these owners have been asked already.
    Ask(WaiterId, BTreeSet<Owner>),
}

impl Explorer {
    /// Begins with the keys of a request, all in this database.
    pub fn new(candidate: WaitIx, db: i32, newest: WaiterId) -> Self {
        Self {
            candidate,
            db,
            has_joined: false,
            newest,
            next_owner: OwnerIx::new(0),
            next_lock: LockIx::new(0),
            current: Current::Wanted(0),
        }
    }

    /// The candidate stands in the queue from now on.
    pub fn joined(&mut self, id: WaiterId) {
        self.has_joined = true;
        self.newest = id;
    }

    /// Reads a part. Returns whether everything has been read.
    pub fn step<T, V: Visible>(&mut self, graph: &mut Graph, wanted: &[LockKey], now: &mut Present<T, V>) -> bool {
        self.current = match std::mem::replace(&mut self.current, Current::Nothing) {
            Current::Nothing => match self.choose(graph, now) {
                Some(current) => current,
                None => return true,
            },
            Current::Wanted(from) => {
                read_keys(graph, wanted, from, now.budget).map_or(Current::Nothing, Current::Wanted)
            }
            Current::Requests(owner, from) => self.read_requests(graph, owner, from, now),
            Current::Keys(owner, id, from) => {
                let keys = now.queue.get(id).map_or(&[][..], |waiter| &waiter.keys);
                let after = Current::Requests(owner, WaiterId(id.0.saturating_add(1)));
                read_keys(graph, keys, from, now.budget).map_or(after, |from| Current::Keys(owner, id, from))
            }
            Current::Queue(lock, from) => match self.read_queue(graph, lock, from, now) {
                Some(from) => Current::Queue(lock, from),
                None => {
                    // The candidate's keys were the first to be met.
                    if !self.has_joined && lock.position() < wanted.len() {
                        graph.add_place(lock, self.candidate);
                    }
                    Current::Lock(lock)
                }
            },
            Current::Lock(lock) => {
                self.read_lock(graph, lock, now).map_or(Current::Nothing, |holders| self.find(graph, holders, now))
            }
            Current::Holders(holders) => {
                if let Way::List(_) = holders.way {
                    self.look_again(graph, holders.lock, now);
                }
                self.find(graph, holders, now)
            }
        };
        false
    }

    fn choose<T, V: Visible>(&mut self, graph: &Graph, now: &mut Present<T, V>) -> Option<Current> {
        now.budget.spend(1);
        if self.next_owner < graph.owners.end() {
            let owner = self.next_owner;
            self.next_owner = next(owner);
            return Some(Current::Requests(owner, WaiterId(0)));
        }
        let index = self.next_lock;
        let lock = graph.locks.get(index)?;
        self.next_lock = next(index);
        now.budget.spend(LOOK);
        let may_read = now.locks.may_read(&lock.key);
        Some(if may_read { Current::Queue(index, WaiterId(0)) } else { Current::Nothing })
    }

    fn read_requests<T, V>(
        &self,
        graph: &mut Graph,
        owner: OwnerIx,
        from: WaiterId,
        now: &mut Present<T, V>,
    ) -> Current {
        let Some(name) = graph.owners.get(owner).map(|party| party.name.clone()) else { return Current::Nothing };
        for waiter in now.queue.of_owner_from(&name, from) {
            if now.budget.is_spent() {
                return Current::Requests(owner, waiter.id);
            }
            now.budget.spend(1);
            match &*waiter.keys {
                [first, ..] if first.db != self.db || waiter.id > self.newest => {}
                [key] => drop(graph.lock(key)),
                _ => return Current::Keys(owner, waiter.id, 0),
            }
        }
        Current::Nothing
    }

    /// Reads a lock's queue. Returns where to go on, if the budget is used up before its end.
    fn read_queue<T, V>(
        &self,
        graph: &mut Graph,
        lock: LockIx,
        from: WaiterId,
        now: &mut Present<T, V>,
    ) -> Option<WaiterId> {
        let key = graph.locks.get(lock)?.key.clone();
        if from == WaiterId(0) {
            graph.begin_queue(lock);
        }
        for waiter in now.queue.lane_from(&key, from) {
            if now.budget.is_spent() {
                return Some(waiter.id);
            }
            now.budget.spend(PLACE);
            if waiter.id <= self.newest {
                let wait = graph.wait(waiter.id, &waiter.owner, waiter.demand.limit);
                graph.add_place(lock, wait);
            }
        }
        None
    }

    /// Looks at a lock. Returns how its holders are to be found, if there are any other than the candidate's owner.
    fn read_lock<T, V: Visible>(&self, graph: &mut Graph, lock: LockIx, now: &mut Present<T, V>) -> Option<Holders> {
        let me = graph.waits.get(self.candidate)?.owner;
        let standing = now.look(graph, lock, me)?;
        graph.set_limit(lock, standing.limit);
        // The cost is the smaller of the number of holders and the number of owners who wait.
        let ask_all = now.queue.owner_count().saturating_mul(LOOK).saturating_add(now.queue.len());
        let is_short = standing.holders <= ask_all.max(PAGE);
        let way = if is_short { Way::List(None) } else { Way::Ask(WaiterId(0), BTreeSet::new()) };
        if standing.own.is_some() {
            graph.add_holder(lock, me);
        }
        let others = standing.holders.saturating_sub(usize::from(standing.own.is_some()));
        (others > 0).then_some(Holders { lock, way })
    }

    /// Those who came since it was looked at may have made the limit stricter.
    fn look_again<T, V: Visible>(&self, graph: &mut Graph, lock: LockIx, now: &mut Present<T, V>) {
        let me = graph.waits.get(self.candidate).map(|wait| wait.owner);
        if let Some(standing) = me.and_then(|me| now.look(graph, lock, me)) {
            graph.set_limit(lock, standing.limit);
        }
    }

    fn find<T, V: Visible>(&self, graph: &mut Graph, mut holders: Holders, now: &mut Present<T, V>) -> Current {
        let key = graph.locks.get(holders.lock).map(|lock| lock.key.clone());
        let done = match (key, std::mem::replace(&mut holders.way, Way::List(None))) {
            (None, _) => true,
            (Some(key), Way::List(after)) => holders.list(graph, &key, after, now),
            (Some(key), Way::Ask(from, asked)) => self.ask_waiters(graph, &mut holders, &key, (from, asked), now),
        };
        if done { Current::Nothing } else { Current::Holders(holders) }
    }

    /// Asks some of those who wait whether they hold a lock. Returns whether these were the last.
    fn ask_waiters<T, V: Visible>(
        &self,
        graph: &mut Graph,
        holders: &mut Holders,
        key: &LockKey,
        (from, mut asked): (WaiterId, BTreeSet<Owner>),
        now: &mut Present<T, V>,
    ) -> bool {
        for waiter in now.queue.from(from) {
            if now.budget.is_spent() {
                holders.way = Way::Ask(waiter.id, asked);
                return false;
            }
            now.budget.spend(1);
            let is_here = waiter.keys.first().is_some_and(|key| key.db == self.db) && waiter.id <= self.newest;
            if is_here && asked.insert(waiter.owner.clone()) {
                now.budget.spend(LOOK);
                let standing = now.locks.look(key, &waiter.owner);
                if let Some(standing) = standing.filter(|standing| standing.own.is_some()) {
                    graph.set_limit(holders.lock, standing.limit);
                    let owner = graph.owner(&waiter.owner);
                    graph.add_holder(holders.lock, owner);
                }
            }
        }
        true
    }
}

impl Holders {
    /// Lists some of a lock's holders. Returns whether these were the last.
    fn list<T, V: Visible>(
        &mut self,
        graph: &mut Graph,
        key: &LockKey,
        after: Option<(Deadline, Owner)>,
        now: &mut Present<T, V>,
    ) -> bool {
        let page = now.locks.holders(key, after.as_ref(), PAGE);
        now.budget.spend(LOOK.saturating_add(page.len()));
        for (_, owner) in &page {
            if now.queue.waits(owner) {
                let owner = graph.owner(owner);
                graph.add_holder(self.lock, owner);
            }
        }
        let is_last = page.len() < PAGE;
        self.way = Way::List(page.into_iter().next_back());
        is_last
    }
}

/// Meets these locks from the given one on. Returns where to go on, if the budget is used up first.
fn read_keys(graph: &mut Graph, keys: &[LockKey], from: usize, budget: &mut Budget) -> Option<usize> {
    for (at, key) in keys.iter().enumerate().skip(from) {
        if budget.is_spent() {
            return Some(at);
        }
        budget.spend(1);
        graph.lock(key);
    }
    None
}
