//! Grants and renewals that count only once enough replicas have them.
//!
//! The replies wait in a table. One request for acknowledgement per event-loop iteration covers everything written
//! before it. While anything is pending, the module reads the replicas' progress: at the end of each iteration at
//! first, then every millisecond. Otherwise nothing runs.
//!
//! Settling writes nothing to the keyspace: unconfirmed grants are marked, and revoked when the server takes writes.

use crate::config;
use crate::holds::{self, Grantee};
use crate::keyspace::{Lock, Name};
use crate::lock::Waiter;
use crate::replies::end_request;
use crate::server::clock::{Now, Slice};
use crate::server::replicas::{Offsets, request_acks};
use crate::server::{AsText, Ctx, Text};
use crate::state::bindings::Confirms;
use crate::state::confirmations::{Confirmation, ConfirmationId, ConfirmedItem, Settled};
use crate::state::{Answer, Basis, GrantId, Outcome, Requester, Stage, State, Terms};
use crate::stats::{count, time};

/// The most confirmations that are taken from the table at a time.
const BATCH: usize = 64;

/// Withholds an answer, or the effect of a watchdog's renewal, until `needed` replicas have confirmed it, or until
/// `holdfast.replicas-timeout` is over.
pub fn begin(state: &mut State, what: ConfirmedItem, needed: u32, now: Now) -> ConfirmationId {
    let until = now.millis().saturating_add(config::REPLICAS_TIMEOUT.get());
    state.confirmations.begin(Confirmation { what, needed, target: None, began: now, until })
}

/// Withholds the answer to a request until enough replicas have confirmed the grant or renewal.
pub fn begin_reply(state: &mut State, request: Box<Waiter<Requester>>, (answer, grant): (Answer, GrantId), now: Now) {
    let (ticket, replicas) = (request.requester.ticket, request.requester.replicas);
    let id = begin(state, ConfirmedItem::Reply { request, answer, grant }, replicas, now);
    state.pending.set(ticket, Stage::Confirming(id));
}

/// Asks the replicas for acknowledgement, and notes what it covers. Must run in a call of its own: together with other
/// writes, it would be replicated inside `MULTI`, where replicas do not answer.
pub fn ask_replicas(state: &mut State, ctx: Ctx, now: Now) {
    if state.confirmations.is_empty() {
        return;
    }
    state.confirmations.asked(Offsets::read(ctx).written, now.millis());
    request_acks(ctx);
    count(|it| &mut it.confirmation_requests);
}

/// Whether acknowledgements that arrived in this event-loop iteration settle a confirmation.
pub fn has_news(state: &mut State, ctx: Ctx) -> bool {
    let expects_news = !state.confirmations.is_empty() && state.confirmations.expects_news(Now::read().millis());
    expects_news && state.confirmations.any_confirmed(&Offsets::read(ctx))
}

/// Settles the grants and renewals that replicas confirmed, and those that they did not confirm in time.
pub fn settle(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    // Requests that a change of role left undecided are refused first, whatever replicas have confirmed.
    if state.confirmations.is_empty() || !state.undecided.is_empty() {
        return;
    }
    let offsets = Offsets::read(ctx);
    while !slice.is_over() {
        let ids = state.confirmations.settled(&offsets, now.millis(), BATCH);
        if ids.is_empty() {
            break;
        }
        for id in ids {
            if slice.is_over() {
                break; // The locks may have to be read first, which is slow if other clients have written them.
            }
            match state.confirmations.take(id, &offsets) {
                Some(Settled::Confirmed(it)) => confirmed(state, ctx, id, it, now),
                Some(Settled::Missed(it, having)) => missed(state, id, it, having, now),
                None => {}
            }
        }
    }
}

fn confirmed(state: &mut State, ctx: Ctx, id: ConfirmationId, it: Confirmation, now: Now) {
    count(|it| &mut it.confirmed);
    time(|stats| &mut stats.confirmations, now.micros.saturating_sub(it.began.micros));
    match it.what {
        ConfirmedItem::Reply { request, answer, grant } => {
            let terms = request.terms();
            match bind_all(state, ctx, grant, &terms, now) {
                Holds::There => {
                    state.confirmed(grant);
                    end_request(state, request, Outcome::Granted(answer, grant), now);
                    if terms.flags.contention {
                        notify_if_contended(state, grant);
                    }
                }
                Holds::Gone => {
                    let message = "UNCONFIRMED the lock was lost before its replicas had confirmed it".into();
                    refuse(state, request, grant, message, now);
                }
            }
        }
        ConfirmedItem::Renewal(binding) => state.bindings.answered(binding, id, Confirms::Yes),
    }
}

/// Notifies the session that was granted this, if a request now waits for one of its locks.
fn notify_if_contended(state: &mut State, id: GrantId) {
    let granted = state.undelivered.get(id).map(|grant| (grant.home.get(), grant.holds.clone()));
    if let Some((db, holds)) = granted {
        holds::notify_if_contended(state, db, holds.iter().map(|hold| &*hold.name));
    }
}

/// Answers that too few replicas have confirmed in time.
fn missed(state: &mut State, id: ConfirmationId, it: Confirmation, having: usize, now: Now) {
    match it.what {
        ConfirmedItem::Reply { request, grant, .. } => {
            let time = it.until.saturating_sub(it.began.millis());
            let message = format!("UNCONFIRMED {having} of {} replicas confirmed within {time} ms", it.needed);
            refuse(state, request, grant, message, now);
        }
        ConfirmedItem::Renewal(binding) => state.bindings.answered(binding, id, Confirms::No),
    }
}

fn refuse(state: &mut State, request: Box<Waiter<Requester>>, grant: GrantId, message: String, now: Now) {
    count(|it| &mut it.revoked);
    state.revoke(grant);
    end_request(state, request, Outcome::Refused(message), now);
}

/// Whether the confirmed holds still exist.
enum Holds {
    There,
    Gone,
}

/// Binds all holds of a confirmed grant, if the holds and their connection still exist.
fn bind_all(state: &mut State, ctx: Ctx, id: GrantId, terms: &Terms, now: Now) -> Holds {
    let Some(grant) = state.undelivered.get(id).filter(|grant| state.is_awaited(grant)) else { return Holds::Gone };
    let binds = grant.basis != Basis::Renewal || holds::renewal_binds(grant.on_behalf, terms);
    let (owner, client, on_behalf, holds) = (grant.owner.clone(), grant.client, grant.on_behalf, grant.holds.clone());
    ctx.in_db(grant.home.get(), |ctx| {
        let text = Text::new(&owner);
        let owner = Name::with_copy(text.as_text(), &owner);
        let grantee = Grantee { owner: &owner, client, on_behalf, terms };
        let names: Vec<Text> = holds.iter().map(|hold| Text::new(&hold.name)).collect();
        let look = |name, token| {
            let lock = Lock::look(ctx, name, owner.text(), now.millis()).ok()?;
            let is_held = lock.held().is_some_and(|held| held.token == Some(token));
            // (Its session may have been notified that it is over, while it could not be ended.)
            let hold = (lock.db(), lock.name().bytes(), owner.bytes());
            let is_over = state.undelivered.is_over(hold, token);
            (is_held && !is_over).then_some(lock)
        };
        let of_both = names.iter().zip(&holds);
        let locks = of_both.map(|(name, hold)| look(Name::with_copy(name.as_text(), &hold.name), hold.token));
        let Some(locks) = locks.collect::<Option<Vec<Lock>>>() else { return Holds::Gone };
        for (lock, hold) in locks.iter().zip(&holds).filter(|_| binds) {
            // If the hold was not bound meanwhile, another client may have given the key an earlier expiry unnoticed. (If it
            // was, its key may have yet to follow a step of the clock.)
            let lags = state.bindings.lags_of(lock.db(), lock.name().bytes(), grantee.owner.bytes());
            let end = lock.own_end().filter(|_| !lags);
            let deadline = end.map_or(hold.deadline, |end| end.min(hold.deadline));
            let was_bound = holds::binding_of(state, lock, grantee.owner).is_some();
            holds::bind(state, lock, (deadline, hold.token), grantee, now);
            let binding = holds::binding_of(state, lock, grantee.owner).filter(|_| !was_bound);
            state.undelivered.set_binding(id, lock.name().bytes(), binding);
        }
        Holds::There
    })
}
