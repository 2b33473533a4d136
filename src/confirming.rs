//! Grants and renewals that count only once enough replicas have them.
//!
//! The replies wait in a table. One request for acknowledgement per turn of the event loop covers everything written
//! before it. While anything is pending, the replicas' progress is read at the end of each turn at first, then every
//! millisecond; otherwise nothing runs.
//!
//! Settling writes nothing to the keyspace: what was not confirmed is noted, and revoked when the server takes writes.

use crate::answering::end_request;
use crate::config;
use crate::holding::{self, Grantee};
use crate::keyspace::{Lock, Name};
use crate::lock::Millis;
use crate::server::clock::{Now, Slice};
use crate::server::replicas::{Offsets, request_acks};
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text};
use crate::state::confirmations::{Confirmation, ConfirmationId, Settled, What};
use crate::state::owed::Ticket;
use crate::state::ties::Confirms;
use crate::state::{self, Basis, GrantId, Outcome, Terms};
use crate::stats::{count, time};

/// After this many ms without enough confirmations, the replicas are asked again: one may just have reconnected.
const ASK_AGAIN: Millis = 100;

/// How many are settled at a time.
const AT_ONCE: usize = 64;

/// Withholds an answer, or a promise of the watchdog, until `needed` replicas have confirmed, for as long as the
/// settings allow.
pub fn begin(ctx: Ctx, what: What, needed: u32, now: Now) -> ConfirmationId {
    let until = now.millis().saturating_add(config::REPLICAS_TIMEOUT.get());
    timer::wake(ctx, Timer::Ask, timer::THIS_TURN);
    timer::wake(ctx, Timer::Work, now.millis().saturating_add(1));
    let confirmation = Confirmation { what, needed, target: None, began: now, until };
    state::with(|state| state.confirmations.begin(confirmation))
}

/// Asks the replicas, and notes what it asks about. Must be alone in its step.
pub fn ask_replicas(ctx: Ctx, now: Now) {
    if state::with(|state| state.confirmations.is_empty()) {
        return;
    }
    let written = Offsets::read(ctx).written;
    state::with(|state| state.confirmations.asked(written, now.millis()));
    request_acks(ctx);
    count(|it| &mut it.confirmation_requests);
    ask_later(ctx, ASK_AGAIN);
}

/// Asks after this many ms, if there is still something to ask about by then.
pub fn ask_later(ctx: Ctx, after: Millis) {
    if state::with(|state| state.confirmations.is_empty()) {
        timer::stop(ctx, Timer::Ask);
    } else {
        timer::wake(ctx, Timer::Ask, Now::read().millis().saturating_add(after));
    }
}

/// At the end of a turn of the event loop, checks whether anything that arrived in it settles a confirmation.
pub fn has_news(ctx: Ctx) -> bool {
    if !state::with(|state| state.confirmations.expects_news(Now::read().millis())) {
        return false;
    }
    let offsets = Offsets::read(ctx);
    state::with(|state| state.confirmations.any_confirmed(&offsets))
}

/// Settles what was confirmed, and what was not confirmed in time.
pub fn settle(ctx: Ctx, now: Now, slice: &Slice) {
    if state::with(|state| state.confirmations.is_empty()) {
        return;
    }
    let offsets = Offsets::read(ctx);
    while !slice.is_over() {
        let ids = state::with(|state| state.confirmations.settled(&offsets, now.millis(), AT_ONCE));
        if ids.is_empty() {
            break;
        }
        for id in ids {
            if slice.is_over() {
                break; // The locks may have to be read first, which is slow if others have written them.
            }
            match state::with(|state| state.confirmations.take(id, &offsets)) {
                Some(Settled::Confirmed(it)) => confirmed(ctx, id, it, now),
                Some(Settled::Missed(it, having)) => missed(ctx, id, it, having, now),
                None => {}
            }
        }
    }
    ask_later(ctx, ASK_AGAIN);
}

fn confirmed(ctx: Ctx, id: ConfirmationId, it: Confirmation, now: Now) {
    count(|it| &mut it.confirmed);
    time(|stats| &mut stats.confirmations, now.micros.saturating_sub(it.began.micros));
    match it.what {
        What::Reply { ticket, answer, grant, terms } => match bind_all(ctx, grant, &terms, now) {
            Holds::There => {
                state::with(|state| state.confirmed(grant));
                end_request(ctx, ticket, Outcome::Granted(answer, grant), now);
                if terms.tying.contention {
                    tell_if_contended(ctx, grant);
                }
            }
            Holds::Gone => {
                let message = "UNCONFIRMED the lock was lost before its replicas had confirmed it".into();
                refuse(ctx, ticket, grant, message, now);
            }
        },
        What::Renewal(tie) => state::with(|state| state.ties.answered(tie, id, Confirms::Yes)),
    }
}

/// Tells a session, which has been granted this, if somebody waits for any of it by now.
fn tell_if_contended(ctx: Ctx, id: GrantId) {
    let granted = state::with(|state| state.undelivered.get(id).map(|grant| (grant.home.get(), grant.holds.clone())));
    if let Some((db, holds)) = granted {
        holding::tell_if_contended(ctx, db, holds.iter().map(|hold| &*hold.name));
    }
}

/// Tells that too few replicas have confirmed.
fn missed(ctx: Ctx, id: ConfirmationId, it: Confirmation, having: usize, now: Now) {
    match it.what {
        What::Reply { ticket, grant, .. } => {
            let time = it.until.saturating_sub(it.began.millis());
            let message = format!("UNCONFIRMED {having} of {} replicas confirmed within {time} ms", it.needed);
            refuse(ctx, ticket, grant, message, now);
        }
        What::Renewal(tie) => state::with(|state| state.ties.answered(tie, id, Confirms::No)),
    }
}

fn refuse(ctx: Ctx, ticket: Ticket, grant: GrantId, message: String, now: Now) {
    count(|it| &mut it.revoked);
    state::with(|state| state.revoke(grant));
    end_request(ctx, ticket, Outcome::Refused(message), now);
    timer::wake(ctx, Timer::Work, timer::THIS_TURN);
}

/// Whether what was confirmed is still there.
enum Holds {
    There,
    Gone,
}

/// Ties all holds of a grant whose answer is success, if they are still there, and somebody to tie them to.
fn bind_all(ctx: Ctx, id: GrantId, terms: &Terms, now: Now) -> Holds {
    let parts = state::with(|state| {
        let grant = state.undelivered.get(id).filter(|grant| state.is_awaited(grant))?;
        let whose = (grant.owner.clone(), grant.client, grant.on_behalf);
        let binds = grant.basis != Basis::Renewal || holding::renewal_binds(grant.on_behalf, terms);
        Some((grant.home.get(), grant.holds.clone(), whose, binds))
    });
    let Some((db, holds, (owner, client, on_behalf), binds)) = parts else { return Holds::Gone };
    ctx.in_db(db, |ctx| {
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
            // Nobody watched it meanwhile: somebody else may have given the key an earlier end.
            let deadline = lock.own_end().map_or(hold.deadline, |end| end.min(hold.deadline));
            holding::bind(lock, (deadline, hold.token), grantee, now);
        }
        Holds::There
    })
}
