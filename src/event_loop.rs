//! The event loop: where each call of the server enters the module. It borrows the state once, hands it down to the part that does
//! the work, and ends in `schedule`, which sets the timers for what is to be done next.
//!
//! The order of the server's calls within one turn:
//!
//! | | Redis 7.0 | later servers |
//! |---|---|---|
//! | it has slept | `TurnBegins` | the same |
//! | commands run; keys are touched | [`key_touched`] | the same, and [`after_touch`] in the step of the command |
//! | timers are due | [`tick`], [`ask_replicas`] | the same |
//! | the turn ends | `TurnEnds`, which ends blocks; *then* commands behind them run | commands behind blocks run; *then* `TurnEnds` |
//! | the cron, ten times a second | `Cron`, among the timers | the same |
//!
//! So waiters get their answers in `TurnEnds` before 7.2 ([`events::turn_end_precedes_unblock`]) and in [`tick`] since
//! then: in each case at a point where nothing that the server itself does can come between.

use crate::keyspace::{Lock, effects, holder_cache, listeners};
use crate::lock::serve::Change;
use crate::lock::{Deadline, LockKey, Millis, earliest, internal_errors};
use crate::notices::{self, Notice};
use crate::server::callbacks::{Event, Ticket, Touch};
use crate::server::clock::{Now, Slice};
use crate::server::ctx::Role;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, MainThread, Text, events, writes};
use crate::serving::{LOOK_AGAIN, serve};
use crate::state::{self, BindingId, Expiry, State};
use crate::stats::add;
use crate::{confirming, holds, replies, stats, waiting, watchdog};
use std::cell::LazyCell;

/// Whether the server would have refused a write when it was last asked; `false` while there is none to make.
static REFUSED: MainThread<bool> = MainThread::new();

/// Whether [`after_touch`] is to come, in this step of a command.
static REQUESTED: MainThread<bool> = MainThread::new();

/// Whether this call of the server has parts that are still to come: see [`in_parts`].
static IN_PARTS: MainThread<bool> = MainThread::new();

/// Which kind of work the next turn begins with.
static NEXT: MainThread<usize> = MainThread::new();

/// Lends the state to a call of the server's, and sets the timers for what is to be done next. `None` if it is lent already:
/// the server calls the module while that is at work.
fn borrow<R>(ctx: Ctx, work: impl FnOnce(&mut State, Now) -> R) -> Option<R> {
    state::try_with(|state| {
        let now = holds::begin(state, ctx);
        let result = work(state, now);
        notices::apply(state, ctx);
        schedule(state, ctx, || now.millis());
        result
    })
}

/// Runs a command.
///
/// # Errors
///
/// That of the command; or the reply for another module that runs it while this one is at work: from within the notification
/// of a write.
pub fn run<R>(ctx: Ctx, command: impl FnOnce(&mut State, Now) -> Result<R, String>) -> Result<R, String> {
    const AT_WORK: &str = "ERR commands of this module can't be run from within a notification about what it writes";
    borrow(ctx, command).unwrap_or_else(|| Err(AT_WORK.into()))
}

/// Does the work for any other call. None of those comes while the module is at work: what may come then is a [`Notice`].
fn enter(ctx: Ctx, work: impl FnOnce(&mut State, Now)) {
    if borrow(ctx, work).is_none() {
        internal_errors::report("the server called the module while it was at work");
    }
}

/// Another command touched a key, or it expired. Writes nothing.
pub fn key_touched(ctx: Ctx, touch: Touch, name: &[u8]) {
    if effects::is_own_notification(name) {
        return;
    }
    let db = ctx.db();
    let known = holder_cache::forget_if_known(db, name);
    let is_noted = state::try_with(|state| {
        let is_bound = state.bindings.is_bound(db, name);
        if touch == Touch::Expired || is_bound {
            // Before anything is noted: a step that ends it may be undone by another one before the next call. And what
            // a client writes follows only the steps that come later.
            holds::begin(state, ctx);
        }
        known.is_some() || is_bound || state.is_contended(db, name)
    });
    if is_noted == Some(false) || ctx.flags().role() != Role::Master {
        return;
    }
    // A key that is not cached has at most one holder.
    let notice = Notice::Touched { key: LockKey::new(db, name), touch, holders: known.unwrap_or(1) };
    // An expiry belongs to no command, so there is no command's step to follow it up in; and it may come late.
    if notices::receive(notice) && (touch != Touch::Changed || !is_requested(ctx)) {
        state::with(|state| schedule(state, ctx, read_millis));
    }
}

/// A blocked client is to be answered.
pub fn answer(ctx: Ctx, ticket: Ticket) {
    enter(ctx, |state, now| replies::answer(state, ctx, ticket, now));
}

/// A blocked client is gone. Writes nothing.
pub fn gone(ctx: Ctx, ticket: Ticket) {
    receive(ctx, Notice::Gone(ticket));
}

fn receive(ctx: Ctx, notice: Notice) {
    if notices::receive(notice) {
        state::with(|state| schedule(state, ctx, read_millis));
    }
}

/// Sees to it that [`after_touch`] comes, once for all keys that a command touches. `false` where the server can't do it.
fn is_requested(ctx: Ctx) -> bool {
    let requested = REQUESTED.with(|requested| *requested) || events::request_after_touch(ctx);
    REQUESTED.with(|it| *it = requested);
    requested
}

/// The command that touched keys has done its work: serves the waiters within the same step.
pub fn after_touch(ctx: Ctx) {
    REQUESTED.with(|requested| *requested = false);
    enter(ctx, |state, now| {
        if !state.bindings.any_lags() && writes::are_possible(ctx) && !is_refused(state, ctx, now) {
            follow_up(state, ctx, now, &Slice::of_command());
        }
    });
}

/// The time has come for some of the work.
pub fn tick(ctx: Ctx) {
    in_parts(|| {
        enter(ctx, |state, now| work_for_a_turn(state, ctx, now));
        if !events::turn_end_precedes_unblock() {
            replies::send_answers(ctx);
        }
    });
    state::with(|state| schedule(state, ctx, read_millis));
}

/// Makes calls that would each end in [`schedule`] on their own: the caller does that, once. (The answers that are sent are calls, too:
/// the server calls [`answer`] for each.)
fn in_parts(calls: impl FnOnce()) {
    IN_PARTS.with(|in_parts| *in_parts = true);
    calls();
    IN_PARTS.with(|in_parts| *in_parts = false);
}

fn work_for_a_turn(state: &mut State, ctx: Ctx, now: Now) {
    let turn = Slice::of_turn();
    if state.bindings.any_lags() && holds::takes_writes(ctx) {
        holds::follow_clock(state, ctx, now, &turn.piece());
    }
    waiting::time_out(state, now, &turn.piece());
    watchdog::unbind_retired(state, &turn.piece());
    waiting::refuse_undecided(state, now, &turn.piece());
    waiting::leave_ended(state, &turn.piece());
    confirming::settle(state, ctx, now, &turn.piece());
    holder_cache::with(|cache| cache.discarded.free(&turn.piece()));
    state.discarded.free(&turn.piece());
    if ctx.flags().role() == Role::Replica {
        state.forget_changes();
    } else if !writes::are_possible(ctx) || is_refused(state, ctx, now) {
        // Holds that are over, or that others have ended, are reported all the same.
        watchdog::tell_over(state, ctx, now, &turn.piece());
        tell_ended(state, ctx, now, &turn);
    } else {
        work(state, ctx, now, &turn);
    }
    // What is left of the turn is for those whose time is over: there may be tens of thousands.
    waiting::time_out(state, now, &turn);
}

/// Where nothing may be written: reports the bound holds that others have ended. Not while any still has to follow a step
/// of the clock, since what that let expire looks the same; nor while the data is being loaded.
fn tell_ended(state: &mut State, ctx: Ctx, now: Now, turn: &Slice) {
    if ctx.flags().loading() || state.bindings.any_lags() {
        return;
    }
    sweep(state, &turn.piece());
    watchdog::verify_doubtful(state, ctx, now, &turn.piece());
}

/// One kind of work, and which share of the turn it gets.
type Work = (fn(&Slice) -> Slice, fn(&mut State, Ctx, Now, &Slice));

/// The order of the work: first what keeps promises to holders, then what frees locks, then what concerns those who
/// wait for them.
const ORDER: [Work; 10] = [
    // Renewals come before anything that checks whether a lease has run out.
    (Slice::piece, watchdog::renew_due),
    (Slice::piece, waiting::end_silent),
    // Everything that frees locks: grants that were never delivered or that too few replicas confirmed, and holds of
    // ended connections.
    (Slice::piece, holds::revoke_undelivered),
    (Slice::piece, watchdog::release_ended),
    // Leases that have run out.
    (Slice::piece, |state, _, now, slice| note_due_leases(state, now, slice)),
    (Slice::piece, purge_overdue),
    // Changes that other clients made, and then serving.
    (Slice::piece, |state, _, _, slice| sweep(state, slice)),
    (Slice::piece, tell_all_expired),
    (Slice::piece, watchdog::verify_doubtful),
    (Slice::of_crowds, serve),
];

/// Does all kinds of work, or as many as there is time for; the next turn then begins with those that are left.
///
/// A share is enough for what there is to do, but the last thing done in it may take many times as long: reading anew a
/// lock with thousands of holders that another client has written.
fn work(state: &mut State, ctx: Ctx, now: Now, turn: &Slice) {
    if !holds::follow_clock(state, ctx, now, &turn.piece()) {
        return;
    }
    let first = earliest([state.queue.first_look(), state.sessions.first_silence()]);
    if state.stalls.put_off(first, now.millis()) {
        return;
    }
    let first = NEXT.with(std::mem::take);
    let mut was_used = true;
    for (place, (share, work)) in ORDER.iter().enumerate().cycle().skip(first).take(ORDER.len()) {
        if was_used && turn.is_over() {
            NEXT.with(|next| *next = place);
            break;
        }
        let slice = share(turn);
        work(state, ctx, now, &slice);
        notices::apply(state, ctx);
        was_used = slice.was_used();
    }
}

/// Follows up changes that others made, and serves the waiters.
fn follow_up(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    tell_all_expired(state, ctx, now, slice);
    watchdog::verify_doubtful(state, ctx, now, &slice.piece());
    serve(state, ctx, now, slice);
}

/// Reports holds that have ended by themselves.
fn tell_all_expired(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some((key, expiry)) = state.expired.pop_front() else { break };
        report_expired(ctx, &key, expiry, now);
    }
}

/// Reports holds that have ended with a key, or with fields of it.
fn report_expired(ctx: Ctx, key: &LockKey, expiry: Expiry, now: Now) {
    ctx.in_db(key.db, |ctx| {
        let name = Text::new(&key.name);
        let ended = match expiry {
            Expiry::Key { holders } => holders,
            Expiry::Fields { holders } => holders.saturating_sub(holders_left(ctx, key, &name, now).unwrap_or(holders)),
        };
        add(|it| &mut it.expired, ended as u64);
        (0..ended).for_each(|_| Lock::notify_expired(ctx, &name));
    });
}

/// How many hold a lock, including those whose lease has run out but who have not been removed yet; `None` if it is not
/// a lock.
fn holders_left(ctx: Ctx, key: &LockKey, name: &Text, now: Now) -> Option<usize> {
    let lock = Lock::look_as_nobody(ctx, name.as_text(), now.millis()).ok()?;
    holder_cache::with(|cache| cache.holders(key.db, &key.name)).or(Some(lock.count()))
}

/// Notes the locks that are due for a look because a lease has run out, or because this node did not serve their slot.
fn note_due_leases(state: &mut State, now: Now, slice: &Slice) {
    // While the slot was not served, a holder that waits for its own lock may have been due, and was not granted it.
    let change = if listeners::in_cluster() { Change::Foreign } else { Change::Freed };
    while !slice.is_over() {
        let Some(key) = state.queue.take_look(now.millis()) else { break };
        state.agenda.note(key, change);
    }
}

/// Removes holders whose lease has run out although no request waits for their lock.
fn purge_overdue(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(key) = holder_cache::with(|cache| cache.overdue(now.millis())) else { break };
        purge_key(state, ctx, &key, now);
    }
}

fn purge_key(state: &mut State, ctx: Ctx, key: &LockKey, now: Now) {
    let lock = |ctx| {
        let name = Text::new(&key.name);
        let mut lock = Lock::look_as_nobody(ctx, name.as_text(), now.millis()).ok()?;
        Some((holds::end_expired(state, &mut lock, now), lock.count(), lock.expiry()))
    };
    let seen = ctx.in_db(key.db, lock);
    state.agenda.note(key.clone(), Change::Freed);
    holder_cache::with(|cache| match seen {
        Some((true, 1.., _)) => {}
        // Kept, since requests that wait would have it read again at once.
        Some((false, 1.., Deadline::Never)) => cache.forget_due(key.db, &key.name),
        // Nothing is due here any more, or it is no lock.
        _ => cache.forget(key.db, &key.name),
    });
}

/// Continues looking at everything anew after a data set was replaced.
fn sweep(state: &mut State, slice: &Slice) {
    while !state.sweep.is_over() && !slice.is_over() {
        if let Some((from, end)) = state.sweep.waiters() {
            let next = state.queue.from(from).next().filter(|waiter| waiter.id < end);
            let (id, keys) = (next.map(|it| it.id), next.map(|it| it.keys.clone()));
            for key in keys.iter().flat_map(|keys| keys.iter()).filter(|key| state.sweep.concerns(key.db)) {
                state.agenda.note(key.clone(), Change::Foreign);
            }
            state.sweep.passed_waiter(id);
        }
        if let Some((from, end)) = state.sweep.bindings() {
            let id = state.bindings.from(from, end);
            if let Some(key) = id.and_then(|id| state.bindings.get(id)).map(state::Binding::key)
                && state.sweep.concerns(key.db)
            {
                id.into_iter().for_each(|id| state.bindings.doubt_one(id));
            }
            state.sweep.passed_binding(id);
        }
    }
}

/// Asks the replicas to confirm what was written, in a step of its own.
pub fn ask_replicas(ctx: Ctx) {
    enter(ctx, |state, now| {
        if writes::are_possible(ctx) {
            confirming::ask_replicas(state, ctx, now);
        }
    });
}

/// The event loop is about to send replies and to sleep. Writes nothing to the keyspace.
///
/// Answering here rather than from the timer costs least, and nothing that the server itself does comes between. It is
/// possible only where the server then ends the block before the next command can interfere.
fn turn_ends(ctx: Ctx) {
    log_internal_errors(ctx);
    if events::turn_end_precedes_unblock() {
        in_parts(|| replies::send_answers(ctx));
    }
    REQUESTED.with(|requested| *requested = false);
    state::with(|state| {
        if confirming::has_news(state, ctx) {
            timer::wake(ctx, Timer::Work, timer::THIS_TURN);
        }
        schedule(state, ctx, read_millis);
    });
}

/// Logs each kind of internal error once. (The count is in `INFO holdfast`.)
fn log_internal_errors(ctx: Ctx) {
    while let Some(kind) = internal_errors::next_to_log() {
        ctx.warn(&format!(
            "holdfast: internal error: {kind}. Please report it. It is logged once, and counted in INFO"
        ));
    }
}

/// Whether the module may write of its own accord, as far as was known when the server was last asked.
fn may_write(ctx: Ctx) -> bool {
    writes::are_possible(ctx) && !REFUSED.with(|refused| *refused)
}

/// Asks the server whether it would refuse a write: then the module writes nothing of its own accord, either. Nothing is
/// asked if there is nothing to write.
fn is_refused(state: &State, ctx: Ctx, now: Now) -> bool {
    let overdue = holder_cache::with(|cache| cache.first_due());
    let next = [state.next_work(), state.sessions.first_silence(), overdue];
    let has_work = !state.confirmations.is_empty() || next.into_iter().flatten().any(|at| at <= now.millis());
    let is_refused = has_work && writes::are_refused(ctx);
    REFUSED.with(|refused| *refused = is_refused);
    is_refused
}

/// Sets the timers for whatever comes next. Each call of the server's ends with this, so none of the work has to remember
/// to wake a timer. `now` is the time, or one a little earlier.
fn schedule(state: &mut State, ctx: Ctx, now: impl FnOnce() -> Millis) {
    if REQUESTED.with(|comes| *comes) || IN_PARTS.with(|comes| *comes) {
        return; // More of this step is to come, which ends with this.
    }
    // Read only if something is to be scheduled: mostly nothing is, and reading the clock costs as much as the rest.
    let now = LazyCell::new(now);
    match (!state.confirmations.is_empty()).then(|| state.confirmations.next_ask(*now)).flatten() {
        Some(at) if at > *now || writes::are_possible(ctx) => timer::wake(ctx, Timer::Ask, at),
        Some(_) => timer::wake(ctx, Timer::Ask, now.saturating_add(LOOK_AGAIN)),
        None => timer::stop(ctx, Timer::Ask),
    }
    if state.pending.is_ending() {
        timer::wake_for_replies(ctx);
    }
    if timer::is_due(Timer::Work) {
        return; // It will set itself anew.
    }
    let (overdue, is_clean) = holder_cache::with(|cache| (cache.first_due(), cache.discarded.is_empty()));
    let overdue = overdue.filter(|at| *at < *now);
    let at_once = (!is_clean).then_some(timer::THIS_TURN);
    // A replica ends no session.
    let silence = state.sessions.first_silence().filter(|at| *at > *now || ctx.flags().role() == Role::Master);
    let confirming = (!state.confirmations.is_empty()).then(|| now.saturating_add(1));
    let work = earliest([state.next_work(), confirming, silence, overdue, at_once]);
    let is_due = |at: &Millis| *at <= now.saturating_add(1);
    if !work.as_ref().is_some_and(is_due) {
        // Whether a write is refused is asked again when there is one, which may be much later.
        REFUSED.with(|refused| *refused = false);
    }
    let work = work.map(|at| match at {
        _ if !is_due(&at) => at,
        _ if !may_go_on(state, ctx) => now.saturating_add(LOOK_AGAIN),
        timer::THIS_TURN => timer::THIS_TURN,
        // What is due and could not be done is tried again, but not at once.
        _ => now.saturating_add(1),
    });
    // Even while nothing may be written, a wait can time out.
    match earliest([work, state.next_timeout()]) {
        Some(next) if next <= *now => timer::wake(ctx, Timer::Work, timer::THIS_TURN),
        Some(next) => timer::wake(ctx, Timer::Work, next),
        None => timer::stop(ctx, Timer::Work),
    }
}

fn read_millis() -> Millis {
    Now::read().millis()
}

/// Whether work that is due can be done now.
fn may_go_on(state: &State, ctx: Ctx) -> bool {
    may_write(ctx) || ctx.flags().role() == Role::Replica && state.has_news_to_tell()
}

/// Something happened to the server.
pub fn event(ctx: Ctx, event: Event) {
    match event {
        Event::ClientGone(client) => receive(ctx, Notice::ConnectionEnded(client)),
        Event::TurnEnds => turn_ends(ctx),
        Event::TurnBegins => state::with(|state| state.stalls.next_turn()),
        Event::Flushed(db) => replaced(ctx, db),
        Event::Swapped(one, other) => swapped(ctx, one, other),
        Event::RoleChanged => role_changed(ctx),
        Event::DataReplaced => {
            listeners::assume_followers();
            replaced(ctx, None);
        }
        Event::SlotsMoved => replaced(ctx, None),
        Event::ListenersMayHaveChanged => listeners::assume_followers(),
        Event::ModuleLoaded => listeners::module_loaded(),
        Event::ModuleUnloaded => listeners::module_unloaded(),
        Event::Cron => {
            log_internal_errors(ctx);
            replies::send_put_off(&Slice::of_replies());
            listeners::recheck(ctx);
            timer::rescue(ctx);
            enter(ctx, |_, _| ());
        }
    }
}

/// The contents of one database, or of all, are gone or were replaced.
fn replaced(ctx: Ctx, db: Option<i32>) {
    enter(ctx, |state, _| {
        let bindings = state.bindings.next_id();
        look_anew(state, ctx, db, bindings);
    });
}

/// Two databases were swapped. Bindings go along with their locks, so none is uncertain, unless a pass is under way, whose
/// database has another number now. Those who wait stay.
fn swapped(ctx: Ctx, one: i32, other: i32) {
    enter(ctx, |state, _| {
        state.bindings.swap(one, other);
        state.undelivered.swap(one, other);
        let bindings = if state.sweep.is_over() { BindingId::FIRST } else { state.bindings.next_id() };
        look_anew(state, ctx, Some(one), bindings);
        look_anew(state, ctx, Some(other), bindings);
    });
}

/// All requests for locks of one database, or of all, have to be looked at anew, and so have the bindings there before `bindings`.
fn look_anew(state: &mut State, ctx: Ctx, db: Option<i32>, bindings: BindingId) {
    holder_cache::with(holder_cache::HolderCache::clear);
    let is_replica = ctx.flags().role() == Role::Replica;
    if !(is_replica || state.queue.is_empty() && state.bindings.is_empty()) {
        state.sweep.begin(db, (state.queue.end(), bindings));
    }
}

/// This server became a master or a replica: pending work belongs to another server now, or begins anew.
fn role_changed(ctx: Ctx) {
    listeners::assume_followers();
    enter(ctx, |state, _| {
        state.forget_work();
        let bindings = state.bindings.next_id();
        look_anew(state, ctx, None, bindings);
    });
}

/// Forgets everything; the module is about to be unloaded.
pub fn stop(ctx: Ctx) {
    timer::stop(ctx, Timer::Work);
    timer::stop(ctx, Timer::Ask);
    state::with(|state| *state = State::default());
    notices::clear();
    holder_cache::with(|cache| *cache = holder_cache::HolderCache::default());
    stats::clear();
    internal_errors::forget();
}
