//! A pass over all who wait and all tied holds, because what a database held is gone or was replaced. It goes on in
//! slices: there may be a hundred thousand of each.

use super::TieId;
use crate::lock::WaiterId;

/// How far the pass has come.
#[derive(Debug, Default)]
pub struct Sweep {
    /// The next waiter and the last, those who came since do not count.
    waiters: Option<(WaiterId, WaiterId)>,
    ties: Option<(TieId, TieId)>,
    /// One database only.
    db: Option<i32>,
}

impl Sweep {
    /// Begins a pass over those that there are now, all before `end`; of one database or of all.
    pub fn begin(&mut self, db: Option<i32>, (waiter, tie): (WaiterId, TieId)) {
        self.db = if self.is_over() || self.db == db { db } else { None };
        self.waiters = Some((WaiterId(0), waiter));
        self.ties = Some((TieId(0), tie));
    }

    /// Whether the pass has come to its end.
    pub fn is_over(&self) -> bool {
        self.waiters.is_none() && self.ties.is_none()
    }

    /// Whether the pass concerns a database.
    pub fn concerns(&self, db: i32) -> bool {
        self.db.is_none_or(|it| it == db)
    }

    /// Where to go on among those who wait.
    pub fn waiters(&self) -> Option<(WaiterId, WaiterId)> {
        self.waiters
    }

    /// Where to go on among the tied holds.
    pub fn ties(&self) -> Option<(TieId, TieId)> {
        self.ties
    }

    /// Goes on behind this waiter; `None`: that was the last.
    pub fn passed_waiter(&mut self, id: Option<WaiterId>) {
        self.waiters = match (id, self.waiters) {
            (Some(id), Some((_, end))) => Some((WaiterId(id.0.saturating_add(1)), end)),
            _ => None,
        };
    }

    /// Goes on behind this tie; `None`: that was the last.
    pub fn passed_tie(&mut self, id: Option<TieId>) {
        self.ties = match (id, self.ties) {
            (Some(id), Some((_, end))) => Some((TieId(id.0.saturating_add(1)), end)),
            _ => None,
        };
    }
}
