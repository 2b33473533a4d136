//! Grants and renewals that replicas have yet to confirm.

use super::{Answer, BindingId, GrantId, Requester};
use crate::lock::{Millis, Waiter};
use crate::server::clock::Now;
use crate::server::replicas::{Offset, Offsets};
use std::collections::{BTreeMap, BTreeSet};

/// For this many ms after the replicas were asked, the module checks for their answers at the end of every event-loop
/// iteration, which takes some ten microseconds. After that, it checks once per millisecond.
const PROMPT: Millis = 5;

/// After this many ms without enough confirmations, the module asks the replicas again: one may just have reconnected.
const ASK_AGAIN: Millis = 100;

/// Identifies a confirmation. Later ones have greater ids, and what is written later is confirmed no earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConfirmationId(pub(super) u64);

/// A grant or renewal that counts only once enough replicas have it.
#[derive(Debug)]
pub struct Confirmation {
    /// What depends on it.
    pub what: ConfirmedItem,
    /// How many replicas must confirm it.
    pub needed: u32,
    /// The replication offset that they must have reached; `None` until they are asked. It is known only once the
    /// command that wrote has been replicated.
    pub target: Option<Offset>,
    /// When it began.
    pub began: Now,
    /// When it times out.
    pub until: Millis,
}

/// What depends on a confirmation.
#[derive(Debug)]
pub enum ConfirmedItem {
    /// The answer to a request.
    Reply {
        /// The request.
        request: Box<Waiter<Requester>>,
        /// The answer.
        answer: Answer,
        /// The grant or renewal.
        grant: GrantId,
    },
    /// The lease of a watched hold, which the watchdog has renewed.
    Renewal(BindingId),
}

impl Confirmation {
    fn is_confirmed(&self, offsets: &Offsets) -> bool {
        self.target.is_some_and(|target| offsets.having(target) as u64 >= u64::from(self.needed))
    }
}

/// A confirmation that is no longer pending.
#[derive(Debug)]
pub enum Settled {
    /// Enough replicas have confirmed it.
    Confirmed(Confirmation),
    /// It timed out; this many replicas have confirmed it.
    Missed(Confirmation, usize),
}

/// All pending confirmations.
#[derive(Debug, Default)]
pub struct Confirmations {
    next_id: u64,
    by_id: BTreeMap<ConfirmationId, Confirmation>,
    /// By the number of replicas that they need. Of those that need as many, earlier ones are confirmed first.
    by_need: BTreeMap<u32, BTreeSet<ConfirmationId>>,
    by_end: BTreeSet<(Millis, ConfirmationId)>,
    asked_at: Millis,
    /// The replicas were asked in this event-loop iteration, so the question has not been sent yet.
    asked_just_now: bool,
}

impl Confirmations {
    /// Adds a confirmation.
    pub fn begin(&mut self, confirmation: Confirmation) -> ConfirmationId {
        let id = ConfirmationId(self.next_id);
        self.next_id = self.next_id.wrapping_add(1);
        self.by_need.entry(confirmation.needed).or_default().insert(id);
        self.by_end.insert((confirmation.until, id));
        self.by_id.insert(id, confirmation);
        id
    }

    /// What depends on a confirmation.
    pub fn get(&self, id: ConfirmationId) -> Option<&ConfirmedItem> {
        self.by_id.get(&id).map(|it| &it.what)
    }

    /// Removes a confirmation, because it is settled or its client is gone.
    pub fn remove(&mut self, id: ConfirmationId) -> Option<Confirmation> {
        let it = self.by_id.remove(&id)?;
        self.by_end.remove(&(it.until, id));
        if let Some(ids) = self.by_need.get_mut(&it.needed) {
            ids.remove(&id);
            if ids.is_empty() {
                self.by_need.remove(&it.needed);
            }
        }
        Some(it)
    }

    /// How many are pending.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether none is pending.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Records that the replicas are asked about everything written up to `written`.
    pub fn asked(&mut self, written: Offset, now: Millis) {
        self.asked_at = now;
        self.asked_just_now = true;
        for it in self.by_id.values_mut().rev().take_while(|it| it.target.is_none()) {
            it.target = Some(written);
        }
    }

    /// When to ask the replicas: at once (0) if something was written about which they were not asked.
    pub fn next_ask(&self, now: Millis) -> Option<Millis> {
        let (_, newest) = self.by_id.last_key_value()?;
        // (The clock may have been set back since.)
        Some(newest.target.map_or(0, |_| self.asked_at.min(now).saturating_add(ASK_AGAIN)))
    }

    /// Whether to check for answers at the end of this event-loop iteration.
    pub fn expects_news(&mut self, now: Millis) -> bool {
        let asked_before = !std::mem::take(&mut self.asked_just_now);
        asked_before && !self.is_empty() && now <= self.asked_at.saturating_add(PROMPT)
    }

    /// Whether any is confirmed.
    pub fn any_confirmed(&self, offsets: &Offsets) -> bool {
        self.confirmed(offsets).next().is_some()
    }

    /// The confirmed ones. Examines at most as many unconfirmed ones as there are replicas.
    fn confirmed<'a>(&'a self, offsets: &'a Offsets) -> impl Iterator<Item = ConfirmationId> + 'a {
        let replicas = u32::try_from(offsets.confirmed.len()).unwrap_or(u32::MAX);
        let is_confirmed = |id: &&ConfirmationId| self.by_id.get(*id).is_some_and(|it| it.is_confirmed(offsets));
        self.by_need.range(..=replicas).flat_map(move |(_, ids)| ids.iter().take_while(is_confirmed).copied())
    }

    /// Confirmations that are confirmed or have timed out, at most this many.
    pub fn settled(&self, offsets: &Offsets, now: Millis, most: usize) -> Vec<ConfirmationId> {
        let over = self.by_end.iter().take_while(|(until, _)| now >= *until).map(|(_, id)| *id);
        self.confirmed(offsets).chain(over).take(most).collect()
    }

    /// Removes a confirmation that [`Confirmations::settled`] returned.
    pub fn take(&mut self, id: ConfirmationId, offsets: &Offsets) -> Option<Settled> {
        let it = self.remove(id)?;
        if it.is_confirmed(offsets) {
            return Some(Settled::Confirmed(it));
        }
        let having = it.target.map_or(0, |target| offsets.having(target));
        Some(Settled::Missed(it, having))
    }
}
