//! Programs whose clients contend for the lock.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Attempt, LEASE_MS};
use crate::clock::until;
use crate::load::{dies_with_the_lab, read_output};
use crate::options::{Options, workspace};

/// Longer than any client needs to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
const KEY: &str = "redlock";

/// How long a client in Rust holds the lock, in milliseconds. The others hold it for 5 to 50.
const HOLD_MS: u64 = 25;
const WAIT_MS: u64 = 2_000;

/// A program with one or more clients.
pub struct Contender {
    name: String,
    program: Vec<OsString>,
    addresses: Addresses,
    /// Its arguments, other than the servers and the lock.
    words: Vec<String>,
}

/// How a program gets the servers' addresses.
#[derive(Clone, Copy)]
enum Addresses {
    HostsAndPorts,
    Urls,
}

impl Contender {
    /// Holdfast's client for Rust: `redlock_contender URL,… KEY SECONDSs HOLD_MS LEASE_MS WAIT_MS`, which ends after its time.
    pub fn rust(name: String, time: Duration) -> Contender {
        let program = vec![workspace().join("target/release/examples/redlock_contender").into()];
        let mut words = vec![format!("{}s", time.as_secs())];
        words.extend([HOLD_MS, LEASE_MS, WAIT_MS].map(|millis| millis.to_string()));
        Contender { name, program, addresses: Addresses::Urls, words }
    }

    /// A script in Python: `PROGRAM HOST:PORT,… KEY CLIENTS LEASE_MS SEED`, which runs until its input is closed, and then prints
    /// its records.
    pub fn python(name: &str, options: &Options, script: PathBuf, clients: usize) -> Contender {
        let program = vec![options.python.clone().into(), script.into()];
        let words = vec![clients.to_string(), LEASE_MS.to_string(), options.seed.to_string()];
        Contender { name: name.to_owned(), program, addresses: Addresses::HostsAndPorts, words }
    }

    fn start(&self, addresses: &[SocketAddr]) -> io::Result<Child> {
        let addresses: Vec<String> = addresses
            .iter()
            .map(|address| match self.addresses {
                Addresses::HostsAndPorts => address.to_string(),
                Addresses::Urls => format!("redis://{address}"),
            })
            .collect();
        let mut words = self.program.iter();
        let mut command = Command::new(words.next().cloned().unwrap_or_default());
        command
            .args(words)
            .args([&addresses.join(","), KEY])
            .args(&self.words)
            .env("PYTHONPATH", workspace().join("clients/python/src"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        dies_with_the_lab(&mut command);
        command.spawn().map_err(|why| io::Error::other(format!("{}: {why}", self.name)))
    }
}

/// The running contenders.
pub struct Team {
    programs: Vec<(String, Child, JoinHandle<String>)>,
}

impl Team {
    /// Starts them.
    pub fn start(team: &[Contender], addresses: &[SocketAddr]) -> io::Result<Team> {
        let start = |member: &Contender| {
            let mut program = member.start(addresses)?;
            // Read from the start, because some programs write all the time.
            let output = read_output(&mut program);
            Ok((member.name.clone(), program, output))
        };
        Ok(Team { programs: team.iter().map(start).collect::<io::Result<_>>()? })
    }

    /// Stops all of them, and collects their records.
    pub fn finish(mut self) -> Result<Vec<Attempt>, String> {
        // Closing its input tells a program to stop.
        self.programs.iter_mut().for_each(|(_, program, _)| drop(program.stdin.take()));
        let mut attempts = Vec::new();
        for (name, mut program, output) in self.programs {
            if !until(STOP_TIMEOUT, || matches!(program.try_wait(), Ok(Some(_)))) {
                let _ = program.kill();
                return Err(format!("{name} did not end"));
            }
            let status = program.wait().map_err(|why| why.to_string())?;
            if !status.success() {
                return Err(format!("{name} ended with {status}"));
            }
            for line in output.join().unwrap_or_default().lines() {
                attempts.push(Attempt::read(&name, line)?);
            }
        }
        Ok(attempts)
    }
}
