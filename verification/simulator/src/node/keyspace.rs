//! Keys, values, expiry.

use super::{Bytes, Node};
use crate::lock::Millis;
use std::collections::btree_map::BTreeMap;

/// The value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A hash.
    Hash(Hash),
    /// A string, or any other type.
    Other(Bytes),
}

/// A value with its expiry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The value.
    pub value: Value,
    /// When it expires, in Unix milliseconds.
    pub expiry: Option<Millis>,
}

impl Entry {
    /// Whether it has expired. A key still exists in the millisecond of its expiry.
    pub fn has_expired(&self, now: Millis) -> bool {
        self.expiry.is_some_and(|at| at < now)
    }
}

/// A hash; its fields are in the order in which they were added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hash(Vec<(Bytes, Bytes)>);

impl Hash {
    /// How many fields it has.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Its fields and values.
    pub fn pairs(&self) -> &[(Bytes, Bytes)] {
        &self.0
    }

    /// The value of a field.
    pub fn get(&self, field: &[u8]) -> Option<&[u8]> {
        self.0.iter().find(|(name, _)| name == field).map(|(_, value)| value.as_slice())
    }

    /// Sets a field.
    pub fn set(&mut self, field: &[u8], value: &[u8]) {
        match self.0.iter_mut().find(|(name, _)| name == field) {
            Some((_, old)) => *old = value.to_vec(),
            None => self.0.push((field.to_vec(), value.to_vec())),
        }
    }

    /// Sorts the fields.
    pub fn sort(&mut self) {
        self.0.sort();
    }

    /// Deletes a field. Returns whether it existed.
    pub fn delete(&mut self, field: &[u8]) -> bool {
        let before = self.0.len();
        self.0.retain(|(name, _)| name != field);
        self.0.len() < before
    }
}

/// A database.
pub type Database = BTreeMap<Bytes, Entry>;

impl Node {
    /// A key as it is stored, expired or not.
    pub fn stored(&self, db: i32, key: &[u8]) -> Option<&Entry> {
        self.dbs.get(usize::try_from(db).ok()?)?.get(key)
    }

    /// A key, if it has not expired.
    pub fn get(&self, db: i32, key: &[u8]) -> Option<&Entry> {
        self.stored(db, key).filter(|entry| !entry.has_expired(self.clock.millis()))
    }

    /// The same, mutable.
    pub fn get_mut(&mut self, db: i32, key: &[u8]) -> Option<&mut Entry> {
        let now = self.clock.millis();
        let entry = self.dbs.get_mut(usize::try_from(db).ok()?)?.get_mut(key)?;
        Some(entry).filter(|entry| !entry.has_expired(now))
    }

    /// A database.
    pub fn db(&mut self, db: i32) -> &mut Database {
        &mut self.dbs[usize::try_from(db).unwrap_or(0)]
    }

    /// A key, created as an empty hash if it is missing.
    pub fn make(&mut self, db: i32, key: &[u8]) -> &mut Entry {
        let empty = Entry { value: Value::Hash(Hash::default()), expiry: None };
        self.db(db).entry(key.to_vec()).or_insert(empty)
    }

    /// Removes a key. Returns whether it existed.
    pub fn remove(&mut self, db: i32, key: &[u8]) -> bool {
        self.db(db).remove(key).is_some()
    }

    /// Whether this node serves a key.
    pub fn serves(&self, db: i32, key: &[u8]) -> bool {
        let slot = super::slot_of(key);
        let exists = self.get(db, key).is_some();
        self.slots.as_ref().is_none_or(|slots| slots.refusal(slot, exists).is_none())
    }

    /// Deletes a field, and the key with the last one. Returns whether the field existed.
    pub fn delete_field(&mut self, db: i32, key: &[u8], field: &[u8]) -> bool {
        let Some(Entry { value: Value::Hash(hash), .. }) = self.db(db).get_mut(key) else { return false };
        let was_there = hash.delete(field);
        if hash.is_empty() {
            self.remove(db, key);
        }
        was_there
    }
}
