//! The way from a request that is stuck, through those who are in its way, back to its owner.

use super::arena::{Notes, next};
use super::graph::{Graph, HoldIx, LockIx, OwnerIx, PlaceIx, WaitIx};
use super::recheck::Doubt;
use super::{Because, Link};
use std::collections::VecDeque;

/// Why an owner was reached: the one who stands in this place waits for it.
#[derive(Clone, Copy, Debug)]
struct Via {
    place: PlaceIx,
    by: By,
}

#[derive(Clone, Copy, Debug)]
enum By {
    Hold(HoldIx),
    Ahead(PlaceIx),
}

/// A breadth-first search over owners: each is reached once, and each part of a queue walked once.
#[derive(Debug)]
pub struct Finder {
    candidate: WaitIx,
    came_by: Notes<OwnerIx, Via>,
    reached: VecDeque<OwnerIx>,
    /// How far the queue of a lock has been walked.
    walked: Notes<LockIx, PlaceIx>,
    /// Whether the holders of a lock have been walked.
    asked: Notes<LockIx, ()>,
    steps: Vec<Step>,
}

/// What is left to be done for the owner reached last.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// This request of the owner and its further ones.
    Wait(WaitIx),
    /// This place of a request and its further ones.
    Place(PlaceIx),
    /// The owner in this place waits for the lock's holders, from this one on.
    Holder(PlaceIx, HoldIx),
    /// The owner in this place waits for those ahead, from here on.
    Ahead(PlaceIx, PlaceIx),
}

/// What came of a step.
#[derive(Debug)]
pub enum Found {
    /// Nothing yet.
    Nothing,
    /// There is no such way.
    NoWay,
    /// The way, to be read backwards.
    Way(Teller),
}

impl Finder {
    /// Begins at a request.
    pub fn new(graph: &Graph, candidate: WaitIx) -> Self {
        let first = graph.waits.get(candidate).and_then(|wait| wait.first_place);
        Self {
            candidate,
            came_by: Notes::default(),
            reached: VecDeque::new(),
            walked: Notes::default(),
            asked: Notes::default(),
            steps: first.map(Step::Place).into_iter().collect(),
        }
    }

    /// Takes one step.
    pub fn step(&mut self, graph: &Graph) -> Found {
        let Some(step) = self.steps.pop() else {
            let Some(owner) = self.reached.pop_front() else { return Found::NoWay };
            let first = graph.owners.get(owner).and_then(|party| party.first_wait);
            self.steps.extend(first.map(Step::Wait));
            return Found::Nothing;
        };
        self.take(graph, step).map_or(Found::Nothing, Found::Way)
    }

    fn take(&mut self, graph: &Graph, step: Step) -> Option<Teller> {
        match step {
            Step::Wait(wait) => {
                let row = graph.waits.get(wait)?;
                self.steps.extend(row.next_of_owner.map(Step::Wait));
                if row.lacking > 0 {
                    self.steps.extend(row.first_place.map(Step::Place));
                }
                None
            }
            Step::Place(place) => {
                self.look_from(graph, place);
                None
            }
            Step::Holder(place, hold) => {
                let row = graph.holds.get(hold)?;
                self.steps.extend(row.next_of_lock.map(|hold| Step::Holder(place, hold)));
                let counts = row.counts && graph.is_stuck(row.owner);
                counts.then(|| self.reach(graph, row.owner, Via { place, by: By::Hold(hold) })).flatten()
            }
            Step::Ahead(place, at) => {
                let row = graph.places.get(at).filter(|_| at < place)?;
                self.steps.push(Step::Ahead(place, next(at)));
                let wait = graph.waits.get(row.wait).filter(|wait| !wait.has_ended)?;
                let counts = graph.is_stuck(wait.owner);
                counts.then(|| self.reach(graph, wait.owner, Via { place, by: By::Ahead(at) })).flatten()
            }
        }
    }

    /// Notes who is in the way of a request in one of its places.
    fn look_from(&mut self, graph: &Graph, place: PlaceIx) {
        let Some(row) = graph.places.get(place) else { return };
        self.steps.extend(row.next_of_wait.map(Step::Place));
        let (Some(wait), Some(lock)) = (graph.waits.get(row.wait), graph.locks.get(row.lock)) else { return };
        if graph.first_of_owner(place).is_some_and(|first| first.owner_holds) {
            return;
        }
        // What the candidate has walked is walked once more: its owner may wait there too, ahead of others.
        let is_candidate = row.wait == self.candidate;
        let walked = self.walked.get(row.lock).unwrap_or(lock.begin);
        self.steps.push(Step::Ahead(place, walked));
        if !is_candidate {
            self.walked.insert(row.lock, place.max(walked));
        }
        if !row.has_room && lock.is_crowded(wait.limit) {
            if self.asked.get(row.lock).is_none() {
                self.steps.extend(lock.first_hold.map(|hold| Step::Holder(place, hold)));
            }
            if !is_candidate {
                self.asked.insert(row.lock, ());
            }
        }
    }

    /// An owner is in the way of the one who stands in a place.
    fn reach(&mut self, graph: &Graph, owner: OwnerIx, via: Via) -> Option<Teller> {
        let start = graph.waits.get(self.candidate)?.owner;
        let from = owner_in(graph, via.place)?;
        if owner == from {
            return None;
        }
        if owner == start {
            let came_by = std::mem::take(&mut self.came_by);
            return Some(Teller { start, came_by, next: Some(via), links: Vec::new() });
        }
        if self.came_by.get(owner).is_none() {
            self.came_by.insert(owner, via);
            self.reached.push_back(owner);
        }
        None
    }
}

fn owner_in(graph: &Graph, place: PlaceIx) -> Option<OwnerIx> {
    graph.waits.get(graph.places.get(place)?.wait).map(|wait| wait.owner)
}

/// A cycle, from its end to its beginning.
#[derive(Debug)]
pub struct Teller {
    start: OwnerIx,
    came_by: Notes<OwnerIx, Via>,
    next: Option<Via>,
    links: Vec<Link>,
}

impl Teller {
    /// Adds a link. Returns what it rests on; `None`: there are no more.
    pub fn step(&mut self, graph: &Graph) -> Option<[Doubt; 2]> {
        let Via { place, by } = self.next.take()?;
        let owner = owner_in(graph, place)?;
        let row = graph.places.get(place)?;
        let because = match by {
            By::Hold(_) => Because::Holds,
            By::Ahead(_) => Because::Ahead,
        };
        let (name, key) = (graph.owners.get(owner)?.name.clone(), graph.locks.get(row.lock)?.key.clone());
        self.links.push(Link { owner: name, key, because });
        self.next = self.came_by.get(owner).filter(|_| owner != self.start);
        let other = match by {
            By::Hold(hold) => Doubt::Holds(hold),
            By::Ahead(place) => Doubt::Waits(graph.places.get(place)?.wait),
        };
        Some([Doubt::Waits(row.wait), other])
    }

    /// The links, first to last.
    pub fn links(self) -> Vec<Link> {
        let mut links = self.links;
        links.reverse();
        links
    }
}
