//! `LOCK.WAITERS`

use super::args::{self, Word};
use super::fields::{Value, reply_fields};
use crate::event_loop;
use crate::server::Call;
use crate::server::clock::steady_millis;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use std::ffi::{CStr, c_int};

/// How many waiters are shown without `COUNT`.
pub(super) const SHOWN: usize = 1000;

/// How many waiters are shown at most; this many take some 3 ms.
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
        let (ctx, steady, most) = (call.ctx, steady_millis(), options.count.unwrap_or(SHOWN).min(MOST));
        event_loop::run(ctx, |state, now| {
            let waiters: Vec<_> = state.queue.lane(ctx.db(), name.bytes()).take(most).collect();
            let replied = ctx.reply_array(waiters.len());
            for waiter in waiters {
                let remaining = waiter.until.map(|until| until.saturating_sub(now.millis()));
                let _ = reply_fields(
                    ctx,
                    &[
                        ("owner", Value::Bytes(&waiter.owner)),
                        ("client", Value::Number(waiter.requester.client)),
                        ("waited", Value::Number(steady.saturating_sub(waiter.id.arrived))),
                        ("remaining", Value::or_no_end(remaining)),
                        ("limit", Value::Number(u64::from(waiter.demand.limit.number()))),
                    ],
                );
            }
            Ok(replied)
        })
    }
}
