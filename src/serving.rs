//! Serving those who wait: the one way from the queue to a grant.

use crate::answering::{end, end_wait};
use crate::books::confirmations::What;
use crate::books::owed::OnBehalf;
use crate::books::{self, Answer, Asker, Outcome, State};
use crate::holding::{self, Grantee, look_all};
use crate::keyspace::words::words;
use crate::keyspace::{Lock, listeners, rosters};
use crate::lock::serve::{Attempt, Change, Job, NotALock, Sight, View, WaitEnd};
use crate::lock::{Deadline, Decision, Limit, LockKey, Millis, Owner, Waiter, WaiterId};
use crate::server::acl::User;
use crate::server::clock::{Now, Slice};
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text, TextRef};
use crate::stats::{count, time};
use crate::{config, confirming, undo};

/// While clients are paused, and while a slot is on its way elsewhere, the queue is looked at again after so many ms.
pub const LOOK_AGAIN: Millis = 10;

/// The error for a key that holds something else.
pub const WRONGTYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

/// The error for a waiter whose rights were taken away.
const NOPERM: &str = "NOPERM the user of this connection has no permissions any more to acquire this lock";

/// Serves whoever can be served now that locks have changed, until the slice is over. The only way out of the queue to
/// a grant.
pub fn serve(ctx: Ctx, now: Now, slice: Slice) {
    while let Some(job) = books::with(|books| books.agenda.next(&mut books.queue)) {
        match job {
            Job::FindHolders(key) => {
                let holders = Keyspace { ctx, now }.holders(&key);
                books::with(|books| books.agenda.held_by(&books.queue, &key, holders));
            }
            Job::Judge(attempt) if is_forsaken(attempt.id()) => leave(attempt.id()),
            Job::Judge(attempt) => judge(ctx, attempt, now),
        }
        if slice.is_over() {
            break;
        }
    }
    if books::with(|books| !books.agenda.is_empty()) {
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
}

/// Looks whether a request still has to wait, and ends its wait if not.
fn judge(ctx: Ctx, attempt: Attempt, now: Now) {
    let mut locks = Served(Keyspace { ctx, now });
    match attempt.only_key() {
        // Read once: what is decided by is what is written.
        Some((key, owner)) if serves(ctx, &key) => ctx.in_db(key.db, |ctx| {
            let (name, owner) = (Text::new(&key.name), Text::new(&owner));
            let Ok(mut lock) = Lock::look(ctx, name.as_text(), owner.as_text(), now.millis()) else {
                return settle(ctx, attempt, &mut Seen(Sight::NotALock), now, None);
            };
            refresh(&mut lock, &key, now.millis());
            let mut seen = Seen(Sight::Lock(lock.standing()));
            settle(ctx, attempt, &mut seen, now, Some((owner.as_text(), &mut lock)));
        }),
        _ => settle(ctx, attempt, &mut locks, now, None),
    }
}

/// A single lock that has been looked at.
struct Seen(Sight);

impl View for Seen {
    fn look(&mut self, _: &LockKey, _: &Owner) -> Sight {
        self.0
    }

    fn holders(&mut self, _: &LockKey) -> Vec<Owner> {
        Vec::new()
    }
}

/// Serves those who wait for a lock that a command has changed. Costs next to nothing while nobody does.
pub fn serve_lock(ctx: Ctx, name: TextRef, now: Now) {
    let db = ctx.db();
    let contended = books::with(|books| {
        let contended = books.is_contended(db, name.bytes());
        if contended {
            books.agenda.note(LockKey::new(db, name.bytes()), Change::Freed);
        }
        contended
    });
    if contended {
        serve(ctx, now, Slice::of_command());
    }
}

/// Whether a request is made on behalf of a session that has ended: it has not left the queue yet.
fn is_forsaken(id: WaiterId) -> bool {
    books::with(|books| {
        let ask = books.queue.get(id).map(|waiter| waiter.ask);
        ask.is_some_and(|ask| ask.on_behalf == OnBehalf::Session && !books.sessions.is_open(ask.client))
    })
}

fn leave(id: WaiterId) {
    books::with(|books| {
        if let Some(waiter) = books.queue.leave(id) {
            books.gave_up(&waiter);
        }
    });
}

/// Whether this node of a cluster answers for a key; outside of clusters, always.
pub fn serves(ctx: Ctx, key: &LockKey) -> bool {
    !listeners::in_cluster() || ctx.in_db(key.db, |ctx| ctx.serves(&Text::new(&key.name)))
}

/// The locks in the keyspace, to be read. Touches no book.
#[derive(Clone, Copy, Debug)]
pub struct Keyspace<'a> {
    /// Where to read them.
    pub ctx: Ctx<'a>,
    /// The present.
    pub now: Now,
}

impl Keyspace<'_> {
    fn look_and<R>(&self, key: &LockKey, owner: &Owner, work: impl FnOnce(Option<&mut Lock>) -> R) -> R {
        self.ctx.in_db(key.db, |ctx| {
            let (name, owner) = (Text::new(&key.name), Text::new(owner));
            let lock = Lock::look(ctx, name.as_text(), owner.as_text(), self.now.millis());
            work(lock.ok().as_mut())
        })
    }
}

impl View for Keyspace<'_> {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight {
        self.look_and(key, owner, |lock| lock.map_or(Sight::NotALock, |lock| Sight::Lock(lock.standing())))
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

/// The locks in the keyspace while those who wait for them are served: what is found to be over is taken out.
#[derive(Clone, Copy, Debug)]
struct Served<'a>(Keyspace<'a>);

impl View for Served<'_> {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight {
        let (ctx, now) = (self.0.ctx, self.0.now.millis());
        if !serves(ctx, key) {
            // The slot is elsewhere or on its way: whoever comes is redirected, and who waits will be. A copy of the key
            // may still lie here, or already; what it says does not count.
            rosters::with(|rosters| rosters.forget(key.db, &key.name));
            books::with(|books| books.looks.schedule(key, Some(now.saturating_add(LOOK_AGAIN))));
            wake_for_looks(ctx);
            return Sight::Elsewhere;
        }
        self.0.look_and(key, owner, |lock| {
            let Some(lock) = lock else { return Sight::NotALock };
            refresh(lock, key, now);
            Sight::Lock(lock.standing())
        })
    }

    fn holders(&mut self, key: &LockKey) -> Vec<Owner> {
        self.0.holders(key)
    }
}

/// Takes out those of a contended lock whose lease has run out, and notes when the next one's does.
fn refresh(lock: &mut Lock, key: &LockKey, now: Millis) {
    if holding::purge(lock, now) {
        // The look may be for one who waits for several locks; others wait for this one alone.
        books::with(|books| books.agenda.note(key.clone(), Change::Freed));
    }
    if lock.count() > 0 {
        schedule(lock, key, now); // Else it is about to be granted.
    }
}

/// When the lock is to be looked at although nobody touches it: when a lease runs out.
fn next_look(lock: &Lock, now: Millis) -> Option<Millis> {
    match lock.next_deadline(now) {
        Some(Deadline::At(at)) => Some(at.saturating_add(1).max(now)),
        _ => None,
    }
}

/// Notes the next look at a lock that is being served.
fn schedule(lock: &Lock, key: &LockKey, now: Millis) {
    let next = next_look(lock, now);
    books::with(|books| {
        let next = next.filter(|_| books.is_contended(key.db, &key.name));
        books.looks.schedule(key, next);
    });
    wake_for_looks(lock.ctx());
}

/// Notes the next look at a lock that somebody begins to wait for, or whose deadline has moved.
pub fn schedule_earlier(lock: &Lock, key: &LockKey, now: Millis) {
    if let Some(next) = next_look(lock, now) {
        books::with(|books| books.looks.schedule_earlier(key, next));
        wake_for_looks(lock.ctx());
    }
}

fn wake_for_looks(ctx: Ctx) {
    if let Some(at) = books::with(|books| books.looks.first()) {
        timer::wake(ctx, Timer::Work, at);
    }
}

/// A command of this module has moved the deadline of a hold.
pub fn deadline_moved(lock: &Lock, now: Now) {
    if books::with(|books| books.is_contended(lock.db(), lock.name().bytes())) {
        schedule_earlier(lock, &LockKey::new(lock.db(), lock.name().bytes()), now.millis());
    }
}

/// Decides about a request and carries out the end of its wait, if it ends. `lock` is its only lock, if it was read
/// already, as its owner sees it.
fn settle(ctx: Ctx, attempt: Attempt, locks: &mut impl View, now: Now, lock: Option<(TextRef, &mut Lock)>) {
    let judgement = attempt.judge(locks, now.millis());
    let ended = books::with(|books| {
        let ended = books.agenda.judged(&mut books.queue, attempt, judgement);
        if let Some((waiter, _)) = &ended {
            books.left(waiter);
        }
        ended
    });
    let Some((waiter, wait_end)) = ended else { return };
    let refused = match wait_end {
        WaitEnd::NotALock => WRONGTYPE.into(),
        WaitEnd::Refused(decision) => refusal(decision),
        WaitEnd::Granted(decisions) => {
            let granted = match lock {
                Some((owner, lock)) => grant(ctx, &waiter, &decisions, owner, std::slice::from_mut(lock), now),
                None => grant_several(ctx, &waiter, &decisions, now),
            };
            match granted {
                Ok(()) => return,
                // Those behind it may have their turn, for what it was granted was not taken.
                Err(error) => return end_wait(ctx, &waiter, Outcome::Refused(error), now),
            }
        }
    };
    end(ctx, waiter.ask.ticket, Outcome::Refused(refused), now);
}

fn grant_several(ctx: Ctx, waiter: &Waiter<Asker>, decisions: &[Decision], now: Now) -> Result<(), String> {
    let db = waiter.keys.first().map_or(0, |key| key.db);
    ctx.in_db(db, |ctx| {
        let owner = Text::new(&waiter.owner);
        let names: Vec<Text> = waiter.keys.iter().map(|key| Text::new(&key.name)).collect();
        let names: Vec<TextRef> = names.iter().map(AsText::as_text).collect();
        let mut locks = look_all(ctx, &names, owner.as_text(), now).map_err(|NotALock| WRONGTYPE.to_owned())?;
        grant(ctx, waiter, decisions, owner.as_text(), &mut locks, now)
    })
}

/// Grants what was decided to one who waited, and lets it be told.
fn grant(
    ctx: Ctx,
    waiter: &Waiter<Asker>,
    decisions: &[Decision],
    owner: TextRef,
    locks: &mut [Lock],
    now: Now,
) -> Result<(), String> {
    let Asker { ticket, client, terms, arrived, .. } = waiter.ask;
    if !may_acquire(ctx, client, locks, owner) {
        return Err(NOPERM.into());
    }
    let granted = |(_, decision): &(&Lock, &Decision)| matches!(decision, Decision::Grant(..));
    if let Some((full, _)) = locks.iter().zip(decisions).filter(granted).find(|(lock, _)| lock.is_full()) {
        return Err(too_many_holders(full));
    }
    let undo = undo::before_grant(locks, decisions, owner);
    let token = holding::grant(locks, decisions, Grantee { owner, client, terms: &terms }, now);
    for (lock, key) in locks.iter().zip(waiter.keys.iter()) {
        schedule(lock, key, now.millis());
    }
    let undo = undo.under(token);
    count(|it| &mut it.granted_queued);
    time(|stats| &mut stats.waits, now.micros.saturating_sub(arrived.micros));
    if terms.replicas == 0 {
        end(ctx, ticket, Outcome::Granted(Answer::Token(token), undo), now);
        return Ok(());
    }
    let what = What::Reply(ticket, Answer::Token(token));
    let id = confirming::begin(ctx, what, undo, terms.replicas, Millis::MAX, now);
    books::with(|books| books.owed.set(ticket, State::Confirming(id)));
    Ok(())
}

/// Whether a connection's user may still do what the connection has asked for: rights may have changed since.
fn may_acquire(ctx: Ctx, client: u64, locks: &[Lock], owner: TextRef) -> bool {
    let Some(user) = User::of_client(ctx, client) else { return true };
    if let [lock] = locks {
        return user.may_run(&[words().acquire.as_text(), lock.name(), owner]);
    }
    let count = Text::new(locks.len().to_string().as_bytes());
    let mut command = vec![words().macquire.as_text(), count.as_text()];
    command.extend(locks.iter().map(Lock::name));
    command.push(owner);
    user.may_run(&command)
}

/// The message for a request that would be one holder too many.
pub fn too_many_holders(lock: &Lock) -> String {
    let (name, most) = (config::show(lock.name().bytes()), config::MAX_HOLDERS.get());
    format!("ERR too many holders of '{name}': holdfast.max-holders is {most}")
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
