//! The border with the server. It wraps all `unsafe` code in functions that are safe to call.
//!
//! All of it runs on the server's main thread: the event loop runs commands, timers and events one at a time. The
//! SAFETY comments rely on `redismodule.h` and `module.c` of Redis 7.0 to 8 and Valkey 8 to 9.

/// A function of the module API that every supported server has. [`complete`] verifies this when the module is loaded.
macro_rules! api {
    ($name:ident) => {{
        #[allow(unused_unsafe)]
        // SAFETY: the function pointers are written once, when the module is loaded, and only read afterwards. None is
        // null: `load` calls none of them if `complete` finds one missing, and a test compares the list in `complete`
        // with the calls.
        let function = unsafe { redis_module::raw::$name.unwrap_unchecked() };
        function
    }};
}

/// A function of the module API that only newer servers have.
macro_rules! newer_api {
    ($name:ident) => {{
        #[allow(unused_unsafe)]
        // SAFETY: as in `api!`.
        let function = unsafe { redis_module::raw::$name };
        function
    }};
}

pub mod acl;
pub mod allocator;
pub mod blocked;
mod bytes;
mod call;
pub mod callbacks;
pub mod clients;
pub mod clock;
pub mod cluster;
pub mod commands;
pub mod config;
pub mod ctx;
pub mod discarded;
pub mod events;
mod grammar;
pub mod info;
pub mod key;
pub mod main_thread;
mod open_keys;
pub mod replicas;
pub mod reply;
pub mod slice;
mod slots;
pub mod text;
pub mod timer;
mod timers;
pub mod writes;

pub use commands::Call;
pub use ctx::{Ctx, Role};
pub use key::Key;
pub use main_thread::{Constant, MainThread};
pub use text::{AsText, Text, TextRef};

use redis_module::{Context, RedisString, Status, raw};

/// The server's own commands that the module relies on. Commands that only newer servers have are not listed.
pub fn needed_commands(ctx: Ctx) -> &'static [&'static std::ffi::CStr] {
    if ctx.flags().cluster() { &[c"CLIENT", c"SETRANGE", c"CLUSTER", c"EXISTS"] } else { &[c"CLIENT", c"SETRANGE"] }
}

/// Whether the server has every function of the module API that `api!` calls: those of Redis 7.0.
pub fn complete() -> bool {
    macro_rules! all {
        ($($name:ident)*) => {
            // SAFETY: as in `api!`.
            unsafe { true $(&& { let function = raw::$name; function.is_some() })* }
        };
    }
    all!(
        RedisModule_ACLCheckCommandPermissions RedisModule_ACLCheckKeyPermissions
        RedisModule_AvoidReplicaTraffic RedisModule_BlockClientOnKeys RedisModule_Call
        RedisModule_CallReplyArrayElement RedisModule_CallReplyInteger RedisModule_CallReplyLength
        RedisModule_CallReplyStringPtr RedisModule_CallReplyType RedisModule_CloseKey
        RedisModule_CreateCommand RedisModule_CreateString RedisModule_CreateStringFromCallReply RedisModule_CreateStringFromLongLong
        RedisModule_CreateTimer RedisModule_DeleteKey RedisModule_EventLoopAddOneShot
        RedisModule_FreeCallReply RedisModule_FreeModuleUser RedisModule_FreeServerInfo RedisModule_FreeString
        RedisModule_FreeThreadSafeContext RedisModule_GetAbsExpire RedisModule_GetApi
        RedisModule_GetBlockedClientPrivateData RedisModule_GetClientId RedisModule_GetClientInfoById RedisModule_GetClientUserNameById
        RedisModule_GetCommand RedisModule_GetContextFlags RedisModule_GetCurrentUserName
        RedisModule_GetDetachedThreadSafeContext RedisModule_GetModuleUserFromUserName RedisModule_GetNotifyKeyspaceEvents
        RedisModule_GetSelectedDb RedisModule_GetServerInfo RedisModule_HashGet RedisModule_HashSet
        RedisModule_InfoAddFieldCString RedisModule_InfoAddFieldULongLong RedisModule_InfoAddSection RedisModule_IsKeysPositionRequest
        RedisModule_KeyAtPos RedisModule_KeyType RedisModule_LoadConfigs RedisModule_Log
        RedisModule_NotifyKeyspaceEvent RedisModule_OpenKey RedisModule_PublishMessage
        RedisModule_RegisterEnumConfig RedisModule_RegisterInfoFunc RedisModule_RegisterNumericConfig
        RedisModule_Replicate RedisModule_ReplicateVerbatim RedisModule_ReplyWithArray
        RedisModule_ReplyWithError RedisModule_ReplyWithLongLong RedisModule_ReplyWithMap
        RedisModule_ReplyWithNull RedisModule_ReplyWithSimpleString RedisModule_ReplyWithStringBuffer
        RedisModule_ScanCursorCreate RedisModule_ScanCursorDestroy RedisModule_ScanKey RedisModule_SelectDb
        RedisModule_ServerInfoGetField RedisModule_SetAbsExpire RedisModule_SetCommandInfo
        RedisModule_SetDisconnectCallback RedisModule_SetModuleOptions RedisModule_SignalModifiedKey
        RedisModule_StopTimer RedisModule_StringPtrLen RedisModule_SubscribeToKeyspaceEvents
        RedisModule_SubscribeToServerEvent RedisModule_UnblockClient RedisModule_ValueLength
    )
}

/// Loads the module: sets its options and calls `start` with the context and the module's arguments.
pub fn load(context: &Context, args: &[RedisString], start: fn(Ctx, &[TextRef]) -> bool) -> Status {
    if !complete() {
        context.log_warning("holdfast: this server lacks functions that came with Redis 7.0");
        return Status::Err;
    }
    // SAFETY: the context and the arguments are valid for the call; the server frees neither before it returns.
    let (ctx, args): (Ctx, Vec<TextRef>) =
        unsafe { (Ctx::from_raw(context.ctx), args.iter().filter_map(|arg| TextRef::from_raw(arg.inner)).collect()) };
    // SAFETY: the context is that of loading. The options tell the server not to signal a key as modified when the
    // module opens it (the module signals changes itself), and that the module supports slot migration.
    unsafe {
        let options = raw::REDISMODULE_OPTION_NO_IMPLICIT_SIGNAL_MODIFIED | slots::module_option(ctx);
        api!(RedisModule_SetModuleOptions)(ctx.raw(), libc::c_int::try_from(options).unwrap_or(0));
    }
    main_thread::begin();
    if start(ctx, &args) { Status::Ok } else { Status::Err }
}

/// Unloads the module. Refuses while the module is needed, and while the server has yet to run a one-shot callback.
pub fn unload(context: &Context, is_needed: fn(Ctx) -> bool, stop: fn(Ctx)) -> Status {
    // SAFETY: the context is valid for the call.
    let ctx = unsafe { Ctx::from_raw(context.ctx) };
    if is_needed(ctx) || events::has_pending_callback() {
        return Status::Err;
    }
    stop(ctx);
    ctx::unloaded();
    events::unloaded();
    Status::Ok
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::{read_dir, read_to_string};
    use std::path::Path;

    /// The text between each occurrence of `prefix` and the next closing parenthesis.
    fn arguments<'a>(text: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        text.match_indices(prefix).filter_map(move |(at, _)| text.get(at + prefix.len()..)?.split(')').next())
    }

    #[test]
    fn complete_lists_exactly_the_functions_that_api_calls() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/server");
        let files = read_dir(folder).expect("the folder can be read").map(|file| file.expect("so can this").path());
        let sources: Vec<String> = files.map(|file| read_to_string(file).expect("a file of source")).collect();
        let functions = |it: &&str| it.starts_with("RedisModule_");
        let calls = |text| arguments(text, " api!(").chain(arguments(text, "(api!("));
        let called: BTreeSet<&str> = sources.iter().flat_map(|text| calls(text)).filter(functions).collect();
        let list = sources.iter().flat_map(|text| arguments(text, "    all!(")).flat_map(str::split_whitespace);
        let listed: BTreeSet<&str> = list.filter(functions).collect();
        assert_eq!(listed, called);
    }
}
