//! A run of the module, from one seed.
//!
//! The module's source is compiled here a second time, unchanged, against another side of its border with the server:
//! [`server`] has the functions of `src/server`, and [`redis`] is the server behind them, in memory and in one thread.
//! [`play`] plays a script of requests and mishaps to it, [`rules`] judges after every turn of its event loop, [`seed`]
//! makes scripts from a number, and [`shrink`] cuts one that fails down to what still fails.

// The module, as it is.
#[path = "../../../src/commands/mod.rs"]
pub mod commands;
#[path = "../../../src/config.rs"]
pub mod config;
#[path = "../../../src/confirming.rs"]
pub mod confirming;
#[path = "../../../src/deadlocks.rs"]
pub mod deadlocks;
#[path = "../../../src/event_loop.rs"]
pub mod event_loop;
#[path = "../../../src/holds.rs"]
pub mod holds;
#[path = "../../../src/info.rs"]
pub mod info;
#[path = "../../../src/keyspace/mod.rs"]
pub mod keyspace;
#[path = "../../../src/lock/mod.rs"]
pub mod lock;
#[path = "../../../src/notices.rs"]
pub mod notices;
#[path = "../../../src/replies.rs"]
pub mod replies;
#[path = "../../../src/serving.rs"]
pub mod serving;
#[path = "../../../src/state/mod.rs"]
pub mod state;
#[path = "../../../src/stats.rs"]
pub mod stats;
#[path = "../../../src/waiting.rs"]
pub mod waiting;
#[path = "../../../src/watchdog.rs"]
pub mod watchdog;

// The other side of its border, and what lives there.
pub mod redis;
pub mod server;

// The player and the judges.
pub mod asked;
pub mod history;
pub mod play;
pub mod random;
pub mod resp;
pub mod rules;
pub mod scenes;
pub mod script;
pub mod seed;
pub mod shrink;
pub mod thin;
pub mod truth;
