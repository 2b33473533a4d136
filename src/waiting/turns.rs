//! The turns of the event loop: what is noted in one place of it is done in another.

use super::desk::{DESK, Desk, Outcome, Pending, QUEUE, State, is_contended};
use super::serving::{Keyspace, Serving, serve};
use super::{LOOK_AGAIN, end};
use crate::keyspace::{Lock, effects, listeners, rosters};
use crate::lock::serve::{Change, View};
use crate::lock::{LockKey, Owner, Queue};
use crate::server::clock::Now;
use crate::server::ctx::{Role, is_paused};
use crate::server::timer::Timer;
use crate::server::upcalls::{Event, Ticket, Touch};
use crate::server::{Ctx, Text, events, timer};
use crate::stats::count;
use crate::{confirming, stats, ties};

/// How many locks are looked at in one go because a lease ran out, so that nobody else waits for long.
const SLICE: usize = 256;

/// A key was touched by some other command, or expired. Writes nothing.
pub fn key_touched(ctx: Ctx, touch: Touch, name: &[u8]) {
    if effects::is_own_notification() {
        return;
    }
    let db = ctx.db();
    let contended = is_contended(db, name);
    let known = rosters::forget_if_known(db, name) || ties::is_tied(db, name);
    if (!contended && !known) || ctx.flags().role() == Role::Replica {
        return;
    }
    DESK.with(|desk| {
        let key = LockKey::new(db, name);
        if touch == Touch::Expired {
            desk.expired.push(key.clone());
        }
        desk.note(key, Change::Foreign);
    });
    // Nobody asked for an expiry, so there is no step to follow it up in; and it may be a late one.
    if touch == Touch::Expired || !events::after_touch(ctx) {
        timer::wake(ctx, Timer::Work, timer::NOW);
    }
}

/// The command that touched keys has done its work: serves those who wait, in the same step.
pub fn after_touch(ctx: Ctx) {
    let now = Now::read();
    if may_write(ctx) {
        follow_up(ctx, now);
    }
    wake(ctx, now);
}

fn may_write(ctx: Ctx) -> bool {
    let flags = ctx.flags();
    flags.role() == Role::Master && !flags.loading() && !is_paused()
}

/// Does what follows from changes that others made.
fn follow_up(ctx: Ctx, now: Now) {
    let (expired, changed) = DESK.with(|desk| (std::mem::take(&mut desk.expired), std::mem::take(&mut desk.changed)));
    for key in expired {
        count(|it| &mut it.expired);
        ctx.in_db(key.db, |ctx| Lock::tell_expired(ctx, &Text::new(&key.name)));
    }
    for (key, change) in &changed {
        if *change == Change::Foreign && ties::is_tied(key.db, &key.name) {
            ties::verify(ctx, key, now);
        }
    }
    serve(ctx, changed, now);
}

/// The timer is due.
pub fn tick(ctx: Ctx) {
    let now = Now::read();
    time_out(ctx, now);
    if may_write(ctx) {
        work(ctx, now);
    }
    // Elsewhere `turn_ends` does: the server's cron, which may come next, sends clients of a slot that is gone away, and
    // before Redis 7.2 those too who have their answer already.
    if !events::turn_end_is_last() {
        tell_ends();
    }
    wake(ctx, now);
}

/// Asks replicas to confirm what was written, alone in this step.
pub fn ask(ctx: Ctx) {
    if may_write(ctx) {
        confirming::ask(ctx, Now::read());
    } else {
        confirming::ask_later(ctx, LOOK_AGAIN);
    }
}

fn work(ctx: Ctx, now: Now) {
    if DESK.with(|desk| desk.holds_back(now.millis())) {
        return;
    }
    let undelivered = DESK.with(|desk| std::mem::take(&mut desk.undelivered));
    let mut changed: Vec<LockKey> = undelivered.iter().flat_map(|undo| confirming::undo(ctx, undo, now)).collect();
    changed.extend(ties::release_ended(ctx, now));
    changed.extend(confirming::settle(ctx, now));
    changed.extend(due_looks(now));
    ties::renew_due(ctx, now);
    for key in rosters::with(|rosters| rosters.overdue(now.millis(), SLICE)) {
        purge(ctx, &key, now);
        changed.push(key);
    }
    purge_later(ctx, now);
    DESK.with(|desk| changed.into_iter().for_each(|key| desk.note(key, Change::Freed)));
    follow_up(ctx, now);
}

/// Takes out those of a lock's holders whose lease ran out although nobody waits for it.
fn purge(ctx: Ctx, key: &LockKey, now: Now) {
    let looked = Serving(Keyspace { ctx, now }).look(key, &Owner::from(b"#".as_slice()));
    let is_held = looked.is_ok_and(|standing| standing.holders > 0);
    if !is_held && !is_contended(key.db, &key.name) {
        rosters::with(|rosters| rosters.forget(key.db, &key.name));
    }
}

/// Sees to it that those whose lease ran out although nobody waits are taken out.
fn purge_later(ctx: Ctx, now: Now) {
    if rosters::with(|rosters| rosters.first_due().is_some_and(|at| at < now.millis())) {
        timer::wake(ctx, Timer::Work, timer::NOW);
    }
}

/// The locks to be looked at because a lease has run out by now.
fn due_looks(now: Now) -> Vec<LockKey> {
    DESK.with(|desk| {
        let mut due = Vec::new();
        while due.len() < SLICE
            && let Some((at, key)) = desk.looks.pop_first()
        {
            if at > now.millis() {
                desk.looks.insert((at, key));
                break;
            }
            desk.look_at.remove(key.db, &key.name);
            due.push(key);
        }
        due
    })
}

/// Ends the waits whose time is over.
fn time_out(ctx: Ctx, now: Now) {
    let due: Vec<Ticket> = DESK.with(|desk| {
        let due = desk.timeouts.iter().take_while(|(until, _)| *until <= now.millis());
        due.map(|(_, ticket)| *ticket).collect()
    });
    for ticket in due {
        let waiting = DESK.with(|desk| match desk.pending.get(&ticket) {
            Some(Pending { state: State::Waiting(id), .. }) => Some(*id),
            _ => None,
        });
        let Some(waiter) = waiting.and_then(|id| QUEUE.with(|queue| queue.leave(id))) else { continue };
        DESK.with(|desk| desk.left(&waiter));
        end(ctx, ticket, Outcome::TimedOut, now);
    }
}

/// Tells clients how their wait ended.
fn tell_ends() {
    for ticket in DESK.with(|desk| std::mem::take(&mut desk.ending)) {
        let blocked = DESK.with(|desk| desk.pending.get_mut(&ticket).and_then(|pending| pending.blocked.take()));
        if let Some(blocked) = blocked {
            blocked.answer();
        }
    }
}

/// The event loop is about to send replies and to sleep. Writes nothing to the keyspace.
///
/// Telling here, rather than from the timer, costs the least, and nothing of the server's own comes between; but only
/// where the server then ends the block before the next command can interfere ([`events::turn_end_is_last`]).
fn turn_ends(ctx: Ctx) {
    let news = confirming::has_news(ctx);
    if !events::turn_end_is_last() {
        if news {
            timer::wake(ctx, Timer::Work, timer::NOW);
        }
        return;
    }
    if news {
        confirming::confirm_all(ctx);
    }
    tell_ends();
}

/// Sets the timer for whatever comes next.
pub fn wake(ctx: Ctx, now: Now) {
    if timer::is_due(Timer::Work) {
        return; // It will set itself anew.
    }
    let (work, timeout) = DESK.with(|desk| {
        desk.forget_idle_looks();
        let work = if desk.has_work() { Some(timer::NOW) } else { desk.looks.first().map(|(at, _)| *at) };
        (work, desk.timeouts.first().map(|(at, _)| *at))
    });
    let work = [work, ties::next_due(now.millis()), confirming::next_due(now.millis())].into_iter().flatten().min();
    // While nothing may be written, a wait may end for want of time all the same.
    let earliest = if may_write(ctx) { timer::NOW } else { now.millis().saturating_add(LOOK_AGAIN) };
    match work.map(|work| work.max(earliest)).into_iter().chain(timeout).min() {
        Some(next) if next <= now.millis() => timer::wake(ctx, Timer::Work, timer::NOW),
        Some(next) => timer::wake(ctx, Timer::Work, next),
        None => timer::stop(ctx, Timer::Work),
    }
}

/// Something happened to the server.
pub fn event(ctx: Ctx, event: Event) {
    match event {
        Event::ClientGone(client) => client_gone(ctx, client),
        Event::TurnEnds => turn_ends(ctx),
        Event::RepliesSent => DESK.with(|desk| {
            desk.sending.clear();
            desk.turn = desk.turn.wrapping_add(1);
        }),
        Event::Flushed(db) => replaced(ctx, db),
        Event::Swapped(one, other) => {
            ties::swap(one, other);
            replaced(ctx, Some(one));
            replaced(ctx, Some(other));
        }
        Event::RoleChanged => {
            listeners::doubt();
            ties::clear();
            confirming::clear();
            DESK.with(Desk::forget_work);
            replaced(ctx, None);
        }
        Event::DataReplaced => {
            listeners::doubt();
            replaced(ctx, None);
        }
        Event::SlotsMoved => {
            replaced(ctx, None);
            // What notes work here need not be a command, so there may be no step to follow it up in.
            timer::wake(ctx, Timer::Work, timer::NOW);
        }
        Event::ListenersMayHaveChanged => listeners::doubt(),
        Event::ModuleLoaded => listeners::module_loaded(),
        Event::ModuleUnloaded => listeners::module_unloaded(),
        Event::Cron => {
            listeners::recheck(ctx);
            purge_later(ctx, Now::read());
        }
    }
}

/// A connection has ended. Writes nothing: it may be in the middle of another command.
fn client_gone(ctx: Ctx, client: u64) {
    let undelivered = DESK.with(|desk| {
        let undo = desk.sending.remove(&client);
        let any = undo.is_some();
        desk.undelivered.extend(undo);
        any
    });
    if undelivered {
        count(|it| &mut it.grants_undelivered);
    }
    if ties::client_gone(client) || undelivered {
        timer::wake(ctx, Timer::Work, timer::NOW);
    }
}

/// What a database, or all of them, held is gone or was replaced.
fn replaced(ctx: Ctx, db: Option<i32>) {
    rosters::with(rosters::Rosters::clear);
    let keys: Vec<LockKey> = QUEUE.with(|queue| queue.contended_keys().collect());
    let keys = keys.into_iter().chain(ties::tied_keys()).filter(|key| db.is_none_or(|db| key.db == db));
    let any = DESK.with(|desk| {
        keys.for_each(|key| desk.note(key, Change::Foreign));
        desk.has_work()
    });
    if any && !events::after_touch(ctx) {
        timer::wake(ctx, Timer::Work, timer::NOW);
    }
}

/// Forgets everything; the module is about to be unloaded.
pub fn stop(ctx: Ctx) {
    timer::stop(ctx, Timer::Work);
    timer::stop(ctx, Timer::Ask);
    DESK.with(|desk| *desk = Desk::default());
    QUEUE.with(|queue| *queue = Queue::default());
    rosters::with(rosters::Rosters::clear);
    ties::clear();
    confirming::clear();
    stats::clear();
}
