//! What has changed lately: for readers that look at the queue and the locks in several steps.

use super::serve::Change;
use super::{LockKey, WaiterId};
use std::collections::VecDeque;

/// How many changes are remembered. A reader that comes less often has to look at everything anew.
const REMEMBERED: usize = 4096;

/// One change.
#[derive(Clone, Debug)]
pub enum Changed {
    /// A waiter has left the queue.
    Left(WaiterId),
    /// A lock has changed: holds may be lost and, if another client wrote it, there may be new ones.
    Lock(LockKey, Change),
}

/// The latest changes, numbered from the very first.
#[derive(Debug, Default)]
pub struct Changes {
    latest: VecDeque<Changed>,
    /// How many have been forgotten.
    forgotten: u64,
}

impl Changes {
    /// Remembers a change.
    pub fn push(&mut self, changed: Changed) {
        if self.latest.len() >= REMEMBERED {
            self.latest.pop_front();
            self.forgotten = self.forgotten.saturating_add(1);
        }
        self.latest.push_back(changed);
    }

    /// The number that the next change will have.
    pub fn next(&self) -> u64 {
        self.forgotten.saturating_add(self.latest.len() as u64)
    }

    /// The changes from this number on; `None` if some of them are forgotten.
    pub fn since(&self, number: u64) -> Option<impl Iterator<Item = &Changed>> {
        let known = usize::try_from(number.checked_sub(self.forgotten)?).ok()?;
        Some(self.latest.iter().skip(known))
    }
}
