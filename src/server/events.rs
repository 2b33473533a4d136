//! What the server reports to the module.

use super::callbacks::{self, Event, Touch};
use super::info::Section;
use super::text::TextRef;
use super::{Ctx, MainThread, slots};
use libc::{c_char, c_int, c_void};
use redis_module::raw::{self, RedisModuleCtx, RedisModuleEvent, RedisModuleInfoCtx, RedisModuleString};
use std::ffi::CStr;
use std::ptr::null_mut;

/// Subscribes to the server's events, and to requests for `INFO`. (Touched keys are subscribed to separately:
/// [`watch_keys`].)
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
        // SAFETY: the callback has the signature that the server expects, and unloading ends the subscription.
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
        return; // The crash may have come while the module was at work: its state is not to be touched.
    }
    // SAFETY: the context lives for this call.
    if let (Some(callbacks), Some(section)) = (callbacks::get(), unsafe { Section::begin(ctx) }) {
        (callbacks.info)(section);
    }
}

/// What the server has been asked to report, and where it is in its event loop.
#[derive(Debug, Default)]
struct EventLoop {
    /// Keys and turns are reported: [`watch_keys`].
    is_watched: bool,
    /// This turn is over: the loop is about to sleep.
    turn_is_over: bool,
    /// Another turn was asked for: [`go_round_again`].
    goes_round_again: bool,
}

static EVENT_LOOP: MainThread<EventLoop> = MainThread::new();

/// From now on, reports each touched key and each turn of the event loop. Until a request waits there is nothing to
/// know, so a server without waiting requests does not pay for it.
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

/// The module is being unloaded, and its subscriptions end with it.
pub(super) fn unloaded() {
    EVENT_LOOP.with(|it| it.is_watched = false);
}

/// Whether the end of a turn of the event loop ([`Event::TurnEnds`]) comes before the server ends the blocks of
/// clients that were answered. It does before Redis 7.2, where the event loop has also decided already how long to
/// sleep, so that a timer set then would fire late. Later servers do both the other way round.
pub fn turn_end_precedes_unblock() -> bool {
    newer_api!(RedisModule_AddPostNotificationJob).is_none()
}

/// Requests a call of [`callbacks::Callbacks::after_touch`] after the command that touched a key, in the same step.
/// `false` where the server can't do that (before Redis 7.2): there, what is written inside the notification would be
/// replicated *before* the command.
pub fn request_after_touch(ctx: Ctx) -> bool {
    let Some(add_job) = newer_api!(RedisModule_AddPostNotificationJob) else { return false };
    // SAFETY: this is the context of a notification; the callback takes no data.
    unsafe { add_job(ctx.raw(), Some(on_after_touch), null_mut(), None) == raw::REDISMODULE_OK as c_int }
}

unsafe extern "C" fn on_after_touch(ctx: *mut RedisModuleCtx, _: *mut c_void) {
    if let Some(callbacks) = callbacks::get() {
        // SAFETY: the server calls with a context that lives for this call.
        (callbacks.after_touch)(unsafe { Ctx::from_raw(ctx) });
    }
}

unsafe extern "C" fn on_touch(
    ctx: *mut RedisModuleCtx,
    class: c_int,
    event: *const c_char,
    key: *mut RedisModuleString,
) -> c_int {
    // SAFETY: the server names the event by a C string that lives for this call.
    let fields_expired = !event.is_null() && unsafe { CStr::from_ptr(event) } == c"hexpired";
    let touch = match class & raw::REDISMODULE_NOTIFY_EXPIRED {
        _ if fields_expired => Touch::FieldsExpired,
        0 => Touch::Changed,
        _ => Touch::Expired,
    };
    // SAFETY: context and key live for this call.
    if let (Some(callbacks), Some(key)) = (callbacks::get(), unsafe { TextRef::from_raw(key) }) {
        // SAFETY: as above.
        (callbacks.key_touched)(unsafe { Ctx::from_raw(ctx) }, touch, key.bytes());
    }
    raw::REDISMODULE_OK as c_int
}

/// Lets the event loop make another turn before it sleeps, if it is about to.
///
/// Before Redis 7.2 it decides how long to sleep, then deals with clients that were blocked (and with any commands
/// they sent meanwhile), and sleeps: whatever those commands set in motion would have to wait.
pub fn go_round_again() {
    let is_first = |it: &mut EventLoop| it.turn_is_over && !std::mem::replace(&mut it.goes_round_again, true);
    if turn_end_precedes_unblock() && EVENT_LOOP.with(is_first) {
        // SAFETY: the callback lives as long as the module, which refuses to be unloaded while this is pending.
        unsafe { api!(RedisModule_EventLoopAddOneShot)(Some(on_next_turn), null_mut()) };
    }
}

unsafe extern "C" fn on_next_turn(_: *mut c_void) {
    EVENT_LOOP.with(|it| it.goes_round_again = false);
}

/// Whether the server will still call the module although nothing is subscribed any more.
pub(super) fn is_called_back() -> bool {
    EVENT_LOOP.with(|it| it.goes_round_again)
}

unsafe extern "C" fn on_event(ctx: *mut RedisModuleCtx, event: RedisModuleEvent, subevent: u64, data: *mut c_void) {
    if event.id == raw::REDISMODULE_EVENT_EVENTLOOP {
        let over = subevent != raw::REDISMODULE_SUBEVENT_EVENTLOOP_AFTER_SLEEP;
        EVENT_LOOP.with(|it| it.turn_is_over = over);
    }
    // SAFETY: `data` is what the server documents for this event.
    if let (Some(callbacks), Some(event)) = (callbacks::get(), unsafe { translate(event.id, subevent, data) }) {
        // SAFETY: the server calls with a context that lives for this call.
        (callbacks.event)(unsafe { Ctx::from_raw(ctx) }, event);
    }
}

/// # Safety
///
/// `data` is null or points to the structure that the server documents for the event.
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
            Some(Event::TurnBegins)
        }
        raw::REDISMODULE_EVENT_EVENTLOOP => Some(Event::TurnEnds),
        _ => None,
    }
}
