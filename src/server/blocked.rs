//! Clients that wait for their reply.
//!
//! They are blocked *on keys*, as with `BLPOP`, so that the server itself redirects them when the slot moves, and so
//! that [`Blocked::answer`] writes the reply at once rather than in a later turn of the event loop. A lock is a hash,
//! and the server never considers a hash "ready", so only this module wakes them. A client that waits for a
//! session's events waits for no key: [`block_for_events`].

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
    /// What it waits for.
    on: On,
    /// The client, if its user was not the default one.
    of_user: Option<u64>,
}

#[derive(Debug)]
enum On {
    /// Keys. In a cluster also the first of them; all are in the same slot.
    Keys(Option<Text>),
    /// Nothing that the server knows of. In that case the server waits for the module to end every block, even one
    /// that the server ended itself, and forgets the ticket only then.
    Nothing(Ticket),
}

/// Blocks the calling client on `keys` without a time limit. The caller has made sure that the client may block.
///
/// Whatever ends the wait, exactly one of [`callbacks::Callbacks::answer`] and [`callbacks::Callbacks::gone`] is called
/// for the ticket.
pub fn block(ctx: Ctx, keys: &[TextRef], ticket: Ticket) -> Option<(Blocked, Replied)> {
    let first = keys.first().filter(|_| ctx.flags().cluster()).map(|key| Text::new(key.bytes()));
    let count = c_int::try_from(keys.len()).ok()?;
    // SAFETY: this many keys live for the call, which only reads the array.
    unsafe { block_on(ctx, on_ready, (TextRef::raw_of_all(keys), count), On::Keys(first), ticket) }
}

/// The same for a client that waits for no key, and that the server never redirects.
///
/// Blocking it on an empty list of keys would let [`Blocked::answer`] answer at once, but Redis 7.0 stops at that with
/// a failed assertion. So the answer comes when the server next deals with blocked clients, right after the end of the
/// turn.
pub fn block_for_events(ctx: Ctx, ticket: Ticket) -> Option<(Blocked, Replied)> {
    // SAFETY: there are no keys.
    unsafe { block_on(ctx, on_answer, (null_mut(), 0), On::Nothing(ticket), ticket) }
}

/// # Safety
///
/// `keys` points to this many strings, which live for the call.
unsafe fn block_on(
    ctx: Ctx,
    on_ready: unsafe extern "C" fn(*mut RedisModuleCtx, *mut *mut RedisModuleString, c_int) -> c_int,
    (keys, count): (*mut *mut RedisModuleString, c_int),
    on: On,
    ticket: Ticket,
) -> Option<(Blocked, Replied)> {
    // SAFETY: the context is that of a command of a client that may block; the server takes its own references to
    // the keys; the callbacks have the signatures it expects; the private data is a number and never dereferenced.
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
    // SAFETY: the handle is new, and the callback lives as long as the module; the server refuses to unload a module
    // that has blocked clients.
    unsafe { api!(RedisModule_SetDisconnectCallback)(raw.as_ptr(), Some(on_gone)) };
    let of_user = Some(ctx.client_id()).filter(|client| acl::has_own_user(ctx, *client));
    Some((Blocked { raw, on, of_user }, Replied::later()))
}

fn as_data(ticket: Ticket) -> Option<*mut c_void> {
    usize::try_from(ticket.0).ok().map(without_provenance_mut)
}

impl Blocked {
    /// Whether the server may still end the wait itself in this turn of the event loop, even though it was answered. Once
    /// the cron has run, it no longer can.
    pub fn may_end_otherwise(&self, ctx: Ctx) -> bool {
        self.may_be_redirected(ctx) || self.is_being_closed(ctx)
    }

    /// Whether the server's cron may redirect the client: Redis 7.2 does, and the client gets two replies.
    fn may_be_redirected(&self, ctx: Ctx) -> bool {
        let key = match &self.on {
            On::Keys(key) if !events::turn_end_precedes_unblock() => key.as_ref(),
            _ => None,
        };
        key.is_some_and(|key| !ctx.serves(key))
    }

    /// Whether the user of the client was deleted (`ACL DELUSER`, `ACL LOAD`): then the server has given it the default user,
    /// drops its replies, and closes it at the end of the turn. (A blocked client can't change its user.)
    fn is_being_closed(&self, ctx: Ctx) -> bool {
        self.of_user.is_some_and(|client| !acl::has_own_user(ctx, client))
    }

    /// Ends the wait: [`callbacks::Callbacks::answer`] is called before this returns or, if the client waits for no
    /// key, before the server does anything else for it.
    pub fn answer(self) {
        self.unblock();
    }

    /// The wait has ended without the module: lets the server forget it.
    pub fn has_ended(self) {
        if let On::Nothing(_) = self.on {
            self.unblock();
        }
    }

    fn unblock(self) {
        let data = match self.on {
            On::Keys(_) => null_mut(),
            On::Nothing(ticket) => as_data(ticket).unwrap_or_default(),
        };
        // SAFETY: the handle is valid until this call, which consumes it; for a client that was blocked on keys, only
        // until `answer` or `gone` was called, upon which its owner forgets it.
        unsafe { api!(RedisModule_UnblockClient)(self.raw.as_ptr(), data) };
    }
}

/// The key became "ready" because, for example, it was turned into a list. The wait goes on; the change to the key is
/// noted elsewhere.
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
