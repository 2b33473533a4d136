//! Grants and renewals in flight: made, but their answer is not with the network yet. If it never gets there, they are
//! taken back.
//!
//! For a key and an owner there is at most one, since every other request of this owner for this key is refused
//! meanwhile. So taking back is exact: the whole hold, or one hold less. Only the connection whose answer is written
//! already may go on with what it has sent behind it: if that ends first, the one before stands in the way again.

use super::owed::{OnBehalf, Ticket};
use super::ties::Home;
use crate::lock::{Deadline, KeyMap, LockKey, Map, Owner, Token};
use std::collections::btree_map::{BTreeMap, Entry};
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

/// The name of a grant; none is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantId(pub(super) u64);

/// What is taken back of each hold of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeBack {
    /// All of it: it is new.
    Hold,
    /// The one hold that a re-entry has added.
    One,
    /// Nothing: a renewal, or a count that the owner named.
    Nothing,
}

/// A hold as it was granted or renewed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantedHold {
    /// The lock's key.
    pub name: Rc<[u8]>,
    /// The token.
    pub token: Token,
    /// The end of the lease.
    pub deadline: Deadline,
}

/// A grant or a renewal in flight.
#[derive(Debug)]
pub struct Grant {
    /// The database of the locks, which it follows through `SWAPDB`.
    pub home: Home,
    /// The owner.
    pub owner: Owner,
    /// The connection on whose behalf it was made: the asker's, or a session's.
    pub client: u64,
    /// Whether that is a session.
    pub on_behalf: OnBehalf,
    /// The name of the answer that is owed.
    pub ticket: Ticket,
    /// What is taken back of each of its holds.
    pub back: TakeBack,
    /// Its holds.
    pub holds: Vec<GrantedHold>,
}

impl Grant {
    /// All of it lasts at least until then.
    pub fn deadline(&self) -> Deadline {
        self.holds.iter().map(|hold| hold.deadline).min().unwrap_or(Deadline::At(0))
    }
}

/// One hold that has to be taken back.
#[derive(Debug, PartialEq, Eq)]
pub struct OwedHold {
    /// The lock.
    pub key: LockKey,
    /// The owner.
    pub owner: Owner,
    /// The token that it was granted under. A hold under another one stays.
    pub token: Token,
    /// How much of it is taken back.
    pub back: TakeBack,
}

/// What stands in the way of another request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Its answer is on the way.
    Answering,
    /// Its answer reaches nobody: it is being taken back.
    Owed,
}

/// Those of one key and owner: the newest, and those of the same connection before it.
#[derive(Debug)]
struct OfHold {
    newest: GrantId,
    before: Vec<GrantId>,
}

impl OfHold {
    fn put(&mut self, id: GrantId) {
        self.before.push(std::mem::replace(&mut self.newest, id));
    }

    fn all(&self) -> impl Iterator<Item = GrantId> {
        self.before.iter().chain([&self.newest]).copied()
    }
}

/// Those of one key.
#[derive(Debug, Default)]
struct OfKey {
    by_owner: BTreeMap<Owner, OfHold>,
    /// Those among them that have to be taken back, as far as is known.
    owed: BTreeSet<GrantId>,
    /// How many sessions had ended when those were last looked for whose answer reaches nobody any more.
    looked: u64,
}

/// All of them.
#[derive(Debug, Default)]
pub struct InFlight {
    next_id: u64,
    by_id: Map<GrantId, (Grant, Stage)>,
    by_hold: KeyMap<OfKey>,
    owed: VecDeque<GrantId>,
}

impl InFlight {
    /// Records a grant that was made.
    pub fn begin(&mut self, grant: Grant) -> GrantId {
        let id = GrantId(self.next_id);
        self.next_id = self.next_id.wrapping_add(1);
        let db = grant.home.get();
        for hold in &grant.holds {
            let key = LockKey { db, name: hold.name.clone() };
            match self.by_hold.get_or_default(&key).by_owner.entry(grant.owner.clone()) {
                Entry::Vacant(place) => {
                    place.insert(OfHold { newest: id, before: Vec::new() });
                }
                Entry::Occupied(of_hold) => of_hold.into_mut().put(id),
            }
        }
        self.by_id.insert(id, (grant, Stage::Answering));
        id
    }

    /// A grant whose answer is on the way.
    pub fn get(&self, id: GrantId) -> Option<&Grant> {
        self.by_id.get(&id).filter(|(_, stage)| *stage == Stage::Answering).map(|(grant, _)| grant)
    }

    /// The grant of this key to this owner whose answer is on the way.
    pub fn of(&self, db: i32, name: &[u8], owner: &[u8]) -> Option<GrantId> {
        let id = self.by_hold.get(db, name)?.by_owner.get(owner)?.newest;
        self.get(id).map(|_| id)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// The answer is with the network, or nobody minds any more: the grant stands.
    pub fn settle(&mut self, id: GrantId) -> Option<Grant> {
        let (grant, _) = self.by_id.remove(&id)?;
        for hold in &grant.holds {
            self.forget_hold(grant.home.get(), &hold.name, &grant.owner, id);
        }
        Some(grant)
    }

    fn forget_hold(&mut self, db: i32, name: &[u8], owner: &[u8], id: GrantId) {
        let Some(of_key) = self.by_hold.get_mut(db, name) else { return };
        of_key.owed.remove(&id);
        let Some(of_hold) = of_key.by_owner.get_mut(owner) else { return };
        of_hold.before.retain(|before| *before != id);
        if of_hold.newest == id {
            match of_hold.before.pop() {
                Some(before) => of_hold.newest = before,
                None => drop(of_key.by_owner.remove(owner)),
            }
        }
        if of_key.by_owner.is_empty() {
            self.by_hold.remove(db, name);
        }
    }

    /// The answer reaches nobody: the grant has to be taken back, if there is anything to take back.
    pub fn owe(&mut self, id: GrantId) {
        match self.by_id.get_mut(&id) {
            Some((grant, _)) if grant.back == TakeBack::Nothing => drop(self.settle(id)),
            Some((grant, stage)) if *stage == Stage::Answering => {
                *stage = Stage::Owed;
                self.owed.push_back(id);
                for hold in &grant.holds {
                    let of_key = self.by_hold.get_mut(grant.home.get(), &hold.name);
                    if let Some(of_key) = of_key {
                        of_key.owed.insert(id);
                    }
                }
            }
            _ => {}
        }
    }

    /// Whether anything has to be taken back.
    pub fn is_owed(&self) -> bool {
        !self.owed.is_empty()
    }

    /// Removes the next hold that has to be taken back.
    pub fn next_owed(&mut self) -> Option<OwedHold> {
        loop {
            let id = *self.owed.front()?;
            match self.by_id.get(&id).and_then(|(grant, _)| grant.holds.last()).map(|hold| hold.name.clone()) {
                Some(name) => return self.remove_hold(id, &name),
                None => {
                    self.owed.pop_front();
                    self.settle(id);
                }
            }
        }
    }

    /// Removes those holds of a lock that have to be taken back, also if it is only now found out that their session is
    /// not `open` any more: for that, all are gone through once after each of the `ends` of sessions, and not at each look.
    pub fn take_owed(&mut self, db: i32, name: &[u8], ends: u64, open: impl Fn(u64) -> bool) -> Vec<OwedHold> {
        let Some(of_key) = self.by_hold.get_mut(db, name) else { return Vec::new() };
        let was_looked = std::mem::replace(&mut of_key.looked, ends) == ends;
        let Some(of_key) = self.by_hold.get(db, name) else { return Vec::new() };
        let is_owed = |id: &GrantId| self.has_failed(*id, &open);
        let ids: Vec<GrantId> = if was_looked {
            of_key.owed.iter().copied().collect()
        } else {
            of_key.by_owner.values().flat_map(OfHold::all).filter(is_owed).collect()
        };
        ids.into_iter().filter_map(|id| self.remove_hold(id, name)).filter(|it| it.back != TakeBack::Nothing).collect()
    }

    /// Whether all of a hold has to be taken back.
    pub fn ends(&self, db: i32, name: &[u8], owner: &[u8], open: impl Fn(u64) -> bool) -> bool {
        let of_hold = self.by_hold.get(db, name).and_then(|of_key| of_key.by_owner.get(owner));
        let is_new = |id: &GrantId| self.by_id.get(id).is_some_and(|(grant, _)| grant.back == TakeBack::Hold);
        of_hold.is_some_and(|all| all.all().filter(is_new).any(|id| self.has_failed(id, &open)))
    }

    /// Whether the answer reaches nobody, also if that is only now found out.
    fn has_failed(&self, id: GrantId, open: impl Fn(u64) -> bool) -> bool {
        self.by_id.get(&id).is_some_and(|(grant, stage)| {
            *stage == Stage::Owed || grant.on_behalf == OnBehalf::Session && !open(grant.client)
        })
    }

    /// The owner, whose connection goes on behind the answer to a re-entry, has given back one hold: nothing more of it
    /// is taken back.
    pub fn gave_one_back(&mut self, db: i32, name: &[u8], owner: &[u8]) {
        let id = self.of(db, name, owner);
        if let Some(id) = id.filter(|id| self.get(*id).is_some_and(|grant| grant.back == TakeBack::One)) {
            self.remove_hold(id, name);
        }
    }

    /// Takes a hold out of a grant: whatever becomes of the others, this one is dealt with.
    pub fn remove_hold(&mut self, id: GrantId, name: &[u8]) -> Option<OwedHold> {
        let (grant, _) = self.by_id.get_mut(&id)?;
        let at = grant.holds.iter().position(|hold| *hold.name == *name)?;
        let GrantedHold { name, token, .. } = grant.holds.swap_remove(at);
        let (key, owner, back) = (LockKey { db: grant.home.get(), name }, grant.owner.clone(), grant.back);
        self.forget_hold(key.db, &key.name, &owner, id);
        Some(OwedHold { key, owner, token, back })
    }

    /// Drops all of them: this server takes nothing back any more.
    pub fn clear(&mut self) {
        *self = Self { next_id: self.next_id, ..Self::default() };
    }

    /// The server's clock has stepped by so many ms, and holds that are tied go along.
    pub fn stepped(&mut self, by: i64, is_tied: impl Fn(i32, &[u8], &Owner, Token) -> bool) {
        for (_, (grant, _)) in self.by_id.iter_mut() {
            let (db, owner) = (grant.home.get(), &grant.owner);
            for hold in grant.holds.iter_mut().filter(|hold| is_tied(db, &hold.name, owner, hold.token)) {
                hold.deadline = hold.deadline.stepped(by);
            }
        }
    }

    /// Two databases were swapped, and their locks with them. (The homes of the grants follow by themselves.)
    pub fn swap(&mut self, one: i32, other: i32) {
        self.by_hold.swap(one, other);
    }
}

#[cfg(test)]
impl InFlight {
    /// Whether each hold is in the index, and nothing else is.
    pub fn is_consistent(&self) -> bool {
        let of_key = |key: LockKey| self.by_hold.get(key.db, &key.name);
        let of_hold = |of: &OfKey| of.by_owner.values().map(|it| it.all().count()).sum::<usize>();
        let indexed: usize = self.by_hold.keys().map(|key| of_key(key).map_or(0, of_hold)).sum();
        let holds: usize = self.by_id.values().map(|(grant, _)| grant.holds.len()).sum();
        let found = self.by_id.iter().all(|(id, (grant, stage))| {
            let of_key = |hold: &GrantedHold| self.by_hold.get(grant.home.get(), &hold.name);
            let of_hold = |hold: &GrantedHold| of_key(hold)?.by_owner.get(&grant.owner);
            let is_owed = |hold: &GrantedHold| of_key(hold).is_some_and(|of| of.owed.contains(id));
            let is_found = |hold: &GrantedHold| of_hold(hold).is_some_and(|of| of.all().any(|it| it == *id));
            grant.holds.iter().all(|hold| is_found(hold) && is_owed(hold) == (*stage == Stage::Owed))
        });
        found && indexed == holds
    }
}
