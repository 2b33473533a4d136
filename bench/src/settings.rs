//! How much is measured: all of it, or just enough to see that everything runs.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;

/// A round in which nothing was done yet goes on for so long at most: somebody else may have the processors.
pub const IDLE: Duration = Duration::from_secs(30);

/// What `bench` takes on its command line.
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

/// What one run measures.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Amounts.
    pub scale: Scale,
    /// Where results go.
    pub out: PathBuf,
    /// Programs of the servers.
    pub servers: Vec<PathBuf>,
    /// A Python with redis-py.
    pub python: Option<PathBuf>,
    /// The only one to measure.
    pub who: Option<String>,
    /// Names of sections; empty: all.
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

    /// Whether to measure the one of this name.
    pub fn measures(&self, name: &str) -> bool {
        self.who.as_ref().is_none_or(|who| who == name)
    }
}

/// Amounts.
#[derive(Clone, Debug)]
pub struct Scale {
    /// Whether times mean anything.
    pub judged: bool,
    /// Rounds, and pairs a round, of the uncontended pair.
    pub pair_rounds: usize,
    /// Pairs that one contender makes in one round, pipelined.
    pub pairs: usize,
    /// Pairs that one contender makes in one round, one request at a time.
    pub pairs_for_latency: usize,
    /// Rounds of the hand-off.
    pub handoff_rounds: usize,
    /// Each contender hands off at least so long in a round.
    pub handoff_least: Duration,
    /// And at most so long, to reach three turns a client.
    pub handoff_most: Duration,
    /// Deaths of a holder.
    pub crashes: usize,
    /// The lease of the holder that dies.
    pub crash_lease: Duration,
    /// Locks held for the memory of one.
    pub locks_held: usize,
    /// Clients waiting for the memory of one.
    pub waiters: usize,
    /// How long between two looks at the memory until it has settled.
    pub settling_step: Duration,
    /// Rounds of the neighbours.
    pub neighbour_rounds: usize,
    /// How long the neighbours are measured in each round.
    pub neighbour_window: Duration,
    /// Locks that the server, or Redisson's watchdog, renews beside the neighbours.
    pub watched: usize,
    /// Their lease: a third of it is the time between two renewals.
    pub watched_lease: Duration,
    /// Rounds of the grants that replicas confirm.
    pub replica_rounds: usize,
    /// Grants in each of them.
    pub replica_grants: usize,
    /// Requests that wait on behalf of sessions.
    pub session_waits: usize,
    /// Rounds of the hand-offs that are told by events.
    pub session_rounds: usize,
    /// How long each contender hands off in a round.
    pub session_window: Duration,
    /// Rounds of the client for Rust beside raw commands.
    pub client_rounds: usize,
    /// Pairs that each makes in one round.
    pub client_pairs: usize,
    /// Rounds of many tasks of one process.
    pub task_rounds: usize,
    /// How many tasks those are.
    pub tasks: usize,
    /// So long all of them have at most to take a turn each.
    pub task_limit: Duration,
    /// Rounds of what a service sees.
    pub service_rounds: usize,
    /// How long each contender serves it in a round.
    pub service_window: Duration,
    /// Who comes back after a stall.
    pub herd: Herd,
    /// Rounds of the kept locks.
    pub keep_rounds: usize,
    /// How long each uses them in a round.
    pub keep_window: Duration,
    /// Rounds of each of the worst steps.
    pub worst_rounds: usize,
}

/// Processes that hold and wait while their server is paused.
#[derive(Clone, Debug, Serialize)]
pub struct Herd {
    /// How many there are.
    pub processes: usize,
    /// Locks that each holds.
    pub holds: usize,
    /// Locks that each waits for.
    pub waits: usize,
    /// For how long the server is paused.
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
