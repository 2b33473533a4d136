//! What a client of Holdfast decides, without sockets, threads and clock.
//!
//! A [`Core`] stands for one client at one server. A *shell* (tokio, threads, asyncio, a simulator) tells it each thing
//! that happens, with the time, as an [`Input`], and carries out the [`Output`]s in their order. Same inputs, same outputs:
//! both are printed as lines of text (`text.rs`), so a script of steps from one language judges the core of another.
//!
//! It is *crash-only*. There is one pair of connections: one hears the events of the session, one carries the requests. They
//! stand and fall together. Whatever goes wrong ends both; the next session begins with `LOCK.SESSION REPLACES`, so the
//! server lets nothing more come of the old one, and takes along what is wanted.
//!
//! `pair` knows the connections, `claim` what is asked for or held, `alarms` when to look again at which; `core` puts them together.

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
