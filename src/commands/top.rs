//! `LOCK.TOP`

use super::args::{self, Word};
use super::info::reply_ttl;
use crate::keyspace::Lock;
use crate::lock::{LockKey, Millis};
use crate::server::clock::Now;
use crate::server::commands::{Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call, Ctx, Text};
use crate::waiting;
use std::cmp::Reverse;
use std::ffi::{CStr, c_int};

/// How many locks are shown unless `COUNT` says otherwise.
const SHOWN: usize = 10;

/// `LOCK.TOP [COUNT n]`
#[derive(Debug)]
pub struct Top;

impl Command for Top {
    const NAME: &'static CStr = c"lock.top";
    const FLAGS: &'static CStr = c"readonly";
    const CATEGORIES: &'static str = "read slow";
    const KEYS: Keys = Keys::None;
    const ARITY: c_int = -1;
    const DOCS: Docs = Docs {
        summary: c"Returns the locks of this database that most clients wait for.",
        complexity: c"O(N log N) with N locks that are waited for.",
        args: &[Arg::option(c"COUNT", c"count")],
    };

    fn run(call: Call) -> Replied {
        top(call).unwrap_or_else(|error| call.ctx.reply_error(&error))
    }
}

fn top(call: Call) -> Result<Replied, String> {
    let options = args::options(call, 1, &[Word::Count])?;
    let (ctx, now) = (call.ctx, Now::read().millis());
    let mut rows: Vec<(LockKey, usize, Millis)> = waiting::with_queue(|queue| {
        let contended = queue.contended_in(ctx.db());
        let with_oldest = contended.map(|(key, waiters)| {
            let first = queue.lane(key.db, &key.name).next().map_or(now, |waiter| waiter.since);
            (key, waiters, first)
        });
        with_oldest.collect()
    });
    rows.sort_by_key(|(_, waiters, first)| (Reverse(*waiters), *first));
    rows.truncate(options.count.unwrap_or(SHOWN));
    let replied = ctx.reply_array(rows.len());
    for (key, waiters, first) in &rows {
        reply_row(ctx, key, *waiters, now.saturating_sub(*first), now);
    }
    Ok(replied)
}

fn reply_row(ctx: Ctx, key: &LockKey, waiters: usize, oldest: Millis, now: Millis) {
    let name = Text::new(&key.name);
    let lock = Lock::look_around(ctx, name.as_text(), now).ok();
    let holders = lock.as_ref().map(|lock| lock.holders(now)).unwrap_or_default();
    let _ = ctx.reply_map(5);
    let _ = ctx.reply_bytes(b"key");
    let _ = ctx.reply_bytes(&key.name);
    let _ = ctx.reply_bytes(b"waiters");
    let _ = ctx.reply_integer(waiters as u64);
    let _ = ctx.reply_bytes(b"oldest");
    let _ = ctx.reply_integer(oldest);
    let _ = ctx.reply_bytes(b"holders");
    let _ = ctx.reply_array(holders.len());
    for (owner, _) in &holders {
        let _ = ctx.reply_bytes(owner);
    }
    let _ = ctx.reply_bytes(b"ttl");
    let _ = match lock {
        Some(lock) if !holders.is_empty() => reply_ttl(ctx, lock.expiry(), now),
        _ => ctx.reply_null(),
    };
}
