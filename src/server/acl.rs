//! Permissions of users (ACL).

use super::Ctx;
use super::text::{AsText, Text, TextRef};
use libc::c_int;
use redis_module::raw::{self, RedisModuleUser};
use std::ptr::NonNull;

/// A user of the server, with its current permissions.
#[derive(Debug)]
pub struct User(NonNull<RedisModuleUser>);

impl User {
    /// The user of a connection. `None` if there is no such connection, as for a call by another module, which has all
    /// permissions.
    pub fn of_client(ctx: Ctx, client: u64) -> Option<Self> {
        user_name(ctx, client).and_then(|name| Self::named(name.as_text()))
    }

    /// The user of this name, if there is one.
    pub fn named(name: TextRef) -> Option<Self> {
        // SAFETY: the name is valid for the call.
        NonNull::new(unsafe { api!(RedisModule_GetModuleUserFromUserName)(name.raw()) }).map(Self)
    }

    /// Whether the user may read a key.
    pub fn may_read(&self, key: &Text) -> bool {
        let access = c_int::try_from(raw::REDISMODULE_CMD_KEY_ACCESS).unwrap_or(0);
        // SAFETY: the user and the key are valid for the call.
        let checked = unsafe { api!(RedisModule_ACLCheckKeyPermissions)(self.0.as_ptr(), key.as_text().raw(), access) };
        checked == raw::REDISMODULE_OK as c_int
    }

    /// Whether the user may run `command`: its name, followed by its arguments.
    pub fn may_run(&self, command: &[TextRef]) -> bool {
        let (argv, argc) = (TextRef::raw_of_all(command), c_int::try_from(command.len()).unwrap_or(0));
        // SAFETY: the user and the arguments are valid for the call, which changes nothing, and only reads `argc`
        // elements of the array.
        let checked = unsafe { api!(RedisModule_ACLCheckCommandPermissions)(self.0.as_ptr(), argv, argc) };
        checked == raw::REDISMODULE_OK as c_int
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // SAFETY: `named` created it, and it is freed once. The server's own user stays.
        unsafe { api!(RedisModule_FreeModuleUser)(self.0.as_ptr()) };
    }
}

/// The name of the user of a connection.
fn user_name(ctx: Ctx, client: u64) -> Option<Text> {
    // SAFETY: the context is valid. The module never enables automatic memory, so it owns the string and frees it.
    unsafe { Text::from_raw(api!(RedisModule_GetClientUserNameById)(ctx.raw(), client)) }
}

/// Whether the user of a connection is the default user. `None` if there is no such connection.
pub(super) fn has_default_user(ctx: Ctx, client: u64) -> Option<bool> {
    user_name(ctx, client).map(|name| name.bytes() == b"default")
}

/// The name of the user who sent the running command.
fn current_user_name(ctx: Ctx) -> Option<Text> {
    if !ctx.flags().in_script() {
        return user_name(ctx, ctx.client_id());
    }
    // SAFETY: the context is valid. A script runs with a client of its own, which is no connection. This client has the
    // user of the client that called the script. The module owns the string and frees it.
    unsafe { Text::from_raw(api!(RedisModule_GetCurrentUserName)(ctx.raw())) }
}

/// Whether the user that sent the running command is the user of the connection `client`.
pub fn is_user_of(ctx: Ctx, client: u64) -> bool {
    let (current, other) = (current_user_name(ctx), user_name(ctx, client));
    matches!((current, other), (Some(current), Some(other)) if current.bytes() == other.bytes())
}
