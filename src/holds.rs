//! How holds begin and end: no other module grants a hold or ends one.

use crate::config;
use crate::keyspace::effects::Waiters;
use crate::keyspace::{self, Lock, Name, NotRead, listeners, most_holders_each};
use crate::lock::serve::Change;
use crate::lock::{Deadline, Decision, Hold, Limit, Raise, Token};
use crate::server::clock::{Now, Slice};
use crate::server::text::{show, show_start};
use crate::server::{AsText, Ctx, Text, TextRef, events, timer, writes};
use crate::state::pending::{OnBehalf, Ticket};
use crate::state::{
    Basis, Binding, BindingFlags, BindingId, Grant, GrantId, GrantedHold, Kind, LossReason, NewBinding, Progress,
    Revocation, State, Terms,
};
use crate::stats::{add, count};

/// The error for a key that does not hold a lock.
pub const WRONGTYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

/// The recipient of a grant.
#[derive(Clone, Copy, Debug)]
pub struct Grantee<'a> {
    /// The owner.
    pub owner: &'a Name<'a>,
    /// The connection on whose behalf the request is made: the caller's, or a session's.
    pub client: u64,
    /// Whether that connection acts as a session.
    pub on_behalf: OnBehalf,
    /// What the request asks for.
    pub terms: &'a Terms,
}

/// Checks that every lock that is about to be granted may have one more holder.
///
/// # Errors
///
/// The reply that names a lock with the maximum number of holders.
pub fn have_room_for_holder(locks: &[Lock], decisions: &[Decision]) -> Result<(), String> {
    let granted = |(_, decision): &(&Lock, &Decision)| matches!(decision, Decision::Grant(..));
    match locks.iter().zip(decisions).filter(granted).find(|(lock, _)| lock.is_full()) {
        None => Ok(()),
        Some((full, _)) => {
            let (name, most) = (show(full.name().bytes()), config::MAX_HOLDERS.get());
            Err(format!("ERR too many holders of '{name}': holdfast.max-holders is {most}"))
        }
    }
}

/// Grants all `locks` as decided, and returns the token. Every grant goes through this function.
///
/// Several locks are either all granted, under one new token, or all re-entered, and keep their token. The holds are
/// bound at once, unless replicas must confirm the grant: then they are bound once it is confirmed.
pub fn grant(state: &mut State, locks: &mut [Lock], decisions: &[Decision], grantee: Grantee, now: Now) -> Token {
    let kept = match decisions.first() {
        Some(Decision::Reenter(hold)) => keyspace::kept_token(hold.token, now),
        _ => None,
    };
    let token = kept.unwrap_or_else(|| keyspace::next_token(now));
    for (lock, decision) in locks.iter_mut().zip(decisions) {
        match (decision, lock.own()) {
            (Decision::Grant(hold, limit), _) => {
                // End the expired holders that this grant replaces: a key that loses its expiry would have them again.
                end_expired(state, lock, now);
                lock.grant(grantee.owner.text(), &Hold { token: Some(token), ..*hold }, *limit);
                // A binding that is still here belongs to a hold that ended without the module's knowledge.
                let left = unbind(state, lock, grantee.owner.text());
                report_all_lost(state, left, LossReason::Changed, now);
                bind_now(state, lock, (hold.deadline, token), grantee, now);
            }
            (Decision::Reenter(hold), Some(own)) => {
                change(state, lock, grantee.owner.text(), &own, &Hold { token: Some(token), ..*hold }, now);
                bind_now(state, lock, (hold.deadline, token), grantee, now);
                // After the clock was set back, an owner may wait for a lock that it holds.
                if state.is_contended(lock.db(), lock.name().bytes()) {
                    state.agenda.note_owner(lock.lock_key(), grantee.owner.kept());
                }
            }
            _ => {}
        }
    }
    token
}

/// Changes the count, token and deadline of a hold. Its binding follows.
pub fn change(state: &mut State, lock: &mut Lock, owner: TextRef, own: &Hold, new: &Hold, now: Now) {
    lock.update(owner, own, new);
    let Some(token) = new.token else { return };
    let hold = (lock.db(), lock.name().bytes(), owner.bytes());
    if new.deadline < own.deadline {
        state.undelivered.shorten(hold, new.deadline);
    }
    state.bindings.counted(hold, new.holds, lock.limit());
    let other = state.bindings.changed(hold, own.token, token, new.deadline, now.millis());
    report_all_lost(state, other, LossReason::Changed, now);
}

/// Lowers the count of a hold. Its token and deadline stay.
pub fn lower(state: &mut State, lock: &mut Lock, owner: TextRef, holds: u64) {
    lock.lower(owner, holds);
    let hold = (lock.db(), lock.name().bytes(), owner.bytes());
    state.bindings.counted(hold, holds, lock.limit());
}

/// Binds a hold whose request is being answered, unless the answer awaits replicas.
pub fn bind_now(state: &mut State, lock: &Lock, of: (Deadline, Token), grantee: Grantee, now: Now) {
    if grantee.terms.replicas == 0 {
        bind(state, lock, of, grantee, now);
    }
}

/// Whether a renewal binds the hold anew. A renewal that does not leaves the binding as it is, even over a session's
/// own connection.
pub fn renewal_binds(on_behalf: OnBehalf, terms: &Terms) -> bool {
    on_behalf == OnBehalf::Session || terms.flags != BindingFlags::NONE
}

/// Binds a hold whose request succeeded. A session's hold is always bound, even if the request came over the session's
/// own connection and did not name the session. Another connection's hold is bound only if the request asks for it.
pub fn bind(state: &mut State, lock: &Lock, (deadline, token): (Deadline, Token), grantee: Grantee, now: Now) {
    let Terms { demand, flags, replicas } = *grantee.terms;
    if flags == BindingFlags::NONE && !state.sessions.is_open(grantee.client) {
        return;
    }
    events::watch_keys(lock.ctx());
    let binding = NewBinding {
        client: grantee.client,
        flags,
        key: lock.lock_key(),
        owner: grantee.owner.kept(),
        token,
        lease: demand.lease,
        replicas,
        deadline,
        holds: lock.held().map_or(1, |held| held.holds),
        limit: lock.limit().unwrap_or(Limit::MUTEX),
    };
    match state.bind(binding, now.millis()) {
        Some(before) if before.token == token => state.notify(&before, Kind::Unbound(token, LossReason::Taken)),
        // The earlier binding was of another hold of this owner, which must have ended unnoticed.
        Some(before) => report_lost(state, &before, LossReason::Changed, now),
        None => {}
    }
}

/// Returns what an undelivered grant did to its owner's holds, and those holds.
pub fn granted_holds(
    state: &mut State,
    locks: &[Lock],
    decisions: &[Decision],
    grantee: Grantee,
    token: Token,
) -> (Basis, Vec<GrantedHold>) {
    let basis = match (decisions.first(), grantee.terms.demand.raise) {
        (Some(Decision::Reenter(_)), Raise::To(_)) => Basis::Repetition,
        (Some(Decision::Reenter(_)), _) => Basis::OneMore,
        _ => Basis::New,
    };
    let granted = locks.iter().zip(decisions).filter_map(|(lock, decision)| {
        let (hold, is_new) = match decision {
            Decision::Grant(hold, _) => (hold, true),
            Decision::Reenter(hold) => (hold, false),
            _ => return None,
        };
        let undo = if is_new { hold.holds } else { undo_of_reentry(state, lock, hold, grantee) };
        let binding = binding_of(state, lock, grantee.owner);
        let deadline = bound_end(state, binding, grantee, token, hold.deadline);
        let binding = binding.filter(|_| is_new);
        Some(GrantedHold { name: lock.name().kept(), token, deadline, undo, binding })
    });
    (basis, granted.collect())
}

/// The id of a hold's binding, if it has one.
pub fn binding_of(state: &State, lock: &Lock, owner: &Name) -> Option<BindingId> {
    state.bindings.id(lock.db(), lock.name().bytes(), owner.bytes())
}

/// How long a hold that was just granted lasts for sure. If its binding needs replicas: no longer than they have
/// confirmed.
fn bound_end(
    state: &State,
    binding: Option<BindingId>,
    grantee: Grantee,
    token: Token,
    deadline: Deadline,
) -> Deadline {
    if grantee.terms.replicas > 0 {
        return deadline; // The replicas will confirm this deadline.
    }
    let binding = binding.and_then(|id| state.bindings.get(id)).filter(|binding| binding.token == token);
    binding.map_or(deadline, |binding| binding.end().min(deadline))
}

/// By how much the hold count drops if the re-entry that led to it is revoked.
fn undo_of_reentry(state: &mut State, lock: &Lock, hold: &Hold, grantee: Grantee) -> u64 {
    match grantee.terms.demand.raise {
        Raise::To(holds) => limit_undo(state, lock, grantee.owner.text(), hold.holds.saturating_sub(holds)),
        Raise::ByOne | Raise::New => 1,
    }
}

/// Keeps what a re-entry of these locks relies on, because that is being answered: other undelivered grants of the
/// owner can no longer undo it.
pub fn keep_relied_on(state: &mut State, locks: &[Lock], decisions: &[Decision], grantee: Grantee) {
    for (lock, decision) in locks.iter().zip(decisions) {
        if let Decision::Reenter(hold) = decision {
            undo_of_reentry(state, lock, hold, grantee);
        }
    }
}

/// Limits what undelivered grants may still undo of a hold to `budget`. Returns by how much that is less than before.
pub fn limit_undo(state: &mut State, lock: &Lock, owner: TextRef, budget: u64) -> u64 {
    let token = lock.held().and_then(|held| held.token);
    token.map_or(0, |token| state.undelivered.keep((lock.db(), lock.name().bytes(), owner.bytes()), token, budget))
}

/// Records an undelivered grant or renewal, which is revoked if its client goes away.
pub fn note_undelivered(
    state: &mut State,
    db: i32,
    grantee: Grantee,
    ticket: Ticket,
    (basis, holds): (Basis, Vec<GrantedHold>),
) -> GrantId {
    let Grantee { owner, client, on_behalf, terms } = grantee;
    let progress = if terms.replicas > 0 { Progress::Confirming } else { Progress::Delivering };
    let home = state.bindings.home(db);
    let grant = Grant { home, owner: owner.kept(), client, on_behalf, ticket, basis, holds, event: None };
    state.undelivered.begin(grant, progress)
}

/// Refuses a request for locks of the selected database if replicas have yet to confirm another request of this owner
/// for one of them.
///
/// # Errors
///
/// The reply that names that lock.
pub fn one_at_a_time<'a>(
    state: &State,
    db: i32,
    names: impl IntoIterator<Item = TextRef<'a>>,
    owner: TextRef,
) -> Result<(), String> {
    match names.into_iter().find(|name| state.awaits_replicas(db, name.bytes(), owner.bytes())) {
        None => Ok(()),
        Some(name) => Err(format!(
            "ERR another request of this owner for '{}' is being confirmed by replicas: repeat it later, or with WAIT",
            show_start(name.bytes())
        )),
    }
}

/// Notifies the session that holds one of these locks, if it asked for that (`CONTENTION`) and a request waits for the
/// lock. The caller must have answered the grant or renewal: the holder learns of its own hold first.
pub fn notify_if_contended<'a>(state: &mut State, db: i32, names: impl IntoIterator<Item = &'a [u8]>) {
    for name in names {
        if state.is_contended(db, name) {
            state.contended(db, name);
        }
    }
}

/// Reports the loss of bound holds.
fn report_all_lost(state: &mut State, bindings: impl IntoIterator<Item = Binding>, why: LossReason, now: Now) {
    bindings.into_iter().for_each(|binding| report_lost(state, &binding, why, now));
}

/// Notifies a session that its bound hold is lost: for the given reason, unless its lease has run out. Counts the loss
/// if another command ended the hold.
pub fn report_lost(state: &mut State, binding: &Binding, why: LossReason, now: Now) {
    let why = if binding.end().has_passed(now.millis()) { LossReason::Expired } else { why };
    state.notify(binding, Kind::Lost(binding.token, why));
    if why == LossReason::Changed {
        count(|it| &mut it.changed);
    }
}

/// Ends the hold of `owner`, which must have one. Returns its binding. The caller serves the waiters.
pub fn end_hold(state: &mut State, lock: &mut Lock, owner: TextRef, now: Now) -> Option<Binding> {
    let token = lock.held().and_then(|held| held.token);
    lock.remove(owner, waiters(state, lock));
    let binding = unbind(state, lock, owner)?;
    if Some(binding.token) != token {
        // It belongs to an earlier hold of this owner, which ended without the module's knowledge.
        report_lost(state, &binding, LossReason::Changed, now);
        return None;
    }
    Some(binding)
}

/// Removes the binding of a hold, and returns it.
fn unbind(state: &mut State, lock: &Lock, owner: TextRef) -> Option<Binding> {
    if state.bindings.is_empty() {
        return None;
    }
    state.bindings.unbind(lock.db(), lock.name().bytes(), owner.bytes())
}

/// Begins a call of the server, and returns its time. If the server's clock has stepped since the last call, the
/// deadlines of bound holds move with it. Their keys follow in this event-loop iteration, each before the module
/// decides anything by it.
pub fn begin(state: &mut State, ctx: Ctx) -> Now {
    let now = Now::read();
    if !state.has_stepped(now) {
        return now;
    }
    timer::restart(ctx);
    Now::read()
}

/// Moves the deadlines in the keys of bound holds by a clock step. Returns whether all keys have followed.
pub fn follow_clock(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) -> bool {
    while !slice.is_over() {
        let Some(id) = state.bindings.next_lagging() else { return true };
        follow(state, ctx, id, now);
    }
    !state.bindings.any_lags()
}

/// Moves the deadline in the key of a bound hold by a clock step. Writes the hold again if it has expired meanwhile. A
/// hold that another client ended stays ended.
fn follow(state: &mut State, ctx: Ctx, id: BindingId, now: Now) {
    let Some((binding, by)) = state.bindings.follows(id) else { return };
    let key = binding.key();
    // Before the key is opened: the check runs a command, which may free what an open key points to.
    let is_served = ctx.in_db(key.db, |ctx| serves(ctx, &Text::new(&key.name)));
    let may_be_ended = state.bindings.is_touched(id) || state.sweep.is_to_pass(key.db, id);
    ctx.in_db(key.db, |ctx| {
        let (name, owner) = (Text::new(&key.name), Text::new(&binding.owner));
        let Ok(mut lock) = Lock::look(ctx, name.as_text(), owner.as_text(), now.millis()) else { return };
        let limit = lock.limit().map_or(binding.limit, |limit| limit.min(binding.limit));
        let has_room = limit.allows(lock.count().saturating_add(1));
        match lock.own() {
            Some(own) if own.token == Some(binding.token) => {
                let deadline = own.deadline.stepped(by);
                lock.update(owner.as_text(), &own, &Hold { deadline, ..own });
            }
            None if has_room && !may_be_ended && !binding.end().has_passed(now.millis()) && is_served => {
                let hold = Hold { holds: binding.holds, token: Some(binding.token), deadline: binding.deadline() };
                lock.grant(owner.as_text(), &hold, limit);
            }
            _ => {}
        }
    });
    // The next look at the lock must move to the new deadline.
    if state.is_contended(key.db, &key.name) {
        state.agenda.note(key, Change::Freed);
    }
}

/// Whether this node serves a key of the selected database. Outside clusters, it always does.
fn serves(ctx: Ctx, name: &Text) -> bool {
    !listeners::in_cluster() || ctx.serves(name)
}

/// Ends the orphaned holds of a lock now, instead of waiting for the next event-loop iteration: ephemeral holds of
/// ended connections, and grants that must be revoked. Keeps holds that only a clock step would have ended. The caller
/// does this before it decides anything by the lock.
#[inline]
pub fn end_orphaned(state: &mut State, ctx: Ctx, name: TextRef, now: Now) {
    if state.bindings.any_lags() || state.may_have_broken() {
        end_all_orphaned(state, ctx, name, now);
    }
}

fn end_all_orphaned(state: &mut State, ctx: Ctx, name: TextRef, now: Now) {
    if state.bindings.any_lags() {
        let lagging = state.bindings.lagging_of(ctx.db(), name.bytes());
        lagging.into_iter().for_each(|id| follow(state, ctx, id, now));
    }
    if state.may_have_broken() {
        let (db, name) = (ctx.db(), name.bytes());
        let (revoked, broken) = (state.take_revoked(db, name), state.bindings.take_broken(db, name));
        revoked.iter().for_each(|it| revoke(state, ctx, it, now));
        broken.iter().for_each(|binding| release_bound(state, ctx, binding, now));
    }
}

/// Revokes the grants that are marked for it. Their waiters are served later.
pub fn revoke_undelivered(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(revoked) = state.undelivered.next_revoked() else { break };
        revoke(state, ctx, &revoked, now);
    }
}

/// Lowers the count of a hold by the revoked amount, or ends the hold. Does nothing if the hold no longer exists under
/// its token.
fn revoke(state: &mut State, ctx: Ctx, revoked: &Revocation, now: Now) {
    ctx.in_db(revoked.key.db, |ctx| {
        let (name, owner) = (Text::new(&revoked.key.name), Text::new(&revoked.owner));
        let Ok(mut lock) = Lock::look(ctx, name.as_text(), owner.as_text(), now.millis()) else { return };
        let Some(held) = lock.held().filter(|held| held.token == Some(revoked.token)) else { return };
        match held.holds.saturating_sub(revoked.undo) {
            0 => {
                // If another client has lowered the count, the hold that ends here was bound before this grant.
                let bound = state.bindings.id(lock.db(), &revoked.key.name, &revoked.owner);
                let binding = end_hold(state, &mut lock, owner.as_text(), now).filter(|_| bound != revoked.binding);
                report_all_lost(state, binding, LossReason::Changed, now);
            }
            left => {
                if revoked.undo > 0 {
                    lower(state, &mut lock, owner.as_text(), left);
                }
                revoked.binding.into_iter().for_each(|id| state.clear_flags(id, now.millis()));
            }
        }
    });
    if state.queue.waits(&revoked.owner) {
        state.agenda.note_owner(revoked.key.clone(), revoked.owner.clone());
    }
    state.agenda.note(revoked.key.clone(), Change::Freed);
}

/// Whether the server accepts a write now.
pub fn takes_writes(ctx: Ctx) -> bool {
    writes::are_possible(ctx) && !writes::are_refused(ctx)
}

/// Releases an ephemeral hold whose connection has ended, if it still exists. The waiters are served later.
pub fn release_bound(state: &mut State, ctx: Ctx, binding: &Binding, now: Now) {
    let released = ctx.in_db(binding.key().db, |ctx| {
        let (name, owner) = (Text::new(&binding.name), Text::new(&binding.owner));
        let Ok(mut lock) = Lock::look(ctx, name.as_text(), owner.as_text(), now.millis()) else { return false };
        let is_held = lock.held().is_some_and(|held| held.token == Some(binding.token));
        if is_held {
            end_hold(state, &mut lock, owner.as_text(), now);
        }
        is_held
    });
    if released {
        count(|it| &mut it.released_by_disconnect);
        state.agenda.note(binding.key(), Change::Freed);
    }
}

/// Ends the expired holds of a lock. Returns whether there were any.
pub fn end_expired(state: &mut State, lock: &mut Lock, now: Now) -> bool {
    let expired = lock.purge(now.millis());
    for owner in &expired {
        let binding = state.bindings.unbind(lock.db(), lock.name().bytes(), owner);
        report_all_lost(state, binding, LossReason::Expired, now);
    }
    add(|it| &mut it.expired, expired.len() as u64);
    !expired.is_empty()
}

/// Force-releases a lock: ends all its holds, and returns how many there were. The caller serves the waiters.
pub fn end_all(state: &mut State, lock: &mut Lock, now: Now) -> usize {
    let holders = lock.count();
    if holders > 0 {
        lock.clear(waiters(state, lock));
        let bindings = state.bindings.unbind_all(lock.db(), lock.name().bytes());
        report_all_lost(state, bindings, LossReason::Forced, now);
    }
    holders
}

fn waiters(state: &State, lock: &Lock) -> Waiters {
    if state.is_contended(lock.db(), lock.name().bytes()) { Waiters::Some } else { Waiters::None }
}

/// Locks that were read together. A single lock needs no allocation.
#[derive(Debug)]
pub enum Locks<'a> {
    /// A single lock.
    One([Lock<'a>; 1]),
    /// Several locks.
    Several(Vec<Lock<'a>>),
}

impl<'a> Locks<'a> {
    /// Returns all of them.
    pub fn all(&mut self) -> &mut [Lock<'a>] {
        match self {
            Self::One(lock) => lock,
            Self::Several(locks) => locks,
        }
    }
}

/// Opens locks of the selected database, as `owner` sees them.
///
/// # Errors
///
/// The reply that says that one of the keys does not hold a lock, or that there is too much to read.
pub fn look_all<'a>(
    state: &mut State,
    ctx: Ctx<'a>,
    names: &[TextRef<'a>],
    owner: TextRef,
    now: Now,
) -> Result<Locks<'a>, String> {
    // For all of them before any is opened: ending a hold may run commands, which may free what an open key points to.
    names.iter().for_each(|name| end_orphaned(state, ctx, *name, now));
    let look = |&name: &TextRef<'a>| {
        let lock = Lock::look_one_of(ctx, name, owner, now.millis(), names.len());
        lock.map_err(|why| match why {
            NotRead::NotALock => WRONGTYPE.into(),
            NotRead::TooLarge => too_large(name.bytes(), names.len()),
        })
    };
    match names {
        [name] => look(name).map(|lock| Locks::One([lock])),
        _ => names.iter().map(look).collect::<Result<_, String>>().map(Locks::Several),
    }
}

/// The error for a request whose locks can't be read in one execution: this lock, one of `locks`, has too many holders.
pub fn too_large(name: &[u8], locks: usize) -> String {
    let (name, each, most) = (show_start(name), most_holders_each(locks), config::MAX_HOLDERS.get());
    format!(
        "ERR too many holders of '{name}' to read {locks} locks in one request: of those that other clients have written, \
         each may have {each}, so that all together have no more than one lock may have (holdfast.max-holders is {most})"
    )
}
