//! A second failover before all replicas are in step again, under load: what `REPLICAS` guarantees then.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::checker::{Violation, check};
use crate::client::Durability;
use crate::engine::Result;
use crate::failover::{ALL_REPLICAS, LONGEST_LEASE, reacquire};
use crate::load::{ClientGroup, Load, keys_of};
use crate::operations;
use crate::options::Options;
use crate::report::Row;
use crate::tally::Tally;
use crate::trio::{Setting, Third, Trio};

/// How long clients run before the first fault, and when all is healthy again.
const AROUND: Duration = Duration::from_secs(2);

/// At least twice, once for each kind of third server.
pub fn run(options: &Options) -> Vec<Row> {
    let mut seen = [Third::Lives, Third::Dies].map(Results::new);
    if let Err(why) = fail_over_twice(&mut seen, options) {
        seen[0].tally.broke_off(&why, Vec::new());
    }
    seen.into_iter().map(Results::row).collect()
}

/// The results with one kind of third server.
struct Results {
    third: Third,
    tally: Tally,
    pairs: u64,
    /// How often a long hold that both replicas had confirmed survived.
    kept: u64,
    /// Confirmed grants of the load that all servers lost, and that were granted again while they were held.
    lost: u64,
}

impl Results {
    fn new(third: Third) -> Results {
        Results { third, tally: Tally::default(), pairs: 0, kept: 0, lost: 0 }
    }

    fn row(self) -> Row {
        let Results { third, tally, pairs, kept, lost } = self;
        let gone = pairs - kept;
        // If a server that has the grant stays up, no grant may be lost. Otherwise all are lost.
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

    /// Two failovers under one load.
    fn pair(&mut self, trio: &mut Trio, options: &Options) -> Result<()> {
        let name = format!("{:?}:{}:", self.third, self.pairs).to_lowercase();
        let durability = Durability::Replicas(ALL_REPLICAS);
        let group = ClientGroup { prefix: name.clone(), durability, short: 5, long: 6, python: 4, bound: 6 };
        let seed = options.seed.wrapping_add(2 * self.pairs + u64::from(self.third == Third::Dies));
        let load = Load::start(&[group], &trio.discovery(), seed, options)?;
        sleep(AROUND);
        let pair = trio.fail_over_twice(&format!("{name}long hold"), self.third)?;
        sleep(AROUND);
        let mut history = load.finish()?;
        history.faults = std::iter::once(pair.fault).chain(trio.settle()?).collect();
        for key in keys_of(&history) {
            history.probes.push(reacquire(&mut trio.primary()?, key, LONGEST_LEASE)?);
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

fn fail_over_twice(seen: &mut [Results; 2], options: &Options) -> Result<()> {
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
