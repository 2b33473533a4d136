//! The watchdog: renews bound holds, releases those whose connection has ended, and notifies sessions of lost holds.

use crate::keyspace::Lock;
use crate::lock::{Deadline, Hold};
use crate::server::clock::{Now, Slice};
use crate::server::cluster::Served;
use crate::server::{AsText, Ctx, Text, TextRef};
use crate::serving::served;
use crate::state::confirmations::ConfirmedItem;
use crate::state::{Binding, BindingId, Kind, LossReason, State};
use crate::stats::count;
use crate::{confirming, holds};

/// Renews the bound holds that are due, and verifies those whose lease has run out.
pub fn renew_due(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(id) = state.bindings.take_due(now.millis()) else { break };
        let Some(binding) = state.bindings.get(id).filter(|binding| state.bindings.is_live(binding)).cloned() else {
            continue;
        };
        let is_unread = state.is_unread(&binding);
        if !binding.flags.watchdog || binding.end().has_passed(now.millis()) {
            verify(state, ctx, id, LossReason::Changed, now);
        } else if is_unread {
            state.bindings.wait_for_reader(id);
        } else if binding.renewal().is_some() {
            verify(state, ctx, id, LossReason::Changed, now);
        } else {
            renew(state, ctx, id, &binding, now);
        }
    }
}

fn renew(state: &mut State, ctx: Ctx, id: BindingId, binding: &Binding, now: Now) {
    match served(ctx, &binding.key()) {
        Served::Here => {}
        // The watchdog tries again a third of the lease later, if the lease has not run out by then.
        Served::Nowhere => return,
        Served::Elsewhere(_) | Served::Leaving | Served::Arriving => {
            return verify(state, ctx, id, LossReason::Changed, now);
        }
    }
    let renewed = with_lock(ctx, binding, now, |lock, owner| {
        let own = held(lock, binding)?;
        let deadline = own.deadline.max(Deadline::after(now.millis(), binding.lease));
        lock.update(owner, &own, &Hold { deadline, ..own });
        state.bindings.deadline_moved(id, deadline, now.millis());
        state.bindings.renewed(id);
        Some(())
    });
    if renewed.flatten().is_none() {
        count(|it| &mut it.renewals_lost);
        return verify(state, ctx, id, LossReason::Changed, now);
    }
    count(|it| &mut it.watchdog_renewals);
    if binding.replicas > 0 {
        let renewal = confirming::begin(state, ConfirmedItem::Renewal(id), binding.replicas, now);
        state.bindings.asked(id, renewal);
    }
}

/// Reports bound holds whose lease has expired, and postpones renewals, while nothing may be written.
pub fn report_expired(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(id) = state.bindings.first_due(now.millis()) else { break };
        if state.bindings.get(id).is_none_or(|binding| binding.end().has_passed(now.millis())) {
            state.bindings.is_over(id);
            verify(state, ctx, id, LossReason::Changed, now);
        } else {
            state.bindings.postpone(id);
        }
    }
}

/// Verifies the bindings whose hold another client may have ended.
pub fn verify_marked(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some((id, why)) = state.bindings.next_unverified() else { break };
        verify(state, ctx, id, why, now);
    }
}

/// Checks that a bound hold still exists. If not, reports it as lost: for the given reason, unless its lease has run
/// out. If the lease that its replicas know has run out, the hold ends: one of them may have been promoted and have
/// granted the lock.
pub fn verify(state: &mut State, ctx: Ctx, id: BindingId, why: LossReason, now: Now) {
    // Without its connection, the hold is not bound any more: `release_ended` removes the binding once writes are possible.
    let Some(binding) = state.bindings.get(id).filter(|it| state.bindings.is_live(it)).cloned() else { return };
    let elsewhere = matches!(served(ctx, &binding.key()), Served::Elsewhere(_) | Served::Leaving);
    let still_held = |lock: &mut Lock, _: TextRef| Some((held(lock, &binding)?.holds, lock.limit(), lock.own_end()?));
    let seen = if elsewhere { None } else { with_lock(ctx, &binding, now, still_held).flatten() };
    if seen.is_none() && !elsewhere && binding.end().has_passed(now.millis()) && !holds::takes_writes(ctx) {
        // The key may still have the hold, hidden since it has expired: a clock step back would restore it.
        state.end_later(binding.clone());
    }
    if let Some((holds, limit, end)) = seen {
        let key = binding.key();
        state.bindings.counted((key.db, &key.name, &binding.owner), holds, limit);
        state.bindings.deadline_seen(id, end);
        let is_over = state.bindings.get(id).is_some_and(|binding| binding.end().has_passed(now.millis()));
        if !is_over {
            return;
        }
        // The hold ends as soon as something may be written, and before the module decides anything else by the lock.
        state.end_later(binding.clone());
        count(|it| &mut it.expired);
    }
    state.bindings.remove(id);
    if elsewhere {
        state.notify(&binding, Kind::Unbound(binding.token, LossReason::Moved));
    } else {
        holds::report_lost(state, &binding, why, now);
    }
}

/// Releases the ephemeral holds of connections that have ended.
pub fn release_ended(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(binding) = state.bindings.next_ended() else { break };
        if binding.flags.ephemeral {
            holds::release_bound(state, ctx, &binding, now);
        }
    }
}

/// Notifies sessions that this server, whose role has changed, no longer watches their holds.
pub fn unbind_retired(state: &mut State, slice: &Slice) {
    while !slice.is_over() {
        let Some(binding) = state.bindings.next_retired() else { break };
        binding.renewal().into_iter().for_each(|id| drop(state.confirmations.remove(id)));
        state.notify(&binding, Kind::Unbound(binding.token, LossReason::Replica));
    }
}

fn held(lock: &Lock, binding: &Binding) -> Option<Hold> {
    lock.own().filter(|own| own.token == Some(binding.token))
}

/// Runs `work` with the lock of a binding, as its owner sees it. Returns `None` if the key is not a lock.
fn with_lock<R>(ctx: Ctx, binding: &Binding, now: Now, work: impl FnOnce(&mut Lock, TextRef) -> R) -> Option<R> {
    ctx.in_db(binding.key().db, |ctx| {
        let (name, owner) = (Text::new(&binding.name), Text::new(&binding.owner));
        let mut lock = Lock::look(ctx, name.as_text(), owner.as_text(), now.millis()).ok()?;
        Some(work(&mut lock, owner.as_text()))
    })
}
