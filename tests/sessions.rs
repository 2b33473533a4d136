//! Sessions: a connection that represents a process.

mod bindings;
mod cluster;
mod contention;
mod ends;
mod events;
mod heartbeat;
mod limits;
mod losses;
mod naming;
mod new;
mod next;
mod opening;
mod queue;
mod races;
mod reader;
mod reconnect;
mod refused_writes;
mod replaces;
mod replicas;
mod requests;
mod server;
pub(crate) mod session;
mod waited;
mod withdrawal;
