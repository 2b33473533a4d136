//! The commands, a file each: arguments, decision, effect, reply, in that order.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod acquire;
mod args;
mod force;
mod help;
mod info;
mod macquire;
mod mrelease;
mod mrenew;
mod owner;
mod release;
mod renew;
mod top;
mod waiters;

pub use acquire::Acquire;
pub use force::Force;
pub use help::Help;
pub use info::Info;
pub use macquire::Macquire;
pub use mrelease::Mrelease;
pub use mrenew::Mrenew;
pub use owner::Owner;
pub use release::Release;
pub use renew::Renew;
pub use top::Top;
pub use waiters::Waiters;
