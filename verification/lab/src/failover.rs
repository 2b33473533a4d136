//! Failover by Sentinel under load: without and with `REPLICAS`.

use std::time::{Duration, Instant};

use fastrand::Rng;
use redis::{Connection, Value, cmd};

use crate::blow::BLOWS;
use crate::checker::{PATIENCE, check};
use crate::client::Asks;
use crate::clock::now;
use crate::engine::{Result, Trouble, Weather};
use crate::history::{Fault, Micros, Probe};
use crate::load::{Crew, Load, keys_of};
use crate::operations;
use crate::options::Options;
use crate::report::Row;
use crate::tally::Tally;
use crate::trace::trace;
use crate::trio::{Return, Setting, Trio};

/// The replicas that a failover's promise rests on: all of them.
pub const ALL_REPLICAS: usize = 2;
/// The lease of a lock whose holder vanishes just before the blow.
pub const ORPHAN_LEASE: u64 = 2_000;
/// The longest lease that any client of the load asks for.
pub const LONGEST_LEASE: Micros = 5_000_000;

/// Failovers under a load that asks nothing of replicas, or `WAIT 1` after each grant.
pub fn run(options: &Options) -> Vec<Row> {
    let crew =
        |prefix: &str, asks, bound| Crew { prefix: prefix.to_owned(), asks, short: 5, long: 4, python: 2, bound };
    // No sessions among those who ask with `WAIT`: their clients don't send it, and don't tell on which server they hold something. Where
    // such a hold and a confirmed one overlap, the checker could only guess which of both the failover has lost.
    let crews = [crew("plain:", Asks::Nothing, 2), crew("wait:", Asks::Wait, 0)];
    rows("failover", "Sentinel failover", &crews, Conditions::good(), options)
}

/// The same load and the same blows, with `REPLICAS` on every acquire and renew.
pub fn run_replicas(options: &Options) -> Vec<Row> {
    let asks = Asks::Replicas(ALL_REPLICAS);
    let crew = Crew { prefix: "safe:".to_owned(), asks, short: 14, long: 8, python: 4, bound: 6 };
    rows("replicas", "Sentinel failover, REPLICAS 2", &[crew], Conditions::good(), options)
}

/// Failovers while every server's packets are lost, late, and out of order.
pub fn run_network(options: &Options) -> Vec<Row> {
    let crew = |prefix: &str, asks| Crew { prefix: prefix.to_owned(), asks, short: 5, long: 4, python: 2, bound: 2 };
    let crews = [crew("plain:", Asks::Nothing), crew("safe:", Asks::Replicas(ALL_REPLICAS))];
    let weather = Weather { loss_percent: 5, delay_ms: 100, jitter_ms: 80 };
    let conditions = Conditions { weather: Some(weather), failovers: 3, down_after_ms: 4_000 };
    rows("network", "Sentinel failover, 5 % lost, 100 ± 80 ms late", &crews, conditions, options)
}

/// Under what the failovers happen.
#[derive(Clone, Copy)]
struct Conditions {
    weather: Option<Weather>,
    /// Failovers under one load, after which the clients stop and their records are checked.
    failovers: usize,
    down_after_ms: u32,
}

impl Conditions {
    fn good() -> Conditions {
        Conditions { weather: None, failovers: 10, down_after_ms: 700 }
    }
}

fn rows(name: &str, title: &str, crews: &[Crew], conditions: Conditions, options: &Options) -> Vec<Row> {
    match fail_over_and_over(name, crews, conditions, options) {
        Ok(tally) => vec![tally.row(title)],
        Err(why) => vec![Row::not_run(title, why)],
    }
}

fn fail_over_and_over(name: &str, crews: &[Crew], conditions: Conditions, options: &Options) -> Result<Tally> {
    let begun = Instant::now();
    let setting = Setting { down_after_ms: conditions.down_after_ms, ..Setting::default() };
    let mut trio = Trio::start(setting, options)?;
    let mut tally = Tally::default();
    let mut rng = Rng::with_seed(options.seed);
    let mut slowest = Duration::ZERO;
    loop {
        let batch_begun = Instant::now();
        let batch = Batch { number: tally.runs, crews, conditions, until: begun + options.budget };
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
    crews: &'a [Crew],
    conditions: Conditions,
    until: Instant,
}

impl Batch<'_> {
    fn run(&self, trio: &mut Trio, rng: &mut Rng, tally: &mut Tally, options: &Options) -> Result<()> {
        let seed = options.seed.wrapping_add(self.number);
        let load = Load::start(self.crews, &trio.way(), seed, options)?;
        let mut faults = Vec::new();
        let mut probes = Vec::new();
        let begun = now();
        let bad = self.conditions.weather.map(|weather| trio.bad_network(weather, seed)).transpose()?;
        for round in 0..self.conditions.failovers {
            std::thread::sleep(Duration::from_millis(rng.u64(500..2_000)));
            let orphan = format!("orphan:{}:{round}", self.number);
            // On a bad network a grant may be lost on the way, and the probes at the end are enough.
            if bad.is_none() {
                abandon(&mut trio.master()?, &orphan)?;
            }
            let blow = BLOWS[round % BLOWS.len()];
            let failover = trio.fail_over(blow, Duration::from_millis(rng.u64(200..1_800)), how_to_return(rng))?;
            if bad.is_none() {
                probes.push(have_again(&mut trio.master()?, orphan, ORPHAN_LEASE * 1_000)?);
            }
            let whole = (failover.fault.until - failover.fault.from) / 1_000;
            trace(|| format!("{blow:?}: {} ms to another master, {whole} ms to order", failover.took / 1_000));
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
            probes.push(have_again(&mut trio.master()?, key, LONGEST_LEASE)?);
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

/// One in five is left to the Sentinels alone.
fn how_to_return(rng: &mut Rng) -> Return {
    if rng.u8(..5) == 0 { Return::BySentinels } else { Return::ByHand(rng.u64(0..600)) }
}

/// Takes a lock and never releases it.
pub fn abandon(connection: &mut Connection, key: &str) -> Result<()> {
    let granted: Value =
        cmd("LOCK.ACQUIRE").arg(key).arg("orphan's owner").arg("LEASE").arg(ORPHAN_LEASE).query(connection)?;
    match granted {
        Value::Int(_) => Ok(()),
        other => Err(Trouble(format!("{key} was free, yet: {other:?}"))),
    }
}

/// Takes a lock whose holder may have vanished, within what is left of its lease.
pub fn have_again(connection: &mut Connection, key: String, lease: Micros) -> Result<Probe> {
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
        eprintln!("{key} could not be had again: {reply:?}");
    }
    Ok(Probe { key, due, had })
}
