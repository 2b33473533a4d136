//! Grants and renewals that count only once enough replicas have them.
//!
//! The replies wait in a table. One request for acknowledgement per turn of the event loop covers everything written
//! before it. While anything is pending, the replicas' progress is read at the end of each turn at first, then every
//! millisecond; otherwise nothing runs.
//!
//! Settling writes nothing to the keyspace: what was not confirmed is noted, and revoked when the server takes writes.

use crate::config;
use crate::holds::{self, Grantee};
use crate::keyspace::{Lock, Name};
use crate::lock::Waiter;
use crate::replies::end_request;
use crate::server::clock::{Now, Slice};
use crate::server::replicas::{Offsets, request_acks};
use crate::server::{AsText, Ctx, Text};
use crate::state::bindings::Confirms;
use crate::state::confirmations::{Confirmation, ConfirmationId, Settled, What};
use crate::state::{Answer, Asker, Basis, GrantId, Outcome, Stage, State, Terms};
use crate::stats::{count, time};

/// How many are settled at a time.
const AT_ONCE: usize = 64;

/// Withholds an answer, or a promise of the watchdog, until `needed` replicas have confirmed, for as long as the
/// settings allow.
pub fn begin(state: &mut State, what: What, needed: u32, now: Now) -> ConfirmationId {
    let until = now.millis().saturating_add(config::REPLICAS_TIMEOUT.get());
    state.confirmations.begin(Confirmation { what, needed, target: None, began: now, until })
}

/// Withholds the answer to a request for a grant or renewal in this way.
pub fn begin_reply(state: &mut State, request: Box<Waiter<Asker>>, (answer, grant): (Answer, GrantId), now: Now) {
    let (ticket, replicas) = (request.asker.ticket, request.asker.replicas);
    let id = begin(state, What::Reply { request, answer, grant }, replicas, now);
    state.pending.set(ticket, Stage::Confirming(id));
}

/// Asks the replicas, and notes what it asks about. Must be alone in its step.
pub fn ask_replicas(state: &mut State, ctx: Ctx, now: Now) {
    if state.confirmations.is_empty() {
        return;
    }
    state.confirmations.asked(Offsets::read(ctx).written, now.millis());
    request_acks(ctx);
    count(|it| &mut it.confirmation_requests);
}

/// At the end of a turn of the event loop, checks whether anything that arrived in it settles a confirmation.
pub fn has_news(state: &mut State, ctx: Ctx) -> bool {
    let expects_news = !state.confirmations.is_empty() && state.confirmations.expects_news(Now::read().millis());
    expects_news && state.confirmations.any_confirmed(&Offsets::read(ctx))
}

/// Settles what was confirmed, and what was not confirmed in time.
pub fn settle(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    // What a change of role left undecided is refused first, whatever the replicas have.
    if state.confirmations.is_empty() || !state.undecided.is_empty() {
        return;
    }
    let offsets = Offsets::read(ctx);
    while !slice.is_over() {
        let ids = state.confirmations.settled(&offsets, now.millis(), AT_ONCE);
        if ids.is_empty() {
            break;
        }
        for id in ids {
            if slice.is_over() {
                break; // The locks may have to be read first, which is slow if others have written them.
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
        What::Reply { request, answer, grant } => {
            let terms = request.terms();
            match bind_all(state, ctx, grant, &terms, now) {
                Holds::There => {
                    state.confirmed(grant);
                    end_request(state, request, Outcome::Granted(answer, grant), now);
                    if terms.flags.contention {
                        tell_if_contended(state, grant);
                    }
                }
                Holds::Gone => {
                    let message = "UNCONFIRMED the lock was lost before its replicas had confirmed it".into();
                    refuse(state, request, grant, message, now);
                }
            }
        }
        What::Renewal(binding) => state.bindings.answered(binding, id, Confirms::Yes),
    }
}

/// Notifies a session, which has been granted this, if a request waits for any of it by now.
fn tell_if_contended(state: &mut State, id: GrantId) {
    let granted = state.undelivered.get(id).map(|grant| (grant.home.get(), grant.holds.clone()));
    if let Some((db, holds)) = granted {
        holds::tell_if_contended(state, db, holds.iter().map(|hold| &*hold.name));
    }
}

/// Answers that too few replicas have confirmed.
fn missed(state: &mut State, id: ConfirmationId, it: Confirmation, having: usize, now: Now) {
    match it.what {
        What::Reply { request, grant, .. } => {
            let time = it.until.saturating_sub(it.began.millis());
            let message = format!("UNCONFIRMED {having} of {} replicas confirmed within {time} ms", it.needed);
            refuse(state, request, grant, message, now);
        }
        What::Renewal(binding) => state.bindings.answered(binding, id, Confirms::No),
    }
}

fn refuse(state: &mut State, request: Box<Waiter<Asker>>, grant: GrantId, message: String, now: Now) {
    count(|it| &mut it.revoked);
    state.revoke(grant);
    end_request(state, request, Outcome::Refused(message), now);
}

/// Whether what was confirmed is still there.
enum Holds {
    There,
    Gone,
}

/// Binds all holds of a grant whose answer is success, if they are still there, and the connection, too.
fn bind_all(state: &mut State, ctx: Ctx, id: GrantId, terms: &Terms, now: Now) -> Holds {
    let Some(grant) = state.undelivered.get(id).filter(|grant| state.is_awaited(grant)) else { return Holds::Gone };
    let binds = grant.basis != Basis::Renewal || holds::renewal_binds(grant.on_behalf, terms);
    let (owner, client, on_behalf, holds) = (grant.owner.clone(), grant.client, grant.on_behalf, grant.holds.clone());
    ctx.in_db(grant.home.get(), |ctx| {
        let text = Text::new(&owner);
        let owner = Name::kept_as(text.as_text(), &owner);
        let grantee = Grantee { owner: &owner, client, on_behalf, terms };
        let names: Vec<Text> = holds.iter().map(|hold| Text::new(&hold.name)).collect();
        let look = |name, token| {
            let lock = Lock::look(ctx, name, owner.text(), now.millis()).ok()?;
            lock.held().is_some_and(|held| held.token == Some(token)).then_some(lock)
        };
        let of_both = names.iter().zip(&holds);
        let locks = of_both.map(|(name, hold)| look(Name::kept_as(name.as_text(), &hold.name), hold.token));
        let Some(locks) = locks.collect::<Option<Vec<Lock>>>() else { return Holds::Gone };
        for (lock, hold) in locks.iter().zip(&holds).filter(|_| binds) {
            // It was not bound meanwhile: another client may have given the key an earlier end.
            let deadline = lock.own_end().map_or(hold.deadline, |end| end.min(hold.deadline));
            let was_bound = holds::binding_of(state, lock, grantee.owner).is_some();
            holds::bind(state, lock, (deadline, hold.token), grantee, now);
            let binding = holds::binding_of(state, lock, grantee.owner).filter(|_| !was_bound);
            state.undelivered.set_binding(id, lock.name().bytes(), binding);
        }
        Holds::There
    })
}
