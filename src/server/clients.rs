//! The connections of clients: lists them, closes them, and checks whether they are blocked.

use super::Ctx;
use super::call::{self, Reply};
use super::text::Text;
use libc::c_int;
use redis_module::raw;

/// Counts the connections that may still refer to a command whose name begins with `prefix`. The server would use freed
/// memory if such a command were removed. Returns `None` if `CLIENT LIST` fails (`CLIENT` may have been renamed).
///
/// Servers keep a pointer to the last command of each connection, even after the module of the command is unloaded.
/// `CLIENT LIST` reads the command's name there. Redis 8.0 and later run the command if the next request has the same
/// name. A transaction has such a pointer for each queued request. On Valkey 9.1, a blocked connection has one for each
/// request that it has pipelined. So the function counts the connections whose last command matches, and all
/// connections that are in a transaction or blocked.
pub fn count_at_commands(ctx: Ctx, prefix: &str) -> Option<usize> {
    let list = call::run(ctx, c"CLIENT", c"LIST", &[], Reply::bytes)?;
    Some(String::from_utf8_lossy(&list).lines().filter(|line| is_at(line, prefix)).count())
}

/// Closes a connection other than the caller's. The server reports the end of the connection before this returns.
/// Returns `true` also if the connection is already closed, and `false` if `CLIENT KILL` fails (`CLIENT` may have been
/// renamed).
///
/// The server runs no further request of the connection, even one that it has already read.
pub fn end(ctx: Ctx, client: u64) -> bool {
    let [id, client] = ["ID", &client.to_string()].map(|text| Text::new(text.as_bytes()));
    call::run(ctx, c"CLIENT", c"KILL", &[&id, &client], Reply::integer).is_some()
}

/// Whether a connection is blocked in a command.
pub fn is_blocked(client: u64) -> bool {
    let mut info =
        raw::RedisModuleClientInfo { version: CLIENT_INFO_VERSION, flags: 0, id: 0, addr: [0; 46], port: 0, db: 0 };
    // SAFETY: the structure is a local variable, and has the layout of the version that it states, the first. The
    // server fills it.
    let is_known = unsafe { api!(RedisModule_GetClientInfoById)((&raw mut info).cast(), client) };
    is_known == raw::REDISMODULE_OK as c_int && info.flags & u64::from(raw::REDISMODULE_CLIENTINFO_FLAG_BLOCKED) != 0
}

/// The version of `RedisModuleClientInfo` that the module uses.
const CLIENT_INFO_VERSION: u64 = 1;

/// Whether a line of `CLIENT LIST` shows a connection that [`count_at_commands`] counts.
fn is_at(line: &str, prefix: &str) -> bool {
    line.split(' ').filter_map(|field| field.split_once('=')).any(|(name, value)| match name {
        "cmd" => value.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix)),
        "flags" => value.contains(['x', 'b']), // In a transaction, or blocked.
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_is_counted_by_last_command_or_flags() {
        let at = |line| is_at(line, "lock.");
        assert!(at("id=7 addr=127.0.0.1:5 name= flags=N db=0 multi=-1 cmd=lock.session user=default"));
        assert!(at("id=7 flags=N multi=-1 cmd=LOCK.SESSION"));
        assert!(at("id=7 flags=Px multi=2 cmd=get"));
        assert!(at("id=7 flags=b multi=-1 cmd=blpop"));
        assert!(!at("id=7 name=cmd=lock.session flags=N multi=-1 cmd=clock.lock.session user=lock."));
        assert!(!at("id=7 flags=N multi=0 cmd=NULL"));
        assert!(!at("id=7 flags=P multi=-1 cmd=client|list"));
        assert!(!at(""));
    }
}
