//! The decisions of a Holdfast client, without sockets, threads and clock (*sans-I/O*).
//!
//! A [`Core`] is one client at one server. An *I/O driver* (tokio, threads, a simulator) gives it each event,
//! with the time, as an [`Input`], and carries out the [`Output`]s in their order. Same inputs, same outputs.
//!
//! It is *crash-only*. There is one pair of connections: one reads the events of the session, one carries the requests.
//! A failure of either ends both. The next session begins with `LOCK.SESSION REPLACES`, so no earlier request takes
//! effect any more, and it resumes the holds and waits that the program still wants.
//!
//! `pair` has the connections, `claim` the requests and holds, `alarms` the time of the next check of each; `core`
//! combines them.

#![forbid(unsafe_code)]

mod alarms;
mod claim;
mod core;
mod pair;
mod reply;
mod step;
mod terms;

pub use crate::core::Core;
pub use claim::Moved;
pub use reply::Reply;
pub use step::{Channel, Input, LossReason, Outcome, Output, Settings};
pub use terms::{Bytes, Id, Limit, Millis, Terms, Wait};

/// The example of the README is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
