//! Locks over several servers, slots or databases, which no server can grant alone.
//!
//! Two layers: an acquisition at several servers, `multi` (all of them) and `redlock` with `majority` (more than half
//! of them); and an acquisition at one server, which is a guard for the former and a `vote` for the latter.

mod majority;
mod multi;
mod redlock;
mod vote;

pub use majority::RedGuard;
pub use multi::{MultiGuard, MultiLock};
pub use redlock::RedLock;
