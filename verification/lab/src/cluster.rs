//! A cluster under load: primaries fail, and slots move while clients hold locks and wait.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::checker::check;
use crate::client::Durability;
use crate::engine::{Equipment, Result};
use crate::failover::{LONGEST_LEASE, ORPHAN_LEASE, abandon, reacquire};
use crate::load::{ClientGroup, Load, keys_of};
use crate::operations;
use crate::options::Options;
use crate::primary_fault::PRIMARY_FAULTS;
use crate::report::Row;
use crate::shards::{Moves, Shards};
use crate::tally::Tally;

/// Faults under one load, each after some moves of slots.
const BATCH: usize = 8;
const MOVES_BEFORE_FAULT: usize = 3;

/// A cluster, and the faults of a run.
struct Plan {
    name: &'static str,
    equipment: Equipment,
    moves: Moves,
    /// Moves of slots alone, before moves alternate with faults.
    moves_alone: bool,
    primary_faults: bool,
}

/// On the image's server slots move key by key, on Valkey 9.1 atomically. The short form runs half on each.
pub fn run(options: &Options) -> Vec<Row> {
    let plans = [
        Plan {
            name: "Cluster",
            equipment: Equipment::default(),
            moves: Moves::KeyByKey,
            moves_alone: !options.short,
            primary_faults: true,
        },
        Plan {
            name: "Cluster on Valkey 9.1, atomic migration",
            equipment: Equipment::valkey_9_1(),
            moves: Moves::Whole,
            moves_alone: true,
            primary_faults: !options.short,
        },
    ];
    let options = Options { budget: options.budget / plans.len() as u32, ..options.clone() };
    plans.iter().flat_map(|plan| plan.rows(&options)).collect()
}

fn groups() -> [ClientGroup; 2] {
    let group = |prefix: &str, durability| ClientGroup {
        prefix: prefix.to_owned(),
        durability,
        short: 4,
        long: 3,
        python: 2,
        bound: 2,
    };
    [group("plain:", Durability::Nothing), group("safe:", Durability::Replicas(1))]
}

impl Plan {
    fn rows(&self, options: &Options) -> Vec<Row> {
        match self.run_batches(options) {
            Ok((moved, failed)) => {
                let moved = moved.row(&format!("{}, moved", self.name));
                let failed = failed.row(&format!("{}, slots moved and primaries failed", self.name));
                [(self.moves_alone, moved), (self.primary_faults, failed)]
                    .into_iter()
                    .filter_map(|(wanted, row)| wanted.then_some(row))
                    .collect()
            }
            Err(why) => vec![Row::not_run(self.name, why)],
        }
    }

    fn run_batches(&self, options: &Options) -> Result<(Tally, Tally)> {
        let begun = Instant::now();
        let shards = Shards::start(self.equipment.clone(), self.moves, options)?;
        let mut rng = Rng::with_seed(options.seed);
        let (mut moved, mut failed) = (Tally::default(), Tally::default());
        loop {
            let batch_begun = Instant::now();
            let moves = Batch::moves(batch_begun + options.budget / 4);
            let primary_faults = Batch::primary_faults(begun + options.budget);
            if (self.moves_alone && moves.run_into(&mut moved, &shards, &mut rng, options).is_break())
                || (self.primary_faults && primary_faults.run_into(&mut failed, &shards, &mut rng, options).is_break())
            {
                return Ok((moved, failed));
            }
            let name = self.name;
            eprintln!("{name}: {} moves, {} failovers", moved.moves + failed.moves, failed.faults);
            if begun.elapsed() + batch_begun.elapsed() / 2 > options.budget {
                return Ok((moved, failed));
            }
        }
    }
}

struct Batch {
    rounds: usize,
    primary_faults: bool,
    until: Instant,
}

impl Batch {
    fn moves(until: Instant) -> Batch {
        Batch { rounds: BATCH, primary_faults: false, until }
    }

    fn primary_faults(until: Instant) -> Batch {
        Batch { rounds: BATCH, primary_faults: true, until }
    }

    /// Runs a batch. If it fails, the tally contains what happened before.
    fn run_into(&self, tally: &mut Tally, shards: &Shards, rng: &mut Rng, options: &Options) -> ControlFlow<()> {
        match self.run(shards, rng, tally, options) {
            Ok(()) => ControlFlow::Continue(()),
            Err(why) => {
                tally.broke_off(&why, shards.crashes());
                ControlFlow::Break(())
            }
        }
    }

    fn run(&self, shards: &Shards, rng: &mut Rng, tally: &mut Tally, options: &Options) -> Result<()> {
        let seed = options.seed.wrapping_add(1_000 + tally.runs);
        let load = Load::start(&groups(), &shards.discovery(), seed, options)?;
        let mut faults = Vec::new();
        let mut probes = Vec::new();
        for round in 0..self.rounds {
            for _ in 0..MOVES_BEFORE_FAULT {
                std::thread::sleep(Duration::from_millis(rng.u64(100..400)));
                let tag = rng.u8(..6).to_string();
                shards.move_slot(&tag, rng.usize(..), Duration::from_millis(rng.u64(0..600)))?;
                tally.moves += 1;
            }
            if self.primary_faults {
                let tag = rng.u8(..6).to_string();
                let orphan = format!("orphan:{}:{round}:{{{tag}}}", tally.runs);
                abandon(&mut shards.owner_of(&orphan)?, &orphan)?;
                let split = Duration::from_millis(rng.u64(200..1_500));
                let (fault, took) = shards.fail_over(&tag, PRIMARY_FAULTS[round % PRIMARY_FAULTS.len()], split)?;
                let lease = ORPHAN_LEASE * 1_000;
                probes.push(reacquire(&mut shards.owner_of(&orphan)?, orphan, lease)?);
                tally.failover(took);
                faults.push(fault);
            }
            if Instant::now() > self.until {
                break;
            }
        }
        let mut history = load.finish()?;
        for key in keys_of(&history) {
            probes.push(reacquire(&mut shards.owner_of(&key)?, key, LONGEST_LEASE)?);
        }
        history.local_faults = faults;
        history.faults = shards.unhealthy_periods()?;
        history.probes = probes;
        operations::keep(&history, "cluster");
        tally.add(&history, check(&history));
        tally.crashes(shards.crashes());
        tally.left_waiting(&shards.infos()?);
        Ok(())
    }
}
