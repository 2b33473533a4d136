//! Distributed locks with [Holdfast](https://github.com/holdfast): see the README.
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
