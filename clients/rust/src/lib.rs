//! Distributed locks with Holdfast, a module for Redis and Valkey: [`Locks`] names a [`Lock`], and acquiring that
//! returns a [`Guard`]. The guide (`docs/clients/rust.md`) has an example of each feature, and says what happens when
//! something fails.
//!
//! `holdfast-core` decides; this crate does the I/O, runs the core's timer, and wakes callers. Its modules form layers,
//! and a module uses only those after it: `several` (locks over several servers), `election` (candidates and the
//! leader), `within` (one lock while another is held) -> `locks`, `guard` (the public types) -> `hold` (one
//! acquisition) -> `turn` (the head of a cached lock's local queue) -> `client` (calls and their outcomes) -> `driver`
//! (the task of a server) -> `shared` (the cores, and the callers of each call) -> `line` (local queues of cached
//! locks), `link` (a pair of connections), `servers` (which server serves a key) -> `place`. `blocking` has the runtime of
//! this crate, `events` what it reports of holds.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod blocking;
mod changes;
mod client;
mod clock;
mod driver;
mod election;
mod error;
mod events;
mod guard;
mod health;
mod hold;
mod info;
mod line;
mod link;
mod locks;
mod names;
mod order;
mod place;
mod seen;
mod servers;
mod several;
mod shared;
mod slot;
mod terms;
mod turn;
mod url;
mod within;

pub use blocking::block_on;
pub use election::{Leader, Observer};
pub use error::{Error, LossReason};
pub use events::Event;
pub use guard::Guard;
pub use info::{Holder, Info, Waiter};
pub use locks::{Lock, Locks};
pub use names::{Keys, Owner};
pub use redis;
pub use several::{MultiGuard, MultiLock, RedGuard, RedLock};
pub use within::Inner;
