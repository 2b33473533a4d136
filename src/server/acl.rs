//! What users may do.

use super::Ctx;
use super::text::{AsText, Text, TextRef};
use libc::c_int;
use redis_module::raw::{self, RedisModuleUser};
use std::ptr::NonNull;

/// A user of the server, as it is now.
#[derive(Debug)]
pub struct User(NonNull<RedisModuleUser>);

impl User {
    /// The user of a connection; `None` if there is no such connection, as for a call by another module, which may do
    /// anything.
    pub fn of_client(ctx: Ctx, client: u64) -> Option<Self> {
        user_name(ctx, client).as_ref().and_then(Self::named)
    }

    fn named(name: &Text) -> Option<Self> {
        // SAFETY: the name lives for the call.
        NonNull::new(unsafe { api!(RedisModule_GetModuleUserFromUserName)(name.as_text().raw()) }).map(Self)
    }

    /// Whether the user may read a key.
    pub fn may_read(&self, key: &Text) -> bool {
        let access = c_int::try_from(raw::REDISMODULE_CMD_KEY_ACCESS).unwrap_or(0);
        // SAFETY: user and key live for the call.
        let checked = unsafe { api!(RedisModule_ACLCheckKeyPermissions)(self.0.as_ptr(), key.as_text().raw(), access) };
        checked == raw::REDISMODULE_OK as c_int
    }

    /// Whether the user may run a command with these arguments: its name, then the others.
    pub fn may_run(&self, command: &[TextRef]) -> bool {
        let (argv, argc) = (TextRef::raw_of_all(command), c_int::try_from(command.len()).unwrap_or(0));
        // SAFETY: user and arguments live for the call, which changes nothing, and only reads this many of the array.
        let checked = unsafe { api!(RedisModule_ACLCheckCommandPermissions)(self.0.as_ptr(), argv, argc) };
        checked == raw::REDISMODULE_OK as c_int
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // SAFETY: made by `named`, freed once; the server's own user stays.
        unsafe { api!(RedisModule_FreeModuleUser)(self.0.as_ptr()) };
    }
}

/// The name of the user of a connection.
fn user_name(ctx: Ctx, client: u64) -> Option<Text> {
    // SAFETY: the context lives; without automatic memory, which the module never asks for, the string is ours to free.
    unsafe { Text::from_raw(api!(RedisModule_GetClientUserNameById)(ctx.raw(), client)) }
}

/// Whether a connection has another user than the default one.
pub(super) fn has_own_user(ctx: Ctx, client: u64) -> bool {
    user_name(ctx, client).is_some_and(|name| name.bytes() != b"default")
}

/// The name of the user who sent the running command.
fn current_user_name(ctx: Ctx) -> Option<Text> {
    if !ctx.flags().in_script() {
        return user_name(ctx, ctx.client_id());
    }
    // SAFETY: the context lives. A script's own client, which is no connection, has the user of the client that called
    // the script; the string is ours to free.
    unsafe { Text::from_raw(api!(RedisModule_GetCurrentUserName)(ctx.raw())) }
}

/// Whether the running command was sent by the user of a connection.
pub fn is_user_of(ctx: Ctx, client: u64) -> bool {
    let (current, other) = (current_user_name(ctx), user_name(ctx, client));
    matches!((current, other), (Some(current), Some(other)) if current.bytes() == other.bytes())
}
