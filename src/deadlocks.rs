//! Refuses waits that would close a cycle: what [`crate::lock::deadlock`] has to know, from the state and the keyspace.

use crate::config;
use crate::keyspace::words::words;
use crate::keyspace::{Lock, NotRead};
use crate::lock::deadlock::{Because, Found, Held, Link, MOST_PLACES, Request, View, search};
use crate::lock::{Deadline, Hold, Limit, LockKey, Millis, Owner, Waiter, WaiterId, actor};
use crate::server::acl::User;
use crate::server::text::show_start as show;
use crate::server::{AsText, Ctx, Text};
use crate::state;
use crate::state::owed::Asker;
use crate::stats::count;
use std::cell::OnceCell;

/// How many waits of a cycle an error message names.
const SHOWN: usize = 100;

/// The wait that is about to begin.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// The connection on whose behalf it is: the search sees what its user may read.
    pub client: u64,
    /// When it times out; `None`: never.
    pub until: Option<Millis>,
    /// The time now.
    pub now: Millis,
}

/// Refuses a request that would close a cycle by waiting in its place. `holders`: those of its locks for which nobody
/// waits yet.
///
/// Costs nothing for those whom nobody can have to wait for, however long the queues are: who holds nothing that is waited
/// for, and stands last (or ahead only for one lock: those behind wait for its holders anyway).
///
/// # Errors
///
/// The reply that names the cycle.
pub fn refuse_cycle<'a>(
    ctx: Ctx,
    request: &Request,
    mut holders: impl Iterator<Item = &'a Owner>,
    wait: Wait,
) -> Result<(), String> {
    let who = actor::name(&request.owner);
    let may_be_waited_for = holders.any(|holder| actor::name(holder) == who)
        || state::with(|state| {
            let has_behind = |key| state.queue.has_behind(key, request.id);
            state.queue.may_be_waited_for(who) || (request.keys.len() > 1 && request.keys.iter().any(has_behind))
        });
    if !may_be_waited_for || !config::detects_deadlocks() {
        return Ok(());
    }
    count(|it| &mut it.deadlock_searches);
    let mut view = Readable { ctx, wait, user: OnceCell::new() };
    match search(&mut view, request) {
        Found::Nothing => Ok(()),
        Found::GivenUp => {
            count(|it| &mut it.deadlock_searches_given_up);
            Ok(())
        }
        Found::Cycle(cycle) => {
            count(|it| &mut it.deadlocks);
            Err(message(&cycle))
        }
    }
}

/// What a user may see.
struct Readable<'a> {
    ctx: Ctx<'a>,
    wait: Wait,
    /// Looked up at the first key.
    user: OnceCell<Option<User>>,
}

impl View for Readable<'_> {
    fn may_read(&mut self, key: &LockKey) -> bool {
        let user = self.user.get_or_init(|| User::of_client(self.ctx, self.wait.client));
        user.as_ref().is_none_or(|user| user.may_read(&Text::new(&key.name)))
    }

    fn held(&mut self, key: &LockKey, most: usize) -> Option<Held> {
        let wait = self.wait;
        self.ctx.in_db(key.db, |ctx| {
            let (name, nobody) = (Text::new(&key.name), words().nobody.as_text());
            let lock = match Lock::look_one_of(ctx, name.as_text(), nobody, wait.now, MOST_PLACES) {
                Ok(lock) => lock,
                Err(NotRead::NotALock) => return None,
                Err(NotRead::TooMuch) => {
                    return Some(Held { limit: Limit::MUTEX, count: usize::MAX, lasting: Vec::new() });
                }
            };
            let limit = lock.limit()?;
            let holders = if lock.count() > most { Vec::new() } else { lock.holders(wait.now) };
            let lasting = holders.into_iter().filter(|(owner, hold)| wait.is_outlasted_by(key, owner, hold));
            Some(Held { limit, count: lock.count(), lasting: lasting.map(|(owner, _)| owner).collect() })
        })
    }

    fn waits_of(&mut self, actor: &[u8], most: usize) -> Vec<Request> {
        state::with(|state| state.queue.of_actor(actor).take(most).map(request).collect())
    }

    fn several_ahead(&mut self, key: &LockKey, of: WaiterId, most: usize) -> Vec<Request> {
        state::with(|state| state.queue.several_ahead(key, of).take(most).map(request).collect())
    }
}

impl Wait {
    /// Whether a hold does not end by itself before this wait would.
    fn is_outlasted_by(self, key: &LockKey, owner: &Owner, hold: &Hold) -> bool {
        if state::with(|state| state.is_broken((key.db, &key.name, owner), hold.token)) {
            return false;
        }
        match (hold.deadline, self.until) {
            (Deadline::Never, _) => true,
            (Deadline::At(at), Some(until)) if at > until => true,
            _ => state::with(|state| {
                let tie = state.ties.of(key.db, &key.name, owner, hold.token);
                tie.is_some_and(|tie| tie.tying.watchdog && state.ties.is_live(tie))
            }),
        }
    }
}

fn request(waiter: &Waiter<Asker>) -> Request {
    let Waiter { id, owner, keys, demand, .. } = waiter;
    Request { id: *id, owner: owner.clone(), keys: keys.clone(), limit: demand.limit }
}

fn message(cycle: &[Link]) -> String {
    let waits = cycle.iter().map(|Link { owner, key, other, because }| {
        let why = match because {
            Because::Holds => "held by",
            Because::Ahead => "waited for ahead of it by",
        };
        format!("owner '{}' waits for '{}' {why} '{}'", show(owner), show(&key.name), show(other))
    });
    let shown: Vec<String> = waits.take(SHOWN).collect();
    let more = match cycle.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    format!("DEADLOCK {}{more}", shown.join(", "))
}
