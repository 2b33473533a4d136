//! Serving waiters: the only way from the queue to a grant.

use crate::holds::{self, Grantee, WRONGTYPE, look_all, too_large};
use crate::keyspace::words::words;
use crate::keyspace::{Lock, Name, NotRead, holder_cache, listeners};
use crate::lock::serve::{Attempt, Change, Job, Sight, WaitEnd};
use crate::lock::{Deadline, Decision, Limit, LockKey, Millis, Owner, Waiter, WaiterId};
use crate::replies::{end_request, end_wait, time_out};
use crate::server::acl::User;
use crate::server::clock::{Now, Slice, steady_micros};
use crate::server::cluster::{self, Place, Served};
use crate::server::{AsText, Ctx, Text, TextRef};
use crate::state::pending::OnBehalf;
use crate::state::{Answer, GrantId, Outcome, Requester, State};
use crate::stats::{count, time};
use crate::{confirming, notices};

/// How long the module waits, in ms, before it retries while it may not write or a slot is being migrated.
pub const RETRY_INTERVAL: Millis = 10;

/// The error for a waiter whose user may no longer acquire the lock.
const NOPERM: &str = "NOPERM the user of this connection may no longer acquire this lock";

/// Serves the waiters of locks that have changed, until none is left to serve or the slice is over. Every grant to a
/// queued request goes through this function.
pub fn serve(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(job) = state.agenda.next(&state.queue) else { break };
        match job {
            Job::Nothing => {}
            Job::FindHolders(key) => {
                let holders = holders(ctx, &key, now);
                state.agenda.held_by(&state.queue, &key, holders);
            }
            Job::Judge(attempt) if is_orphaned(state, attempt.id()) => drop(state.leave(attempt.id())),
            Job::Judge(attempt) => judge(state, ctx, attempt, now),
        }
    }
}

/// Serves the waiters of a lock that a command has changed. Costs next to nothing if there are none.
pub fn serve_lock(state: &mut State, ctx: Ctx, name: TextRef, now: Now) {
    if note_freed(state, ctx, name) {
        serve(state, ctx, now, &Slice::of_command());
    }
}

/// Notes that a command has changed a lock of the selected database. Returns whether requests wait for it.
pub fn note_freed(state: &mut State, ctx: Ctx, name: TextRef) -> bool {
    if state.queue.is_empty() {
        return false;
    }
    let key = state.queue.contended_key(ctx.db(), name.bytes());
    let is_contended = key.is_some();
    key.into_iter().for_each(|key| state.agenda.note(key, Change::Freed));
    is_contended
}

/// Decides whether a request still has to wait, and ends its wait if not.
fn judge(state: &mut State, ctx: Ctx, attempt: Attempt, now: Now) {
    match attempt.only_key() {
        Some((key, owner)) if state.awaits_replicas(key.db, &key.name, &owner) => {
            conclude_by(state, ctx, attempt, Sight::BeingConfirmed, now, None);
        }
        // The lock is read once, so that the decision and the write are based on the same reading.
        Some((key, owner)) if served(ctx, &key) == Served::Here => ctx.in_db(key.db, |ctx| {
            let (name, text) = (Text::new(&key.name), Text::new(&owner));
            let (name, owner) = (Name::with_copy(name.as_text(), &key.name), Name::with_copy(text.as_text(), &owner));
            let Ok(mut lock) = look_to_grant(state, ctx, (&name, owner.text()), now, 1) else {
                return conclude_by(state, ctx, attempt, Sight::NotALock, now, None);
            };
            refresh(state, &mut lock, &key, now);
            let sight = Sight::Lock(lock.standing());
            conclude_by(state, ctx, attempt, sight, now, Some((&owner, &mut lock)));
        }),
        _ => match place_elsewhere(state, ctx, attempt.id()) {
            Some(place) => redirect(state, attempt.id(), &place, now),
            None => {
                let mut view = |key: &LockKey, owner: &Owner| look(state, ctx, (key, owner), attempt.keys(), now);
                let end = attempt.judge(&mut view, now.millis());
                conclude(state, ctx, (attempt.id(), end), now, None);
            }
        },
    }
}

/// Decides a request for a single lock by what was seen of that lock.
fn conclude_by(
    state: &mut State,
    ctx: Ctx,
    attempt: Attempt,
    sight: Sight,
    now: Now,
    lock: Option<(&Name, &mut Lock)>,
) {
    let end = attempt.judge(&mut |_: &LockKey, _: &Owner| sight, now.millis());
    conclude(state, ctx, (attempt.id(), end), now, lock);
}

/// Reads a lock that may be granted. Ends its orphaned holds first. Keeps holds that only a clock step would have
/// ended, even if the server notices their expiry during this read.
fn look_to_grant<'a>(
    state: &mut State,
    ctx: Ctx<'a>,
    (name, owner): (&Name<'a>, TextRef),
    now: Now,
    locks: usize,
) -> Result<Lock<'a>, NotRead> {
    holds::end_orphaned(state, ctx, name.text(), now);
    let lock = Lock::look_one_of(ctx, name.clone(), owner, now.millis(), locks)?;
    notices::apply(state, ctx);
    if lock.count() > 0 || !state.bindings.any_lags() {
        return Ok(lock);
    }
    drop(lock); // Ending a hold may run commands, so the key must not be open.
    holds::end_orphaned(state, ctx, name.text(), now);
    Lock::look_one_of(ctx, name.clone(), owner, now.millis(), locks)
}

/// Carries out a decision that ends a request's wait. `lock` is the request's only lock, as its owner sees it, if it
/// was read already.
fn conclude(
    state: &mut State,
    ctx: Ctx,
    (id, end): (WaiterId, Option<WaitEnd>),
    now: Now,
    lock: Option<(&Name, &mut Lock)>,
) {
    let Some(end) = end else { return };
    let Some(waiter) = state.agenda.ended(&mut state.queue, id, &end) else { return };
    state.left(&waiter);
    let refused = match end {
        WaitEnd::Refused(Decision::NotNew) => return time_out(state, waiter, now),
        WaitEnd::NotALock => WRONGTYPE.into(),
        WaitEnd::TooLarge(place) => too_large(waiter.keys.get(place).map_or(&[], |key| &key.name), waiter.keys.len()),
        WaitEnd::Refused(decision) => refusal(decision),
        WaitEnd::Granted(decisions) => {
            let granted = match lock {
                Some((owner, lock)) => grant(state, ctx, &waiter, &decisions, owner, std::slice::from_mut(lock), now),
                None => grant_several(state, ctx, &waiter, &decisions, now),
            };
            return match granted {
                Ok(granted) => answer(state, waiter, granted, now),
                // The grant failed, so the requests behind this one may be served.
                Err(error) => end_wait(state, waiter, Outcome::Refused(error), now),
            };
        }
    };
    end_request(state, waiter, Outcome::Refused(refused), now);
}

fn grant_several(
    state: &mut State,
    ctx: Ctx,
    waiter: &Waiter<Requester>,
    decisions: &[Decision],
    now: Now,
) -> Result<(Answer, GrantId), String> {
    let db = waiter.keys.first().map_or(0, |key| key.db);
    ctx.in_db(db, |ctx| {
        let text = Text::new(&waiter.owner);
        let owner = Name::with_copy(text.as_text(), &waiter.owner);
        let names: Vec<Text> = waiter.keys.iter().map(|key| Text::new(&key.name)).collect();
        let names: Vec<TextRef> = names.iter().map(AsText::as_text).collect();
        let mut locks = look_all(state, ctx, &names, owner.text(), now)?;
        grant(state, ctx, waiter, decisions, &owner, locks.all(), now)
    })
}

/// Grants the locks to a waiter. Returns the answer, which is still to be delivered.
fn grant(
    state: &mut State,
    ctx: Ctx,
    waiter: &Waiter<Requester>,
    decisions: &[Decision],
    owner: &Name,
    locks: &mut [Lock],
    now: Now,
) -> Result<(Answer, GrantId), String> {
    let Requester { ticket, client, on_behalf, form, arrived, .. } = waiter.requester;
    if !may_acquire(state, ctx, &waiter.requester, locks, owner.text()) {
        return Err(NOPERM.into());
    }
    holds::have_room_for_holder(locks, decisions)?;
    let terms = waiter.terms();
    let grantee = Grantee { owner, client, on_behalf, terms: &terms };
    let token = holds::grant(state, locks, decisions, grantee, now);
    let granted = holds::granted_holds(state, locks, decisions, grantee, token);
    let grant = holds::note_undelivered(state, ctx.db(), grantee, ticket, granted);
    for (lock, key) in locks.iter().zip(waiter.keys.iter()) {
        schedule_look(state, lock, key, now.millis());
        state.queue.note_holder(key, &waiter.owner);
    }
    count(|it| &mut it.granted_queued);
    // The wait ended at `now`, from which the lease counts, and which was read a while ago.
    let since = Now::read().micros.saturating_sub(now.micros);
    let waited = steady_micros().saturating_sub(arrived).saturating_sub(since);
    time(|stats| &mut stats.waits, waited);
    Ok((form.answer(token, waited), grant))
}

/// Answers a waiter that was granted its locks, or withholds the answer until replicas have confirmed the grant.
fn answer(state: &mut State, waiter: Box<Waiter<Requester>>, (answer, grant): (Answer, GrantId), now: Now) {
    if waiter.requester.replicas > 0 {
        return confirming::begin_reply(state, waiter, (answer, grant), now);
    }
    let (keys, contention) = (waiter.keys.clone(), waiter.requester.flags.contention);
    end_request(state, waiter, Outcome::Granted(answer, grant), now);
    if contention {
        keys.iter().for_each(|key| holds::notify_if_contended(state, key.db, [&*key.name]));
    }
}

/// Whether the user who made a request may still run it: the user's rights may have changed since.
fn may_acquire(state: &State, ctx: Ctx, requester: &Requester, locks: &[Lock], owner: TextRef) -> bool {
    // A session is usually blocked, too, until its next events.
    let block = requester.block.as_ref().or_else(|| state.reader_block(requester.client));
    let user = match block {
        // By its name, which is cheaper than by the client.
        Some(block) if block.is_of_default_user() => User::named(words().default_user.as_text()),
        _ => User::of_client(ctx, requester.client),
    };
    let Some(user) = user else { return true };
    let db = locks.first().map_or(0, Lock::db);
    if let [lock] = locks {
        return user.may_run(db, &[words().acquire.as_text(), lock.name().text(), owner]);
    }
    let count = Text::new(locks.len().to_string().as_bytes());
    let mut command = vec![words().macquire.as_text(), count.as_text()];
    command.extend(locks.iter().map(|lock| lock.name().text()));
    command.push(owner);
    user.may_run(db, &command)
}

/// Whether a request belongs to an ended session whose requests have not left the queue yet.
fn is_orphaned(state: &State, id: WaiterId) -> bool {
    let requester = state.queue.get(id).map(|waiter| &waiter.requester);
    requester
        .is_some_and(|requester| requester.on_behalf == OnBehalf::Session && !state.sessions.is_open(requester.client))
}

/// The node that a session must send its request to, if another node now serves the slot of its keys. (The server
/// itself redirects blocked clients. While the slot is being migrated, that node is unknown.)
fn place_elsewhere(state: &State, ctx: Ctx, id: WaiterId) -> Option<Place> {
    let of_session = |waiter: &&Waiter<Requester>| waiter.requester.on_behalf == OnBehalf::Session;
    match served(ctx, state.queue.get(id).filter(of_session)?.keys.first()?) {
        Served::Elsewhere(place) => Some(place),
        _ => None,
    }
}

fn redirect(state: &mut State, id: WaiterId, place: &Place, now: Now) {
    if let Some(waiter) = state.queue.leave(id) {
        let moved = format!("MOVED {} {}", place.slot, place.address);
        end_wait(state, waiter, Outcome::Refused(moved), now);
    }
}

/// Which node of a cluster serves a key. Outside clusters, this one does.
pub fn served(ctx: Ctx, key: &LockKey) -> Served {
    if !listeners::in_cluster() {
        return Served::Here;
    }
    ctx.in_db(key.db, |ctx| cluster::served(ctx, &Text::new(&key.name)))
}

/// The holders of a lock.
fn holders(ctx: Ctx, key: &LockKey, now: Now) -> Vec<Owner> {
    let now = now.millis();
    ctx.in_db(key.db, |ctx| {
        let name = Text::new(&key.name);
        let Ok(lock) = Lock::look_without_owner(ctx, name.as_text(), now) else { return Vec::new() };
        lock.holders(now).into_iter().map(|(owner, _)| owner).collect()
    })
}

/// Reads one of the `locks` locks of a request that is being served, and ends its expired holds.
fn look(state: &mut State, ctx: Ctx, (key, owner): (&LockKey, &Owner), locks: usize, now: Now) -> Sight {
    if served(ctx, key) != Served::Here {
        // Another node serves the slot, or no node does, or it is being migrated: clients are redirected, or soon will
        // be. A copy of the key may be here, but it does not count.
        holder_cache::with(|cache| cache.forget(key.db, &key.name));
        state.queue.look_at(key, Some(now.millis().saturating_add(RETRY_INTERVAL)));
        return Sight::Elsewhere;
    }
    if state.awaits_replicas(key.db, &key.name, owner) {
        return Sight::BeingConfirmed;
    }
    ctx.in_db(key.db, |ctx| {
        let (name, owner) = (Text::new(&key.name), Text::new(owner));
        let name = Name::with_copy(name.as_text(), &key.name);
        match look_to_grant(state, ctx, (&name, owner.as_text()), now, locks) {
            Ok(mut lock) => {
                refresh(state, &mut lock, key, now);
                Sight::Lock(lock.standing())
            }
            Err(NotRead::NotALock) => Sight::NotALock,
            Err(NotRead::TooLarge) => Sight::TooLarge,
        }
    })
}

/// Ends the expired holds of a contended lock, and schedules the look at its next deadline.
fn refresh(state: &mut State, lock: &mut Lock, key: &LockKey, now: Now) {
    if holds::end_expired(state, lock, now) {
        // This read may be for a request for several locks, while others wait for this lock alone.
        state.agenda.note(key.clone(), Change::Freed);
    }
    if lock.count() > 0 {
        schedule_look(state, lock, key, now.millis()); // A lock without holders is about to be granted.
    }
}

/// When the lock must be looked at even if no client touches it: when the next lease runs out.
fn next_look(lock: &Lock, now: Millis) -> Option<Millis> {
    match lock.next_deadline(now) {
        Some(Deadline::At(at)) => Some(at.saturating_add(1).max(now)),
        _ => None,
    }
}

/// Schedules the next look at a lock that is being served.
fn schedule_look(state: &mut State, lock: &Lock, key: &LockKey, now: Millis) {
    state.queue.look_at(key, next_look(lock, now));
}

/// Schedules a look at a lock that a request begins to wait for, or whose deadline has moved. Never postpones one.
pub fn schedule_earlier(state: &mut State, lock: &Lock, key: &LockKey, now: Millis) {
    if let Some(next) = next_look(lock, now) {
        state.queue.look_earlier(key, next);
    }
}

/// Schedules a look at a lock after a command of this module has moved the deadline of a hold.
pub fn deadline_moved(state: &mut State, lock: &Lock, now: Now) {
    if state.is_contended(lock.db(), lock.name().bytes()) {
        schedule_earlier(state, lock, &lock.lock_key(), now.millis());
    }
}

/// The error for a request that contradicts what its owner holds.
pub fn refusal(decision: Decision) -> String {
    match decision {
        Decision::OtherLimit(Limit::Shared) => {
            "ERR the owner holds this lock as SHARED; a re-entry must name the limit that the lock has".into()
        }
        Decision::OtherLimit(limit) => format!(
            "ERR the owner holds this lock under LIMIT {}; a re-entry must name the limit that the lock has",
            limit.number()
        ),
        Decision::HoldsSome => "ERR the owner holds some of these locks, or holds them under several tokens: they are \
                                taken all in one step, or re-entered under the one token of such a step"
            .into(),
        _ => format!("ERR the hold count can't be raised beyond {}", crate::lock::rule::MAX_HOLDS),
    }
}
