//! Atomic slot migration in a cluster: `CLUSTER MIGRATESLOTS` of Valkey 9, `CLUSTER MIGRATION` of Redis 8.4.
//!
//! The source node sends a snapshot of the slots, and then every write as it is replicated. So the target receives what
//! the module writes. Until the migration ends, the target hides these keys from all clients. Then all the slots change
//! their owner at once, and a node drops the keys that it no longer owns. On Redis, the keyspace notifications that the
//! module subscribes to do not report these keys. So the module subscribes to events about the slots.

use super::Ctx;
use super::callbacks::{self, Event};
use libc::{c_int, c_void};
use redis_module::raw::{self, RedisModuleCtx, RedisModuleEvent};

/// Constants of `valkeymodule.h` of Valkey 9 that the `redis-module` crate lacks.
mod valkey {
    pub const OPTIONS_HANDLE_ATOMIC_SLOT_MIGRATION: u32 = 1 << 5;
    pub const EVENT_ATOMIC_SLOT_MIGRATION: u64 = 19;
    pub const IMPORT_ABORTED: u64 = 2;
    pub const IMPORT_COMPLETED: u64 = 4;
    pub const EXPORT_COMPLETED: u64 = 5;
}

/// Whether the server is Valkey. Redis and Valkey use the same numbers for different options and events.
fn is_valkey(ctx: Ctx) -> bool {
    let [version] = ctx.server_info(c"server", [c"valkey_version"]);
    !version.is_empty()
}

/// The module option without which Valkey refuses atomic slot migrations. 0 where the server does not have the option.
pub(super) fn module_option(ctx: Ctx) -> u32 {
    let option = valkey::OPTIONS_HANDLE_ATOMIC_SLOT_MIGRATION;
    let is_known = newer_api!(RedisModule_GetModuleOptionsAll).is_some_and(|all| {
        // SAFETY: the function takes nothing, and returns a constant.
        c_int::try_from(option).is_ok_and(|option| unsafe { all() } & option != 0)
    });
    if is_known && is_valkey(ctx) { option } else { 0 }
}

/// Subscribes to the server's events about atomic slot migrations. A server without such events refuses the
/// subscription, which is harmless.
pub(super) fn subscribe(ctx: Ctx) {
    type OnEvent = unsafe extern "C" fn(*mut RedisModuleCtx, RedisModuleEvent, u64, *mut c_void);
    let subscribe_to = |id: u64, callback: OnEvent| {
        // SAFETY: the callback has the signature that the server expects, and unloading the module ends the
        // subscription.
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
        // SAFETY: the server passes a context that is valid for this call.
        report_moved_slots(unsafe { Ctx::from_raw(ctx) });
    }
}

unsafe extern "C" fn on_redis(ctx: *mut RedisModuleCtx, _: RedisModuleEvent, subevent: u64, _: *mut c_void) {
    if let raw::REDISMODULE_SUBEVENT_CLUSTER_SLOT_MIGRATION_IMPORT_FAILED
    | raw::REDISMODULE_SUBEVENT_CLUSTER_SLOT_MIGRATION_IMPORT_COMPLETED
    | raw::REDISMODULE_SUBEVENT_CLUSTER_SLOT_MIGRATION_MIGRATE_COMPLETED = subevent
    {
        // SAFETY: as in `on_valkey`.
        report_moved_slots(unsafe { Ctx::from_raw(ctx) });
    }
}

/// The server drops the keys that a migration left behind: it starts to drop them, does it in the background, or has
/// done it.
unsafe extern "C" fn on_redis_trim(ctx: *mut RedisModuleCtx, _: RedisModuleEvent, _: u64, _: *mut c_void) {
    // SAFETY: as in `on_valkey`.
    report_moved_slots(unsafe { Ctx::from_raw(ctx) });
}

fn report_moved_slots(ctx: Ctx) {
    if let Some(callbacks) = callbacks::get() {
        (callbacks.event)(ctx, Event::SlotsMoved);
    }
}
