//! Many concurrent clients, in this process and in Python.

use std::collections::BTreeSet;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::bound::{self, Task};
use crate::client::{Client, ClientConfig, Durability, HoldTime};
use crate::clock::{WallClock, now, until};
use crate::engine::{LabError, Result};
use crate::history::{Event, History, Outcome, Request};
use crate::options::{Options, workspace};
use crate::record::parse;
use crate::session::Discovery;
use crate::trace::trace;

/// Longer than any client needs to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(25);

/// A group of clients.
#[derive(Clone, Debug)]
pub struct ClientGroup {
    /// The prefix of their keys, so that groups with different settings do not share locks.
    pub prefix: String,
    /// What they request of replicas.
    pub durability: Durability,
    /// How many hold locks for milliseconds.
    pub short: usize,
    /// How many hold locks for seconds.
    pub long: usize,
    /// How many threads in Python belong to the group. Half of them hold locks for seconds.
    pub python: usize,
    /// How many tasks of one process with a session belong to it, and as many threads in Python. Half hold locks for seconds.
    pub bound: usize,
}

impl ClientGroup {
    /// A group with clients of each kind: five short, four long, two in Python, and `bound` with a session.
    pub fn mixed(prefix: &str, durability: Durability, bound: usize) -> Self {
        Self { prefix: prefix.to_owned(), durability, short: 5, long: 4, python: 2, bound }
    }
}

/// Running clients, until [`Load::finish`].
pub struct Load {
    runtime: Runtime,
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<Vec<Event>>>,
    programs: Vec<Child>,
    wall: WallClock,
}

impl Load {
    /// Starts the clients.
    pub fn start(groups: &[ClientGroup], discovery: &Discovery, seed: u64, options: &Options) -> Result<Load> {
        let mut load = Load {
            runtime: Builder::new_multi_thread().worker_threads(2).enable_all().build()?,
            stop: Arc::default(),
            tasks: Vec::new(),
            programs: Vec::new(),
            wall: WallClock::read(),
        };
        for (number, group) in groups.iter().enumerate() {
            let seed = seed.wrapping_mul(1_000).wrapping_add(100 * number as u64);
            for index in 0..group.short + group.long {
                let hold_time = if index < group.short { HoldTime::Short } else { HoldTime::Long };
                load.start_client(group, discovery, hold_time, seed + index as u64);
            }
            if group.bound > 0 {
                load.start_process(group, discovery, seed + 50)?;
            }
            if group.python + group.bound > 0 {
                let program = python(group, discovery, seed, options)?;
                load.programs.push(program);
            }
        }
        Ok(load)
    }

    fn start_client(&mut self, group: &ClientGroup, discovery: &Discovery, hold_time: HoldTime, seed: u64) {
        let client_config = client_config("rs", group, discovery, hold_time, seed);
        let client = Client::new(client_config, self.wall, Arc::clone(&self.stop));
        self.tasks.push(self.runtime.spawn(client.run()));
    }

    /// Tasks that share a session, and one that forces their locks.
    fn start_process(&mut self, group: &ClientGroup, discovery: &Discovery, seed: u64) -> Result<()> {
        let _inside = self.runtime.enter();
        let locks = bound::locks(discovery).map_err(|why| LabError(why.to_string()))?;
        for index in 0..group.bound {
            let hold_time = if index % 2 == 0 { HoldTime::Short } else { HoldTime::Long };
            let client_config = client_config("bound", group, discovery, hold_time, seed + index as u64);
            let locks = locks.clone().named(&client_config.name).map_err(|why| LabError(why.to_string()))?;
            let task = Task::new(client_config, locks, self.wall, Arc::clone(&self.stop));
            self.tasks.push(self.runtime.spawn(task.run()));
        }
        let forcer = client_config("breaker", group, discovery, HoldTime::Short, seed + group.bound as u64);
        self.tasks.push(self.runtime.spawn(bound::force_locks(forcer, locks, Arc::clone(&self.stop))));
        Ok(())
    }

    /// Stops all clients, and collects their records. A client that does not stop has a request that never ended.
    pub fn finish(mut self) -> Result<History> {
        self.stop.store(true, Ordering::Relaxed);
        let mut history = History::default();
        let readers: Vec<_> = self.programs.iter_mut().map(stop_program).collect();
        for task in self.tasks {
            match self.runtime.block_on(async { timeout(STOP_TIMEOUT, task).await }) {
                Ok(Ok(record)) => history.add(record),
                Ok(Err(why)) => return Err(LabError(format!("a client failed: {why}"))),
                Err(_) => history.requests.push(never_ended()),
            }
        }
        for (program, reader) in self.programs.iter_mut().zip(readers) {
            if !until(STOP_TIMEOUT, || matches!(program.try_wait(), Ok(Some(_)))) {
                let _ = program.kill();
                history.requests.push(never_ended());
            }
            let status = program.wait()?;
            let text = reader.join().unwrap_or_default();
            if !status.success() {
                return Err(LabError(format!("the Python client ended with {status}")));
            }
            trace(|| format!("Python's clients wrote {} lines", text.lines().count()));
            history.add(read_record(&text, self.wall)?);
        }
        self.runtime.shutdown_background();
        history.end_forced_holds();
        Ok(history)
    }
}

fn client_config(
    name: &str,
    group: &ClientGroup,
    discovery: &Discovery,
    hold_time: HoldTime,
    seed: u64,
) -> ClientConfig {
    let (prefix, discovery) = (group.prefix.clone(), discovery.clone());
    ClientConfig { name: format!("{name}{seed}"), prefix, discovery, durability: group.durability, hold_time, seed }
}

/// All keys that were held.
pub fn keys_of(history: &History) -> BTreeSet<String> {
    history.holds.iter().map(|hold| hold.grant.key.clone()).collect()
}

fn never_ended() -> Request {
    Request { sent: now(), allowed: 0, ended: None, outcome: Outcome::Unanswered }
}

fn python(group: &ClientGroup, discovery: &Discovery, seed: u64, options: &Options) -> Result<Child> {
    let (kind, addresses) = match discovery {
        Discovery::Sentinels(addresses) => ("sentinel", addresses),
        Discovery::Cluster(addresses) => ("cluster", addresses),
    };
    let durability = match group.durability {
        Durability::Nothing => "nothing".to_owned(),
        Durability::Wait => "wait".to_owned(),
        Durability::Replicas(n) => n.to_string(),
    };
    let script: PathBuf = workspace().join("verification/lab/clients/client.py");
    let mut command = Command::new(&options.python);
    command
        .arg(script)
        .args([kind, &addresses.join(","), &group.prefix, &durability])
        .args([group.python, group.bound].map(|threads| threads.to_string()))
        .arg(seed.to_string())
        .env("PYTHONPATH", workspace().join("clients/python/src"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    dies_with_the_lab(&mut command);
    command.spawn().map_err(|why| LabError(format!("{}: {why}", options.python.display())))
}

/// Ends the program when the lab ends, in any way.
pub fn dies_with_the_lab(command: &mut Command) {
    // SAFETY: prctl is async-signal-safe, and nothing else runs between fork and exec.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
    }
}

/// Closing its input tells the program to stop.
fn stop_program(program: &mut Child) -> thread::JoinHandle<String> {
    drop(program.stdin.take());
    read_output(program)
}

/// Reads a program's output in a thread, so that a full pipe does not block it.
pub fn read_output(program: &mut Child) -> thread::JoinHandle<String> {
    let output = program.stdout.take();
    thread::spawn(move || {
        let mut text = String::new();
        if let Some(mut output) = output {
            let _ = output.read_to_string(&mut text);
        }
        text
    })
}

fn read_record(text: &str, wall: WallClock) -> Result<Vec<Event>> {
    text.lines().map(|line| parse(line, |token| wall.time_of(token)).map_err(LabError)).collect()
}
