//! `LOCK.RELEASE`, and the release of several locks, which `LOCK.MRELEASE` shares.

use super::args::{self, Options, Word};
use crate::holds::{self, look_all};
use crate::keyspace::Lock;
use crate::lock::{Deadline, Hold, LockKey};
use crate::server::clock::{Now, Slice};
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call, Ctx, TextRef};
use crate::serving::{deadline_moved, note_freed, serve};
use crate::state::State;
use crate::stats::count;
use crate::{event_loop, waiting};
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
        let (name, owner) = args::read_one::<Self>(call, &mut options)?;
        event_loop::run(call.ctx, |state, now| {
            let mut left = [None];
            let withdrawn = release_all(state, call.ctx, &[name], owner.as_text(), &options, &mut left, now)?;
            Ok(reply_left(call.ctx, left[0], withdrawn.contains(name)))
        })
    }
}

/// Releases the owner's holds of these locks, and serves the waiters. Stores in `left` the remaining hold count of each
/// lock (`None` if the owner held nothing). Returns which requests were withdrawn.
///
/// # Errors
///
/// The reply that says what is wrong. In this case nothing is released.
pub(super) fn release_all(
    state: &mut State,
    ctx: Ctx,
    names: &[TextRef],
    owner: TextRef,
    options: &Options,
    left: &mut [Option<u64>],
    now: Now,
) -> Result<WithdrawnKeys, String> {
    let mut looked = look_all(state, ctx, names, owner, now)?;
    let locks = looked.all();
    refuse_partial(state, ctx, locks, owner, options)?;
    // `ALL` (or `HOLDS 0`) also withdraws the owner's requests, unless `TOKEN` selects one hold.
    let is_all = options.holds == Some(0) && options.token.is_none();
    let mut withdrawn = WithdrawnKeys(Vec::new());
    if is_all {
        waiting::may_withdraw(state, ctx, names, owner)?;
        names.iter().for_each(|name| withdrawn.0.extend(waiting::withdraw(state, ctx, *name, owner, now)));
    }
    for (lock, left) in locks.iter_mut().zip(left.iter_mut()) {
        *left = release_hold(state, lock, owner, options, now);
    }
    drop(looked);
    let released = names.iter().zip(left.iter()).filter(|(_, left)| **left == Some(0));
    let is_awaited = released.fold(withdrawn.has_any(), |any, (name, _)| note_freed(state, ctx, *name) || any);
    if is_awaited {
        serve(state, ctx, now, &Slice::of_command());
    }
    Ok(withdrawn)
}

/// The keys whose requests were withdrawn.
#[derive(Debug)]
pub(super) struct WithdrawnKeys(Vec<LockKey>);

impl WithdrawnKeys {
    /// Whether any request was withdrawn.
    pub(super) fn has_any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Whether a request for this key was withdrawn.
    pub(super) fn contains(&self, name: TextRef) -> bool {
        self.0.iter().any(|key| *key.name == *name.bytes())
    }
}

/// Refuses a release that would leave holds of a lock while replicas are confirming another request of this owner for
/// it.
///
/// # Errors
///
/// The reply that says so.
fn refuse_partial(state: &State, ctx: Ctx, locks: &[Lock], owner: TextRef, options: &Options) -> Result<(), String> {
    let leaves_holds = |lock: &&Lock| holds_left(lock, options).is_some_and(|left| left > 0);
    holds::one_at_a_time(state, ctx.db(), locks.iter().filter(leaves_holds).map(|lock| lock.name().text()), owner)
}

/// The hold count that the release leaves; `None` if the owner holds nothing (under the given token).
fn holds_left(lock: &Lock, options: &Options) -> Option<u64> {
    let held = lock.held().filter(|held| options.token.is_none() || held.token == options.token)?;
    Some(options.holds.unwrap_or_else(|| held.holds.saturating_sub(1)).min(held.holds))
}

/// Writes the reply for one key, given the remaining hold count and whether a request for the key was withdrawn.
pub(super) fn reply_left(ctx: Ctx, left: Option<u64>, was_withdrawn: bool) -> Replied {
    match left {
        Some(left) => ctx.reply_integer(u64::from(left == 0)),
        None if was_withdrawn => ctx.reply_integer(1),
        None => ctx.reply_null(),
    }
}

/// Releases what the options say. Returns the remaining hold count; `None` if the owner holds nothing (under the given
/// token).
fn release_hold(state: &mut State, lock: &mut Lock, owner: TextRef, options: &Options, now: Now) -> Option<u64> {
    let holds = holds_left(lock, options)?;
    count(|it| &mut it.releases);
    if holds == 0 {
        holds::end_hold(state, lock, owner, now);
        return Some(0);
    }
    // If the owner names a count, undelivered grants may undo nothing of it. Otherwise they may undo at most the holds
    // that are left, since the released hold may be theirs.
    let budget = if options.holds.is_some() { 0 } else { holds };
    holds::limit_undo(state, lock, owner, budget);
    match options.lease {
        None => holds::lower(state, lock, owner, holds),
        Some(lease) => {
            let (own, deadline) = (lock.own()?, Deadline::after(now.millis(), lease));
            holds::change(state, lock, owner, &own, &Hold { holds, deadline, ..own }, now);
            deadline_moved(state, lock, now);
        }
    }
    Some(holds)
}
