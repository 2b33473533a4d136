//! The event loop: every call of the server enters the module here. Each call borrows the state once, and hands it down
//! to the part that does the work. It ends in `schedule`, which sets the timers for the next work.
//!
//! The order of the server's calls within one event-loop iteration:
//!
//! | | Redis 7.0 | later servers |
//! |---|---|---|
//! | the event loop has slept | `IterationBegins` | the same |
//! | commands run; keys are touched | [`key_touched`] | the same, and [`after_touch`] within the command's execution |
//! | timers are due | [`tick`], [`ask_replicas`] | the same |
//! | the iteration ends | `IterationEnds`, then the server unblocks clients | the server unblocks clients, then `IterationEnds` |
//! | the cron, ten times a second | `Cron`, among the timers | the same |
//!
//! Blocked clients therefore get their replies in `IterationEnds` before Redis 7.2 ([`events::iteration_end_precedes_unblock`]),
//! and in [`tick`] since. At both points, the server does nothing of its own between the module's answer and the end of
//! the block. Once a client is unblocked, the server runs the commands that it has pipelined.
//!
//! A session that waits for its events is blocked on no key, and the server composes its reply only when it unblocks
//! clients. So the call that has an event for it unblocks it, without a timer, where servers can cope with that
//! ([`events::may_unblock_early`]).

use crate::keyspace::{Lock, effects, holder_cache, listeners};
use crate::lock::serve::Change;
use crate::lock::{Deadline, LockKey, Millis, earliest, internal_errors};
use crate::notices::{self, Notice};
use crate::server::callbacks::{Event, Ticket, Touch};
use crate::server::clock::{Now, Slice};
use crate::server::ctx::Role;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, MainThread, Text, events, writes};
use crate::serving::{RETRY_INTERVAL, serve};
use crate::state::{self, BindingId, Expiry, State};
use crate::stats::add;
use crate::{confirming, holds, replies, stats, waiting, watchdog};
use std::cell::LazyCell;

/// Whether the server would have refused a write when the module last asked. `false` if there is nothing to write.
static WRITE_REFUSED: MainThread<bool> = MainThread::new();

/// Whether [`after_touch`] is requested for the current command execution.
static REQUESTED: MainThread<bool> = MainThread::new();

/// Whether the module is inside [`in_parts`], whose caller sets the timers at its end.
static IN_PARTS: MainThread<bool> = MainThread::new();

/// Index in [`ORDER`] of the kind of work that the next event-loop iteration begins with.
static NEXT_KIND: MainThread<usize> = MainThread::new();

/// Lends the state to a call of the server, and then sets the timers for the next work. Returns `None` if the state is
/// already borrowed: the server called the module while it was at work.
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
/// The command's error. Or an error for another module that runs the command while this module is at work: from within
/// the notification of a write.
pub fn run<R>(ctx: Ctx, command: impl FnOnce(&mut State, Now) -> Result<R, String>) -> Result<R, String> {
    const AT_WORK: &str = "ERR commands of this module can't be run from within a notification about what it writes";
    borrow(ctx, command).unwrap_or_else(|| Err(AT_WORK.into()))
}

/// Does the work of any other call. The server makes none of these calls while the module is at work: what it reports
/// then is a [`Notice`].
fn enter(ctx: Ctx, work: impl FnOnce(&mut State, Now)) {
    if borrow(ctx, work).is_none() {
        internal_errors::report("the server called the module while it was at work");
    }
}

/// Notes that another command touched a key, or that the key expired. Writes nothing to the keyspace.
pub fn key_touched(ctx: Ctx, touch: Touch, name: &[u8]) {
    if effects::is_own_notification(name) {
        return;
    }
    let db = ctx.db();
    let known = holder_cache::forget_if_known(db, name);
    let is_noted = state::try_with(|state| {
        let is_bound = state.bindings.is_bound(db, name);
        if touch == Touch::Expired || is_bound {
            // Check for a clock step before anything is noted. A step that made the key expire may be reversed by
            // another step before the next call. And a hold that a client writes follows only later steps.
            holds::begin(state, ctx);
        }
        known.is_some() || is_bound || state.is_contended(db, name)
    });
    if is_noted == Some(false) || ctx.flags().role() != Role::Primary {
        return;
    }
    // A key that is not in the holder cache has at most one holder.
    let notice = Notice::Touched { key: LockKey::new(db, name), touch, holders: known.unwrap_or(1) };
    // An expiry is part of no command, so `after_touch` can't handle it. The server may also report it late.
    if notices::receive(notice) && (touch != Touch::Changed || !ensure_after_touch(ctx)) {
        state::with(|state| schedule(state, ctx, read_millis));
    }
}

/// Replies to a blocked client whose wait has ended.
pub fn answer(ctx: Ctx, ticket: Ticket) {
    enter(ctx, |state, now| replies::answer(state, ctx, ticket, now));
}

/// Notes that a blocked client is gone. Writes nothing to the keyspace.
pub fn gone(ctx: Ctx, ticket: Ticket) {
    receive(ctx, Notice::Gone(ticket));
}

fn receive(ctx: Ctx, notice: Notice) {
    if notices::receive(notice) {
        state::with(|state| schedule(state, ctx, read_millis));
    }
}

/// Requests a call of [`after_touch`], once for all keys that a command touches. Returns `false` if the server can't
/// make it, as before Redis 7.2.
fn ensure_after_touch(ctx: Ctx) -> bool {
    let requested = REQUESTED.with(|requested| *requested) || events::request_after_touch(ctx);
    REQUESTED.with(|it| *it = requested);
    requested
}

/// Serves the waiters of keys that another command touched, within the execution of that command.
pub fn after_touch(ctx: Ctx) {
    REQUESTED.with(|requested| *requested = false);
    enter(ctx, |state, now| {
        if !state.bindings.any_lags() && writes::are_possible(ctx) && !is_refused(state, ctx, now) {
            follow_up(state, ctx, now, &Slice::of_command());
        }
    });
}

/// Does the work that is due. The server calls this when the work timer fires.
pub fn tick(ctx: Ctx) {
    in_parts(|| {
        enter(ctx, |state, now| run_iteration(state, ctx, now));
        if !events::iteration_end_precedes_unblock() {
            replies::send_answers(ctx);
        }
    });
    state::with(|state| schedule(state, ctx, read_millis));
}

/// Makes several calls that would each end in [`schedule`]. The caller calls [`schedule`] once instead. (Each reply
/// that is sent is a call, too: the server calls [`answer`] for it.)
fn in_parts(calls: impl FnOnce()) {
    IN_PARTS.with(|in_parts| *in_parts = true);
    calls();
    IN_PARTS.with(|in_parts| *in_parts = false);
}

fn run_iteration(state: &mut State, ctx: Ctx, now: Now) {
    let iteration = Slice::of_iteration();
    if state.bindings.any_lags() && holds::takes_writes(ctx) {
        holds::follow_clock(state, ctx, now, &iteration.piece());
    }
    waiting::time_out(state, now, &iteration.piece());
    watchdog::unbind_retired(state, &iteration.piece());
    waiting::refuse_undecided(state, now, &iteration.piece());
    waiting::leave_ended(state, &iteration.piece());
    confirming::settle(state, ctx, now, &iteration.piece());
    holder_cache::with(|cache| cache.discarded.free(&iteration.piece()));
    state.discarded.free(&iteration.piece());
    if ctx.flags().role() == Role::Replica {
        state.forget_changes();
    } else if !writes::are_possible(ctx) || is_refused(state, ctx, now) {
        // The module still reports holds whose lease is over, and holds that other clients ended.
        watchdog::report_expired(state, ctx, now, &iteration.piece());
        report_ended(state, ctx, now, &iteration);
    } else {
        work(state, ctx, now, &iteration);
    }
    // Timed-out waits get the rest of the iteration's slice: there may be tens of thousands.
    waiting::time_out(state, now, &iteration);
}

/// Reports bound holds that other clients ended, while nothing may be written. Does nothing while a key has yet to
/// follow a clock step: a hold that the step made expire looks the same. Does nothing while the server loads data,
/// either.
fn report_ended(state: &mut State, ctx: Ctx, now: Now, iteration: &Slice) {
    if ctx.flags().loading() || state.bindings.any_lags() {
        return;
    }
    sweep(state, &iteration.piece());
    watchdog::verify_marked(state, ctx, now, &iteration.piece());
}

/// One kind of work: its share of the iteration's slice, and the function that does it.
type Work = (fn(&Slice) -> Slice, fn(&mut State, Ctx, Now, &Slice));

/// The order of the work: first what holders rely on, then what frees locks, then what concerns waiters.
const ORDER: [Work; 10] = [
    // Renewals come before anything that checks whether a lease has run out.
    (Slice::piece, watchdog::renew_due),
    (Slice::piece, waiting::end_silent),
    // Work that frees locks: grants that were not delivered or that too few replicas confirmed, and holds of ended
    // connections.
    (Slice::piece, holds::revoke_undelivered),
    (Slice::piece, watchdog::release_ended),
    // Leases that have run out.
    (Slice::piece, |state, _, now, slice| note_due_leases(state, now, slice)),
    (Slice::piece, purge_overdue),
    // Changes that other clients made, and then the waiters.
    (Slice::piece, |state, _, _, slice| sweep(state, slice)),
    (Slice::piece, report_all_expired),
    (Slice::piece, watchdog::verify_marked),
    (Slice::of_waiters, serve),
];

/// Does all kinds of work, or as many as fit into the iteration's slice. The next iteration begins with the first kind
/// that is left.
///
/// Normally everything fits. But the last item of a share may take many times as long as the share: rereading a lock
/// with thousands of holders that another client has written.
fn work(state: &mut State, ctx: Ctx, now: Now, iteration: &Slice) {
    if !holds::follow_clock(state, ctx, now, &iteration.piece()) {
        return;
    }
    let first = earliest([state.queue.first_look(), state.sessions.first_silence()]);
    if state.stalls.postpone(first, now.millis()) {
        return;
    }
    let first = NEXT_KIND.with(std::mem::take);
    let mut was_used = true;
    for (place, (share, work)) in ORDER.iter().enumerate().cycle().skip(first).take(ORDER.len()) {
        if was_used && iteration.is_over() {
            NEXT_KIND.with(|next| *next = place);
            break;
        }
        let slice = share(iteration);
        work(state, ctx, now, &slice);
        notices::apply(state, ctx);
        was_used = slice.was_used();
    }
}

/// Handles changes that other clients made, and serves the waiters.
fn follow_up(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    report_all_expired(state, ctx, now, slice);
    watchdog::verify_marked(state, ctx, now, &slice.piece());
    serve(state, ctx, now, slice);
}

/// Reports holds that ended because a key, or fields of it, expired.
fn report_all_expired(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some((key, expiry)) = state.expired.pop_front() else { break };
        report_expired(ctx, &key, expiry, now);
    }
}

/// Reports the holds that ended when this key, or fields of it, expired.
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

/// The number of holders of a lock, including those whose lease has run out but that have not been removed yet. `None`
/// if the key is not a lock.
fn holders_left(ctx: Ctx, key: &LockKey, name: &Text, now: Now) -> Option<usize> {
    let lock = Lock::look_without_owner(ctx, name.as_text(), now.millis()).ok()?;
    holder_cache::with(|cache| cache.holders(key.db, &key.name)).or(Some(lock.count()))
}

/// Notes the locks that must be looked at because a lease has run out, or because this node did not serve their slot.
fn note_due_leases(state: &mut State, now: Now, slice: &Slice) {
    // While this node did not serve the slot, a waiter that already holds the lock may have been due, and was not
    // granted it.
    let change = if listeners::in_cluster() { Change::Foreign } else { Change::Freed };
    while !slice.is_over() {
        let Some(key) = state.queue.take_look(now.millis()) else { break };
        state.agenda.note(key, change);
    }
}

/// Removes holders whose lease has run out, even if no request waits for their lock.
fn purge_overdue(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(key) = holder_cache::with(|cache| cache.overdue(now.millis())) else { break };
        purge_key(state, ctx, &key, now);
    }
}

fn purge_key(state: &mut State, ctx: Ctx, key: &LockKey, now: Now) {
    let lock = |ctx| {
        let name = Text::new(&key.name);
        let mut lock = Lock::look_without_owner(ctx, name.as_text(), now.millis()).ok()?;
        Some((holds::end_expired(state, &mut lock, now), lock.count(), lock.expiry()))
    };
    let seen = ctx.in_db(key.db, lock);
    state.agenda.note(key.clone(), Change::Freed);
    holder_cache::with(|cache| match seen {
        Some((true, 1.., _)) => {}
        // The holders stay cached: waiting requests would otherwise make the module reread them at once.
        Some((false, 1.., Deadline::Never)) => cache.forget_due(key.db, &key.name),
        // Nothing is due here any more, or the key is not a lock.
        _ => cache.forget(key.db, &key.name),
    });
}

/// Continues the sweep over waiters and bindings that follows when a data set was replaced.
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
                id.into_iter().for_each(|id| state.bindings.mark_one_unverified(id));
            }
            state.sweep.passed_binding(id);
        }
    }
}

/// Asks the replicas to confirm what was written, in a timer call of its own.
pub fn ask_replicas(ctx: Ctx) {
    enter(ctx, |state, now| {
        if writes::are_possible(ctx) {
            confirming::ask_replicas(state, ctx, now);
        }
    });
}

/// Ends an event-loop iteration: the server is about to send replies and to sleep. Writes nothing to the keyspace.
///
/// Answering here costs less than answering from the timer, and the server does nothing of its own in between. It is
/// possible only on servers that then end the block before the next command can interfere.
fn end_iteration(ctx: Ctx) {
    log_internal_errors(ctx);
    if events::iteration_end_precedes_unblock() {
        in_parts(|| replies::send_answers(ctx));
    }
    REQUESTED.with(|requested| *requested = false);
    state::with(|state| {
        if confirming::has_news(state, ctx) {
            timer::wake(ctx, Timer::Work, timer::THIS_ITERATION);
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

/// Whether the module may write on its own initiative, as of the last time it asked the server.
fn may_write(ctx: Ctx) -> bool {
    writes::are_possible(ctx) && !WRITE_REFUSED.with(|refused| *refused)
}

/// Asks the server whether it would refuse a write. If so, the module writes nothing on its own initiative, either.
/// Does not ask if there is nothing to write.
fn is_refused(state: &State, ctx: Ctx, now: Now) -> bool {
    let overdue = holder_cache::with(|cache| cache.first_due());
    let next = [state.next_work(), state.sessions.first_silence(), overdue];
    let has_work = !state.confirmations.is_empty() || next.into_iter().flatten().any(|at| at <= now.millis());
    let is_refused = has_work && writes::are_refused(ctx);
    WRITE_REFUSED.with(|refused| *refused = is_refused);
    is_refused
}

/// Sets the timers for the next work. Each call of the server ends with this, so no other code has to wake a timer.
/// `now` returns the time, or a slightly earlier one.
fn schedule(state: &mut State, ctx: Ctx, now: impl FnOnce() -> Millis) {
    if REQUESTED.with(|comes| *comes) || IN_PARTS.with(|comes| *comes) {
        return; // A later part of this call ends with this.
    }
    // Read only if there is something to schedule. Usually there is nothing, and reading the clock costs as much as the
    // rest.
    let now = LazyCell::new(now);
    match (!state.confirmations.is_empty()).then(|| state.confirmations.next_ask(*now)).flatten() {
        Some(at) if at > *now || writes::are_possible(ctx) => timer::wake(ctx, Timer::Ask, at),
        Some(_) => timer::wake(ctx, Timer::Ask, now.saturating_add(RETRY_INTERVAL)),
        None => timer::stop(ctx, Timer::Ask),
    }
    if state.pending.is_ending() {
        if events::may_unblock_early() {
            replies::answer_reader(state, ctx);
        }
        if state.pending.is_ending() {
            timer::wake_for_replies(ctx);
        }
    }
    if timer::is_due(Timer::Work) {
        return; // That timer call ends with this.
    }
    let (overdue, is_clean) = holder_cache::with(|cache| (cache.first_due(), cache.discarded.is_empty()));
    let overdue = overdue.filter(|at| *at < *now);
    let at_once = (!is_clean).then_some(timer::THIS_ITERATION);
    // A replica closes no session.
    let silence = state.sessions.first_silence().filter(|at| *at > *now || ctx.flags().role() == Role::Primary);
    let confirming = (!state.confirmations.is_empty()).then(|| now.saturating_add(1));
    let work = earliest([state.next_work(), confirming, silence, overdue, at_once]);
    let is_due = |at: &Millis| *at <= now.saturating_add(1);
    if !work.as_ref().is_some_and(is_due) {
        // The module asks again when the next write is due, which may be much later.
        WRITE_REFUSED.with(|refused| *refused = false);
    }
    let work = work.map(|at| match at {
        _ if !is_due(&at) => at,
        _ if !may_go_on(state, ctx) => now.saturating_add(RETRY_INTERVAL),
        timer::THIS_ITERATION => timer::THIS_ITERATION,
        // Work that is due but could not be done is retried a millisecond later, not at once.
        _ => now.saturating_add(1),
    });
    // A wait can time out even while nothing may be written.
    match earliest([work, state.next_timeout()]) {
        Some(next) if next <= *now => timer::wake(ctx, Timer::Work, timer::THIS_ITERATION),
        Some(next) => timer::wake(ctx, Timer::Work, next),
        // A session is likely to need the timer again, and to set one costs as much as a third of a release. (A module
        // with a timer can't be unloaded, so the last session's end stops it.)
        None if !state.sessions.is_empty() => {}
        None => timer::stop(ctx, Timer::Work),
    }
}

fn read_millis() -> Millis {
    Now::read().millis()
}

/// Whether work that is due can be done now.
fn may_go_on(state: &State, ctx: Ctx) -> bool {
    may_write(ctx) || ctx.flags().role() == Role::Replica && state.has_readonly_work()
}

/// Handles an event of the server.
pub fn event(ctx: Ctx, event: Event) {
    match event {
        Event::ClientGone(client) => receive(ctx, Notice::ConnectionEnded(client)),
        Event::IterationEnds => end_iteration(ctx),
        Event::IterationBegins => state::with(|state| state.stalls.next_iteration()),
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
            replies::send_postponed(&Slice::of_replies());
            listeners::recheck(ctx);
            timer::rescue(ctx);
            enter(ctx, |_, _| ());
        }
    }
}

/// Handles the loss or replacement of the contents of database `db`, or of all databases.
fn replaced(ctx: Ctx, db: Option<i32>) {
    enter(ctx, |state, _| {
        let bindings = state.bindings.next_id();
        start_sweep(state, ctx, db, bindings);
    });
}

/// Handles a swap of two databases. Bindings follow their locks, so none needs to be verified unless a sweep is in
/// progress, whose database now has another number. Waiters stay with the database number.
fn swapped(ctx: Ctx, one: i32, other: i32) {
    enter(ctx, |state, _| {
        state.bindings.swap(one, other);
        state.undelivered.swap(one, other);
        let bindings = state.sweep.end_of_bindings();
        start_sweep(state, ctx, Some(one), bindings);
        start_sweep(state, ctx, Some(other), bindings);
    });
}

/// Clears the holder cache, and starts a sweep: over all requests for locks of database `db`, or of all, and over the
/// bindings there that are older than `bindings`. A replica sweeps nothing.
fn start_sweep(state: &mut State, ctx: Ctx, db: Option<i32>, bindings: BindingId) {
    holder_cache::with(holder_cache::HolderCache::clear);
    let is_replica = ctx.flags().role() == Role::Replica;
    if !(is_replica || state.queue.is_empty() && state.bindings.is_empty()) {
        state.sweep.begin(db, (state.queue.end(), bindings));
    }
}

/// Handles a change of role: pending work now belongs to another server, or begins anew.
fn role_changed(ctx: Ctx) {
    listeners::assume_followers();
    enter(ctx, |state, _| {
        state.forget_work();
        let bindings = state.bindings.next_id();
        start_sweep(state, ctx, None, bindings);
    });
}

/// Clears all state: the module is about to be unloaded.
pub fn stop(ctx: Ctx) {
    timer::stop(ctx, Timer::Work);
    timer::stop(ctx, Timer::Ask);
    state::with(|state| *state = State::default());
    notices::clear();
    holder_cache::with(|cache| *cache = holder_cache::HolderCache::default());
    stats::clear();
    internal_errors::forget();
}
