//! Wrong implementations of serving a queue. The tests of the core have to detect each of them.

use super::Locks;
use crate::lock::serve::{Change, Sight, WaitEnd};
use crate::lock::{Ahead, Decision, LockKey, Millis, Queue, Raise, Standing, WaiterId, all_or_none, decide};

/// An injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// None: slow, and correct.
    Nothing,
    /// The request behind one that was granted is not checked.
    SkipsNextWaiter,
    /// The last request in the queue is tried first.
    ServesLastFirst,
    /// The number of holders is not checked.
    IgnoresLimit,
    /// Of several keys, only the first is checked.
    ChecksFirstKeyOnly,
    /// A holder's own request, further back in the queue, is not granted.
    SkipsHoldersRequest,
    /// One grant is made twice.
    GrantsTwice,
    /// A cancelled request stays in the queue.
    KeepsCancelled,
    /// The next request is not checked when the first one is cancelled.
    IgnoresCancellation,
    /// A new request is granted although others wait.
    GrantsNewRequestFirst,
    /// Of several keys, those that the owner does not hold yet are granted beside those that it re-enters.
    GrantsRemainingKeys,
    /// A request with `NEW` re-enters.
    ReentersWithNew,
    /// A request with `WAITED` is queued behind all others.
    IgnoresWaited,
}

impl Fault {
    /// All faults.
    pub const ALL: [Self; 12] = [
        Self::SkipsNextWaiter,
        Self::ServesLastFirst,
        Self::IgnoresLimit,
        Self::ChecksFirstKeyOnly,
        Self::SkipsHoldersRequest,
        Self::GrantsTwice,
        Self::KeepsCancelled,
        Self::IgnoresCancellation,
        Self::GrantsNewRequestFirst,
        Self::GrantsRemainingKeys,
        Self::ReentersWithNew,
        Self::IgnoresWaited,
    ];
}

/// Tries all requests in the changed queues repeatedly, with a fault.
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
            Fault::ServesLastFirst => lane.reverse(),
            Fault::SkipsHoldersRequest => lane.truncate(1),
            _ => {}
        }
        let end = |id: WaiterId| Some((id, end_of(fault, queue, locks, id, now)?));
        let Some((id, end)) = lane.into_iter().find_map(end) else { continue };
        let Some(waiter) = queue.leave(id) else { continue };
        if fault != Fault::SkipsNextWaiter {
            todo.extend(waiter.keys.iter().cloned());
        }
        if fault == Fault::GrantsTwice {
            locks.settle(&waiter, end.clone());
        }
        locks.settle(&waiter, end);
    }
}

fn end_of(fault: Fault, queue: &Queue<()>, locks: &mut impl Locks, id: WaiterId, now: Millis) -> Option<WaitEnd> {
    let waiter = queue.get(id)?;
    let mut decisions = Vec::new();
    for key in waiter.keys.iter() {
        let Sight::Lock(mut standing) = locks.look(key, &waiter.owner) else { return Some(WaitEnd::NotALock) };
        if fault == Fault::IgnoresLimit && standing.own.is_none() {
            standing = Standing::FREE;
        }
        let first = queue.head(key.db, &key.name) == Some(id) || fault == Fault::ServesLastFirst;
        let ahead = if first { Ahead::NoRequest } else { Ahead::Requests };
        let mut demand = waiter.demand;
        if fault == Fault::ReentersWithNew && demand.raise == Raise::New {
            demand.raise = Raise::ByOne;
        }
        match decide(&standing, &demand, ahead, now) {
            Decision::Wait if fault == Fault::ChecksFirstKeyOnly && !decisions.is_empty() => {
                let free = decide(&Standing::FREE, &waiter.demand, Ahead::NoRequest, now);
                decisions.push(free);
            }
            decision => decisions.push(decision),
        }
    }
    if fault == Fault::GrantsRemainingKeys && !decisions.contains(&Decision::Wait) {
        return Some(WaitEnd::Granted(decisions));
    }
    match all_or_none(&decisions) {
        Ok(()) => Some(WaitEnd::Granted(decisions)),
        Err(Decision::Wait) => None,
        Err(refusal) => Some(WaitEnd::Refused(refusal)),
    }
}
