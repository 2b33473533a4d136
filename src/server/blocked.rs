//! Clients that wait for their reply.
//!
//! They are blocked *on keys*, as `BLPOP` blocks: so the server itself redirects them when the slot moves, and
//! [`Blocked::answer`] writes the reply at once, not in a later turn of the event loop. A lock is a hash, and the
//! server never finds a hash "ready", so nobody but this module wakes them.

use super::callbacks::{self, Ticket};
use super::reply::Replied;
use super::text::TextRef;
use super::{Ctx, reply};
use redis_module::raw::{self, RedisModuleBlockedClient, RedisModuleCtx, RedisModuleString};
use std::ffi::c_int;
use std::ptr::{NonNull, null_mut, without_provenance_mut};

/// A client that this module blocked.
#[derive(Debug)]
pub struct Blocked {
    raw: NonNull<RedisModuleBlockedClient>,
}

/// Blocks the calling client on `keys`, for as long as it takes. The caller saw to it that the client may block.
///
/// Whatever ends the wait, exactly one of [`callbacks::Callbacks::answer`] and [`callbacks::Callbacks::gone`] is called for
/// the ticket.
pub fn block<'k>(ctx: Ctx, keys: impl Iterator<Item = TextRef<'k>>, ticket: Ticket) -> Option<(Blocked, Replied)> {
    let mut keys: Vec<*mut RedisModuleString> = keys.map(|key| key.raw()).collect();
    let count = c_int::try_from(keys.len()).ok()?;
    let ticket = without_provenance_mut(usize::try_from(ticket.0).ok()?);
    // SAFETY: the context is that of a command of a client that may block; the server takes its own references to
    // the keys; the callbacks have the signatures it expects; the private data is a number and never dereferenced.
    let raw = unsafe {
        api!(RedisModule_BlockClientOnKeys)(
            ctx.raw(),
            Some(on_ready),
            Some(on_answer),
            None,
            0,
            keys.as_mut_ptr(),
            count,
            ticket,
        )
    };
    let raw = NonNull::new(raw)?;
    // SAFETY: the handle is new, and the callback lives as long as the module; the server refuses to unload a module
    // that has blocked clients.
    unsafe { api!(RedisModule_SetDisconnectCallback)(raw.as_ptr(), Some(on_gone)) };
    Some((Blocked { raw }, Replied::later()))
}

impl Blocked {
    /// Ends the wait: calls [`callbacks::Callbacks::answer`] before it returns.
    pub fn answer(self) {
        // SAFETY: the handle is valid until it was answered, which consumes it, or until `gone` was called, upon
        // which its owner forgets it.
        unsafe { api!(RedisModule_UnblockClient)(self.raw.as_ptr(), null_mut()) };
    }
}

/// The key became "ready": made into a list, say. The wait goes on; the key's change was noted elsewhere.
unsafe extern "C" fn on_ready(_: *mut RedisModuleCtx, _: *mut *mut RedisModuleString, _: c_int) -> c_int {
    raw::REDISMODULE_ERR as c_int
}

unsafe extern "C" fn on_answer(ctx: *mut RedisModuleCtx, _: *mut *mut RedisModuleString, _: c_int) -> c_int {
    if let Some(callbacks) = callbacks::get() {
        // SAFETY: the server calls with a context that lives for this call.
        let ctx = unsafe { Ctx::from_raw(ctx) };
        (callbacks.answer)(ctx, ticket(ctx));
    }
    reply::OK
}

unsafe extern "C" fn on_gone(ctx: *mut RedisModuleCtx, _: *mut RedisModuleBlockedClient) {
    if let Some(callbacks) = callbacks::get() {
        // SAFETY: as in `on_answer`.
        let ctx = unsafe { Ctx::from_raw(ctx) };
        (callbacks.gone)(ctx, ticket(ctx));
    }
}

fn ticket(ctx: Ctx) -> Ticket {
    // SAFETY: this is the context of a blocked client; its private data is the number given in `block`.
    Ticket(unsafe { api!(RedisModule_GetBlockedClientPrivateData)(ctx.raw()) }.addr() as u64)
}
