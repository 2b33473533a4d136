//! Locks in memory, instead of the server's keyspace.

use super::Locks;
use crate::lock::serve::{Sight, View, WaitEnd};
use crate::lock::{Decision, Fence, Hold, Holders, LockKey, Millis, Owner, Standing, Waiter};
use foldhash::HashMap;

/// The value of a key.
#[derive(Clone, Debug)]
pub enum Stored {
    Lock(Holders),
    SomethingElse,
}

/// Locks in memory at one moment.
#[derive(Clone, Debug, Default)]
pub struct Table {
    pub stored: HashMap<LockKey, Stored>,
    pub fence: Fence,
    pub now: Millis,
}

impl Table {
    pub fn holders_of(&self, key: &LockKey) -> Option<&Holders> {
        match self.stored.get(key)? {
            Stored::Lock(holders) => Some(holders),
            Stored::SomethingElse => None,
        }
    }

    /// Writes a decision for each key, all under one token.
    pub fn write(&mut self, keys: &[LockKey], owner: &Owner, decisions: &[Decision]) {
        let token = self.fence.next(self.now * 1000);
        for (key, decision) in keys.iter().zip(decisions) {
            self.write_one(key, owner, *decision, token);
        }
    }

    fn write_one(&mut self, key: &LockKey, owner: &Owner, decision: Decision, token: u64) {
        match decision {
            Decision::Grant(hold, limit) => {
                let free = matches!(View::look(self, key, owner), Sight::Lock(standing) if standing.holders == 0);
                if free {
                    self.stored.insert(key.clone(), Stored::Lock(Holders::new(limit)));
                }
                let Some(Stored::Lock(holders)) = self.stored.get_mut(key) else { return };
                holders.tighten(limit);
                holders.insert(owner.clone(), Hold { token: Some(token), ..hold });
            }
            Decision::Reenter(hold) => {
                let Some(Stored::Lock(holders)) = self.stored.get_mut(key) else { return };
                holders.insert(owner.clone(), Hold { token: hold.token.or(Some(token)), ..hold });
            }
            Decision::Wait => {}
            refusal => assert!(refusal.is_refusal(), "{refusal:?}"),
        }
    }

    /// Removes a holder.
    pub fn release(&mut self, key: &LockKey, owner: &Owner) -> Option<Hold> {
        let Some(Stored::Lock(holders)) = self.stored.get_mut(key) else { return None };
        let hold = holders.remove(owner);
        if holders.is_empty() {
            self.stored.remove(key);
        }
        hold
    }

    /// Removes expired holders.
    pub fn purge(&mut self) {
        let now = self.now;
        let keys: Vec<LockKey> = self.stored.keys().cloned().collect();
        for key in keys {
            let expired: Vec<Owner> = self.holders_of(&key).map_or(Vec::new(), |it| it.expired(now).cloned().collect());
            for owner in expired {
                self.release(&key, &owner);
            }
        }
    }
}

impl View for Table {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight {
        match self.stored.get(key) {
            None => Sight::Lock(Standing::FREE),
            Some(Stored::Lock(holders)) => Sight::Lock(holders.standing(owner, self.now)),
            Some(Stored::SomethingElse) => Sight::NotALock,
        }
    }
}

impl Locks for Table {
    fn holders(&mut self, key: &LockKey) -> Vec<Owner> {
        let Some(holders) = self.holders_of(key) else { return Vec::new() };
        let counts = holders.iter().filter(|(_, hold)| !hold.deadline.has_passed(self.now));
        counts.map(|(owner, _)| owner.clone()).collect()
    }

    fn settle(&mut self, waiter: &Waiter<()>, end: WaitEnd) {
        if let WaitEnd::Granted(decisions) = end {
            self.write(&waiter.keys, &waiter.owner, &decisions);
        }
    }
}
