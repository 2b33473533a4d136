//! How holds begin and end: the one place that grants, and the one that takes away.

use crate::books::ties::NewTie;
use crate::books::{self, Books, Terms, Tie, Tying, Why};
use crate::keyspace::effects::{Ending, Waiters};
use crate::keyspace::{self, Lock};
use crate::lock::serve::NotALock;
use crate::lock::{Deadline, Decision, Hold, LockKey, Millis, Token};
use crate::server::clock::Now;
use crate::server::timer::{self, Timer};
use crate::server::{Ctx, TextRef, events};
use crate::stats::add;

/// Who gets it.
#[derive(Clone, Copy, Debug)]
pub struct Grantee<'a> {
    /// The owner.
    pub owner: TextRef<'a>,
    /// The connection on whose behalf it is: the one that asks, or a session.
    pub client: u64,
    /// What is asked for.
    pub terms: &'a Terms,
}

/// Carries out a grant of all `locks`, as decided. The only place that grants. Returns the token.
///
/// A lock that is re-entered keeps its token. Of several locks, where one is new or they differ, all get the same new
/// one.
pub fn grant(locks: &mut [Lock], decisions: &[Decision], grantee: Grantee, now: Now) -> Token {
    let token = common_token(decisions, now).unwrap_or_else(|| keyspace::next_token(now));
    for (lock, decision) in locks.iter_mut().zip(decisions) {
        match (decision, lock.own()) {
            (Decision::Grant(hold, limit), _) => {
                lock.grant(grantee.owner, &Hold { token: Some(token), ..*hold }, *limit);
                // A tie that is left belongs to a hold that ended behind the module's back.
                let left = with_ties(|books| books.ties.untie(lock.db(), lock.name().bytes(), grantee.owner.bytes()));
                lost(lock.ctx(), left.flatten(), Why::Changed);
                bind(lock, hold.deadline, token, grantee, now);
            }
            (Decision::Reenter(hold), Some(own)) => {
                change(lock, grantee.owner, &own, &Hold { token: Some(token), ..*hold }, now);
                bind(lock, hold.deadline, token, grantee, now);
            }
            _ => {}
        }
    }
    token
}

/// The token that all have already, if all are re-entries.
fn common_token(decisions: &[Decision], now: Now) -> Option<Token> {
    let mut tokens = decisions.iter().map(|decision| match decision {
        Decision::Reenter(hold) => keyspace::kept_token(hold.token, now),
        _ => None,
    });
    let first = tokens.next()??;
    tokens.all(|token| token == Some(first)).then_some(first)
}

/// Changes a hold: its count, its token, its deadline. What ties it follows.
pub fn change(lock: &mut Lock, owner: TextRef, own: &Hold, new: &Hold, now: Now) {
    lock.update(owner, own, new);
    let Some(token) = new.token else { return };
    let hold = (lock.db(), lock.name().bytes(), owner.bytes());
    let other = with_ties(|books| books.ties.changed(hold, own.token, token, new.deadline, now.millis()));
    if let Some(other) = other {
        lost(lock.ctx(), other, Why::Changed);
        wake_for_ties(lock.ctx());
    }
}

/// Ties a hold as its grantee asks, if it asks for that.
pub fn bind(lock: &Lock, deadline: Deadline, token: Token, grantee: Grantee, now: Now) {
    let Terms { request, tying, replicas } = *grantee.terms;
    if tying == Tying::NONE {
        return;
    }
    events::watch_keys(lock.ctx());
    let tie = NewTie {
        client: grantee.client,
        tying,
        key: LockKey::new(lock.db(), lock.name().bytes()),
        owner: grantee.owner.bytes().into(),
        token,
        lease: request.lease,
        replicas,
        deadline,
    };
    let other = books::with(|books| books.ties.tie(tie, now.millis()));
    lost(lock.ctx(), other, Why::Changed);
    wake_for_ties(lock.ctx());
}

/// Lets the timer come in time for the ties.
pub fn wake_for_ties(ctx: Ctx) {
    if let Some(due) = books::with(|books| books.ties.next_due()) {
        timer::wake(ctx, Timer::Work, due);
    }
}

/// Tells that holds that were tied are lost.
pub fn lost(ctx: Ctx, ties: impl IntoIterator<Item = Tie>, why: Why) {
    let mut ties = ties.into_iter().peekable();
    if ties.peek().is_some() {
        books::with(|books| ties.for_each(|tie| books.lost(&tie, why)));
        timer::wake_for_replies(ctx);
    }
}

/// Ends the hold of `owner`, who has one and gives it back. Those who wait are still to be served.
pub fn end(lock: &mut Lock, owner: TextRef) {
    let waiters = waiters(lock);
    let (db, name) = (lock.db(), lock.name().bytes());
    let free = lock.remove(owner, Ending::Released, waiters);
    let others = with_ties(|books| {
        books.ties.untie(db, name, owner.bytes());
        if free { books.ties.untie_all(db, name) } else { Vec::new() }
    });
    lost(lock.ctx(), others.unwrap_or_default(), Why::Changed);
}

/// Ends the holds of a lock whose lease has run out; whether there were any.
pub fn purge(lock: &mut Lock, now: Millis) -> bool {
    let expired = lock.purge(now);
    let (db, name) = (lock.db(), lock.name().bytes());
    let ties = with_ties(|books| expired.iter().filter_map(|owner| books.ties.untie(db, name, owner)).collect());
    lost(lock.ctx(), ties.unwrap_or_else(Vec::new), Why::Expired);
    add(|it| &mut it.expired, expired.len() as u64);
    !expired.is_empty()
}

/// Breaks a lock: ends all its holds; how many there were. Those who wait are still to be served.
pub fn end_all(lock: &mut Lock) -> usize {
    let holders = lock.count();
    if holders > 0 {
        lock.clear(Ending::Forced, waiters(lock));
        let ties = with_ties(|books| books.ties.untie_all(lock.db(), lock.name().bytes()));
        lost(lock.ctx(), ties.unwrap_or_default(), Why::Forced);
    }
    holders
}

/// Lends the books if any hold is tied at all.
fn with_ties<R>(work: impl FnOnce(&mut Books) -> R) -> Option<R> {
    books::with(|books| (!books.ties.is_empty()).then(|| work(books)))
}

fn waiters(lock: &Lock) -> Waiters {
    let contended = books::with(|books| books.is_contended(lock.db(), lock.name().bytes()));
    if contended { Waiters::Some } else { Waiters::None }
}

/// Opens several locks of the selected database, as `owner` sees them.
///
/// # Errors
///
/// [`NotALock`] if one of the keys holds something else.
pub fn look_all<'a>(ctx: Ctx<'a>, names: &[TextRef<'a>], owner: TextRef, now: Now) -> Result<Vec<Lock<'a>>, NotALock> {
    names.iter().map(|&name| Lock::look(ctx, name, owner, now.millis())).collect()
}
