//! When to look at locks although nobody touches them: a lease runs out that somebody waits for.

use crate::lock::{KeyMap, LockKey, Millis};
use std::collections::BTreeSet;

/// A deadline that passed more than so many ms ago was passed over: the server did not get to it.
const LATE: Millis = 2;

/// After so many ms, work that was put off is done whatever the event loop did meanwhile.
const PATIENCE: Millis = 10;

/// The looks that are due some time, at most one for each lock.
#[derive(Debug, Default)]
pub struct Looks {
    by_time: BTreeSet<(Millis, LockKey)>,
    by_key: KeyMap<Millis>,
    /// How often the event loop has gone round.
    turn: u64,
    /// The turn, and the moment, in which work was put off until the next one.
    put_off: Option<(u64, Millis)>,
}

impl Looks {
    /// Looks at a lock at `at`, instead of whenever it would have been; `None`: not at all.
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

    /// Looks at a lock at `at`, unless that is done earlier anyway: an earlier look may be overdue, and still have
    /// somebody to serve.
    pub fn schedule_earlier(&mut self, key: &LockKey, at: Millis) {
        if self.by_key.get(key.db, &key.name).is_none_or(|before| at < *before) {
            self.schedule(key, Some(at));
        }
    }

    /// When the first look is due.
    pub fn first(&self) -> Option<Millis> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Takes out the first look if it is due.
    pub fn take_due(&mut self, now: Millis) -> Option<LockKey> {
        let (_, key) = self.by_time.first().filter(|(at, _)| *at <= now)?;
        let key = key.clone();
        self.schedule(&key, None);
        Some(key)
    }

    /// The event loop has sent what it had to send, and read what its connections had to say.
    pub fn next_turn(&mut self) {
        self.turn = self.turn.wrapping_add(1);
    }

    /// Puts everything off until the next turn of the event loop if the server has stalled; whether it does.
    ///
    /// If a lease ran out a while ago, the server was at something else meanwhile (a long script, a stopped process),
    /// and has not read yet what its connections have to say: who waits may be long gone.
    pub fn put_off_if_stalled(&mut self, now: Millis) -> bool {
        let overdue = |at: Millis| at.saturating_add(LATE) < now;
        let late = self.first().is_some_and(overdue);
        let waited = self.put_off.is_some_and(|(turn, at)| turn < self.turn && !overdue(at.saturating_add(PATIENCE)));
        self.put_off = (late && !waited).then_some((self.turn, now));
        self.put_off.is_some()
    }
}
