//! A second failover before all replicas are in step again, under load: what `REPLICAS` promises then, and what not.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::checker::{Violation, check};
use crate::client::Asks;
use crate::engine::Result;
use crate::failover::{ALL_REPLICAS, LONGEST_LEASE, have_again};
use crate::load::{Crew, Load, keys_of};
use crate::operations;
use crate::options::Options;
use crate::report::Row;
use crate::tally::Tally;
use crate::trio::{Setting, Third, Trio};

/// How long clients work before the first blow, and when all is in order again.
const AROUND: Duration = Duration::from_secs(2);

/// Twice over, once for each sort of third server; then again while there is time.
pub fn run(options: &Options) -> Vec<Row> {
    let mut seen = [Third::Lives, Third::Dies].map(Seen::new);
    if let Err(why) = fail_over_twice(&mut seen, options) {
        seen[0].tally.broke_off(&why, Vec::new());
    }
    seen.into_iter().map(Seen::row).collect()
}

/// What was seen with one sort of third server.
struct Seen {
    third: Third,
    tally: Tally,
    pairs: u64,
    /// How often a grant that both replicas had confirmed, and that was held all the while, was there in the end.
    kept: u64,
    /// Confirmed grants of the load that no server had any more, and that were granted again while they were held.
    lost: u64,
}

impl Seen {
    fn new(third: Third) -> Seen {
        Seen { third, tally: Tally::default(), pairs: 0, kept: 0, lost: 0 }
    }

    fn row(self) -> Row {
        let Seen { third, tally, pairs, kept, lost } = self;
        let gone = pairs - kept;
        // None may be lost where one that had it lives, and else there is nobody who could have it.
        let (title, wrong, words) = match third {
            Third::Lives => ("one that has all lives", gone, format!("{kept} of {pairs} long holds kept")),
            Third::Dies => {
                ("none that has all lives", kept, format!("{gone} of {pairs} long holds lost, {lost} others"))
            }
        };
        let mut row = tally.row(&format!("Second failover, REPLICAS {ALL_REPLICAS}, {title}"));
        row.violations += wrong;
        row.note = format!("{words}; {}", row.note);
        row
    }

    /// Two failovers under a load of its own.
    fn pair(&mut self, trio: &mut Trio, options: &Options) -> Result<()> {
        let name = format!("{:?}:{}:", self.third, self.pairs).to_lowercase();
        let asks = Asks::Replicas(ALL_REPLICAS);
        let crew = Crew { prefix: name.clone(), asks, short: 5, long: 6, python: 4, bound: 6 };
        let seed = options.seed.wrapping_add(2 * self.pairs + u64::from(self.third == Third::Dies));
        let load = Load::start(&[crew], &trio.way(), seed, options)?;
        sleep(AROUND);
        let pair = trio.fail_over_twice(&format!("{name}long hold"), self.third)?;
        sleep(AROUND);
        let mut history = load.finish()?;
        history.faults = std::iter::once(pair.fault).chain(trio.settle()?).collect();
        for key in keys_of(&history) {
            history.probes.push(have_again(&mut trio.master()?, key, LONGEST_LEASE)?);
        }
        operations::keep(&history, "second");
        let mut verdict = check(&history);
        if self.third == Third::Dies {
            let all = verdict.violations.len();
            verdict.violations.retain(|violation| !matches!(violation, Violation::ConfirmedGrantLost { .. }));
            self.lost += (all - verdict.violations.len()) as u64;
        }
        self.pairs += 1;
        self.kept += u64::from(pair.kept);
        self.tally.faults += pair.killed;
        self.tally.add(&history, verdict);
        self.tally.crashes(trio.crashes());
        self.tally.left_waiting(&trio.infos()?);
        Ok(())
    }
}

fn fail_over_twice(seen: &mut [Seen; 2], options: &Options) -> Result<()> {
    let begun = Instant::now();
    let mut trio = Trio::start(Setting::default(), options)?;
    loop {
        for sort in &mut *seen {
            sort.pair(&mut trio, options)?;
            eprintln!("second: {:?}, {} pairs of failovers, {}", sort.third, sort.pairs, sort.tally.summary());
        }
        if begun.elapsed() > options.budget {
            return Ok(());
        }
    }
}
