//! The server's own timers, as `timer.rs` uses them.

use super::Ctx;
use crate::lock::Millis;
use libc::c_void;
use redis_module::raw::RedisModuleCtx;
pub(super) use redis_module::raw::RedisModuleTimerID as Id;
use std::ptr::null_mut;

/// What a timer does.
pub(super) trait Fires {
    /// Its time has come.
    fn fire(ctx: Ctx);
}

/// Makes a timer that fires once, in `period` ms: less than the server's own arithmetic bears.
pub(super) fn create<F: Fires>(ctx: Ctx, period: Millis) -> Id {
    // SAFETY: the context lives; the callback lives as long as the module, which stops the timer before it is
    // unloaded.
    unsafe { api!(RedisModule_CreateTimer)(ctx.raw(), period.cast_signed(), Some(on_fire::<F>), null_mut()) }
}

/// Stops a timer; one that is not pending any more is refused by the server, which does no harm.
pub(super) fn cancel(ctx: Ctx, id: Id) {
    // SAFETY: the context lives; the data that was given is null.
    unsafe { api!(RedisModule_StopTimer)(ctx.raw(), id, null_mut()) };
}

unsafe extern "C" fn on_fire<F: Fires>(ctx: *mut RedisModuleCtx, _: *mut c_void) {
    // SAFETY: the server calls with a context that lives for this call.
    F::fire(unsafe { Ctx::from_raw(ctx) });
}
