//! What the replicas have yet to confirm.

use super::owed::Ticket;
use super::{Answer, TieId, Undo};
use crate::lock::{Map, Millis, Owner};
use crate::server::clock::Now;
use crate::server::replicas::{Offset, Offsets};
use std::collections::{BTreeMap, BTreeSet};

/// For this many ms after the replicas were asked, the end of every turn of the event loop checks for their answers,
/// which takes some ten microseconds. After that, they are checked once per millisecond.
const PROMPT: Millis = 5;

/// Names a confirmation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmationId(u64);

/// A grant or renewal that counts only once enough replicas have it.
#[derive(Debug)]
pub struct Confirmation {
    /// What depends on it.
    pub what: What,
    /// How to roll it back.
    pub undo: Undo,
    /// How many replicas it needs.
    pub needed: u32,
    /// The replication offset that they must have reached. Known once the step that wrote it has been replicated: in
    /// the next turn.
    pub target: Option<Offset>,
    /// When it began.
    pub began: Now,
    /// When it is given up.
    pub until: Millis,
}

/// What depends on a confirmation.
#[derive(Debug)]
pub enum What {
    /// This answer.
    Reply(Ticket, Answer),
    /// The next renewal of this tie by the watchdog.
    Renewal(TieId),
}

impl Confirmation {
    fn is_confirmed(&self, offsets: &Offsets) -> bool {
        self.target.is_some_and(|target| offsets.having(target) as u64 >= u64::from(self.needed))
    }
}

/// A confirmation that is no longer pending.
#[derive(Debug)]
pub enum Settled {
    /// Enough replicas have it.
    Confirmed(Confirmation),
    /// Its time is up; this many replicas have it.
    Missed(Confirmation, usize),
}

/// All that are pending.
#[derive(Debug, Default)]
pub struct Confirmations {
    next_id: u64,
    by_id: BTreeMap<u64, Confirmation>,
    /// The pending ones of each owner.
    by_owner: Map<Owner, BTreeSet<u64>>,
    asked_at: Millis,
    /// Asked in this turn of the event loop, so the question has not even been sent yet.
    asked_just_now: bool,
}

impl Confirmations {
    /// Adds one.
    pub fn begin(&mut self, confirmation: Confirmation) -> ConfirmationId {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        self.by_owner.get_or_insert_with(confirmation.undo.owner.clone(), BTreeSet::new).insert(id);
        self.by_id.insert(id, confirmation);
        ConfirmationId(id)
    }

    /// Gives up one that nobody wants any more. Returns what has to be rolled back.
    pub fn abandon(&mut self, id: ConfirmationId) -> Option<Undo> {
        self.remove(id).map(|it| it.undo)
    }

    fn remove(&mut self, id: ConfirmationId) -> Option<Confirmation> {
        let it = self.by_id.remove(&id.0)?;
        if let Some(of_owner) = self.by_owner.get_mut(&it.undo.owner) {
            of_owner.remove(&id.0);
            if of_owner.is_empty() {
                self.by_owner.remove(&it.undo.owner);
            }
        }
        Some(it)
    }

    /// Drops all of them; later ones have other names.
    pub fn retire(&mut self) -> Self {
        let next_id = self.next_id;
        std::mem::replace(self, Self { next_id, ..Self::default() })
    }

    /// How many are pending.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// The replicas are being asked about everything written up to `written`.
    pub fn asked(&mut self, written: Offset, now: Millis) {
        self.asked_at = now;
        self.asked_just_now = true;
        for it in self.by_id.values_mut().rev().take_while(|it| it.target.is_none()) {
            it.target = Some(written);
        }
    }

    /// Whether to check for answers at the end of this turn of the event loop.
    pub fn expects_news(&mut self, now: Millis) -> bool {
        let asked_before = !std::mem::take(&mut self.asked_just_now);
        asked_before && !self.is_empty() && now <= self.asked_at.saturating_add(PROMPT)
    }

    /// Whether some are confirmed.
    pub fn any_confirmed(&self, offsets: &Offsets) -> bool {
        self.by_id.values().any(|it| it.is_confirmed(offsets))
    }

    /// Those that are confirmed and those whose time is up, in order, at most this many.
    pub fn settled(&self, offsets: &Offsets, now: Millis, most: usize) -> Vec<ConfirmationId> {
        let settled = self.by_id.iter().filter(|(_, it)| it.is_confirmed(offsets) || now >= it.until);
        settled.take(most).map(|(id, _)| ConfirmationId(*id)).collect()
    }

    /// Removes one that [`Confirmations::settled`] named.
    pub fn take(&mut self, id: ConfirmationId, offsets: &Offsets) -> Option<Settled> {
        let it = self.remove(id)?;
        if it.is_confirmed(offsets) {
            return Some(Settled::Confirmed(it));
        }
        let having = it.target.map_or(0, |target| offsets.having(target));
        Some(Settled::Missed(it, having))
    }

    /// Removes any one, because this server no longer decides anything.
    pub fn take_any(&mut self) -> Option<Confirmation> {
        let id = *self.by_id.first_key_value()?.0;
        self.remove(ConfirmationId(id))
    }

    /// Lends the roll-backs of what an owner waits to have confirmed.
    pub fn of_owner(&mut self, owner: &[u8], mut work: impl FnMut(&mut Undo)) {
        for id in self.by_owner.get(owner).into_iter().flatten() {
            if let Some(it) = self.by_id.get_mut(id) {
                work(&mut it.undo);
            }
        }
    }
}
