//! A driver: the program around a client that is judged, and the lines of JSON that it reads and writes. DRIVER.md specifies them.

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

/// In which time a driver starts and counts its threads, on a machine that is busy.
const ANSWERS: Duration = Duration::from_secs(60);
/// So many threads a client may keep for as long as its program lives, however often it was closed: one that calls back.
const KEPT: u64 = 1;

/// What `driver.yaml` in a driver's folder says.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// What the client is called in tables.
    pub client: String,
    /// The program and its arguments, from this folder. `{driver-rust}` and `{python}` stand for what the runner was told.
    pub command: Vec<String>,
    /// What it is made of.
    pub profile: Profile,
    /// What the client can't do, each with the reason.
    #[serde(default)]
    pub lacks: BTreeMap<String, String>,
    /// The scenarios that it is known to fail, each with the reason. One that passes must leave this list.
    #[serde(default)]
    pub fails: BTreeMap<String, String>,
    /// Those that it keeps, but is known to fail at times with a fault between two messages, each with the reason.
    #[serde(default, rename = "fails-between-messages")]
    pub fails_between: BTreeMap<String, String>,
    /// Where it stands.
    #[serde(skip)]
    pub folder: PathBuf,
}

impl Manifest {
    /// Reads the manifest of a driver.
    ///
    /// # Errors
    ///
    /// What is wrong, with the file's name.
    pub fn read(folder: &Path) -> Result<Self, String> {
        let file = folder.join("driver.yaml");
        let wrong = |why: &dyn std::fmt::Display| format!("{}: {why}", file.display());
        let text = fs::read_to_string(&file).map_err(|why| wrong(&why))?;
        let mut manifest: Self = serde_saphyr::from_str(&text).map_err(|why| wrong(&why))?;
        manifest.folder = folder.to_owned();
        for name in manifest.lacks.keys() {
            if !Feature::ALL.iter().any(|it| it.name() == *name) {
                return Err(wrong(&format!("no feature is called {name}")));
            }
        }
        Ok(manifest)
    }

    /// Whether the client has this. Only events can tell of a loss at once, and that somebody else wants what is kept.
    pub fn has(&self, feature: Feature) -> bool {
        let is_told = self.profile == Profile::Sessions || !matches!(feature, Feature::Told | Feature::Keep);
        is_told && !self.lacks.contains_key(&feature.name())
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
    /// Takes locks.
    Acquire {
        /// What the hold is called.
        hold: String,
        /// The locks.
        keys: Vec<String>,
        /// The terms.
        #[serde(flatten)]
        terms: Terms,
        /// Where they are.
        #[serde(flatten)]
        at: At,
    },
    /// Gives a hold back.
    Release {
        /// Which.
        hold: String,
    },
    /// Begins its lease anew.
    Renew {
        /// Which.
        hold: String,
        /// The lease in ms.
        lease: u64,
    },
    /// Says whether it is held.
    Check {
        /// Which.
        hold: String,
    },
    /// Gives up the acquisition of a hold.
    Cancel {
        /// Which.
        hold: String,
    },
    /// Forgets a hold.
    Drop {
        /// Which.
        hold: String,
    },
    /// Has a child.
    Fork,
    /// Blocks its event loop.
    Block {
        /// For so long, in ms.
        time: u64,
    },
    /// Begins another runtime, or ends the first one.
    Runtime {
        /// Which of the two.
        is: Runtime,
    },
    /// Ends the client.
    Close,
    /// Counts the program's threads and tasks.
    Threads,
}

/// Where the locks of an acquisition are: no names mean the server that was opened.
#[derive(Clone, Debug, Default, Serialize)]
pub struct At {
    /// Each at the server in the same place.
    #[serde(rename = "at", skip_serializing_if = "Vec::is_empty")]
    pub each: Vec<String>,
    /// At a majority of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub majority: Vec<String>,
}

/// How a call ended.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
pub struct Outcome {
    /// `held`, `not-granted`, `released`, `renewed`, `lost`, `cancelled`, `ok`, or a kind of error.
    pub outcome: String,
    /// The token of what is held.
    #[serde(default)]
    pub fence: Option<u64>,
    /// Why a hold is lost.
    #[serde(default)]
    pub reason: Option<String>,
    /// What an error says.
    #[serde(default)]
    pub text: Option<String>,
    /// How many threads and tasks there are.
    #[serde(default)]
    pub count: Option<u64>,
    /// When, by the clock that all processes share.
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

/// A loss that a client told unasked.
#[derive(Clone, Debug)]
pub struct Loss {
    /// What.
    pub hold: String,
    /// Why.
    pub reason: String,
    /// When.
    pub at: Micros,
}

/// A driver that runs.
pub struct Driver {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Result<Line, String>>,
    calls: u64,
    /// How calls ended, until somebody asks.
    ended: BTreeMap<u64, Outcome>,
    /// The losses that it told, in order.
    pub told: Vec<Loss>,
    /// How many threads and tasks it had when it started.
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
        let (ended, told) = (BTreeMap::new(), Vec::new());
        let mut driver = Self { child, stdin: Some(stdin), lines, calls: 0, ended, told, threads: 0 };
        driver.threads = driver.count_threads()?;
        Ok(driver)
    }

    /// How many threads and tasks it has now.
    fn count_threads(&mut self) -> Result<u64, String> {
        let id = self.call(&Call::Threads)?;
        let outcome = self.outcome(id, ANSWERS)?.ok_or("the driver counts no threads")?;
        outcome.count.ok_or(format!("the driver counts no threads: {outcome:?}"))
    }

    /// How many threads and tasks more than when it started it has, if they are more than a client may keep.
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

    /// How a call ends, if it does in this time.
    ///
    /// # Errors
    ///
    /// If the driver ends, or says what is no line of a driver.
    pub fn outcome(&mut self, id: u64, within: Duration) -> Result<Option<Outcome>, String> {
        self.read_until(within, |it| it.ended.remove(&id))
    }

    /// How a call has ended, if it has, as far as was read.
    pub fn ended(&mut self, id: u64) -> Option<Outcome> {
        self.ended.remove(&id)
    }

    /// The loss of a hold, if it is told in this time.
    ///
    /// # Errors
    ///
    /// If the driver ends, or says what is no line of a driver.
    pub fn loss(&mut self, hold: &str, within: Duration) -> Result<Option<Loss>, String> {
        self.read_until(within, |it| it.told.iter().find(|loss| loss.hold == hold).cloned())
    }

    /// Reads what it has said.
    ///
    /// # Errors
    ///
    /// If it has ended, or said what is no line of a driver.
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
                Ok(Ok(Line::Lost { lost: hold, reason, at })) => self.told.push(Loss { hold, reason, at }),
                Ok(Err(why)) => return Err(format!("no line of a driver: {why}")),
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => return Err("the driver has ended".to_owned()),
            }
        }
    }

    /// Its process is stopped, or continued.
    pub fn signal(&self, signal: Signal) {
        // Whether it is there shows at its next line.
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends its input, and so its program. Whether that is over in this time.
    pub fn quit(&mut self, within: Duration) -> bool {
        self.stdin = None;
        eventually(within, || matches!(self.child.try_wait(), Ok(Some(_))))
    }

    /// Ends its process, without a word.
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
