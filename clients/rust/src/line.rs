//! The local queue of a cached lock: the task of this process that uses it, and those that wait.
//!
//! There is one for each lock, set of options, and owner prefix. The task at its head has the hold, or requests one from the
//! server. The others wait here, first come, first served, and have no request at the server.
//! A queue without tasks and without a cached hold is removed.

use std::collections::{HashMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use holdfast_core::{Id, Terms};
use tokio::sync::oneshot;

use crate::names::{Keys, Owner};
use crate::seen::HoldStatus;

/// How many queues there may be before empty ones are removed.
const FEW: usize = 64;

/// The identity of a queue.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct QueueKey {
    pub(crate) keys: Keys,
    pub(crate) terms: Terms,
    /// The prefix of owners.
    pub(crate) by: Arc<str>,
}

/// The hash of the first key, which distinguishes nearly all queues: it is computed several times in each use.
impl Hash for QueueKey {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write(self.keys.first());
    }
}

/// A cached hold, which passes from one task to the next.
#[derive(Clone, Debug)]
pub(crate) struct CachedHold {
    pub(crate) id: Id,
    pub(crate) owner: Owner,
    pub(crate) status: Arc<HoldStatus>,
}

/// The head of a queue.
#[derive(Debug)]
pub(crate) enum Head {
    /// No task is at the head. This hold is cached, or was released meanwhile.
    Idle(CachedHold),
    /// A task that requests a hold of this number, or uses it.
    Busy(Id),
}

/// The next action of the task that reaches the head.
#[derive(Debug)]
pub(crate) struct Next {
    /// The number of its hold.
    pub(crate) id: Id,
    /// The hold to use. None: the task has to request one.
    pub(crate) kept: Option<CachedHold>,
}

/// A task that waits in the queue.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// Later tasks have greater numbers.
    pub(crate) number: Id,
    /// The maximum number of uses in a row, once another client waits for the lock.
    pub(crate) most: u32,
    pub(crate) reached: oneshot::Sender<Next>,
}

#[derive(Debug)]
struct Line {
    head: Head,
    waiting: VecDeque<Waiting>,
}

/// All queues of a client.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    all: HashMap<Arc<QueueKey>, Line>,
    /// Twice the number of queues after the last sweep.
    sweep_at: usize,
}

impl Lines {
    /// The head. None: there is no queue.
    pub(crate) fn head(&self, line: &QueueKey) -> Option<&Head> {
        self.all.get(line).map(|line| &line.head)
    }

    /// Whether the head requests, or uses, the hold of this number.
    pub(crate) fn is_at_head(&self, line: &QueueKey, id: Id) -> bool {
        matches!(self.head(line), Some(Head::Busy(it)) if *it == id)
    }

    /// Sets the head of a queue, which is created if necessary.
    pub(crate) fn set_head(&mut self, line: &Arc<QueueKey>, head: Head) {
        match self.all.get_mut(line) {
            Some(line) => line.head = head,
            None => drop(self.all.insert(line.clone(), Line { head, waiting: VecDeque::new() })),
        }
    }

    /// Adds a task at the end of a queue.
    pub(crate) fn wait(&mut self, line: &QueueKey, waiting: Waiting) {
        if let Some(line) = self.all.get_mut(line) {
            line.waiting.push_back(waiting);
        }
    }

    /// Removes this task from a queue, if it waits there.
    pub(crate) fn leave(&mut self, line: &QueueKey, number: Id) {
        if let Some(line) = self.all.get_mut(line)
            && let Ok(place) = line.waiting.binary_search_by_key(&number, |waiting| waiting.number)
        {
            line.waiting.remove(place);
        }
    }

    /// Takes out the first waiting task.
    pub(crate) fn first(&mut self, line: &QueueKey) -> Option<Waiting> {
        self.all.get_mut(line)?.waiting.pop_front()
    }

    /// Removes a queue without a task at its head and without a cached hold.
    pub(crate) fn end(&mut self, line: &QueueKey) {
        self.all.remove(line);
    }

    /// Removes queues whose cached hold does not exist any more, if there may be many. Returns the numbers of these
    /// holds.
    pub(crate) fn sweep(&mut self, is_kept: impl Fn(Id) -> bool) -> Vec<Id> {
        if self.all.len() < self.sweep_at.max(FEW) {
            return Vec::new();
        }
        let over = self.take_idle(|id| !is_kept(id));
        self.sweep_at = self.all.len() * 2;
        over
    }

    /// Takes out each cached hold that satisfies this condition.
    pub(crate) fn take_idle(&mut self, is_one: impl Fn(Id) -> bool) -> Vec<Id> {
        let mut taken = Vec::new();
        self.all.retain(|_, line| match &line.head {
            Head::Idle(kept) if is_one(kept.id) => {
                taken.push(kept.id);
                false
            }
            _ => true,
        });
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(id: Id) -> CachedHold {
        CachedHold { id, owner: Owner::from(vec![b'a']), status: Arc::default() }
    }

    fn queue_key(key: u64) -> Arc<QueueKey> {
        Arc::new(QueueKey { keys: Keys::from_iter([key.to_string()]), terms: Terms::default(), by: "a:".into() })
    }

    fn waiting(number: Id) -> Waiting {
        Waiting { number, most: 1, reached: oneshot::channel().0 }
    }

    #[test]
    fn tasks_are_served_in_order_except_those_that_left() {
        let (mut lines, line) = (Lines::default(), queue_key(1));
        lines.set_head(&line, Head::Busy(1));
        for number in [2, 5, 9, 10] {
            lines.wait(&queue_key(1), waiting(number));
        }
        lines.leave(&line, 5);
        lines.leave(&line, 7);
        let served: Vec<Id> = std::iter::from_fn(|| lines.first(&line)).map(|it| it.number).collect();
        assert_eq!(served, [2, 9, 10]);
        assert!(lines.is_at_head(&line, 1) && !lines.is_at_head(&line, 2) && !lines.is_at_head(&queue_key(2), 1));
        lines.set_head(&line, Head::Idle(kept(1)));
        assert!(!lines.is_at_head(&line, 1), "nobody uses it");
        lines.end(&line);
        assert!(lines.head(&line).is_none());
    }

    /// A program that locks a million accounts, one after the other, does not keep a million queues.
    #[test]
    fn empty_queues_are_removed() {
        let mut lines = Lines::default();
        let mut swept = 0;
        for number in 1..10_000 {
            swept += lines.sweep(|id| id % 100 == 0 && id + 1_000 > number).len();
            lines.set_head(&queue_key(number), Head::Idle(kept(number)));
            assert!(lines.all.len() <= 2 * FEW, "{number}: {}", lines.all.len());
        }
        assert!(swept > 9_800);
        // Queues with a task at their head stay.
        lines.set_head(&queue_key(7), Head::Busy(7));
        lines.set_head(&queue_key(8), Head::Busy(8));
        lines.take_idle(|_| true);
        assert_eq!(lines.all.len(), 2);
    }
}
