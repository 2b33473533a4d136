//! Serving waiters: the one way from the queue to a grant.

use crate::answering::{end_request, end_wait, time_out};
use crate::holding::{self, Grantee, WRONGTYPE, look_all, too_much};
use crate::keyspace::words::words;
use crate::keyspace::{Lock, Name, NotRead, listeners, rosters};
use crate::lock::serve::{Attempt, Change, Job, Sight, View, WaitEnd};
use crate::lock::{Deadline, Decision, Limit, LockKey, Millis, Owner, Waiter, WaiterId};
use crate::server::acl::User;
use crate::server::clock::{Now, Slice, steady_micros};
use crate::server::cluster::{self, Place, Served};
use crate::server::text::show;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text, TextRef};
use crate::state::confirmations::What;
use crate::state::owed::OnBehalf;
use crate::state::{self, Asker, Outcome, Stage, Terms};
use crate::stats::{count, time};
use crate::{config, confirming};

/// How soon, in ms, the queue is looked at again while clients are paused or a slot is being migrated.
pub const LOOK_AGAIN: Millis = 10;

/// The error for a waiter that has lost the right to the lock.
const NOPERM: &str = "NOPERM the user of this connection may no longer acquire this lock";

/// Serves every waiter that can be served after locks have changed, until the slice is over. The only way out of the
/// queue to a grant.
pub fn serve(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(job) = state::with(|state| state.agenda.next(&state.queue)) else { break };
        match job {
            Job::Nothing => {}
            Job::FindHolders(key) => {
                let holders = Keyspace { ctx, now }.holders(&key);
                state::with(|state| state.agenda.held_by(&state.queue, &key, holders));
            }
            Job::Judge(attempt) if is_forsaken(attempt.id()) => drop(state::with(|state| state.leave(attempt.id()))),
            Job::Judge(attempt) => judge(ctx, attempt, now),
        }
    }
    if state::with(|state| !state.agenda.is_empty()) {
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
}

/// Serves the waiters of a lock that a command has changed. Costs next to nothing if there are none.
pub fn serve_lock(ctx: Ctx, name: TextRef, now: Now) {
    let db = ctx.db();
    let contended = state::with(|state| {
        let contended = state.is_contended(db, name.bytes());
        if contended {
            state.agenda.note(LockKey::new(db, name.bytes()), Change::Freed);
        }
        contended
    });
    if contended {
        serve(ctx, now, &Slice::of_command());
    }
}

/// Decides whether a request still has to wait, and ends its wait if not.
fn judge(ctx: Ctx, attempt: Attempt, now: Now) {
    let mut locks = ServingView { keyspace: Keyspace { ctx, now }, locks: attempt.keys() };
    match attempt.only_key() {
        Some((key, owner)) if state::with(|state| state.awaits_replicas(key.db, &key.name, &owner)) => {
            conclude(ctx, attempt, &mut Seen(Sight::BeingConfirmed), now, None);
        }
        // Read once, so that the decision and the write are based on the same reading.
        Some((key, owner)) if served(ctx, &key) == Served::Here => ctx.in_db(key.db, |ctx| {
            let (name, text) = (Text::new(&key.name), Text::new(&owner));
            let (name, owner) = (Name::kept_as(name.as_text(), &key.name), Name::kept_as(text.as_text(), &owner));
            let Ok(mut lock) = look_to_grant(ctx, (&name, owner.text()), now, 1) else {
                return conclude(ctx, attempt, &mut Seen(Sight::NotALock), now, None);
            };
            refresh(&mut lock, &key, now);
            let mut seen = Seen(Sight::Lock(lock.standing()));
            conclude(ctx, attempt, &mut seen, now, Some((&owner, &mut lock)));
        }),
        _ => match place_elsewhere(ctx, attempt.id()) {
            Some(place) => send_away(ctx, attempt.id(), &place, now),
            None => conclude(ctx, attempt, &mut locks, now, None),
        },
    }
}

/// Reads a lock that may be granted. What is over of it has ended, and what only a step of the clock would end goes on,
/// also if the server finds out just now.
fn look_to_grant<'a>(
    ctx: Ctx<'a>,
    (name, owner): (&Name<'a>, TextRef),
    now: Now,
    locks: usize,
) -> Result<Lock<'a>, NotRead> {
    holding::end_broken(ctx, name.text(), now);
    let lock = Lock::look_one_of(ctx, name.clone(), owner, now.millis(), locks)?;
    if lock.count() > 0 || !state::with(|state| state.ties.any_lags()) {
        return Ok(lock);
    }
    drop(lock); // To end what is over, commands may be run.
    holding::end_broken(ctx, name.text(), now);
    Lock::look_one_of(ctx, name.clone(), owner, now.millis(), locks)
}

/// Decides on a request and, if that ends its wait, carries the decision out. `lock` is its only lock, as its owner
/// sees it, if it has been read already.
fn conclude(ctx: Ctx, attempt: Attempt, locks: &mut impl View, now: Now, lock: Option<(&Name, &mut Lock)>) {
    let judgement = attempt.judge(locks, now.millis());
    let ended = state::with(|state| {
        let ended = state.agenda.judged(&mut state.queue, attempt, judgement);
        if let Some((waiter, _)) = &ended {
            state.left(waiter);
        }
        ended
    });
    let Some((waiter, wait_end)) = ended else { return };
    let refused = match wait_end {
        WaitEnd::Refused(Decision::NotNew) => return time_out(ctx, &waiter, now),
        WaitEnd::NotALock => WRONGTYPE.into(),
        WaitEnd::TooMuch(place) => too_much(waiter.keys.get(place).map_or(&[], |key| &key.name), waiter.keys.len()),
        WaitEnd::Refused(decision) => refusal(decision),
        WaitEnd::Granted(decisions) => {
            let granted = match lock {
                Some((owner, lock)) => grant(ctx, &waiter, &decisions, owner, std::slice::from_mut(lock), now),
                None => grant_several(ctx, &waiter, &decisions, now),
            };
            match granted {
                Ok(()) => return,
                // The grant was not taken, so those behind it may have their turn.
                Err(error) => return end_wait(ctx, &waiter, Outcome::Refused(error), now),
            }
        }
    };
    end_request(ctx, waiter.asker.ticket, Outcome::Refused(refused), now);
}

fn grant_several(ctx: Ctx, waiter: &Waiter<Asker>, decisions: &[Decision], now: Now) -> Result<(), String> {
    let db = waiter.keys.first().map_or(0, |key| key.db);
    ctx.in_db(db, |ctx| {
        let text = Text::new(&waiter.owner);
        let owner = Name::kept_as(text.as_text(), &waiter.owner);
        let names: Vec<Text> = waiter.keys.iter().map(|key| Text::new(&key.name)).collect();
        let names: Vec<TextRef> = names.iter().map(AsText::as_text).collect();
        let mut locks = look_all(ctx, &names, owner.text(), now)?;
        grant(ctx, waiter, decisions, &owner, &mut locks, now)
    })
}

/// Carries out the grant to a waiter and records its answer.
fn grant(
    ctx: Ctx,
    waiter: &Waiter<Asker>,
    decisions: &[Decision],
    owner: &Name,
    locks: &mut [Lock],
    now: Now,
) -> Result<(), String> {
    let Asker { ticket, client, on_behalf, tying, replicas, form, arrived } = waiter.asker;
    if !may_acquire(ctx, client, locks, owner.text()) {
        return Err(NOPERM.into());
    }
    let granted = |(_, decision): &(&Lock, &Decision)| matches!(decision, Decision::Grant(..));
    if let Some((full, _)) = locks.iter().zip(decisions).filter(granted).find(|(lock, _)| lock.is_full()) {
        return Err(too_many_holders(full));
    }
    let terms = Terms { demand: waiter.demand, tying, replicas };
    let grantee = Grantee { owner, client, on_behalf, terms: &terms };
    let token = holding::grant(locks, decisions, grantee, now);
    let basis = holding::basis_of(decisions, terms.demand.raise);
    let holds = holding::granted_holds(locks, decisions, grantee, token);
    let grant = holding::note_undelivered(ctx.db(), grantee, ticket, (basis, holds));
    for (lock, key) in locks.iter().zip(waiter.keys.iter()) {
        schedule(lock, key, now.millis());
    }
    count(|it| &mut it.granted_queued);
    // The lease counts from `now`, which was read a while ago.
    let since = Now::read().micros.saturating_sub(now.micros);
    let waited = steady_micros().saturating_sub(arrived).saturating_sub(since);
    time(|stats| &mut stats.waits, waited);
    let answer = form.answer(token, waited);
    if replicas == 0 {
        end_request(ctx, ticket, Outcome::Granted(answer, grant), now);
        if tying.contention {
            holding::tell_if_contended(ctx, ctx.db(), locks.iter().map(|lock| lock.name().bytes()));
        }
        return Ok(());
    }
    let what = What::Reply { ticket, answer, grant, terms };
    let id = confirming::begin(ctx, what, replicas, now);
    state::with(|state| state.owed.set(ticket, Stage::Confirming(id)));
    Ok(())
}

/// Whether a connection's user may still run the request: its rights may have changed since it was made.
fn may_acquire(ctx: Ctx, client: u64, locks: &[Lock], owner: TextRef) -> bool {
    let Some(user) = User::of_client(ctx, client) else { return true };
    if let [lock] = locks {
        return user.may_run(&[words().acquire.as_text(), lock.name().text(), owner]);
    }
    let count = Text::new(locks.len().to_string().as_bytes());
    let mut command = vec![words().macquire.as_text(), count.as_text()];
    command.extend(locks.iter().map(|lock| lock.name().text()));
    command.push(owner);
    user.may_run(&command)
}

/// Whether a request belongs to a session that has ended but whose requests have not left the queue yet.
fn is_forsaken(id: WaiterId) -> bool {
    state::with(|state| {
        let asker = state.queue.get(id).map(|waiter| waiter.asker);
        asker.is_some_and(|asker| asker.on_behalf == OnBehalf::Session && !state.sessions.is_open(asker.client))
    })
}

/// Where a session's request must go, once the slot of its keys is served by another node. (The server itself
/// redirects blocked clients. While the slot is being migrated, nobody knows where the lock is.)
fn place_elsewhere(ctx: Ctx, id: WaiterId) -> Option<Place> {
    let of_session = |waiter: &&Waiter<Asker>| waiter.asker.on_behalf == OnBehalf::Session;
    let key = state::with(|state| state.queue.get(id).filter(of_session)?.keys.first().cloned())?;
    match served(ctx, &key) {
        Served::Elsewhere(place) => Some(place),
        _ => None,
    }
}

fn send_away(ctx: Ctx, id: WaiterId, place: &Place, now: Now) {
    if let Some(waiter) = state::with(|state| state.queue.leave(id)) {
        let moved = format!("MOVED {} {}", place.slot, place.address);
        end_wait(ctx, &waiter, Outcome::Refused(moved), now);
    }
}

/// Which node of a cluster decides on a key; outside clusters this one.
pub fn served(ctx: Ctx, key: &LockKey) -> Served {
    if !listeners::in_cluster() {
        return Served::Here;
    }
    ctx.in_db(key.db, |ctx| cluster::served(ctx, &Text::new(&key.name)))
}

/// A read-only view of the locks in the keyspace. Touches no table.
#[derive(Clone, Copy, Debug)]
pub struct Keyspace<'a> {
    /// The database and the access to the server.
    pub ctx: Ctx<'a>,
    /// The time at which leases are judged.
    pub now: Now,
}

impl View for Keyspace<'_> {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight {
        self.ctx.in_db(key.db, |ctx| {
            let (name, owner) = (Text::new(&key.name), Text::new(owner));
            let lock = Lock::look(ctx, name.as_text(), owner.as_text(), self.now.millis());
            lock.map_or(Sight::NotALock, |lock| Sight::Lock(lock.standing()))
        })
    }

    fn holders(&mut self, key: &LockKey) -> Vec<Owner> {
        let now = self.now.millis();
        self.ctx.in_db(key.db, |ctx| {
            let name = Text::new(&key.name);
            let Ok(lock) = Lock::look_as_nobody(ctx, name.as_text(), now) else { return Vec::new() };
            lock.holders(now).into_iter().map(|(owner, _)| owner).collect()
        })
    }
}

/// The view used while serving: leases found to have run out are removed on the way.
#[derive(Debug)]
struct ServingView<'a> {
    keyspace: Keyspace<'a>,
    /// How many locks the request is for.
    locks: usize,
}

impl View for ServingView<'_> {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight {
        let (ctx, now) = (self.keyspace.ctx, self.keyspace.now);
        if served(ctx, key) != Served::Here {
            // The slot is served elsewhere or being migrated, so clients are redirected, or soon will be; or no node serves it.
            // A copy of the key may be here, but it does not count.
            rosters::with(|rosters| rosters.forget(key.db, &key.name));
            state::with(|state| state.lease_timers.schedule(key, Some(now.millis().saturating_add(LOOK_AGAIN))));
            wake_for_lease_timers(ctx);
            return Sight::Elsewhere;
        }
        if state::with(|state| state.awaits_replicas(key.db, &key.name, owner)) {
            return Sight::BeingConfirmed;
        }
        ctx.in_db(key.db, |ctx| {
            let (name, owner) = (Text::new(&key.name), Text::new(owner));
            let name = Name::kept_as(name.as_text(), &key.name);
            match look_to_grant(ctx, (&name, owner.as_text()), now, self.locks) {
                Ok(mut lock) => {
                    refresh(&mut lock, key, now);
                    Sight::Lock(lock.standing())
                }
                Err(NotRead::NotALock) => Sight::NotALock,
                Err(NotRead::TooMuch) => Sight::TooMuch,
            }
        })
    }

    fn holders(&mut self, key: &LockKey) -> Vec<Owner> {
        self.keyspace.holders(key)
    }
}

/// A single lock that has been read already.
struct Seen(Sight);

impl View for Seen {
    fn look(&mut self, _: &LockKey, _: &Owner) -> Sight {
        self.0
    }

    fn holders(&mut self, _: &LockKey) -> Vec<Owner> {
        Vec::new()
    }
}

/// Removes the holders of a contended lock whose lease has run out, and schedules the look at the next one.
fn refresh(lock: &mut Lock, key: &LockKey, now: Now) {
    if holding::end_expired(lock, now) {
        // The reading may be for a request for several locks, while others wait for this one alone.
        state::with(|state| state.agenda.note(key.clone(), Change::Freed));
    }
    if lock.count() > 0 {
        schedule(lock, key, now.millis()); // Otherwise it is about to be granted.
    }
}

/// When the lock must be looked at even if nobody touches it: when the next lease runs out.
fn next_look(lock: &Lock, now: Millis) -> Option<Millis> {
    match lock.next_deadline(now) {
        Some(Deadline::At(at)) => Some(at.saturating_add(1).max(now)),
        _ => None,
    }
}

/// Schedules the next look at a lock that is being served.
fn schedule(lock: &Lock, key: &LockKey, now: Millis) {
    let next = next_look(lock, now);
    state::with(|state| {
        let next = next.filter(|_| state.is_contended(key.db, &key.name));
        state.lease_timers.schedule(key, next);
    });
    wake_for_lease_timers(lock.ctx());
}

/// Schedules the next look at a lock that somebody begins to wait for, or whose deadline has moved.
pub fn schedule_earlier(lock: &Lock, key: &LockKey, now: Millis) {
    if let Some(next) = next_look(lock, now) {
        state::with(|state| state.lease_timers.schedule_earlier(key, next));
        wake_for_lease_timers(lock.ctx());
    }
}

/// A command of this module has moved the deadline of a hold.
pub fn deadline_moved(lock: &Lock, now: Now) {
    if state::with(|state| state.is_contended(lock.db(), lock.name().bytes())) {
        schedule_earlier(lock, &lock.lock_key(), now.millis());
    }
}

fn wake_for_lease_timers(ctx: Ctx) {
    if let Some(at) = state::with(|state| state.lease_timers.first()) {
        timer::wake(ctx, Timer::Work, at);
    }
}

/// The error for a request that would exceed the number of holders allowed.
pub fn too_many_holders(lock: &Lock) -> String {
    let (name, most) = (show(lock.name().bytes()), config::MAX_HOLDERS.get());
    format!("ERR too many holders of '{name}': holdfast.max-holders is {most}")
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
