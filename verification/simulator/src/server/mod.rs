//! The second implementation of the border with the server: the functions of `src/server`, on a server in memory.
//!
//! Code that makes no decision about the server is shared with the first implementation: the module's table of
//! callbacks, its two timers, the grammar of commands, slices of time, numbers.

pub mod acl;
pub mod blocked;
#[path = "../../../../src/server/bytes.rs"]
mod bytes;
#[path = "../../../../src/server/callbacks.rs"]
pub mod callbacks;
pub mod calls;
pub mod clients;
pub mod clock;
pub mod cluster;
pub mod commands;
pub mod config;
pub mod ctx;
#[path = "../../../../src/server/discarded.rs"]
pub mod discarded;
pub mod events;
#[path = "../../../../src/server/grammar.rs"]
mod grammar;
pub mod info;
pub mod key;
pub mod main_thread;
#[path = "../../../../src/server/open_keys.rs"]
mod open_keys;
pub mod replicas;
pub mod reply;
#[path = "../../../../src/server/slice.rs"]
pub mod slice;
pub mod text;
#[path = "../../../../src/server/timer.rs"]
pub mod timer;
mod timers;
pub mod writes;

pub use commands::Call;
pub use ctx::{Ctx, Role};
pub use key::Key;
pub use main_thread::{Constant, MainThread};
pub use text::{AsText, Text, TextRef};
