//! Many clients at work at once, in this process and in Python's.

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
use crate::client::{Asks, Character, Client, Pace};
use crate::clock::{WallClock, now, until};
use crate::engine::{Result, Trouble};
use crate::history::{Event, History, Outcome, Request};
use crate::options::{Options, workspace};
use crate::record::parse;
use crate::session::Way;
use crate::trace::trace;

/// Longer than any client may need to come to an end once it was told to.
const TO_FINISH: Duration = Duration::from_secs(25);

/// Who shall work, and how.
#[derive(Clone, Debug)]
pub struct Crew {
    /// What all keys begin with, so that crews with different habits do not share locks.
    pub prefix: String,
    /// What they ask of replicas.
    pub asks: Asks,
    /// How many hold for milliseconds.
    pub short: usize,
    /// How many hold for seconds.
    pub long: usize,
    /// How many threads of Python work beside them, half of them for seconds.
    pub python: usize,
    /// How many tasks of one process with a session, half of them for seconds; and as many threads of Python.
    pub bound: usize,
}

/// Clients at work, until [`Load::finish`].
pub struct Load {
    runtime: Runtime,
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<Vec<Event>>>,
    programs: Vec<Child>,
    wall: WallClock,
}

impl Load {
    /// Sends the crews to work.
    pub fn start(crews: &[Crew], way: &Way, seed: u64, options: &Options) -> Result<Load> {
        let mut load = Load {
            runtime: Builder::new_multi_thread().worker_threads(2).enable_all().build()?,
            stop: Arc::default(),
            tasks: Vec::new(),
            programs: Vec::new(),
            wall: WallClock::read(),
        };
        for (number, crew) in crews.iter().enumerate() {
            let seed = seed.wrapping_mul(1_000).wrapping_add(100 * number as u64);
            for index in 0..crew.short + crew.long {
                let pace = if index < crew.short { Pace::Short } else { Pace::Long };
                load.start_client(crew, way, pace, seed + index as u64);
            }
            if crew.bound > 0 {
                load.start_process(crew, way, seed + 50)?;
            }
            if crew.python + crew.bound > 0 {
                let program = python(crew, way, seed, options)?;
                load.programs.push(program);
            }
        }
        Ok(load)
    }

    fn start_client(&mut self, crew: &Crew, way: &Way, pace: Pace, seed: u64) {
        let character = character("rs", crew, way, pace, seed);
        let client = Client::new(character, self.wall, Arc::clone(&self.stop));
        self.tasks.push(self.runtime.spawn(client.run()));
    }

    /// Tasks that share a session, and one that breaks what they hold.
    fn start_process(&mut self, crew: &Crew, way: &Way, seed: u64) -> Result<()> {
        let _inside = self.runtime.enter();
        let locks = bound::locks(way).map_err(|why| Trouble(why.to_string()))?;
        for index in 0..crew.bound {
            let pace = if index % 2 == 0 { Pace::Short } else { Pace::Long };
            let character = character("bound", crew, way, pace, seed + index as u64);
            let locks = locks.clone().named(&character.name).map_err(|why| Trouble(why.to_string()))?;
            let task = Task::new(character, locks, self.wall, Arc::clone(&self.stop));
            self.tasks.push(self.runtime.spawn(task.run()));
        }
        let breaker = character("breaker", crew, way, Pace::Short, seed + crew.bound as u64);
        self.tasks.push(self.runtime.spawn(bound::break_locks(breaker, locks, Arc::clone(&self.stop))));
        Ok(())
    }

    /// Tells all to stop, and collects what they wrote down. Who does not come back has a request that never ended.
    pub fn finish(mut self) -> Result<History> {
        self.stop.store(true, Ordering::Relaxed);
        let mut history = History::default();
        let readers: Vec<_> = self.programs.iter_mut().map(stop_program).collect();
        for task in self.tasks {
            match self.runtime.block_on(async { timeout(TO_FINISH, task).await }) {
                Ok(Ok(record)) => history.add(record),
                Ok(Err(why)) => return Err(Trouble(format!("a client broke: {why}"))),
                Err(_) => history.requests.push(never_ended()),
            }
        }
        for (program, reader) in self.programs.iter_mut().zip(readers) {
            if !until(TO_FINISH, || matches!(program.try_wait(), Ok(Some(_)))) {
                let _ = program.kill();
                history.requests.push(never_ended());
            }
            let status = program.wait()?;
            let text = reader.join().unwrap_or_default();
            if !status.success() {
                return Err(Trouble(format!("the Python client ended with {status}")));
            }
            trace(|| format!("Python's clients wrote {} lines", text.lines().count()));
            history.add(read_record(&text, self.wall)?);
        }
        self.runtime.shutdown_background();
        history.end_broken_holds();
        Ok(history)
    }
}

fn character(name: &str, crew: &Crew, way: &Way, pace: Pace, seed: u64) -> Character {
    let (prefix, way) = (crew.prefix.clone(), way.clone());
    Character { name: format!("{name}{seed}"), prefix, way, asks: crew.asks, pace, seed }
}

/// The keys that were ever held.
pub fn keys_of(history: &History) -> BTreeSet<String> {
    history.holds.iter().map(|hold| hold.grant.key.clone()).collect()
}

fn never_ended() -> Request {
    Request { sent: now(), allowed: 0, ended: None, outcome: Outcome::Unanswered }
}

fn python(crew: &Crew, way: &Way, seed: u64, options: &Options) -> Result<Child> {
    let (kind, addresses) = match way {
        Way::Sentinels(addresses) => ("sentinel", addresses),
        Way::Cluster(addresses) => ("cluster", addresses),
    };
    let asks = match crew.asks {
        Asks::Nothing => "nothing".to_owned(),
        Asks::Wait => "wait".to_owned(),
        Asks::Replicas(n) => n.to_string(),
    };
    let script: PathBuf = workspace().join("verification/lab/clients/client.py");
    let mut command = Command::new(&options.python);
    command
        .arg(script)
        .args([kind, &addresses.join(","), &crew.prefix, &asks])
        .args([crew.python, crew.bound].map(|threads| threads.to_string()))
        .arg(seed.to_string())
        .env("PYTHONPATH", workspace().join("clients/python/src"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    dies_with_the_lab(&mut command);
    command.spawn().map_err(|why| Trouble(format!("{}: {why}", options.python.display())))
}

/// However the lab ends, this program does not outlive it.
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

/// What a program prints is read aside, so that it is not held up by a full pipe.
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
    text.lines().map(|line| parse(line, |token| wall.time_of(token)).map_err(Trouble)).collect()
}
