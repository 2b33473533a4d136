//! Undelivered grants and renewals. They have been made, but their reply, or the `LOCK.EVENTS` reply that carries their
//! event, has not been composed. If the client disconnects before that, what they added is revoked.
//!
//! An owner may have several of them for one key. What each may still undo is stored per hold. So revoking one never
//! takes a hold that another one has promised: see [`Undelivered::keep`].

use super::bindings::{BindingId, Home};
use super::pending::{OnBehalf, Ticket};
use crate::lock::{ByOwner, Deadline, KeyMap, LockKey, Owner, Token};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// Identifies a grant; no id is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantId(pub(super) u64);

/// How a grant changed the hold of its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// The owner had no hold.
    New,
    /// It added one to the hold count.
    OneMore,
    /// The request named a hold count (`HOLDS`), and the owner already had the hold.
    Repetition,
    /// Only the lease changed.
    Renewal,
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
    /// By how much the hold count is lowered if the grant is revoked.
    pub undo: u64,
    /// The binding that the grant made, if the hold had none. If the grant is revoked and the hold goes on, the flags
    /// of this binding are cleared.
    pub binding: Option<BindingId>,
}

/// A grant or a renewal that is undelivered.
#[derive(Debug)]
pub struct Grant {
    /// The database of the locks, which follows `SWAPDB`.
    pub home: Home,
    /// The owner.
    pub owner: Owner,
    /// The client id of the connection on whose behalf it was made: the caller's, or a session's.
    pub client: u64,
    /// Whether that is a session.
    pub on_behalf: OnBehalf,
    /// The ticket of the pending reply.
    pub ticket: Ticket,
    /// How it changed the owner's holds.
    pub basis: Basis,
    /// Its holds.
    pub holds: Vec<GrantedHold>,
    /// The position of its event in the queue of its session.
    pub event: Option<u64>,
}

impl Grant {
    /// The earliest deadline of its holds.
    pub fn deadline(&self) -> Deadline {
        self.holds.iter().map(|hold| hold.deadline).min().unwrap_or(Deadline::At(0))
    }

    /// Whether its owner relies on a hold that other grants may have added, too.
    fn is_claim(&self) -> bool {
        matches!(self.basis, Basis::New | Basis::Repetition)
    }

    fn hold_mut(&mut self, name: &[u8]) -> Option<&mut GrantedHold> {
        self.holds.iter_mut().find(|hold| *hold.name == *name)
    }
}

/// What must be revoked of one hold.
#[derive(Debug, PartialEq, Eq)]
pub struct Revocation {
    /// The lock.
    pub key: LockKey,
    /// The owner.
    pub owner: Owner,
    /// The token of the hold. A hold with another token stays.
    pub token: Token,
    /// By how much the hold count is lowered. At 0, the hold ends.
    pub undo: u64,
    /// The binding whose flags are cleared if the hold does not end.
    pub binding: Option<BindingId>,
}

impl Revocation {
    /// Whether it changes anything.
    fn changes(&self) -> bool {
        self.undo > 0 || self.binding.is_some()
    }
}

/// The stage of an undelivered grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Replicas have yet to confirm it.
    Confirming,
    /// Its reply or event has yet to be composed.
    Delivering,
    /// It is being revoked: for example, its client is gone, or too few replicas confirmed it.
    Revoked,
}

/// The undelivered grants of one key.
#[derive(Debug, Default)]
struct KeyGrants {
    by_owner: ByOwner<GrantId>,
    /// The grants among them that are known to need revocation.
    revoked: BTreeSet<GrantId>,
    /// How many sessions had ended when [`Undelivered::failed`] last scanned this key.
    ends_at_scan: u64,
}

/// All undelivered grants and renewals.
#[derive(Debug, Default)]
pub struct Undelivered {
    next_id: u64,
    by_id: BTreeMap<GrantId, (Grant, Progress)>,
    by_hold: KeyMap<KeyGrants>,
    revoked: VecDeque<GrantId>,
}

impl Undelivered {
    /// Records a grant that was made.
    pub fn begin(&mut self, grant: Grant, progress: Progress) -> GrantId {
        let id = GrantId(self.next_id);
        self.next_id = self.next_id.wrapping_add(1);
        let db = grant.home.get();
        for hold in &grant.holds {
            let key = LockKey { db, name: hold.name.clone() };
            self.by_hold.get_or_default(&key).by_owner.insert(grant.owner.clone(), id);
        }
        self.by_id.insert(id, (grant, progress));
        id
    }

    /// A grant that is not being revoked.
    pub fn get(&self, id: GrantId) -> Option<&Grant> {
        self.by_id.get(&id).filter(|(_, progress)| *progress != Progress::Revoked).map(|(grant, _)| grant)
    }

    /// The grants for this key and owner that are not being revoked, oldest first.
    pub fn of(&self, db: i32, name: &[u8], owner: &[u8]) -> Vec<GrantId> {
        let of_key = self.by_hold.get(db, name).into_iter();
        of_key.flat_map(|of_key| of_key.by_owner.of(owner)).filter(|id| self.get(*id).is_some()).collect()
    }

    /// The grant for this key and owner that replicas have yet to confirm.
    pub fn confirming(&self, db: i32, name: &[u8], owner: &[u8]) -> Option<GrantId> {
        self.by_hold.get(db, name)?.by_owner.of(owner).find(|id| self.is(*id, Progress::Confirming))
    }

    /// Whether a grant is at this stage.
    pub fn is(&self, id: GrantId, progress: Progress) -> bool {
        self.by_id.get(&id).is_some_and(|(_, is)| *is == progress)
    }

    /// Records that replicas have confirmed a grant.
    pub fn confirmed(&mut self, id: GrantId) {
        if let Some((_, progress)) = self.by_id.get_mut(&id) {
            *progress = Progress::Delivering;
        }
    }

    /// Records the position of a grant's event in the queue of its session.
    pub fn set_event(&mut self, id: GrantId, event: u64) {
        if let Some((grant, _)) = self.by_id.get_mut(&id) {
            grant.event = Some(event);
        }
    }

    /// Records the binding that a grant made for a hold that had none.
    pub fn set_binding(&mut self, id: GrantId, name: &[u8], binding: Option<BindingId>) {
        if let Some(hold) = self.by_id.get_mut(&id).and_then(|(grant, _)| grant.hold_mut(name)) {
            hold.binding = binding;
        }
    }

    /// How many grants are undelivered.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether no grant is undelivered.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// The grants of the hold of this key and owner under this token. An earlier hold may have ended before its grant
    /// was delivered.
    fn of_hold(&self, (db, name, owner): (i32, &[u8], &[u8]), token: Token) -> Vec<GrantId> {
        let mut ids = self.of(db, name, owner);
        let is_its = |hold: &GrantedHold| *hold.name == *name && hold.token == token;
        ids.retain(|id| self.get(*id).is_some_and(|grant| grant.holds.iter().any(is_its)));
        ids
    }

    /// By how much a grant lowers the hold count of a lock if it is revoked.
    fn undo_mut(&mut self, id: GrantId, name: &[u8]) -> Option<&mut u64> {
        self.by_id.get_mut(&id).and_then(|(grant, _)| grant.hold_mut(name)).map(|hold| &mut hold.undo)
    }

    /// Records that another grant of this hold has been, or is being, delivered. Of what the undelivered grants may
    /// still undo, only `budget` stays. Returns what they may no longer undo: if that other grant is not delivered
    /// after all, it must undo this as well.
    pub fn keep(&mut self, (db, name, owner): (i32, &[u8], &[u8]), token: Token, mut budget: u64) -> u64 {
        let mut kept: u64 = 0;
        for id in self.of_hold((db, name, owner), token) {
            if let Some(hold) = self.by_id.get_mut(&id).and_then(|(grant, _)| grant.hold_mut(name)) {
                let undo = hold.undo.min(budget);
                budget = budget.saturating_sub(undo);
                kept = kept.saturating_add(hold.undo.saturating_sub(undo));
                hold.undo = undo;
            }
        }
        kept
    }

    /// Records that the lease of a hold now ends at `deadline` at the latest.
    pub fn shorten(&mut self, (db, name, owner): (i32, &[u8], &[u8]), deadline: Deadline) {
        for id in self.of(db, name, owner) {
            if let Some(hold) = self.by_id.get_mut(&id).and_then(|(grant, _)| grant.hold_mut(name)) {
                hold.deadline = hold.deadline.min(deadline);
            }
        }
    }

    /// Removes a grant whose reply or event has been composed: it stands. Undelivered repetitions of it no longer undo
    /// what this grant has added.
    pub fn delivered(&mut self, id: GrantId) -> Option<Grant> {
        let grant = self.forget(id)?;
        let db = grant.home.get();
        for hold in &grant.holds {
            let mut stands = match grant.basis {
                Basis::New | Basis::Repetition => u64::MAX,
                Basis::OneMore => u64::from(hold.undo == 0),
                Basis::Renewal => 0,
            };
            // Usually there are no others for this key.
            if stands == 0 || self.by_hold.is_empty() {
                continue;
            }
            let mut repetitions = self.of_hold((db, &hold.name, &grant.owner), hold.token);
            repetitions.retain(|id| self.get(*id).is_some_and(|grant| grant.basis == Basis::Repetition));
            for id in repetitions {
                let Some(undo) = self.undo_mut(id, &hold.name) else { continue };
                let before = *undo;
                *undo = before.saturating_sub(stands);
                stands = stands.saturating_sub(before);
            }
        }
        Some(grant)
    }

    fn forget(&mut self, id: GrantId) -> Option<Grant> {
        let (grant, _) = self.by_id.remove(&id)?;
        for hold in &grant.holds {
            self.forget_hold(grant.home.get(), &hold.name, &grant.owner, id);
        }
        Some(grant)
    }

    fn forget_hold(&mut self, db: i32, name: &[u8], owner: &[u8], id: GrantId) {
        let Some(of_key) = self.by_hold.get_mut(db, name) else { return };
        of_key.revoked.remove(&id);
        of_key.by_owner.remove(owner, id);
        if of_key.by_owner.is_empty() {
            self.by_hold.remove(db, name);
        }
    }

    /// Records that a grant can't be delivered. What it may undo must be revoked, unless another grant relies on it.
    pub fn revoke(&mut self, id: GrantId) {
        let Some((grant, progress)) = self.by_id.get_mut(&id) else { return };
        if *progress == Progress::Revoked {
            return;
        }
        *progress = Progress::Revoked;
        if grant.basis == Basis::Repetition {
            self.leave_to_others(id);
        }
        let Some((grant, _)) = self.by_id.get(&id) else { return };
        if grant.holds.iter().all(|hold| hold.undo == 0 && hold.binding.is_none()) {
            self.forget(id);
            return;
        }
        self.revoked.push_back(id);
        let Some((grant, _)) = self.by_id.get(&id) else { return };
        for hold in &grant.holds {
            if let Some(of_key) = self.by_hold.get_mut(grant.home.get(), &hold.name) {
                of_key.revoked.insert(id);
            }
        }
    }

    /// Passes what a repetition may undo to other undelivered grants of the same hold. Each re-entry takes one, the
    /// hold that it added. The last grant that relies on the same hold takes the rest, also for those before it, which
    /// rely on it as well.
    fn leave_to_others(&mut self, id: GrantId) {
        let Some((grant, _)) = self.by_id.get(&id) else { return };
        let (db, owner, holds) = (grant.home.get(), grant.owner.clone(), grant.holds.clone());
        for hold in holds {
            let others = self.of_hold((db, &hold.name, &owner), hold.token);
            let is = |id: &GrantId, is: fn(&Grant) -> bool| self.get(*id).is_some_and(is);
            let reentries = others.iter().filter(|other| is(other, |grant| grant.basis == Basis::OneMore));
            let claim = others.iter().rfind(|other| is(other, Grant::is_claim));
            let successors: Vec<(GrantId, u64)> =
                reentries.map(|id| (*id, 1)).chain(claim.map(|id| (*id, u64::MAX))).collect();
            let mut left = hold.undo;
            for (successor, most) in successors {
                let Some(undo) = self.undo_mut(successor, &hold.name) else { continue };
                let before = *undo;
                *undo = before.saturating_add(left).min(most);
                left = left.saturating_sub(undo.saturating_sub(before));
            }
            self.undo_mut(id, &hold.name).into_iter().for_each(|undo| *undo = left);
        }
    }

    /// Whether anything must be revoked.
    pub fn is_revoked(&self) -> bool {
        !self.revoked.is_empty()
    }

    /// Takes the next hold of which something must be revoked.
    pub fn next_revoked(&mut self) -> Option<Revocation> {
        loop {
            let id = *self.revoked.front()?;
            match self.by_id.get(&id).and_then(|(grant, _)| grant.holds.last()).map(|hold| hold.name.clone()) {
                Some(name) => {
                    let revoked = self.remove_hold(id, &name).filter(Revocation::changes);
                    if revoked.is_some() {
                        return revoked;
                    }
                }
                None => {
                    self.revoked.pop_front();
                    self.by_id.remove(&id);
                }
            }
        }
    }

    /// The grants of a lock that must be revoked, because their session is no longer `open`. All grants of the lock are
    /// scanned once after sessions have ended (`ends` counts them), not at each look at the lock.
    pub fn failed(&mut self, db: i32, name: &[u8], ends: u64, open: impl Fn(u64) -> bool) -> Vec<GrantId> {
        let Some(of_key) = self.by_hold.get_mut(db, name) else { return Vec::new() };
        if std::mem::replace(&mut of_key.ends_at_scan, ends) == ends {
            return Vec::new();
        }
        let ids: Vec<GrantId> = of_key.by_owner.all().collect();
        ids.into_iter().filter(|id| self.has_failed(*id, &open)).collect()
    }

    /// Takes what must be revoked of a lock.
    pub fn take_revoked(&mut self, db: i32, name: &[u8]) -> Vec<Revocation> {
        let ids: Vec<GrantId> =
            self.by_hold.get(db, name).into_iter().flat_map(|it| it.revoked.iter().copied()).collect();
        ids.into_iter().filter_map(|id| self.remove_hold(id, name)).filter(Revocation::changes).collect()
    }

    /// Whether a grant that created a hold of `owner` must be revoked, so that the hold ends.
    pub fn ends(&self, db: i32, name: &[u8], owner: &[u8], open: impl Fn(u64) -> bool) -> bool {
        let ids = self.by_hold.get(db, name).into_iter().flat_map(|of_key| of_key.by_owner.of(owner));
        let is_new = |id: &GrantId| {
            self.by_id.get(id).is_some_and(|(grant, _)| {
                grant.basis == Basis::New && grant.holds.iter().any(|hold| *hold.name == *name && hold.undo > 0)
            })
        };
        ids.filter(is_new).any(|id| self.has_failed(id, &open))
    }

    /// Whether a hold is over, and ends as soon as the server takes writes: see [`super::State::end_later`].
    pub fn is_over(&self, (db, name, owner): (i32, &[u8], &[u8]), token: Token) -> bool {
        let revoked = self.by_hold.get(db, name).into_iter().flat_map(|of_key| &of_key.revoked);
        let mut grants = revoked.filter_map(|id| self.by_id.get(id)).filter(|(grant, _)| *grant.owner == *owner);
        let is_it = |hold: &GrantedHold| (&*hold.name, hold.token, hold.undo) == (name, token, u64::MAX);
        grants.any(|(grant, _)| grant.holds.iter().any(is_it))
    }

    /// Whether a grant can't be delivered, even if this has not been recorded yet.
    fn has_failed(&self, id: GrantId, open: impl Fn(u64) -> bool) -> bool {
        self.by_id.get(&id).is_some_and(|(grant, progress)| {
            *progress == Progress::Revoked || grant.on_behalf == OnBehalf::Session && !open(grant.client)
        })
    }

    /// Removes a hold from a grant, whatever happens to the grant's other holds. Returns what must be revoked of it.
    pub fn remove_hold(&mut self, id: GrantId, name: &[u8]) -> Option<Revocation> {
        let (grant, _) = self.by_id.get_mut(&id)?;
        let at = grant.holds.iter().position(|hold| *hold.name == *name)?;
        let GrantedHold { name, token, undo, binding, .. } = grant.holds.swap_remove(at);
        let (key, owner) = (LockKey { db: grant.home.get(), name }, grant.owner.clone());
        self.forget_hold(key.db, &key.name, &owner, id);
        Some(Revocation { key, owner, token, undo, binding })
    }

    /// Drops all grants: this server no longer revokes anything.
    pub fn clear(&mut self) {
        *self = Self { next_id: self.next_id, ..Self::default() };
    }

    /// Records that the server's clock has stepped by so many ms: the deadlines of bound holds move by the step.
    pub fn stepped(&mut self, by: i64, is_bound: impl Fn(i32, &[u8], &Owner, Token) -> bool) {
        for (_, (grant, _)) in self.by_id.iter_mut() {
            let (db, owner) = (grant.home.get(), &grant.owner);
            for hold in grant.holds.iter_mut().filter(|hold| is_bound(db, &hold.name, owner, hold.token)) {
                hold.deadline = hold.deadline.stepped(by);
            }
        }
    }

    /// Follows `SWAPDB`: two databases were swapped, and their locks with them. (The [`Home`] of each grant follows by
    /// itself.)
    pub fn swap(&mut self, one: i32, other: i32) {
        self.by_hold.swap(one, other);
    }
}

#[cfg(test)]
impl Undelivered {
    /// Whether each hold is in the index, and nothing else is.
    pub fn is_consistent(&self) -> bool {
        let of_key = |key: LockKey| self.by_hold.get(key.db, &key.name);
        let of_hold = |of: &KeyGrants| of.by_owner.all().len();
        let indexed: usize = self.by_hold.keys().map(|key| of_key(key).map_or(0, of_hold)).sum();
        let holds: usize = self.by_id.values().map(|(grant, _)| grant.holds.len()).sum();
        let found = self.by_id.iter().all(|(id, (grant, progress))| {
            let of_key = |hold: &GrantedHold| self.by_hold.get(grant.home.get(), &hold.name);
            let is_found =
                |hold: &GrantedHold| of_key(hold).is_some_and(|of| of.by_owner.of(&grant.owner).any(|it| it == *id));
            let is_revoked = |hold: &GrantedHold| of_key(hold).is_some_and(|of| of.revoked.contains(id));
            let must_be_revoked = *progress == Progress::Revoked;
            grant.holds.iter().all(|hold| is_found(hold) && is_revoked(hold) == must_be_revoked)
        });
        found && indexed == holds
    }
}
