//! What replicas have yet to confirm.

use super::owed::Ticket;
use super::{Answer, TieId, Undo};
use crate::lock::Millis;
use crate::server::clock::Now;
use crate::server::replicas::{Offset, Progress};
use std::collections::BTreeMap;

/// For so many ms after replicas were asked, every turn of the event loop is looked at for their answers, which takes
/// some ten microseconds. Who has not answered by then is waited for by the millisecond.
const PROMPT: Millis = 5;

/// Names a confirmation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmationId(u64);

/// A grant or renewal that counts only once enough replicas have it.
#[derive(Debug)]
pub struct Confirmation {
    /// What depends on it.
    pub what: What,
    /// The way back.
    pub undo: Undo,
    /// How many replicas it needs.
    pub needed: u32,
    /// Up to where they must have the stream. Known once the step that wrote it has been replicated: in the next turn.
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
    /// A watchdog's next renewal of this tie.
    Renewal(TieId),
}

impl Confirmation {
    fn is_confirmed(&self, progress: &Progress) -> bool {
        self.target.is_some_and(|target| progress.having(target) as u64 >= u64::from(self.needed))
    }
}

/// A confirmation that is no longer pending.
#[derive(Debug)]
pub enum Settled {
    /// Enough replicas have it.
    Confirmed(Confirmation),
    /// Its time is over, with so many replicas having it.
    Missed(Confirmation, usize),
}

/// All that are pending.
#[derive(Debug, Default)]
pub struct Confirmations {
    next_id: u64,
    by_id: BTreeMap<u64, Confirmation>,
    asked_at: Millis,
    /// Asked in this turn of the event loop: the question has not even been sent.
    asked_just_now: bool,
}

impl Confirmations {
    /// Notes one.
    pub fn begin(&mut self, confirmation: Confirmation) -> ConfirmationId {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        self.by_id.insert(id, confirmation);
        ConfirmationId(id)
    }

    /// Gives one up because nobody wants it any more; what has to be undone.
    pub fn abandon(&mut self, id: ConfirmationId) -> Option<Undo> {
        self.by_id.remove(&id.0).map(|it| it.undo)
    }

    /// How many are pending.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Replicas are being asked for all that was written up to `written`.
    pub fn asked(&mut self, written: Offset, now: Millis) {
        self.asked_at = now;
        self.asked_just_now = true;
        for it in self.by_id.values_mut().rev().take_while(|it| it.target.is_none()) {
            it.target = Some(written);
        }
    }

    /// Whether to look for answers at the end of this turn of the event loop.
    pub fn expects_news(&mut self, now: Millis) -> bool {
        let asked_before = !std::mem::take(&mut self.asked_just_now);
        asked_before && !self.is_empty() && now <= self.asked_at.saturating_add(PROMPT)
    }

    /// Whether some are confirmed.
    pub fn any_confirmed(&self, progress: &Progress) -> bool {
        self.by_id.values().any(|it| it.is_confirmed(progress))
    }

    /// Those that are confirmed, and those whose time is over, in order: at most so many.
    pub fn settled(&self, progress: &Progress, now: Millis, most: usize) -> Vec<ConfirmationId> {
        let settled = self.by_id.iter().filter(|(_, it)| it.is_confirmed(progress) || now >= it.until);
        settled.take(most).map(|(id, _)| ConfirmationId(*id)).collect()
    }

    /// Takes one out that [`Confirmations::settled`] named.
    pub fn take(&mut self, id: ConfirmationId, progress: &Progress) -> Option<Settled> {
        let it = self.by_id.remove(&id.0)?;
        if it.is_confirmed(progress) {
            return Some(Settled::Confirmed(it));
        }
        let having = it.target.map_or(0, |target| progress.having(target));
        Some(Settled::Missed(it, having))
    }

    /// Takes out any one: this server decides nothing any more.
    pub fn take_any(&mut self) -> Option<Confirmation> {
        self.by_id.pop_first().map(|(_, it)| it)
    }

    /// Something was taken back: what is pending and was built on it goes back to what was before it from now on.
    pub fn rebase(&mut self, undo: &Undo) {
        self.by_id.values_mut().for_each(|later| later.undo.rebase(undo));
    }
}
