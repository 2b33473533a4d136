//! Locks as they are stored in the keyspace, read without the module's own code.

use crate::redis::{Bytes, Entry, Node, Value};

/// A stored lock with its current holders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredLock {
    /// The limit of holders: `u32::MAX` for `SHARED`.
    pub limit: u32,
    /// The newest token.
    pub fence: Option<u64>,
    /// The holders whose deadline is not over.
    pub holders: Vec<Holder>,
}

/// A stored holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub owner: Bytes,
    pub holds: u64,
    pub token: Option<u64>,
    /// When the hold ends, in Unix milliseconds; `None`: never.
    pub deadline: Option<u64>,
}

/// The value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredValue {
    Lock(StoredLock),
    NotALock,
}

/// Reads a key according to the layout in `docs/reference.md`.
pub fn read(node: &Node, db: i32, key: &[u8]) -> StoredValue {
    read_at(node, db, key, node.millis())
}

/// The same at an earlier time in Unix milliseconds, as far as it is still stored.
pub fn read_at(node: &Node, db: i32, key: &[u8], now: u64) -> StoredValue {
    let entry = node.stored(db, key).filter(|entry| !entry.has_expired(now));
    let Some(Entry { value, expiry }) = entry else {
        return StoredValue::Lock(StoredLock { limit: u32::MAX, fence: None, holders: Vec::new() });
    };
    let Value::Hash(hash) = value else { return StoredValue::NotALock };
    let number = |bytes: &[u8]| std::str::from_utf8(bytes).ok()?.parse::<u64>().ok();
    let fence = hash.get(b"#fence").and_then(number);
    let limit = match hash.get(b"#limit").map(number) {
        None => 1,
        Some(Some(0)) => u32::MAX,
        Some(Some(limit)) => limit as u32,
        Some(None) => return StoredValue::NotALock,
    };
    let is_many = hash.get(b"#limit").is_some();
    let mut holders = Vec::new();
    for (owner, holds) in hash.pairs().iter().filter(|(field, _)| field.first() != Some(&b'#')) {
        let Some(holds) = number(holds).filter(|holds| *holds > 0) else { return StoredValue::NotALock };
        let is_its = |field: &Bytes| field.strip_prefix(b"#@") == Some(owner.as_slice());
        let details = hash.pairs().iter().find(|(field, _)| is_many && is_its(field)).map(|(_, value)| value);
        let (deadline, token) = match details.map(|details| std::str::from_utf8(details).unwrap_or_default()) {
            None => (*expiry, if is_many { None } else { fence }),
            Some(details) => {
                let Some((at, token)) = details.split_once(':') else { return StoredValue::NotALock };
                let at = at.parse::<u64>().ok().filter(|at| *at < i64::MAX as u64);
                // Without an expiry of the key, no lease ends. With one, no lease is longer.
                (expiry.map(|expiry| at.map_or(expiry, |at| at.min(expiry))), token.parse().ok())
            }
        };
        if deadline.is_none_or(|at| at >= now) {
            holders.push(Holder { owner: owner.clone(), holds, token, deadline });
        }
    }
    if !is_many && holders.len() > 1 {
        return StoredValue::NotALock;
    }
    // A hash without an owner's field is a lock only if all its fields belong to a lock.
    let is_of_lock =
        |field: &Bytes| [&b"#fence"[..], b"#limit"].contains(&field.as_slice()) || field.starts_with(b"#@");
    let is_owner = |field: &Bytes| field.first() != Some(&b'#');
    let mut fields = hash.pairs().iter().map(|(field, _)| field);
    if !fields.clone().any(is_owner) && !fields.all(is_of_lock) {
        return StoredValue::NotALock;
    }
    let limit = if holders.is_empty() { u32::MAX } else { limit };
    StoredValue::Lock(StoredLock { limit, fence, holders })
}

impl StoredValue {
    /// The hold of an owner.
    pub fn of(&self, owner: &[u8]) -> Option<&Holder> {
        self.holders().iter().find(|holder| holder.owner == owner)
    }

    /// All current holders.
    pub fn holders(&self) -> &[Holder] {
        match self {
            Self::Lock(lock) => &lock.holders,
            Self::NotALock => &[],
        }
    }
}
