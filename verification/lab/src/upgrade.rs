//! A rolling upgrade: an old and a new build side by side, under load. Replicas first, then the master, once it is none.

use std::time::{Duration, Instant};

use crate::checker::check;
use crate::client::Asks;
use crate::engine::{Equipment, Result, Trouble};
use crate::failover::{LONGEST_LEASE, have_again};
use crate::history::Micros;
use crate::load::{Crew, Load, keys_of};
use crate::options::Options;
use crate::report::Row;
use crate::tally::Tally;
use crate::trace::trace;
use crate::trio::{HandOver, Setting, Trio};

/// Steps between which the builds are mixed, and some time for the steps themselves.
const PARTS: u32 = 4;

/// How long after a step a hold can still be seen twice because of it: a lease that nobody renews.
const AFTER: Micros = LONGEST_LEASE;

/// Two upgrades, one for each way to make another server the master.
pub fn run(options: &Options) -> Vec<Row> {
    let options = Options { budget: options.budget / 2, ..options.clone() };
    vec![
        row("Rolling upgrade, SENTINEL FAILOVER alone", HandOver::Sentinels, &options),
        row("Rolling upgrade, writes paused meanwhile", HandOver::Paused, &options),
    ]
}

fn row(title: &str, hand_over: HandOver, options: &Options) -> Row {
    let mut tally = Tally::default();
    match upgrade(&mut tally, hand_over, options) {
        Ok(seen) => {
            let mut row = tally.row(title);
            let Seen { mixed, took, doubles, at_failover } = seen;
            let (mixed, took) = (mixed.as_secs(), took as f64 / 1e6);
            row.note = format!(
                "mixed for {mixed} s; {took:.1} s to another master and order; {at_failover} of {doubles} double holds began then; {}",
                row.note
            );
            // Where nothing was written from the pause on, nothing can be lost.
            if hand_over == HandOver::Paused {
                row.violations += doubles;
            }
            row
        }
        Err(why) => Row::not_run(title, why),
    }
}

struct Seen {
    mixed: Duration,
    /// From the first step of the failover until all was in order.
    took: Micros,
    doubles: u64,
    /// Those that began at the failover, or within a lease of it.
    at_failover: u64,
}

fn upgrade(tally: &mut Tally, hand_over: HandOver, options: &Options) -> Result<Seen> {
    let Some(old) = options.old_module.clone() else {
        return Err(Trouble("HOLDFAST_OLD_MODULE is to name an older build of the module".into()));
    };
    if std::fs::read(&old)? == std::fs::read(&options.module)? {
        return Err(Trouble(format!("{} is the build under test", old.display())));
    }
    let equipment = Equipment { old_module: Some(old), ..Equipment::default() };
    let mut trio = Trio::start(Setting { equipment, ..Setting::default() }, options)?;
    let crew = |prefix: &str, asks| Crew { prefix: prefix.to_owned(), asks, short: 5, long: 4, python: 2, bound: 4 };
    let crews = [crew("plain:", Asks::Nothing), crew("safe:", Asks::Replicas(2))];
    let load = Load::start(&crews, &trio.way(), options.seed, options)?;
    let begun = Instant::now();
    let mut faults = trio.upgrade(options.budget / PARTS, hand_over)?;
    let mixed = begun.elapsed();
    let mut history = load.finish()?;
    faults.extend(trio.settle()?);
    for key in keys_of(&history) {
        history.probes.push(have_again(&mut trio.master()?, key, LONGEST_LEASE)?);
    }
    let failover = faults.get(2).cloned().ok_or_else(|| Trouble("the upgrade had no failover".into()))?;
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
    Ok(Seen { mixed, took: failover.until - failover.from, doubles, at_failover })
}
