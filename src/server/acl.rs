//! Permissions of users (ACL).

use super::Ctx;
use super::text::{AsText, Text, TextRef};
use libc::c_int;
use redis_module::raw::{self, RedisModuleString, RedisModuleUser};
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

    /// Whether the user may run `command` in a database: its name, followed by its arguments.
    pub fn may_run(&self, db: i32, command: &[TextRef]) -> bool {
        let (user, argv) = (self.0.as_ptr(), TextRef::raw_of_all(command));
        let (argc, mut reason) = (c_int::try_from(command.len()).unwrap_or(0), 0);
        // SAFETY: the user and the arguments are valid for the call, which changes nothing, and only reads `argc`
        // elements of the array. The reason is a local variable.
        let checked = unsafe {
            match check_in_db() {
                Some(check) => check(user, argv, argc, db, &raw mut reason),
                None => api!(RedisModule_ACLCheckCommandPermissions)(user, argv, argc),
            }
        };
        checked == raw::REDISMODULE_OK as c_int
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // SAFETY: `named` created it, and it is freed once. The server's own user stays.
        unsafe { api!(RedisModule_FreeModuleUser)(self.0.as_ptr()) };
    }
}

/// The user, the arguments and their number, the database, and the reason of a refusal.
type CheckInDb =
    unsafe extern "C" fn(*mut RedisModuleUser, *mut *mut RedisModuleString, c_int, c_int, *mut c_int) -> c_int;

/// `ValkeyModule_ACLCheckPermissions` of Valkey 9.1, which the `redis-module` crate lacks. On a server where rights can
/// name databases (`db=`), the older function refuses every user whose rights do.
fn check_in_db() -> Option<CheckInDb> {
    let mut check: Option<CheckInDb> = None;
    // SAFETY: the name is a C string. The server stores the function that has this name, which has this signature, or
    // leaves the variable as it is.
    unsafe { api!(RedisModule_GetApi)(c"ValkeyModule_ACLCheckPermissions".as_ptr(), (&raw mut check).cast()) };
    check
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
