//! RedLock over five independent servers, with servers that are killed, paused, cut off, and whose clocks step: with Holdfast's
//! clients, and with node-redlock's algorithm under the same load.

mod checker;
mod contenders;
mod servers;

use std::fmt::Display;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::options::{Options, workspace};
use crate::report::Row;
use checker::{Attempt, Verdict, check};
use contenders::{Contender, Team};
use servers::{FAULTS, FiveServers};

/// Clients that contend for one lock.
const CLIENTS: usize = 12;
pub const LEASE_MS: u64 = 2_000;
/// After a server may have lost grants, no further fault is injected for this long. RedLock requires this of its operator.
const BETWEEN_FAULTS: Duration = Duration::from_millis(LEASE_MS + 500);
/// How long a server is down.
const AWAY_MS: std::ops::Range<u64> = 300..2_500;
/// How many violations are printed in full.
const SHOWN_VIOLATIONS: usize = 10;

/// Both algorithms, one after the other, with the same faults. The short form runs Holdfast's only.
pub fn run(options: &Options) -> Vec<Row> {
    let ours = |options: &Options| trial("RedLock over five servers", &holdfast(options), options);
    if options.short {
        return vec![ours(options)];
    }
    let options = Options { budget: options.budget / 2, ..options.clone() };
    vec![ours(&options), trial("the same, node-redlock's algorithm", &node_redlock(&options), &options)]
}

/// Half of the clients in each language: in Rust a program for each, in Python one for all.
fn holdfast(options: &Options) -> Vec<Contender> {
    let script = workspace().join("verification/lab/clients/redlock_contender.py");
    let python = Contender::python("python", options, script, CLIENTS / 2);
    let rust = |number| Contender::rust(format!("rust-{number}"), options.budget);
    (0..CLIENTS / 2).map(rust).chain([python]).collect()
}

fn node_redlock(options: &Options) -> Vec<Contender> {
    vec![Contender::python("node", options, workspace().join("verification/lab/clients/node_redlock.py"), CLIENTS)]
}

fn trial(name: &str, team: &[Contender], options: &Options) -> Row {
    match contend(team, options) {
        Ok(seen) => seen.row(name),
        Err(why) => Row::not_run(name, why),
    }
}

struct Results {
    verdict: Verdict,
    faults: u64,
    messages: u64,
}

fn contend(team: &[Contender], options: &Options) -> Result<Results, String> {
    let end = Instant::now() + options.budget;
    let notified = |why: &dyn Display| why.to_string();
    let mut five = FiveServers::start().map_err(|why| notified(&why))?;
    let team = Team::start(team, &five.addresses()).map_err(|why| notified(&why))?;
    let mut rng = Rng::with_seed(options.seed);
    let mut faults = 0;
    std::thread::sleep(Duration::from_secs(2));
    for fault in FAULTS.into_iter().cycle() {
        if Instant::now() + BETWEEN_FAULTS > end && faults > 0 {
            break;
        }
        let (which, away) = (rng.usize(..5), Duration::from_millis(rng.u64(AWAY_MS)));
        five.inject_fault(fault, which, away).map_err(|why| notified(&why))?;
        faults += 1;
        std::thread::sleep(BETWEEN_FAULTS);
    }
    let attempts = team.finish()?;
    Ok(Results { verdict: check(&attempts), faults, messages: five.messages() })
}

impl Results {
    fn row(self, name: &str) -> Row {
        let Verdict { holds, failed, lost, worst_wait, requests, wrong } = self.verdict;
        for what in wrong.iter().take(SHOWN_VIOLATIONS) {
            eprintln!("{name}: {what}");
        }
        Row {
            scenario: name.to_owned(),
            runs: 1,
            faults: self.faults,
            requests,
            violations: wrong.len() as u64,
            note: format!(
                "{holds} grants, {lost} notified of their loss, {failed} failed attempts, worst wait {} ms, {} messages a grant",
                worst_wait / 1_000,
                self.messages / holds.max(1),
            ),
        }
    }
}
