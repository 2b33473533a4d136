//! `LOCK.WAITERS`

use super::args::{self, Word};
use crate::lock::{Limit, Millis, Owner};
use crate::server::Call;
use crate::server::clock::{Now, steady_millis};
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::state;
use std::ffi::{CStr, c_int};

/// How many are shown unless `COUNT` says otherwise.
pub(super) const SHOWN: usize = 1000;

/// The most that are shown; that many take some 3 ms.
pub(super) const MOST: usize = 5_000;

/// `LOCK.WAITERS`
#[derive(Debug)]
pub struct Waiters;

impl Command for Waiters {
    const NAME: &'static CStr = c"lock.waiters";
    const FLAGS: &'static CStr = c"readonly";
    const CATEGORIES: &'static str = "read slow";
    const KEYS: Keys = Keys::First(Access::Read);
    const ARITY: c_int = -2;
    const DOCS: Docs = Docs {
        summary: c"Returns who waits for a lock, in order: the first 1,000 unless COUNT says otherwise.",
        complexity: c"O(N) with N waiters returned.",
        args: &[Arg::key(), Word::Count.option()],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let name = args::key(call, 1)?;
        let options = args::options(call, 2, Self::DOCS.args)?;
        let (ctx, now, steady) = (call.ctx, Now::read().millis(), steady_millis());
        let rows: Vec<Row> = state::with(|state| {
            let lane = state.queue.lane(ctx.db(), name.bytes()).take(options.count.unwrap_or(SHOWN).min(MOST));
            lane.map(|waiter| Row {
                owner: waiter.owner.clone(),
                client: waiter.asker.client,
                arrived: waiter.id.arrived,
                until: waiter.until,
                limit: waiter.demand.limit,
            })
            .collect()
        });
        let replied = ctx.reply_array(rows.len());
        for row in &rows {
            let _ = ctx.reply_map(5);
            let _ = ctx.reply_bytes(b"owner");
            let _ = ctx.reply_bytes(&row.owner);
            let _ = ctx.reply_bytes(b"client");
            let _ = ctx.reply_integer(row.client);
            let _ = ctx.reply_bytes(b"waited");
            let _ = ctx.reply_integer(steady.saturating_sub(row.arrived));
            let _ = ctx.reply_bytes(b"remaining");
            let _ = match row.until {
                Some(until) => ctx.reply_integer(until.saturating_sub(now)),
                None => ctx.reply_signed(-1),
            };
            let _ = ctx.reply_bytes(b"limit");
            let _ = ctx.reply_integer(u64::from(row.limit.number()));
        }
        Ok(replied)
    }
}

/// One waiter.
struct Row {
    owner: Owner,
    client: u64,
    arrived: Millis,
    until: Option<Millis>,
    limit: Limit,
}
