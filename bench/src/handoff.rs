//! 2. One hot lock: from a release to the next holder's reply, with a queue of waiters.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::json;

use crate::client_pool::{ClientEvent, ClientPool};
use crate::contenders::{Contender, List, Lock};
use crate::figures::{micros, ratio, whole};
use crate::plot::Plot;
use crate::redis_py::{REDIS_PY, RedisPy};
use crate::relay::{Next, Relay};
use crate::report::{Findings, Goal, Table};
use crate::server::{Program, Running, With};
use crate::settings::{Scale, Settings};
use crate::stats::{Percentiles, Spread, inversions, jain};

const LEASE: Duration = Duration::from_secs(60);
const WAITERS: [usize; 5] = [1, 10, 100, 1_000, 5_000];
/// More threads would measure Python rather than the lock.
const REDIS_PY_WAITERS: usize = 100;

/// The results of one contender in one round.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// Hand-offs.
    pub per_second: f64,
    /// From the release to the next holder's reply.
    pub times: Percentiles,
    /// Microseconds of the server's main thread for a hand-off.
    pub cpu_us: f64,
    /// The clients' traffic for each hand-off.
    pub requests: f64,
    pub bytes: f64,
    /// How many earlier requests each grant overtook, on average.
    pub overtaken: f64,
    /// Jain's index over the number of grants of each client.
    pub jain: f64,
}

/// A line of the result.
#[derive(Serialize)]
struct Row {
    server: String,
    waiters: usize,
    name: String,
    per_second: Spread,
    p50_us: Spread,
    p99_us: Spread,
    max_us: Spread,
    /// Microseconds of the server's main thread for a hand-off.
    cpu_us: Spread,
    /// The clients' traffic for each acquisition.
    requests: Spread,
    bytes: Spread,
    /// How many earlier requests each grant overtook, on average.
    overtaken: Spread,
    jain: Spread,
    cpu_over_floor: Option<Spread>,
    p50_over_floor: Option<Spread>,
}

/// Measures on each server with each number of waiters.
pub fn run(settings: &Settings, programs: &[Program]) -> Result<Findings> {
    let mut rows = Vec::new();
    for program in programs {
        let mut server = Running::start(program, With::Module)?;
        for waiters in WAITERS {
            rows.extend(measure(settings, program, &mut server, waiters)?);
        }
    }
    let plots = programs.iter().enumerate().flat_map(|(index, program)| plots(index, &program.label, &rows)).collect();
    Ok(Findings {
        section: "handoff",
        tables: tables(&rows),
        goals: goals(&rows),
        plots,
        data: json!({ "rounds": settings.scale.handoff_rounds, "rows": rows }),
    })
}

fn measure(settings: &Settings, program: &Program, server: &mut Running, waiters: usize) -> Result<Vec<Row>> {
    let scale = &settings.scale;
    let mut rounds: BTreeMap<(usize, String), Vec<Round>> = BTreeMap::new();
    for _ in 0..scale.handoff_rounds {
        let mut contenders = server.lockers()?;
        contenders.insert(0, Box::new(List));
        let count = contenders.len();
        contenders.retain(|contender| settings.measures(contender.name()));
        for (order, contender) in contenders.into_iter().enumerate() {
            let name = contender.name().to_owned();
            let round =
                round(server, contender, waiters, scale).with_context(|| format!("{name}, {waiters} waiters"))?;
            rounds.entry((order, name)).or_default().push(round);
            server.clear()?;
        }
        if let Some(python) = &settings.python
            && waiters <= REDIS_PY_WAITERS
            && settings.measures(REDIS_PY)
        {
            let round = redis_py_round(&RedisPy::new(python), server, waiters, scale)?;
            rounds.entry((count, REDIS_PY.to_owned())).or_default().push(round);
            server.clear()?;
        }
    }
    let floor = rounds.iter().find(|((_, name), _)| name == List::NAME).map(|(_, rounds)| rounds.clone());
    Ok(rounds.into_iter().map(|((_, name), rounds)| row(program, waiters, name, &rounds, floor.as_deref())).collect())
}

/// The clients, the lock, and the order of requests.
struct HotLock {
    pool: ClientPool,
    relay: Relay,
    arrivals: Vec<u64>,
    arrived: u64,
    served: Vec<u64>,
    times: Vec<f64>,
    acquisitions: Vec<u64>,
}

impl HotLock {
    fn join(&mut self, client: usize) -> Result<()> {
        self.arrivals[client] = self.arrived;
        self.arrived += 1;
        self.pool.want(client)
    }

    fn leave(&mut self, client: usize) -> Result<()> {
        self.relay.leave(client);
        self.pool.release(client)
    }

    /// All clients request the lock, one after the other, so that the server has the same order.
    fn request_all(&mut self, server: &mut Running) -> Result<usize> {
        for client in 0..self.pool.len() {
            self.join(client)?;
            server.control.call(&["PING"])?;
        }
        let settled = Instant::now() + Duration::from_millis(200);
        let mut holder = None;
        while let Some(event) = self.pool.next(settled)? {
            if let Some(Next::Leave(first)) = self.relay.handle(event) {
                holder = Some(first);
            }
        }
        holder.context("the free lock was not granted")
    }

    /// Hands the lock on until `enough` returns true. Fails if it is not granted any more.
    fn hand_on_until(&mut self, enough: impl Fn(usize) -> bool) -> Result<usize> {
        loop {
            let Some(event) = self.pool.next(Instant::now() + LEASE / 2)? else {
                bail!("no grant within {:?}", LEASE / 2)
            };
            if let ClientEvent::Granted(client, at) = event {
                self.times.extend(self.relay.left_at().map(|left| (at - left).as_secs_f64() * 1e6));
                self.served.push(self.arrivals[client]);
                self.acquisitions[client] += 1;
            }
            match self.relay.handle(event) {
                None => {}
                Some(Next::Return(leaver)) => self.join(leaver)?,
                Some(Next::Leave(holder)) if enough(self.served.len()) => return Ok(holder),
                Some(Next::Leave(holder)) => self.leave(holder)?,
            }
        }
    }

    fn forget(&mut self) {
        self.served.clear();
        self.times.clear();
        self.acquisitions.fill(0);
    }

    /// How many earlier requests each grant overtook, on average. Requests that still wait count as overtaken.
    fn overtaken(&self, holder: usize) -> f64 {
        let mut waiting: Vec<u64> = (0..self.pool.len()).filter(|&c| c != holder).map(|c| self.arrivals[c]).collect();
        waiting.sort_unstable();
        let order: Vec<u64> = self.served.iter().copied().chain(waiting).collect();
        inversions(&order) as f64 / self.served.len() as f64
    }
}

/// Hands one lock on among `waiters` + 1 clients.
pub fn round(server: &mut Running, contender: Box<dyn Contender>, waiters: usize, scale: &Scale) -> Result<Round> {
    let locks: Vec<_> = (0..=waiters).map(|client| Lock::new("hot", client, LEASE)).collect();
    if let Some(seed) = locks.first().and_then(|lock| contender.seed(lock)) {
        server.control.ask(&seed)?;
    }
    let clients = locks.len();
    let pool = ClientPool::connect(server.port(), contender, locks)?;
    let mut hot = HotLock {
        pool,
        relay: Relay::default(),
        arrivals: vec![0; clients],
        arrived: 0,
        served: Vec::new(),
        times: Vec::new(),
        acquisitions: vec![0; clients],
    };
    let holder = hot.request_all(server)?;
    hot.leave(holder)?;
    let start = Instant::now();
    let holder = hot.hand_on_until(|served| served >= clients || start.elapsed() >= scale.handoff_least)?;
    hot.forget();
    let (cpu, traffic, start) = (server.control.server_cpu()?, hot.pool.traffic(), Instant::now());
    hot.leave(holder)?;
    let holder = hot.hand_on_until(|served| {
        let elapsed = start.elapsed();
        elapsed >= scale.handoff_most || elapsed >= scale.handoff_least && served >= 3 * clients
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let (cpu, traffic) = (server.control.server_cpu()? - cpu, hot.pool.traffic() - traffic);
    let served = hot.served.len() as f64;
    Ok(Round {
        per_second: served / seconds,
        overtaken: hot.overtaken(holder),
        jain: jain(&hot.acquisitions),
        cpu_us: cpu * 1e6 / served,
        requests: traffic.requests as f64 / served,
        bytes: traffic.bytes as f64 / served,
        times: Percentiles::of(&mut hot.times),
    })
}

fn redis_py_round(redis_py: &RedisPy, server: &Running, waiters: usize, scale: &Scale) -> Result<Round> {
    let mut measured = redis_py.hand_offs(server.port(), waiters, scale.handoff_most.max(Duration::from_secs(1)))?;
    if measured.times_us.is_empty() {
        bail!("{REDIS_PY} made no hand-off");
    }
    let hand_offs = measured.times_us.len() as f64;
    Ok(Round {
        per_second: hand_offs / measured.seconds,
        cpu_us: measured.server_cpu * 1e6 / hand_offs,
        jain: jain(&measured.acquisitions),
        times: Percentiles::of(&mut measured.times_us),
        requests: f64::NAN,
        bytes: f64::NAN,
        overtaken: f64::NAN,
    })
}

fn row(program: &Program, waiters: usize, name: String, rounds: &[Round], floor: Option<&[Round]>) -> Row {
    let all = |rounds: &[Round], of: fn(&Round) -> f64| rounds.iter().map(of).collect::<Vec<_>>();
    let spread = |of: fn(&Round) -> f64| Spread::of(&all(rounds, of));
    let over_floor = |of: fn(&Round) -> f64| {
        floor.filter(|_| name != List::NAME).map(|floor| Spread::of_ratios(&all(rounds, of), &all(floor, of)))
    };
    Row {
        server: program.label.clone(),
        waiters,
        per_second: spread(|r| r.per_second),
        p50_us: spread(|r| r.times.p50),
        p99_us: spread(|r| r.times.p99),
        max_us: spread(|r| r.times.max),
        cpu_us: spread(|r| r.cpu_us),
        requests: spread(|r| r.requests),
        bytes: spread(|r| r.bytes),
        overtaken: spread(|r| r.overtaken),
        jain: spread(|r| r.jain),
        cpu_over_floor: over_floor(|r| r.cpu_us),
        p50_over_floor: over_floor(|r| r.times.p50),
        name,
    }
}

fn tables(rows: &[Row]) -> Vec<Table> {
    rows.chunk_by(|a, b| a.server == b.server && a.waiters == b.waiters).map(table).collect()
}

fn table(rows: &[Row]) -> Table {
    let title = rows.first().map_or_else(String::new, |row| {
        let clients = if row.waiters == 1 { "client waits" } else { "clients wait" };
        format!("Hand-off: {}, {} {clients}", row.server, whole(row.waiters as f64))
    });
    let columns = [
        "who",
        "per s",
        "p50",
        "p99",
        "max",
        "server CPU",
        "requests",
        "bytes",
        "overtaken",
        "Jain",
        "p50 / floor",
        "CPU / floor",
    ];
    let mut table = Table::new(title, "", &columns);
    for row in rows {
        let unless_unknown = |figure: f64, text: String| if figure.is_nan() { "-".to_owned() } else { text };
        let over = |spread: &Option<Spread>| spread.as_ref().map_or_else(|| "1".to_owned(), ratio);
        table.row(vec![
            row.name.clone(),
            whole(row.per_second.median),
            micros(row.p50_us.median),
            micros(row.p99_us.median),
            micros(row.max_us.median),
            micros(row.cpu_us.median),
            unless_unknown(row.requests.median, format!("{:.1}", row.requests.median)),
            unless_unknown(row.bytes.median, whole(row.bytes.median)),
            unless_unknown(row.overtaken.median, format!("{:.1}", row.overtaken.median)),
            format!("{:.3}", row.jain.median),
            over(&row.p50_over_floor),
            over(&row.cpu_over_floor),
        ]);
    }
    table
}

fn goals(rows: &[Row]) -> Vec<Goal> {
    let of = |row: &Row, what: &str, spread: &Option<Spread>| {
        let what = format!(
            "{what} of a hand-off, {} waiters, holdfast / {} ({})",
            whole(row.waiters as f64),
            List::NAME,
            row.server
        );
        spread.map(|spread| Goal::at_most(what, 1.1, spread))
    };
    let goals = |row: &Row| [of(row, "time", &row.p50_over_floor), of(row, "CPU", &row.cpu_over_floor)];
    rows.iter().filter(|row| row.name == "holdfast").flat_map(goals).flatten().collect()
}

fn plots(index: usize, server: &str, rows: &[Row]) -> [Plot; 2] {
    let mut names: Vec<&str> = Vec::new();
    let rows: Vec<&Row> = rows.iter().filter(|row| row.server == server).collect();
    for row in &rows {
        if !names.contains(&row.name.as_str()) {
            names.push(&row.name);
        }
    }
    let line = |name: &str, of: fn(&Row) -> f64| {
        let points = rows.iter().filter(|row| row.name == name).map(|row| (row.waiters as f64, of(row)));
        (name.to_owned(), points.collect())
    };
    let lines = |of: fn(&Row) -> f64| names.iter().map(|name| line(name, of)).collect();
    let file = |what: &str| if index == 0 { format!("handoff-{what}") } else { format!("handoff-{what}-{index}") };
    [
        Plot::lines(
            &file("time"),
            &format!("From a release to the next holder's reply, p50 ({server})"),
            "waiting clients",
            "µs",
            lines(|row| row.p50_us.median),
        ),
        Plot::lines(
            &file("cpu"),
            &format!("Server CPU for a hand-off ({server})"),
            "waiting clients",
            "µs",
            lines(|row| row.cpu_us.median),
        ),
    ]
}
