//! The lab: injects faults into real servers under load, and reports what happened. `lab [--short] [SCENARIO…]`.

mod bound;
mod checker;
mod client;
mod clock;
mod cluster;
mod engine;
mod failover;
mod fuzz;
mod history;
mod load;
mod operations;
mod options;
mod primary_fault;
mod record;
mod redlock;
mod refusing;
mod report;
mod second;
mod session;
mod shards;
mod single;
mod soak;
mod tally;
mod trace;
mod trio;
mod upgrade;

use std::process::ExitCode;

use options::{Invocation, Options};
use report::{Report, Row};

/// A scenario: its name, its share of the lab's time, and its function.
struct Scenario {
    name: &'static str,
    share: u32,
    /// Whether it runs by default.
    usual: Usual,
    run: fn(&Options) -> Vec<Row>,
}

/// When a scenario runs that was not named.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Usual {
    /// In the short and in the long form.
    Always,
    /// In the long form only.
    Long,
    /// Only if it is named.
    Never,
}

const SCENARIOS: &[Scenario] = &[
    Scenario { name: "failover", share: 3, usual: Usual::Always, run: failover::run },
    Scenario { name: "replicas", share: 3, usual: Usual::Always, run: failover::run_replicas },
    Scenario { name: "refusing", share: 1, usual: Usual::Always, run: refusing::run },
    Scenario { name: "cluster", share: 2, usual: Usual::Always, run: cluster::run },
    Scenario { name: "single", share: 2, usual: Usual::Always, run: single::run },
    Scenario { name: "clock", share: 1, usual: Usual::Always, run: single::run_clock },
    Scenario { name: "fuzz", share: 2, usual: Usual::Always, run: fuzz::run },
    Scenario { name: "network", share: 2, usual: Usual::Long, run: failover::run_network },
    Scenario { name: "second", share: 1, usual: Usual::Long, run: second::run },
    Scenario { name: "redlock", share: 2, usual: Usual::Long, run: redlock::run },
    Scenario { name: "upgrade", share: 2, usual: Usual::Long, run: upgrade::run },
    // On demand only, for an hour: LAB_MINUTES=60 scripts/lab soak.
    Scenario { name: "soak", share: 0, usual: Usual::Never, run: soak::run },
];

fn main() -> ExitCode {
    let invocation = match Invocation::read(std::env::args().skip(1)) {
        Ok(invocation) => invocation,
        Err(why) => return refuse(&why),
    };
    if let Some(name) = unknown(&invocation.wanted) {
        let names: Vec<_> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
        return refuse(&format!("no scenario {name:?}; there are: {}", names.join(" ")));
    }
    let report = run(&invocation);
    print!("\n{report}");
    if report.violations() == 0 && !report.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(invocation: &Invocation) -> Report {
    let chosen: Vec<_> = SCENARIOS
        .iter()
        .filter(|scenario| match &invocation.wanted[..] {
            [] => scenario.is_usual(&invocation.options),
            wanted => wanted.iter().any(|name| name == scenario.name),
        })
        .collect();
    let usual = SCENARIOS.iter().filter(|scenario| scenario.is_usual(&invocation.options));
    let shares: u32 = usual.map(|scenario| scenario.share).sum();
    let mut report = Report::default();
    for scenario in chosen {
        let mut options = invocation.options.clone();
        if scenario.usual != Usual::Never {
            options.budget = options.budget * scenario.share / shares.max(1);
        }
        eprintln!("== {} (about {:?})", scenario.name, options.budget);
        report.extend((scenario.run)(&options));
    }
    report
}

impl Scenario {
    fn is_usual(&self, options: &Options) -> bool {
        self.usual == Usual::Always || (self.usual == Usual::Long && !options.short)
    }
}

fn unknown(wanted: &[String]) -> Option<&String> {
    wanted.iter().find(|name| SCENARIOS.iter().all(|scenario| scenario.name != *name))
}

fn refuse(why: &str) -> ExitCode {
    eprintln!("lab: {why}");
    ExitCode::FAILURE
}
