//! The name of a lock, and maps keyed by it.

use std::collections::BTreeMap;
use std::rc::Rc;

/// A key of one database.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LockKey {
    /// Number of the database.
    pub db: i32,
    /// Name of the key.
    pub name: Rc<[u8]>,
}

impl LockKey {
    /// The key `name` of database `db`.
    pub fn new(db: i32, name: &[u8]) -> Self {
        Self { db, name: name.into() }
    }
}

/// A map by key. It can be queried with borrowed bytes, and can swap whole databases.
#[derive(Debug)]
pub struct KeyMap<V> {
    /// There are few databases; comparing their numbers is cheaper than hashing them.
    dbs: BTreeMap<i32, Names<V>>,
    len: usize,
}

type Names<V> = BTreeMap<Rc<[u8]>, V>;

impl<V> Default for KeyMap<V> {
    fn default() -> Self {
        Self { dbs: BTreeMap::new(), len: 0 }
    }
}

impl<V> KeyMap<V> {
    /// How many keys there are, in all databases.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the map is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The value of a key.
    pub fn get(&self, db: i32, name: &[u8]) -> Option<&V> {
        if self.len == 0 {
            return None;
        }
        self.dbs.get(&db)?.get(name)
    }

    /// The key as it is stored in the map, if it is there: shares its name instead of copying it.
    pub fn key(&self, db: i32, name: &[u8]) -> Option<LockKey> {
        let (name, _) = self.dbs.get(&db)?.get_key_value(name)?;
        Some(LockKey { db, name: name.clone() })
    }

    /// The value of a key, to be changed.
    pub fn get_mut(&mut self, db: i32, name: &[u8]) -> Option<&mut V> {
        if self.len == 0 {
            return None;
        }
        self.dbs.get_mut(&db)?.get_mut(name)
    }

    /// The value of a key, created if it is missing.
    pub fn get_or_default(&mut self, key: &LockKey) -> &mut V
    where
        V: Default,
    {
        let len = &mut self.len;
        self.dbs.entry(key.db).or_default().entry(key.name.clone()).or_insert_with(|| {
            *len = len.saturating_add(1);
            V::default()
        })
    }

    /// Sets the value of a key, and returns the old one.
    pub fn insert(&mut self, key: LockKey, value: V) -> Option<V> {
        let old = self.dbs.entry(key.db).or_default().insert(key.name, value);
        if old.is_none() {
            self.len = self.len.saturating_add(1);
        }
        old
    }

    /// Removes a key, and returns its value.
    pub fn remove(&mut self, db: i32, name: &[u8]) -> Option<V> {
        let old = self.dbs.get_mut(&db)?.remove(name);
        if old.is_some() {
            self.len = self.len.saturating_sub(1);
        }
        old
    }

    /// Swaps two databases.
    pub fn swap(&mut self, one: i32, other: i32) {
        let (first, second) = (self.dbs.remove(&one), self.dbs.remove(&other));
        self.dbs.extend(first.map(|it| (other, it)).into_iter().chain(second.map(|it| (one, it))));
    }

    /// All keys.
    pub fn keys(&self) -> impl Iterator<Item = LockKey> {
        self.dbs.iter().flat_map(|(&db, map)| map.keys().map(move |name| LockKey { db, name: name.clone() }))
    }

    /// All values, which a caller can drop one by one.
    pub fn into_values(self) -> impl Iterator<Item = V> {
        self.dbs.into_values().flat_map(BTreeMap::into_values)
    }

    /// Removes all keys.
    pub fn clear(&mut self) {
        self.dbs.clear();
        self.len = 0;
    }
}
