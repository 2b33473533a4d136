//! `LOCK.TOP`

use super::args::{self, Word};
use super::fields::{Value, reply_fields};
use super::info::ttl;
use crate::event_loop;
use crate::keyspace::Lock;
use crate::lock::{Deadline, Hold, LockKey, Millis, Owner, WaiterId};
use crate::server::acl::User;
use crate::server::clock::{Slice, steady_millis};
use crate::server::commands::{Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call, Ctx, Text};
use crate::state::State;
use std::cmp::Reverse;
use std::ffi::{CStr, c_int};

/// How many locks are shown without `COUNT`.
const SHOWN: usize = 10;

/// How many locks are shown at most: a command can't examine more without blocking the server for too long.
const MOST: usize = 1000;

/// How many holders of each lock are shown.
const HOLDERS: usize = 10;

/// How many locks, and how many waiters, are examined to find locks that the user may read.
const EXAMINED: usize = 5000;

/// `LOCK.TOP`
#[derive(Debug)]
pub struct Top;

impl Command for Top {
    const NAME: &'static CStr = c"lock.top";
    const FLAGS: &'static CStr = c"readonly deny-script";
    const CATEGORIES: &'static str = "read slow";
    const KEYS: Keys = Keys::None;
    const ARITY: c_int = -1;
    const DOCS: Docs = Docs {
        summary: c"Returns the locks of this database with the most waiters, among those whose keys the user may read.",
        complexity: c"O(N log N) with N locks returned.",
        args: &[Word::Count.option()],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let options = args::options(call, 1, Self::DOCS.args)?;
        let ctx = call.ctx;
        let user = User::of_client(ctx, ctx.client_id());
        let may_read = |key: &LockKey| user.as_ref().is_none_or(|user| user.may_read(&Text::new(&key.name)));
        event_loop::run(ctx, |state, now| {
            let (rows, now) = (rows(state, ctx.db(), options.count.unwrap_or(SHOWN).min(MOST), may_read), now.millis());
            let slice = Slice::of_command();
            // Reading a lock with many holders takes time. Once the slice is over, the remaining locks are shown
            // without holders.
            let held: Vec<_> =
                rows.iter().map(|row| if slice.is_over() { None } else { held(state, ctx, &row.key, now) }).collect();
            let replied = ctx.reply_array(rows.len());
            for (row, held) in rows.iter().zip(&held) {
                reply_row(ctx, row, held.as_ref(), now);
            }
            Ok(replied)
        })
    }
}

/// A lock with waiters.
struct Row {
    key: LockKey,
    waiters: usize,
    /// When the first waiter arrived, by [`steady_millis`].
    arrived: Millis,
}

/// The holders of a lock, as far as they are shown, and the expiry of its key.
struct Held {
    owners: Vec<Owner>,
    count: usize,
    /// How many of the shown holders asked for `CONTENTION`: they may be caching the lock.
    cached: usize,
    expiry: Deadline,
}

/// The locks with the most waiters. Those with equally many are ordered by their longest wait.
fn rows(state: &State, db: i32, most: usize, may_read: impl Fn(&LockKey) -> bool) -> Vec<Row> {
    let contended = state.queue.longest_queues(db).take(EXAMINED);
    let mut rows: Vec<(LockKey, usize)> = contended.filter(|(key, _)| may_read(key)).take(most).collect();
    if rows.len() < most {
        // Locks with a single waiter, in order of arrival.
        let keys = state.queue.from(WaiterId::FIRST).take(EXAMINED).flat_map(|waiter| waiter.keys.iter().cloned());
        let singles = keys.take(EXAMINED).filter(|key| key.db == db && state.queue.waiting(db, &key.name) == 1);
        let room = most.saturating_sub(rows.len());
        rows.extend(singles.filter(may_read).take(room).map(|key| (key, 1)));
    }
    let arrived = |key: &LockKey| state.queue.lane(key.db, &key.name).next().map_or(0, |waiter| waiter.id.arrived);
    let rows = rows.into_iter().map(|(key, waiters)| Row { arrived: arrived(&key), key, waiters });
    let mut rows: Vec<Row> = rows.collect();
    rows.sort_by_key(|row| (Reverse(row.waiters), row.arrived));
    rows
}

fn held(state: &State, ctx: Ctx, key: &LockKey, now: Millis) -> Option<Held> {
    let name = Text::new(&key.name);
    let lock = Lock::look_without_owner(ctx, name.as_text(), now).ok()?;
    let holders = lock.holders(now);
    let owners: Vec<Owner> = holders.iter().take(HOLDERS).map(|(owner, _)| owner.clone()).collect();
    let is_cached = |(owner, hold): &&(Owner, Hold)| {
        state.bindings.of(key.db, &key.name, owner, hold.token).is_some_and(|binding| binding.flags.contention)
    };
    let cached = holders.iter().take(HOLDERS).filter(is_cached).count();
    Some(Held { owners, count: holders.len(), cached, expiry: lock.expiry() })
}

fn reply_row(ctx: Ctx, row: &Row, held: Option<&Held>, now: Millis) {
    let owners = held.map(|held| held.owners.as_slice()).unwrap_or_default();
    let reply_owners = || owners.iter().for_each(|owner| drop(ctx.reply_bytes(owner)));
    let _ = reply_fields(
        ctx,
        &[
            ("key", Value::Bytes(&row.key.name)),
            ("waiters", Value::Number(row.waiters as u64)),
            ("oldest", Value::Number(steady_millis().saturating_sub(row.arrived))),
            ("holders", Value::Array(owners.len(), &reply_owners)),
            ("ttl", held.filter(|held| held.count > 0).map_or(Value::Null, |held| ttl(held.expiry, now))),
            ("holder_count", Value::number_or_null(held.map(|held| held.count as u64))),
            ("cached", Value::number_or_null(held.map(|held| held.cached as u64))),
        ],
    );
}
