//! The client against real servers.

mod cancel;
mod cluster;
mod common;
mod crowd;
mod holds;
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
