//! Events and keyspace notifications that the server sends to the module.

use super::callbacks::{self, Event, Touch};
use super::info::Section;
use super::text::TextRef;
use super::{Ctx, MainThread, slots};
use libc::{c_char, c_int, c_void};
use redis_module::raw::{self, RedisModuleCtx, RedisModuleEvent, RedisModuleInfoCtx, RedisModuleString};
use std::ffi::CStr;
use std::ptr::null_mut;

/// Subscribes to the server's events, and to requests for `INFO`. [`watch_keys`] subscribes to keyspace notifications.
pub fn subscribe(ctx: Ctx) {
    const EVENTS: [u64; 9] = [
        raw::REDISMODULE_EVENT_REPLICATION_ROLE_CHANGED,
        raw::REDISMODULE_EVENT_FLUSHDB,
        raw::REDISMODULE_EVENT_LOADING,
        raw::REDISMODULE_EVENT_CLIENT_CHANGE,
        raw::REDISMODULE_EVENT_CRON_LOOP,
        raw::REDISMODULE_EVENT_MODULE_CHANGE,
        raw::REDISMODULE_EVENT_SWAPDB,
        raw::REDISMODULE_EVENT_FORK_CHILD,
        raw::REDISMODULE_EVENT_CONFIG,
    ];
    for id in EVENTS {
        // SAFETY: the callback has the signature that the server expects, and unloading the module ends the
        // subscription.
        unsafe {
            api!(RedisModule_SubscribeToServerEvent)(ctx.raw(), RedisModuleEvent { id, dataver: 1 }, Some(on_event));
        }
    }
    slots::subscribe(ctx);
    // SAFETY: as above.
    unsafe { api!(RedisModule_RegisterInfoFunc)(ctx.raw(), Some(on_info)) };
}

unsafe extern "C" fn on_info(ctx: *mut RedisModuleInfoCtx, for_crash_report: c_int) {
    if for_crash_report != 0 {
        return; // The server may have crashed inside the module, so the module's state may be inconsistent.
    }
    // SAFETY: the context is valid for this call.
    if let (Some(callbacks), Some(section)) = (callbacks::get(), unsafe { Section::begin(ctx) }) {
        (callbacks.info)(section);
    }
}

/// The module's view of the server's event loop.
#[derive(Debug, Default)]
struct EventLoop {
    /// The server reports touched keys and event-loop iterations: see [`watch_keys`].
    is_watched: bool,
    /// This iteration has ended: the event loop is about to sleep.
    is_iteration_over: bool,
    /// The module has requested another iteration: see [`request_iteration`].
    is_iteration_requested: bool,
}

static EVENT_LOOP: MainThread<EventLoop> = MainThread::new();

/// Subscribes to keyspace notifications and to event-loop iterations. The module calls this when it first needs them,
/// so that a server whose locks need neither does not pay for them.
pub fn watch_keys(ctx: Ctx) {
    const CLASSES: c_int = raw::REDISMODULE_NOTIFY_GENERIC
        | raw::REDISMODULE_NOTIFY_STRING
        | raw::REDISMODULE_NOTIFY_LIST
        | raw::REDISMODULE_NOTIFY_SET
        | raw::REDISMODULE_NOTIFY_HASH
        | raw::REDISMODULE_NOTIFY_ZSET
        | raw::REDISMODULE_NOTIFY_STREAM
        | raw::REDISMODULE_NOTIFY_EXPIRED
        | raw::REDISMODULE_NOTIFY_EVICTED;
    if !EVENT_LOOP.with(|it| std::mem::replace(&mut it.is_watched, true)) {
        // SAFETY: as in `subscribe`.
        unsafe {
            api!(RedisModule_SubscribeToKeyspaceEvents)(ctx.raw(), CLASSES, Some(on_touch));
            let event = RedisModuleEvent { id: raw::REDISMODULE_EVENT_EVENTLOOP, dataver: 1 };
            api!(RedisModule_SubscribeToServerEvent)(ctx.raw(), event, Some(on_event));
        }
    }
}

/// Notes that the module is being unloaded, which ends its subscriptions.
pub(super) fn unloaded() {
    EVENT_LOOP.with(|it| it.is_watched = false);
}

/// Whether the server reports the end of an event-loop iteration ([`Event::IterationEnds`]) before it unblocks the clients
/// that were answered.
///
/// Servers before Redis 7.2 do. They also decide how long to sleep before they report it, so that a timer set in that
/// callback would fire late. Later servers do both in the opposite order.
pub fn iteration_end_precedes_unblock() -> bool {
    newer_api!(RedisModule_AddPostNotificationJob).is_none()
}

/// Whether a client that is blocked on no key may be unblocked before the end of an event-loop iteration, when it gets the
/// reply. If `CLIENT UNBLOCK` ends the wait in between, Redis 7.0 sends no reply, and Redis 7.2 crashes.
pub fn may_unblock_early() -> bool {
    newer_api!(RedisModule_AddACLCategory).is_some() // Redis 7.4, Valkey 8
}

/// Requests a call of [`callbacks::Callbacks::after_touch`] after the command that touched a key, in the same command
/// execution. Returns `false` where the server can't do that (before Redis 7.2). Such a server would replicate what the
/// module writes in a notification *before* the command.
pub fn request_after_touch(ctx: Ctx) -> bool {
    let Some(add_job) = newer_api!(RedisModule_AddPostNotificationJob) else { return false };
    // SAFETY: this is the context of a notification, and the callback takes no data.
    unsafe { add_job(ctx.raw(), Some(on_after_touch), null_mut(), None) == raw::REDISMODULE_OK as c_int }
}

unsafe extern "C" fn on_after_touch(ctx: *mut RedisModuleCtx, _: *mut c_void) {
    if let Some(callbacks) = callbacks::get() {
        // SAFETY: the server passes a context that is valid for this call.
        (callbacks.after_touch)(unsafe { Ctx::from_raw(ctx) });
    }
}

unsafe extern "C" fn on_touch(
    ctx: *mut RedisModuleCtx,
    class: c_int,
    event: *const c_char,
    key: *mut RedisModuleString,
) -> c_int {
    // SAFETY: the event's name is a C string that is valid for this call.
    let fields_expired = !event.is_null() && unsafe { CStr::from_ptr(event) } == c"hexpired";
    let touch = match class & raw::REDISMODULE_NOTIFY_EXPIRED {
        _ if fields_expired => Touch::FieldsExpired,
        0 => Touch::Changed,
        _ => Touch::Expired,
    };
    // SAFETY: the context and the key are valid for this call.
    if let (Some(callbacks), Some(key)) = (callbacks::get(), unsafe { TextRef::from_raw(key) }) {
        // SAFETY: as above.
        (callbacks.key_touched)(unsafe { Ctx::from_raw(ctx) }, touch, key.bytes());
    }
    raw::REDISMODULE_OK as c_int
}

/// Makes the event loop run another iteration before it sleeps, if it is about to sleep.
///
/// A server before Redis 7.2 decides how long to sleep, then handles unblocked clients and the commands that they sent
/// meanwhile, and then sleeps. A timer that such a command sets would fire late.
pub fn request_iteration() {
    let is_first =
        |it: &mut EventLoop| it.is_iteration_over && !std::mem::replace(&mut it.is_iteration_requested, true);
    if iteration_end_precedes_unblock() && EVENT_LOOP.with(is_first) {
        // SAFETY: the callback exists as long as the module, which refuses to be unloaded while this is pending.
        unsafe { api!(RedisModule_EventLoopAddOneShot)(Some(on_next_iteration), null_mut()) };
    }
}

unsafe extern "C" fn on_next_iteration(_: *mut c_void) {
    EVENT_LOOP.with(|it| it.is_iteration_requested = false);
}

/// Whether the server has yet to run [`on_next_iteration`]. Unloading the module does not cancel that callback.
pub(super) fn has_pending_callback() -> bool {
    EVENT_LOOP.with(|it| it.is_iteration_requested)
}

unsafe extern "C" fn on_event(ctx: *mut RedisModuleCtx, event: RedisModuleEvent, subevent: u64, data: *mut c_void) {
    if event.id == raw::REDISMODULE_EVENT_EVENTLOOP {
        let is_over = subevent != raw::REDISMODULE_SUBEVENT_EVENTLOOP_AFTER_SLEEP;
        EVENT_LOOP.with(|it| it.is_iteration_over = is_over);
    }
    // SAFETY: `data` is what the server documents for this event.
    if let (Some(callbacks), Some(event)) = (callbacks::get(), unsafe { translate(event.id, subevent, data) }) {
        // SAFETY: the server passes a context that is valid for this call.
        (callbacks.event)(unsafe { Ctx::from_raw(ctx) }, event);
    }
}

/// Translates an event of the server. Returns `None` for one that the module ignores.
///
/// # Safety
///
/// `data` must be null or point to the structure that the server documents for the event.
unsafe fn translate(event: u64, subevent: u64, data: *mut c_void) -> Option<Event> {
    match event {
        raw::REDISMODULE_EVENT_CLIENT_CHANGE if subevent == raw::REDISMODULE_SUBEVENT_CLIENT_CHANGE_DISCONNECTED => {
            // SAFETY: see above.
            unsafe { data.cast::<raw::RedisModuleClientInfo>().as_ref() }.map(|client| Event::ClientGone(client.id))
        }
        raw::REDISMODULE_EVENT_FLUSHDB if subevent == raw::REDISMODULE_SUBEVENT_FLUSHDB_END => {
            // SAFETY: see above.
            let flushed = unsafe { data.cast::<raw::RedisModuleFlushInfo>().as_ref() }?;
            Some(Event::Flushed((flushed.dbnum >= 0).then_some(flushed.dbnum)))
        }
        raw::REDISMODULE_EVENT_SWAPDB => {
            // SAFETY: see above.
            let swap = unsafe { data.cast::<raw::RedisModuleSwapDbInfo>().as_ref() }?;
            Some(Event::Swapped(swap.dbnum_first, swap.dbnum_second))
        }
        raw::REDISMODULE_EVENT_REPLICATION_ROLE_CHANGED => Some(Event::RoleChanged),
        raw::REDISMODULE_EVENT_LOADING => Some(Event::DataReplaced),
        raw::REDISMODULE_EVENT_FORK_CHILD | raw::REDISMODULE_EVENT_CONFIG => Some(Event::ListenersMayHaveChanged),
        raw::REDISMODULE_EVENT_MODULE_CHANGE if subevent == raw::REDISMODULE_SUBEVENT_MODULE_LOADED => {
            Some(Event::ModuleLoaded)
        }
        raw::REDISMODULE_EVENT_MODULE_CHANGE => Some(Event::ModuleUnloaded),
        raw::REDISMODULE_EVENT_CRON_LOOP => Some(Event::Cron),
        raw::REDISMODULE_EVENT_EVENTLOOP if subevent == raw::REDISMODULE_SUBEVENT_EVENTLOOP_AFTER_SLEEP => {
            Some(Event::IterationBegins)
        }
        raw::REDISMODULE_EVENT_EVENTLOOP => Some(Event::IterationEnds),
        _ => None,
    }
}
