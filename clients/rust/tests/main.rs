//! The client against real servers.

mod cancel;
mod cluster;
mod common;
mod crowd;
mod holds;
mod losses;
mod proxy;
mod readme;
mod requests;
mod sentinel;
