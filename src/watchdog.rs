//! What ties do: renewals, releases when a connection ends, and telling sessions what they have lost.

use crate::books::confirmations::What;
use crate::books::ties::Renewal;
use crate::books::{self, Tie, TieId, Why};
use crate::keyspace::Lock;
use crate::lock::serve::Change;
use crate::lock::{Deadline, Hold, Millis};
use crate::server::clock::{Now, Slice};
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text, TextRef};
use crate::serving::serves;
use crate::stats::count;
use crate::{confirming, holding, undo};

/// Renews what is due, and notes leases that have run out.
pub fn renew_due(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let due = books::with(|books| {
            let id = books.ties.take_due(now.millis())?;
            let tie = books.ties.get(id).filter(|tie| books.ties.is_live(tie));
            Some((id, tie.cloned()))
        });
        let Some((id, tie)) = due else { break };
        match tie {
            Some(tie) if tie.tying.watchdog && tie.renewal == Renewal::Settled => renew(ctx, id, &tie, now),
            Some(_) => verify(ctx, id, Why::Changed, now),
            None => {}
        }
    }
}

fn renew(ctx: Ctx, id: TieId, tie: &Tie, now: Now) {
    let renewed = with_lock(ctx, tie, now, |lock, owner| {
        let own = held(lock, tie)?;
        let deadline = own.deadline.max(Deadline::after(now.millis(), tie.lease));
        let undo = (tie.replicas > 0).then(|| {
            let undo = undo::before_renewal(std::slice::from_ref(lock), (owner, tie.client), deadline);
            undo.under(tie.token).without_promise()
        });
        lock.update(owner, &own, &Hold { deadline, ..own });
        books::with(|books| books.ties.deadline_moved(id, deadline, now.millis()));
        Some(undo)
    });
    let Some(undo) = renewed.flatten() else {
        count(|it| &mut it.renewals_lost);
        return verify(ctx, id, Why::Changed, now);
    };
    count(|it| &mut it.watchdog_renewals);
    if let Some(undo) = undo {
        books::with(|books| books.ties.set_renewal(id, Renewal::Confirming));
        // Never beyond the deadline that the replicas know.
        let latest = undo.earlier_deadline().unwrap_or(Millis::MAX);
        confirming::begin(ctx, What::Renewal(id), undo, tie.replicas, latest, now);
    }
}

/// Verifies the ties whose hold somebody else may have ended.
pub fn verify_doubtful(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some((id, why)) = books::with(|books| books.ties.next_doubtful()) else { break };
        verify(ctx, id, why, now);
    }
}

/// Checks that a tied hold is still there. If not, it is lost, for the given reason unless its lease has run out.
pub fn verify(ctx: Ctx, id: TieId, why: Why, now: Now) {
    let Some(tie) = books::with(|books| books.ties.get(id).cloned()) else { return };
    let elsewhere = !serves(ctx, &tie.key());
    let own = if elsewhere { None } else { with_lock(ctx, &tie, now, |lock, _| held(lock, &tie)).flatten() };
    if let Some(own) = own {
        books::with(|books| books.ties.deadline_seen(id, own.deadline));
        return holding::wake_for_ties(ctx);
    }
    books::with(|books| {
        books.ties.remove(id);
        if elsewhere {
            books.untied(&tie, Why::Moved);
        } else {
            holding::tell_lost(books, &tie, why, now);
        }
    });
    timer::wake_for_replies(ctx);
}

/// Releases the ephemeral holds of connections that have ended.
pub fn release_ended(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(tie) = books::with(|books| books.ties.next_ended()) else { break };
        if !tie.tying.ephemeral {
            continue;
        }
        let released = with_lock(ctx, &tie, now, |lock, owner| {
            let is_held = held(lock, &tie).is_some();
            if is_held {
                holding::end_hold(lock, owner);
            }
            is_held
        });
        if released == Some(true) {
            count(|it| &mut it.released_by_disconnect);
            books::with(|books| books.agenda.note(tie.key(), Change::Freed));
        }
    }
}

/// Tells sessions that this server, whose role has changed, no longer watches their holds.
pub fn untie_retired(ctx: Ctx, slice: &Slice) {
    let mut any = false;
    while !slice.is_over() {
        let Some(tie) = books::with(|books| books.ties.next_retired()) else { break };
        books::with(|books| books.untied(&tie, Why::Replica));
        any = true;
    }
    if any {
        timer::wake_for_replies(ctx);
    }
    if books::with(|books| books.ties.has_retired()) {
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
}

fn held(lock: &Lock, tie: &Tie) -> Option<Hold> {
    lock.own().filter(|own| own.token == Some(tie.token))
}

/// Reads the lock of a tie as its owner sees it; `None` if it is not a lock.
fn with_lock<R>(ctx: Ctx, tie: &Tie, now: Now, work: impl FnOnce(&mut Lock, TextRef) -> R) -> Option<R> {
    ctx.in_db(tie.key().db, |ctx| {
        let (name, owner) = (Text::new(&tie.name), Text::new(&tie.owner));
        let mut lock = Lock::look(ctx, name.as_text(), owner.as_text(), now.millis()).ok()?;
        Some(work(&mut lock, owner.as_text()))
    })
}
