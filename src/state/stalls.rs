//! Stalls of the server: while it was busy or stopped, it read nothing from its connections.

use crate::lock::Millis;

/// Work that was due more than this many ms ago is late: the server was busy or stopped.
const LATE: Millis = 2;

/// Whether work is postponed because the server has stalled.
#[derive(Debug, Default)]
pub struct Stalls {
    /// The number of the current event-loop iteration.
    iteration: u64,
    /// The iteration in which work was last postponed to the next one, and when that was.
    postponed: Option<(u64, Millis)>,
}

impl Stalls {
    /// Begins an event-loop iteration. When its timers run, the server has read from its connections.
    pub fn next_iteration(&mut self) {
        self.iteration = self.iteration.wrapping_add(1);
    }

    /// Postpones the work of this event-loop iteration to the next one if the server has stalled. `first` is when the
    /// earliest of it was due. Returns whether the work is postponed.
    ///
    /// If a lease ran out a while ago, or a session should have read its events by then, the server was busy meanwhile
    /// (a long script, a stopped process). It has not read from its connections since, so a waiter may be long gone.
    /// Work is postponed by one iteration and no more: what remains of it after that is a backlog, which the following
    /// iterations work off.
    pub fn postpone(&mut self, first: Option<Millis>, now: Millis) -> bool {
        let Some(first) = first.filter(|at| at.saturating_add(LATE) < now) else { return false };
        if self.postponed.is_none_or(|(_, until)| first > until) {
            self.postponed = Some((self.iteration, now));
        }
        self.postponed.is_some_and(|(iteration, _)| iteration == self.iteration)
    }
}
