//! The one admission rule. A mutex, a read-write lock and a semaphore differ in a number only.

use super::{Deadline, Limit, Millis, Token};

/// The largest hold count that is given out. Another client's may be larger (Redisson's `HINCRBY` knows 64 bits).
pub const MAX_HOLDS: u64 = i32::MAX as u64;

/// What one owner has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// How many times it must be released.
    pub holds: u64,
    /// Fencing token; `None` when another client made the hold and this module has not granted it yet.
    pub token: Option<Token>,
    /// End of the lease.
    pub deadline: Deadline,
}

/// All that the rule needs to know of a lock, seen by one owner at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The hold of the owner who asks.
    pub own: Option<Hold>,
    /// How many hold, the owner who asks among them; those past their deadline do not count.
    pub holders: usize,
    /// The smallest limit that any holder named since the lock was last free; of no meaning while nobody holds.
    pub limit: Limit,
}

impl Standing {
    /// Nobody holds.
    pub const FREE: Self = Self { own: None, holders: 0, limit: Limit::Shared };
}

/// How a request changes the hold count of one who holds already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raise {
    /// One hold more.
    ByOne,
    /// To so many, unless there are as many already: may be repeated without harm.
    To(u64),
}

/// What an owner asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// How many may hold at once, with this owner.
    pub limit: Limit,
    /// What becomes of the hold count.
    pub raise: Raise,
    /// Length of the lease in ms, from the grant on.
    pub lease: Millis,
}

/// Whether others have to be served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// The request is the first in the queue, or there is none.
    Nobody,
    /// Somebody waits ahead.
    Somebody,
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The owner holds already; this is what it has from now on. (A token that is `None` is to be made.)
    Reenter(Hold),
    /// A new holder, to be given a token; the lock's limit becomes the one named here.
    Grant(Hold, Limit),
    /// Not now.
    Wait,
    /// The owner holds already, under this other limit.
    OtherLimit(Limit),
    /// The owner holds already, and its count can't be raised further.
    TooManyHolds,
}

/// Decides a request. The only place that does.
pub fn decide(standing: &Standing, request: &Request, ahead: Ahead, now: Millis) -> Decision {
    let deadline = Deadline::after(now, request.lease);
    if let Some(own) = standing.own {
        return reenter(own, standing.limit, request, deadline);
    }
    let limit = if standing.holders == 0 { request.limit } else { request.limit.min(standing.limit) };
    if ahead == Ahead::Somebody || !limit.allows(standing.holders.saturating_add(1)) {
        return Decision::Wait;
    }
    let holds = match request.raise {
        Raise::ByOne => 1,
        Raise::To(holds) => holds,
    };
    Decision::Grant(Hold { holds, token: None, deadline }, limit)
}

fn reenter(own: Hold, limit: Limit, request: &Request, deadline: Deadline) -> Decision {
    if request.limit != limit {
        return Decision::OtherLimit(limit);
    }
    let holds = match request.raise {
        Raise::ByOne if own.holds >= MAX_HOLDS => return Decision::TooManyHolds,
        Raise::ByOne => own.holds.saturating_add(1),
        Raise::To(holds) => own.holds.max(holds),
    };
    Decision::Reenter(Hold { holds, token: own.token, deadline: own.deadline.max(deadline) })
}
