//! Rolling upgrades under load: two builds side by side. First the replicas are upgraded, then the old primary, after a failover.

mod witness;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::checker::check;
use crate::client::Durability;
use crate::engine::{Equipment, LabError, Result};
use crate::failover::{LONGEST_LEASE, reacquire};
use crate::history::Micros;
use crate::load::{ClientGroup, Load, keys_of};
use crate::options::Options;
use crate::report::Row;
use crate::tally::Tally;
use crate::trace::trace;
use crate::trio::{HandOver, Setting, Trio};
use witness::{Leases, Queue};

/// Each period with mixed builds lasts one part in this many of the time. The steps themselves take the rest.
const PARTS: u32 = 4;

/// How long after a step it may cause a double hold: a lease that is not renewed.
const AFTER: Micros = LONGEST_LEASE;

/// The builds of an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Builds {
    /// From the module under test to the same with the next version number.
    ToNext,
    /// From 0.3, whose sessions use another protocol: the clients block, and hold plain leases.
    From03,
}

/// Three upgrades: with each way to promote another server, and from 0.3.
pub fn run(options: &Options) -> Vec<Row> {
    let options = Options { budget: options.budget / 3, ..options.clone() };
    vec![
        row("Rolling upgrade, SENTINEL FAILOVER alone", Builds::ToNext, HandOver::Sentinels, &options),
        row("Rolling upgrade, writes paused meanwhile", Builds::ToNext, HandOver::Paused, &options),
        row("Rolling upgrade from 0.3, writes paused meanwhile", Builds::From03, HandOver::Paused, &options),
    ]
}

fn row(title: &str, builds: Builds, hand_over: HandOver, options: &Options) -> Row {
    let mut tally = Tally::default();
    match upgrade(&mut tally, builds, hand_over, options) {
        Ok(seen) => {
            let mut row = tally.row(title);
            let Results { mixed, took, doubles, at_failover, kept, wrong } = seen;
            let (mixed, took) = (mixed.as_secs(), took as f64 / 1e6);
            row.note = format!(
                "{kept}; mixed for {mixed} s; {took:.1} s for the failover; {at_failover} of {doubles} double holds began then; {}",
                row.note
            );
            // If nothing is written during the pause, nothing can be lost.
            if hand_over == HandOver::Paused {
                row.violations += doubles;
            }
            for what in &wrong {
                eprintln!("{title}: {what}");
            }
            row.violations += wrong.len() as u64;
            row
        }
        Err(why) => Row::not_run(title, why),
    }
}

struct Results {
    mixed: Duration,
    /// From the first step of the failover until all was healthy.
    took: Micros,
    doubles: u64,
    /// Double holds that began at the failover, or within a lease of it.
    at_failover: u64,
    /// What was kept as required.
    kept: String,
    /// What was lost.
    wrong: Vec<String>,
}

/// The old build and the new one.
fn modules(builds: Builds, options: &Options) -> Result<(PathBuf, PathBuf)> {
    let named = |module: &Option<PathBuf>, variable, what| {
        module.clone().ok_or_else(|| LabError(format!("{variable} is to name {what} (scripts/lab builds it)")))
    };
    let (from, to) = match builds {
        Builds::ToNext => (
            options.module.clone(),
            named(&options.next_module, "HOLDFAST_NEXT_MODULE", "the module as the next version")?,
        ),
        Builds::From03 => {
            (named(&options.old_module, "HOLDFAST_OLD_MODULE", "the module of version 0.3")?, options.module.clone())
        }
    };
    if std::fs::read(&from)? == std::fs::read(&to)? {
        return Err(LabError(format!("{} and {} are one build", from.display(), to.display())));
    }
    Ok((from, to))
}

fn upgrade(tally: &mut Tally, builds: Builds, hand_over: HandOver, options: &Options) -> Result<Results> {
    let (from, to) = modules(builds, options)?;
    let options = Options { module: to, ..options.clone() };
    let equipment = Equipment { old_module: Some(from), ..Equipment::default() };
    let mut trio = Trio::start(Setting { equipment, ..Setting::default() }, &options)?;
    let before = trio.version()?;
    let bound = if builds == Builds::ToNext { 4 } else { 0 };
    let group = |prefix, durability| ClientGroup::mixed(prefix, durability, bound);
    let groups = [group("plain:", Durability::Nothing), group("safe:", Durability::Replicas(2))];
    let leases = Leases::take(&mut trio.primary()?)?;
    let queue = (builds == Builds::ToNext).then(|| Queue::form(&trio)).transpose()?;
    let load = Load::start(&groups, &trio.discovery(), options.seed, &options)?;
    let begun = Instant::now();
    let mut faults = trio.upgrade(options.budget / PARTS, hand_over)?;
    let mixed = begun.elapsed();
    let mut history = load.finish()?;
    faults.extend(trio.settle()?);
    let after = trio.version()?;
    let mut wrong = leases.lost(&mut trio.primary()?)?;
    if before == after {
        wrong.push(format!("the version is {after} before and after"));
    }
    let mut kept = format!("{before} to {after}, {} plain leases", leases.count());
    if let Some(queue) = queue {
        wrong.extend(queue.end(&trio)?);
        kept += ", a watched hold and its queue";
    }
    for key in keys_of(&history) {
        history.probes.push(reacquire(&mut trio.primary()?, key, LONGEST_LEASE)?);
    }
    let failover = faults.get(2).cloned().ok_or_else(|| LabError("the upgrade had no failover".into()))?;
    tally.faults += faults.len() as u64;
    history.faults = faults;
    let verdict = check(&history);
    let doubles = verdict.doubled_at.len() as u64;
    let at_failover =
        verdict.doubled_at.iter().filter(|at| (failover.from..failover.until + AFTER).contains(at)).count() as u64;
    for at in &verdict.doubled_at {
        trace(|| format!("double hold {} ms after the failover began", at.saturating_sub(failover.from) / 1_000));
    }
    tally.add(&history, verdict);
    tally.crashes(trio.crashes());
    tally.left_waiting(&trio.infos()?);
    Ok(Results { mixed, took: failover.until - failover.from, doubles, at_failover, kept, wrong })
}
