//! How holds begin and end: the one place that grants, and the one that takes away.

use crate::books::{self, Books, NewTie, Terms, Tie, Tying, Why};
use crate::config;
use crate::keyspace::effects::Waiters;
use crate::keyspace::{self, Allowance, Lock, NotRead};
use crate::lock::{Deadline, Decision, Hold, LockKey, Token};
use crate::server::clock::Now;
use crate::server::text::show_start;
use crate::server::timer::{self, Timer};
use crate::server::{Ctx, TextRef, events};
use crate::stats::{add, count};

/// The error for a key that does not hold a lock.
pub const WRONGTYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

/// Who is granted a lock.
#[derive(Clone, Copy, Debug)]
pub struct Grantee<'a> {
    /// The owner.
    pub owner: TextRef<'a>,
    /// The connection on whose behalf it is: the caller's, or a session's.
    pub client: u64,
    /// What it asks for.
    pub terms: &'a Terms,
}

/// Carries out a grant of all `locks`, as decided. The only place that grants. Returns the token.
///
/// A re-entered lock keeps its token. If one of several locks is new, or their tokens differ, all get the same new
/// token.
pub fn grant(locks: &mut [Lock], decisions: &[Decision], grantee: Grantee, now: Now) -> Token {
    let token = common_token(decisions, now).unwrap_or_else(|| keyspace::next_token(now));
    for (lock, decision) in locks.iter_mut().zip(decisions) {
        match (decision, lock.own()) {
            (Decision::Grant(hold, limit), _) => {
                lock.grant(grantee.owner, &Hold { token: Some(token), ..*hold }, *limit);
                // A tie that is left here belongs to a hold that ended behind the module's back.
                let left = with_ties(|books| books.ties.untie(lock.db(), lock.name().bytes(), grantee.owner.bytes()));
                if let Some(left) = left.flatten() {
                    lost(lock.ctx(), [left], Why::Changed, now);
                }
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

/// The token that all of them have already, if all are re-entries.
fn common_token(decisions: &[Decision], now: Now) -> Option<Token> {
    let mut tokens = decisions.iter().map(|decision| match decision {
        Decision::Reenter(hold) => keyspace::kept_token(hold.token, now),
        _ => None,
    });
    let first = tokens.next()??;
    tokens.all(|token| token == Some(first)).then_some(first)
}

/// Changes a hold: its count, its token, its deadline. Its ties follow.
pub fn change(lock: &mut Lock, owner: TextRef, own: &Hold, new: &Hold, now: Now) {
    lock.update(owner, own, new);
    let Some(token) = new.token else { return };
    let hold = (lock.db(), lock.name().bytes(), owner.bytes());
    if own.token != new.token {
        books::with(|books| books.retoken(hold, (own.token, new.token)));
    }
    let other = with_ties(|books| books.ties.changed(hold, own.token, token, new.deadline, now.millis()));
    if let Some(other) = other {
        lost(lock.ctx(), other, Why::Changed, now);
        wake_for_ties(lock.ctx());
    }
}

/// Ties a hold as its grantee asks, if it asks for that.
pub fn bind(lock: &Lock, deadline: Deadline, token: Token, grantee: Grantee, now: Now) {
    let Terms { demand, tying, replicas } = *grantee.terms;
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
        lease: demand.lease,
        replicas,
        deadline,
    };
    let other = books::with(|books| books.tie(tie, now.millis()));
    lost(lock.ctx(), other, Why::Changed, now);
    wake_for_ties(lock.ctx());
}

/// Makes sure that the timer fires in time for the ties, and for a session that is to hear of a shorter lease.
pub fn wake_for_ties(ctx: Ctx) {
    let (due, is_ending) = books::with(|books| (books.ties.next_due(), books.owed.is_ending()));
    if let Some(due) = due {
        timer::wake(ctx, Timer::Work, due);
    }
    if is_ending {
        timer::wake_for_replies(ctx);
    }
}

/// Records the loss of tied holds.
fn lost(ctx: Ctx, ties: impl IntoIterator<Item = Tie>, why: Why, now: Now) {
    let mut ties = ties.into_iter().peekable();
    if ties.peek().is_some() {
        books::with(|books| ties.for_each(|tie| tell_lost(books, &tie, why, now)));
        timer::wake_for_replies(ctx);
    }
}

/// Reports that a tied hold is lost, for the given reason unless its lease has run out, and counts it if another command
/// ended it.
pub fn tell_lost(books: &mut Books, tie: &Tie, why: Why, now: Now) {
    let why = if tie.deadline.has_passed(now.millis()) { Why::Expired } else { why };
    books.lost(tie, why);
    if why == Why::Changed {
        count(|it| &mut it.changed);
    }
}

/// Ends the hold of `owner`, who has one and gives it back. The caller serves the waiters.
pub fn end_hold(lock: &mut Lock, owner: TextRef) {
    let waiters = waiters(lock);
    lock.remove(owner, waiters);
    with_ties(|books| books.ties.untie(lock.db(), lock.name().bytes(), owner.bytes()));
}

/// Ends the holds of a lock whose lease has run out. Returns whether there were any.
pub fn end_expired(lock: &mut Lock, now: Now) -> bool {
    let expired = lock.purge(now.millis());
    let (db, name) = (lock.db(), lock.name().bytes());
    let ties = with_ties(|books| expired.iter().filter_map(|owner| books.ties.untie(db, name, owner)).collect());
    lost(lock.ctx(), ties.unwrap_or_else(Vec::new), Why::Expired, now);
    add(|it| &mut it.expired, expired.len() as u64);
    !expired.is_empty()
}

/// Breaks a lock: ends all its holds. Returns how many there were. The caller serves the waiters.
pub fn end_all(lock: &mut Lock, now: Now) -> usize {
    let holders = lock.count();
    if holders > 0 {
        lock.clear(waiters(lock));
        let ties = with_ties(|books| books.ties.untie_all(lock.db(), lock.name().bytes()));
        lost(lock.ctx(), ties.unwrap_or_default(), Why::Forced, now);
    }
    holders
}

/// Lends the books, but only if any hold is tied.
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
/// The reply that says that one of the keys does not hold a lock, or that there is too much to read.
pub fn look_all<'a>(ctx: Ctx<'a>, names: &[TextRef<'a>], owner: TextRef, now: Now) -> Result<Vec<Lock<'a>>, String> {
    let mut allowance = Allowance::default();
    let look = |&name: &TextRef<'a>| {
        let lock = Lock::look_within(ctx, name, owner, now.millis(), &mut allowance);
        lock.map_err(|why| match why {
            NotRead::NotALock => WRONGTYPE.into(),
            NotRead::TooMuch => too_much(name.bytes()),
        })
    };
    names.iter().map(look).collect()
}

/// The message for a request whose locks have too many holders to be read in one step. What was read is cached, so the
/// same request gets further the next time.
pub fn too_much(name: &[u8]) -> String {
    let (name, most) = (show_start(name), config::MAX_HOLDERS.get());
    format!(
        "ERR too many holders to read in one request, those of '{name}' among them: the locks of a request that other \
         clients have written may together have as many holders as one lock, and holdfast.max-holders is {most}"
    )
}
