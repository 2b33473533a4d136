//! Stalls of the server: while it was busy with something else, it has read nothing from its connections.

use crate::lock::Millis;

/// A deadline more than this many ms in the past was missed: the server was busy with something else.
const LATE: Millis = 2;

/// Whether the work of a turn is put off because the server has stalled.
#[derive(Debug, Default)]
pub struct Stalls {
    /// How many turns the event loop has made.
    turn: u64,
    /// The turn in which work was last postponed to the next one, and when that was.
    put_off: Option<(u64, Millis)>,
}

impl Stalls {
    /// The event loop has sent its replies and read from its connections.
    pub fn next_turn(&mut self) {
        self.turn = self.turn.wrapping_add(1);
    }

    /// Postpones everything to the next turn of the event loop if the server has stalled, by what is due `first`. Returns whether
    /// it has.
    ///
    /// If a lease ran out a while ago, or a session should have been heard by then, the server was busy
    /// meanwhile (a long script, a stopped process) and has not yet read from its connections: a waiter may be long gone.
    /// It waits for one turn and no longer: what is still left of what was put off is a backlog, and is worked off turn
    /// by turn.
    pub fn put_off(&mut self, first: Option<Millis>, now: Millis) -> bool {
        let Some(first) = first.filter(|at| at.saturating_add(LATE) < now) else { return false };
        if self.put_off.is_none_or(|(_, until)| first > until) {
            self.put_off = Some((self.turn, now));
        }
        self.put_off.is_some_and(|(turn, _)| turn == self.turn)
    }
}
