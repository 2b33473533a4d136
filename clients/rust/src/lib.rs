//! Distributed locks with Holdfast, a module for Redis and Valkey: [`Locks`] names a [`Lock`], which is asked for, and
//! granted as a [`Guard`]. The README has an example for each piece, and what happens when.
//!
//! Inside: `state` is one acquisition as a pure machine, `claim` is that with whoever waits for it, `session` the task
//! that hears what a server tells, `shared` what brings them together and takes claims to other sessions; `wire` is the
//! protocol, `servers` who serves which key.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod claim;
mod error;
mod guard;
mod locks;
mod names;
mod node;
mod requests;
mod servers;
mod session;
mod shared;
mod slot;
mod state;
mod terms;
mod url;
mod wire;

pub use error::{Error, Why};
pub use guard::Guard;
pub use locks::{Lock, Locks};
pub use names::{Keys, Owner};
pub use redis;
