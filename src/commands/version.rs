//! `LOCK.VERSION`

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
        let replied = ctx.reply_map(3);
        reply_versions(ctx);
        let _ = ctx.reply_bytes(b"replicas-timeout");
        let _ = ctx.reply_integer(config::REPLICAS_TIMEOUT.get());
        Ok(replied)
    }
}

/// Writes the two pairs of a map reply that say what this module speaks: `protocol` and `version`.
pub(super) fn reply_versions(ctx: Ctx) {
    let _ = ctx.reply_bytes(b"protocol");
    let _ = ctx.reply_array(PROTOCOL.len());
    for version in PROTOCOL {
        let _ = ctx.reply_integer(version);
    }
    let _ = ctx.reply_bytes(b"version");
    let _ = ctx.reply_bytes(env!("CARGO_PKG_VERSION").as_bytes());
}
