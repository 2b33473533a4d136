//! How holds begin and end: the one place that grants, and the one that takes away.

use crate::keyspace::effects::{Ending, Waiters};
use crate::keyspace::{self, Lock};
use crate::lock::serve::NotALock;
use crate::lock::{Decision, Hold, Millis, Request, Token};
use crate::server::clock::Now;
use crate::server::{Ctx, TextRef};
use crate::stats::add;
use crate::ties::{self, Tying};
use crate::waiting;

/// What a request asks for besides the lock itself.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// For the rule.
    pub request: Request,
    /// How the hold is tied to the connection.
    pub tying: Tying,
    /// How many replicas must have the grant before it counts.
    pub replicas: u32,
}

/// Who gets it.
#[derive(Clone, Copy, Debug)]
pub struct Grantee<'a> {
    /// The owner.
    pub owner: TextRef<'a>,
    /// The connection that asks.
    pub client: u64,
    /// What it asks for.
    pub terms: &'a Terms,
}

/// Carries out a grant of all `locks`, as decided. The only place that grants. Returns the token.
///
/// A lock that is re-entered keeps its token. Of several locks, where one is new or they differ, all get the same new
/// one.
pub fn grant(locks: &mut [Lock], decisions: &[Decision], grantee: Grantee, now: Now) -> Token {
    let token = common_token(decisions, now).unwrap_or_else(|| keyspace::next_token(now));
    for (lock, decision) in locks.iter_mut().zip(decisions) {
        match (decision, lock.standing.own) {
            (Decision::Grant(hold, limit), _) => {
                lock.grant(grantee.owner, &Hold { token: Some(token), ..*hold }, *limit);
                // A tie that is left belongs to a hold that ended behind the module's back.
                ties::untie(lock.db(), lock.name().bytes(), grantee.owner.bytes());
            }
            (Decision::Reenter(hold), Some(own)) => {
                lock.update(grantee.owner, &own, &Hold { token: Some(token), ..*hold });
                ties::retoken(lock, grantee.owner, &own, token);
            }
            _ => {}
        }
        if grantee.terms.tying != Tying::NONE {
            ties::tie(lock, token, grantee, now);
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

/// Ends the hold of `owner`, who has one. Those who wait are still to be served.
pub fn end(lock: &mut Lock, owner: TextRef, ending: Ending) {
    let waiters = waiters(lock);
    if lock.remove(owner, ending, waiters) {
        ties::untie_all(lock.db(), lock.name().bytes());
    } else {
        ties::untie(lock.db(), lock.name().bytes(), owner.bytes());
    }
}

/// Ends the holds of a lock whose lease has run out; whether there were any.
pub fn purge(lock: &mut Lock, now: Millis) -> bool {
    let expired = lock.purge(now);
    for owner in &expired {
        ties::untie(lock.db(), lock.name().bytes(), owner);
    }
    add(|it| &mut it.expired, expired.len() as u64);
    !expired.is_empty()
}

/// Ends all holds of a lock; how many there were. Those who wait are still to be served.
pub fn end_all(lock: &mut Lock) -> usize {
    let holders = lock.standing.holders;
    if holders > 0 {
        lock.clear(Ending::Forced, waiters(lock));
        ties::untie_all(lock.db(), lock.name().bytes());
    }
    holders
}

fn waiters(lock: &Lock) -> Waiters {
    if waiting::is_contended(lock.db(), lock.name().bytes()) { Waiters::Some } else { Waiters::None }
}

/// Opens several locks of the selected database, as `owner` sees them.
///
/// # Errors
///
/// [`NotALock`] if one of the keys holds something else.
pub fn look_all<'a>(ctx: Ctx<'a>, names: &[TextRef<'a>], owner: TextRef, now: Now) -> Result<Vec<Lock<'a>>, NotALock> {
    names.iter().map(|&name| Lock::look(ctx, name, owner, now.millis())).collect()
}
