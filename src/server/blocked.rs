//! Blocked clients.
//!
//! A client that waits for a lock is blocked *on keys*, as with `BLPOP`. So the server itself redirects it when the
//! slot moves, and [`Blocked::answer`] writes the reply immediately instead of in a later event-loop iteration. A lock
//! is a hash, and the server never considers a hash "ready", so that only this module unblocks the client. A client
//! that waits for a session's events is blocked on no key: see [`block_for_events`].

use super::callbacks::{self, Ticket};
use super::reply::Replied;
use super::text::{Text, TextRef};
use super::{Ctx, acl, events, reply};
use libc::{c_int, c_void};
use redis_module::raw::{self, RedisModuleBlockedClient, RedisModuleCtx, RedisModuleString};
use std::ptr::{NonNull, null_mut, without_provenance_mut};

/// A client that this module blocked.
#[derive(Debug)]
pub struct Blocked {
    raw: NonNull<RedisModuleBlockedClient>,
    target: WaitTarget,
    client: u64,
    /// Whether the client's user was the default user when it was blocked. `None` for a client that is no connection:
    /// another module's, which has all permissions.
    had_default_user: Option<bool>,
}

/// What a client is blocked on.
#[derive(Debug)]
enum WaitTarget {
    /// Keys. In a cluster, the first of them is stored; all are in the same slot.
    Keys(Option<Text>),
    /// Events of a session, of which the server knows nothing. The module must unblock every such client, even one that
    /// the server has unblocked itself. The server keeps the ticket until then.
    Events(Ticket),
}

/// Blocks the calling client on `keys` without a timeout. The caller must have checked that the client may block.
///
/// The server calls exactly one of [`callbacks::Callbacks::answer`] and [`callbacks::Callbacks::gone`] for the ticket,
/// whatever ends the wait.
pub fn block(ctx: Ctx, keys: &[TextRef], ticket: Ticket) -> Option<(Blocked, Replied)> {
    let first = keys.first().filter(|_| ctx.flags().cluster()).map(|key| Text::new(key.bytes()));
    let count = c_int::try_from(keys.len()).ok()?;
    // SAFETY: `count` keys are valid for the call, which only reads the array.
    unsafe { block_on(ctx, on_ready, (TextRef::raw_of_all(keys), count), WaitTarget::Keys(first), ticket) }
}

/// Blocks the calling client on no key. The server never redirects such a client.
///
/// [`Blocked::answer`] does not write the reply immediately. The server asks for the reply when it next handles
/// unblocked clients, at the end of the event-loop iteration. Blocking on an empty list of keys would avoid the delay,
/// but Redis 7.0 then fails an assertion.
pub fn block_for_events(ctx: Ctx, ticket: Ticket) -> Option<(Blocked, Replied)> {
    // SAFETY: there are no keys.
    unsafe { block_on(ctx, on_answer, (null_mut(), 0), WaitTarget::Events(ticket), ticket) }
}

/// # Safety
///
/// `keys` must point to `count` strings that are valid for the call.
unsafe fn block_on(
    ctx: Ctx,
    on_ready: unsafe extern "C" fn(*mut RedisModuleCtx, *mut *mut RedisModuleString, c_int) -> c_int,
    (keys, count): (*mut *mut RedisModuleString, c_int),
    target: WaitTarget,
    ticket: Ticket,
) -> Option<(Blocked, Replied)> {
    // SAFETY: the context is that of a command of a client that may block. The server takes its own references to the
    // keys. The callbacks have the signatures it expects. The private data is a number and never dereferenced.
    let raw = unsafe {
        api!(RedisModule_BlockClientOnKeys)(
            ctx.raw(),
            Some(on_ready),
            Some(on_answer),
            None,
            0,
            keys,
            count,
            as_data(ticket)?,
        )
    };
    let raw = NonNull::new(raw)?;
    // SAFETY: the handle is new, and the callback exists as long as the module. The server refuses to unload a module
    // that has blocked clients.
    unsafe { api!(RedisModule_SetDisconnectCallback)(raw.as_ptr(), Some(on_gone)) };
    let client = ctx.client_id();
    let had_default_user = acl::has_default_user(ctx, client);
    Some((Blocked { raw, target, client, had_default_user }, Replied::later()))
}

fn as_data(ticket: Ticket) -> Option<*mut c_void> {
    usize::try_from(ticket.0).ok().map(without_provenance_mut)
}

impl Blocked {
    /// Whether the client has the default user. (A blocked client can't change its user.)
    pub fn is_of_default_user(&self) -> bool {
        self.had_default_user == Some(true)
    }

    /// Whether the server may still end the wait itself in this event-loop iteration, although the module has a reply.
    /// Once the cron has run, it no longer can.
    pub fn may_be_ended_by_server(&self, ctx: Ctx) -> bool {
        self.may_be_redirected(ctx) || self.is_being_closed(ctx)
    }

    /// Whether the server's cron may redirect the client. Redis 7.2 does so even if the client was answered, and the
    /// client gets two replies.
    fn may_be_redirected(&self, ctx: Ctx) -> bool {
        let key = match &self.target {
            WaitTarget::Keys(key) if !events::iteration_end_precedes_unblock() => key.as_ref(),
            _ => None,
        };
        key.is_some_and(|key| !ctx.serves(key))
    }

    /// Whether the user of the client was deleted (`ACL DELUSER`, `ACL LOAD`). The server then gives the client the
    /// default user, drops its replies, and closes it at the end of the event-loop iteration.
    fn is_being_closed(&self, ctx: Ctx) -> bool {
        self.had_default_user == Some(false) && acl::has_default_user(ctx, self.client) != Some(false)
    }

    /// Ends the wait. The server calls [`callbacks::Callbacks::answer`] before this function returns. If the client is
    /// blocked on no key, the server calls it later, before it does anything else for the client.
    pub fn answer(self) {
        self.unblock();
    }

    /// Frees the server's record of a wait that has already ended, where the server keeps one until the module unblocks
    /// the client.
    pub fn has_ended(self) {
        if let WaitTarget::Events(_) = self.target {
            self.unblock();
        }
    }

    fn unblock(self) {
        let data = match self.target {
            WaitTarget::Keys(_) => null_mut(),
            WaitTarget::Events(ticket) => as_data(ticket).unwrap_or_default(),
        };
        // SAFETY: the handle is valid until this call, which consumes it. For a client that was blocked on keys, it is
        // valid only until `answer` or `gone` is called: the owner of the handle drops it then.
        unsafe { api!(RedisModule_UnblockClient)(self.raw.as_ptr(), data) };
    }
}

/// The server calls this if the key becomes "ready" because, for example, it is now a list. The client stays blocked.
/// The keyspace notification reports the change of the key.
unsafe extern "C" fn on_ready(_: *mut RedisModuleCtx, _: *mut *mut RedisModuleString, _: c_int) -> c_int {
    raw::REDISMODULE_ERR as c_int
}

unsafe extern "C" fn on_answer(ctx: *mut RedisModuleCtx, _: *mut *mut RedisModuleString, _: c_int) -> c_int {
    if let Some(callbacks) = callbacks::get() {
        // SAFETY: the server passes a context that is valid for this call.
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
    // SAFETY: this is the context of a blocked client. Its private data is the number that `block_on` passed.
    Ticket(unsafe { api!(RedisModule_GetBlockedClientPrivateData)(ctx.raw()) }.addr() as u64)
}
