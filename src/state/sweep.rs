//! A pass over all waiters and all bound holds, because the contents of a database are gone or were replaced. It is
//! made in slices, since there may be a hundred thousand of each.

use super::BindingId;
use crate::lock::WaiterId;

/// The progress of a pass.
#[derive(Debug, Default)]
pub struct Sweep {
    /// The next waiter, and the end of the pass, which does not examine later waiters.
    waiters: Option<(WaiterId, WaiterId)>,
    bindings: Option<(BindingId, BindingId)>,
    /// The database; `None`: all databases.
    db: Option<i32>,
    /// The pass that follows this one, because more data was replaced meanwhile. It begins when this one is complete.
    /// So every pass completes, however often a database is flushed.
    next: Option<Pass>,
}

/// The database (`None`: all), and where the pass ends among waiters and bindings.
type Pass = (Option<i32>, (WaiterId, BindingId));

impl Sweep {
    /// Begins a pass over the present waiters and bindings, those before `ends`, of one database or of all. If a pass
    /// is in progress, the new one follows it.
    pub fn begin(&mut self, db: Option<i32>, ends: (WaiterId, BindingId)) {
        if !self.is_over() {
            let same = self.next.is_none_or(|(next, _)| next == db);
            self.next = Some((if same { db } else { None }, ends));
            return;
        }
        self.db = db;
        self.waiters = Some((WaiterId::FIRST, ends.0));
        self.bindings = Some((BindingId::FIRST, ends.1));
    }

    fn go_on_if_over(&mut self) {
        if self.is_over()
            && let Some((db, ends)) = self.next.take()
        {
            self.begin(db, ends);
        }
    }

    /// Whether no pass is in progress.
    pub fn is_over(&self) -> bool {
        self.waiters.is_none() && self.bindings.is_none()
    }

    /// Whether the pass includes a database.
    pub fn concerns(&self, db: i32) -> bool {
        self.db.is_none_or(|it| it == db)
    }

    /// Whether a binding of a database must still be examined, in this pass or the next.
    pub fn is_to_pass(&self, db: i32, binding: BindingId) -> bool {
        let is_now = self.concerns(db) && self.bindings.is_some_and(|(from, end)| from <= binding && binding < end);
        is_now || self.next.is_some_and(|(next, (_, end))| next.is_none_or(|it| it == db) && binding < end)
    }

    /// Bindings before this one may still have to be examined, in this pass or the next; no later one.
    pub fn end_of_bindings(&self) -> BindingId {
        let ends = [self.bindings.map(|(_, end)| end), self.next.map(|(_, (_, end))| end)];
        ends.into_iter().flatten().max().unwrap_or(BindingId::FIRST)
    }

    /// Where the pass continues among the waiters, and where it ends.
    pub fn waiters(&self) -> Option<(WaiterId, WaiterId)> {
        self.waiters
    }

    /// Where the pass continues among the bound holds, and where it ends.
    pub fn bindings(&self) -> Option<(BindingId, BindingId)> {
        self.bindings
    }

    /// Continues after this waiter; `None`: no waiter is left.
    pub fn passed_waiter(&mut self, id: Option<WaiterId>) {
        self.waiters = match (id, self.waiters) {
            (Some(id), Some((_, end))) => Some((id.next(), end)),
            _ => None,
        };
        self.go_on_if_over();
    }

    /// Continues after this binding; `None`: no binding is left.
    pub fn passed_binding(&mut self, id: Option<BindingId>) {
        self.bindings = match (id, self.bindings) {
            (Some(id), Some((_, end))) => Some((BindingId(id.0.saturating_add(1)), end)),
            _ => None,
        };
        self.go_on_if_over();
    }
}
