//! The module's timers: one for its work, and one that asks the replicas for confirmation. The latter needs its own
//! timer, because its callback must replicate nothing else.

use super::timers::{self, Fires, Id};
use super::{Ctx, MainThread, callbacks, clock::Now, events};
use crate::lock::Millis;

/// A time that means "in this event-loop iteration": after the current callback, before the server sends replies or
/// polls for further requests. A timer callback can't set a timer for the same iteration; that one fires a millisecond
/// later.
pub const THIS_ITERATION: Millis = 0;

/// The longest period of a timer, in ms: a day. When the timer fires, the module sets it again for work that is due
/// later.
///
/// A key may have any expiry below 2^63 ms. The server computes the times of timers in 64-bit microseconds, both by the
/// wall clock and by a clock that counts from the start of the machine. A longer period could overflow. The time could
/// then be in the past by the first clock and never come by the second, and the server would call no timer of any
/// module again.
const LONGEST_PERIOD: Millis = 24 * 60 * 60 * 1000;

/// A timer of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timer {
    /// Calls [`callbacks::Callbacks::tick`].
    Work,
    /// Calls [`callbacks::Callbacks::ask_replicas`].
    Ask,
}

/// A timer of the server. [`Timer::Work`] has two, because a hand-off needs one immediately, while the next lease
/// expires much later. The timer for the lease then need not be set again.
#[derive(Clone, Copy, Debug)]
enum Slot {
    /// For work in this event-loop iteration.
    WorkNow,
    /// For work at a later time.
    WorkLater,
    /// For asking the replicas.
    Ask,
}

impl Slot {
    fn of(timer: Timer, at: Millis) -> Self {
        match timer {
            Timer::Work if at == THIS_ITERATION => Self::WorkNow,
            Timer::Work => Self::WorkLater,
            Timer::Ask => Self::Ask,
        }
    }
}

#[derive(Debug, Default)]
struct Timers {
    work_now: Option<(Id, Millis)>,
    work_later: Option<(Id, Millis)>,
    ask: Option<(Id, Millis)>,
    /// The timers that were due when [`rescue`] was last called.
    due: [Option<Id>; 3],
    /// Whether the server is calling one of the timers: a timer set now fires in a millisecond at the earliest.
    is_firing: bool,
}

impl Timers {
    fn slot(&mut self, slot: Slot) -> &mut Option<(Id, Millis)> {
        match slot {
            Slot::WorkNow => &mut self.work_now,
            Slot::WorkLater => &mut self.work_later,
            Slot::Ask => &mut self.ask,
        }
    }
}

static TIMERS: MainThread<Timers> = MainThread::new();

/// Sets a timer that fires at `at`, unless it is already set to fire earlier. The server's timers may be a little late.
pub fn wake(ctx: Ctx, timer: Timer, at: Millis) {
    if timer == Timer::Work && is_due(timer) {
        return;
    }
    // The clock is read only if its value matters: usually the timer is already set.
    let millis = || Now::read().millis();
    let at = if TIMERS.with(|timers| timers.is_firing) { at.max(millis().saturating_add(1)) } else { at };
    let slot = Slot::of(timer, at);
    if let Some((_, due)) = TIMERS.with(|timers| *timers.slot(slot)) {
        if due <= at {
            return;
        }
        stop_one(ctx, slot);
    }
    let period = (at != THIS_ITERATION).then(|| at.saturating_sub(millis()).min(LONGEST_PERIOD));
    let id = match slot {
        Slot::WorkNow => timers::create::<WorkNow>(ctx, period),
        Slot::WorkLater => timers::create::<WorkLater>(ctx, period),
        Slot::Ask => timers::create::<Ask>(ctx, period),
    };
    TIMERS.with(|timers| *timers.slot(slot) = Some((id, at)));
    events::request_iteration();
}

/// Ensures that ready replies are sent at the end of this event-loop iteration, or in one that follows without sleep.
pub fn wake_for_replies(ctx: Ctx) {
    if events::iteration_end_precedes_unblock() {
        events::request_iteration();
    } else {
        wake(ctx, Timer::Work, THIS_ITERATION);
    }
}

/// Whether a timer is set to fire in this event-loop iteration.
pub fn is_due(timer: Timer) -> bool {
    TIMERS.with(|timers| timers.slot(Slot::of(timer, THIS_ITERATION)).is_some_and(|(_, due)| due == THIS_ITERATION))
}

/// Restarts all timers if one of them was due at the last call and has still not fired. The server's cron calls this.
///
/// Servers order timers by the wall clock, but wait for the first timer by a clock that does not step. If the wall
/// clock steps back after a timer was set, the timer fires late by the size of the step. If the wall clock steps
/// forward, the server still waits for the timer that was the first before, and calls no timer meanwhile. Both would
/// delay all work.
pub fn rescue(ctx: Ctx) {
    let now = Now::read().millis();
    let due = [Slot::WorkNow, Slot::WorkLater, Slot::Ask]
        .map(|slot| TIMERS.with(|timers| timers.slot(slot).filter(|(_, due)| *due <= now).map(|(id, _)| id)));
    let before = TIMERS.with(|timers| std::mem::replace(&mut timers.due, due));
    if due.iter().zip(before).any(|(now, before)| now.is_some() && *now == before) {
        restart(ctx);
    }
}

/// Makes all timers fire in this event-loop iteration. They include the one that the server waits for.
pub fn restart(ctx: Ctx) {
    stop(ctx, Timer::Work);
    stop(ctx, Timer::Ask);
    wake(ctx, Timer::Work, THIS_ITERATION);
    wake(ctx, Timer::Ask, THIS_ITERATION);
}

/// Stops a timer, if it is set.
pub fn stop(ctx: Ctx, timer: Timer) {
    let set = TIMERS.with(|timers| match timer {
        Timer::Work => [timers.work_now.take(), timers.work_later.take()],
        Timer::Ask => [timers.ask.take(), None],
    });
    set.into_iter().flatten().for_each(|(id, _)| timers::cancel(ctx, id));
}

fn stop_one(ctx: Ctx, slot: Slot) {
    if let Some((id, _)) = TIMERS.with(|timers| timers.slot(slot).take()) {
        timers::cancel(ctx, id);
    }
}

struct WorkNow;
struct WorkLater;
struct Ask;

impl Fires for WorkNow {
    fn fire(ctx: Ctx) {
        fire(ctx, Slot::WorkNow);
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
        timers.is_firing = true;
    });
    if let Some(callbacks) = callbacks::get() {
        match slot {
            Slot::WorkNow | Slot::WorkLater => (callbacks.tick)(ctx),
            Slot::Ask => (callbacks.ask_replicas)(ctx),
        }
    }
    TIMERS.with(|timers| timers.is_firing = false);
}
