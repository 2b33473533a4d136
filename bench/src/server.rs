//! Servers to measure: on loopback, without persistence, on their own core.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::client::Client;
use crate::contenders::{Contender, Holdfast, Native, Redisson, SetNx};
use crate::machine;

/// A server program to measure on.
#[derive(Clone, Debug)]
pub struct Program {
    /// Name and version, as the server reports them.
    pub label: String,
    /// The program.
    pub path: PathBuf,
}

impl Program {
    /// Starts the program once to read its name and version.
    pub fn ask(path: &Path) -> Result<Self> {
        let server = support::Server::builder().program(path).without_module().try_start();
        let server = server.map_err(anyhow::Error::msg).with_context(|| format!("starting {}", path.display()))?;
        let label = server.version().to_string();
        Ok(Self { label, path: path.to_owned() })
    }
}

/// The server's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum With {
    /// The module, no persistence.
    Module,
    /// The module, and the AOF, synced every second.
    ModuleAndAof(Sync),
    /// Neither.
    Nothing,
}

/// When writes to the append-only file are synced (`appendfsync`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// Within a second or two.
    EverySecond,
    /// Before the reply.
    Always,
}

/// The number of threads that read requests and write replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The main thread alone.
    One,
    /// A second one (`io-threads 2`), which may use the clients' core as well.
    Two,
}

/// A running server and a control connection.
pub struct Running {
    /// The server.
    pub server: support::Server,
    /// For setup and for reading the state; not measured.
    pub control: Client,
    has_module: bool,
}

impl Running {
    /// Starts a server.
    pub fn start(program: &Program, with: With) -> Result<Self> {
        Self::start_threaded(program, with, Threads::One)
    }

    /// Starts a server with this many I/O threads.
    pub fn start_threaded(program: &Program, with: With, threads: Threads) -> Result<Self> {
        // Normal operation is measured, without a rewrite of the AOF or a save that happens to begin.
        let mut builder = support::Server::builder()
            .program(&program.path)
            .arg("maxclients", "10000")
            .arg("auto-aof-rewrite-percentage", "0")
            .arg("save", "");
        if let With::ModuleAndAof(sync) = with {
            let policy = if sync == Sync::Always { "always" } else { "everysec" };
            builder = builder.arg("appendonly", "yes").arg("appendfsync", policy);
        }
        if with == With::Nothing {
            builder = builder.without_module();
        }
        if threads == Threads::Two {
            builder = builder.arg("io-threads", "2");
        }
        let server = builder.try_start().map_err(anyhow::Error::msg)?;
        machine::pin_server(server.pid());
        if threads == Threads::Two {
            machine::free_helpers(server.pid());
        }
        let control = Client::connect(server.port())?;
        Ok(Self { server, control, has_module: with != With::Nothing })
    }

    /// Starts a replica of this server on the clients' core, and waits until it is in step.
    pub fn start_replica(&self, program: &Program) -> Result<support::Server> {
        let builder = support::Server::builder().program(&program.path).arg("save", "");
        let replica = builder.try_start().map_err(anyhow::Error::msg)?;
        replica.replica_of(&self.server);
        self.server.wait_replica_online();
        Ok(replica)
    }

    /// The server's port.
    pub fn port(&self) -> u16 {
        self.server.port()
    }

    /// All contenders on this server, the module first if it is loaded.
    pub fn lockers(&mut self) -> Result<Vec<Box<dyn Contender>>> {
        let mut lockers: Vec<Box<dyn Contender>> = Vec::new();
        if self.has_module {
            lockers.push(Box::new(Holdfast::PLAIN));
        }
        lockers.push(Box::new(Redisson::load(&mut self.control)?));
        lockers.push(Box::new(SetNx::load(&mut self.control)?));
        if let Some(native) = Native::of(&mut self.control)? {
            lockers.push(Box::new(native));
        }
        Ok(lockers)
    }

    /// Empties the server and waits until only the control connection is left.
    pub fn clear(&mut self) -> Result<()> {
        self.control.call(&["FLUSHALL"])?;
        support::until(Duration::from_secs(30), "the clients of the previous round are disconnected", || {
            self.control.info("clients", "connected_clients").is_ok_and(|count| count == "1")
        });
        Ok(())
    }
}
