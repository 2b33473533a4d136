//! 1. Acquire and release of an uncontended lock.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;
use support::resp::Request;

use crate::client::Client;
use crate::contenders::{Contender, Holdfast, Lock, Ping, SetDel, SetNxDel};
use crate::figures::{micros, ratio, whole};
use crate::plot::Plot;
use crate::redis_py::{REDIS_PY, RedisPy};
use crate::report::{Findings, Goal, Table};
use crate::server::{Program, Running, Sync, With};
use crate::settings::{Scale, Settings};
use crate::stats::{Percentiles, Spread};

const LEASE: Duration = Duration::from_secs(30);
/// How many locks a client uses in turn.
const LOCKS: usize = 1_000;
/// How many pairs are sent in one packet. The next packet is sent before their replies are read.
const BATCH: usize = 100;

/// Without Redisson clients, releases need not be published.
const UNPUBLISHED: &str = "the same, publish-releases no";

/// The server's setup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Setup {
    NoPersistence,
    Aof,
    AofAlways,
    Replica,
}

impl Setup {
    fn name(self) -> &'static str {
        match self {
            Setup::NoPersistence => "no persistence",
            Setup::Aof => "AOF, synced every second",
            Setup::AofAlways => "AOF, synced before each reply",
            Setup::Replica => "one replica",
        }
    }
}

/// A contender on a server, with its measurements.
struct Participant {
    contender: Box<dyn Contender>,
    name: String,
    /// The index of its server.
    server: usize,
    batches: Vec<Vec<u8>>,
    cpu: Vec<f64>,
    rate: Vec<f64>,
    p50: Vec<f64>,
    p99: Vec<f64>,
}

/// A line of the result.
#[derive(Serialize)]
struct Row {
    server: String,
    setup: Setup,
    name: String,
    /// Microseconds of the server's main thread for a pair.
    cpu_us: Spread,
    pairs_per_second: Spread,
    latency_p50_us: Spread,
    latency_p99_us: Spread,
    /// Holdfast's CPU divided by this one's, round by round.
    holdfast_over_this: Option<Spread>,
}

/// Measures on each server in each setup.
pub fn run(settings: &Settings, programs: &[Program]) -> Result<Findings> {
    let mut rows = Vec::new();
    for program in programs {
        for setup in [Setup::NoPersistence, Setup::Aof, Setup::AofAlways, Setup::Replica] {
            rows.extend(
                measure(settings, program, setup).with_context(|| format!("{}, {}", program.label, setup.name()))?,
            );
        }
    }
    Ok(Findings {
        section: "pair",
        tables: tables(&rows),
        goals: goals(&rows),
        plots: vec![plot(&rows)],
        data: json!({ "rounds": settings.scale.pair_rounds, "pairs_a_round": settings.scale.pairs, "rows": rows }),
    })
}

fn measure(settings: &Settings, program: &Program, setup: Setup) -> Result<Vec<Row>> {
    let with = match setup {
        Setup::Aof => With::ModuleAndAof(Sync::EverySecond),
        Setup::AofAlways => With::ModuleAndAof(Sync::Always),
        Setup::NoPersistence | Setup::Replica => With::Module,
    };
    let mut servers = vec![Running::start(program, with)?];
    if setup == Setup::NoPersistence {
        servers.push(Running::start(program, With::Nothing)?);
    }
    let _replica = match setup {
        Setup::Replica => Some(servers[0].start_replica(program)?),
        Setup::NoPersistence | Setup::Aof | Setup::AofAlways => None,
    };
    let mut participants = Vec::new();
    for (index, server) in servers.iter_mut().enumerate() {
        participants.extend(participants_on(index, server)?);
    }
    participants.retain(|participant| settings.measures(&participant.name));
    let mut clients = servers.iter().map(|server| Client::connect(server.port())).collect::<Result<Vec<_>>>()?;
    let scale = &settings.scale;
    for round in 0..=scale.pair_rounds {
        // The first round is a warm-up.
        let pairs = if round == 0 { scale.pairs / 10 } else { scale.pairs };
        for turn in 0..participants.len() {
            let turn = (turn + round) % participants.len();
            let participant = &mut participants[turn];
            let client = &mut clients[participant.server];
            let control = &mut servers[participant.server].control;
            participant.measure(client, control, pairs, setup).with_context(|| participant.name.clone())?;
            if round == 0 {
                participant.forget();
            } else {
                participant.measure_latency(client, scale)?;
            }
        }
    }
    let mut rows = rows(program, setup, &participants);
    if setup == Setup::NoPersistence
        && settings.measures(REDIS_PY)
        && let Some(python) = &settings.python
    {
        rows.push(redis_py_row(&RedisPy::new(python), program, &servers[0], scale)?);
    }
    Ok(rows)
}

fn participants_on(index: usize, server: &mut Running) -> Result<Vec<Participant>> {
    let mut contenders = server.lockers()?;
    contenders.push(Box::new(SetNxDel));
    contenders.push(Box::new(SetDel));
    if index == 0 {
        contenders.insert(1, Box::new(Holdfast::DEFAULT_LEASE));
        contenders.push(Box::new(Ping));
    }
    let place = if index == 0 { "" } else { ", module not loaded" };
    let named = |contender: Box<dyn Contender>| (format!("{}{place}", contender.name()), contender);
    let mut named: Vec<_> = contenders.into_iter().map(named).collect();
    if index == 0 {
        named.insert(2, (UNPUBLISHED.to_owned(), Box::new(Holdfast::DEFAULT_LEASE)));
        named.push(("SET+DEL again (noise)".to_owned(), Box::new(SetDel)));
    }
    Ok(named.into_iter().map(|(name, contender)| Participant::new(name, contender, index)).collect())
}

impl Participant {
    fn new(name: String, contender: Box<dyn Contender>, server: usize) -> Self {
        let lock = |number: usize| Lock::new(format!("lock:{number:04}"), 1, LEASE);
        let pair = |number: usize| [contender.acquire(&lock(number)), contender.release(&lock(number))];
        let batch =
            |first: usize| (first..first + BATCH).flat_map(pair).flat_map(|r: Request| r.bytes().to_vec()).collect();
        let batches = (0..LOCKS).step_by(BATCH).map(batch).collect();
        Self { contender, name, server, batches, cpu: vec![], rate: vec![], p50: vec![], p99: vec![] }
    }

    fn measure(&mut self, client: &mut Client, control: &mut Client, pairs: usize, setup: Setup) -> Result<()> {
        if self.name != UNPUBLISHED {
            return self.measure_pairs(client, control, pairs, setup);
        }
        set_publishing(control, "no")?;
        // The cores sleep during the pause that the setting needs, and the other contenders run without one. So some
        // pairs run first.
        self.make_pairs(client, pairs / 4)?;
        self.measure_pairs(client, control, pairs, setup)?;
        set_publishing(control, "yes")
    }

    fn measure_pairs(&mut self, client: &mut Client, control: &mut Client, pairs: usize, setup: Setup) -> Result<()> {
        let cpu = control.server_cpu()?;
        let start = Instant::now();
        self.make_pairs(client, pairs)?;
        let seconds = start.elapsed().as_secs_f64();
        if setup == Setup::Replica {
            // Data that is still being sent to the replica is this contender's cost, not the next one's.
            control.call(&["WAIT", "1", "5000"])?;
        }
        let cpu = control.server_cpu()? - cpu;
        self.cpu.push(cpu * 1e6 / pairs as f64);
        self.rate.push(pairs as f64 / seconds);
        Ok(())
    }

    fn make_pairs(&self, client: &mut Client, pairs: usize) -> Result<()> {
        let mut behind = 0;
        for batch in self.batches.iter().cycle().take(pairs / BATCH) {
            client.send(batch)?;
            behind += BATCH;
            // One batch is always pending, so that the server does not sleep between two.
            while behind > BATCH {
                self.check_pair(client)?;
                behind -= 1;
            }
        }
        for _ in 0..behind {
            self.check_pair(client)?;
        }
        Ok(())
    }

    fn check_pair(&self, client: &mut Client) -> Result<()> {
        self.contender.answer(&client.read()?)?;
        self.contender.check_released(&client.read()?)
    }

    fn measure_latency(&mut self, client: &mut Client, scale: &Scale) -> Result<()> {
        let lock = Lock::new("lock", 1, LEASE);
        let (acquire, release) = (self.contender.acquire(&lock), self.contender.release(&lock));
        let mut times = Vec::with_capacity(scale.pairs_for_latency);
        for _ in 0..scale.pairs_for_latency {
            let start = Instant::now();
            self.contender.answer(&client.ask(&acquire)?)?;
            self.contender.check_released(&client.ask(&release)?)?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        let percentiles = Percentiles::of(&mut times);
        self.p50.push(percentiles.p50);
        self.p99.push(percentiles.p99);
        Ok(())
    }

    fn forget(&mut self) {
        self.cpu.clear();
        self.rate.clear();
    }
}

/// After a change of settings the module assumes that it has replicas, until the server's cron has run.
fn set_publishing(control: &mut Client, yes_or_no: &str) -> Result<()> {
    control.call(&["CONFIG", "SET", "holdfast.publish-releases", yes_or_no])?;
    thread::sleep(Duration::from_millis(300));
    Ok(())
}

fn rows(program: &Program, setup: Setup, participants: &[Participant]) -> Vec<Row> {
    let holdfast = participants.iter().find(|participant| participant.name == "holdfast");
    let over = |base: &Participant| holdfast.map(|holdfast| Spread::of_ratios(&holdfast.cpu, &base.cpu));
    let row = |participant: &Participant| Row {
        server: program.label.clone(),
        setup,
        name: participant.name.clone(),
        cpu_us: Spread::of(&participant.cpu),
        pairs_per_second: Spread::of(&participant.rate),
        latency_p50_us: Spread::of(&participant.p50),
        latency_p99_us: Spread::of(&participant.p99),
        holdfast_over_this: over(participant),
    };
    participants.iter().map(row).collect()
}

/// redis-py's client can't pipeline pairs, and its CPU is Python's: only its latency is comparable.
fn redis_py_row(redis_py: &RedisPy, program: &Program, server: &Running, scale: &Scale) -> Result<Row> {
    let mut rounds =
        (0..3).map(|_| redis_py.pairs(server.port(), scale.pairs_for_latency)).collect::<Result<Vec<_>>>()?;
    let percentiles: Vec<_> = rounds.iter_mut().map(|times| Percentiles::of(times)).collect();
    let spread = |of: fn(&Percentiles) -> f64| Spread::of(&percentiles.iter().map(of).collect::<Vec<_>>());
    Ok(Row {
        server: program.label.clone(),
        setup: Setup::NoPersistence,
        name: REDIS_PY.to_owned(),
        cpu_us: Spread::default(),
        pairs_per_second: Spread::default(),
        latency_p50_us: spread(|p| p.p50),
        latency_p99_us: spread(|p| p.p99),
        holdfast_over_this: None,
    })
}

fn tables(rows: &[Row]) -> Vec<Table> {
    let same = |a: &Row, b: &Row| a.server == b.server && a.setup == b.setup;
    rows.chunk_by(same).map(table).collect()
}

fn table(rows: &[Row]) -> Table {
    let title =
        rows.first().map_or_else(String::new, |row| format!("Uncontended pair: {}, {}", row.server, row.setup.name()));
    let note = "One client, 1,000 locks in turn. CPU of the server's main thread and pairs per second with 100 pairs in \
                each write; latency of acquire and release one after the other.";
    let columns = ["who", "server CPU", "pairs/s", "p50", "p99", "holdfast's CPU / this"];
    let mut table = Table::new(title, note, &columns);
    for row in rows {
        let unless_absent = |text: String| if row.cpu_us.median > 0.0 { text } else { "-".to_owned() };
        table.row(vec![
            row.name.clone(),
            unless_absent(micros(row.cpu_us.median)),
            unless_absent(whole(row.pairs_per_second.median)),
            micros(row.latency_p50_us.median),
            micros(row.latency_p99_us.median),
            row.holdfast_over_this.as_ref().map_or_else(|| "-".to_owned(), ratio),
        ]);
    }
    table
}

fn goals(rows: &[Row]) -> Vec<Goal> {
    let limits = [
        ("Redis", "redisson", 0.30),
        ("Redis", "set-nx", 0.75),
        ("Redis", "SET NX PX+DEL", 1.7),
        ("Redis", "SET+DEL", 1.7),
        ("Valkey", "native", 1.3),
    ];
    let goal = |row: &Row| {
        let (.., limit) =
            limits.iter().find(|(server, name, _)| row.server.starts_with(server) && row.name == *name)?;
        let what = format!("CPU of a pair, holdfast / {} ({})", row.name, row.server);
        Some(Goal::at_most(what, *limit, row.holdfast_over_this?))
    };
    rows.iter().filter(|row| row.setup == Setup::NoPersistence).filter_map(goal).collect()
}

fn plot(rows: &[Row]) -> Plot {
    let shown =
        |row: &&Row| row.setup == Setup::NoPersistence && row.cpu_us.median > 0.0 && !row.name.contains([',', '(']);
    let rows: Vec<&Row> = rows.iter().filter(shown).collect();
    let groups = rows.chunk_by(|a, b| a.server == b.server).filter_map(|rows| {
        let bars = rows.iter().map(|row| (row.name.clone(), row.cpu_us.median)).collect();
        Some((rows.first()?.server.clone(), bars))
    });
    Plot::bars("pair", "Server CPU for taking and giving back a free lock", "µs", groups.collect())
}
