//! Sessions: one connection that stands for a process.

mod alive;
mod cancel;
mod cluster;
mod ends;
mod events;
mod limits;
mod losses;
mod naming;
mod new;
mod next;
mod queue;
mod races;
mod reader;
mod reconnect;
mod refused_writes;
mod replaces;
mod replicas;
mod requests;
mod server;
mod session;
mod ties;
mod waited;
mod wanted;
