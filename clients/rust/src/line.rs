//! The local queue of a cached lock: which task of this process uses it, and which is next.
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
use crate::seen::Seen;

/// How many queues there may be before empty ones are removed.
const FEW: usize = 64;

/// The identity of a queue.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Same {
    pub(crate) keys: Keys,
    pub(crate) terms: Terms,
    /// The prefix of owners.
    pub(crate) by: Arc<str>,
}

/// Of the keys alone, which distinguish nearly all queues: this is computed several times in each use.
impl Hash for Same {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write(self.keys.first());
    }
}

/// A hold that goes from one task to the next.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub(crate) id: Id,
    pub(crate) owner: Owner,
    pub(crate) seen: Arc<Seen>,
}

/// The head of a queue.
#[derive(Debug)]
pub(crate) enum Head {
    /// No task; this hold is cached, or was.
    Idle(Kept),
    /// A task that requests a hold of this number, or uses it.
    Busy(Id),
}

/// What the task that comes to the head has to do.
#[derive(Debug)]
pub(crate) struct Next {
    /// The number of its hold.
    pub(crate) id: Id,
    /// The hold, to be used. None: it has to be requested.
    pub(crate) kept: Option<Kept>,
}

/// A task that waits in the queue.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// A later task has a greater number.
    pub(crate) number: Id,
    /// How many uses in a row, once another client waits for it.
    pub(crate) most: u32,
    pub(crate) turn: oneshot::Sender<Next>,
}

#[derive(Debug)]
struct Line {
    head: Head,
    waiting: VecDeque<Waiting>,
}

/// All queues of a client.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    all: HashMap<Arc<Same>, Line>,
    /// Twice as many as there were when they were last swept.
    many: usize,
}

impl Lines {
    /// The head. None: there is no queue.
    pub(crate) fn head(&self, line: &Same) -> Option<&Head> {
        self.all.get(line).map(|line| &line.head)
    }

    /// Whether the head requests, or uses, the hold of this number.
    pub(crate) fn is_at_head(&self, line: &Same, id: Id) -> bool {
        matches!(self.head(line), Some(Head::Busy(it)) if *it == id)
    }

    /// From now on this is the head.
    pub(crate) fn stand(&mut self, line: &Arc<Same>, head: Head) {
        match self.all.get_mut(line) {
            Some(line) => line.head = head,
            None => drop(self.all.insert(line.clone(), Line { head, waiting: VecDeque::new() })),
        }
    }

    /// A task waits behind all others.
    pub(crate) fn wait(&mut self, line: &Same, waiting: Waiting) {
        if let Some(line) = self.all.get_mut(line) {
            line.waiting.push_back(waiting);
        }
    }

    /// This task does not wait any more, if it did.
    pub(crate) fn go(&mut self, line: &Same, number: Id) {
        if let Some(line) = self.all.get_mut(line)
            && let Ok(place) = line.waiting.binary_search_by_key(&number, |waiting| waiting.number)
        {
            line.waiting.remove(place);
        }
    }

    /// Takes out the first waiting task.
    pub(crate) fn first(&mut self, line: &Same) -> Option<Waiting> {
        self.all.get_mut(line)?.waiting.pop_front()
    }

    /// The queue has no head and no cached hold.
    pub(crate) fn end(&mut self, line: &Same) {
        self.all.remove(line);
    }

    /// Removes queues without a cached hold, if there may be many; returns the holds whose time is over.
    pub(crate) fn sweep(&mut self, is_kept: impl Fn(Id) -> bool) -> Vec<Id> {
        if self.all.len() < self.many.max(FEW) {
            return Vec::new();
        }
        let over = self.take_idle(|id| !is_kept(id));
        self.many = self.all.len() * 2;
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

    fn kept(id: Id) -> Kept {
        Kept { id, owner: Owner::from(vec![b'a']), seen: Arc::default() }
    }

    fn same(key: u64) -> Arc<Same> {
        Arc::new(Same { keys: Keys::from_iter([key.to_string()]), terms: Terms::default(), by: "a:".into() })
    }

    fn waiting(number: Id) -> Waiting {
        Waiting { number, most: 1, turn: oneshot::channel().0 }
    }

    #[test]
    fn first_come_first_served_and_who_goes_is_not_served() {
        let (mut lines, line) = (Lines::default(), same(1));
        lines.stand(&line, Head::Busy(1));
        for number in [2, 5, 9, 10] {
            lines.wait(&same(1), waiting(number));
        }
        lines.go(&line, 5);
        lines.go(&line, 7);
        let served: Vec<Id> = std::iter::from_fn(|| lines.first(&line)).map(|it| it.number).collect();
        assert_eq!(served, [2, 9, 10]);
        assert!(lines.is_at_head(&line, 1) && !lines.is_at_head(&line, 2) && !lines.is_at_head(&same(2), 1));
        lines.stand(&line, Head::Idle(kept(1)));
        assert!(!lines.is_at_head(&line, 1), "nobody uses it");
        lines.end(&line);
        assert!(lines.head(&line).is_none());
    }

    /// A program that locks a million accounts, one after the other, does not keep a million queues.
    #[test]
    fn lines_of_which_nothing_is_left_do_not_pile_up() {
        let mut lines = Lines::default();
        let mut swept = 0;
        for number in 1..10_000 {
            swept += lines.sweep(|id| id % 100 == 0 && id + 1_000 > number).len();
            lines.stand(&same(number), Head::Idle(kept(number)));
            assert!(lines.all.len() <= 2 * FEW, "{number}: {}", lines.all.len());
        }
        assert!(swept > 9_800);
        // Queues with a task at their head stay.
        lines.stand(&same(7), Head::Busy(7));
        lines.stand(&same(8), Head::Busy(8));
        lines.take_idle(|_| true);
        assert_eq!(lines.all.len(), 2);
    }
}
