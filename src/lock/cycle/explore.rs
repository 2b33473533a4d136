//! Collecting everything that a request depends on.
//!
//! Each owner that is met is asked what it waits for, each lock who waits for it and who holds it; both are met once.
//! The queue of a lock is read before its holders: whoever is granted the lock in between is found twice rather than
//! not at all.

use super::arena::{Index, next};
use super::graph::{Graph, LockIx, OwnerIx, PlaceIx, WaitIx};
use super::{Budget, LOOK, PAGE, PLACE, Visible};
use crate::lock::{Deadline, LockKey, Owner, Queue, WaiterId};
use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};

/// How far it has come.
#[derive(Debug)]
pub struct Explorer {
    /// The request for which all this is done.
    pub candidate: WaitIx,
    /// Whether it stands in the queue itself.
    pub has_joined: bool,
    /// Requests that came later don't matter: if one of them closes a cycle, its own search finds that. So there is an
    /// end to what can be met.
    pub newest: WaiterId,
    next_owner: OwnerIx,
    next_lock: LockIx,
    current: Current,
}

/// The first and the last place of each owner in one queue.
type Ends = HashMap<OwnerIx, (PlaceIx, PlaceIx)>;

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
    Queue(LockIx, WaiterId, Ends),
    /// A lock.
    Lock(LockIx, Ends),
    /// Its holders.
    Holders(LockIx, Holders, Ends),
}

/// A lock's holders, and how they are found.
#[derive(Debug)]
struct Holders {
    found: HashSet<OwnerIx>,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// All who hold it are listed, from here on, and those who wait are picked out.
    List(Option<(Deadline, Owner)>),
    /// All who wait are asked whether they hold it, from this request on; these have been asked.
    Ask(WaiterId, HashSet<Owner>),
}

impl Explorer {
    /// Begins with the keys of a request.
    pub fn new(graph: &Graph, candidate: WaitIx, newest: WaiterId) -> Self {
        Self {
            candidate,
            has_joined: false,
            newest,
            next_owner: OwnerIx::new(0),
            next_lock: graph.locks.end(),
            current: Current::Wanted(0),
        }
    }

    /// Goes on until all is read, or the budget is used up; whether all is read.
    pub fn step<T>(
        &mut self,
        graph: &mut Graph,
        queue: &Queue<T>,
        locks: &mut impl Visible,
        wanted: &[LockKey],
        budget: &mut Budget,
    ) -> bool {
        let db = wanted.first().map_or(0, |key| key.db);
        self.current = match std::mem::replace(&mut self.current, Current::Nothing) {
            Current::Nothing => match self.choose(graph, locks, budget) {
                Some(current) => current,
                None => return true,
            },
            Current::Wanted(from) => read_keys(graph, wanted, from, budget).map_or(Current::Nothing, Current::Wanted),
            Current::Requests(owner, from) => self.read_requests(graph, queue, (owner, db), from, budget),
            Current::Keys(owner, id, from) => {
                let keys = queue.get(id).map_or(&[][..], |waiter| &waiter.keys);
                let after = Current::Requests(owner, WaiterId(id.0.saturating_add(1)));
                read_keys(graph, keys, from, budget).map_or(after, |from| Current::Keys(owner, id, from))
            }
            Current::Queue(lock, from, ends) => self.read_queue(graph, queue, (lock, from, ends), wanted, budget),
            Current::Lock(lock, ends) => self.read_lock(graph, queue, locks, (lock, ends), budget),
            Current::Holders(lock, mut holders, ends) => {
                let there = There { lock, ends: &ends, db };
                let done = match &mut holders.way {
                    Way::List(after) => self.list(graph, queue, locks, (&there, &mut holders.found), after, budget),
                    Way::Ask(from, asked) => {
                        self.ask(graph, queue, locks, (&there, &mut holders.found), (from, asked), budget)
                    }
                };
                if done { Current::Nothing } else { Current::Holders(lock, holders, ends) }
            }
        };
        false
    }

    fn choose(&mut self, graph: &Graph, locks: &mut impl Visible, budget: &mut Budget) -> Option<Current> {
        budget.spend(1);
        if self.next_owner < graph.owners.end() {
            let owner = self.next_owner;
            self.next_owner = next(owner);
            return Some(Current::Requests(owner, WaiterId(0)));
        }
        let index = self.next_lock;
        let lock = graph.locks.get(index)?;
        self.next_lock = next(index);
        budget.spend(LOOK);
        let may_read = locks.may_read(&lock.key);
        Some(if may_read { Current::Queue(index, WaiterId(0), Ends::new()) } else { Current::Nothing })
    }

    fn read_requests<T>(
        &self,
        graph: &mut Graph,
        queue: &Queue<T>,
        (owner, db): (OwnerIx, i32),
        from: WaiterId,
        budget: &mut Budget,
    ) -> Current {
        let Some(name) = graph.owners.get(owner).map(|party| party.name.clone()) else { return Current::Nothing };
        for waiter in queue.of_owner_from(&name, from) {
            if budget.is_spent() {
                return Current::Requests(owner, waiter.id);
            }
            budget.spend(1);
            match &*waiter.keys {
                [first, ..] if first.db != db || waiter.id > self.newest => {}
                [key] => drop(graph.lock(key)),
                _ => return Current::Keys(owner, waiter.id, 0),
            }
        }
        Current::Nothing
    }

    fn read_queue<T>(
        &self,
        graph: &mut Graph,
        queue: &Queue<T>,
        (lock, from, mut ends): (LockIx, WaiterId, Ends),
        wanted: &[LockKey],
        budget: &mut Budget,
    ) -> Current {
        let Some(key) = graph.locks.get_mut(lock).map(|row| row.key.clone()) else { return Current::Nothing };
        if from == WaiterId(0) {
            graph.begin_queue(lock);
        }
        for waiter in queue.lane_from(&key, from) {
            if budget.is_spent() {
                return Current::Queue(lock, waiter.id, ends);
            }
            budget.spend(PLACE);
            if waiter.id <= self.newest {
                let wait = graph.wait(waiter.id, &waiter.owner, waiter.request.limit);
                stand(graph, lock, wait, &mut ends);
            }
        }
        // The candidate's keys were the first to be met.
        if !self.has_joined && lock.position() < wanted.len() {
            stand(graph, lock, self.candidate, &mut ends);
        }
        Current::Lock(lock, ends)
    }

    fn read_lock<T>(
        &self,
        graph: &mut Graph,
        queue: &Queue<T>,
        locks: &mut impl Visible,
        (lock, ends): (LockIx, Ends),
        budget: &mut Budget,
    ) -> Current {
        let me = graph.waits.get(self.candidate).map(|wait| wait.owner);
        let name = me.and_then(|me| graph.owners.get(me)).map(|party| party.name.clone());
        let key = graph.locks.get(lock).map(|row| row.key.clone());
        let (Some(me), Some(name), Some(key)) = (me, name, key) else { return Current::Nothing };
        budget.spend(LOOK);
        let Some(standing) = locks.look(&key, &name) else { return Current::Nothing };
        graph.set_limit(lock, standing.limit);
        let mut found = HashSet::new();
        if standing.own.is_some() {
            found.insert(me);
            graph.add_hold(lock, me, ends.get(&me).map(|(first, _)| *first));
        }
        if standing.holders <= found.len() {
            return Current::Nothing;
        }
        let ask_all = queue.owners().len().saturating_mul(LOOK).saturating_add(queue.len());
        let way = if standing.holders <= ask_all.max(PAGE) {
            Way::List(None)
        } else {
            Way::Ask(WaiterId(0), HashSet::from_iter([name]))
        };
        Current::Holders(lock, Holders { found, way }, ends)
    }

    /// Lists some of a lock's holders; whether these were the last.
    fn list<T>(
        &self,
        graph: &mut Graph,
        queue: &Queue<T>,
        locks: &mut impl Visible,
        (there, found): (&There, &mut HashSet<OwnerIx>),
        after: &mut Option<(Deadline, Owner)>,
        budget: &mut Budget,
    ) -> bool {
        let Some(key) = graph.locks.get(there.lock).map(|row| row.key.clone()) else { return true };
        let page = locks.holders(&key, after.as_ref(), PAGE);
        budget.spend(LOOK.saturating_add(page.len()));
        for (_, owner) in &page {
            if queue.waits(owner) {
                there.holds(graph, owner, found);
            }
        }
        let is_last = page.len() < PAGE;
        *after = page.into_iter().next_back();
        is_last
    }

    /// Asks some of those who wait whether they hold a lock; whether these were the last.
    fn ask<T>(
        &self,
        graph: &mut Graph,
        queue: &Queue<T>,
        locks: &mut impl Visible,
        (there, found): (&There, &mut HashSet<OwnerIx>),
        (from, asked): (&mut WaiterId, &mut HashSet<Owner>),
        budget: &mut Budget,
    ) -> bool {
        let Some(key) = graph.locks.get(there.lock).map(|row| row.key.clone()) else { return true };
        for waiter in queue.from(*from) {
            if budget.is_spent() {
                *from = waiter.id;
                return false;
            }
            budget.spend(1);
            let is_here = waiter.keys.first().is_some_and(|key| key.db == there.db);
            if is_here && waiter.id <= self.newest && asked.insert(waiter.owner.clone()) {
                budget.spend(LOOK);
                if locks.look(&key, &waiter.owner).is_some_and(|standing| standing.own.is_some()) {
                    there.holds(graph, &waiter.owner, found);
                }
            }
        }
        true
    }
}

/// The lock whose holders are being found.
struct There<'a> {
    lock: LockIx,
    ends: &'a Ends,
    db: i32,
}

impl There<'_> {
    fn holds(&self, graph: &mut Graph, owner: &Owner, found: &mut HashSet<OwnerIx>) {
        let owner = graph.owner(owner);
        if found.insert(owner) {
            graph.add_hold(self.lock, owner, self.ends.get(&owner).map(|(first, _)| *first));
        }
    }
}

/// Meets these locks from the given one on; where to go on, if the budget is used up before.
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

fn stand(graph: &mut Graph, lock: LockIx, wait: WaitIx, ends: &mut Ends) {
    let Some(owner) = graph.waits.get(wait).map(|wait| wait.owner) else { return };
    let before = ends.get(&owner).copied();
    let place = graph.add_place(lock, wait, before);
    ends.insert(owner, (before.map_or(place, |(first, _)| first), place));
}
