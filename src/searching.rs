//! The search for cycles of waits: at once as far as that is quick, and then in slices while the request waits.

use crate::answering::end_wait;
use crate::books::{self, Outcome};
use crate::config;
use crate::keyspace::{Lock, rosters};
use crate::lock::cycle::{Because, Candidate, Link, Progress, Search, Visible, is_possible};
use crate::lock::serve::{Sight, View};
use crate::lock::{Deadline, LockKey, Owner, Standing, WaiterId};
use crate::server::acl::User;
use crate::server::clock::{Now, Slice};
use crate::server::text::show_start as show;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text};
use crate::serving::Keyspace;
use crate::stats::count;
use std::cell::OnceCell;

/// How much of a search the command itself does, in units of about 100 ns.
const AT_ONCE: usize = 5_000;

/// How many waits of a cycle an error message names.
const SHOWN: usize = 100;

/// What it costs to read a field of a lock with many holders, in the same units.
const FIELD: usize = 4;

/// How many units are spent between two looks at the clock.
const PIECE: usize = 2_000;

/// Searches for the cycle that a request of this connection would close by waiting. Returns the rest of the search if
/// it takes longer than a command may.
///
/// # Errors
///
/// The reply that names the cycle.
pub fn begin(ctx: Ctx, client: u64, candidate: Candidate, now: Now) -> Result<Option<Search>, String> {
    if !config::detects_deadlocks() || !books::with(|books| is_possible(&books.queue, candidate)) {
        return Ok(None);
    }
    let mut search = Search::new(candidate);
    match advance_one(ctx, &mut search, client, AT_ONCE, now) {
        Progress::None => Ok(None),
        Progress::More => Ok(Some(search)),
        Progress::Cycle(cycle) => Err(refuse(&cycle)),
    }
}

/// Schedules the rest of a search, to be done while its request waits.
pub fn go_on(ctx: Ctx, id: WaiterId, search: Option<Search>) {
    if let Some(mut search) = search {
        search.joined(id);
        books::with(|books| books.searches.push_back((id, search)));
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
}

/// Advances the unfinished searches, one after the other, as long as no change is waiting to be looked at. A request found
/// to have closed a cycle is refused.
pub fn advance(ctx: Ctx, now: Now, slice: &Slice, is_settled: impl Fn() -> bool) {
    while !slice.is_over() && is_settled() {
        let Some((id, mut search)) = books::with(|books| books.next_search(now.millis())) else { break };
        let client = books::with(|books| books.queue.get(id).map(|waiter| waiter.asker.client));
        let progress = client.map(|client| advance_one(ctx, &mut search, client, PIECE, now));
        if progress == Some(Progress::More) {
            books::with(|books| books.searches.push_front((id, search)));
            continue;
        }
        books::with(|books| books.searched.push_back(search));
        if let Some(Progress::Cycle(cycle)) = progress
            && let Some(waiter) = books::with(|books| books.queue.leave(id))
        {
            end_wait(ctx, &waiter, Outcome::Refused(refuse(&cycle)), now);
        }
    }
}

/// Frees the memory of finished searches.
pub fn free(slice: &Slice) {
    while !slice.is_over() && books::with(books::Books::free_searched) {}
}

fn advance_one(ctx: Ctx, search: &mut Search, client: u64, budget: usize, now: Now) -> Progress {
    let fields_read = rosters::with(|rosters| rosters.fields_read());
    let mut locks = Readable { locks: Keyspace { ctx, now }, client, user: OnceCell::new(), fields_read };
    books::with(|books| search.advance(&books.queue, &mut locks, budget))
}

/// The locks that a user may read.
struct Readable<'a> {
    locks: Keyspace<'a>,
    client: u64,
    /// Looked up at the first key met, since most searches meet none.
    user: OnceCell<Option<User>>,
    /// How many fields of locks with many holders had been read at the last check.
    fields_read: usize,
}

impl Visible for Readable<'_> {
    fn may_read(&mut self, key: &LockKey) -> bool {
        let user = self.user.get_or_init(|| User::of_client(self.locks.ctx, self.client));
        user.as_ref().is_none_or(|user| user.may_read(&Text::new(&key.name)))
    }

    fn look(&mut self, key: &LockKey, owner: &Owner) -> Option<Standing> {
        match self.locks.look(key, owner) {
            Sight::Lock(standing) => Some(standing),
            Sight::NotALock | Sight::Elsewhere | Sight::TooMuch => None,
        }
    }

    fn holders(&mut self, key: &LockKey, after: Option<&(Deadline, Owner)>, most: usize) -> Vec<(Deadline, Owner)> {
        let now = self.locks.now.millis();
        self.locks.ctx.in_db(key.db, |ctx| {
            let name = Text::new(&key.name);
            let lock = Lock::look_as_nobody(ctx, name.as_text(), now);
            lock.map(|lock| lock.holders_after(after, now, most)).unwrap_or_default()
        })
    }

    fn extra_cost(&mut self) -> usize {
        let read = rosters::with(|rosters| rosters.fields_read());
        let before = std::mem::replace(&mut self.fields_read, read);
        read.wrapping_sub(before).saturating_mul(FIELD)
    }
}

fn refuse(cycle: &[Link]) -> String {
    count(|it| &mut it.deadlocks);
    let next = cycle.iter().cycle().skip(1);
    let waits = cycle.iter().zip(next).map(|(link, next)| {
        let why = match link.because {
            Because::Holds => "held by",
            Because::Ahead => "waited for ahead of it by",
        };
        let (owner, key, next) = (show(&link.owner), show(&link.key.name), show(&next.owner));
        format!("owner '{owner}' waits for '{key}' {why} '{next}'")
    });
    let shown: Vec<String> = waits.take(SHOWN).collect();
    let more = match cycle.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    format!("DEADLOCK {}{more}", shown.join(", "))
}
