//! What a lock is. Pure Rust: no server, no clock, nothing unsafe.
//!
//! Times are Unix time in milliseconds unless a name says otherwise; the caller passes the current time.
#![forbid(unsafe_code)]

pub mod actor;
pub mod by_owner;
pub mod deadlock;
pub mod fence;
pub mod holders;
pub mod internal_errors;
pub mod key;
pub mod queue;
pub mod rule;
pub mod serve;

pub use actor::Actor;
pub use by_owner::ByOwner;
pub use fence::{Fence, Token};
pub use holders::Holders;
pub use key::{KeyMap, LockKey};
pub use queue::{Queue, Waiter, WaiterId};
pub use rule::{Ahead, Decision, Demand, Hold, Raise, Standing, all_or_none, decide};

use std::num::NonZeroU32;
use std::rc::Rc;

/// A point in Unix time or a length of time, in milliseconds.
pub type Millis = u64;

/// The earliest of these times.
pub fn earliest<const N: usize>(times: [Option<Millis>; N]) -> Option<Millis> {
    times.into_iter().fold(None, |first: Option<Millis>, at| match (first, at) {
        (Some(first), Some(at)) => Some(first.min(at)),
        (first, at) => first.or(at),
    })
}

/// The name in which a client holds a lock or waits for it: any bytes that the client chose.
pub type Owner = Rc<[u8]>;

/// The end of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Deadline {
    /// The last millisecond in which the hold counts.
    At(Millis),
    /// The hold lasts until it is released (a key without expiry).
    Never,
}

impl Deadline {
    /// The deadline of a lease of `lease` ms that starts at `now`.
    pub fn after(now: Millis, lease: Millis) -> Self {
        Self::At(now.saturating_add(lease))
    }

    /// Whether the lease is over. As with a key's expiry, the hold still counts in the millisecond of its deadline.
    pub fn has_passed(self, now: Millis) -> bool {
        matches!(self, Self::At(at) if now > at)
    }

    /// The same moment on a clock that has stepped by `by` ms.
    pub fn stepped(self, by: i64) -> Self {
        match self {
            Self::At(at) => Self::At(at.saturating_add_signed(by)),
            Self::Never => self,
        }
    }

    /// Milliseconds left; `None` if the lease never ends.
    pub fn remaining(self, now: Millis) -> Option<Millis> {
        match self {
            Self::At(at) => Some(at.saturating_sub(now)),
            Self::Never => None,
        }
    }
}

/// How many owners may hold a lock at once, ordered by strictness: a mutex is the smallest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Limit {
    /// At most this many holders.
    AtMost(NonZeroU32),
    /// Any number of holders.
    Shared,
}

impl Limit {
    /// One holder: the default.
    pub const MUTEX: Self = Self::AtMost(NonZeroU32::MIN);

    /// Whether the limit allows this many holders at once.
    pub fn allows(self, holders: usize) -> bool {
        match self {
            Self::AtMost(most) => u64::from(most.get()) >= holders as u64,
            Self::Shared => true,
        }
    }

    /// The limit as it is stored in the keyspace and shown in replies: `n`, or 0 for no limit.
    pub fn number(self) -> u32 {
        match self {
            Self::AtMost(most) => most.get(),
            Self::Shared => 0,
        }
    }

    /// The limit for a number that [`Limit::number`] returned.
    pub fn from_number(number: u32) -> Self {
        NonZeroU32::new(number).map_or(Self::Shared, Self::AtMost)
    }
}
