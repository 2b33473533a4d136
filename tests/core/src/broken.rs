//! Ways of serving a queue that are wrong: what checks the core has to catch them.

use super::Locks;
use crate::lock::serve::{Change, Sight, WaitEnd};
use crate::lock::{Ahead, Decision, LockKey, Millis, Queue, Raise, Standing, WaiterId, all_or_none, decide};

/// What is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: slow, and right.
    Nothing,
    /// Who stands behind one who was served is not looked at.
    ForgetsTheNext,
    /// The last in a queue is tried first.
    ServesTheLastFirst,
    /// However many hold.
    IgnoresTheLimit,
    /// Of several keys, only the first has to be had.
    LooksAtOneKey,
    /// A holder's own request, further behind, is left to wait.
    ForgetsTheHoldersOwn,
    /// One grant for two.
    ServesTwice,
    /// Who left still stands in the queue.
    KeepsTheGone,
    /// The next is not looked at when the first in a queue gives up.
    DoesNotLookWhenOneLeaves,
    /// A newcomer is served though others wait.
    LetsNewcomersPass,
    /// Of several keys, those that the owner does not hold yet are granted beside those that it re-enters.
    TakesTheRest,
    /// Who asks only for what it does not hold re-enters what it holds.
    ReentersWhatIsNotNew,
    /// Who has waited elsewhere stands behind all others.
    IgnoresWhatWasWaited,
}

impl Fault {
    /// All that are wrong.
    pub const ALL: [Self; 12] = [
        Self::ForgetsTheNext,
        Self::ServesTheLastFirst,
        Self::IgnoresTheLimit,
        Self::LooksAtOneKey,
        Self::ForgetsTheHoldersOwn,
        Self::ServesTwice,
        Self::KeepsTheGone,
        Self::DoesNotLookWhenOneLeaves,
        Self::LetsNewcomersPass,
        Self::TakesTheRest,
        Self::ReentersWhatIsNotNew,
        Self::IgnoresWhatWasWaited,
    ];
}

/// Tries everybody in the lanes that changed, again and again; with a fault.
pub fn broken_serve(
    fault: Fault,
    queue: &mut Queue<()>,
    locks: &mut impl Locks,
    changed: impl Iterator<Item = (LockKey, Change)>,
    now: Millis,
) {
    let mut todo: Vec<LockKey> = changed.map(|(key, _)| key).collect();
    while let Some(key) = todo.pop() {
        let mut lane: Vec<WaiterId> = queue.lane(key.db, &key.name).map(|waiter| waiter.id).collect();
        match fault {
            Fault::ServesTheLastFirst => lane.reverse(),
            Fault::ForgetsTheHoldersOwn => lane.truncate(1),
            _ => {}
        }
        let end = |id: WaiterId| Some((id, end_of(fault, queue, locks, id, now)?));
        let Some((id, end)) = lane.into_iter().find_map(end) else { continue };
        let Some(waiter) = queue.leave(id) else { continue };
        if fault != Fault::ForgetsTheNext {
            todo.extend(waiter.keys.iter().cloned());
        }
        if fault == Fault::ServesTwice {
            locks.settle(waiter.clone(), end.clone());
        }
        locks.settle(waiter, end);
    }
}

fn end_of(fault: Fault, queue: &Queue<()>, locks: &mut impl Locks, id: WaiterId, now: Millis) -> Option<WaitEnd> {
    let waiter = queue.get(id)?;
    let mut decisions = Vec::new();
    for key in waiter.keys.iter() {
        let Sight::Lock(mut standing) = locks.look(key, &waiter.owner) else { return Some(WaitEnd::NotALock) };
        if fault == Fault::IgnoresTheLimit && standing.own.is_none() {
            standing = Standing::FREE;
        }
        let first = queue.head(key.db, &key.name) == Some(id) || fault == Fault::ServesTheLastFirst;
        let ahead = if first { Ahead::Nobody } else { Ahead::Somebody };
        let mut demand = waiter.demand;
        if fault == Fault::ReentersWhatIsNotNew && demand.raise == Raise::New {
            demand.raise = Raise::ByOne;
        }
        match decide(&standing, &demand, ahead, now) {
            Decision::Wait if fault == Fault::LooksAtOneKey && !decisions.is_empty() => {
                let free = decide(&Standing::FREE, &waiter.demand, Ahead::Nobody, now);
                decisions.push(free);
            }
            decision => decisions.push(decision),
        }
    }
    if fault == Fault::TakesTheRest && !decisions.contains(&Decision::Wait) {
        return Some(WaitEnd::Granted(decisions));
    }
    match all_or_none(&decisions) {
        Ok(()) => Some(WaitEnd::Granted(decisions)),
        Err(Decision::Wait) => None,
        Err(refusal) => Some(WaitEnd::Refused(refusal)),
    }
}
