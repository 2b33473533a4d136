//! The holders of locks with many, kept at hand so that a lock with ten thousand need not be read whole each time.
//!
//! A roster is a copy of what stands in the key: it is made from it, compared with it at each use, and forgotten as
//! soon as anybody else touches the key. Nothing is lost with it.

use crate::lock::{Deadline, Holders, KeyMap, LockKey, Millis, Token};
use crate::server::MainThread;
use std::collections::BTreeSet;

/// The holders of one lock, and by what the copy is known to be up to date.
#[derive(Debug)]
pub struct Roster {
    /// Who holds.
    pub holders: Holders,
    /// The newest token.
    pub fence: Option<Token>,
    /// How many fields the hash has.
    pub fields: usize,
}

/// All rosters, and when the first holder of each expires.
#[derive(Debug, Default)]
pub struct Rosters {
    by_key: KeyMap<Roster>,
    due: BTreeSet<(Millis, LockKey)>,
}

static ROSTERS: MainThread<Rosters> = MainThread::new();

/// Lends the rosters; see [`MainThread::with`].
pub fn with<R>(work: impl FnOnce(&mut Rosters) -> R) -> R {
    ROSTERS.with(work)
}

/// Forgets the roster of a key, if there is one: how many holders stood in it. For callbacks: when in doubt, one.
pub fn forget_if_known(db: i32, name: &[u8]) -> Option<usize> {
    let forget = |rosters: &mut Rosters| {
        let holders = rosters.holders(db, name);
        rosters.forget(db, name);
        holders
    };
    ROSTERS.try_with(forget).unwrap_or(Some(1))
}

impl Rosters {
    /// The roster of a key, if there is one.
    pub fn get(&self, db: i32, name: &[u8]) -> Option<&Roster> {
        self.by_key.get(db, name)
    }

    /// How many holders stand in the roster of a key, if there is one.
    pub fn holders(&self, db: i32, name: &[u8]) -> Option<usize> {
        self.get(db, name).map(|roster| roster.holders.len())
    }

    /// Keeps a roster.
    pub fn keep(&mut self, key: LockKey, roster: Roster) {
        self.forget(key.db, &key.name);
        self.due.extend(due(&roster).map(|at| (at, key.clone())));
        self.by_key.insert(key, roster);
    }

    /// Changes a roster.
    pub fn change<R>(&mut self, db: i32, name: &[u8], work: impl FnOnce(&mut Roster) -> R) -> Option<R> {
        let roster = self.by_key.get_mut(db, name)?;
        let before = due(roster);
        let result = work(roster);
        let after = due(roster);
        if before != after {
            let key = LockKey::new(db, name);
            if let Some(before) = before {
                self.due.remove(&(before, key.clone()));
            }
            self.due.extend(after.map(|after| (after, key)));
        }
        Some(result)
    }

    /// Forgets a roster.
    pub fn forget(&mut self, db: i32, name: &[u8]) {
        if let Some(roster) = self.by_key.remove(db, name)
            && let Some(due) = due(&roster)
        {
            self.due.remove(&(due, LockKey::new(db, name)));
        }
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// The earliest deadline of all holders.
    pub fn first_due(&self) -> Option<Millis> {
        self.due.first().map(|(at, _)| *at)
    }

    /// The keys in which a holder's deadline has passed, at most so many.
    pub fn overdue(&self, now: Millis, most: usize) -> Vec<LockKey> {
        let due = self.due.iter().take_while(|(at, _)| *at < now).take(most);
        due.map(|(_, key)| key.clone()).collect()
    }
}

fn due(roster: &Roster) -> Option<Millis> {
    match roster.holders.first_deadline()? {
        Deadline::At(at) => Some(at),
        Deadline::Never => None,
    }
}
