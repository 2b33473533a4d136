//! `LOCK.RELEASE`, and giving back a hold, which `LOCK.MRELEASE` shares.

use super::args::{self, Options, Word};
use crate::holding::{self, WRONGTYPE};
use crate::keyspace::Lock;
use crate::lock::{Deadline, Hold};
use crate::server::clock::{Now, Slice};
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call, Ctx, TextRef};
use crate::serving::{deadline_moved, serve, serve_lock};
use crate::state;
use crate::stats::count;
use crate::waiting;
use std::ffi::{CStr, c_int};

/// `LOCK.RELEASE`
#[derive(Debug)]
pub struct Release;

impl Command for Release {
    const NAME: &'static CStr = c"lock.release";
    const FLAGS: &'static CStr = c"write fast";
    const CATEGORIES: &'static str = "write fast";
    const KEYS: Keys = Keys::First(Access::Delete);
    const ARITY: c_int = -3;
    const DOCS: Docs = Docs {
        summary: c"Releases one hold of a lock, or several: returns 1 if the owner no longer holds it, 0 if holds are left, null if there was none.",
        complexity: c"O(log N) with N holders and waiters of the lock.",
        args: &[
            Arg::key(),
            Arg::text(c"owner"),
            Word::Token.option(),
            Arg::one_of(c"holds", &[Word::HoldsLeft.arg(), Word::All.arg()]),
            Word::Lease.option(),
        ],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let mut options = Options::default();
        let (name, owner) = args::of_one::<Self>(call, &mut options)?;

        let ctx = call.ctx;
        let now = holding::begin(ctx);
        holding::end_broken(ctx, name, now);
        let withdrawn = settle_pending(ctx, &[name], owner.as_text(), &options, now)?;
        let mut lock = Lock::look(ctx, name, owner.as_text(), now.millis()).map_err(|_| WRONGTYPE)?;
        let left = give_back(&mut lock, owner.as_text(), &options, now);
        drop(lock);
        if left == Some(0) {
            serve_lock(ctx, name, now);
        }
        if withdrawn.any() {
            serve(ctx, now, &Slice::of_command());
        }
        Ok(reply_left(ctx, left, withdrawn.is_of(name)))
    }
}

/// The keys of whose requests some were withdrawn.
#[derive(Debug, Default)]
pub(super) struct WithdrawnKeys(Vec<Box<[u8]>>);

impl WithdrawnKeys {
    /// Whether anything was withdrawn.
    pub(super) fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Whether a request for this key was.
    pub(super) fn is_of(&self, name: TextRef) -> bool {
        self.0.iter().any(|it| **it == *name.bytes())
    }
}

/// What becomes of a request of this owner that has not been answered: it ends if all is released; else it is in the way.
pub(super) fn settle_pending(
    ctx: Ctx,
    names: &[TextRef],
    owner: TextRef,
    options: &Options,
    now: Now,
) -> Result<WithdrawnKeys, String> {
    let connection = Some(ctx.client_id());
    if options.holds != Some(0) {
        holding::one_at_a_time(ctx, names.iter().copied(), owner, connection)?;
        return Ok(WithdrawnKeys::default());
    }
    let mut withdrawn = WithdrawnKeys::default();
    for name in names {
        let pending = waiting::end_in_flight(ctx, *name, (owner, options.token), connection, now);
        if options.token.is_none() {
            withdrawn.0.extend(waiting::withdraw(ctx, *name, owner, now).iter().map(|key| Box::from(&*key.name)));
        }
        withdrawn.0.extend(pending.then(|| Box::from(name.bytes())));
    }
    Ok(withdrawn)
}

/// Writes the reply for one key: what is left of its hold, and whether a request for it was withdrawn.
pub(super) fn reply_left(ctx: Ctx, left: Option<u64>, was_withdrawn: bool) -> Replied {
    match left {
        Some(left) => ctx.reply_integer(u64::from(left == 0)),
        None if was_withdrawn => ctx.reply_integer(1),
        None => ctx.reply_null(),
    }
}

/// Gives back what the options say. Returns the holds that are left; `None` if the owner holds nothing (under that
/// token).
pub(super) fn give_back(lock: &mut Lock, owner: TextRef, options: &Options, now: Now) -> Option<u64> {
    let held = lock.held().filter(|held| holding::is_meant(lock, owner, held.token, options.token))?;
    count(|it| &mut it.releases);
    let holds = options.holds.unwrap_or_else(|| held.holds.saturating_sub(1)).min(held.holds);
    if holds == 0 {
        holding::end_hold(lock, owner);
        return Some(0);
    }
    if holds < held.holds {
        state::with(|state| state.in_flight.gave_one_back(lock.db(), lock.name().bytes(), owner.bytes()));
    }
    match options.lease {
        None => holding::lower(lock, owner, holds),
        Some(lease) => {
            let (own, deadline) = (lock.own()?, Deadline::after(now.millis(), lease));
            holding::change(lock, owner, &own, &Hold { holds, deadline, ..own }, now);
            deadline_moved(lock, now);
        }
    }
    Some(holds)
}
