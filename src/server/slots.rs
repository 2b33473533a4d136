//! Slots of a cluster that are moved in one piece: `CLUSTER MIGRATESLOTS` of Valkey 9, `CLUSTER MIGRATION` of Redis
//! 8.4.
//!
//! The source sends a snapshot of the slots and then every write as it is replicated, so what the module writes
//! arrives. Meanwhile the target hides these keys from everybody. Then the slots change hands at once, and what is no
//! longer in its place is dropped: on Redis without any notification about single keys, so the module subscribes to
//! events about the slots.

use super::Ctx;
use super::callbacks::{self, Event};
use libc::{c_int, c_void};
use redis_module::raw::{self, RedisModuleCtx, RedisModuleEvent};

/// Valkey's names for what the `redis-module` crate lacks (`valkeymodule.h` of Valkey 9).
mod valkey {
    pub const OPTIONS_HANDLE_ATOMIC_SLOT_MIGRATION: u32 = 1 << 5;
    pub const EVENT_ATOMIC_SLOT_MIGRATION: u64 = 19;
    pub const IMPORT_ABORTED: u64 = 2;
    pub const IMPORT_COMPLETED: u64 = 4;
    pub const EXPORT_COMPLETED: u64 = 5;
}

/// Redis and Valkey give the same numbers different meanings.
fn is_valkey(ctx: Ctx) -> bool {
    let [version] = ctx.server_info(c"server", [c"valkey_version"]);
    !version.is_empty()
}

/// The module option without which Valkey refuses to move slots in one piece; none where the server does not know it.
pub(super) fn module_option(ctx: Ctx) -> u32 {
    let option = valkey::OPTIONS_HANDLE_ATOMIC_SLOT_MIGRATION;
    let knows = newer_api!(RedisModule_GetModuleOptionsAll).is_some_and(|all| {
        // SAFETY: takes nothing, returns a constant.
        c_int::try_from(option).is_ok_and(|option| unsafe { all() } & option != 0)
    });
    if knows && is_valkey(ctx) { option } else { 0 }
}

/// Subscribes to this server's events about such moves. A server that does not have them refuses, which does no harm.
pub(super) fn subscribe(ctx: Ctx) {
    type OnEvent = unsafe extern "C" fn(*mut RedisModuleCtx, RedisModuleEvent, u64, *mut c_void);
    let subscribe_to = |id: u64, callback: OnEvent| {
        // SAFETY: the callback has the signature that the server expects, and unloading ends the subscription.
        unsafe {
            api!(RedisModule_SubscribeToServerEvent)(ctx.raw(), RedisModuleEvent { id, dataver: 1 }, Some(callback));
        }
    };
    if is_valkey(ctx) {
        subscribe_to(valkey::EVENT_ATOMIC_SLOT_MIGRATION, on_valkey);
    } else {
        subscribe_to(raw::REDISMODULE_EVENT_CLUSTER_SLOT_MIGRATION, on_redis);
        subscribe_to(raw::REDISMODULE_EVENT_CLUSTER_SLOT_MIGRATION_TRIM, on_redis_trim);
    }
}

unsafe extern "C" fn on_valkey(ctx: *mut RedisModuleCtx, _: RedisModuleEvent, subevent: u64, _: *mut c_void) {
    if let valkey::IMPORT_ABORTED | valkey::IMPORT_COMPLETED | valkey::EXPORT_COMPLETED = subevent {
        // SAFETY: the server calls with a context that lives for this call.
        tell(unsafe { Ctx::from_raw(ctx) });
    }
}

unsafe extern "C" fn on_redis(ctx: *mut RedisModuleCtx, _: RedisModuleEvent, subevent: u64, _: *mut c_void) {
    if let raw::REDISMODULE_SUBEVENT_CLUSTER_SLOT_MIGRATION_IMPORT_FAILED
    | raw::REDISMODULE_SUBEVENT_CLUSTER_SLOT_MIGRATION_IMPORT_COMPLETED
    | raw::REDISMODULE_SUBEVENT_CLUSTER_SLOT_MIGRATION_MIGRATE_COMPLETED = subevent
    {
        // SAFETY: as in `on_valkey`.
        tell(unsafe { Ctx::from_raw(ctx) });
    }
}

/// The keys left behind are being dropped, now or from now on.
unsafe extern "C" fn on_redis_trim(ctx: *mut RedisModuleCtx, _: RedisModuleEvent, _: u64, _: *mut c_void) {
    // SAFETY: as in `on_valkey`.
    tell(unsafe { Ctx::from_raw(ctx) });
}

fn tell(ctx: Ctx) {
    if let Some(callbacks) = callbacks::get() {
        (callbacks.event)(ctx, Event::SlotsMoved);
    }
}
