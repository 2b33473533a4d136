//! `LOCK.VERSION`

use super::fields::{Value, reply_fields};
use crate::config;
use crate::server::commands::{Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{Call, Ctx};
use std::ffi::{CStr, c_int};

/// The lowest and the highest version of the protocol that this module speaks.
const PROTOCOL: [u64; 2] = [4, 4];

/// `LOCK.VERSION`
#[derive(Debug)]
pub struct Version;

impl Command for Version {
    const NAME: &'static CStr = c"lock.version";
    const SINCE: &'static CStr = c"0.4.0";
    const FLAGS: &'static CStr = c"fast allow-loading allow-stale";
    const CATEGORIES: &'static str = "fast connection";
    const KEYS: Keys = Keys::None;
    const ARITY: c_int = 1;
    const DOCS: Docs = Docs {
        summary:
            c"Returns the versions of the protocol and of the module, and how long REPLICAS waits for confirmations.",
        complexity: c"O(1)",
        args: &[],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let ctx = call.ctx;
        let timeout = ("replicas-timeout", Value::Number(config::REPLICAS_TIMEOUT.get()));
        Ok(reply_versions(ctx, |[protocol, version]| reply_fields(ctx, &[protocol, version, timeout])))
    }
}

/// Replies with the versions of the protocol and the module. `reply` adds its own fields to these two.
pub(super) fn reply_versions(ctx: Ctx, reply: impl FnOnce([(&str, Value); 2]) -> Replied) -> Replied {
    let versions = || PROTOCOL.iter().for_each(|version| drop(ctx.reply_integer(*version)));
    let version = Value::Bytes(env!("CARGO_PKG_VERSION").as_bytes());
    reply([("protocol", Value::Array(PROTOCOL.len(), &versions)), ("version", version)])
}
