//! The one admission rule. A mutex, a read-write lock and a semaphore differ only in a number.

use super::{Deadline, Limit, Millis, Token};

/// The largest hold count that is granted. Another client's may be larger (Redisson's `HINCRBY` uses 64 bits).
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

/// Everything that the rule needs to know of a lock, as one owner sees it at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The hold of the asking owner.
    pub own: Option<Hold>,
    /// How many hold, the asking owner included; those past their deadline do not count.
    pub holders: usize,
    /// The smallest limit that any holder named since the lock was last free; meaningless while the lock is free.
    pub limit: Limit,
}

impl Standing {
    /// The lock is free.
    pub const FREE: Self = Self { own: None, holders: 0, limit: Limit::Shared };
}

/// How a request changes the hold count of an owner who already holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raise {
    /// One hold more.
    ByOne,
    /// Sets it to this number, unless it is already as high: harmless to repeat, also after another owner's request has
    /// made the lock's limit smaller.
    To(u64),
    /// Nothing: the request is only for an owner who does not hold.
    New,
}

impl Raise {
    /// How many holds an owner gets who had none.
    pub fn of_none(self) -> u64 {
        match self {
            Self::ByOne | Self::New => 1,
            Self::To(holds) => holds,
        }
    }
}

/// What a request asks for of each of its locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// How many may hold at once, this owner included.
    pub limit: Limit,
    /// What happens to the hold count.
    pub raise: Raise,
    /// Length of the lease in ms, beginning at the grant.
    pub lease: Millis,
}

/// Whether others have to be served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// The request is the first in the queue, or there is none.
    Nobody,
    /// A request waits ahead.
    Somebody,
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The owner already holds; this is what it has from now on. (If the token is `None`, a new one is to be issued.)
    Reenter(Hold),
    /// A new holder, to be given a token; the lock's limit becomes the one named here.
    Grant(Hold, Limit),
    /// Not now.
    Wait,
    /// The owner already holds, and the request is only for one who does not.
    NotNew,
    /// The owner already holds, under this different limit.
    OtherLimit(Limit),
    /// The owner already holds, and its count can't be raised further.
    TooManyHolds,
    /// Of several locks, the owner holds some and not all, or not all under one token.
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

/// Decides a request. The only place that does.
pub fn decide(standing: &Standing, demand: &Demand, ahead: Ahead, now: Millis) -> Decision {
    let deadline = Deadline::after(now, demand.lease);
    if let Some(own) = standing.own {
        return reenter(own, standing.limit, demand, deadline);
    }
    let limit = if standing.holders == 0 { demand.limit } else { demand.limit.min(standing.limit) };
    if ahead == Ahead::Somebody || !limit.allows(standing.holders.saturating_add(1)) {
        return Decision::Wait;
    }
    Decision::Grant(Hold { holds: demand.raise.of_none(), token: None, deadline }, limit)
}

/// Decides a request for several locks, of each of which this was decided: all of them or none. So either all are granted,
/// or all are re-entered under the one token that they have.
///
/// # Errors
///
/// Why it is not granted: it has to wait, or something forbids it.
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
