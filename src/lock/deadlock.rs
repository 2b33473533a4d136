//! The search for a circle of waits.
//!
//! An owner is *stuck* if one of its requests can never be granted as long as every other stuck owner keeps what it
//! has. A request is granted once those ahead of it are granted and there is room beside the holders that are stuck:
//! with one place (a mutex) every blocker counts, in a semaphore a circle exists only when every place that would do
//! is kept by somebody stuck. That is the general resource graph of Holt ("Some deadlock properties of computer
//! systems", 1972), reduced as far as it goes; what can't be reduced is deadlocked. So there is no false alarm.
//!
//! A request with a time limit counts as waiting: it would only find out later.

use super::serve::{Sight, View};
use super::{Limit, LockKey, Owner, Queue, WaiterId};
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

/// How many queue places the search visits at most; beyond, it lets the request wait.
pub const BUDGET: usize = 200_000;

/// One wait of a circle: this owner waits for this key, which the next owner of the circle holds, or waits for ahead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Who waits.
    pub owner: Owner,
    /// For what.
    pub key: LockKey,
    /// Why it must wait for the next one.
    pub because: Because,
}

/// Why one owner waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Because {
    /// The other one holds the key.
    Holds,
    /// The other one waits for the key too, and came first.
    Ahead,
}

/// The request that is about to wait.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// For whom.
    pub owner: &'a Owner,
    /// For what.
    pub keys: &'a [LockKey],
    /// Under which limit.
    pub limit: Limit,
}

/// The circle that the request would close if it waited, beginning with its owner; `None` if it would close none.
///
/// Costs a look at the holders of its key while none of them waits for anything, a look at each key that is waited
/// for while these are fewer than those ahead, and grows else with the queues that can be reached, up to [`BUDGET`].
pub fn circle<T>(queue: &Queue<T>, locks: &mut impl View, candidate: Candidate) -> Option<Vec<Link>> {
    let ahead = candidate.keys.iter().map(|key| queue.waiting(key.db, &key.name)).sum();
    if queue.contended() <= ahead && !is_waited_for(queue, locks, candidate) {
        return None;
    }
    let mut graph = Graph { budget: BUDGET, ..Graph::default() };
    let request = graph.explore(queue, locks, candidate)?;
    graph.reduce()?;
    graph.shortest_circle(request)
}

/// Whether somebody waits for what the candidate's owner holds, or may stand behind a request of it.
fn is_waited_for<T>(queue: &Queue<T>, locks: &mut impl View, Candidate { owner, keys, .. }: Candidate) -> bool {
    // Who has to wait for a single lock does not hold it.
    let mut others = queue.contended_keys().filter(|key| keys != std::slice::from_ref(key));
    queue.waits(owner) || others.any(|key| matches!(locks.look(&key, owner), Sight::Lock(it) if it.own.is_some()))
}

#[derive(Debug)]
struct Request {
    owner: usize,
    limit: Limit,
    /// One for each lock it asks for.
    places: Vec<Place>,
    /// How many of them have no room yet; 0: it can be granted.
    lacking: usize,
}

/// A place in a lock's lane.
#[derive(Debug)]
struct Place {
    lock: usize,
    at: usize,
    has_room: bool,
    /// Those who keep what they have leave no room here; else, if there is none, somebody ahead is in the way.
    crowded: bool,
}

#[derive(Debug)]
struct Party {
    name: Owner,
    asks: Vec<usize>,
    /// How many of them can't be granted yet; more than 0: stuck.
    lacking: usize,
    /// The locks it holds, if it waits for something.
    held: Vec<usize>,
}

#[derive(Debug)]
struct Lock {
    key: LockKey,
    limit: Limit,
    /// Only those who wait for something: the others are free to go.
    holders: BTreeSet<usize>,
    /// Requests in order of arrival.
    lane: Vec<usize>,
}

#[derive(Debug, Default)]
struct Graph {
    budget: usize,
    indices: HashMap<Owner, usize>,
    owners: Vec<Party>,
    locks: Vec<Lock>,
    requests: Vec<Request>,
}

impl Graph {
    /// Collects everything that the candidate depends on; its index. `None`: no circle is possible, or too much to
    /// search.
    fn explore<T>(&mut self, queue: &Queue<T>, locks: &mut impl View, candidate: Candidate) -> Option<usize> {
        let mut seen: HashSet<LockKey> = HashSet::new();
        let mut reached: HashSet<usize> = HashSet::new();
        let mut requests: HashMap<WaiterId, usize> = HashMap::new();
        let mut todo: VecDeque<LockKey> = candidate.keys.iter().cloned().collect();
        let me = self.owner(candidate.owner);
        let mut met = vec![me];
        loop {
            for owner in met.drain(..).filter(|&owner| reached.insert(owner)) {
                let name = &self.owners[owner].name;
                todo.extend(queue.of_owner(name).flat_map(|waiter| waiter.keys.iter().cloned()));
            }
            let Some(key) = todo.pop_front() else { break };
            if !seen.insert(key.clone()) {
                continue;
            }
            let (limit, names) = waiting_holders(queue, locks, &key, candidate.owner);
            if names.is_empty() && candidate.keys.len() == 1 && self.locks.is_empty() && queue.is_simple() {
                return None; // Those who hold it are free, those ahead wait for nothing else: the queue flows.
            }
            self.spend(names.len().saturating_add(1))?;
            met.extend(names.iter().map(|name| self.owner(name)));
            let holders = met.iter().copied().collect();
            let mut lane = Vec::new();
            for waiter in queue.lane(key.db, &key.name) {
                self.spend(1)?;
                let owner = self.owner(&waiter.owner);
                let limit = waiter.request.limit;
                lane.push(*requests.entry(waiter.id).or_insert_with(|| self.request(owner, limit)));
                met.push(owner);
            }
            self.locks.push(Lock { key, limit, holders, lane });
        }
        let candidate_request = self.request(me, candidate.limit);
        let wanted: HashSet<&LockKey> = candidate.keys.iter().collect();
        for lock in self.locks.iter_mut().filter(|lock| wanted.contains(&lock.key)) {
            lock.lane.push(candidate_request);
        }
        for (lock, Lock { lane, holders, .. }) in self.locks.iter().enumerate() {
            for (at, &request) in lane.iter().enumerate() {
                self.requests[request].places.push(Place { lock, at, has_room: false, crowded: false });
                self.requests[request].lacking = self.requests[request].places.len();
            }
            for &holder in holders {
                self.owners[holder].held.push(lock);
            }
        }
        Some(candidate_request)
    }

    fn spend(&mut self, steps: usize) -> Option<()> {
        self.budget = self.budget.checked_sub(steps)?;
        Some(())
    }

    fn owner(&mut self, name: &Owner) -> usize {
        if let Some(&known) = self.indices.get(name) {
            return known;
        }
        let index = self.owners.len();
        self.indices.insert(name.clone(), index);
        self.owners.push(Party { name: name.clone(), asks: Vec::new(), lacking: 0, held: Vec::new() });
        index
    }

    fn request(&mut self, owner: usize, limit: Limit) -> usize {
        let index = self.requests.len();
        self.requests.push(Request { owner, limit, places: Vec::new(), lacking: 0 });
        let owner = &mut self.owners[owner];
        owner.asks.push(index);
        owner.lacking = owner.asks.len();
        index
    }

    /// Grants whatever can be granted until nothing more can; who is left is stuck. `None` if that takes too long.
    ///
    /// Looks at each lock, those explored last first, and again whenever something about it has changed.
    fn reduce(&mut self) -> Option<()> {
        let mut todo: Vec<usize> = (0..self.locks.len()).collect();
        let mut listed = vec![true; self.locks.len()];
        while let Some(lock) = todo.pop() {
            listed[lock] = false;
            self.spend(self.locks[lock].lane.len().saturating_add(1))?;
            for changed in self.flow(lock) {
                if !std::mem::replace(&mut listed[changed], true) {
                    todo.push(changed);
                }
            }
        }
        Some(())
    }

    /// Gives room to the requests in a lock's lane that have it once all who can go have gone; the locks that this
    /// changes something about.
    fn flow(&mut self, lock: usize) -> Vec<usize> {
        let lane = std::mem::take(&mut self.locks[lock].lane);
        let holders = std::mem::take(&mut self.locks[lock].holders);
        let mut keepers: HashSet<usize> = holders.iter().copied().filter(|&owner| self.is_stuck(owner)).collect();
        let mut strictest = if keepers.is_empty() { Limit::Shared } else { self.locks[lock].limit };
        let mut blocked = false;
        let mut changed = Vec::new();
        for &request in &lane {
            let owner = self.requests[request].owner;
            if holders.contains(&owner) || keepers.contains(&owner) {
                // A re-entry, now or after an earlier request of the same owner, needs no room.
                self.give_room(request, lock, &mut changed);
                continue;
            }
            let limit = strictest.min(self.requests[request].limit);
            let crowded = !limit.allows(keepers.len().saturating_add(1));
            if let Some(place) = self.requests[request].places.iter_mut().find(|place| place.lock == lock) {
                place.crowded = crowded;
            }
            if !blocked && !crowded {
                self.give_room(request, lock, &mut changed);
            }
            if self.requests[request].lacking > 0 {
                blocked = true;
            } else if self.is_stuck(owner) {
                keepers.insert(owner);
                strictest = limit;
            }
        }
        self.locks[lock].lane = lane;
        self.locks[lock].holders = holders;
        changed
    }

    /// Notes that a request has room in one of its locks, and what follows.
    fn give_room(&mut self, request: usize, lock: usize, changed: &mut Vec<usize>) {
        let request = &mut self.requests[request];
        let Some(place) = request.places.iter_mut().find(|place| place.lock == lock && !place.has_room) else { return };
        place.has_room = true;
        request.lacking = request.lacking.saturating_sub(1);
        if request.lacking > 0 {
            return;
        }
        changed.extend(request.places.iter().map(|place| place.lock));
        let owner = &mut self.owners[request.owner];
        owner.lacking = owner.lacking.saturating_sub(1);
        if owner.lacking == 0 {
            let asks = owner.asks.iter().flat_map(|&ask| self.requests[ask].places.iter().map(|place| place.lock));
            changed.extend(asks.chain(owner.held.iter().copied()));
        }
    }

    fn is_stuck(&self, owner: usize) -> bool {
        self.owners[owner].lacking > 0
    }

    /// The shortest way from a request through those who block it, back to its owner.
    fn shortest_circle(&self, candidate: usize) -> Option<Vec<Link>> {
        let start = self.requests[candidate].owner;
        let mut came_from: HashMap<usize, (usize, Link)> = HashMap::new();
        let mut walked = vec![0_usize; self.locks.len()];
        let mut todo = VecDeque::from([(start, candidate)]);
        while let Some((owner, ask)) = todo.pop_front() {
            if self.requests[ask].lacking == 0 {
                continue;
            }
            for (next, link) in self.blockers((owner, ask), candidate, &mut walked) {
                if came_from.contains_key(&next) {
                    continue;
                }
                came_from.insert(next, (owner, link));
                if next == start {
                    return Some(unwind(start, &came_from));
                }
                todo.extend(self.owners[next].asks.iter().map(|&ask| (next, ask)));
            }
        }
        None
    }

    /// The stuck owners that keep a request from being granted; of each lane only the part not `walked` before.
    fn blockers(&self, (owner, ask): (usize, usize), candidate: usize, walked: &mut [usize]) -> Vec<(usize, Link)> {
        let mut blockers = Vec::new();
        for &Place { lock: index, at, crowded, .. } in &self.requests[ask].places {
            let lock = &self.locks[index];
            if lock.holders.contains(&owner) {
                continue;
            }
            let link = |because| Link { owner: self.owners[owner].name.clone(), key: lock.key.clone(), because };
            if crowded {
                let stuck = lock.holders.iter().filter(|&&holder| self.is_stuck(holder));
                blockers.extend(stuck.map(|&holder| (holder, link(Because::Holds))));
            }
            let ahead = lock.lane.get(walked[index]..at).unwrap_or_default();
            let ahead = ahead.iter().map(|&other| self.requests[other].owner);
            let ahead = ahead.filter(|&other| other != owner && self.is_stuck(other));
            blockers.extend(ahead.map(|other| (other, link(Because::Ahead))));
            // What the candidate walks is walked once more: its owner may wait there too, ahead of others.
            if ask != candidate {
                walked[index] = walked[index].max(at);
            }
        }
        blockers
    }
}

fn unwind(start: usize, came_from: &HashMap<usize, (usize, Link)>) -> Vec<Link> {
    let mut links = Vec::new();
    let mut at = start;
    while let Some((from, link)) = came_from.get(&at) {
        links.push(link.clone());
        at = *from;
        if at == start {
            break;
        }
    }
    links.reverse();
    links
}

/// Those who hold `key` and wait for anything, and `asking` if it holds it; and the lock's limit.
fn waiting_holders<T>(queue: &Queue<T>, locks: &mut impl View, key: &LockKey, asking: &Owner) -> (Limit, Vec<Owner>) {
    let Sight::Lock(standing) = locks.look(key, asking) else { return (Limit::Shared, Vec::new()) };
    let holders = if standing.holders <= queue.owners().len() {
        let mut holders = locks.holders(key);
        holders.retain(|owner| queue.waits(owner) || owner == asking);
        holders
    } else {
        let mut holders: Vec<Owner> = queue.owners().filter(|owner| *owner != asking).cloned().collect();
        holders.retain(|owner| matches!(locks.look(key, owner), Sight::Lock(it) if it.own.is_some()));
        holders.extend(standing.own.map(|_| asking.clone()));
        holders
    };
    (standing.limit, holders)
}
