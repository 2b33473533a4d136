//! The amount of measurement: the full form, or a quick one that checks that everything runs.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;

/// The limit for a round without any result, if other processes use the processors.
pub const IDLE: Duration = Duration::from_secs(30);

/// The command line of `bench`.
pub const USAGE: &str = "\
usage: bench [--quick] [--out DIR] [--server PROGRAM]... [--redis-py PYTHON] [--who NAME] [--million] [SECTION]...
  --quick            a minute of everything, judging no times; fails if something does not run
  --out DIR          where results go (default: target/bench, with --quick: target/bench-quick)
  --server PROGRAM   a server to measure on (default: redis-server)
  --redis-py PYTHON  a Python that has redis-py, to measure its Lock too
  --who NAME         only this one, in the sections pair, handoff, service, keep: for a profile
  --million          a million requests that wait, in place of 100,000, in the section sessions
  SECTION            pair, handoff, crash, memory, neighbours, replicas, sessions, clients,
                     service, herd, keep, worst (default: all but worst, with --quick: all)";

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The amounts.
    pub scale: Scale,
    /// The folder for results.
    pub out: PathBuf,
    /// The server programs.
    pub servers: Vec<PathBuf>,
    /// A Python with redis-py.
    pub python: Option<PathBuf>,
    /// The only contender to measure.
    pub who: Option<String>,
    /// The sections to run; empty: all.
    pub sections: Vec<String>,
}

impl Settings {
    /// Reads the command line, without the program's name.
    pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let mut quick = false;
        let mut million = false;
        let mut out = None;
        let mut servers = Vec::new();
        let mut python = None;
        let mut who = None;
        let mut sections = Vec::new();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().map(PathBuf::from).with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--quick" => quick = true,
                "--million" => million = true,
                "--out" => out = Some(value()?),
                "--server" => servers.push(value()?),
                "--redis-py" => python = Some(value()?),
                "--who" => who = Some(arguments.next().context("--who needs a name")?),
                option if option.starts_with('-') => bail!("unknown option {option}\n{USAGE}"),
                _ => sections.push(argument),
            }
        }
        if servers.is_empty() {
            servers.push("redis-server".into());
        }
        let usual = if quick { "target/bench-quick" } else { "target/bench" };
        let mut scale = if quick { Scale::quick() } else { Scale::full() };
        if million {
            scale.session_waits = 1_000_000;
        }
        Ok(Self { scale, out: out.unwrap_or_else(|| support::workspace().join(usual)), servers, python, who, sections })
    }

    /// Whether to measure this contender.
    pub fn measures(&self, name: &str) -> bool {
        self.who.as_ref().is_none_or(|who| who == name)
    }
}

/// The amounts.
#[derive(Clone, Debug)]
pub struct Scale {
    /// Whether the times are meaningful.
    pub judged: bool,
    /// Rounds of the uncontended pair.
    pub pair_rounds: usize,
    /// Pipelined pairs of one contender in one round.
    pub pairs: usize,
    /// Pairs of one contender in one round, one request at a time.
    pub pairs_for_latency: usize,
    /// Rounds of the hand-off.
    pub handoff_rounds: usize,
    /// The minimum duration of a round.
    pub handoff_least: Duration,
    /// The maximum duration of a round, to reach three grants for each client.
    pub handoff_most: Duration,
    /// How many holders are killed.
    pub crashes: usize,
    /// The lease of the killed holder.
    pub crash_lease: Duration,
    /// Held locks for measuring the memory.
    pub locks_held: usize,
    /// Waiting clients for measuring the memory.
    pub waiters: usize,
    /// The interval at which the memory is read until it has settled.
    pub settling_step: Duration,
    /// Rounds of the neighbours.
    pub neighbour_rounds: usize,
    /// The duration of each round of the neighbours.
    pub neighbour_window: Duration,
    /// Locks that the server, or Redisson's watchdog, renews beside the neighbours.
    pub watched: usize,
    /// Their lease. They are renewed after a third of it.
    pub watched_lease: Duration,
    /// Rounds of the confirmed grants.
    pub replica_rounds: usize,
    /// Grants in each of these rounds.
    pub replica_grants: usize,
    /// Waiting requests of sessions.
    pub session_waits: usize,
    /// Rounds of the hand-offs with events.
    pub session_rounds: usize,
    /// The duration of each of these rounds.
    pub session_window: Duration,
    /// Rounds of the Rust client beside raw commands.
    pub client_rounds: usize,
    /// Pairs of each in one round.
    pub client_pairs: usize,
    /// Rounds of many tasks of one process.
    pub task_rounds: usize,
    /// The number of these tasks.
    pub tasks: usize,
    /// The time limit for every task to hold its lock once.
    pub task_limit: Duration,
    /// Rounds of a service's view.
    pub service_rounds: usize,
    /// The duration of each of these rounds.
    pub service_window: Duration,
    /// The processes of the section `herd`.
    pub herd: Herd,
    /// Rounds of lock caching.
    pub keep_rounds: usize,
    /// The duration of each of these rounds.
    pub keep_window: Duration,
    /// Rounds of each of the worst iterations.
    pub worst_rounds: usize,
}

/// Processes that hold locks and wait while their server is paused.
#[derive(Clone, Debug, Serialize)]
pub struct Herd {
    /// The number of processes.
    pub processes: usize,
    /// Locks that each holds.
    pub holds: usize,
    /// Locks that each waits for.
    pub waits: usize,
    /// How long the server is paused.
    pub stall: Duration,
}

impl Scale {
    fn full() -> Self {
        Self {
            judged: true,
            pair_rounds: 15,
            pairs: 40_000,
            pairs_for_latency: 1_500,
            handoff_rounds: 7,
            handoff_least: Duration::from_millis(600),
            handoff_most: Duration::from_millis(1_500),
            crashes: 20,
            crash_lease: Duration::from_millis(500),
            locks_held: 100_000,
            waiters: 5_000,
            settling_step: Duration::from_millis(500),
            neighbour_rounds: 5,
            neighbour_window: Duration::from_secs(2),
            watched: 100_000,
            watched_lease: Duration::from_secs(30),
            replica_rounds: 10,
            replica_grants: 1_000,
            session_waits: 100_000,
            session_rounds: 5,
            session_window: Duration::from_millis(500),
            client_rounds: 15,
            client_pairs: 3_000,
            task_rounds: 3,
            tasks: 10_000,
            task_limit: Duration::from_secs(10),
            service_rounds: 3,
            service_window: Duration::from_millis(800),
            herd: Herd { processes: 200, holds: 100, waits: 100, stall: Duration::from_secs(15) },
            keep_rounds: 5,
            keep_window: Duration::from_secs(1),
            worst_rounds: 3,
        }
    }

    fn quick() -> Self {
        Self {
            judged: false,
            pair_rounds: 2,
            pairs: 2_000,
            pairs_for_latency: 200,
            handoff_rounds: 1,
            handoff_least: Duration::from_millis(100),
            handoff_most: Duration::from_millis(200),
            crashes: 2,
            crash_lease: Duration::from_millis(300),
            locks_held: 10_000,
            waiters: 500,
            settling_step: Duration::from_millis(30),
            neighbour_rounds: 1,
            neighbour_window: Duration::from_millis(500),
            watched: 10_000,
            watched_lease: Duration::from_millis(1_500),
            replica_rounds: 2,
            replica_grants: 100,
            session_waits: 5_000,
            session_rounds: 1,
            session_window: Duration::from_millis(100),
            client_rounds: 1,
            client_pairs: 200,
            task_rounds: 1,
            tasks: 500,
            task_limit: Duration::from_secs(2),
            service_rounds: 1,
            service_window: Duration::from_millis(60),
            herd: Herd { processes: 5, holds: 10, waits: 10, stall: Duration::from_millis(500) },
            keep_rounds: 1,
            keep_window: Duration::from_millis(100),
            worst_rounds: 1,
        }
    }
}
