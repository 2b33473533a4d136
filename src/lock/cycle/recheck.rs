//! Whether what was read in earlier steps is still so.
//!
//! Whatever is no longer so is taken out of the graph, which is then reduced further. A deadlock that was there when
//! the search began and is there now loses nothing by that: its requests wait, its holds are held. A request that was
//! granted meanwhile is a hold now.

use super::arena::{Index, next};
use super::graph::{Graph, HoldIx, LockIx, PlaceIx, WaitIx};
use super::{Budget, LOOK, Visible};
use crate::lock::{Queue, Standing};

/// A pass over all that those who are stuck wait for and hold.
#[derive(Debug)]
pub struct Recheck {
    wait: WaitIx,
    hold: HoldIx,
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
    /// The same, of this one and those after it.
    HoldersFrom(HoldIx),
}

impl Recheck {
    /// From the start.
    pub fn new() -> Self {
        Self { wait: WaitIx::new(0), hold: HoldIx::new(0) }
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
        None
    }
}

impl Doubt {
    /// Looks whether it is still so; what else is to be looked at then.
    pub fn check<T>(
        self,
        graph: &mut Graph,
        queue: &Queue<T>,
        locks: &mut impl Visible,
        budget: &mut Budget,
    ) -> Option<Self> {
        budget.spend(1);
        match self {
            Self::Waits(wait) => check_wait(graph, queue, wait),
            Self::EndedEmpty(wait, place) => {
                check_ended(graph, locks, place, budget);
                let further = graph.places.get(place).and_then(|row| row.next_of_wait);
                if further.is_none() {
                    graph.end(wait);
                }
                further.map(|place| Self::EndedEmpty(wait, place))
            }
            Self::Holds(hold) => {
                check_hold(graph, locks, hold, budget);
                None
            }
            Self::Holders(lock) => {
                let lock = graph.locks.get_mut(lock)?;
                lock.in_doubt = false;
                lock.first_hold.map(Self::HoldersFrom)
            }
            Self::HoldersFrom(hold) => {
                check_hold(graph, locks, hold, budget);
                graph.holds.get(hold)?.next_of_lock.map(Self::HoldersFrom)
            }
        }
    }
}

fn check_wait<T>(graph: &mut Graph, queue: &Queue<T>, wait: WaitIx) -> Option<Doubt> {
    let row = graph.waits.get(wait)?;
    let waits = row.id.is_none_or(|id| queue.get(id).is_some());
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

/// The request in this place has ended; its owner may have got the lock by it.
fn check_ended(graph: &mut Graph, locks: &mut impl Visible, place: PlaceIx, budget: &mut Budget) {
    let keeps = graph.places.get(place).is_some_and(|row| row.keeps);
    let reenters = graph.reenters(place) && !keeps;
    let Some(row) = graph.places.get_mut(place) else { return };
    row.is_gone = true;
    let (wait, lock) = (row.wait, row.lock);
    let Some(owner) = graph.waits.get(wait).map(|wait| wait.owner) else { return };
    if !reenters && graph.is_stuck(owner) {
        budget.spend(LOOK);
        if let Some(standing) = look(graph, locks, lock, owner).filter(|standing| standing.own.is_some()) {
            graph.set_limit(lock, standing.limit);
            graph.add_hold(lock, owner, Some(place));
        }
    }
    graph.keep_no_longer(place);
}

fn check_hold(graph: &mut Graph, locks: &mut impl Visible, hold: HoldIx, budget: &mut Budget) {
    let Some(row) = graph.holds.get(hold).filter(|row| row.counts) else { return };
    let (lock, owner) = (row.lock, row.owner);
    if !graph.is_stuck(owner) {
        return;
    }
    budget.spend(LOOK);
    match look(graph, locks, lock, owner).filter(|standing| standing.own.is_some()) {
        Some(standing) => graph.set_limit(lock, standing.limit),
        None => {
            graph.has_changed = true;
            graph.lose(hold);
        }
    }
}

fn look(graph: &Graph, locks: &mut impl Visible, lock: LockIx, owner: super::graph::OwnerIx) -> Option<Standing> {
    locks.look(&graph.locks.get(lock)?.key, &graph.owners.get(owner)?.name)
}
