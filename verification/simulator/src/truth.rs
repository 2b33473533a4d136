//! Locks as they lie in the keyspace, read by other eyes than the module's.

use crate::redis::{Bytes, Entry, Node, Value};

/// A lock as it is stored: who holds it now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Truth {
    /// How many may hold: `u32::MAX` for readers.
    pub limit: u32,
    /// The newest token.
    pub fence: Option<u64>,
    /// The holders, those past their deadline left out.
    pub holders: Vec<Holder>,
}

/// A holder as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub owner: Bytes,
    pub holds: u64,
    pub token: Option<u64>,
    /// When it ends, in Unix milliseconds; never if there is none.
    pub deadline: Option<u64>,
}

/// What a key holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    Lock(Truth),
    NotALock,
}

/// Reads a key by what `docs/reference.md` says of the layout.
pub fn read(node: &Node, db: i32, key: &[u8]) -> Seen {
    read_at(node, db, key, node.millis())
}

/// The same, as it was at this time in Unix milliseconds, as far as it is still stored.
pub fn read_at(node: &Node, db: i32, key: &[u8], now: u64) -> Seen {
    let entry = node.stored(db, key).filter(|entry| !entry.has_expired(now));
    let Some(Entry { value, expiry }) = entry else {
        return Seen::Lock(Truth { limit: u32::MAX, fence: None, holders: Vec::new() });
    };
    let Value::Hash(hash) = value else { return Seen::NotALock };
    let number = |bytes: &[u8]| std::str::from_utf8(bytes).ok()?.parse::<u64>().ok();
    let fence = hash.get(b"#fence").and_then(number);
    let limit = match hash.get(b"#limit").map(number) {
        None => 1,
        Some(Some(0)) => u32::MAX,
        Some(Some(limit)) => limit as u32,
        Some(None) => return Seen::NotALock,
    };
    let is_many = hash.get(b"#limit").is_some();
    let mut holders = Vec::new();
    for (owner, holds) in hash.pairs().iter().filter(|(field, _)| field.first() != Some(&b'#')) {
        let Some(holds) = number(holds).filter(|holds| *holds > 0) else { return Seen::NotALock };
        let is_its = |field: &Bytes| field.strip_prefix(b"#@") == Some(owner.as_slice());
        let details = hash.pairs().iter().find(|(field, _)| is_many && is_its(field)).map(|(_, value)| value);
        let (deadline, token) = match details.map(|details| std::str::from_utf8(details).unwrap_or_default()) {
            None => (*expiry, if is_many { None } else { fence }),
            Some(details) => {
                let Some((at, token)) = details.split_once(':') else { return Seen::NotALock };
                let at = at.parse::<u64>().ok().filter(|at| *at < i64::MAX as u64);
                // Without an expiry of the key, nobody's lease ends; with it, nobody's is longer.
                (expiry.map(|expiry| at.map_or(expiry, |at| at.min(expiry))), token.parse().ok())
            }
        };
        if deadline.is_none_or(|at| at >= now) {
            holders.push(Holder { owner: owner.clone(), holds, token, deadline });
        }
    }
    if !is_many && holders.len() > 1 {
        return Seen::NotALock;
    }
    // Without an owner's field, only what a lock has left is one.
    let is_of_lock =
        |field: &Bytes| [&b"#fence"[..], b"#limit"].contains(&field.as_slice()) || field.starts_with(b"#@");
    let is_owner = |field: &Bytes| field.first() != Some(&b'#');
    let mut fields = hash.pairs().iter().map(|(field, _)| field);
    if !fields.clone().any(is_owner) && !fields.all(is_of_lock) {
        return Seen::NotALock;
    }
    let limit = if holders.is_empty() { u32::MAX } else { limit };
    Seen::Lock(Truth { limit, fence, holders })
}

impl Seen {
    /// The hold of an owner.
    pub fn of(&self, owner: &[u8]) -> Option<&Holder> {
        self.holders().iter().find(|holder| holder.owner == owner)
    }

    /// Who holds.
    pub fn holders(&self) -> &[Holder] {
        match self {
            Self::Lock(lock) => &lock.holders,
            Self::NotALock => &[],
        }
    }
}
