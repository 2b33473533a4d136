//! Refuses waits that would close a cycle: gives [`crate::lock::deadlock`] its view of the state and the keyspace.

use crate::config;
use crate::keyspace::words::words;
use crate::keyspace::{Lock, NotRead};
use crate::lock::deadlock::{Found, Held, Link, MOST_PLACES, Request, View, WaitReason, search};
use crate::lock::{Actor, Limit, LockKey, Owner, Waiter, WaiterId, actor};
use crate::server::acl::User;
use crate::server::clock::Now;
use crate::server::text::show_start as show;
use crate::server::{AsText, Ctx, Text};
use crate::state::{Requester, State};
use crate::stats::count;
use std::cell::OnceCell;

/// The most waits of a cycle that an error message names.
const SHOWN: usize = 100;

/// Refuses a request that would close a cycle by waiting at its queue position. `client` is the connection on whose
/// behalf it is made: the search sees only keys that the client's user may read.
///
/// # Errors
///
/// The reply that names the cycle.
pub fn refuse_cycle(state: &mut State, ctx: Ctx, request: &Request, client: u64, now: Now) -> Result<(), String> {
    if !config::detects_deadlocks() || closes_no_cycle(state, request) {
        return Ok(());
    }
    count(|it| &mut it.deadlock_searches);
    match search(&mut Readable { state, ctx, client, now, user: OnceCell::new() }, request) {
        Found::Nothing => Ok(()),
        Found::Aborted => {
            count(|it| &mut it.deadlock_searches_given_up);
            Ok(())
        }
        Found::Cycle(cycle) => {
            count(|it| &mut it.deadlocks);
            Err(message(&cycle))
        }
    }
}

/// Whether a request certainly closes no cycle, so that no search is needed. No request waits for any other lock, so
/// the holder of this one waits for nothing else. And the holder that the queue has noted is another actor. (While a
/// request waits, the holder changes only by grants to waiters, which the queue notes, or by writes of other clients.)
fn closes_no_cycle(state: &State, request: &Request) -> bool {
    let [key] = &*request.keys else { return false };
    let holder = state.queue.likely_holder(key);
    state.queue.contended() == 1 && holder.is_some_and(|holder| actor::name(holder) != actor::name(&request.owner))
}

/// The locks as a user may see them.
struct Readable<'a> {
    state: &'a mut State,
    ctx: Ctx<'a>,
    client: u64,
    now: Now,
    /// Looked up at the first key that the request does not name.
    user: OnceCell<Option<User>>,
}

impl View for Readable<'_> {
    fn may_read(&mut self, key: &LockKey) -> bool {
        let user = self.user.get_or_init(|| User::of_client(self.ctx, self.client));
        user.as_ref().is_none_or(|user| user.may_read(&Text::new(&key.name)))
    }

    fn held(&mut self, key: &LockKey) -> Held {
        let held = self.read(key);
        if let Held::Mutex(holder) = &held {
            self.state.queue.note_holder(key, holder);
        }
        held
    }

    fn waits_of(&mut self, actor: &Actor, most: usize) -> Vec<Request> {
        self.state.queue.of_actor(actor, most).take(most).map(request).collect()
    }

    fn multi_key_ahead(&mut self, key: &LockKey, of: WaiterId, most: usize) -> Vec<Request> {
        self.state.queue.multi_key_ahead(key, of).take(most).map(request).collect()
    }
}

impl Readable<'_> {
    /// Reads how a lock is held: the field of the likely holder alone or, if that does not exist, any holder's.
    fn read(&self, key: &LockKey) -> Held {
        let (state, now) = (&*self.state, self.now.millis());
        let likely = state.queue.likely_holder(key).cloned();
        self.ctx.in_db(key.db, |ctx| {
            let (name, text) = (Text::new(&key.name), likely.as_ref().map(|owner| Text::new(owner)));
            let owner = text.as_ref().map_or_else(|| words().no_owner.as_text(), Text::as_text);
            // One of many locks that this search reads. A lock that has too many holders for that is not a mutex.
            let lock = match Lock::look_one_of(ctx, name.as_text(), owner, now, MOST_PLACES) {
                Ok(lock) => lock,
                Err(NotRead::NotALock) => return Held::Free,
                Err(NotRead::TooLarge) => return Held::Shared,
            };
            match lock.limit() {
                None => return Held::Free,
                Some(Limit::MUTEX) => {}
                Some(_) => return Held::Shared,
            }
            // A hold that ended with its connection is about to be released.
            let is_over = |owner: &Owner, token| state.is_broken((key.db, &key.name, owner), token);
            if let Some((owner, own)) = likely.zip(lock.own()) {
                return if is_over(&owner, own.token) { Held::Free } else { Held::Mutex(owner) };
            }
            let holder = lock.holders(now).into_iter().find(|(owner, hold)| !is_over(owner, hold.token));
            holder.map_or(Held::Free, |(owner, _)| Held::Mutex(owner))
        })
    }
}

fn request(waiter: &Waiter<Requester>) -> Request {
    Request { id: waiter.id, owner: waiter.owner.clone(), keys: waiter.keys.clone() }
}

fn message(cycle: &[Link]) -> String {
    let waits = cycle.iter().map(|Link { owner, key, other, because }| {
        let why = match because {
            WaitReason::Holds => "held by",
            WaitReason::Ahead => "waited for ahead of it by",
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
