//! What ties do: renewals, releases when a connection ends, and telling sessions what they have lost.

use crate::keyspace::Lock;
use crate::lock::{Deadline, Hold};
use crate::server::clock::{Now, Slice};
use crate::server::cluster::Served;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text, TextRef};
use crate::serving::served;
use crate::state::confirmations::What;
use crate::state::{self, Tie, TieId, Why};
use crate::stats::count;
use crate::{confirming, holding};

/// Renews what is due, and notes leases that have run out.
pub fn renew_due(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let due = state::with(|state| {
            let id = state.ties.take_due(now.millis())?;
            let tie = state.ties.get(id).filter(|tie| state.ties.is_live(tie));
            let may_be_renewed = tie.is_some_and(|tie| !state.is_unread(tie));
            Some((id, tie.cloned(), may_be_renewed))
        });
        let Some((id, tie, may_be_renewed)) = due else { break };
        match tie {
            Some(tie) if tie.tying.watchdog && !may_be_renewed && !tie.end().has_passed(now.millis()) => {
                state::with(|state| state.ties.wait_for_reader(id));
            }
            Some(tie)
                if tie.tying.watchdog
                    && may_be_renewed
                    && !tie.is_being_confirmed()
                    && !tie.end().has_passed(now.millis()) =>
            {
                renew(ctx, id, &tie, now);
            }
            Some(_) => verify(ctx, id, Why::Changed, now),
            None => {}
        }
    }
}

fn renew(ctx: Ctx, id: TieId, tie: &Tie, now: Now) {
    match served(ctx, &tie.key()) {
        Served::Here => {}
        // Another third of the lease later it is tried again, if the lease has not run out by then.
        Served::Nowhere => return,
        Served::Elsewhere(_) | Served::Leaving | Served::Arriving => return verify(ctx, id, Why::Changed, now),
    }
    let renewed = with_lock(ctx, tie, now, |lock, owner| {
        let own = held(lock, tie)?;
        let deadline = own.deadline.max(Deadline::after(now.millis(), tie.lease));
        lock.update(owner, &own, &Hold { deadline, ..own });
        state::with(|state| {
            state.ties.deadline_moved(id, deadline, now.millis());
            state.ties.renewed(id);
        });
        Some(())
    });
    if renewed.flatten().is_none() {
        count(|it| &mut it.renewals_lost);
        return verify(ctx, id, Why::Changed, now);
    }
    count(|it| &mut it.watchdog_renewals);
    if tie.replicas > 0 {
        let renewal = confirming::begin(ctx, What::Renewal(id), tie.replicas, now);
        state::with(|state| state.ties.asked(id, renewal));
    }
}

/// Where nothing may be written: tells of holds whose lease has run out, and leaves the renewals for later.
pub fn tell_over(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let due = state::with(|state| {
            let id = state.ties.first_due(now.millis())?;
            let is_over = state.ties.get(id).is_none_or(|tie| tie.end().has_passed(now.millis()));
            if is_over {
                state.ties.is_over(id)
            } else {
                state.ties.put_off(id)
            }
            Some((id, is_over))
        });
        match due {
            Some((id, true)) => verify(ctx, id, Why::Changed, now),
            Some((_, false)) => {}
            None => break,
        }
    }
}

/// Verifies the ties whose hold somebody else may have ended.
pub fn verify_doubtful(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some((id, why)) = state::with(|state| state.ties.next_doubtful()) else { break };
        verify(ctx, id, why, now);
    }
}

/// Checks that a tied hold is still there. If not, it is lost, for the given reason unless its lease has run out. If the
/// lease that its replicas know has run out, it is ended: one of them may have taken over and granted the lock.
pub fn verify(ctx: Ctx, id: TieId, why: Why, now: Now) {
    let Some(tie) = state::with(|state| state.ties.get(id).cloned()) else { return };
    let elsewhere = matches!(served(ctx, &tie.key()), Served::Elsewhere(_) | Served::Leaving);
    let still_held = |lock: &mut Lock, _: TextRef| Some((held(lock, &tie)?.holds, lock.limit(), lock.own_end()?));
    let seen = if elsewhere { None } else { with_lock(ctx, &tie, now, still_held).flatten() };
    if let Some((holds, limit, end)) = seen {
        let is_over = state::with(|state| {
            let key = tie.key();
            state.ties.counted((key.db, &key.name, &tie.owner), holds, limit);
            state.ties.deadline_seen(id, end);
            state.ties.get(id).is_some_and(|tie| tie.end().has_passed(now.millis()))
        });
        if !is_over {
            return holding::wake_for_ties(ctx);
        }
        // As soon as something may be written, and before anything else is judged by the lock.
        state::with(|state| state.end_later(tie.clone()));
        count(|it| &mut it.expired);
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
    state::with(|state| {
        state.ties.remove(id);
        if elsewhere {
            state.unbound(&tie, Why::Moved);
        } else {
            holding::tell_lost(state, &tie, why, now);
        }
    });
    timer::wake_for_replies(ctx);
}

/// Releases the ephemeral holds of connections that have ended.
pub fn release_ended(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(tie) = state::with(|state| state.ties.next_ended()) else { break };
        if tie.tying.ephemeral {
            holding::release_tied(ctx, &tie, now);
        }
    }
}

/// Tells sessions that this server, whose role has changed, no longer watches their holds.
pub fn untie_retired(ctx: Ctx, slice: &Slice) {
    let mut any = false;
    while !slice.is_over() {
        let Some(tie) = state::with(|state| state.ties.next_retired()) else { break };
        state::with(|state| state.unbound(&tie, Why::Replica));
        any = true;
    }
    if any {
        timer::wake_for_replies(ctx);
    }
    if state::with(|state| state.ties.has_retired()) {
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
