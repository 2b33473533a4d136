//! Simulation runs of the module, each reproducible from a seed.
//!
//! The module's source is compiled here a second time, unchanged, against a second implementation of its border with
//! the server. [`server`] has the functions of `src/server`, on a server in memory ([`node`]), and [`redis`] runs that
//! server in one thread. [`play`] plays a script of requests and faults, [`rules`] checks the invariants after every
//! event-loop iteration, [`seed`] makes scripts from a number, and [`shrink`] reduces a failing script.

// The module, unchanged.
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

// The second implementation of the border, and the server behind it.
pub mod node;
pub mod redis;
pub mod server;

// The player and the checkers.
pub mod history;
pub mod play;
pub mod random;
pub mod request;
pub mod resp;
pub mod rules;
pub mod scenarios;
pub mod script;
pub mod seed;
pub mod shrink;
pub mod stored;
pub mod thin;
