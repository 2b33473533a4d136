//! The search for a cycle of waits.
//!
//! An owner is *stuck* if one of its requests can never be granted as long as every other stuck owner keeps what it
//! has. A request is granted once those ahead of it are granted and there is room beside the holders that are stuck:
//! with one place (a mutex), every blocker counts; in a semaphore, a cycle exists only when every place that would do
//! is kept by somebody stuck. That is the general resource graph of Holt ("Some deadlock properties of computer
//! systems", 1972), reduced as far as it goes; what can't be reduced is deadlocked. So there is no false alarm.
//!
//! A request with a time limit counts as waiting: it would only find out later.
//!
//! # An example
//!
//! `ann` holds `a`; `bob` and `cid` hold the two places of the semaphore `s`; `dan` holds `d`. `bob` waits for `a`,
//! `cid` waits for `d`. Now `ann` asks for `s`.
//!
//! 1. **Explore.** `ann` wants `s`: held by `bob` and `cid`. `bob` wants `a`, held by `ann`. `cid` wants `d`, held by
//!    `dan`. `dan` waits for nothing, so it does not count as a holder.
//! 2. **Reduce.** The request of `cid` is the first in the queue of `d`, and no holder is stuck: it is granted. `cid`
//!    waits for nothing else, so it can go on, and gives back its place in `s`. There, only one of the two places is
//!    kept by somebody stuck: the request of `ann` has room and is granted, too. `ann` gives back `a`, `bob` gets it.
//!    Nobody is left: `ann` may wait.
//! 3. If `dan` waited for `a`, nothing could be granted: **find** the way from `ann` through `s` to `bob`, and through
//!    `a` back to `ann`. That is the cycle in the message.
//!
//! # What it costs
//!
//! Each owner, each request, each place in a queue and each hold that can be reached is read once, reduced once, and
//! walked once or twice. All of that is counted, in units of about 100 ns, and may be spread over any number of steps.
//! Between steps, the queue and the locks may change in any way:
//!
//! * What was read may no longer be so. Before a cycle is reported, everything that those who are stuck wait for and
//!   hold is therefore **rechecked**, and what is no longer so is taken out; what changes after that is known from
//!   [`Queue::note`]. The cycle itself is looked at once more at the end.
//! * What is new since the search began is not needed: a request that closes a cycle by waiting looks for it, and its
//!   search knows all who came before. A deadlock that stands stays in the graph, as nothing about it changes.

mod arena;
mod explore;
mod find;
mod graph;
mod recheck;

use super::{Deadline, Limit, LockKey, Owner, Queue, Standing, WaiterId};
use crate::lock::changes::Changed;
use crate::lock::serve::Change;
use arena::{Index, next};
use explore::Explorer;
use find::{Finder, Found, Teller};
use graph::{Graph, LockIx, OwnerIx, WaitIx};
use recheck::{Doubt, Recheck};

/// What it costs to look at a lock in the keyspace, in units of about 100 ns.
pub const LOOK: usize = 50;

/// What it costs to read one place in a queue.
const PLACE: usize = 10;

/// How many holders of a lock are asked for at once; in tests so few that their locks have several pages of them.
pub const PAGE: usize = if cfg!(test) { 2 } else { 100 };

/// By how much a step may exceed its budget: by the last thing it looks at, a lock and its first holders at most.
#[cfg(test)]
pub const OVERRUN: usize = 3 * LOOK + PAGE;

/// One wait of a cycle: this owner waits for this key, which the next owner of the cycle holds, or waits for ahead.
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
    /// For what: keys of one database. The search does not leave it: owners of the same name elsewhere are different
    /// owners.
    pub keys: &'a [LockKey],
    /// Under which limit.
    pub limit: Limit,
}

/// The locks, as far as the one who asks may know of them.
pub trait Visible {
    /// Whether the one who asks may read this key. If not, it is as if nobody held it and nobody waited for it: a
    /// cycle through it is neither found nor shown. Asked once for each key, before anything else about it.
    fn may_read(&mut self, key: &LockKey) -> bool;

    /// The lock as `owner` sees it, `None` if the key holds something that is not a lock.
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Option<Standing>;

    /// Up to `most` of those who hold it, ordered by the end of their leases and by name: those after the given one. A
    /// lease that gets longer meanwhile makes its owner appear twice, which does no harm.
    fn holders(&mut self, key: &LockKey, after: Option<&(Deadline, Owner)>, most: usize) -> Vec<(Deadline, Owner)>;

    /// What the looks since the last call have cost beyond [`LOOK`] each, in units of about 100 ns: some locks must be
    /// read whole.
    fn extra_cost(&mut self) -> usize {
        0
    }
}

/// What is known after a step.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// The request closes no cycle; or it no longer waits.
    None,
    /// The request closes this cycle, which begins with its owner. It is there now.
    Cycle(Vec<Link>),
    /// The budget is used up: the search is to be advanced again.
    More,
}

/// Whether there is anything to search at all: if nobody waits except for the one key that the candidate wants, nobody
/// waits for what its owner holds, since an owner who has to wait for a single lock does not hold it.
pub fn is_possible<T>(queue: &Queue<T>, candidate: Candidate) -> bool {
    others(queue, candidate.keys) > 0 || queue.waits(candidate.owner)
}

/// How many keys are waited for besides the only one of `keys`.
fn others<T>(queue: &Queue<T>, keys: &[LockKey]) -> usize {
    let own = match keys {
        [key] => usize::from(queue.waiting(key.db, &key.name) > 0),
        _ => 0,
    };
    queue.contended().saturating_sub(own)
}

/// A search for the cycle that one request would close by waiting.
///
/// It is advanced for the first time before the request joins the queue. If that brings no answer, the request waits,
/// the search is told of its place ([`Search::joined`], before anything else happens), and is advanced again later.
#[derive(Debug)]
pub struct Search {
    owner: Owner,
    keys: Box<[LockKey]>,
    limit: Limit,
    /// The candidate's place in the queue, once it has one.
    id: Option<WaiterId>,
    stage: Stage,
    graph: Graph,
    /// What is to be looked at again.
    doubts: Vec<Doubt>,
    /// Whether all that is known was read in this step.
    in_one_step: bool,
    /// Whether it has been looked at again since.
    is_rechecked: bool,
    /// The change that comes next, of those that are remembered …
    seen: u64,
    /// … and whether some were remembered no longer.
    missed_changes: bool,
    spent: u64,
}

#[derive(Debug)]
enum Stage {
    New,
    Explore(Explorer),
    /// The reduction begins with all owners, requests and locks, from these on.
    Begin(OwnerIx, WaitIx, LockIx),
    /// It goes on until nothing moves.
    Reduce,
    Recheck(Recheck),
    Find(Finder),
    Tell(Teller),
}

/// What a step may still cost.
#[derive(Debug)]
struct Budget {
    left: usize,
    spent: usize,
}

impl Budget {
    fn new(units: usize) -> Self {
        Self { left: units.max(1), spent: 0 }
    }

    fn spend(&mut self, units: usize) {
        self.left = self.left.saturating_sub(units);
        self.spent = self.spent.saturating_add(units);
    }

    fn is_spent(&self) -> bool {
        self.left == 0
    }
}

/// What there is to work with in one step.
struct Present<'a, T, V> {
    queue: &'a Queue<T>,
    locks: &'a mut V,
    budget: &'a mut Budget,
}

impl<T, V: Visible> Present<'_, T, V> {
    fn spend_extra(&mut self) {
        let extra = self.locks.extra_cost();
        self.budget.spend(extra);
    }

    fn look(&mut self, graph: &Graph, lock: LockIx, owner: OwnerIx) -> Option<Standing> {
        self.budget.spend(LOOK);
        self.locks.look(&graph.locks.get(lock)?.key, &graph.owners.get(owner)?.name)
    }
}

/// The candidate's request is the first that the graph knows of.
fn candidate() -> WaitIx {
    WaitIx::new(0)
}

impl Search {
    /// A search for what this request would close if it waited.
    pub fn new(candidate: Candidate) -> Self {
        Self {
            owner: candidate.owner.clone(),
            keys: candidate.keys.into(),
            limit: candidate.limit,
            id: None,
            stage: Stage::New,
            graph: Graph::default(),
            doubts: Vec::new(),
            in_one_step: true,
            is_rechecked: false,
            seen: 0,
            missed_changes: false,
            spent: 0,
        }
    }

    /// Tells the search that the request now stands in the queue. To be called before anything else happens to the
    /// queue.
    pub fn joined(&mut self, id: WaiterId) {
        self.id = Some(id);
        self.graph.number(candidate(), id);
        if let Stage::Explore(explorer) = &mut self.stage {
            explorer.joined(id);
        }
    }

    /// Whether the recheck of everything has begun.
    #[cfg(test)]
    pub fn is_rechecked(&self) -> bool {
        self.is_rechecked
    }

    /// Frees a part of its memory, once it has finished. Returns whether there was any.
    pub fn free_part(&mut self) -> bool {
        self.graph.free_part()
    }

    /// How much it has cost so far, in units.
    pub fn spent(&self) -> u64 {
        self.spent
    }

    /// Continues the search, for about `budget` units; always for a bit.
    pub fn advance<T>(&mut self, queue: &Queue<T>, locks: &mut impl Visible, budget: usize) -> Progress {
        let mut budget = Budget::new(budget);
        let has_left = self.id.is_some_and(|id| queue.get(id).is_none());
        let mut now = Present { queue, locks, budget: &mut budget };
        let progress = if has_left {
            Some(Progress::None)
        } else if matches!(self.stage, Stage::New) {
            self.begin(&mut now)
        } else {
            self.in_one_step = false;
            self.catch_up(queue);
            self.go_on(&mut now)
        };
        self.spent = self.spent.saturating_add(budget.spent as u64);
        progress.unwrap_or(Progress::More)
    }

    /// The first step. Most requests close no cycle for one of two simple reasons.
    fn begin<T, V: Visible>(&mut self, now: &mut Present<T, V>) -> Option<Progress> {
        let owner = self.graph.owner(&self.owner);
        let candidate = self.graph.add_wait(None, owner, self.limit);
        let db = self.keys.first().map_or(0, |key| key.db);
        self.seen = now.queue.changes().next();
        self.stage = Stage::Explore(Explorer::new(candidate, db, now.queue.next_id()));
        if self.queue_flows(now) {
            return Some(Progress::None);
        }
        // Whichever is shorter: the way forward from the request, or back from what its owner holds. So the first goes
        // only as far as the second would cost.
        let back = others(now.queue, &self.keys).saturating_mul(LOOK);
        if !now.queue.waits(&self.owner) && back <= now.budget.left / 2 {
            if back > 0 {
                let mut forward = Budget::new(back);
                let progress = self.go_on(&mut Present { budget: &mut forward, queue: now.queue, locks: now.locks });
                now.budget.spend(forward.spent);
                if progress.is_some() {
                    return progress;
                }
            }
            if !self.is_waited_for(db, now) {
                return Some(Progress::None);
            }
        }
        self.go_on(now)
    }

    /// Whether those who hold the lock are free, and those ahead wait for nothing else.
    fn queue_flows<T, V: Visible>(&self, now: &mut Present<T, V>) -> bool {
        let ([key], true) = (&*self.keys, now.queue.is_simple()) else { return false };
        now.budget.spend(LOOK);
        if !now.locks.may_read(key) {
            return true;
        }
        let Some(standing) = now.locks.look(key, &self.owner) else { return true };
        if standing.holders == 0 {
            return true;
        }
        if standing.own.is_some() || standing.holders > PAGE {
            return false;
        }
        let holders = now.locks.holders(key, None, PAGE);
        now.budget.spend(LOOK.saturating_add(holders.len()));
        !holders.iter().any(|(_, owner)| now.queue.waits(owner))
    }

    /// Whether somebody waits for what the candidate's owner holds, or may do so, as the budget ran out before that was
    /// clear. The owner waits for nothing else itself.
    fn is_waited_for<T, V: Visible>(&self, db: i32, now: &mut Present<T, V>) -> bool {
        now.queue.contended_keys().any(|key| {
            now.budget.spend(1);
            if key.db != db || self.is_own(&key) {
                return false;
            }
            now.budget.spend(LOOK);
            let holds =
                now.locks.may_read(&key) && now.locks.look(&key, &self.owner).is_some_and(|it| it.own.is_some());
            now.spend_extra();
            holds || now.budget.is_spent()
        })
    }

    /// Whether this is the only key asked for: an owner who has to wait for a single lock does not hold it.
    fn is_own(&self, key: &LockKey) -> bool {
        *self.keys == *std::slice::from_ref(key)
    }

    /// Takes note of what has changed since the step before.
    fn catch_up<T>(&mut self, queue: &Queue<T>) {
        let changes = queue.changes();
        let since = std::mem::replace(&mut self.seen, changes.next());
        match changes.since(since) {
            Some(latest) => latest.for_each(|changed| self.doubt(changed)),
            None => self.missed_changes = true,
        }
        let relies_on_reading = matches!(self.stage, Stage::Recheck(_) | Stage::Find(_) | Stage::Tell(_));
        if relies_on_reading && (self.missed_changes || !self.is_rechecked) {
            self.recheck();
        }
    }

    fn doubt(&mut self, changed: &Changed) {
        match changed {
            Changed::Left(id) => self.doubts.extend(self.graph.known_wait(*id).map(Doubt::Waits)),
            Changed::Lock(key, change) => {
                let Some(index) = self.graph.known_lock(key) else { return };
                let Some(lock) = self.graph.locks.get_mut(index) else { return };
                if !std::mem::replace(&mut lock.in_doubt, true) {
                    self.doubts.push(Doubt::Holders(index));
                }
                if *change == Change::Foreign && !std::mem::replace(&mut lock.is_foreign, true) {
                    self.doubts.push(Doubt::HeldByNoWaiter(index));
                }
            }
        }
    }

    fn recheck(&mut self) {
        self.is_rechecked = true;
        self.stage = Stage::Recheck(Recheck::new(std::mem::take(&mut self.missed_changes)));
    }

    fn go_on<T, V: Visible>(&mut self, now: &mut Present<T, V>) -> Option<Progress> {
        while !now.budget.is_spent() {
            let progress = self.step(now);
            now.spend_extra();
            if progress.is_some() {
                return progress;
            }
        }
        None
    }

    fn step<T, V: Visible>(&mut self, now: &mut Present<T, V>) -> Option<Progress> {
        match &mut self.stage {
            Stage::New => return Some(Progress::None),
            Stage::Explore(explorer) => {
                if explorer.step(&mut self.graph, &self.keys, now) {
                    self.stage = Stage::Begin(OwnerIx::new(0), WaitIx::new(0), LockIx::new(0));
                }
                return None;
            }
            Stage::Begin(owner, wait, lock) => {
                now.budget.spend(1);
                if *owner < self.graph.owners.end() {
                    self.graph.begin_owner(*owner);
                    *owner = next(*owner);
                } else if *wait < self.graph.waits.end() {
                    self.graph.begin_wait(*wait);
                    *wait = next(*wait);
                } else if *lock < self.graph.locks.end() {
                    self.graph.begin_lock(*lock);
                    *lock = next(*lock);
                } else {
                    self.stage = Stage::Reduce;
                }
                return None;
            }
            Stage::Reduce | Stage::Recheck(_) | Stage::Find(_) | Stage::Tell(_) => {}
        }
        if self.graph.reduce() {
            now.budget.spend(1);
            return None;
        }
        if let Some(doubt) = self.doubts.pop() {
            self.doubts.extend(doubt.check(&mut self.graph, now));
            return None;
        }
        if !self.graph.is_blocked(candidate()) {
            return Some(Progress::None);
        }
        self.tell(now.budget)
    }

    /// The candidate is stuck, as far as is known: makes sure of that, and finds the cycle.
    fn tell(&mut self, budget: &mut Budget) -> Option<Progress> {
        budget.spend(1);
        let has_changed = std::mem::take(&mut self.graph.has_changed);
        match &mut self.stage {
            Stage::Find(_) | Stage::Tell(_) if has_changed => self.find(),
            Stage::Recheck(recheck) => match recheck.next(&self.graph) {
                Some(doubt) => self.doubts.push(doubt),
                None => self.find(),
            },
            Stage::Find(finder) => match finder.step(&self.graph) {
                Found::Nothing => {}
                Found::NoWay => return Some(Progress::None),
                Found::Way(teller) => self.stage = Stage::Tell(teller),
            },
            Stage::Tell(teller) => match teller.step(&self.graph) {
                Some(_) if self.in_one_step => {}
                Some(doubts) => self.doubts.extend(doubts),
                None => return self.answer(),
            },
            _ if self.in_one_step => self.find(),
            _ => self.recheck(),
        }
        None
    }

    fn find(&mut self) {
        self.stage = Stage::Find(Finder::new(&self.graph, candidate()));
    }

    fn answer(&mut self) -> Option<Progress> {
        match std::mem::replace(&mut self.stage, Stage::Reduce) {
            Stage::Tell(teller) => Some(Progress::Cycle(teller.links())),
            _ => None,
        }
    }
}
