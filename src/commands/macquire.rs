//! `LOCK.MACQUIRE`

use super::acquire::{ahead, settle, terms};
use super::args::{self, Word};
use crate::holding::{Grantee, look_all};
use crate::lock::decide;
use crate::server::clock::Now;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call};
use crate::waiting::WRONGTYPE;
use std::ffi::{CStr, c_int};

/// `LOCK.MACQUIRE numkeys key [key …] owner [LEASE ms] [WAIT ms] [HOLDS n] [WATCHDOG] [EPHEMERAL] [REPLICAS n]`
///
/// All of the locks or none. Whoever waits holds none of them, but keeps its place in the queue of each: those behind
/// it wait until it has been served or has left, even for a lock that is free meanwhile.
#[derive(Debug)]
pub struct Macquire;

const OPTIONS: [Word; 6] = [Word::Lease, Word::Wait, Word::Holds, Word::Watchdog, Word::Ephemeral, Word::Replicas];

impl Command for Macquire {
    const NAME: &'static CStr = c"lock.macquire";
    const FLAGS: &'static CStr = c"write deny-oom blocking getkeys-api";
    const CATEGORIES: &'static str = "write slow blocking";
    const KEYS: Keys = Keys::Counted(Access::Update);
    const ARITY: c_int = -4;
    const DOCS: Docs = Docs {
        summary: c"Acquires several locks in one step, all or none, or waits for them without holding any.",
        complexity: c"O(K log N) with K keys and N waiters.",
        args: &[
            Arg::integer(c"numkeys"),
            Arg::keys(),
            Arg::text(c"owner"),
            Arg::option(c"LEASE", c"lease-ms"),
            Arg::option(c"WAIT", c"wait-ms"),
            Arg::option(c"HOLDS", c"holds"),
            Arg::flag(c"watchdog", c"WATCHDOG"),
            Arg::flag(c"ephemeral", c"EPHEMERAL"),
            Arg::option(c"REPLICAS", c"replicas"),
        ],
    };

    fn run(call: Call) -> Replied {
        macquire(call).unwrap_or_else(|error| call.ctx.reply_error(&error))
    }
}

fn macquire(call: Call) -> Result<Replied, String> {
    let (names, next) = args::keys(call)?;
    let owner = args::owner(call, next)?;
    let options = args::options(call, next.saturating_add(1), &OPTIONS)?;
    args::fit_for(call, &options)?;
    let terms = terms(&options);

    let now = Now::read();
    let ctx = call.ctx;
    let owner = owner.as_text();
    let mut locks = look_all(ctx, &names, owner, now).map_err(|_| WRONGTYPE)?;
    let decisions: Vec<_> = locks
        .iter()
        .map(|lock| decide(&lock.standing, &terms.request, ahead(ctx, lock.name()), now.millis()))
        .collect();
    let grantee = Grantee { owner, client: ctx.client_id(), terms: &terms };
    settle(ctx, &mut locks, &decisions, grantee, options.wait(), now)
}
