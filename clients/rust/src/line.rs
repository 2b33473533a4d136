//! The line of a kept lock: who in this process has it, and who is next.
//!
//! There is one for each lock that is asked for on the same terms and in the same name. Whoever stands at its head has the hold, or asks
//! the server for one of his own. The others wait here, first come, first served, and nothing of them is at the server.
//! Nothing is kept of a line in which nobody stands and nothing lies at hand.

use std::collections::{HashMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use holdfast_core::{Id, Terms};
use tokio::sync::oneshot;

use crate::names::{Keys, Owner};
use crate::seen::Seen;

/// So many lines there may be before it is looked for those of which nothing lies at hand any more.
const FEW: usize = 64;

/// What is the same for all in one line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Same {
    pub(crate) keys: Keys,
    pub(crate) terms: Terms,
    /// What owners begin with.
    pub(crate) by: Arc<str>,
}

/// Of the keys alone, which tell nearly all lines apart: this is done several times in each use.
impl Hash for Same {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write(self.keys.first());
    }
}

/// A hold that goes from one to the next.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub(crate) id: Id,
    pub(crate) owner: Owner,
    pub(crate) seen: Arc<Seen>,
}

/// Who stands at the head of a line.
#[derive(Debug)]
pub(crate) enum Head {
    /// Nobody, and this lies at hand, or has.
    Idle(Kept),
    /// Whoever asks the server for a hold of this number.
    Asks(Id),
    /// Whoever uses the hold of this number.
    Uses(Id),
}

/// What whoever comes to the head of a line is to do.
#[derive(Debug)]
pub(crate) enum Next {
    /// To use this.
    Use(Kept),
    /// To ask for a hold of his own, of this number.
    Ask(Id),
}

/// Whoever waits here until it is his turn.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// One that comes later has a greater one.
    pub(crate) number: Id,
    /// So many uses in a row, once somebody else waits for it.
    pub(crate) most: u32,
    pub(crate) turn: oneshot::Sender<Next>,
}

#[derive(Debug)]
struct Line {
    head: Head,
    waiting: VecDeque<Waiting>,
}

/// All lines of a client.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    all: HashMap<Arc<Same>, Line>,
    /// Twice as many as there were when they were swept.
    many: usize,
}

impl Lines {
    /// Who stands at the head. None: there is no line.
    pub(crate) fn head(&self, line: &Same) -> Option<&Head> {
        self.all.get(line).map(|line| &line.head)
    }

    /// Whether whoever stands there asks for, or uses, the hold of this number.
    pub(crate) fn is_at_head(&self, line: &Same, id: Id) -> bool {
        matches!(self.head(line), Some(Head::Asks(it) | Head::Uses(it)) if *it == id)
    }

    /// From now on this one stands at the head.
    pub(crate) fn stand(&mut self, line: &Arc<Same>, head: Head) {
        match self.all.get_mut(line) {
            Some(line) => line.head = head,
            None => drop(self.all.insert(line.clone(), Line { head, waiting: VecDeque::new() })),
        }
    }

    /// Somebody waits behind all others.
    pub(crate) fn wait(&mut self, line: &Same, waiting: Waiting) {
        if let Some(line) = self.all.get_mut(line) {
            line.waiting.push_back(waiting);
        }
    }

    /// He does not wait any more, if he did.
    pub(crate) fn go(&mut self, line: &Same, number: Id) {
        if let Some(line) = self.all.get_mut(line)
            && let Ok(place) = line.waiting.binary_search_by_key(&number, |waiting| waiting.number)
        {
            line.waiting.remove(place);
        }
    }

    /// Takes out the first of those who wait.
    pub(crate) fn first(&mut self, line: &Same) -> Option<Waiting> {
        self.all.get_mut(line)?.waiting.pop_front()
    }

    /// Nobody stands there, and nothing lies at hand.
    pub(crate) fn end(&mut self, line: &Same) {
        self.all.remove(line);
    }

    /// Forgets those of which nothing lies at hand any more, if there may be many; returns what lay there.
    pub(crate) fn sweep(&mut self, is_kept: impl Fn(Id) -> bool) -> Vec<Id> {
        if self.all.len() < self.many.max(FEW) {
            return Vec::new();
        }
        let over = self.take_idle(|id| !is_kept(id));
        self.many = self.all.len() * 2;
        over
    }

    /// Takes out whatever lies at hand, and is one of these.
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
        lines.stand(&line, Head::Uses(1));
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

    /// A program that locks a million accounts, one after the other, does not keep a million lines.
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
        // Those in which somebody stands stay.
        lines.stand(&same(7), Head::Uses(7));
        lines.stand(&same(8), Head::Asks(8));
        lines.take_idle(|_| true);
        assert_eq!(lines.all.len(), 2);
    }
}
