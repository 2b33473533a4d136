//! The search for cycles of waits: at once as far as that is quick, and in slices while the request waits.

use crate::answering::end_wait;
use crate::books::{self, Outcome};
use crate::config;
use crate::keyspace::Lock;
use crate::lock::cycle::{Because, Candidate, Link, Progress, Search, Visible, is_possible};
use crate::lock::serve::{Sight, View};
use crate::lock::{Deadline, LockKey, Owner, Standing, WaiterId};
use crate::server::acl::User;
use crate::server::clock::{Now, Slice};
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text};
use crate::serving::Keyspace;
use crate::stats::count;
use std::cell::OnceCell;

/// How much of a search a command does itself, in units of about 100 ns.
const AT_ONCE: usize = 5_000;

/// How many waits of a cycle an error names.
const SHOWN: usize = 100;

/// How much is done before the time is looked at again.
const PIECE: usize = 2_000;

/// Searches for the cycle that a request of this connection would close if it waited. What is left of the search, if it
/// takes longer.
///
/// # Errors
///
/// The reply that tells of the cycle.
pub fn begin(ctx: Ctx, client: u64, candidate: Candidate, now: Now) -> Result<Option<Search>, String> {
    if !config::DETECT_DEADLOCKS.is_on() || !books::with(|books| is_possible(&books.queue, candidate)) {
        return Ok(None);
    }
    let mut search = Search::new(candidate);
    match advance_one(ctx, &mut search, client, AT_ONCE, now) {
        Progress::None => Ok(None),
        Progress::More => Ok(Some(search)),
        Progress::Cycle(cycle) => Err(refuse(&cycle)),
    }
}

/// Goes on with a search while its request waits.
pub fn go_on(ctx: Ctx, id: WaiterId, search: Option<Search>) {
    if let Some(mut search) = search {
        search.joined(id);
        books::with(|books| books.searches.push_back((id, search)));
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
}

/// Goes on with the searches that are not done, one after the other. Whoever turns out to have closed a cycle waits no
/// longer.
pub fn advance(ctx: Ctx, now: Now, slice: Slice) {
    while !slice.is_over() {
        // What has changed and was not looked at yet, a search does not know of.
        let next = books::with(|books| {
            let is_settled = books.agenda.is_empty() && books.sweep.is_over();
            if is_settled { books.searches.pop_front() } else { None }
        });
        let Some((id, mut search)) = next else { break };
        let client = books::with(|books| books.queue.get(id).map(|waiter| waiter.ask.client));
        let Some(client) = client else { continue };
        match advance_one(ctx, &mut search, client, PIECE, now) {
            Progress::None => {}
            Progress::More => books::with(|books| books.searches.push_front((id, search))),
            Progress::Cycle(cycle) => {
                if let Some(waiter) = books::with(|books| books.queue.leave(id)) {
                    end_wait(ctx, &waiter, Outcome::Refused(refuse(&cycle)), now);
                }
            }
        }
    }
}

fn advance_one(ctx: Ctx, search: &mut Search, client: u64, budget: usize, now: Now) -> Progress {
    let mut locks = Readable { locks: Keyspace { ctx, now }, client, user: OnceCell::new() };
    books::with(|books| search.advance(&books.queue, &mut locks, budget))
}

/// The locks that a user may read.
struct Readable<'a> {
    locks: Keyspace<'a>,
    client: u64,
    /// Looked up when the first key is come upon: most searches come upon none.
    user: OnceCell<Option<User>>,
}

impl Visible for Readable<'_> {
    fn may_read(&mut self, key: &LockKey) -> bool {
        let user = self.user.get_or_init(|| User::of_client(self.locks.ctx, self.client));
        user.as_ref().is_none_or(|user| user.may_read(&Text::new(&key.name)))
    }

    fn look(&mut self, key: &LockKey, owner: &Owner) -> Option<Standing> {
        match self.locks.look(key, owner) {
            Sight::Lock(standing) => Some(standing),
            Sight::NotALock | Sight::Elsewhere => None,
        }
    }

    fn holders(&mut self, key: &LockKey, after: Option<&(Deadline, Owner)>, most: usize) -> Vec<(Deadline, Owner)> {
        let now = self.locks.now.millis();
        self.locks.ctx.in_db(key.db, |ctx| {
            let name = Text::new(&key.name);
            let lock = Lock::look_around(ctx, name.as_text(), now);
            lock.map(|lock| lock.holders_after(after, now, most)).unwrap_or_default()
        })
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
        let (owner, key, next) = (config::show(&link.owner), config::show(&link.key.name), config::show(&next.owner));
        format!("owner '{owner}' waits for '{key}' {why} '{next}'")
    });
    let shown: Vec<String> = waits.take(SHOWN).collect();
    let more = match cycle.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    format!("DEADLOCK {}{more}", shown.join(", "))
}
