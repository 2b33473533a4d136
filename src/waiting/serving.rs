//! Serving those who wait: the one way from the queue to a grant.

use super::desk::{Answer, Ask, DESK, Outcome, QUEUE, State, is_contended};
use super::turns::wake;
use super::{LOOK_AGAIN, WRONGTYPE, end};
use crate::holding::{Grantee, look_all};
use crate::keyspace::{Lock, listeners, rosters};
use crate::lock::serve;
use crate::lock::serve::{Change, Locks, NotALock, View, WaitEnd};
use crate::lock::{Deadline, Decision, Limit, LockKey, Millis, Owner, Standing, Waiter};
use crate::server::clock::Now;
use crate::server::timer::Timer;
use crate::server::{AsText, Ctx, Text, TextRef, timer};
use crate::stats::{count, time};
use crate::undo::Undo;
use crate::{confirming, holding, ties};

/// Serves whoever can be served now that `changed` has changed. The only way out of the queue to a grant.
pub fn serve(ctx: Ctx, changed: impl IntoIterator<Item = (LockKey, Change)>, now: Now) {
    QUEUE.with(|queue| {
        if !queue.is_empty() {
            serve::serve(queue, &mut Serving(Keyspace { ctx, now }), changed, now.millis());
        }
    });
}

/// As [`serve()`], for one lock that a command has changed. Costs next to nothing while nobody waits for it.
pub fn serve_lock(ctx: Ctx, name: TextRef, now: Now) {
    let db = ctx.db();
    if is_contended(db, name.bytes()) {
        serve(ctx, [(LockKey::new(db, name.bytes()), Change::Freed)], now);
        wake(ctx, now);
    }
}

/// The locks in the keyspace, to be read.
#[derive(Clone, Copy, Debug)]
pub struct Keyspace<'a> {
    /// Where to read them.
    pub ctx: Ctx<'a>,
    /// The present.
    pub now: Now,
}

impl Keyspace<'_> {
    /// Whether this node of a cluster answers for the key.
    fn serves(&self, key: &LockKey) -> bool {
        self.ctx.in_db(key.db, |ctx| ctx.serves(&Text::new(&key.name)))
    }

    fn look_with<R>(
        &self,
        key: &LockKey,
        owner: &Owner,
        work: impl FnOnce(Ctx, &mut Lock) -> R,
    ) -> Result<R, NotALock> {
        self.ctx.in_db(key.db, |ctx| {
            let (name, owner) = (Text::new(&key.name), Text::new(owner));
            let mut lock = Lock::look(ctx, name.as_text(), owner.as_text(), self.now.millis())?;
            Ok(work(ctx, &mut lock))
        })
    }
}

impl View for Keyspace<'_> {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Result<Standing, NotALock> {
        self.look_with(key, owner, |_, lock| lock.standing)
    }

    fn holders(&mut self, key: &LockKey) -> Vec<Owner> {
        let now = self.now.millis();
        self.ctx.in_db(key.db, |ctx| {
            let name = Text::new(&key.name);
            let Ok(lock) = Lock::look_around(ctx, name.as_text(), now) else { return Vec::new() };
            lock.holders(now).into_iter().map(|(owner, _)| owner).collect()
        })
    }
}

/// The locks in the keyspace, while those who wait for them are served.
#[derive(Debug)]
pub(super) struct Serving<'a>(pub(super) Keyspace<'a>);

/// When the lock is to be looked at although nobody touches it: when a lease runs out.
fn next_look(lock: &Lock, now: Millis) -> Option<Millis> {
    match lock.next_deadline(now) {
        Some(Deadline::At(at)) => Some(at.saturating_add(1).max(now)),
        _ => None,
    }
}

/// Notes the next look at a lock that is being served.
pub(super) fn schedule(lock: &Lock, key: &LockKey, now: Millis) {
    let next = next_look(lock, now);
    DESK.with(|desk| desk.schedule(key, next));
}

/// Notes the next look at a lock, unless an earlier one is due: that one may be overdue, and still has somebody to
/// serve.
pub(super) fn look_in_time(lock: &Lock, key: &LockKey, now: Millis) {
    let next = next_look(lock, now);
    DESK.with(|desk| {
        let before = desk.look_at.get(key.db, &key.name).copied();
        if let Some(next) = next.filter(|next| before.is_none_or(|before| *next < before)) {
            desk.schedule(key, Some(next));
        }
    });
}

/// A command of this module has moved the deadline of a hold.
pub fn deadline_moved(lock: &Lock, owner: TextRef, deadline: Deadline, now: Now) {
    ties::deadline_moved(lock, owner, deadline, now);
    if is_contended(lock.db(), lock.name().bytes()) {
        look_in_time(lock, &LockKey::new(lock.db(), lock.name().bytes()), now.millis());
        wake(lock.ctx(), now);
    }
}

impl View for Serving<'_> {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Result<Standing, NotALock> {
        let now = self.0.now.millis();
        if listeners::in_cluster() && !self.0.serves(key) {
            // The slot is elsewhere or on its way: whoever comes is sent on, and who waits will be. A copy of the key may
            // still lie here, or already; what it says does not count.
            rosters::with(|rosters| rosters.forget(key.db, &key.name));
            DESK.with(|desk| desk.schedule(key, Some(now.saturating_add(LOOK_AGAIN))));
            return Ok(Standing { own: None, holders: 1, limit: Limit::MUTEX });
        }
        self.0.look_with(key, owner, |ctx, lock| {
            if holding::purge(lock, now) {
                // The look may be for one who waits for several locks; others wait for this one alone.
                DESK.with(|desk| desk.note(key.clone(), Change::Freed));
                timer::wake(ctx, Timer::Work, timer::NOW);
            }
            if lock.standing.holders > 0 {
                schedule(lock, key, now); // Else it is about to be granted.
            }
            lock.standing
        })
    }

    fn holders(&mut self, key: &LockKey) -> Vec<Owner> {
        self.0.holders(key)
    }
}

impl Locks<Ask> for Serving<'_> {
    fn settle(&mut self, waiter: Waiter<Ask>, end_of_wait: WaitEnd) {
        let ticket = waiter.ask.ticket;
        DESK.with(|desk| {
            if let Some(until) = waiter.until {
                desk.timeouts.remove(&(until, ticket));
            }
        });
        match end_of_wait {
            WaitEnd::Granted(decisions) => self.grant(&waiter, &decisions),
            WaitEnd::NotALock => end(self.0.ctx, ticket, Outcome::Refused(WRONGTYPE.into()), self.0.now),
            WaitEnd::Refused(decision) => end(self.0.ctx, ticket, Outcome::Refused(refusal(decision)), self.0.now),
        }
    }
}

impl Serving<'_> {
    fn grant(&mut self, waiter: &Waiter<Ask>, decisions: &[Decision]) {
        let Ask { ticket, client, ref terms, arrived } = waiter.ask;
        let db = waiter.keys.first().map_or(0, |key| key.db);
        let granted = self.0.ctx.in_db(db, |ctx| {
            let owner = Text::new(&waiter.owner);
            let names: Vec<Text> = waiter.keys.iter().map(|key| Text::new(&key.name)).collect();
            let names: Vec<TextRef> = names.iter().map(AsText::as_text).collect();
            let mut locks = look_all(ctx, &names, owner.as_text(), self.0.now)?;
            let grantee = Grantee { owner: owner.as_text(), client, terms };
            let undo = Undo::before_grant(&locks, decisions, owner.as_text());
            let token = holding::grant(&mut locks, decisions, grantee, self.0.now);
            for (lock, key) in locks.iter().zip(&waiter.keys) {
                schedule(lock, key, self.0.now.millis());
            }
            Ok((token, undo.under(token)))
        });
        let (token, undo) = match granted {
            Ok(granted) => granted,
            Err(NotALock) => return end(self.0.ctx, ticket, Outcome::Refused(WRONGTYPE.into()), self.0.now),
        };
        count(|it| &mut it.granted_queued);
        time(|stats| &mut stats.waits, self.0.now.micros.saturating_sub(arrived.micros));
        if terms.replicas == 0 {
            return end(self.0.ctx, ticket, Outcome::Granted(Answer::Token(token), undo), self.0.now);
        }
        let id = confirming::begin_reply(self.0.ctx, ticket, Answer::Token(token), undo, terms.replicas, self.0.now);
        DESK.with(|desk| {
            if let Some(pending) = desk.pending.get_mut(&ticket) {
                pending.state = State::Confirming(id);
            }
        });
    }
}

/// The message for a request that contradicts what its owner holds.
pub fn refusal(decision: Decision) -> String {
    match decision {
        Decision::OtherLimit(Limit::Shared) => {
            "ERR the owner holds this lock as SHARED; a re-entry must name the limit that the lock has".into()
        }
        Decision::OtherLimit(limit) => format!(
            "ERR the owner holds this lock under LIMIT {}; a re-entry must name the limit that the lock has",
            limit.number()
        ),
        _ => format!("ERR the hold count can't be raised beyond {}", crate::lock::rule::MAX_HOLDS),
    }
}
