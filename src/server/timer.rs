//! The module's timers: one for its work, and one for what must be alone in its step.

use super::callbacks;
use super::{Ctx, MainThread, clock::Now, events};
use crate::lock::Millis;
use libc::c_void;
use redis_module::raw::{RedisModuleCtx, RedisModuleTimerID};
use std::ptr::null_mut;

/// In this turn of the event loop: as soon as the current work is done, before replies are sent or further requests
/// are read. (From inside a timer: in a millisecond.)
pub const THIS_TURN: Millis = 0;

/// What a timer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timer {
    /// Calls [`callbacks::Callbacks::tick`].
    Work,
    /// Calls [`callbacks::Callbacks::ask`].
    Ask,
}

/// A timer of the server's. Work has two, for a hand-off needs one at once, and the next lease to run out is far off: that
/// timer stays as it is meanwhile.
#[derive(Clone, Copy, Debug)]
enum Slot {
    WorkThisTurn,
    WorkLater,
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
    work_this_turn: Option<(RedisModuleTimerID, Millis)>,
    work_later: Option<(RedisModuleTimerID, Millis)>,
    ask: Option<(RedisModuleTimerID, Millis)>,
    /// The server is calling one of them: a timer set now fires in a millisecond at the earliest.
    firing: bool,
}

impl Timers {
    fn slot(&mut self, slot: Slot) -> &mut Option<(RedisModuleTimerID, Millis)> {
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
    let now = Now::read().millis();
    let at = if TIMERS.with(|timers| timers.firing) { at.max(now.saturating_add(1)) } else { at };
    let slot = Slot::of(timer, at);
    if let Some((_, due)) = TIMERS.with(|timers| *timers.slot(slot)) {
        if due <= at {
            return;
        }
        stop_one(ctx, slot);
    }
    let callback = match slot {
        Slot::WorkThisTurn => on_work_this_turn,
        Slot::WorkLater => on_work_later,
        Slot::Ask => on_ask,
    };
    let period = i64::try_from(at.saturating_sub(now)).unwrap_or(i64::MAX / 2000);
    // SAFETY: the context lives; the callback lives as long as the module, which stops the timer before it is
    // unloaded.
    let id = unsafe { api!(RedisModule_CreateTimer)(ctx.raw(), period, Some(callback), null_mut()) };
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

/// Stops a timer.
pub fn stop(ctx: Ctx, timer: Timer) {
    stop_one(ctx, Slot::of(timer, THIS_TURN));
    stop_one(ctx, Slot::of(timer, Millis::MAX));
}

fn stop_one(ctx: Ctx, slot: Slot) {
    if let Some((id, _)) = TIMERS.with(|timers| timers.slot(slot).take()) {
        // SAFETY: the context lives; a timer that is not pending any more is refused by the server.
        unsafe { api!(RedisModule_StopTimer)(ctx.raw(), id, null_mut()) };
    }
}

unsafe extern "C" fn on_work_this_turn(ctx: *mut RedisModuleCtx, _: *mut c_void) {
    // SAFETY: the server calls with a context that lives for this call.
    fire(unsafe { Ctx::from_raw(ctx) }, Slot::WorkThisTurn);
}

unsafe extern "C" fn on_work_later(ctx: *mut RedisModuleCtx, _: *mut c_void) {
    // SAFETY: as in `on_work_this_turn`.
    fire(unsafe { Ctx::from_raw(ctx) }, Slot::WorkLater);
}

unsafe extern "C" fn on_ask(ctx: *mut RedisModuleCtx, _: *mut c_void) {
    // SAFETY: as in `on_work_this_turn`.
    fire(unsafe { Ctx::from_raw(ctx) }, Slot::Ask);
}

fn fire(ctx: Ctx, slot: Slot) {
    TIMERS.with(|timers| {
        *timers.slot(slot) = None;
        timers.firing = true;
    });
    if let Some(callbacks) = callbacks::get() {
        match slot {
            Slot::WorkThisTurn | Slot::WorkLater => (callbacks.tick)(ctx),
            Slot::Ask => (callbacks.ask)(ctx),
        }
    }
    TIMERS.with(|timers| timers.firing = false);
}
