//! The commands, one file each. Each reads its arguments, decides, takes effect and replies, in that order.

mod acquire;
mod args;
mod events;
mod fields;
mod force;
mod help;
mod info;
mod macquire;
mod mrelease;
mod mrenew;
mod owner;
mod release;
mod renew;
mod session;
mod top;
mod version;
mod waiters;

use crate::server::commands::Entry;

/// All commands, in the order in which `LOCK.HELP` shows them.
pub const ALL: [Entry; 14] = [
    Entry::of::<acquire::Acquire>(),
    Entry::of::<release::Release>(),
    Entry::of::<renew::Renew>(),
    Entry::of::<force::Force>(),
    Entry::of::<macquire::Macquire>(),
    Entry::of::<mrelease::Mrelease>(),
    Entry::of::<mrenew::Mrenew>(),
    Entry::of::<events::Events>(),
    Entry::of::<info::Info>(),
    Entry::of::<waiters::Waiters>(),
    Entry::of::<top::Top>(),
    Entry::of::<session::Session>(),
    Entry::of::<version::Version>(),
    Entry::of::<help::Help>(),
];

/// A command of earlier versions. Its reply says what to do.
pub const FORMER: Entry = Entry::of::<owner::Owner>();
