//! The connections of clients, as `CLIENT LIST` shows them and `CLIENT KILL` ends them.

use super::Ctx;
use super::call::{self, Reply};
use super::text::Text;
use libc::c_int;
use redis_module::raw;

/// How many connections the server would lead to a command that is gone if those whose names begin with `prefix` were
/// removed now; `None` if it doesn't say (`CLIENT` may have been renamed).
///
/// Servers keep a pointer to the last command of each connection, even when the module that made it is gone: `CLIENT
/// LIST` reads its name there, and Redis 8.0 and later run it if the next request has the same name. A transaction has such a
/// pointer for each request in it. So connections count whose last command it was, and those in a transaction.
pub fn at_commands(ctx: Ctx, prefix: &str) -> Option<usize> {
    let list = call::run(ctx, c"CLIENT", c"LIST", &[], Reply::bytes)?;
    Some(String::from_utf8_lossy(&list).lines().filter(|line| is_at(line, prefix)).count())
}

/// Ends a connection other than the caller's, at once: when this returns, its end has been reported. Returns whether it
/// did; it can't if `CLIENT` has been renamed. A connection that is gone already is no mistake.
///
/// As with `CLIENT KILL`, no request of that connection runs any more, even if it lies in the server's memory.
pub fn end(ctx: Ctx, client: u64) -> bool {
    let [id, client] = ["ID", &client.to_string()].map(|text| Text::new(text.as_bytes()));
    call::run(ctx, c"CLIENT", c"KILL", &[&id, &client], Reply::integer).is_some()
}

/// Whether a connection is blocked in a command.
pub fn is_blocked(client: u64) -> bool {
    let mut info =
        raw::RedisModuleClientInfo { version: CLIENT_INFO_VERSION, flags: 0, id: 0, addr: [0; 46], port: 0, db: 0 };
    // SAFETY: the structure is ours, and of the version that it says, which is the first; the server fills it.
    let is_known = unsafe { api!(RedisModule_GetClientInfoById)((&raw mut info).cast(), client) };
    is_known == raw::REDISMODULE_OK as c_int && info.flags & u64::from(raw::REDISMODULE_CLIENTINFO_FLAG_BLOCKED) != 0
}

/// The version of the structure that the server fills.
const CLIENT_INFO_VERSION: u64 = 1;

fn is_at(line: &str, prefix: &str) -> bool {
    line.split(' ').filter_map(|field| field.split_once('=')).any(|(name, value)| match name {
        "cmd" => value.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix)),
        "flags" => value.contains('x'), // In a transaction.
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_at_a_command_that_was_its_last_or_may_be_in_its_transaction() {
        let at = |line| is_at(line, "lock.");
        assert!(at("id=7 addr=127.0.0.1:5 name= flags=N db=0 multi=-1 cmd=lock.session user=default"));
        assert!(at("id=7 flags=N multi=-1 cmd=LOCK.SESSION"));
        assert!(at("id=7 flags=Px multi=2 cmd=get"));
        assert!(!at("id=7 name=cmd=lock.session flags=N multi=-1 cmd=clock.lock.session user=lock."));
        assert!(!at("id=7 flags=N multi=0 cmd=NULL"));
        assert!(!at("id=7 flags=P multi=-1 cmd=client|list"));
        assert!(!at(""));
    }
}
