//! Locks over several servers, slots or databases, which no server can decide alone.
//!
//! Two layers: what is requested from several servers, `multi` (all of them) and `redlock` with `majority` (more than a half); and one
//! acquisition at one server, which is a guard for the first and a `vote` for the second.

mod majority;
mod multi;
mod redlock;
mod vote;

pub use majority::RedGuard;
pub use multi::{MultiGuard, MultiLock};
pub use redlock::RedLock;
