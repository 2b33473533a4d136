//! 10. A service's view: clients that acquire a lock, work for about a millisecond, and release it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::json;
use support::Random;

use crate::client_pool::{ClientEvent, ClientPool};
use crate::contenders::{Contender, Holdfast, Lock, Redisson, Session, SetNx};
use crate::figures::{micros, ratio, whole};
use crate::machine;
use crate::report::{Findings, Table};
use crate::server::{Program, Running, Sync, Threads, With};
use crate::settings::{IDLE, Scale, Settings};
use crate::stats::{Percentiles, Spread, jain};

/// The number of clients and of locks, which each client uses in turn. With the first three, the server has idle time if there are
/// many locks. The last one overloads it.
const SIZES: [(usize, usize); 4] = [(50, 1), (50, 10), (50, 1_000), (200, 4_000)];
/// How long a lock is held: a random time from half of this to one and a half. With a constant time, requests that the server handled in one
/// iteration would stay in step forever: one long queue.
const WORK: Duration = Duration::from_millis(1);
const LEASE: Duration = Duration::from_secs(60);

/// The server's setup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Setup {
    aof: bool,
    io_threads: bool,
}

impl Setup {
    /// The setups that this server supports.
    fn of(program: &Program) -> impl Iterator<Item = Self> {
        let threads = if program.label.starts_with("Valkey") { &[false, true][..] } else { &[false] };
        threads.iter().flat_map(|&io_threads| [false, true].map(|aof| Self { aof, io_threads }))
    }

    fn name(self) -> &'static str {
        match (self.io_threads, self.aof) {
            (false, false) => "no persistence",
            (false, true) => "AOF, synced every second",
            (true, false) => "io-threads, no persistence",
            (true, true) => "io-threads, AOF, synced every second",
        }
    }

    fn start(self, program: &Program) -> Result<Running> {
        let with = if self.aof { With::ModuleAndAof(Sync::EverySecond) } else { With::Module };
        Running::start_threaded(program, with, if self.io_threads { Threads::Two } else { Threads::One })
    }
}

/// The results of one contender in one round.
struct Round {
    pairs_per_second: f64,
    times: Percentiles,
    jain: f64,
    cpu_us: f64,
    client_us: f64,
}

/// A line of the result.
#[derive(Serialize)]
struct Row {
    server: String,
    setup: Setup,
    clients: usize,
    locks: usize,
    name: String,
    pairs_per_second: Spread,
    /// From the request for the lock to the reply or event that grants it.
    p50_us: Spread,
    p99_us: Spread,
    p999_us: Spread,
    /// Jain's index over the number of grants of each client.
    jain: Spread,
    /// Microseconds of the server's main thread for a pair.
    cpu_us: Spread,
    /// The same of the thread that all clients share.
    client_us: Spread,
    pairs_over_holdfast: Option<Spread>,
    p99_over_holdfast: Option<Spread>,
}

/// Measures on each server in each setup.
pub fn run(settings: &Settings, programs: &[Program]) -> Result<Findings> {
    let mut rows = Vec::new();
    for program in programs {
        for setup in Setup::of(program) {
            let mut server = setup.start(program)?;
            for size in SIZES {
                let measured = measure(settings, program, setup, &mut server, size);
                rows.extend(measured.with_context(|| format!("{}, {}", program.label, setup.name()))?);
            }
        }
    }
    let alike =
        |a: &Row, b: &Row| a.server == b.server && a.setup == b.setup && a.clients == b.clients && a.locks == b.locks;
    Ok(Findings {
        section: "service",
        tables: rows.chunk_by(alike).map(table).collect(),
        goals: vec![],
        plots: vec![],
        data: json!({ "rounds": settings.scale.service_rounds, "rows": rows }),
    })
}

fn measure(
    settings: &Settings,
    program: &Program,
    setup: Setup,
    server: &mut Running,
    size: (usize, usize),
) -> Result<Vec<Row>> {
    let scale = &settings.scale;
    let mut rounds: Vec<(&str, Vec<Round>)> = Vec::new();
    for number in 0..scale.service_rounds {
        let mut contenders: Vec<Box<dyn Contender>> = vec![
            Box::new(Holdfast::PLAIN),
            Box::new(Session),
            Box::new(Redisson::load(&mut server.control)?),
            Box::new(SetNx::load(&mut server.control)?),
        ];
        contenders.retain(|contender| settings.measures(contender.name()));
        if number == 0 {
            rounds = contenders.iter().map(|contender| (contender.name(), Vec::new())).collect();
        }
        let first = number % contenders.len().max(1);
        contenders.rotate_left(first);
        for contender in contenders {
            let name = contender.name();
            let measured = round(scale, server, contender, size).context(name)?;
            if let Some((_, rounds)) = rounds.iter_mut().find(|(of, _)| *of == name) {
                rounds.push(measured);
            }
            server.clear()?;
        }
    }
    let holdfast = rounds.iter().find(|(name, _)| *name == Holdfast::PLAIN.name()).map(|(_, rounds)| rounds.as_slice());
    Ok(rounds.iter().map(|(name, rounds)| row(program, setup, size, name, rounds, holdfast.unwrap_or(&[]))).collect())
}

fn round(
    scale: &Scale,
    server: &mut Running,
    contender: Box<dyn Contender>,
    (clients, locks): (usize, usize),
) -> Result<Round> {
    let own = (0..clients).map(|client| Lock::new("", client, LEASE)).collect();
    let pool = ClientPool::connect(server.port(), contender, own)?;
    let mut service = Service {
        pool,
        locks,
        random: Random::new(),
        asked: vec![None; clients],
        ends: BinaryHeap::new(),
        times: Vec::new(),
        turns: vec![0; clients],
    };
    for client in 0..clients {
        service.ask(client)?;
    }
    service.go_on(Instant::now() + scale.service_window / 4)?;
    service.times.clear();
    service.turns.fill(0);
    let (cpu, own, start) = (server.control.server_cpu()?, machine::thread_cpu(), Instant::now());
    while service.turns.iter().all(|turns| *turns == 0) && start.elapsed() < IDLE {
        service.go_on(Instant::now() + scale.service_window)?;
    }
    let (seconds, now) = (start.elapsed().as_secs_f64(), Instant::now());
    let (cpu, own) = (server.control.server_cpu()? - cpu, machine::thread_cpu() - own);
    let pairs = service.turns.iter().sum::<u64>() as f64;
    if pairs == 0.0 {
        bail!("no grant in {seconds:.1} s");
    }
    // A request that still waits has waited at least this long.
    service.times.extend(service.asked.iter().flatten().map(|asked| (now - *asked).as_secs_f64() * 1e6));
    Ok(Round {
        pairs_per_second: pairs / seconds,
        jain: jain(&service.turns),
        cpu_us: cpu * 1e6 / pairs,
        client_us: own.as_secs_f64() * 1e6 / pairs,
        times: Percentiles::of(&mut service.times),
    })
}

struct Service {
    pool: ClientPool,
    locks: usize,
    random: Random,
    /// Since when a client waits.
    asked: Vec<Option<Instant>>,
    /// When holders finish their work.
    ends: BinaryHeap<Reverse<(Instant, usize)>>,
    times: Vec<f64>,
    turns: Vec<u64>,
}

impl Service {
    fn ask(&mut self, client: usize) -> Result<()> {
        let lock = self.random.below(self.locks as u64);
        self.pool.switch_to(client, &format!("service:{lock}"));
        self.asked[client] = Some(Instant::now());
        self.pool.want(client)
    }

    fn go_on(&mut self, until: Instant) -> Result<()> {
        while Instant::now() < until {
            let next = self.ends.peek().map_or(until, |Reverse((at, _))| until.min(*at));
            match self.pool.next(next)? {
                Some(ClientEvent::Granted(client, at)) => {
                    let asked = self.asked[client].take().context("a grant without a request")?;
                    self.times.push((at - asked).as_secs_f64() * 1e6);
                    let work = WORK / 2 + WORK * self.random.below(1_001) as u32 / 1_000;
                    self.ends.push(Reverse((at + work, client)));
                }
                Some(ClientEvent::Released(client)) => {
                    self.turns[client] += 1;
                    self.ask(client)?;
                }
                Some(ClientEvent::Waits(_)) | None => {}
            }
            while let Some(Reverse((at, client))) = self.ends.peek().copied()
                && at <= Instant::now()
            {
                self.ends.pop();
                self.pool.release(client)?;
            }
        }
        Ok(())
    }
}

fn row(
    program: &Program,
    setup: Setup,
    (clients, locks): (usize, usize),
    name: &str,
    rounds: &[Round],
    holdfast: &[Round],
) -> Row {
    let all = |rounds: &[Round], of: fn(&Round) -> f64| rounds.iter().map(of).collect::<Vec<_>>();
    let spread = |of: fn(&Round) -> f64| Spread::of(&all(rounds, of));
    let over = |of: fn(&Round) -> f64| {
        (name != Holdfast::PLAIN.name()).then(|| Spread::of_ratios(&all(rounds, of), &all(holdfast, of)))
    };
    Row {
        server: program.label.clone(),
        setup,
        clients,
        locks,
        name: name.to_owned(),
        pairs_per_second: spread(|r| r.pairs_per_second),
        p50_us: spread(|r| r.times.p50),
        p99_us: spread(|r| r.times.p99),
        p999_us: spread(|r| r.times.p999),
        jain: spread(|r| r.jain),
        cpu_us: spread(|r| r.cpu_us),
        client_us: spread(|r| r.client_us),
        pairs_over_holdfast: over(|r| r.pairs_per_second),
        p99_over_holdfast: over(|r| r.times.p99),
    }
}

fn table(rows: &[Row]) -> Table {
    let title = rows.first().map_or_else(String::new, |row| {
        let locks = if row.locks == 1 { "one lock".into() } else { format!("{} locks", whole(row.locks as f64)) };
        format!("As a service sees it: {}, {}, {} clients, {locks}", row.server, row.setup.name(), row.clients)
    });
    let note = format!(
        "One request at a time for each client: acquire any of the locks, {:?} to {:?} of work, release. Times of the acquire; who \
         waits at the end of a round counts with the time until then.",
        WORK / 2,
        WORK * 3 / 2
    );
    let columns = [
        "who",
        "pairs/s",
        "p50",
        "p99",
        "p99.9",
        "Jain",
        "server CPU",
        "client CPU",
        "pairs/s / holdfast",
        "p99 / holdfast",
    ];
    let mut table = Table::new(title, note, &columns);
    for row in rows {
        let over = |spread: &Option<Spread>| spread.as_ref().map_or_else(|| "1".to_owned(), ratio);
        table.row(vec![
            row.name.clone(),
            whole(row.pairs_per_second.median),
            micros(row.p50_us.median),
            micros(row.p99_us.median),
            micros(row.p999_us.median),
            format!("{:.3}", row.jain.median),
            micros(row.cpu_us.median),
            micros(row.client_us.median),
            over(&row.pairs_over_holdfast),
            over(&row.p99_over_holdfast),
        ]);
    }
    table
}
