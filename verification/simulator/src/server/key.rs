//! A key of the keyspace, through the low-level API.

use super::calls;
use super::ctx::Ctx;
use super::open_keys;
use super::text::{Text, TextRef};
use crate::lock::Deadline;
use crate::node::{Entry, Hash, Node, Value, node};
use std::ops::ControlFlow;

/// What a key holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// There is no such key.
    Missing,
    /// A hash.
    Hash,
    /// Anything else.
    Other,
}

impl Drop for Key<'_> {
    fn drop(&mut self) {
        open_keys::closed();
    }
}

/// The callback for each field and value of a hash.
pub type EachField<'f> = &'f mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>;

/// An open key. Reading a key that has expired removes it first, as every command does.
#[derive(Debug)]
pub struct Key<'a> {
    db: i32,
    name: &'a [u8],
    /// It had expired, but could not be removed.
    is_hidden: bool,
}

impl<'a> Key<'a> {
    /// Opens a key for reading and writing, whether or not it exists.
    pub fn open(ctx: Ctx<'a>, name: TextRef<'a>) -> Self {
        node(|node| {
            node.look_ups += 1;
            node.work(2);
        });
        calls::expire_if_needed(ctx.db(), name.bytes());
        open_keys::opened();
        let (db, name) = (ctx.db(), name.bytes());
        let is_hidden = node(|node| node.stored(db, name).is_some() && node.get(db, name).is_none());
        Self { db, name, is_hidden }
    }

    /// What the handle points to: also a key that expires while it is open.
    fn entry<R>(&self, work: impl FnOnce(Option<&Entry>) -> R) -> R {
        node(|node| work(node.stored(self.db, self.name).filter(|_| !self.is_hidden)))
    }

    fn hash<R>(&self, work: impl FnOnce(&Hash) -> R) -> Option<R> {
        self.entry(|entry| match &entry?.value {
            Value::Hash(hash) => Some(work(hash)),
            Value::Other(_) => None,
        })
    }

    fn write<R>(&self, work: impl FnOnce(&mut Node) -> R) -> R {
        node(|node| {
            node.writes += 1;
            node.work(2);
            work(node)
        })
    }

    /// What it holds.
    pub fn kind(&self) -> Kind {
        self.entry(|entry| match entry.map(|entry| &entry.value) {
            None => Kind::Missing,
            Some(Value::Hash(_)) => Kind::Hash,
            Some(Value::Other(_)) => Kind::Other,
        })
    }

    /// How many fields the hash has.
    pub fn fields(&self) -> usize {
        self.hash(|hash| hash.len()).unwrap_or(0)
    }

    /// The value of a field.
    pub fn get(&self, field: TextRef) -> Option<Text> {
        self.hash(|hash| hash.get(field.bytes()).map(Text::new)).flatten()
    }

    /// The values of two fields, in one call.
    pub fn get_both(&self, (one, other): (TextRef, TextRef)) -> (Option<Text>, Option<Text>) {
        (self.get(one), self.get(other))
    }

    /// Sets fields, and creates the hash if the key is missing.
    pub fn set(&self, pairs: &[(TextRef, TextRef)]) {
        self.write(|node| {
            let entry = node.make(self.db, self.name);
            if let Value::Hash(hash) = &mut entry.value {
                pairs.iter().for_each(|(field, value)| hash.set(field.bytes(), value.bytes()));
            }
        });
    }

    /// Deletes a field, and with the last one the key.
    pub fn delete_field(&self, field: TextRef) {
        self.write(|node| node.delete_field(self.db, self.name, field.bytes()));
    }

    /// Deletes the key.
    pub fn delete(&self) {
        self.write(|node| node.remove(self.db, self.name));
    }

    /// When the key expires; never, if it is missing.
    pub fn expiry(&self) -> Deadline {
        self.entry(|entry| entry.and_then(|entry| entry.expiry).map_or(Deadline::Never, Deadline::At))
    }

    /// Whether one of these fields has an expiry of its own. Here, none has.
    pub fn has_expiring_field(&mut self, _: Ctx<'a>, _: TextRef<'a>, _: &[TextRef]) -> bool {
        false
    }

    /// Sets or removes the expiry of the key, which exists.
    pub fn set_expiry(&self, deadline: Deadline) {
        let expiry = match deadline {
            Deadline::At(at) => Some(at),
            Deadline::Never => None,
        };
        self.write(|node| {
            if let Some(entry) = node.db(self.db).get_mut(self.name).filter(|_| !self.is_hidden) {
                entry.expiry = expiry;
            }
        });
    }

    /// Calls `each` with every field and value until it breaks off or all have been seen.
    pub fn scan(&self, each: EachField) {
        let pairs = self.hash(|hash| hash.pairs().to_vec()).unwrap_or_default();
        node(|node| node.work(1 + pairs.len() as u64 / 10));
        for (field, value) in &pairs {
            if each(field, value).is_break() {
                break;
            }
        }
    }
}

/// Whether the server reports fields with an expiry of their own without a command being run.
pub fn reports_field_expiry() -> bool {
    true
}
