//! When to look at locks that nobody touches: when the lease of a lock that somebody waits for runs out.

use crate::lock::{KeyMap, LockKey, Millis};
use std::collections::BTreeSet;

/// A deadline more than this many ms in the past was missed: the server was busy with something else.
const LATE: Millis = 2;

/// The scheduled looks, at most one for each lock.
#[derive(Debug, Default)]
pub struct Looks {
    by_time: BTreeSet<(Millis, LockKey)>,
    by_key: KeyMap<Millis>,
    /// How many turns the event loop has made.
    turn: u64,
    /// The turn in which work was last postponed to the next one, and when that was.
    put_off: Option<(u64, Millis)>,
}

impl Looks {
    /// Schedules the look at a lock for `at`, whenever it was scheduled before; `None`: cancels it.
    pub fn schedule(&mut self, key: &LockKey, at: Option<Millis>) {
        if self.by_key.get(key.db, &key.name).copied() == at {
            return;
        }
        if let Some(before) = self.by_key.remove(key.db, &key.name) {
            self.by_time.remove(&(before, key.clone()));
        }
        if let Some(at) = at {
            self.by_key.insert(key.clone(), at);
            self.by_time.insert((at, key.clone()));
        }
    }

    /// Schedules a look at a lock for `at`, unless an earlier one is scheduled: that one may be overdue and still
    /// have somebody to serve.
    pub fn schedule_earlier(&mut self, key: &LockKey, at: Millis) {
        if self.by_key.get(key.db, &key.name).is_none_or(|before| at < *before) {
            self.schedule(key, Some(at));
        }
    }

    /// When the first look is due.
    pub fn first(&self) -> Option<Millis> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Removes and returns the first look if it is due.
    pub fn take_due(&mut self, now: Millis) -> Option<LockKey> {
        let (_, key) = self.by_time.first().filter(|(at, _)| *at <= now)?;
        let key = key.clone();
        self.schedule(&key, None);
        Some(key)
    }

    /// The event loop has sent its replies and read from its connections.
    pub fn next_turn(&mut self) {
        self.turn = self.turn.wrapping_add(1);
    }

    /// Postpones everything to the next turn of the event loop if the server has stalled. Returns whether it has.
    ///
    /// If a lease ran out a while ago, or a session should have been heard by then (`silence`), the server was busy
    /// meanwhile (a long script, a stopped process) and has not yet read from its connections: a waiter may be long gone.
    /// It waits for one turn and no longer: what is still left of what was put off is a backlog, and is worked off turn
    /// by turn.
    pub fn put_off_if_stalled(&mut self, now: Millis, silence: Option<Millis>) -> bool {
        let first = self.first().into_iter().chain(silence).min();
        let Some(first) = first.filter(|at| at.saturating_add(LATE) < now) else { return false };
        if self.put_off.is_none_or(|(_, until)| first > until) {
            self.put_off = Some((self.turn, now));
        }
        self.put_off.is_some_and(|(turn, _)| turn == self.turn)
    }
}
