//! The module's timers: one for its work, and one for what must be alone in its step.

use super::timers::{self, Fires, Id};
use super::{Ctx, MainThread, callbacks, clock::Now, events};
use crate::lock::Millis;

/// In this turn of the event loop: as soon as the current work is done, before replies are sent or further requests
/// are read. (From inside a timer: in a millisecond.)
pub const THIS_TURN: Millis = 0;

/// The longest time for which a timer is set, in ms: a day. Whatever is due later sets it anew then.
///
/// A key may have any expiry below 2^63 ms, and the server reckons timers in microseconds of 64 bits, both by the time of
/// day and by a clock that counts from the machine's start. A time that does not fit can come out as one that is past for
/// the first and never comes for the second, and then the server calls no timer of any module again.
const FARTHEST: Millis = 24 * 60 * 60 * 1000;

/// What a timer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timer {
    /// Calls [`callbacks::Callbacks::tick`].
    Work,
    /// Calls [`callbacks::Callbacks::ask_replicas`].
    Ask,
}

/// A timer of the server's. Work has two, since a hand-off needs one at once while the next lease to run out is far
/// off: the timer for that stays as it is meanwhile.
#[derive(Clone, Copy, Debug)]
enum Slot {
    /// Work in this turn of the event loop.
    WorkThisTurn,
    /// Work at a later time.
    WorkLater,
    /// Asking the replicas.
    Ask,
}

impl Slot {
    fn of(timer: Timer, at: Millis) -> Self {
        match timer {
            Timer::Work if at == THIS_TURN => Self::WorkThisTurn,
            Timer::Work => Self::WorkLater,
            Timer::Ask => Self::Ask,
        }
    }
}

#[derive(Debug, Default)]
struct Timers {
    work_this_turn: Option<(Id, Millis)>,
    work_later: Option<(Id, Millis)>,
    ask: Option<(Id, Millis)>,
    /// The timers that were due at the last cron.
    due: [Option<Id>; 3],
    /// The server is calling one of them: a timer set now fires in a millisecond at the earliest.
    firing: bool,
}

impl Timers {
    fn slot(&mut self, slot: Slot) -> &mut Option<(Id, Millis)> {
        match slot {
            Slot::WorkThisTurn => &mut self.work_this_turn,
            Slot::WorkLater => &mut self.work_later,
            Slot::Ask => &mut self.ask,
        }
    }
}

static TIMERS: MainThread<Timers> = MainThread::new();

/// Lets a timer fire at `at` (the server's timers may be a little late), unless it fires earlier anyway.
pub fn wake(ctx: Ctx, timer: Timer, at: Millis) {
    if timer == Timer::Work && is_due(timer) {
        return;
    }
    // The clock is read only where it makes a difference: mostly the timer is set already.
    let millis = || Now::read().millis();
    let at = if TIMERS.with(|timers| timers.firing) { at.max(millis().saturating_add(1)) } else { at };
    let slot = Slot::of(timer, at);
    if let Some((_, due)) = TIMERS.with(|timers| *timers.slot(slot)) {
        if due <= at {
            return;
        }
        stop_one(ctx, slot);
    }
    let period = if at == THIS_TURN { 0 } else { at.saturating_sub(millis()).min(FARTHEST) };
    let id = match slot {
        Slot::WorkThisTurn => timers::create::<WorkThisTurn>(ctx, period),
        Slot::WorkLater => timers::create::<WorkLater>(ctx, period),
        Slot::Ask => timers::create::<Ask>(ctx, period),
    };
    TIMERS.with(|timers| *timers.slot(slot) = Some((id, at)));
    events::go_round_again();
}

/// Makes sure that answers that are ready are sent at the end of this turn of the event loop.
pub fn wake_for_replies(ctx: Ctx) {
    if events::turn_end_precedes_unblock() {
        events::go_round_again();
    } else {
        wake(ctx, Timer::Work, THIS_TURN);
    }
}

/// Whether a timer will fire in this turn of the event loop.
pub fn is_due(timer: Timer) -> bool {
    TIMERS.with(|timers| timers.slot(Slot::of(timer, THIS_TURN)).is_some_and(|(_, due)| due == THIS_TURN))
}

/// Sets timers anew that are due and have not fired since the last call, which was some turns ago.
///
/// Servers keep timers by the time of day, but wait for the first of them by a clock that takes no steps. When the time of
/// day is set back between setting a timer and firing it, it fires late by so much; when it is set forward, the server
/// still waits for a timer that was the first before, and calls none meanwhile. Either would stand in the way of all work.
pub fn rescue(ctx: Ctx) {
    let now = Now::read().millis();
    let due = [Slot::WorkThisTurn, Slot::WorkLater, Slot::Ask]
        .map(|slot| TIMERS.with(|timers| timers.slot(slot).filter(|(_, due)| *due <= now).map(|(id, _)| id)));
    let before = TIMERS.with(|timers| std::mem::replace(&mut timers.due, due));
    if due.iter().zip(before).any(|(now, before)| now.is_some() && *now == before) {
        restart(ctx);
    }
}

/// Lets all timers fire in this turn: whichever the server waits for is among them.
pub fn restart(ctx: Ctx) {
    stop(ctx, Timer::Work);
    stop(ctx, Timer::Ask);
    wake(ctx, Timer::Work, THIS_TURN);
    wake(ctx, Timer::Ask, THIS_TURN);
}

/// Stops a timer.
pub fn stop(ctx: Ctx, timer: Timer) {
    let set = TIMERS.with(|timers| match timer {
        Timer::Work => [timers.work_this_turn.take(), timers.work_later.take()],
        Timer::Ask => [timers.ask.take(), None],
    });
    set.into_iter().flatten().for_each(|(id, _)| timers::cancel(ctx, id));
}

fn stop_one(ctx: Ctx, slot: Slot) {
    if let Some((id, _)) = TIMERS.with(|timers| timers.slot(slot).take()) {
        timers::cancel(ctx, id);
    }
}

struct WorkThisTurn;
struct WorkLater;
struct Ask;

impl Fires for WorkThisTurn {
    fn fire(ctx: Ctx) {
        fire(ctx, Slot::WorkThisTurn);
    }
}

impl Fires for WorkLater {
    fn fire(ctx: Ctx) {
        fire(ctx, Slot::WorkLater);
    }
}

impl Fires for Ask {
    fn fire(ctx: Ctx) {
        fire(ctx, Slot::Ask);
    }
}

fn fire(ctx: Ctx, slot: Slot) {
    TIMERS.with(|timers| {
        *timers.slot(slot) = None;
        timers.firing = true;
    });
    if let Some(callbacks) = callbacks::get() {
        match slot {
            Slot::WorkThisTurn | Slot::WorkLater => (callbacks.tick)(ctx),
            Slot::Ask => (callbacks.ask_replicas)(ctx),
        }
    }
    TIMERS.with(|timers| timers.firing = false);
}
