//! Real servers for tests.
//!
//! [`Server::start`] gives a test its own server on 127.0.0.1, with its own port and directory and the module loaded.
//! Dropping the value ends it. Under `make test-containers` the same call starts a container.
//!
//! ```no_run
//! let server = support::Server::start();
//! let token: i64 = redis::cmd("LOCK.ACQUIRE").arg("key").arg("owner").query(&mut server.connect()).unwrap();
//! assert!(token > 0);
//! ```
#![deny(missing_docs)]

mod atomic_migration;
mod clock;
mod cluster;
mod container;
mod dir;
mod environment;
mod launch;
pub mod lua;
mod probe;
mod process;
mod processor;
mod proxy;
mod random;
mod raw;
pub mod resp;
mod sentinel;
mod server;
mod socket;
mod until;
mod version;

pub use atomic_migration::AtomicMigration;
pub use clock::Clock;
pub use cluster::Cluster;
pub use environment::{in_containers, module_path, server_program, skip, workspace};
pub use probe::{Probe, Waited};
pub use processor::{ProcessorClock, stay_on_this_processor};
pub use proxy::{Direction, Fate, Proxy};
pub use random::Random;
pub use raw::Raw;
pub use resp::encode;
pub use sentinel::Trio;
pub use server::{Builder, Server};
pub use socket::Socket;
pub use until::{NotBefore, Over, eventually, pause, until};
pub use version::{Family, Feature, Version};
