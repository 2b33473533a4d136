//! How holds begin and end: the one place that grants, and the one that takes away.

use crate::config;
use crate::keyspace::effects::Waiters;
use crate::keyspace::{self, Held, Lock, Name, NotRead, listeners, most_holders_each};
use crate::lock::serve::Change;
use crate::lock::{Deadline, Decision, Hold, Limit, Raise, Token};
use crate::server::clock::{Now, Slice};
use crate::server::text::show_start;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text, TextRef, events, writes};
use crate::state::owed::{OnBehalf, Ticket};
use crate::state::ties::Before;
use crate::state::{
    self, Grant, GrantId, GrantedHold, NewTie, OwedHold, State, TakeBack, Terms, Tie, TieId, Tying, Why,
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
    let together = (locks.len() > 1).then_some(token);
    for (lock, decision) in locks.iter_mut().zip(decisions) {
        match (decision, lock.own()) {
            (Decision::Grant(hold, limit), _) => {
                lock.grant(grantee.owner.text(), &Hold { token: Some(token), ..*hold }, *limit);
                let (db, name, owner) = (lock.db(), lock.name().bytes(), grantee.owner);
                let left = state::with(|state| {
                    state.queue.hold_begins(db, name, || owner.kept());
                    // A tie that is left here belongs to a hold that ended behind the module's back.
                    state.ties.untie(db, name, owner.bytes())
                });
                lost(lock.ctx(), left, Why::Changed, now);
                bind_now(lock, (hold.deadline, token), together, grantee, now);
            }
            (Decision::Reenter(hold), Some(own)) => {
                change(lock, grantee.owner.text(), &own, &Hold { token: Some(token), ..*hold }, now);
                bind_now(lock, (hold.deadline, token), together, grantee, now);
            }
            _ => {}
        }
    }
    if together.is_some() {
        note_group(locks, grantee.owner, token);
    }
    token
}

/// Notes that locks which have been tied were granted together.
pub fn note_group(locks: &[Lock], owner: &Name, token: Token) {
    let keys = locks.iter().map(Lock::lock_key).collect();
    state::with(|state| state.ties.granted_together(&owner.kept(), token, keys));
}

/// Changes a hold: its count, its token, its deadline. Its ties follow.
pub fn change(lock: &mut Lock, owner: TextRef, own: &Hold, new: &Hold, now: Now) {
    lock.update(owner, own, new);
    let Some(token) = new.token else { return };
    let hold = (lock.db(), lock.name().bytes(), owner.bytes());
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

/// Whether the hold that `owner` has, under the token `held`, is the one that a request means: any if it names no token,
/// else the one that it names, also if `FENCE` has raised that since.
pub fn is_meant(lock: &Lock, owner: TextRef, held: Option<Token>, named: Option<Token>) -> bool {
    match (held, named) {
        (_, None) => true,
        (None, _) => false,
        (Some(held), Some(named)) => {
            let hold = (lock.db(), lock.name().bytes(), owner.bytes());
            held == named || state::with(|state| state.raised.is_meant(hold, held, named))
        }
    }
}

/// Notes that the token of a hold is `token` now, if that is another.
pub fn note_raise(lock: &Lock, owner: TextRef, before: Token, token: Token) {
    if token > before {
        state::with(|state| state.raised.raise(&lock.lock_key(), owner.bytes(), before, token));
    }
}

/// The token under which a hold began that has this one now.
pub fn first_token(lock: &Lock, owner: TextRef, token: Token) -> Token {
    state::with(|state| state.raised.first(lock.db(), lock.name().bytes(), owner.bytes(), token))
}

/// Ties a hold whose request is being answered, unless its answer waits for replicas.
pub fn bind_now(lock: &Lock, of: (Deadline, Token), together: Option<Token>, grantee: Grantee, now: Now) {
    if grantee.terms.replicas == 0 {
        bind(lock, of, together, grantee, now);
    }
}

/// Ties a hold whose request is answered with success: to a session always, to another connection if it asks for that.
/// `together` is the token of the request if that may have been granted several locks.
pub fn bind(lock: &Lock, (deadline, token): (Deadline, Token), together: Option<Token>, grantee: Grantee, now: Now) {
    let Terms { demand, tying, replicas } = *grantee.terms;
    if tying == Tying::NONE && grantee.on_behalf == OnBehalf::Itself {
        return;
    }
    events::watch_keys(lock.ctx());
    let tie = NewTie {
        client: grantee.client,
        on_behalf: grantee.on_behalf,
        tying,
        key: lock.lock_key(),
        owner: grantee.owner.kept(),
        token,
        lease: demand.lease,
        replicas,
        deadline,
        holds: lock.held().map_or(1, |held| held.holds),
        limit: lock.limit().unwrap_or(Limit::MUTEX),
        together,
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

/// What is taken back of a request that was granted, if its answer reaches nobody.
pub fn take_back_of(decisions: &[Decision], raise: Raise) -> TakeBack {
    match (decisions.first(), raise) {
        (Some(Decision::Reenter(_)), Raise::To(_)) => TakeBack::Nothing,
        (Some(Decision::Reenter(_)), _) => TakeBack::One,
        _ => TakeBack::Hold,
    }
}

/// The holds of a grant.
pub fn granted_holds(locks: &[Lock], decisions: &[Decision], token: Token) -> Vec<GrantedHold> {
    let granted = locks.iter().zip(decisions).filter_map(|(lock, decision)| match decision {
        Decision::Grant(hold, _) | Decision::Reenter(hold) => {
            Some(GrantedHold { name: lock.name().kept(), token, deadline: hold.deadline })
        }
        _ => None,
    });
    granted.collect()
}

/// Records that a grant or a renewal is in flight: until its answer is with the network, other requests of its owner
/// for its keys are refused, and it is taken back if the answer reaches nobody.
pub fn take_off(db: i32, grantee: Grantee, ticket: Ticket, (back, holds): (TakeBack, Vec<GrantedHold>)) -> GrantId {
    let Grantee { owner, client, on_behalf, .. } = grantee;
    state::with(|state| {
        let home = state.ties.home(db);
        state.in_flight.begin(Grant { home, owner: owner.kept(), client, on_behalf, ticket, back, holds })
    })
}

/// Refuses a request, which came over this connection, whose owner has another one for one of these locks of the selected
/// database in flight.
///
/// # Errors
///
/// The reply that says so.
pub fn one_at_a_time<'a>(
    ctx: Ctx,
    names: impl IntoIterator<Item = TextRef<'a>>,
    owner: TextRef,
    connection: Option<u64>,
) -> Result<(), String> {
    if state::with(|state| state.in_flight.is_empty()) {
        return Ok(());
    }
    let db = ctx.db();
    let is_in_flight =
        |name: &TextRef| state::with(|state| state.in_the_way((db, name.bytes(), owner.bytes()), connection).is_some());
    match names.into_iter().find(is_in_flight) {
        None => Ok(()),
        Some(name) => Err(format!(
            "ERR another request of this owner for '{}' is being confirmed; until then only LOCK.CANCEL, and \
             LOCK.RELEASE with ALL, are allowed",
            show_start(name.bytes())
        )),
    }
}

/// Makes sure that the timer fires in time for the ties, and for a session that is to hear of a shorter lease.
pub fn wake_for_ties(ctx: Ctx) {
    let (due, is_ending) = state::with(|state| (state.ties.next_due(), state.owed.is_ending()));
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
    state::with(|state| {
        state.queue.hold_ends(db, name, owner);
        state.ties.untie(db, name, owner)
    });
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
            None if has_room && !may_be_replaced && !tie.end().has_passed(now.millis()) && serves(ctx, &name) => {
                let hold = Hold { holds: tie.holds, token: Some(tie.token), deadline: tie.deadline() };
                lock.grant(owner.as_text(), &hold, limit);
                state::with(|state| state.queue.hold_begins(key.db, &key.name, || tie.owner.clone()));
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
    let (owed, broken) = state::with(|state| (state.take_owed(db, bytes), state.ties.take_broken(db, bytes)));
    owed.iter().for_each(|it| take_back(ctx, it, now));
    broken.iter().for_each(|tie| release_tied(ctx, tie, now));
}

/// Takes back what was granted to nobody. Those who wait are served later.
pub fn take_back_owed(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(owed) = state::with(|state| state.in_flight.next_owed()) else { break };
        take_back(ctx, &owed, now);
    }
}

/// Takes back a hold, or one hold less, if it is still there under its token.
fn take_back(ctx: Ctx, owed: &OwedHold, now: Now) {
    ctx.in_db(owed.key.db, |ctx| {
        let (name, owner) = (Text::new(&owed.key.name), Text::new(&owed.owner));
        let Ok(mut lock) = Lock::look(ctx, name.as_text(), owner.as_text(), now.millis()) else { return };
        let is_meant = |held: &Held| is_meant(&lock, owner.as_text(), held.token, Some(owed.token));
        let Some(held) = lock.held().filter(is_meant) else { return };
        if owed.back == TakeBack::One && held.holds > 1 {
            lower(&mut lock, owner.as_text(), held.holds.saturating_sub(1));
        } else {
            end_hold(&mut lock, owner.as_text());
        }
    });
    state::with(|state| state.agenda.note(owed.key.clone(), Change::Freed));
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
    state::with(|state| expired.iter().for_each(|owner| state.queue.hold_ends(db, name, owner)));
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
        state::with(|state| state.queue.held_by(&lock.lock_key(), []));
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
    let look = |&name: &TextRef<'a>| {
        end_broken(ctx, name, now);
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
