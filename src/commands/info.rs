//! `LOCK.INFO`

use super::args::{self, Word};
use super::fields::{Value, reply_fields};
use super::waiters::{MOST, SHOWN};
use crate::event_loop;
use crate::holds::WRONGTYPE;
use crate::keyspace::{Lock, holder_cache};
use crate::lock::{Deadline, Hold, Millis};
use crate::server::clock::Slice;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::ctx::Role;
use crate::server::reply::Replied;
use crate::server::{Call, Ctx, TextRef};
use crate::state::{Binding, State};
use std::ffi::{CStr, c_int};

/// `LOCK.INFO`
#[derive(Debug)]
pub struct Info;

impl Command for Info {
    const NAME: &'static CStr = c"lock.info";
    const FLAGS: &'static CStr = c"readonly";
    const CATEGORIES: &'static str = "read slow";
    const KEYS: Keys = Keys::First(Access::Read);
    const ARITY: c_int = -2;
    const DOCS: Docs = Docs {
        summary: c"Returns who holds a lock, for how long, and how many wait: null if it is free and no request waits.",
        complexity: c"O(N) with N holders of the lock.",
        args: &[Arg::key(), Word::Count.option()],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let name = args::key(call, 1)?;
        let options = args::options(call, 2, Self::DOCS.args)?;
        event_loop::run(call.ctx, |state, now| {
            reply(state, call.ctx, name, options.count.unwrap_or(SHOWN), now.millis())
        })
    }
}

fn reply(state: &State, ctx: Ctx, name: TextRef, most: usize, now: Millis) -> Result<Replied, String> {
    clear_cache_on_replica(ctx);
    let lock = Lock::look_without_owner(ctx, name, now).map_err(|_| WRONGTYPE)?;
    let waiters = state.queue.waiting(lock.db(), name.bytes());
    let holders = lock.holders(now);
    if holders.is_empty() && waiters == 0 {
        return Ok(ctx.reply_null());
    }
    let shown = holders.len().min(most).min(MOST);
    let reply_holders = || {
        for (owner, hold) in holders.iter().take(shown) {
            reply_holder(ctx, owner, hold, state.bindings.of(lock.db(), name.bytes(), owner, hold.token), now);
        }
    };
    Ok(reply_fields(
        ctx,
        &[
            ("limit", Value::number_or_null(lock.limit().map(|limit| u64::from(limit.number())))),
            ("fence", Value::number_or_null(lock.fence())),
            ("ttl", if holders.is_empty() { Value::Null } else { ttl(lock.expiry(), now) }),
            ("holders", Value::Array(shown, &reply_holders)),
            ("waiters", Value::Number(waiters as u64)),
            ("holder_count", Value::Number(holders.len() as u64)),
        ],
    ))
}

/// Clears the holder cache on a replica, so that each lock is read anew: changes arrive there without the module.
pub(super) fn clear_cache_on_replica(ctx: Ctx) {
    if ctx.flags().role() == Role::Replica {
        holder_cache::with(|cache| {
            cache.clear();
            cache.discarded.free(&Slice::of_command());
        });
    }
}

fn reply_holder(ctx: Ctx, owner: &[u8], hold: &Hold, binding: Option<&Binding>, now: Millis) {
    let flags = binding.map(|binding| binding.flags).unwrap_or_default();
    let _ = reply_fields(
        ctx,
        &[
            ("owner", Value::Bytes(owner)),
            ("holds", Value::Number(hold.holds)),
            ("token", Value::number_or_null(hold.token)),
            ("ttl", ttl(hold.deadline, now)),
            ("client", Value::number_or_null(binding.map(|binding| binding.client))),
            ("watchdog", Value::Number(u64::from(flags.watchdog))),
            ("ephemeral", Value::Number(u64::from(flags.ephemeral))),
            ("contention", Value::Number(u64::from(flags.contention))),
        ],
    );
}

/// The milliseconds left; -1 without an end, as in `PTTL`.
pub(super) fn ttl(deadline: Deadline, now: Millis) -> Value<'static> {
    Value::or_no_end(deadline.remaining(now))
}
