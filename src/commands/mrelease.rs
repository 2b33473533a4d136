//! `LOCK.MRELEASE`

use super::args::{self, Word};
use super::release::give_back;
use crate::holding::look_all;
use crate::lock::LockKey;
use crate::lock::serve::Change;
use crate::server::clock::Now;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call};
use crate::waiting::{self, WRONGTYPE};
use std::ffi::{CStr, c_int};

/// `LOCK.MRELEASE numkeys key [key …] owner [TOKEN t] [ALL]`
#[derive(Debug)]
pub struct Mrelease;

impl Command for Mrelease {
    const NAME: &'static CStr = c"lock.mrelease";
    const FLAGS: &'static CStr = c"write getkeys-api";
    const CATEGORIES: &'static str = "write slow";
    const KEYS: Keys = Keys::Counted(Access::Delete);
    const ARITY: c_int = -4;
    const DOCS: Docs = Docs {
        summary:
            c"Gives back one hold of each of several locks, or all of them: an array of what RELEASE would return.",
        complexity: c"O(K log N) with K keys and N waiters.",
        args: &[
            Arg::integer(c"numkeys"),
            Arg::keys(),
            Arg::text(c"owner"),
            Arg::option(c"TOKEN", c"token"),
            Arg::flag(c"all", c"ALL"),
        ],
    };

    fn run(call: Call) -> Replied {
        mrelease(call).unwrap_or_else(|error| call.ctx.reply_error(&error))
    }
}

fn mrelease(call: Call) -> Result<Replied, String> {
    let (names, next) = args::keys(call)?;
    let owner = args::owner(call, next)?;
    let options = args::options(call, next.saturating_add(1), &[Word::Token, Word::All])?;

    let now = Now::read();
    let ctx = call.ctx;
    let mut locks = look_all(ctx, &names, owner.as_text(), now).map_err(|_| WRONGTYPE)?;
    let left: Vec<_> = locks.iter_mut().map(|lock| give_back(lock, owner.as_text(), &options, now)).collect();
    let db = ctx.db();
    let freed = names.iter().zip(&left).filter(|(_, left)| **left == Some(0));
    let freed: Vec<_> = freed.map(|(name, _)| (LockKey::new(db, name.bytes()), Change::Freed)).collect();
    drop(locks);
    waiting::serve(ctx, freed, now);
    waiting::wake(ctx, now);

    let array = ctx.reply_array(left.len());
    Ok(left.into_iter().fold(array, |_, left| left.map_or_else(|| ctx.reply_null(), |left| ctx.reply_integer(left))))
}
