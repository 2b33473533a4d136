//! Grants and renewals that count only once enough replicas have them.
//!
//! The replies wait here. One request for acknowledgement in a turn of the event loop serves all that were written
//! before it; while anything is pending, the replicas' progress is read every millisecond. With nothing pending,
//! nothing runs.

use crate::config;
use crate::lock::{LockKey, Millis};
use crate::server::clock::Now;
use crate::server::replicas::{Offset, Progress, ask_for_confirmation};
use crate::server::timer::{self, Timer};
use crate::server::upcalls::Ticket;
use crate::server::{Ctx, MainThread};
use crate::stats::{count as tally, time};
use crate::ties;
use crate::undo::{Undo, take_back};
use crate::waiting::{self, Answer, Outcome};
use std::collections::BTreeMap;

/// For so many ms after replicas were asked, every turn of the event loop is looked at for their answers, which takes
/// some ten microseconds. Who has not answered by then is waited for by the millisecond.
const PROMPT: Millis = 5;

/// After so many ms without enough confirmations, replicas are asked again: one may just have come back.
const ASK_AGAIN: Millis = 100;

#[derive(Debug)]
struct Confirmation {
    what: What,
    undo: Undo,
    needed: u32,
    /// Known once the step that wrote it has been replicated: in the next turn.
    target: Option<Offset>,
    began: Now,
    until: Millis,
}

#[derive(Debug)]
enum What {
    /// A client waits for this reply.
    Reply(Ticket, Answer),
    /// A watchdog renewed this tie.
    Renewal(u64),
}

#[derive(Debug, Default)]
struct Confirmations {
    next_id: u64,
    by_id: BTreeMap<u64, Confirmation>,
    asked_at: Millis,
    /// Asked in this turn of the event loop: the question has not even been sent.
    asked_just_now: bool,
}

impl Confirmation {
    fn is_confirmed(&self, progress: &Progress) -> bool {
        self.target.is_some_and(|target| progress.having(target) as u64 >= u64::from(self.needed))
    }
}

static CONFIRMATIONS: MainThread<Confirmations> = MainThread::new();

/// Names a confirmation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmationId(u64);

/// Lets the reply to a blocked client wait for `needed` replicas.
pub fn begin_reply(ctx: Ctx, ticket: Ticket, answer: Answer, undo: Undo, needed: u32, now: Now) -> ConfirmationId {
    begin(ctx, What::Reply(ticket, answer), undo, needed, now, Millis::MAX)
}

/// Lets a watchdog's renewal wait for `needed` replicas: for no longer than the deadline they know of.
pub fn begin_renewal(ctx: Ctx, tie: u64, undo: Undo, needed: u32, now: Now) {
    let latest = undo.earlier_deadline().unwrap_or(Millis::MAX);
    begin(ctx, What::Renewal(tie), undo, needed, now, latest);
}

fn begin(ctx: Ctx, what: What, undo: Undo, needed: u32, now: Now, latest: Millis) -> ConfirmationId {
    let until = now.millis().saturating_add(config::REPLICAS_TIMEOUT.get()).min(latest);
    timer::wake(ctx, Timer::Ask, timer::NOW);
    timer::wake(ctx, Timer::Work, now.millis().saturating_add(1));
    CONFIRMATIONS.with(|all| {
        let id = all.next_id;
        all.next_id = id.wrapping_add(1);
        all.by_id.insert(id, Confirmation { what, undo, needed, target: None, began: now, until });
        ConfirmationId(id)
    })
}

/// Gives up a confirmation because its client has gone; what has to be undone.
pub fn abandon(id: ConfirmationId) -> Option<Undo> {
    CONFIRMATIONS.with(|all| all.by_id.remove(&id.0)).map(|it| it.undo)
}

/// Gives up all: this server decides nothing any more.
pub fn clear() {
    CONFIRMATIONS.with(|all| *all = Confirmations::default());
}

/// How many are pending.
pub fn count() -> u64 {
    CONFIRMATIONS.with(|all| all.by_id.len() as u64)
}

/// When to look next, at the latest.
pub fn next_due(now: Millis) -> Option<Millis> {
    CONFIRMATIONS.with(|all| (!all.by_id.is_empty()).then_some(now.saturating_add(1)))
}

/// Asks the replicas, and notes for what: must be alone in its step.
pub fn ask(ctx: Ctx, now: Now) {
    if CONFIRMATIONS.with(|all| all.by_id.is_empty()) {
        return;
    }
    let written = Progress::read(ctx).written;
    CONFIRMATIONS.with(|all| {
        all.asked_at = now.millis();
        all.asked_just_now = true;
        for it in all.by_id.values_mut().rev().take_while(|it| it.target.is_none()) {
            it.target = Some(written);
        }
    });
    ask_for_confirmation(ctx);
    tally(|it| &mut it.confirmation_requests);
    ask_later(ctx, ASK_AGAIN);
}

/// Asks in so many ms, if there is still something to ask about by then.
pub fn ask_later(ctx: Ctx, after: Millis) {
    if CONFIRMATIONS.with(|all| all.by_id.is_empty()) {
        timer::stop(ctx, Timer::Ask);
    } else {
        timer::wake(ctx, Timer::Ask, Now::read().millis().saturating_add(after));
    }
}

/// Looks, at the end of a turn of the event loop, whether what arrived in it settles something. Writes nothing.
pub fn has_news(ctx: Ctx) -> bool {
    let look = CONFIRMATIONS.with(|all| {
        let asked_before = !std::mem::take(&mut all.asked_just_now);
        asked_before && !all.by_id.is_empty() && Now::read().millis() <= all.asked_at.saturating_add(PROMPT)
    });
    if !look {
        return false;
    }
    let progress = Progress::read(ctx);
    CONFIRMATIONS.with(|all| all.by_id.values().any(|it| it.is_confirmed(&progress)))
}

/// Answers all that have been confirmed. Writes nothing.
pub fn confirm_all(ctx: Ctx) {
    let (now, progress) = (Now::read(), Progress::read(ctx));
    let confirmed: Vec<Confirmation> = CONFIRMATIONS.with(|all| {
        let ids: Vec<u64> = all.by_id.iter().filter(|(_, it)| it.is_confirmed(&progress)).map(|(id, _)| *id).collect();
        ids.into_iter().filter_map(|id| all.by_id.remove(&id)).collect()
    });
    for it in confirmed {
        confirm(ctx, it, now);
    }
    ask_later(ctx, ASK_AGAIN);
}

/// Answers all that have been confirmed, and takes back what was not in time; the locks that changed by that.
pub fn settle(ctx: Ctx, now: Now) -> Vec<LockKey> {
    if CONFIRMATIONS.with(|all| all.by_id.is_empty()) {
        return Vec::new();
    }
    let progress = Progress::read(ctx);
    let due = |it: &Confirmation| it.is_confirmed(&progress) || now.millis() >= it.until;
    let ids: Vec<u64> = CONFIRMATIONS.with(|all| {
        let due = all.by_id.iter().filter(|(_, it)| due(it));
        due.map(|(id, _)| *id).collect()
    });
    let mut changed = Vec::new();
    for id in ids {
        let Some(it) = CONFIRMATIONS.with(|all| all.by_id.remove(&id)) else { continue };
        if it.is_confirmed(&progress) {
            confirm(ctx, it, now);
        } else {
            let having = it.target.map_or(0, |target| progress.having(target));
            changed.extend(refuse(ctx, it, having, now));
        }
    }
    ask_later(ctx, ASK_AGAIN);
    changed
}

fn confirm(ctx: Ctx, it: Confirmation, now: Now) {
    tally(|it| &mut it.confirmed);
    time(|stats| &mut stats.confirmations, now.micros.saturating_sub(it.began.micros));
    match it.what {
        What::Reply(ticket, answer) => waiting::end(ctx, ticket, Outcome::Granted(answer, it.undo), now),
        What::Renewal(tie) => ties::renewal_settled(tie),
    }
}

fn refuse(ctx: Ctx, it: Confirmation, having: usize, now: Now) -> Vec<LockKey> {
    tally(|it| &mut it.taken_back);
    match it.what {
        What::Reply(ticket, _) => {
            let time = it.until.saturating_sub(it.began.millis());
            let message = format!("NOREPLICAS {having} of {} replicas confirmed within {time} ms", it.needed);
            waiting::end(ctx, ticket, Outcome::Refused(message), now);
        }
        What::Renewal(tie) => ties::renewal_settled(tie),
    }
    undo(ctx, &it.undo, now)
}

/// Takes something back, and what is still pending is from then on to go back to what was before it. Returns the locks
/// that changed.
pub fn undo(ctx: Ctx, undo: &Undo, now: Now) -> Vec<LockKey> {
    let changed = take_back(ctx, undo, now);
    CONFIRMATIONS.with(|all| all.by_id.values_mut().for_each(|later| later.undo.rebase(undo)));
    changed
}
