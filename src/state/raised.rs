//! Which token a hold had before a holder raised it with `FENCE`: a request that names the old one still means it.

use crate::lock::{KeyMap, LockKey, Owner, Token};
use foldhash::HashMap;
use std::collections::VecDeque;

/// How many raised holds are remembered, at most: the newest. (150 bytes or so for each.)
pub const MOST: usize = 100_000;

/// The tokens that one hold has had: the first and the newest.
///
/// Every token between them that this owner may know for this key was this hold's, for it has held ever since. So a hold
/// that ended is not forgotten: what its owner is granted later has a token above these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tokens {
    first: Token,
    newest: Token,
}

/// The holds whose token was raised.
#[derive(Debug, Default)]
pub struct Raised {
    by_hold: KeyMap<HashMap<Owner, Tokens>>,
    /// In the order in which they were raised for the first time.
    order: VecDeque<(LockKey, Owner)>,
}

impl Raised {
    /// The token of a hold was raised.
    pub fn raise(&mut self, key: &LockKey, owner: &[u8], before: Token, newest: Token) {
        let first = self.first(key.db, &key.name, owner, before);
        let tokens = Tokens { first, newest };
        let owner = Owner::from(owner);
        if self.by_hold.get_or_default(key).insert(owner.clone(), tokens).is_none() {
            self.order.push_back((key.clone(), owner));
            if self.order.len() > MOST {
                self.forget_oldest();
            }
        }
    }

    fn forget_oldest(&mut self) {
        let Some((key, owner)) = self.order.pop_front() else { return };
        let Some(of_key) = self.by_hold.get_mut(key.db, &key.name) else { return };
        of_key.remove(&owner);
        if of_key.is_empty() {
            self.by_hold.remove(key.db, &key.name);
        }
    }

    /// The token under which a hold began that has this one now.
    pub fn first(&self, db: i32, name: &[u8], owner: &[u8], token: Token) -> Token {
        self.of(db, name, owner).filter(|of| of.newest == token).map_or(token, |of| of.first)
    }

    /// Whether a hold that has the token `held` is meant by a request that names the token `named`.
    pub fn is_meant(&self, (db, name, owner): (i32, &[u8], &[u8]), held: Token, named: Token) -> bool {
        (self.first(db, name, owner, held)..=held).contains(&named)
    }

    fn of(&self, db: i32, name: &[u8], owner: &[u8]) -> Option<Tokens> {
        self.by_hold.get(db, name)?.get(owner).copied()
    }

    /// Two databases were swapped, and their locks with them.
    pub fn swap(&mut self, one: i32, other: i32) {
        self.by_hold.swap(one, other);
        for (key, _) in &mut self.order {
            if key.db == one {
                key.db = other;
            } else if key.db == other {
                key.db = one;
            }
        }
    }
}

#[cfg(test)]
impl Raised {
    /// How many holds are remembered.
    pub fn count(&self) -> usize {
        self.by_hold.len()
    }
}
