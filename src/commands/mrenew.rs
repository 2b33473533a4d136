//! `LOCK.MRENEW`

use super::args;
use super::renew::{OPTIONS, prolong, terms, way_back};
use crate::holding::{Grantee, look_all};
use crate::lock::Token;
use crate::server::clock::Now;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call};
use crate::waiting::{self, Answer, Unconfirmed, WRONGTYPE};
use std::ffi::{CStr, c_int};

/// `LOCK.MRENEW numkeys key [key …] owner [LEASE ms] [TOKEN t] [WATCHDOG] [EPHEMERAL] [REPLICAS n]`
#[derive(Debug)]
pub struct Mrenew;

impl Command for Mrenew {
    const NAME: &'static CStr = c"lock.mrenew";
    const FLAGS: &'static CStr = c"write getkeys-api";
    const CATEGORIES: &'static str = "write slow";
    const KEYS: Keys = Keys::Counted(Access::Update);
    const ARITY: c_int = -4;
    const DOCS: Docs = Docs {
        summary: c"Renews the leases of several locks: an array of what RENEW would return.",
        complexity: c"O(K) with K keys.",
        args: &[
            Arg::integer(c"numkeys"),
            Arg::keys(),
            Arg::text(c"owner"),
            Arg::option(c"LEASE", c"lease-ms"),
            Arg::option(c"TOKEN", c"token"),
            Arg::flag(c"watchdog", c"WATCHDOG"),
            Arg::flag(c"ephemeral", c"EPHEMERAL"),
            Arg::option(c"REPLICAS", c"replicas"),
        ],
    };

    fn run(call: Call) -> Replied {
        mrenew(call).unwrap_or_else(|error| call.ctx.reply_error(&error))
    }
}

fn mrenew(call: Call) -> Result<Replied, String> {
    let (names, next) = args::keys(call)?;
    let owner = args::owner(call, next)?;
    let options = args::options(call, next.saturating_add(1), &OPTIONS)?;
    args::fit_for(call, &options)?;

    let now = Now::read();
    let ctx = call.ctx;
    let owner = owner.as_text();
    let mut locks = look_all(ctx, &names, owner, now).map_err(|_| WRONGTYPE)?;
    let terms = terms(&options);
    let grantee = Grantee { owner, client: ctx.client_id(), terms: &terms };
    let undo = way_back(&locks, grantee, now);
    let tokens: Vec<Option<Token>> = locks.iter_mut().map(|lock| prolong(lock, grantee, &options, now)).collect();
    let Some(undo) = undo.filter(|_| tokens.iter().any(Option::is_some)) else {
        return Ok(Answer::Tokens(tokens).reply(ctx));
    };
    let undo = undo.under_each(&locks, &tokens);
    let (client, answer, replicas) = (grantee.client, Answer::Tokens(tokens), options.replicas);
    Ok(waiting::confirm(ctx, &names, Unconfirmed { client, answer, undo, replicas }, now))
}
