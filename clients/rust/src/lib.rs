//! Distributed locks with Holdfast, a module for Redis and Valkey: [`Locks`] names a [`Lock`], which is asked for, and
//! granted as a [`Guard`]. The README has an example for each piece, and what happens when.
//!
//! Inside, every arrow points down: `redlock`, `multi` (locks over several servers) -> `locks`, `guard` (what a program
//! sees of one) -> `shared` (claims and servers together, and
//! claims that are taken to other sessions) -> `servers` (who serves which key) -> `node`, `reader` (one server, and the
//! task that hears what it tells) -> `claim` (one acquisition and whoever waits for it) -> `session` -> `requests`,
//! `state` (an acquisition as a pure machine), `wire` (the protocol).
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod changes;
mod claim;
mod error;
mod guard;
mod health;
mod info;
mod locks;
mod multi;
mod names;
mod node;
mod order;
mod place;
mod reader;
mod redlock;
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
pub use info::{Holder, Info};
pub use locks::{Lock, Locks};
pub use multi::{MultiGuard, MultiLock};
pub use names::{Keys, Owner};
pub use redis;
pub use redlock::{RedGuard, RedLock};
