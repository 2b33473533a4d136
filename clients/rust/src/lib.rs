//! Distributed locks with Holdfast, a module for Redis and Valkey: [`Locks`] names a [`Lock`], which is asked for, and
//! granted as a [`Guard`]. The README has an example for each piece, and what happens when.
//!
//! What is to be done is decided by `holdfast-core`; this moves its bytes, keeps its timer, and wakes who waits. Inside, every
//! arrow points down: `several` (locks over several servers), `within` (one lock while another is held) -> `locks`,
//! `guard` (what a program sees of one) -> `hold` (one acquisition) -> `turn` (whose turn it is to use a kept lock) -> `client` (what is
//! asked, and how it is answered) -> `driver` (the task of a server) -> `shared` (the cores, and who waits for what) -> `line` (who
//! wants the same kept lock), `link` (a pair of connections), `servers` (who serves which key) -> `place`. A program without tokio
//! waits by `blocking`.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod blocking;
mod changes;
mod client;
mod clock;
mod driver;
mod error;
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
pub use error::{Error, Why};
pub use guard::Guard;
pub use info::{Holder, Info};
pub use locks::{Lock, Locks};
pub use names::{Keys, Owner};
pub use redis;
pub use several::{MultiGuard, MultiLock, RedGuard, RedLock};
pub use within::Inner;
