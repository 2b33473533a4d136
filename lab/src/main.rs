//! The lab: what was done to break the locks, and what was seen. `lab [--short] [SCENARIO…]`.

mod blow;
mod checker;
mod client;
mod clock;
mod cluster;
mod engine;
mod failover;
mod fuzz;
mod history;
mod load;
mod options;
mod record;
mod report;
mod session;
mod shards;
mod single;
mod tally;
mod trace;
mod trio;

use std::process::ExitCode;

use options::{Invocation, Options};
use report::{Report, Row};

/// A scenario: its name on the command line, its part of the lab's time, and what runs it.
struct Scenario {
    name: &'static str,
    share: u32,
    run: fn(&Options) -> Vec<Row>,
}

const SCENARIOS: &[Scenario] = &[
    Scenario { name: "failover", share: 3, run: failover::run },
    Scenario { name: "replicas", share: 3, run: failover::run_replicas },
    Scenario { name: "cluster", share: 2, run: cluster::run },
    Scenario { name: "single", share: 2, run: single::run },
    Scenario { name: "clock", share: 1, run: single::run_clock },
    Scenario { name: "fuzz", share: 2, run: fuzz::run },
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
        .filter(|scenario| invocation.wanted.is_empty() || invocation.wanted.iter().any(|w| w == scenario.name))
        .collect();
    let shares: u32 = SCENARIOS.iter().map(|scenario| scenario.share).sum();
    let mut report = Report::default();
    for scenario in chosen {
        let mut options = invocation.options.clone();
        options.budget = options.budget * scenario.share / shares.max(1);
        eprintln!("== {} (about {:?})", scenario.name, options.budget);
        report.extend((scenario.run)(&options));
    }
    report
}

fn unknown(wanted: &[String]) -> Option<&String> {
    wanted.iter().find(|name| SCENARIOS.iter().all(|scenario| scenario.name != *name))
}

fn refuse(why: &str) -> ExitCode {
    eprintln!("lab: {why}");
    ExitCode::FAILURE
}
