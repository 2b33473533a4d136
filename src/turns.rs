//! The turns of the event loop. Every call from the server into the module, other than a command, arrives here and is
//! passed on to the part that does the work; what one part of a turn notes, a later part does. Only the module's table
//! of callbacks calls this.
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

use crate::keyspace::{Lock, effects, listeners, rosters};
use crate::lock::serve::Change;
use crate::lock::{LockKey, internal_errors};
use crate::server::callbacks::{Event, Touch};
use crate::server::clock::{Now, Slice};
use crate::server::ctx::Role;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, MainThread, Text, events, writes};
use crate::serving::{LOOK_AGAIN, serve};
use crate::state::{self, Expiry, TieId, Why};
use crate::stats::add;
use crate::{answering, confirming, holding, stats, waiting, watchdog};

/// Whether the server would have refused a write when it was last asked.
static REFUSED: MainThread<bool> = MainThread::new();

/// Whether [`after_touch`] is to come, in this step of a command.
static REQUESTED: MainThread<bool> = MainThread::new();

/// Which kind of work the next turn begins with.
static NEXT: MainThread<usize> = MainThread::new();

/// Another command touched a key, or it expired. Writes nothing.
pub fn key_touched(ctx: Ctx, touch: Touch, name: &[u8]) {
    if effects::is_own_notification() {
        return;
    }
    if touch == Touch::Expired {
        // Before anything is noted: a step that ends it may be taken back by another one before the next call.
        holding::begin(ctx);
    }
    let db = ctx.db();
    let known = rosters::forget_if_known(db, name);
    // A key without a roster has at most one holder.
    let holders = known.unwrap_or(1);
    let noted = state::with(|state| {
        let concerns_us = known.is_some() || state.ties.is_tied(db, name) || state.is_contended(db, name);
        let noted = concerns_us && ctx.flags().role() == Role::Master;
        if noted {
            note_touch(state, LockKey::new(db, name), touch, holders);
        }
        noted
    });
    if !noted {
        return;
    }
    // An expiry belongs to no command, so there is no command's step to follow it up in; and it may come late.
    if touch != Touch::Changed || !is_requested(ctx) {
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
}

/// Sees to it that [`after_touch`] comes, once for all keys that a command touches. `false` where the server can't do it.
fn is_requested(ctx: Ctx) -> bool {
    let requested = REQUESTED.with(|requested| *requested) || events::request_after_touch(ctx);
    REQUESTED.with(|it| *it = requested);
    requested
}

fn note_touch(state: &mut state::State, key: LockKey, touch: Touch, holders: usize) {
    let expiry = match touch {
        Touch::Expired => Some(Expiry::Key { holders }),
        Touch::FieldsExpired => Some(Expiry::Fields { holders }),
        Touch::Changed => None,
    };
    let why = if expiry.is_some() { Why::Expired } else { Why::Changed };
    state.ties.doubt(key.db, &key.name, why);
    state.expired.extend(expiry.map(|expiry| (key.clone(), expiry)));
    state.agenda.note(key, Change::Foreign);
}

/// The command that touched keys has done its work: serves the waiters within the same step.
pub fn after_touch(ctx: Ctx) {
    REQUESTED.with(|requested| *requested = false);
    let now = holding::begin(ctx);
    let lags = state::with(|state| state.ties.any_lags());
    if !lags && writes::are_possible(ctx) && !is_refused(ctx, now) {
        follow_up(ctx, now, &Slice::of_command());
    }
    set_timer(ctx, now);
}

/// The time has come for some of the work.
pub fn tick(ctx: Ctx) {
    let (now, turn) = (holding::begin(ctx), Slice::of_turn());
    if state::with(|state| state.ties.any_lags()) && holding::takes_writes(ctx) {
        holding::follow_clock(ctx, now, &turn.piece());
    }
    waiting::time_out(ctx, now, &turn.piece());
    watchdog::untie_retired(ctx, &turn.piece());
    waiting::refuse_undecided(ctx, now, &turn.piece());
    waiting::leave_ended(&turn.piece());
    confirming::settle(ctx, now, &turn.piece());
    rosters::with(|rosters| rosters.free(&turn.piece()));
    free_discarded(&turn.piece());
    if ctx.flags().role() == Role::Replica {
        state::with(state::State::forget_changes);
    } else if !writes::are_possible(ctx) || is_refused(ctx, now) {
        // What is over is told all the same, and what others have ended.
        watchdog::tell_over(ctx, now, &turn.piece());
        tell_ended(ctx, now, &turn);
    } else {
        work(ctx, now, &turn);
    }
    // What is left of the turn is for those whose time is over: there may be tens of thousands.
    waiting::time_out(ctx, now, &turn);
    if !events::turn_end_precedes_unblock() {
        answering::send_answers(ctx);
    }
    set_timer(ctx, now);
}

/// Frees what was dropped as a whole.
fn free_discarded(slice: &Slice) {
    while !slice.is_over() && state::with(|state| state.discarded.free_one()) {}
}

/// Where nothing may be written: tells of the tied holds that others have ended. Not while any still has to follow a step
/// of the clock, since what that let expire looks the same; nor while the data is being loaded.
fn tell_ended(ctx: Ctx, now: Now, turn: &Slice) {
    if ctx.flags().loading() || state::with(|state| state.ties.any_lags()) {
        return;
    }
    sweep(&turn.piece());
    watchdog::verify_doubtful(ctx, now, &turn.piece());
}

/// One kind of work, and which share of the turn it gets.
type Work = (fn(&Slice) -> Slice, fn(Ctx, Now, &Slice));

/// The order of the work: first what keeps promises to holders, then what frees locks, then what concerns those who
/// wait for them.
const ORDER: [Work; 10] = [
    // Renewals come before anything that checks whether a lease has run out.
    (Slice::piece, watchdog::renew_due),
    (Slice::piece, waiting::end_silent),
    // Everything that frees locks: grants that were never delivered or that too few replicas confirmed, and holds of
    // ended connections.
    (Slice::piece, holding::revoke_undelivered),
    (Slice::piece, watchdog::release_ended),
    // Leases that have run out.
    (Slice::piece, |_, now, slice| note_due_leases(now, slice)),
    (Slice::piece, purge_overdue),
    // Changes that other clients made, and then serving.
    (Slice::piece, |_, _, slice| sweep(slice)),
    (Slice::piece, tell_all_expired),
    (Slice::piece, watchdog::verify_doubtful),
    (Slice::of_crowds, serve),
];

/// Does all kinds of work, or as many as there is time for; the next turn then begins with those that are left.
///
/// A share is enough for what there is to do, but the last thing done in it may take many times as long: reading anew a
/// lock with thousands of holders that another client has written.
fn work(ctx: Ctx, now: Now, turn: &Slice) {
    if !holding::follow_clock(ctx, now, &turn.piece()) {
        return;
    }
    if state::with(|state| state.lease_timers.put_off_if_stalled(now.millis(), state.sessions.first_silence())) {
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
        work(ctx, now, &slice);
        was_used = slice.was_used();
    }
}

/// Follows up changes that others made, and serves the waiters.
fn follow_up(ctx: Ctx, now: Now, slice: &Slice) {
    tell_all_expired(ctx, now, slice);
    watchdog::verify_doubtful(ctx, now, &slice.piece());
    serve(ctx, now, slice);
}

/// Reports holds that have ended by themselves.
fn tell_all_expired(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some((key, expiry)) = state::with(|state| state.expired.pop_front()) else { break };
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
    rosters::with(|rosters| rosters.holders(key.db, &key.name)).or(Some(lock.count()))
}

/// Notes the locks that are due for a look because a lease has run out.
fn note_due_leases(now: Now, slice: &Slice) {
    while !slice.is_over() {
        let any = state::with(|state| {
            let due = state.lease_timers.take_due(now.millis());
            let any = due.is_some();
            due.into_iter().for_each(|key| state.agenda.note(key, Change::Freed));
            any
        });
        if !any {
            break;
        }
    }
}

/// Removes holders whose lease has run out although nobody waits for their lock.
fn purge_overdue(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(key) = rosters::with(|rosters| rosters.overdue(now.millis(), 1)).into_iter().next() else { break };
        purge_key(ctx, &key, now);
    }
}

fn purge_key(ctx: Ctx, key: &LockKey, now: Now) {
    let is_done = ctx.in_db(key.db, |ctx| {
        let name = Text::new(&key.name);
        let Ok(mut lock) = Lock::look_as_nobody(ctx, name.as_text(), now.millis()) else { return true };
        !holding::end_expired(&mut lock, now) || lock.count() == 0
    });
    state::with(|state| state.agenda.note(key.clone(), Change::Freed));
    // Nothing is due here any more: its leases do not end (`PERSIST`), or it is no lock.
    if is_done {
        rosters::with(|rosters| rosters.forget(key.db, &key.name));
    }
}

/// Continues looking at everything anew after a data set was replaced.
fn sweep(slice: &Slice) {
    while !slice.is_over() {
        let over = state::with(|state| {
            if let Some((from, end)) = state.sweep.waiters() {
                let next = state.queue.from(from).next().filter(|waiter| waiter.id < end);
                let (id, keys) = (next.map(|it| it.id), next.map(|it| it.keys.clone()));
                for key in keys.iter().flat_map(|keys| keys.iter()).filter(|key| state.sweep.concerns(key.db)) {
                    state.agenda.note(key.clone(), Change::Foreign);
                }
                state.sweep.passed_waiter(id);
            }
            if let Some((from, end)) = state.sweep.ties() {
                let id = state.ties.from(from, end);
                if let Some(key) = id.and_then(|id| state.ties.get(id)).map(state::Tie::key)
                    && state.sweep.concerns(key.db)
                {
                    id.into_iter().for_each(|id| state.ties.doubt_one(id));
                }
                state.sweep.passed_tie(id);
            }
            state.sweep.is_over()
        });
        if over {
            break;
        }
    }
}

/// Asks the replicas to confirm what was written, in a step of its own.
pub fn ask_replicas(ctx: Ctx) {
    if writes::are_possible(ctx) {
        confirming::ask_replicas(ctx, Now::read());
    } else {
        confirming::ask_later(ctx, LOOK_AGAIN);
    }
}

/// The event loop is about to send replies and to sleep. Writes nothing to the keyspace.
///
/// Answering here rather than from the timer costs least, and nothing that the server itself does comes between. It is
/// possible only where the server then ends the block before the next command can interfere.
fn turn_ends(ctx: Ctx) {
    log_internal_errors(ctx);
    if confirming::has_news(ctx) {
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
    if events::turn_end_precedes_unblock() {
        answering::send_answers(ctx);
    }
    // Whatever is left over continues in the next turn, at once.
    if replies_are_due() || waits_are_over() || (state::with(|state| state.has_work()) && may_write(ctx)) {
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
}

/// Logs each kind of internal error once. (The count is in `INFO holdfast`.)
fn log_internal_errors(ctx: Ctx) {
    while let Some(kind) = internal_errors::next_to_log() {
        ctx.warn(&format!(
            "holdfast: internal error: {kind}. Please report it. It is logged once, and counted in INFO"
        ));
    }
}

/// Whether [`tick`] has waiters to answer.
fn replies_are_due() -> bool {
    !events::turn_end_precedes_unblock() && state::with(|state| state.owed.is_ending())
}

/// Whether waits are over that have not been ended yet.
fn waits_are_over() -> bool {
    let first = state::with(|state| state.owed.timeouts.first().map(|(until, _)| *until));
    first.is_some_and(|until| until <= Now::read().millis())
}

/// Whether the module may write of its own accord, as far as was known when the server was last asked.
fn may_write(ctx: Ctx) -> bool {
    writes::are_possible(ctx) && !REFUSED.with(|refused| *refused)
}

/// Asks the server whether it would refuse a write: then the module writes nothing of its own accord, either. Nothing is
/// asked if there is nothing to write.
fn is_refused(ctx: Ctx, now: Now) -> bool {
    let (has_work, next) = state::with(|state| {
        let has_work = state.has_work() || !state.confirmations.is_empty();
        let next = [state.lease_timers.first(), state.ties.next_due(), state.sessions.first_silence()];
        (has_work, next.into_iter().flatten().min())
    });
    let overdue = rosters::with(|rosters| rosters.first_due());
    let has_work = has_work || next.into_iter().chain(overdue).any(|at| at <= now.millis());
    let is_refused = has_work && writes::are_refused(ctx);
    REFUSED.with(|refused| *refused = is_refused);
    is_refused
}

/// Sets the timer for whatever comes next.
fn set_timer(ctx: Ctx, now: Now) {
    if timer::is_due(Timer::Work) {
        return; // It will set itself anew.
    }
    let (work, timeout) = state::with(|state| {
        let confirming = (!state.confirmations.is_empty()).then(|| now.millis().saturating_add(1));
        let at_once = state.has_work().then_some(timer::THIS_TURN);
        // A replica ends no session.
        let silence = state.sessions.first_silence().filter(|_| ctx.flags().role() == Role::Master);
        let work = [at_once, state.lease_timers.first(), state.ties.next_due(), confirming, silence];
        (work.into_iter().flatten().min(), state.owed.timeouts.first().map(|(at, _)| *at))
    });
    let (overdue, has_forgotten) = rosters::with(|rosters| (rosters.first_due(), rosters.has_forgotten()));
    let overdue = overdue.filter(|at| *at < now.millis());
    let work = work.into_iter().chain(overdue).chain(has_forgotten.then_some(timer::THIS_TURN)).min();
    // Even while nothing may be written, a wait can time out.
    let may_go_on =
        may_write(ctx) || ctx.flags().role() == Role::Replica && state::with(|state| state.has_news_to_tell());
    let earliest = if may_go_on { timer::THIS_TURN } else { now.millis().saturating_add(LOOK_AGAIN) };
    let replies = replies_are_due().then_some(timer::THIS_TURN);
    match work.map(|work| work.max(earliest)).into_iter().chain(timeout).chain(replies).min() {
        Some(next) if next <= now.millis() => timer::wake(ctx, Timer::Work, timer::THIS_TURN),
        Some(next) => timer::wake(ctx, Timer::Work, next),
        None => timer::stop(ctx, Timer::Work),
    }
}

/// Something happened to the server.
pub fn event(ctx: Ctx, event: Event) {
    match event {
        Event::ClientGone(client) => answering::client_gone(ctx, client),
        Event::TurnEnds => turn_ends(ctx),
        Event::TurnBegins => state::with(|state| state.lease_timers.next_turn()),
        Event::Flushed(db) => replaced(ctx, db),
        Event::Swapped(one, other) => {
            // Ties go along with their locks, so none is in doubt, unless a pass is under way, whose database has another
            // number now. Those who wait stay.
            let ties = state::with(|state| {
                state.ties.swap(one, other);
                state.undelivered.swap(one, other);
                if state.sweep.is_over() { TieId::FIRST } else { state.ties.next_id() }
            });
            look_anew(ctx, Some(one), ties);
            look_anew(ctx, Some(other), ties);
        }
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
            answering::send_put_off(&Slice::of_replies());
            listeners::recheck(ctx);
            timer::rescue(ctx);
            let now = holding::begin(ctx);
            set_timer(ctx, now);
        }
    }
}

/// The contents of one database, or of all, are gone or were replaced.
fn replaced(ctx: Ctx, db: Option<i32>) {
    look_anew(ctx, db, state::with(|state| state.ties.next_id()));
}

/// Everybody who waits for locks of one database, or of all, has to be looked at anew, and so have the ties there before `ties`.
fn look_anew(ctx: Ctx, db: Option<i32>, ties: TieId) {
    rosters::with(rosters::Rosters::clear);
    timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    if ctx.flags().role() == Role::Replica {
        return;
    }
    state::with(|state| {
        let ends = (state.queue.end(), ties);
        if !(state.queue.is_empty() && state.ties.is_empty()) {
            state.sweep.begin(db, ends);
        }
    });
}

/// This server became a master or a replica: pending work belongs to another server now, or begins anew.
fn role_changed(ctx: Ctx) {
    listeners::assume_followers();
    state::with(state::State::forget_work);
    replaced(ctx, None);
    timer::wake(ctx, Timer::Work, timer::THIS_TURN);
}

/// Forgets everything; the module is about to be unloaded.
pub fn stop(ctx: Ctx) {
    timer::stop(ctx, Timer::Work);
    timer::stop(ctx, Timer::Ask);
    state::with(|state| *state = state::State::default());
    rosters::with(|rosters| *rosters = rosters::Rosters::default());
    stats::clear();
    internal_errors::forget();
}
