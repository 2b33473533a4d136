//! Who is served next, whatever it was that changed a lock.

use super::{Ahead, Decision, Limit, LockKey, Millis, Owner, Queue, Standing, Waiter, WaiterId, decide};
use std::collections::BTreeSet;

/// The key holds something that is no lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotALock;

/// The locks, to be read: the keyspace, or a model of it.
pub trait View {
    /// The lock as `owner` sees it.
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Result<Standing, NotALock>;

    /// Those who hold it.
    fn holders(&mut self, key: &LockKey) -> Vec<Owner>;
}

/// The locks that are waited for.
pub trait Locks<T>: View {
    /// Carries out the end of a wait. A grant is written before this returns: the next decision reads it.
    fn settle(&mut self, waiter: Waiter<T>, end: WaitEnd);
}

/// How a wait ends in the queue itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// Granted: a [`Decision::Grant`] or [`Decision::Reenter`] for each key, in the order of the waiter's keys.
    Granted(Vec<Decision>),
    /// The key became something that is no lock.
    NotALock,
    /// The owner came to hold the lock in another way, and the request contradicts that.
    Refused(Decision),
}

/// Who changed a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A place may have become free, or the queue's head has left.
    Freed,
    /// Someone wrote the key past this module: anyone may hold it now.
    Foreign,
}

/// What is left to be looked at.
enum Task {
    /// The head of a key's queue.
    Head(LockKey),
    /// Whoever holds the key and waits for it.
    Holders(LockKey),
    /// What this owner, who holds the key now, waits for there.
    Owner(LockKey, Owner),
}

/// What is left to be done, and what need not be done again.
#[derive(Default)]
struct Agenda {
    tasks: Vec<Task>,
    /// Those who wait for several locks and were found to wait on, since a wait last ended: whoever heads a thousand
    /// queues is looked at once.
    waiting_on: BTreeSet<WaiterId>,
}

/// Serves all who can be served after the `changed` locks have changed.
///
/// Tasks are kept in a list of their own rather than on the stack: ten thousand connections may wait for one owner.
pub fn serve<T>(
    queue: &mut Queue<T>,
    locks: &mut impl Locks<T>,
    changed: impl IntoIterator<Item = (LockKey, Change)>,
    now: Millis,
) {
    let mut agenda = Agenda::default();
    for (key, change) in changed {
        queue.note(&key, change);
        agenda.tasks.push(Task::Head(key.clone()));
        if change == Change::Foreign {
            agenda.tasks.push(Task::Holders(key));
        }
    }
    while let Some(task) = agenda.tasks.pop() {
        match task {
            Task::Head(key) => {
                if let Some(head) = queue.head(key.db, &key.name) {
                    attempt(queue, locks, head, now, &mut agenda);
                }
            }
            Task::Holders(key) => {
                if let Some(head) = queue.head(key.db, &key.name).and_then(|head| queue.get(head)) {
                    let (_, holders) = waiting_holders(queue, locks, &key, &head.owner);
                    agenda.tasks.extend(holders.into_iter().map(|owner| Task::Owner(key.clone(), owner)));
                }
            }
            Task::Owner(key, owner) => {
                let waits_here = |waiter: &&Waiter<T>| waiter.keys.contains(&key);
                let ids: Vec<WaiterId> = queue.of_owner(&owner).filter(waits_here).map(|waiter| waiter.id).collect();
                for id in ids {
                    attempt(queue, locks, id, now, &mut agenda);
                }
            }
        }
    }
}

/// Those who hold `key` and wait for anything, and `asking` if it holds it; and the lock's limit.
///
/// Costs the smaller of the number of holders and that of owners who wait.
fn waiting_holders<T>(queue: &Queue<T>, locks: &mut impl View, key: &LockKey, asking: &Owner) -> (Limit, Vec<Owner>) {
    let Ok(standing) = locks.look(key, asking) else { return (Limit::Shared, Vec::new()) };
    let holders = if standing.holders <= queue.owners().len() {
        let mut holders = locks.holders(key);
        holders.retain(|owner| queue.waits(owner) || owner == asking);
        holders
    } else {
        let mut holders: Vec<Owner> = queue.owners().filter(|owner| *owner != asking).cloned().collect();
        holders.retain(|owner| locks.look(key, owner).is_ok_and(|it| it.own.is_some()));
        holders.extend(standing.own.map(|_| asking.clone()));
        holders
    };
    (standing.limit, holders)
}

/// Serves one waiter if it can be served, and notes what is to be looked at because of that.
fn attempt<T>(queue: &mut Queue<T>, locks: &mut impl Locks<T>, id: WaiterId, now: Millis, agenda: &mut Agenda) {
    let Some(waiter) = queue.get(id).filter(|_| !agenda.waiting_on.contains(&id)) else { return };
    let Some(end) = end_of(queue, locks, waiter, now) else {
        if waiter.keys.len() > 1 {
            agenda.waiting_on.insert(id);
        }
        return;
    };
    let Some(waiter) = queue.leave(id) else { return };
    agenda.waiting_on.clear();
    for (place, key) in waiter.keys.iter().enumerate() {
        // A mutex that was just granted has no room for whoever is next.
        let is_full = matches!(&end, WaitEnd::Granted(decisions)
            if matches!(decisions.get(place), Some(Decision::Grant(_, Limit::MUTEX))));
        if !is_full {
            agenda.tasks.push(Task::Head(key.clone()));
        }
    }
    // A new hold lets the owner's other requests re-enter; a re-entry changes nothing for them.
    if let WaitEnd::Granted(decisions) = &end
        && queue.waits(&waiter.owner)
    {
        let granted = waiter.keys.iter().zip(decisions).filter(|(_, it)| matches!(it, Decision::Grant(..)));
        agenda.tasks.extend(granted.map(|(key, _)| Task::Owner(key.clone(), waiter.owner.clone())));
    }
    locks.settle(waiter, end);
}

/// How the wait of `waiter` ends now, `None` if it goes on: all its keys or none. A key that can never be had ends it
/// even if it has to wait for another one.
fn end_of<T>(queue: &Queue<T>, locks: &mut impl Locks<T>, waiter: &Waiter<T>, now: Millis) -> Option<WaitEnd> {
    let mut decisions = Vec::new();
    let mut waits = false;
    for key in &waiter.keys {
        let Ok(standing) = locks.look(key, &waiter.owner) else { return Some(WaitEnd::NotALock) };
        let first = queue.head(key.db, &key.name) == Some(waiter.id);
        let ahead = if first { Ahead::Nobody } else { Ahead::Somebody };
        match decide(&standing, &waiter.request, ahead, now) {
            Decision::Wait => waits = true,
            refused @ (Decision::OtherLimit(_) | Decision::TooManyHolds) => return Some(WaitEnd::Refused(refused)),
            granted => decisions.push(granted),
        }
    }
    (!waits).then_some(WaitEnd::Granted(decisions))
}
