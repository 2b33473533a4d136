//! `LOCK.INFO`

use super::args::{self, Word};
use super::waiters::{MOST, SHOWN};
use crate::holding::WRONGTYPE;
use crate::keyspace::{Lock, rosters};
use crate::lock::{Deadline, Hold, Millis};
use crate::server::clock::{Now, Slice};
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::ctx::Role;
use crate::server::reply::Replied;
use crate::server::{Call, Ctx};
use crate::state::{self, Tie};
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
        summary: c"Returns who holds a lock, for how long, and how many wait: null if it is free and nobody waits.",
        complexity: c"O(N) with N holders of the lock.",
        args: &[Arg::key(), Word::Count.option()],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let name = args::key(call, 1)?;
        let options = args::options(call, 2, Self::DOCS.args)?;
        let ctx = call.ctx;
        let now = Now::read().millis();
        do_not_trust_copies(ctx);
        let lock = Lock::look_as_nobody(ctx, name, now).map_err(|_| WRONGTYPE)?;
        let waiters = state::with(|state| state.queue.waiting(lock.db(), name.bytes()));
        let holders = lock.holders(now);
        if holders.is_empty() && waiters == 0 {
            return Ok(ctx.reply_null());
        }
        let _ = ctx.reply_map(6);
        let _ = ctx.reply_bytes(b"limit");
        let _ = match lock.limit() {
            Some(limit) => ctx.reply_integer(u64::from(limit.number())),
            None => ctx.reply_null(),
        };
        let _ = ctx.reply_bytes(b"fence");
        let _ = ctx.reply_token(lock.fence());
        let _ = ctx.reply_bytes(b"ttl");
        let _ = match holders.len() {
            0 => ctx.reply_null(),
            _ => reply_ttl(ctx, lock.expiry(), now),
        };
        let _ = ctx.reply_bytes(b"holders");
        let shown = holders.len().min(options.count.unwrap_or(SHOWN)).min(MOST);
        let _ = ctx.reply_array(shown);
        for (owner, hold) in holders.iter().take(shown) {
            let tie = state::with(|state| state.ties.of(lock.db(), name.bytes(), owner, hold.token).cloned());
            reply_holder(ctx, owner, hold, tie.as_ref(), now);
        }
        let _ = ctx.reply_bytes(b"waiters");
        let _ = ctx.reply_integer(waiters as u64);
        let _ = ctx.reply_bytes(b"holder_count");
        Ok(ctx.reply_integer(holders.len() as u64))
    }
}

/// On a replica, changes arrive without the module, so locks are read anew each time.
pub(super) fn do_not_trust_copies(ctx: Ctx) {
    if ctx.flags().role() == Role::Replica {
        rosters::with(|rosters| {
            rosters.clear();
            rosters.free(&Slice::of_command());
        });
    }
}

fn reply_holder(ctx: Ctx, owner: &[u8], hold: &Hold, tie: Option<&Tie>, now: Millis) {
    let tying = tie.map(|tie| tie.tying).unwrap_or_default();
    let _ = ctx.reply_map(8);
    let _ = ctx.reply_bytes(b"owner");
    let _ = ctx.reply_bytes(owner);
    let _ = ctx.reply_bytes(b"holds");
    let _ = ctx.reply_integer(hold.holds);
    let _ = ctx.reply_bytes(b"token");
    let _ = ctx.reply_token(hold.token);
    let _ = ctx.reply_bytes(b"ttl");
    let _ = reply_ttl(ctx, hold.deadline, now);
    let _ = ctx.reply_bytes(b"client");
    let _ = tie.map_or_else(|| ctx.reply_null(), |tie| ctx.reply_integer(tie.client));
    let _ = ctx.reply_bytes(b"watchdog");
    let _ = ctx.reply_integer(u64::from(tying.watchdog));
    let _ = ctx.reply_bytes(b"ephemeral");
    let _ = ctx.reply_integer(u64::from(tying.ephemeral));
    let _ = ctx.reply_bytes(b"contention");
    let _ = ctx.reply_integer(u64::from(tying.contention));
}

/// The milliseconds left; -1 for no end, as in `PTTL`.
pub(super) fn reply_ttl(ctx: Ctx, deadline: Deadline, now: Millis) -> Replied {
    match deadline.remaining(now) {
        Some(left) => ctx.reply_integer(left),
        None => ctx.reply_signed(-1),
    }
}
