//! A cache of the holders of locks that have many, so that a lock with thousands need not be read whole each time.
//!
//! An entry is a copy of what the key says. It is made from the key, compared with it at each use, and dropped as soon
//! as another client touches the key. Dropping an entry loses nothing.

use crate::lock::{Deadline, Holders, KeyMap, LockKey, Millis, Token};
use crate::server::discarded::Discarded;
use crate::server::{MainThread, slice};
use std::collections::BTreeSet;

/// The cached holders of one lock, and what shows that the copy is up to date.
#[derive(Debug)]
pub struct CachedHolders {
    /// The holders.
    pub holders: Holders,
    /// The newest token.
    pub fence: Option<Token>,
    /// How many fields the hash has.
    pub fields: usize,
    /// Whether the hash has fields that are not those of a lock.
    pub has_foreign: bool,
}

/// All entries, and when the first holder of each expires.
#[derive(Debug, Default)]
pub struct HolderCache {
    by_key: KeyMap<CachedHolders>,
    due: BTreeSet<(Millis, LockKey)>,
    /// Locks without a field that has its own expiry, as of the last query. Another client's write drops the lock from
    /// here.
    without_field_expiry: KeyMap<()>,
    /// Dropped entries that have yet to be freed: there may be millions of holders.
    pub discarded: Discarded,
}

static CACHE: MainThread<HolderCache> = MainThread::new();

/// Calls `work` with the cache; see [`MainThread::with`].
pub fn with<R>(work: impl FnOnce(&mut HolderCache) -> R) -> R {
    CACHE.with(work)
}

/// Drops what the cache knows of a key, and returns how many holders its entry had, if there was one. For callbacks: if
/// the cache is in use, assumes one holder.
pub fn forget_if_known(db: i32, name: &[u8]) -> Option<usize> {
    let forget = |cache: &mut HolderCache| {
        let holders = cache.holders(db, name);
        cache.forget(db, name);
        holders
    };
    CACHE.try_with(forget).unwrap_or(Some(1))
}

impl HolderCache {
    /// The entry of a key.
    pub fn get(&self, db: i32, name: &[u8]) -> Option<&CachedHolders> {
        self.by_key.get(db, name)
    }

    /// How many holders the entry of a key has.
    pub fn holders(&self, db: i32, name: &[u8]) -> Option<usize> {
        self.get(db, name).map(|cached| cached.holders.len())
    }

    /// Adds or replaces the entry of a key.
    pub fn keep(&mut self, key: LockKey, cached: CachedHolders) {
        self.forget_holders(key.db, &key.name);
        self.due.extend(due(&cached).map(|at| (at, key.clone())));
        self.by_key.insert(key, cached);
    }

    /// Changes the entry of a key, if there is one.
    pub fn change<R>(&mut self, db: i32, name: &[u8], work: impl FnOnce(&mut CachedHolders) -> R) -> Option<R> {
        let cached = self.by_key.get_mut(db, name)?;
        let before = due(cached);
        let result = work(cached);
        let after = due(cached);
        if before != after {
            let key = LockKey::new(db, name);
            if let Some(before) = before {
                self.due.remove(&(before, key.clone()));
            }
            self.due.extend(after.map(|after| (after, key)));
        }
        Some(result)
    }

    /// Whether the cache knows that no field of this key has its own expiry.
    pub fn is_without_field_expiry(&self, db: i32, name: &[u8]) -> bool {
        self.without_field_expiry.get(db, name).is_some()
    }

    /// Records that no field of this key has its own expiry. The caller makes sure that touched keys are reported
    /// (`events::watch_keys`).
    pub fn keep_without_field_expiry(&mut self, key: LockKey) {
        self.without_field_expiry.insert(key, ());
    }

    /// Drops what the cache knows of a key.
    pub fn forget(&mut self, db: i32, name: &[u8]) {
        if !self.without_field_expiry.is_empty() {
            self.without_field_expiry.remove(db, name);
        }
        self.forget_holders(db, name);
    }

    fn forget_holders(&mut self, db: i32, name: &[u8]) {
        if let Some(cached) = self.by_key.remove(db, name)
            && let Some(due) = due(&cached)
        {
            self.due.remove(&(due, LockKey::new(db, name)));
        }
    }

    /// Removes a lock from the schedule of expiries: its key has no expiry (`PERSIST`), so that none of its leases
    /// ends. If another client sets an expiry, the entry is dropped.
    pub fn forget_due(&mut self, db: i32, name: &[u8]) {
        if let Some(due) = self.get(db, name).and_then(due) {
            self.due.remove(&(due, LockKey::new(db, name)));
        }
    }

    /// Drops everything. The entries are freed later, in slices.
    pub fn clear(&mut self) {
        let Self { by_key, due, without_field_expiry, mut discarded } = std::mem::take(self);
        discarded.add(by_key.into_values().map(|cached| slice::count_fields(cached.holders.len())));
        discarded.add(due);
        discarded.add(without_field_expiry.into_values());
        self.discarded = discarded;
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty() && self.without_field_expiry.is_empty()
    }

    /// The earliest deadline of all cached holders.
    pub fn first_due(&self) -> Option<Millis> {
        self.due.first().map(|(at, _)| *at)
    }

    /// A key with a holder whose deadline has passed.
    pub fn overdue(&self, now: Millis) -> Option<LockKey> {
        self.due.first().filter(|(at, _)| *at < now).map(|(_, key)| key.clone())
    }
}

fn due(cached: &CachedHolders) -> Option<Millis> {
    match cached.holders.first_deadline()? {
        Deadline::At(at) => Some(at),
        Deadline::Never => None,
    }
}
