//! Tests of the client with real servers.

mod blocking;
mod cancel;
mod cluster;
mod common;
mod deadlock;
mod election;
mod holds;
mod keep;
mod losses;
mod many_tasks;
mod multi;
mod proxy;
mod readme;
mod redlock;
mod requests;
mod sentinel;
mod silent;
mod still;
