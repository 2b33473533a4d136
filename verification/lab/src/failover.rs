//! Failover by Sentinel under load, without and with `REPLICAS`.

use std::time::{Duration, Instant};

use fastrand::Rng;
use redis::{Connection, Value, cmd};

use crate::checker::{PATIENCE, check};
use crate::client::Durability;
use crate::clock::now;
use crate::engine::{LabError, NetworkFaults, Result};
use crate::history::{Fault, Micros, Probe};
use crate::load::{ClientGroup, Load, keys_of};
use crate::operations;
use crate::options::Options;
use crate::primary_fault::PRIMARY_FAULTS;
use crate::report::Row;
use crate::tally::Tally;
use crate::trace::trace;
use crate::trio::{Demotion, Setting, Trio};

/// The number of replicas that a request must name to survive a failover: all of them.
pub const ALL_REPLICAS: usize = 2;
/// The lease of a lock whose holder disappears just before the fault.
pub const ORPHAN_LEASE: u64 = 2_000;
/// The longest lease in the load.
pub const LONGEST_LEASE: Micros = 5_000_000;

/// Failovers under a load that requests nothing of replicas, or `WAIT 1` after each grant.
pub fn run(options: &Options) -> Vec<Row> {
    // No sessions in the group with `WAIT`: their clients do not send it, and do not report the server of a hold. If such a hold
    // overlapped a confirmed one, the checker could not tell which of the two the failover lost.
    let groups =
        [ClientGroup::mixed("plain:", Durability::Nothing, 2), ClientGroup::mixed("wait:", Durability::Wait, 0)];
    rows("failover", "Sentinel failover", &groups, Conditions::good(), options)
}

/// The same load and faults, with `REPLICAS` on every acquire and renew.
pub fn run_replicas(options: &Options) -> Vec<Row> {
    let durability = Durability::Replicas(ALL_REPLICAS);
    let group = ClientGroup { prefix: "safe:".to_owned(), durability, short: 14, long: 8, python: 4, bound: 6 };
    rows("replicas", "Sentinel failover, REPLICAS 2", &[group], Conditions::good(), options)
}

/// Failovers while every server's packets are lost, delayed, and reordered.
pub fn run_network(options: &Options) -> Vec<Row> {
    let group = |prefix, durability| ClientGroup::mixed(prefix, durability, 2);
    let groups = [group("plain:", Durability::Nothing), group("safe:", Durability::Replicas(ALL_REPLICAS))];
    let network_faults = NetworkFaults { loss_percent: 5, delay_ms: 100, jitter_ms: 80 };
    let conditions = Conditions { network_faults: Some(network_faults), failovers: 3, down_after_ms: 4_000 };
    rows("network", "Sentinel failover, 5 % lost, 100 ± 80 ms delay", &groups, conditions, options)
}

/// The conditions of the failovers.
#[derive(Clone, Copy)]
struct Conditions {
    network_faults: Option<NetworkFaults>,
    /// Failovers under one load. Then the clients stop, and their records are checked.
    failovers: usize,
    down_after_ms: u32,
}

impl Conditions {
    fn good() -> Conditions {
        Conditions { network_faults: None, failovers: 10, down_after_ms: 700 }
    }
}

fn rows(name: &str, title: &str, groups: &[ClientGroup], conditions: Conditions, options: &Options) -> Vec<Row> {
    match repeat_failovers(name, groups, conditions, options) {
        Ok(tally) => vec![tally.row(title)],
        Err(why) => vec![Row::not_run(title, why)],
    }
}

fn repeat_failovers(name: &str, groups: &[ClientGroup], conditions: Conditions, options: &Options) -> Result<Tally> {
    let begun = Instant::now();
    let setting = Setting { down_after_ms: conditions.down_after_ms, ..Setting::default() };
    let mut trio = Trio::start(setting, options)?;
    let mut tally = Tally::default();
    let mut rng = Rng::with_seed(options.seed);
    let mut slowest = Duration::ZERO;
    loop {
        let batch_begun = Instant::now();
        let batch = Batch { number: tally.runs, groups, conditions, until: begun + options.budget };
        if let Err(why) = batch.run(&mut trio, &mut rng, &mut tally, options) {
            tally.broke_off(&why, trio.crashes());
            return Ok(tally);
        }
        eprintln!("{name}: {} failovers, {}", tally.faults, tally.summary());
        slowest = slowest.max(batch_begun.elapsed());
        if begun.elapsed() + slowest / 2 > options.budget {
            return Ok(tally);
        }
    }
}

struct Batch<'a> {
    number: u64,
    groups: &'a [ClientGroup],
    conditions: Conditions,
    until: Instant,
}

impl Batch<'_> {
    fn run(&self, trio: &mut Trio, rng: &mut Rng, tally: &mut Tally, options: &Options) -> Result<()> {
        let seed = options.seed.wrapping_add(self.number);
        let load = Load::start(self.groups, &trio.discovery(), seed, options)?;
        let mut faults = Vec::new();
        let mut probes = Vec::new();
        let begun = now();
        let bad =
            self.conditions.network_faults.map(|network_faults| trio.bad_network(network_faults, seed)).transpose()?;
        for round in 0..self.conditions.failovers {
            std::thread::sleep(Duration::from_millis(rng.u64(500..2_000)));
            let orphan = format!("orphan:{}:{round}", self.number);
            // On an unreliable network the abandoned grant may be lost, and the probes at the end are enough.
            if bad.is_none() {
                abandon(&mut trio.primary()?, &orphan)?;
            }
            let primary_fault = PRIMARY_FAULTS[round % PRIMARY_FAULTS.len()];
            let failover =
                trio.fail_over(primary_fault, Duration::from_millis(rng.u64(200..1_800)), how_to_return(rng))?;
            if bad.is_none() {
                probes.push(reacquire(&mut trio.primary()?, orphan, ORPHAN_LEASE * 1_000)?);
            }
            let whole = (failover.fault.until - failover.fault.from) / 1_000;
            trace(|| {
                format!(
                    "{primary_fault:?}: {} ms to another primary, {whole} ms until all is healthy",
                    failover.took / 1_000
                )
            });
            tally.failover(failover.took);
            faults.push(failover.fault);
            if Instant::now() > self.until {
                break;
            }
        }
        if bad.is_some() {
            faults.push(Fault { from: begun, until: now() });
        }
        drop(bad);
        faults.extend(trio.settle()?);
        let mut history = load.finish()?;
        faults.extend(trio.settle()?);
        for key in keys_of(&history) {
            probes.push(reacquire(&mut trio.primary()?, key, LONGEST_LEASE)?);
        }
        history.faults = faults;
        history.probes = probes;
        operations::keep(&history, "failover");
        tally.add(&history, check(&history));
        tally.crashes(trio.crashes());
        tally.left_waiting(&trio.infos()?);
        Ok(())
    }
}

/// In one of five failovers, the Sentinels demote the old primary.
fn how_to_return(rng: &mut Rng) -> Demotion {
    if rng.u8(..5) == 0 { Demotion::BySentinels } else { Demotion::ByHand(rng.u64(0..600)) }
}

/// Acquires a lock and never releases it.
pub fn abandon(connection: &mut Connection, key: &str) -> Result<()> {
    let granted: Value =
        cmd("LOCK.ACQUIRE").arg(key).arg("orphan's owner").arg("LEASE").arg(ORPHAN_LEASE).query(connection)?;
    match granted {
        Value::Int(_) => Ok(()),
        other => Err(LabError(format!("{key} was free, yet: {other:?}"))),
    }
}

/// Acquires a lock whose holder may have disappeared, within the rest of its lease.
pub fn reacquire(connection: &mut Connection, key: String, lease: Micros) -> Result<Probe> {
    let due = now() + lease + PATIENCE;
    connection.set_read_timeout(Some(Duration::from_micros(lease + 2 * PATIENCE)))?;
    let reply: redis::RedisResult<Value> = cmd("LOCK.ACQUIRE")
        .arg(&key)
        .arg("prober")
        .arg("LEASE")
        .arg(1)
        .arg("WAIT")
        .arg(lease / 1_000 + 1_000)
        .query(connection);
    let had = matches!(reply, Ok(Value::Int(_))).then(now);
    if had.is_none() {
        eprintln!("{key} could not be acquired again: {reply:?}");
    }
    Ok(Probe { key, due, had })
}
