//! A second failover before all replicas are in step again: what `REPLICAS` promises then, and what not.

use std::time::Instant;

use crate::engine::Result;
use crate::options::Options;
use crate::report::Row;
use crate::trio::{Setting, Third, Trio};

/// Twice over, once for each sort of third server; then again while there is time.
pub fn run(options: &Options) -> Vec<Row> {
    let title = "Second failover before all are in step, REPLICAS 2";
    let mut row = Row { scenario: title.to_owned(), ..Row::default() };
    let mut seen = Seen::default();
    let end = fail_over_twice(&mut row, &mut seen, options);
    let Seen { kept, lives, lost, dies } = seen;
    row.note = format!(
        "{kept} of {lives} confirmed grants kept where a server that had them took over, {lost} of {dies} lost where none was left"
    );
    // None may be lost where one that had it lives, and else there is nobody who could have it.
    row.violations = (lives - kept) + (dies - lost);
    if let Err(why) = end {
        row.violations += 1;
        row.note += &format!("; BROKE OFF: {why}");
    }
    vec![row]
}

#[derive(Default)]
struct Seen {
    kept: u64,
    lives: u64,
    lost: u64,
    dies: u64,
}

fn fail_over_twice(row: &mut Row, seen: &mut Seen, options: &Options) -> Result<()> {
    let begun = Instant::now();
    let mut trio = Trio::start(Setting::default(), options)?;
    loop {
        row.runs += 1;
        let kept = trio.fail_over_twice(&format!("lives:{}", row.runs), Third::Lives)?;
        seen.lives += 1;
        seen.kept += u64::from(kept);
        let kept = trio.fail_over_twice(&format!("dies:{}", row.runs), Third::Dies)?;
        seen.dies += 1;
        seen.lost += u64::from(!kept);
        row.faults += 5;
        row.requests += 2;
        eprintln!("second: {} and {} pairs of failovers", seen.lives, seen.dies);
        if begun.elapsed() > options.budget {
            return Ok(());
        }
    }
}
