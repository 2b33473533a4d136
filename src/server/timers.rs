//! The server's timer API, which `timer.rs` uses.

use super::Ctx;
use crate::lock::Millis;
use libc::c_void;
use redis_module::raw::RedisModuleCtx;
pub(super) use redis_module::raw::RedisModuleTimerID as Id;
use std::ptr::null_mut;

/// The callback of a timer.
pub(super) trait Fires {
    /// Runs when the timer fires.
    fn fire(ctx: Ctx);
}

/// The period of a timer for this event-loop iteration, in ms.
///
/// The server has its event loop wait for the first of all timers by the wall clock, and installs a new one only if that
/// is the first. One that is due by the wall clock can be due up to a millisecond later by the event loop's own clock,
/// and a new timer would fire as late. A negative period makes the new one the first.
const FIRST_OF_ALL: i64 = -2;

/// Creates a timer that fires once: in `period` ms, or in this event-loop iteration if there is none. The period must
/// not overflow the server's computation of the time.
pub(super) fn create<F: Fires>(ctx: Ctx, period: Option<Millis>) -> Id {
    let period = period.map_or(FIRST_OF_ALL, Millis::cast_signed);
    // SAFETY: the context is valid. The callback exists as long as the module, which stops the timer before it is
    // unloaded.
    unsafe { api!(RedisModule_CreateTimer)(ctx.raw(), period, Some(on_fire::<F>), null_mut()) }
}

/// Stops a timer. The server refuses the id of a timer that has already fired, which is harmless.
pub(super) fn cancel(ctx: Ctx, id: Id) {
    // SAFETY: the context is valid. The timer was created with null data.
    unsafe { api!(RedisModule_StopTimer)(ctx.raw(), id, null_mut()) };
}

unsafe extern "C" fn on_fire<F: Fires>(ctx: *mut RedisModuleCtx, _: *mut c_void) {
    // SAFETY: the server passes a context that is valid for this call.
    F::fire(unsafe { Ctx::from_raw(ctx) });
}
