//! `LOCK.FORCE`

use super::args;
use crate::event_loop;
use crate::holds::{self, WRONGTYPE};
use crate::keyspace::Lock;
use crate::server::Call;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::serving::serve_lock;
use crate::stats::add;
use std::ffi::{CStr, c_int};

/// `LOCK.FORCE`
#[derive(Debug)]
pub struct Force;

impl Command for Force {
    const NAME: &'static CStr = c"lock.force";
    const FLAGS: &'static CStr = c"write admin";
    const CATEGORIES: &'static str = "write admin dangerous slow";
    const KEYS: Keys = Keys::First(Access::Delete);
    const ARITY: c_int = 2;
    const DOCS: Docs = Docs {
        summary: c"Breaks a lock: ends all its holds, and returns how many holders lost it.",
        complexity: c"O(N) with N holders of the lock.",
        args: &[Arg::key()],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let (ctx, name) = (call.ctx, args::key(call, 1)?);
        event_loop::run(ctx, |state, now| {
            holds::end_orphaned(state, ctx, name, now);
            let mut lock = Lock::look_without_owner(ctx, name, now.millis()).map_err(|_| WRONGTYPE)?;
            let lost = holds::end_all(state, &mut lock, now) as u64;
            drop(lock);
            add(|it| &mut it.forced, lost);
            serve_lock(state, ctx, name, now);
            Ok(ctx.reply_integer(lost))
        })
    }
}
