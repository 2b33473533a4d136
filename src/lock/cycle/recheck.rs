//! Whether what was read in earlier steps is still true.
//!
//! Whatever is no longer so is taken out of the graph, which is then reduced further. A deadlock that was there when
//! the search began and is there now loses nothing by that: its requests wait, its holds are held. A request that was
//! granted meanwhile is a hold now.

use super::arena::{Index, next};
use super::graph::{Graph, HoldIx, LockIx, PlaceIx, WaitIx};
use super::{Present, Visible};

/// A pass over all that those who are stuck wait for and hold.
#[derive(Debug)]
pub struct Recheck {
    wait: WaitIx,
    hold: HoldIx,
    /// The lock from which on to check that nobody has come to hold it without going through the queue; `None`: that is
    /// known.
    lock: Option<LockIx>,
}

/// Something that may no longer be so.
#[derive(Clone, Copy, Debug)]
pub enum Doubt {
    /// That a request waits.
    Waits(WaitIx),
    /// That a request that has ended left its owner without the lock, here and in its further places.
    EndedEmpty(WaitIx, PlaceIx),
    /// That this hold is held.
    Holds(HoldIx),
    /// That the lock is held by all who held it.
    Holders(LockIx),
    /// The same, for this one and those after it.
    HoldersFrom(HoldIx),
    /// That nobody who waits for the lock has come to hold it without going through the queue.
    HeldByNoWaiter(LockIx),
    /// The same, for those in this place and behind it.
    HeldByNoWaiterFrom(LockIx, PlaceIx),
}

impl Recheck {
    /// From the start. `missed_changes`: locks may have changed unnoticed.
    pub fn new(missed_changes: bool) -> Self {
        Self { wait: WaitIx::new(0), hold: HoldIx::new(0), lock: missed_changes.then(|| LockIx::new(0)) }
    }

    /// What is to be checked next; `None`: that was all.
    pub fn next(&mut self, graph: &Graph) -> Option<Doubt> {
        if self.wait < graph.waits.end() {
            let wait = self.wait;
            self.wait = next(wait);
            return Some(Doubt::Waits(wait));
        }
        if self.hold < graph.holds.end() {
            let hold = self.hold;
            self.hold = next(hold);
            return Some(Doubt::Holds(hold));
        }
        let lock = self.lock.filter(|lock| *lock < graph.locks.end())?;
        self.lock = Some(next(lock));
        Some(Doubt::HeldByNoWaiter(lock))
    }
}

impl Doubt {
    /// Checks whether it is still so. Returns what else is to be checked then.
    pub fn check<T, V: Visible>(self, graph: &mut Graph, now: &mut Present<T, V>) -> Option<Self> {
        now.budget.spend(1);
        match self {
            Self::Waits(wait) => check_wait(graph, wait, now),
            Self::EndedEmpty(wait, place) => {
                check_ended(graph, place, now);
                let further = graph.places.get(place).and_then(|row| row.next_of_wait);
                if further.is_none() {
                    graph.end(wait);
                }
                further.map(|place| Self::EndedEmpty(wait, place))
            }
            Self::Holds(hold) => {
                check_hold(graph, hold, now);
                None
            }
            Self::Holders(lock) => {
                let lock = graph.locks.get_mut(lock)?;
                lock.in_doubt = false;
                lock.first_hold.map(Self::HoldersFrom)
            }
            Self::HoldersFrom(hold) => {
                check_hold(graph, hold, now);
                graph.holds.get(hold)?.next_of_lock.map(Self::HoldersFrom)
            }
            Self::HeldByNoWaiter(lock) => {
                let row = graph.locks.get_mut(lock)?;
                row.is_foreign = false;
                Some(Self::HeldByNoWaiterFrom(lock, row.head))
            }
            Self::HeldByNoWaiterFrom(lock, place) => {
                graph.locks.get(lock).filter(|row| place < row.end)?;
                check_place(graph, place, now);
                Some(Self::HeldByNoWaiterFrom(lock, next(place)))
            }
        }
    }
}

fn check_wait<T, V>(graph: &mut Graph, wait: WaitIx, now: &Present<T, V>) -> Option<Doubt> {
    let row = graph.waits.get(wait)?;
    let waits = row.id.is_none_or(|id| now.queue.get(id).is_some());
    if waits || row.has_ended || !graph.is_stuck(row.owner) {
        return None;
    }
    let first = row.first_place;
    if let Some(row) = graph.waits.get_mut(wait) {
        row.has_ended = true;
    }
    graph.has_changed = true;
    first.map(|place| Doubt::EndedEmpty(wait, place))
}

/// The request in this place has ended; its owner may have got the lock through it.
fn check_ended<T, V: Visible>(graph: &mut Graph, place: PlaceIx, now: &mut Present<T, V>) {
    let Some(row) = graph.places.get_mut(place) else { return };
    row.is_gone = true;
    check_place(graph, place, now);
    graph.keep_no_longer(place);
}

/// An owner who is stuck and whose request stands here may hold the lock already: then it does not wait for it.
fn check_place<T, V: Visible>(graph: &mut Graph, place: PlaceIx, now: &mut Present<T, V>) {
    let Some(row) = graph.places.get(place) else { return };
    let (wait, lock) = (row.wait, row.lock);
    let Some(owner) = graph.waits.get(wait).map(|wait| wait.owner) else { return };
    if !graph.is_stuck(owner) || graph.first_of_owner(place).is_some_and(|first| first.owner_holds) {
        return;
    }
    if let Some(standing) = now.look(graph, lock, owner).filter(|standing| standing.own.is_some()) {
        graph.has_changed = true;
        graph.set_limit(lock, standing.limit);
        graph.add_hold(lock, owner, Some(place));
    }
}

fn check_hold<T, V: Visible>(graph: &mut Graph, hold: HoldIx, now: &mut Present<T, V>) {
    let Some(row) = graph.holds.get(hold).filter(|row| row.counts) else { return };
    let (lock, owner) = (row.lock, row.owner);
    if !graph.is_stuck(owner) {
        return;
    }
    match now.look(graph, lock, owner).filter(|standing| standing.own.is_some()) {
        Some(standing) => graph.set_limit(lock, standing.limit),
        None => {
            graph.has_changed = true;
            graph.lose(hold);
        }
    }
}
