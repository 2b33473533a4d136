//! `LOCK.OWNER`

use crate::server::commands::{Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::text::parse_number;
use crate::server::{Call, Ctx, Text, ctx};
use lazy_static::lazy_static;
use std::ffi::{CStr, c_int};
use uuid::Builder;

lazy_static! {
    /// The name of this run of the server, since client ids begin anew with each. It is derived from the server's own
    /// name for the run, so that it stays the same when the module is unloaded and loaded again.
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
        return Err("ERR the owner * stands for a connection, and a script has none of its own".into());
    }
    Ok(Text::new(format!("{}:{}", *RUN, ctx.client_id()).as_bytes()))
}

/// The connection that has this [`identity`]; `None` if it is not one of this run of the server.
pub fn client_of(identity: &[u8]) -> Option<u64> {
    identity.strip_prefix(RUN.as_bytes())?.strip_prefix(b":").and_then(parse_number)
}

/// Whether the command comes from a connection rather than from a script or another module.
pub fn is_connection(ctx: Ctx) -> bool {
    // A script's client has no connection, but on some servers it has the id of one.
    !ctx.flags().in_script() && ctx::is_connected(ctx.client_id())
}

/// `LOCK.OWNER`
#[derive(Debug)]
pub struct Owner;

impl Command for Owner {
    const NAME: &'static CStr = c"lock.owner";
    const FLAGS: &'static CStr = c"fast allow-loading allow-stale";
    const CATEGORIES: &'static str = "fast connection";
    const KEYS: Keys = Keys::None;
    const ARITY: c_int = 1;
    const DOCS: Docs = Docs {
        summary: c"Returns the identity of this connection: the owner * stands for it, and SESSION takes it.",
        complexity: c"O(1)",
        args: &[],
    };

    fn run(call: Call) -> Result<Replied, String> {
        identity(call.ctx).map(|identity| call.ctx.reply_bytes(identity.bytes()))
    }
}
