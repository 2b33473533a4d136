//! `LOCK.SESSION` makes a connection a session: it then represents a process, and reads its events.

use super::fields::{Value, reply_fields};
use super::version::reply_versions;
use crate::event_loop;
use crate::server::commands::{Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::text::{parse_number, show_start};
use crate::server::{Call, Ctx, Text, acl, clients, ctx};
use crate::state::State;
use lazy_static::lazy_static;
use std::ffi::{CStr, c_int};
use uuid::Builder;

lazy_static! {
    /// The name of this run of the server. It is part of a session's id, because each run starts its client ids anew.
    /// It is derived from the server's run id, so that it stays the same when the module is reloaded.
    static ref RUN: String = name_of(&ctx::run_id());
}

fn name_of(run_id: &str) -> String {
    let digits = run_id.get(..32).unwrap_or_default();
    let random = u128::from_str_radix(digits, 16).unwrap_or_default();
    Builder::from_random_bytes(random.to_be_bytes()).into_uuid().to_string()
}

/// The identity of the calling connection: `<uuid of this server run>:<client id>`.
///
/// # Errors
///
/// The reply that says that a script has no connection of its own.
pub fn identity(ctx: Ctx) -> Result<Text, String> {
    if !is_connection(ctx) {
        return Err("ERR * stands for a connection, and a script has none of its own".into());
    }
    Ok(Text::new(format!("{}:{}", *RUN, ctx.client_id()).as_bytes()))
}

/// The connection with this identity; `None` if the identity is not of this run of the server.
pub fn client_of(identity: &[u8]) -> Option<u64> {
    identity.strip_prefix(RUN.as_bytes())?.strip_prefix(b":").and_then(parse_number)
}

/// The error for a request that only a session may make.
const NO_SESSION: &str = "NOSESSION this connection is not a session: it has not sent LOCK.SESSION";

/// How many sessions one request may end, since each takes the server some microseconds.
const MAX_REPLACED: usize = 128;

/// Whether the command comes from a connection, and not from a script or another module.
pub fn is_connection(ctx: Ctx) -> bool {
    // A script's client has no connection, but on some servers it has the id of one.
    !ctx.flags().in_script() && ctx::is_connected(ctx.client_id())
}

/// The calling connection, which must be a session. The caller has checked that it [is one](is_connection).
///
/// # Errors
///
/// The reply that says that the connection is not a session.
pub fn of_connection(state: &State, ctx: Ctx) -> Result<u64, String> {
    let client = ctx.client_id();
    if state.sessions.is_open(client) { Ok(client) } else { Err(NO_SESSION.into()) }
}

/// `LOCK.SESSION`
#[derive(Debug)]
pub struct Session;

impl Command for Session {
    const NAME: &'static CStr = c"lock.session";
    const SINCE: &'static CStr = c"0.4.0";
    const FLAGS: &'static CStr = c"fast allow-loading allow-stale";
    const CATEGORIES: &'static str = "fast connection";
    const KEYS: Keys = Keys::None;
    const ARITY: c_int = -1;
    const DOCS: Docs = Docs {
        summary: c"Makes this connection a session: returns its id, which SESSION takes, and the versions of protocol and module. Ends the sessions that it replaces.",
        complexity: c"O(N) with N sessions that are replaced.",
        args: &[Arg::bytes(c"REPLACES", c"session", "id").any_number()],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let ctx = call.ctx;
        if !is_connection(ctx) {
            return Err("ERR LOCK.SESSION makes a connection a session, and a script has none of its own".into());
        }
        let (identity, client) = (identity(ctx)?, ctx.client_id());
        event_loop::run(ctx, |state, _| {
            if !state.sessions.is_open(client) && state.bindings.has_any(client) {
                return Err("ERR this connection has a bound hold (EPHEMERAL), so it can't become a session".into());
            }
            for session in replaced(state, call)? {
                if !clients::end(ctx, session) {
                    return Err("ERR REPLACES needs the server's CLIENT KILL, which has been renamed".into());
                }
            }
            state.sessions.open(client);
            Ok(())
        })?;
        let id = ("id", Value::Bytes(identity.bytes()));
        Ok(reply_versions(ctx, |[protocol, version]| reply_fields(ctx, &[id, protocol, version])))
    }
}

/// The sessions that this one replaces, without those that have ended. Leaves out connections that are not sessions.
fn replaced(state: &State, call: Call) -> Result<Vec<u64>, String> {
    match call.get(1).map(|word| word.bytes()) {
        None => return Ok(Vec::new()),
        Some(word) if word.eq_ignore_ascii_case(b"REPLACES") => {}
        Some(word) => {
            return Err(format!("ERR unknown argument '{}': allowed here are REPLACES", show_start(word)));
        }
    }
    let count = call.count().saturating_sub(2);
    if !(1..=MAX_REPLACED).contains(&count) {
        return Err(format!("ERR REPLACES must be followed by 1 to {MAX_REPLACED} session ids, got {count}"));
    }
    let ids = (2..call.count()).filter_map(|at| client_of(call.get(at)?.bytes()));
    let clients: Vec<u64> = ids.filter(|client| state.sessions.is_open(*client)).collect();
    // All or none. A user learns of another user's session only that it exists.
    if clients.iter().any(|client| !acl::is_user_of(call.ctx, *client)) {
        return Err("NOPERM this session belongs to another user".into());
    }
    if clients.contains(&call.ctx.client_id()) {
        return Err("ERR a session can't replace itself".into());
    }
    Ok(clients)
}
