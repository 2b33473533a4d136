//! A driver: the program around the tested client, and the lines of JSON that it reads and writes. DRIVER.md specifies
//! them.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use support::eventually;

use crate::clock::{self, Micros};
use crate::scenario::{Feature, Profile, Runtime, Terms};

/// The time in which a driver starts and counts its threads, on a busy machine.
const ANSWERS: Duration = Duration::from_secs(60);
/// The number of threads that a client may keep while its program runs, however often it was closed: one for callbacks.
const KEPT: u64 = 1;

/// The content of `driver.yaml` in a driver's folder.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The client's name in tables.
    pub client: String,
    /// The program and its arguments, from this folder. `{driver-rust}` and `{python}` stand for the runner's settings.
    pub command: Vec<String>,
    /// The client's profile.
    pub profile: Profile,
    /// The features that the client lacks, each with the reason.
    #[serde(default)]
    pub lacks: BTreeMap<String, String>,
    /// The scenarios that it is known to fail, each with the reason. One that passes must leave this list.
    #[serde(default)]
    pub fails: BTreeMap<String, String>,
    /// The scenarios that it passes, but is known to fail at times with a fault between two messages, each with the
    /// reason.
    #[serde(default, rename = "fails-between-messages")]
    pub fails_between: BTreeMap<String, String>,
    /// The folder of the driver.
    #[serde(skip)]
    pub folder: PathBuf,
}

impl Manifest {
    /// Reads the manifest of a driver.
    ///
    /// # Errors
    ///
    /// If the manifest is invalid, with the file's name.
    pub fn read(folder: &Path) -> Result<Self, String> {
        let file = folder.join("driver.yaml");
        let wrong = |why: &dyn std::fmt::Display| format!("{}: {why}", file.display());
        let text = fs::read_to_string(&file).map_err(|why| wrong(&why))?;
        let mut manifest: Self = serde_saphyr::from_str(&text).map_err(|why| wrong(&why))?;
        manifest.folder = folder.to_owned();
        for name in manifest.lacks.keys() {
            if !Feature::ALL.iter().any(|it| it.name() == *name) {
                return Err(wrong(&format!("unknown feature {name}")));
            }
        }
        Ok(manifest)
    }

    /// Whether the client has this feature. Only events report a loss or contention immediately.
    pub fn has(&self, feature: Feature) -> bool {
        let reports_losses =
            self.profile == Profile::Sessions || !matches!(feature, Feature::LossReports | Feature::Keep);
        reports_losses && !self.lacks.contains_key(&feature.name())
    }
}

/// A call to the client.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "call", rename_all = "lowercase")]
pub enum Call {
    /// Opens a client of this server.
    Open {
        /// Its address.
        url: String,
    },
    /// Acquires locks.
    Acquire {
        /// The name of the hold.
        hold: String,
        /// The locks.
        keys: Vec<String>,
        /// The options.
        #[serde(flatten)]
        terms: Terms,
        /// The servers of the locks.
        #[serde(flatten)]
        at: At,
    },
    /// Releases a hold.
    Release {
        /// The hold.
        hold: String,
    },
    /// Renews a hold.
    Renew {
        /// The hold.
        hold: String,
        /// The lease in ms.
        lease: u64,
    },
    /// Checks whether the hold still exists.
    Check {
        /// The hold.
        hold: String,
    },
    /// Cancels the acquisition of a hold.
    Cancel {
        /// The hold.
        hold: String,
    },
    /// Drops a hold's handle.
    Drop {
        /// The hold.
        hold: String,
    },
    /// Force-releases a lock.
    Force {
        /// The lock.
        key: String,
    },
    /// Forks a child.
    Fork,
    /// Blocks its event loop.
    Block {
        /// The duration in ms.
        time: u64,
    },
    /// Starts another runtime, or ends the first one.
    Runtime {
        /// The change.
        is: Runtime,
    },
    /// Closes the client.
    Close,
    /// Counts the program's threads and tasks.
    Threads,
}

/// The servers of an acquisition's locks; without names, the server that was opened.
#[derive(Clone, Debug, Default, Serialize)]
pub struct At {
    /// Each lock at the server with the same index.
    #[serde(rename = "at", skip_serializing_if = "Vec::is_empty")]
    pub each: Vec<String>,
    /// At a majority of these servers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub majority: Vec<String>,
}

/// The outcome of a call.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
pub struct Outcome {
    /// `held`, `not-granted`, `released`, `renewed`, `lost`, `cancelled`, `ok`, or a kind of error.
    pub outcome: String,
    /// The token of the hold.
    #[serde(default)]
    pub fence: Option<u64>,
    /// The reason of a loss.
    #[serde(default)]
    pub reason: Option<String>,
    /// The text of an error.
    #[serde(default)]
    pub text: Option<String>,
    /// The number of threads and tasks.
    #[serde(default)]
    pub count: Option<u64>,
    /// The time, by the clock that all processes share.
    pub at: Micros,
}

/// A line of a driver.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Line {
    Ended {
        id: u64,
        #[serde(flatten)]
        outcome: Outcome,
    },
    Lost {
        lost: String,
        reason: String,
        at: Micros,
    },
}

/// A loss that a client reported by itself.
#[derive(Clone, Debug)]
pub struct Loss {
    /// The hold.
    pub hold: String,
    /// The reason.
    pub reason: String,
    /// The time.
    pub at: Micros,
}

/// A running driver.
pub struct Driver {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Result<Line, String>>,
    calls: u64,
    /// Outcomes of calls that were not fetched yet.
    ended: BTreeMap<u64, Outcome>,
    /// The losses that it reported, in order.
    pub losses: Vec<Loss>,
    /// The number of threads and tasks at its start.
    threads: u64,
}

impl Driver {
    /// Starts it.
    ///
    /// # Errors
    ///
    /// If there is no such program.
    pub fn start(manifest: &Manifest, programs: &BTreeMap<&'static str, String>) -> Result<Self, String> {
        let words: Vec<String> = manifest
            .command
            .iter()
            .map(|word| {
                programs.iter().fold(word.clone(), |word, (name, path)| word.replace(&format!("{{{name}}}"), path))
            })
            .collect();
        let (program, arguments) = words.split_first().ok_or("a driver has a command")?;
        let mut child = Command::new(program)
            .args(arguments)
            .current_dir(&manifest.folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|why| format!("{program}: {why}"))?;
        let (stdin, stdout) = child.stdin.take().zip(child.stdout.take()).ok_or("a driver has pipes")?;
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line).map_err(|why| format!("{why}: {line}"));
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let (ended, losses) = (BTreeMap::new(), Vec::new());
        let mut driver = Self { child, stdin: Some(stdin), lines, calls: 0, ended, losses, threads: 0 };
        driver.threads = driver.count_threads()?;
        Ok(driver)
    }

    /// The current number of threads and tasks.
    fn count_threads(&mut self) -> Result<u64, String> {
        let id = self.call(&Call::Threads)?;
        let outcome = self.outcome(id, ANSWERS)?.ok_or("the driver counts no threads")?;
        outcome.count.ok_or(format!("the driver counts no threads: {outcome:?}"))
    }

    /// The number of threads and tasks beyond those at its start, if a client may not keep as many.
    ///
    /// # Errors
    ///
    /// If the driver has ended, or does not count them.
    pub fn threads_left(&mut self) -> Result<Option<u64>, String> {
        let more = self.count_threads()?.saturating_sub(self.threads);
        Ok(Some(more).filter(|more| *more > KEPT))
    }

    /// Makes a call, and returns its name.
    ///
    /// # Errors
    ///
    /// If the driver has ended.
    pub fn call(&mut self, call: &Call) -> Result<u64, String> {
        #[derive(Serialize)]
        struct Numbered<'a> {
            id: u64,
            #[serde(flatten)]
            call: &'a Call,
        }
        self.calls += 1;
        let line = serde_json::to_string(&Numbered { id: self.calls, call }).map_err(|why| why.to_string())?;
        let stdin = self.stdin.as_mut().ok_or("the driver was ended")?;
        writeln!(stdin, "{line}").and_then(|()| stdin.flush()).map_err(|why| format!("the driver is gone: {why}"))?;
        Ok(self.calls)
    }

    /// Waits for the outcome of a call, for at most this time.
    ///
    /// # Errors
    ///
    /// If the driver ends, or writes an invalid line.
    pub fn outcome(&mut self, id: u64, within: Duration) -> Result<Option<Outcome>, String> {
        self.read_until(within, |it| it.ended.remove(&id))
    }

    /// The outcome of a call, if it was read already.
    pub fn ended(&mut self, id: u64) -> Option<Outcome> {
        self.ended.remove(&id)
    }

    /// Waits for the report of a loss, for at most this time.
    ///
    /// # Errors
    ///
    /// If the driver ends, or writes an invalid line.
    pub fn loss(&mut self, hold: &str, within: Duration) -> Result<Option<Loss>, String> {
        self.read_until(within, |it| it.losses.iter().find(|loss| loss.hold == hold).cloned())
    }

    /// Reads its output.
    ///
    /// # Errors
    ///
    /// If it has ended, or has written an invalid line.
    pub fn read(&mut self) -> Result<(), String> {
        self.read_until(Duration::ZERO, |_| None::<()>).map(|_| ())
    }

    fn read_until<T>(
        &mut self,
        within: Duration,
        mut what: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let end = clock::after(within);
        loop {
            if let Some(it) = what(self) {
                return Ok(Some(it));
            }
            match self.lines.recv_timeout(clock::left(end)) {
                Ok(Ok(Line::Ended { id, outcome })) => drop(self.ended.insert(id, outcome)),
                Ok(Ok(Line::Lost { lost: hold, reason, at })) => self.losses.push(Loss { hold, reason, at }),
                Ok(Err(why)) => return Err(format!("not a line of a driver: {why}")),
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => return Err("the driver has ended".to_owned()),
            }
        }
    }

    /// Pauses or continues its process.
    pub fn signal(&self, signal: Signal) {
        // Its next line shows whether it still runs.
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Closes its input, so that its program ends. Returns whether it ends within this time.
    pub fn quit(&mut self, within: Duration) -> bool {
        self.stdin = None;
        eventually(within, || matches!(self.child.try_wait(), Ok(Some(_))))
    }

    /// Kills its process.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.kill();
    }
}
