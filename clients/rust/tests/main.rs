//! The client against real servers.

mod blocking;
mod cancel;
mod cluster;
mod common;
mod crowd;
mod deadlock;
mod election;
mod holds;
mod keep;
mod losses;
mod multi;
mod proxy;
mod readme;
mod redlock;
mod redlock_model;
mod requests;
mod sentinel;
mod silent;
mod still;
