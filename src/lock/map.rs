//! A hash map whose growth keeps nobody waiting.

use foldhash::HashMap;
use std::borrow::Borrow;
use std::collections::hash_map;
use std::hash::{BuildHasher, Hash};
use std::iter::{Chain, FlatMap};

/// A map is one table up to this many entries: moving that many takes some 50 µs.
const WHOLE: usize = 1_024;
/// Then it is divided into this many tables.
const PARTS: usize = 256;
/// A table that has room for this many times what is in it gives room back.
const SPARSE: usize = 8;
/// But not while it is this small.
const SMALL: usize = 16;

/// A hash map of any size. A table that grows moves everything in it, which takes milliseconds with a hundred thousand
/// entries; so a large map consists of many tables that grow one by one.
#[derive(Debug)]
pub struct Map<K, V> {
    /// All entries, until there are parts; then it only says which part a key belongs to.
    whole: HashMap<K, V>,
    parts: Vec<HashMap<K, V>>,
    len: usize,
}

/// The values of a map, one after the other.
pub type IntoValues<K, V> = Chain<
    hash_map::IntoValues<K, V>,
    FlatMap<std::vec::IntoIter<HashMap<K, V>>, hash_map::IntoValues<K, V>, TakeValues<K, V>>,
>;
type TakeValues<K, V> = fn(HashMap<K, V>) -> hash_map::IntoValues<K, V>;

impl<K, V> Default for Map<K, V> {
    fn default() -> Self {
        Self { whole: HashMap::default(), parts: Vec::new(), len: 0 }
    }
}

impl<K, V> Map<K, V> {
    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All keys.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.whole.keys().chain(self.parts.iter().flat_map(HashMap::keys))
    }

    /// All entries.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        #[cfg(test)]
        tests::SEARCHED.set(tests::SEARCHED.get() + self.len);
        self.whole.iter().chain(self.parts.iter().flatten())
    }

    /// All values.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        #[cfg(test)]
        tests::SEARCHED.set(tests::SEARCHED.get() + self.len);
        self.whole.values().chain(self.parts.iter().flat_map(HashMap::values))
    }

    /// All entries, their values to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.whole.iter_mut().chain(self.parts.iter_mut().flatten())
    }

    /// All values; each table is freed when it is empty.
    pub fn into_values(self) -> IntoValues<K, V> {
        let parts = self.parts.into_iter().flat_map(HashMap::into_values as TakeValues<K, V>);
        self.whole.into_values().chain(parts)
    }
}

impl<K: Hash + Eq, V> Map<K, V> {
    /// What is kept for a key.
    pub fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.parts.get(self.part(key)).unwrap_or(&self.whole).get(key)
    }

    /// What is kept for a key, to be changed.
    pub fn get_mut<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        self.table(self.part(key)).get_mut(key)
    }

    /// Whether anything is kept for a key.
    pub fn contains_key<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.get(key).is_some()
    }

    /// What is kept for a key, made by `make` if there is nothing yet.
    pub fn get_or_insert_with(&mut self, key: K, make: impl FnOnce() -> V) -> &mut V {
        self.divide_if_large();
        let part = self.part(&key);
        let Self { whole, parts, len } = self;
        match parts.get_mut(part).unwrap_or(whole).entry(key) {
            hash_map::Entry::Occupied(entry) => entry.into_mut(),
            hash_map::Entry::Vacant(entry) => {
                *len = len.saturating_add(1);
                entry.insert(make())
            }
        }
    }

    /// Keeps a value for a key, and returns what was there.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.divide_if_large();
        let old = self.table(self.part(&key)).insert(key, value);
        if old.is_none() {
            self.len = self.len.saturating_add(1);
        }
        old
    }

    /// Forgets a key, and returns what was there. A table from which most is gone becomes smaller; with the last key, the
    /// parts are freed.
    pub fn remove<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let table = self.table(self.part(key));
        let old = table.remove(key);
        if old.is_some() {
            if table.capacity() > SMALL && table.len().saturating_mul(SPARSE) < table.capacity() {
                table.shrink_to(table.len().saturating_mul(2));
            }
            self.len = self.len.saturating_sub(1);
            if self.len == 0 {
                self.parts = Vec::new();
            }
        }
        old
    }

    /// The number of the part that a key belongs to; of no part while there are none.
    fn part<Q: Hash + ?Sized>(&self, key: &Q) -> usize {
        if self.parts.is_empty() {
            return 0;
        }
        usize::try_from(self.whole.hasher().hash_one(key)).unwrap_or(usize::MAX) % PARTS
    }

    fn table(&mut self, part: usize) -> &mut HashMap<K, V> {
        self.parts.get_mut(part).unwrap_or(&mut self.whole)
    }

    fn divide_if_large(&mut self) {
        if self.whole.len() < WHOLE {
            return;
        }
        let hasher = self.whole.hasher().clone();
        let entries = std::mem::replace(&mut self.whole, HashMap::with_hasher(hasher));
        self.parts.resize_with(PARTS, HashMap::default);
        for (key, value) in entries {
            self.table(self.part(&key)).insert(key, value);
        }
    }
}

#[cfg(test)]
impl<K, V> Map<K, V> {
    /// For how many entries there is room.
    pub fn capacity(&self) -> usize {
        self.whole.capacity() + self.parts.iter().map(HashMap::capacity).sum::<usize>()
    }

    /// Whether it consists of many tables.
    pub fn is_divided(&self) -> bool {
        !self.parts.is_empty()
    }
}

/// What maps are asked.
#[cfg(test)]
pub mod tests {
    use std::cell::Cell;

    thread_local! {
        /// How many entries the maps have that somebody began to go through: what a search costs that knows no key.
        pub static SEARCHED: Cell<usize> = const { Cell::new(0) };
    }
}
