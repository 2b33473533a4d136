//! A rolling upgrade: an old and a new build side by side, under load. Replicas first, then the master, once it is none.

use std::time::Instant;

use crate::checker::check;
use crate::client::Asks;
use crate::engine::{Result, Trouble};
use crate::failover::{LONGEST_LEASE, have_again};
use crate::load::{Crew, Load, keys_of};
use crate::options::Options;
use crate::report::Row;
use crate::tally::Tally;
use crate::trio::{Setting, Trio};

/// Steps between which the builds are mixed, and some time for the steps themselves.
const PARTS: u32 = 4;

/// One upgrade for all of the time.
pub fn run(options: &Options) -> Vec<Row> {
    let title = "Rolling upgrade, old and new build mixed";
    let mut tally = Tally::default();
    match upgrade(&mut tally, options) {
        Ok(mixed) => {
            let mut row = tally.row(title);
            row.note = format!("mixed for {} s; {}", mixed.as_secs(), row.note);
            vec![row]
        }
        Err(why) => vec![Row::not_run(title, why)],
    }
}

fn upgrade(tally: &mut Tally, options: &Options) -> Result<std::time::Duration> {
    let Some(old) = options.old_module.clone() else {
        return Err(Trouble("HOLDFAST_OLD_MODULE is to name an older build of the module".into()));
    };
    if std::fs::read(&old)? == std::fs::read(&options.module)? {
        return Err(Trouble(format!("{} is the build under test", old.display())));
    }
    let mut trio = Trio::start(Setting { old_module: Some(old), ..Setting::default() }, options)?;
    let crew = |prefix: &str, asks| Crew { prefix: prefix.to_owned(), asks, short: 5, long: 4, python: 2, tied: 4 };
    let crews = [crew("plain:", Asks::Nothing), crew("safe:", Asks::Replicas(2))];
    let load = Load::start(&crews, &trio.way(), options.seed, options)?;
    let begun = Instant::now();
    let faults = trio.upgrade(options.budget / PARTS)?;
    let mixed = begun.elapsed();
    let mut history = load.finish()?;
    for key in keys_of(&history) {
        history.probes.push(have_again(&mut trio.master()?, key, LONGEST_LEASE)?);
    }
    tally.faults += faults.len() as u64;
    history.faults = faults;
    tally.add(&history, check(&history));
    tally.crashes(trio.crashes());
    tally.left_waiting(&trio.infos()?);
    Ok(mixed)
}
