//! How holds begin and end: the one place that grants, and the one that takes away.

use crate::config;
use crate::keyspace::effects::Waiters;
use crate::keyspace::{self, Lock, Name, NotRead, listeners, most_holders_each};
use crate::lock::serve::Change;
use crate::lock::{Deadline, Decision, Hold, Limit, Raise, Token};
use crate::server::clock::{Now, Slice};
use crate::server::text::show_start;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text, TextRef, events, writes};
use crate::state::owed::{OnBehalf, Ticket};
use crate::state::ties::Before;
use crate::state::{
    self, Basis, Grant, GrantId, GrantedHold, NewTie, Progress, Revocation, State, Terms, Tie, TieId, Tying, Why,
};
use crate::stats::{add, count};

/// The error for a key that does not hold a lock.
pub const WRONGTYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

/// Who is granted a lock.
#[derive(Clone, Copy, Debug)]
pub struct Grantee<'a> {
    /// The owner.
    pub owner: &'a Name<'a>,
    /// The connection on whose behalf it is: the caller's, or a session's.
    pub client: u64,
    /// Whether that is a session.
    pub on_behalf: OnBehalf,
    /// What it asks for.
    pub terms: &'a Terms,
}

/// Carries out a grant of all `locks`, as decided. The only place that grants. Returns the token.
///
/// Of several locks, all are granted, under one new token, or all are re-entered, and keep the one that they have. If
/// replicas are to confirm it, the holds are tied when they have; else at once.
pub fn grant(locks: &mut [Lock], decisions: &[Decision], grantee: Grantee, now: Now) -> Token {
    let kept = match decisions.first() {
        Some(Decision::Reenter(hold)) => keyspace::kept_token(hold.token, now),
        _ => None,
    };
    let token = kept.unwrap_or_else(|| keyspace::next_token(now));
    for (lock, decision) in locks.iter_mut().zip(decisions) {
        match (decision, lock.own()) {
            (Decision::Grant(hold, limit), _) => {
                lock.grant(grantee.owner.text(), &Hold { token: Some(token), ..*hold }, *limit);
                let (db, name, owner) = (lock.db(), lock.name().bytes(), grantee.owner);
                // A tie that is left here belongs to a hold that ended behind the module's back.
                let left = state::with(|state| state.ties.untie(db, name, owner.bytes()));
                lost(lock.ctx(), left, Why::Changed, now);
                bind_now(lock, (hold.deadline, token), grantee, now);
            }
            (Decision::Reenter(hold), Some(own)) => {
                change(lock, grantee.owner.text(), &own, &Hold { token: Some(token), ..*hold }, now);
                bind_now(lock, (hold.deadline, token), grantee, now);
            }
            _ => {}
        }
    }
    token
}

/// Changes a hold: its count, its token, its deadline. Its ties follow.
pub fn change(lock: &mut Lock, owner: TextRef, own: &Hold, new: &Hold, now: Now) {
    lock.update(owner, own, new);
    let Some(token) = new.token else { return };
    let hold = (lock.db(), lock.name().bytes(), owner.bytes());
    if new.deadline < own.deadline {
        state::with(|state| state.undelivered.shorten(hold, new.deadline));
    }
    let other = with_ties(|state| {
        state.ties.counted(hold, new.holds, lock.limit());
        state.ties.changed(hold, own.token, token, new.deadline, now.millis())
    });
    if let Some(other) = other {
        lost(lock.ctx(), other, Why::Changed, now);
        wake_for_ties(lock.ctx());
    }
}

/// Lowers the count of a hold; its token and its deadline stay.
pub fn lower(lock: &mut Lock, owner: TextRef, holds: u64) {
    lock.lower(owner, holds);
    let hold = (lock.db(), lock.name().bytes(), owner.bytes());
    with_ties(|state| state.ties.counted(hold, holds, lock.limit()));
}

/// Ties a hold whose request is being answered, unless its answer waits for replicas.
pub fn bind_now(lock: &Lock, of: (Deadline, Token), grantee: Grantee, now: Now) {
    if grantee.terms.replicas == 0 {
        bind(lock, of, grantee, now);
    }
}

/// Whether a renewal says what binds the hold from now on. One that does not leaves that as it is, also over the connection
/// of a session.
pub fn renewal_binds(on_behalf: OnBehalf, terms: &Terms) -> bool {
    on_behalf == OnBehalf::Session || terms.tying != Tying::NONE
}

/// Ties a hold whose request is answered with success: to a session always, also if the request came over its own
/// connection and did not name it; to another connection if it asks for that.
pub fn bind(lock: &Lock, (deadline, token): (Deadline, Token), grantee: Grantee, now: Now) {
    let Terms { demand, tying, replicas } = *grantee.terms;
    if tying == Tying::NONE && !state::with(|state| state.sessions.is_open(grantee.client)) {
        return;
    }
    events::watch_keys(lock.ctx());
    let tie = NewTie {
        client: grantee.client,
        tying,
        key: lock.lock_key(),
        owner: grantee.owner.kept(),
        token,
        lease: demand.lease,
        replicas,
        deadline,
        holds: lock.held().map_or(1, |held| held.holds),
        limit: lock.limit().unwrap_or(Limit::MUTEX),
    };
    match state::with(|state| state.tie(tie, now.millis())) {
        Some(Before::OtherHold(tie)) => lost(lock.ctx(), [tie], Why::Changed, now),
        Some(Before::Elsewhere(tie)) => {
            state::with(|state| state.unbound(&tie, Why::Taken));
            timer::wake_for_replies(lock.ctx());
        }
        None => {}
    }
    wake_for_ties(lock.ctx());
}

/// What a grant did to the holds of its owner.
pub fn basis_of(decisions: &[Decision], raise: Raise) -> Basis {
    match (decisions.first(), raise) {
        (Some(Decision::Reenter(_)), Raise::To(_)) => Basis::Repetition,
        (Some(Decision::Reenter(_)), _) => Basis::OneMore,
        _ => Basis::New,
    }
}

/// The holds of a grant that nobody has been told of yet.
pub fn granted_holds(locks: &[Lock], decisions: &[Decision], grantee: Grantee, token: Token) -> Vec<GrantedHold> {
    let granted = locks.iter().zip(decisions).filter_map(|(lock, decision)| {
        let (deadline, undo) = match decision {
            Decision::Grant(hold, _) => (hold.deadline, hold.holds),
            Decision::Reenter(hold) => (hold.deadline, undo_of_reentry(lock, hold, grantee)),
            _ => return None,
        };
        Some(GrantedHold { name: lock.name().kept(), token, deadline: bound_end(lock, grantee, token, deadline), undo })
    });
    granted.collect()
}

/// Until when a hold lasts that was just granted: no longer than replicas have confirmed, if what binds it needs that.
fn bound_end(lock: &Lock, grantee: Grantee, token: Token, deadline: Deadline) -> Deadline {
    if grantee.terms.replicas > 0 {
        return deadline; // They confirm this one.
    }
    let (db, name, owner) = (lock.db(), lock.name().bytes(), grantee.owner.bytes());
    let end = with_ties(|state| state.ties.of(db, name, owner, Some(token)).map(Tie::end));
    end.flatten().map_or(deadline, |end| end.min(deadline))
}

/// By how much a hold count is lowered if a re-entry that led to it is revoked.
fn undo_of_reentry(lock: &Lock, hold: &Hold, grantee: Grantee) -> u64 {
    match grantee.terms.demand.raise {
        Raise::To(holds) => keep_holds(lock, grantee.owner.text(), hold.holds.saturating_sub(holds)),
        Raise::ByOne | Raise::New => 1,
    }
}

/// An owner is being told that it holds these locks, by a re-entry: what others of its grants could still undo, which it
/// has not been told of, stays as far as this one relies on it.
pub fn keep_granted(locks: &[Lock], decisions: &[Decision], grantee: Grantee) {
    if state::with(|state| state.undelivered.is_empty()) {
        return;
    }
    for (lock, decision) in locks.iter().zip(decisions) {
        if let Decision::Reenter(hold) = decision {
            undo_of_reentry(lock, hold, grantee);
        }
    }
}

/// Of what undelivered grants could still undo of a hold, only `budget` stays. Returns the rest.
pub fn keep_holds(lock: &Lock, owner: TextRef, budget: u64) -> u64 {
    let hold = (lock.db(), lock.name().bytes(), owner.bytes());
    state::with(|state| if state.undelivered.is_empty() { 0 } else { state.undelivered.keep(hold, budget) })
}

/// Records that nobody has been told of a grant or a renewal yet: it is revoked if nobody can be told.
pub fn note_undelivered(
    db: i32,
    grantee: Grantee,
    ticket: Ticket,
    (basis, holds): (Basis, Vec<GrantedHold>),
) -> GrantId {
    let Grantee { owner, client, on_behalf, terms } = grantee;
    let progress = if terms.replicas > 0 { Progress::Confirming } else { Progress::Delivering };
    state::with(|state| {
        let home = state.ties.home(db);
        let grant = Grant { home, owner: owner.kept(), client, on_behalf, ticket, basis, holds, event: None };
        state.undelivered.begin(grant, progress)
    })
}

/// Refuses a request for locks of the selected database while replicas have yet to confirm another one of its owner for one
/// of them.
///
/// # Errors
///
/// The reply that says so.
pub fn one_at_a_time<'a>(ctx: Ctx, names: impl IntoIterator<Item = TextRef<'a>>, owner: TextRef) -> Result<(), String> {
    if state::with(|state| state.undelivered.is_empty()) {
        return Ok(());
    }
    let db = ctx.db();
    let awaits = |name: &TextRef| state::with(|state| state.awaits_replicas(db, name.bytes(), owner.bytes()));
    match names.into_iter().find(awaits) {
        None => Ok(()),
        Some(name) => Err(format!(
            "ERR another request of this owner for '{}' is being confirmed by replicas: repeat it later, or with WAIT",
            show_start(name.bytes())
        )),
    }
}

/// Makes sure that the timer fires in time for the ties, for a session that must ask for its events from now on, and for one
/// that is to hear of a shorter lease.
pub fn wake_for_ties(ctx: Ctx) {
    let (due, is_ending) = state::with(|state| {
        let due = [state.ties.next_due(), state.sessions.first_silence()];
        (due.into_iter().flatten().min(), state.owed.is_ending())
    });
    if let Some(due) = due {
        timer::wake(ctx, Timer::Work, due);
    }
    if is_ending {
        timer::wake_for_replies(ctx);
    }
}

/// Tells the session that holds this lock, if it asked for that (`CONTENTION`), that somebody wants it, and cannot have it.
pub fn tell_contended(ctx: Ctx, db: i32, name: &[u8]) {
    if state::with(|state| state.contended(db, name)) {
        timer::wake_for_replies(ctx);
    }
}

/// The same of locks that were granted or renewed, if somebody waits for them by now. To be called once that was answered:
/// nobody hears of others before he knows of his own hold.
pub fn tell_if_contended<'a>(ctx: Ctx, db: i32, names: impl IntoIterator<Item = &'a [u8]>) {
    let is_contended = |name: &&[u8]| state::with(|state| state.is_contended(db, name));
    names.into_iter().filter(is_contended).for_each(|name| tell_contended(ctx, db, name));
}

/// Records the loss of tied holds.
fn lost(ctx: Ctx, ties: impl IntoIterator<Item = Tie>, why: Why, now: Now) {
    let mut ties = ties.into_iter().peekable();
    if ties.peek().is_some() {
        state::with(|state| ties.for_each(|tie| tell_lost(state, &tie, why, now)));
        timer::wake_for_replies(ctx);
    }
}

/// Reports that a tied hold is lost, for the given reason unless its lease has run out, and counts it if another command
/// ended it.
pub fn tell_lost(state: &mut State, tie: &Tie, why: Why, now: Now) {
    let why = if tie.end().has_passed(now.millis()) { Why::Expired } else { why };
    state.lost(tie, why);
    if why == Why::Changed {
        count(|it| &mut it.changed);
    }
}

/// Ends the hold of `owner`, who has one and gives it back. The caller serves the waiters.
pub fn end_hold(lock: &mut Lock, owner: TextRef) {
    let waiters = waiters(lock);
    lock.remove(owner, waiters);
    let (db, name, owner) = (lock.db(), lock.name().bytes(), owner.bytes());
    state::with(|state| state.ties.untie(db, name, owner));
}

/// The time at which the server calls the module, for whatever reason. If the server's clock has stepped since the last
/// call, the deadlines of tied holds go along; their keys follow in this turn, each before anything is judged by it.
pub fn begin(ctx: Ctx) -> Now {
    let now = Now::read();
    if !state::with(|state| state.has_stepped(now)) {
        return now;
    }
    timer::restart(ctx);
    Now::read()
}

/// Lets the keys of tied holds follow a step of the clock. Returns whether all have.
pub fn follow_clock(ctx: Ctx, now: Now, slice: &Slice) -> bool {
    while !slice.is_over() {
        let Some(id) = state::with(|state| state.ties.next_lagging()) else { return true };
        follow(ctx, id, now);
    }
    state::with(|state| !state.ties.any_lags())
}

/// Lets the key of a tied hold follow a step of the clock. If it has expired meanwhile, it is written anew. What others
/// have just touched stays as they left it.
fn follow(ctx: Ctx, id: TieId, now: Now) {
    let Some((tie, by)) = state::with(|state| state.ties.follows(id)) else { return };
    let key = tie.key();
    // Before the key is opened: what finds that out is a command, which may free what an open key points to.
    let is_served = ctx.in_db(key.db, |ctx| serves(ctx, &Text::new(&key.name)));
    let may_be_replaced = state::with(|state| state.sweep.is_to_pass(key.db, id));
    ctx.in_db(key.db, |ctx| {
        let (name, owner) = (Text::new(&key.name), Text::new(&tie.owner));
        let Ok(mut lock) = Lock::look(ctx, name.as_text(), owner.as_text(), now.millis()) else { return };
        let limit = lock.limit().map_or(tie.limit, |limit| limit.min(tie.limit));
        let has_room = limit.allows(lock.count().saturating_add(1));
        match lock.own() {
            Some(own) if own.token == Some(tie.token) => {
                let deadline = own.deadline.stepped(by);
                lock.update(owner.as_text(), &own, &Hold { deadline, ..own });
            }
            None if has_room && !may_be_replaced && !tie.end().has_passed(now.millis()) && is_served => {
                let hold = Hold { holds: tie.holds, token: Some(tie.token), deadline: tie.deadline() };
                lock.grant(owner.as_text(), &hold, limit);
            }
            _ => {}
        }
    });
    // Those who wait look at it again when it ends now.
    state::with(|state| {
        if state.is_contended(key.db, &key.name) {
            state.agenda.note(key, Change::Freed);
        }
    });
}

/// Whether this node of a cluster serves a key of the selected database.
fn serves(ctx: Ctx, name: &Text) -> bool {
    !listeners::in_cluster() || ctx.serves(name)
}

/// Ends what is over of a lock of the selected database, even if the server has just seen it and the turn has not come
/// in which it is dealt with: holds that were tied to connections that have ended, and grants that have to be taken
/// back. What a step of the clock would have ended goes on. To be called before anything is judged by the lock.
pub fn end_broken(ctx: Ctx, name: TextRef, now: Now) {
    let (lags, may_have_broken) = state::with(|state| (state.ties.any_lags(), state.may_have_broken()));
    if !(lags || may_have_broken) {
        return;
    }
    let (db, bytes) = (ctx.db(), name.bytes());
    if lags {
        let lagging = state::with(|state| state.ties.lagging_of(db, bytes));
        lagging.into_iter().for_each(|id| follow(ctx, id, now));
    }
    if !may_have_broken {
        return;
    }
    let (revoked, broken) = state::with(|state| (state.take_revoked(db, bytes), state.ties.take_broken(db, bytes)));
    revoked.iter().for_each(|it| revoke(ctx, it, now));
    broken.iter().for_each(|tie| release_tied(ctx, tie, now));
}

/// Revokes grants that nobody was told of. Those who wait are served later.
pub fn revoke_undelivered(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(revoked) = state::with(|state| state.undelivered.next_revoked()) else { break };
        revoke(ctx, &revoked, now);
    }
}

/// Lowers the count of a hold by what was revoked, or ends it, if it is still there under its token.
fn revoke(ctx: Ctx, revoked: &Revocation, now: Now) {
    ctx.in_db(revoked.key.db, |ctx| {
        let (name, owner) = (Text::new(&revoked.key.name), Text::new(&revoked.owner));
        let Ok(mut lock) = Lock::look(ctx, name.as_text(), owner.as_text(), now.millis()) else { return };
        let Some(held) = lock.held().filter(|held| held.token == Some(revoked.token)) else { return };
        match held.holds.saturating_sub(revoked.undo) {
            0 => end_hold(&mut lock, owner.as_text()),
            left => lower(&mut lock, owner.as_text(), left),
        }
    });
    state::with(|state| {
        if state.queue.waits(&revoked.owner) {
            state.agenda.note_owner(revoked.key.clone(), revoked.owner.clone());
        }
        state.agenda.note(revoked.key.clone(), Change::Freed);
    });
    timer::wake(ctx, Timer::Work, timer::THIS_TURN);
}

/// Whether the server would take a write now.
pub fn takes_writes(ctx: Ctx) -> bool {
    writes::are_possible(ctx) && !writes::are_refused(ctx)
}

/// Releases an ephemeral hold whose connection has ended, if it is still there. Those who wait are served later.
pub fn release_tied(ctx: Ctx, tie: &Tie, now: Now) {
    let released = ctx.in_db(tie.key().db, |ctx| {
        let (name, owner) = (Text::new(&tie.name), Text::new(&tie.owner));
        let Ok(mut lock) = Lock::look(ctx, name.as_text(), owner.as_text(), now.millis()) else { return false };
        let is_held = lock.held().is_some_and(|held| held.token == Some(tie.token));
        if is_held {
            end_hold(&mut lock, owner.as_text());
        }
        is_held
    });
    if released {
        count(|it| &mut it.released_by_disconnect);
        state::with(|state| state.agenda.note(tie.key(), Change::Freed));
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
}

/// Ends the holds of a lock whose lease has run out. Returns whether there were any.
pub fn end_expired(lock: &mut Lock, now: Now) -> bool {
    let expired = lock.purge(now.millis());
    let (db, name) = (lock.db(), lock.name().bytes());
    let ties = with_ties(|state| expired.iter().filter_map(|owner| state.ties.untie(db, name, owner)).collect());
    lost(lock.ctx(), ties.unwrap_or_else(Vec::new), Why::Expired, now);
    add(|it| &mut it.expired, expired.len() as u64);
    !expired.is_empty()
}

/// Breaks a lock: ends all its holds. Returns how many there were. The caller serves the waiters.
pub fn end_all(lock: &mut Lock, now: Now) -> usize {
    let holders = lock.count();
    if holders > 0 {
        lock.clear(waiters(lock));
        let ties = with_ties(|state| state.ties.untie_all(lock.db(), lock.name().bytes()));
        lost(lock.ctx(), ties.unwrap_or_default(), Why::Forced, now);
    }
    holders
}

/// Lends the state, but only if any hold is tied.
fn with_ties<R>(work: impl FnOnce(&mut State) -> R) -> Option<R> {
    state::with(|state| (!state.ties.is_empty()).then(|| work(state)))
}

fn waiters(lock: &Lock) -> Waiters {
    let contended = state::with(|state| state.is_contended(lock.db(), lock.name().bytes()));
    if contended { Waiters::Some } else { Waiters::None }
}

/// Opens several locks of the selected database, as `owner` sees them.
///
/// # Errors
///
/// The reply that says that one of the keys does not hold a lock, or that there is too much to read.
pub fn look_all<'a>(ctx: Ctx<'a>, names: &[TextRef<'a>], owner: TextRef, now: Now) -> Result<Vec<Lock<'a>>, String> {
    // Of all of them before any is opened: to end what is over, commands may be run.
    names.iter().for_each(|name| end_broken(ctx, *name, now));
    let look = |&name: &TextRef<'a>| {
        let lock = Lock::look_one_of(ctx, name, owner, now.millis(), names.len());
        lock.map_err(|why| match why {
            NotRead::NotALock => WRONGTYPE.into(),
            NotRead::TooMuch => too_much(name.bytes(), names.len()),
        })
    };
    names.iter().map(look).collect()
}

/// The message for a request whose locks can't be read in one step, because this one of so many has too many holders.
pub fn too_much(name: &[u8], locks: usize) -> String {
    let (name, each, most) = (show_start(name), most_holders_each(locks), config::MAX_HOLDERS.get());
    format!(
        "ERR too many holders of '{name}' to read {locks} locks in one request: of those that other clients have written, \
         each may have {each}, so that all together have no more than one lock may have (holdfast.max-holders is {most})"
    )
}
