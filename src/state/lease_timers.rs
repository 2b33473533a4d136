//! Timers of leases: a lock that no client touches is looked at when its lease expires and a request waits for it.

use crate::lock::{KeyMap, LockKey, Millis};
use std::collections::BTreeSet;

/// A deadline more than this many ms in the past was missed: the server was busy with something else.
const LATE: Millis = 2;

/// When each lock is looked at next, at most one time for each.
#[derive(Debug, Default)]
pub struct LeaseTimers {
    by_time: BTreeSet<(Millis, LockKey)>,
    by_key: KeyMap<Millis>,
    /// How many turns the event loop has made.
    turn: u64,
    /// The turn in which work was last postponed to the next one, and when that was.
    put_off: Option<(u64, Millis)>,
}

impl LeaseTimers {
    /// Its pieces, for who drops it as a whole.
    pub fn into_pieces(self) -> impl Iterator<Item = ()> {
        self.by_time.into_iter().map(drop).chain(self.by_key.into_values().map(drop))
    }

    /// Sets the timer of a lock to `at`, whatever it was set to before; `None`: cancels it.
    pub fn schedule(&mut self, key: &LockKey, at: Option<Millis>) {
        let before = match at {
            Some(at) => self.by_key.insert(key.clone(), at),
            None => self.by_key.remove(key.db, &key.name),
        };
        if before != at {
            if let Some(before) = before {
                self.by_time.remove(&(before, key.clone()));
            }
            self.by_time.extend(at.map(|at| (at, key.clone())));
        }
    }

    /// Sets the timer of a lock to `at`, unless it is set to an earlier time, which may be overdue and still
    /// have waiters to serve.
    pub fn schedule_earlier(&mut self, key: &LockKey, at: Millis) {
        if self.by_key.get(key.db, &key.name).is_none_or(|before| at < *before) {
            self.schedule(key, Some(at));
        }
    }

    /// When the first timer is due.
    pub fn first(&self) -> Option<Millis> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Removes the first timer if it is due, and returns its lock.
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
