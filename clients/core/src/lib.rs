//! The decisions of a Holdfast client, without sockets, threads and clock (*sans-I/O*).
//!
//! A [`Core`] is one client at one server. An *I/O driver* (tokio, threads, a simulator) gives it each event,
//! with the time, as an [`Input`], and carries out the [`Output`]s in their order. Same inputs, same outputs:
//! both are printed as lines of text (`text.rs`), so scripts of steps can be kept and compared.
//!
//! It is *crash-only*. There is one pair of connections: one reads the events of the session, one carries the requests.
//! A failure of either ends both. The next session begins with `LOCK.SESSION REPLACES`, so no earlier request takes
//! effect any more, and it takes over what the program still wants.
//!
//! `pair` knows the connections, `claim` requests and holds, `alarms` when to look at which again; `core` puts them together.

#![forbid(unsafe_code)]

mod alarms;
mod claim;
mod core;
mod pair;
mod resp;
mod step;
mod terms;
mod text;

pub use crate::core::Core;
pub use claim::Moved;
pub use resp::{Nonsense, Reply, encode};
pub use step::{Channel, Input, LossReason, Outcome, Output, Settings};
pub use terms::{Bytes, Id, Limit, Millis, Terms, Wait};

/// The example of the README is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
