//! `LOCK.OWNER`, the first command that a client of version 0.3 or older sends. The reply says what to do.

use crate::server::Call;
use crate::server::commands::{Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use std::ffi::{CStr, c_int};

/// `LOCK.OWNER`
#[derive(Debug)]
pub struct Owner;

impl Command for Owner {
    const NAME: &'static CStr = c"lock.owner";
    const FLAGS: &'static CStr = c"allow-loading allow-stale";
    const CATEGORIES: &'static str = "slow";
    const KEYS: Keys = Keys::None;
    const ARITY: c_int = -1;
    const DOCS: Docs = Docs {
        summary: c"Refuses clients of version 0.3 and older: LOCK.SESSION has taken its place.",
        complexity: c"O(1)",
        args: &[Arg::text(c"anything").any_number()],
    };

    fn run(_: Call) -> Result<Replied, String> {
        Err(format!(
            "ERR this client speaks the protocol of version 0.3 or older, and this server that of {}: update the client \
             (LOCK.SESSION has taken the place of LOCK.OWNER)",
            env!("CARGO_PKG_VERSION")
        ))
    }
}
