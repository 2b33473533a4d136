//! The one admission rule. A mutex, a read-write lock and a semaphore differ only in their limit.

use super::{Deadline, Limit, Millis, Token};

/// The largest hold count that the module grants. Another client may write a larger one (Redisson's `HINCRBY` uses 64
/// bits).
pub const MAX_HOLDS: u64 = i32::MAX as u64;

/// The hold of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// How many times the owner must release it.
    pub holds: u64,
    /// Fencing token; `None` for a new hold, or if another client wrote the hold and this module has not granted it
    /// yet.
    pub token: Option<Token>,
    /// End of the lease.
    pub deadline: Deadline,
}

/// All that the rule needs to know of a lock, as one owner sees it at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The hold of the requesting owner.
    pub own: Option<Hold>,
    /// How many holders there are, including the requesting owner. Those past their deadline do not count.
    pub holders: usize,
    /// The smallest limit that any holder named since the lock was last free; meaningless while the lock is free.
    pub limit: Limit,
}

impl Standing {
    /// The lock is free.
    pub const FREE: Self = Self { own: None, holders: 0, limit: Limit::Shared };
}

/// How a request changes the hold count of an owner that already holds the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raise {
    /// Adds one.
    ByOne,
    /// Sets the count to this number, unless it is already as high. Harmless to repeat, even after another owner's
    /// request has lowered the lock's limit.
    To(u64),
    /// Refuses: the request is only for an owner that does not hold the lock.
    New,
}

impl Raise {
    /// The hold count of an owner that had no hold.
    pub fn initial_count(self) -> u64 {
        match self {
            Self::ByOne | Self::New => 1,
            Self::To(holds) => holds,
        }
    }
}

/// What a request demands of each of its locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// How many owners may hold the lock at once, including this one.
    pub limit: Limit,
    /// How the hold count changes if the owner holds the lock already.
    pub raise: Raise,
    /// Length of the lease in ms, beginning at the grant.
    pub lease: Millis,
}

/// Whether other requests have to be served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// The request is at the head of the queue, or the queue is empty.
    NoRequest,
    /// Another request waits ahead.
    Requests,
}

/// The decision on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The owner already holds the lock; this is its hold from now on. (If the token is `None`, the caller issues one.)
    Reenter(Hold),
    /// The owner becomes a holder. The caller issues the token. This becomes the lock's limit.
    Grant(Hold, Limit),
    /// The request has to wait.
    Wait,
    /// The owner already holds the lock, and the request is only for an owner that does not.
    NotNew,
    /// The owner already holds the lock, under this other limit.
    OtherLimit(Limit),
    /// The owner already holds the lock, and its hold count can't be raised further.
    TooManyHolds,
    /// Of several locks, the owner holds only some, or holds all but under different tokens.
    HoldsSome,
}

impl Decision {
    /// Whether the request can't be granted, however long it waits.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Reenter(_) | Self::Grant(..) | Self::Wait => false,
            Self::NotNew | Self::OtherLimit(_) | Self::TooManyHolds | Self::HoldsSome => true,
        }
    }
}

/// Decides on a request for one lock. No other code does.
pub fn decide(standing: &Standing, demand: &Demand, ahead: Ahead, now: Millis) -> Decision {
    let deadline = Deadline::after(now, demand.lease);
    if let Some(own) = standing.own {
        return reenter(own, standing.limit, demand, deadline);
    }
    let limit = if standing.holders == 0 { demand.limit } else { demand.limit.min(standing.limit) };
    if ahead == Ahead::Requests || !limit.allows(standing.holders.saturating_add(1)) {
        return Decision::Wait;
    }
    Decision::Grant(Hold { holds: demand.raise.initial_count(), token: None, deadline }, limit)
}

/// Combines the decisions on each lock of a multi-key request: all or none. So either the owner is granted all, or it
/// re-enters all under the one token that they have.
///
/// # Errors
///
/// The decision that prevents the grant: the request has to wait, or is refused.
pub fn all_or_none(decisions: &[Decision]) -> Result<(), Decision> {
    if let Some(refusal) = decisions.iter().find(|decision| decision.is_refusal()) {
        return Err(*refusal);
    }
    let token = |decision: &Decision| match decision {
        Decision::Reenter(hold) => Some(hold.token),
        _ => None,
    };
    let held = decisions.iter().find_map(token);
    if held.is_some() && decisions.iter().any(|decision| token(decision) != held) {
        return Err(Decision::HoldsSome);
    }
    if decisions.contains(&Decision::Wait) { Err(Decision::Wait) } else { Ok(()) }
}

fn reenter(own: Hold, limit: Limit, demand: &Demand, deadline: Deadline) -> Decision {
    let holds = match demand.raise {
        Raise::New => return Decision::NotNew,
        Raise::To(holds) if own.holds >= holds && limit <= demand.limit => own.holds,
        _ if demand.limit != limit => return Decision::OtherLimit(limit),
        Raise::ByOne if own.holds >= MAX_HOLDS => return Decision::TooManyHolds,
        Raise::ByOne => own.holds.saturating_add(1),
        Raise::To(holds) => own.holds.max(holds),
    };
    Decision::Reenter(Hold { holds, token: own.token, deadline: own.deadline.max(deadline) })
}
