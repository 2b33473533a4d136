//! 5. Other clients of the same server: the latency of `GET` and `SET` while locks are contended, renewed and expire.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::json;
use support::resp::{self, Request};

use crate::client::Client;
use crate::client_pool::{ClientEvent, ClientPool};
use crate::contenders::{Answer, Contender, Holdfast, Lock, Redisson, SetNx};
use crate::figures::{micros, ratio, whole};
use crate::machine;
use crate::plot::Plot;
use crate::relay::{Next, Relay};
use crate::report::{Findings, Goal, Table};
use crate::server::{Program, Running, With};
use crate::settings::{Scale, Settings};
use crate::stats::{Percentiles, Spread};

/// Hot locks, each with this many waiters and this hold time.
const HOT_LOCKS: usize = 10;
const WAITERS: usize = 100;
const HELD: Duration = Duration::from_millis(10);
/// Locks that are acquired each millisecond, and expire a second later.
const EXPIRING: usize = 10;
const EXPIRING_LEASE: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(60);

/// The load on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    NoModule,
    Idle,
    Waiters(Subject),
    Watched(Subject),
    Expiring(Subject),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Holdfast,
    Redisson,
    SetNx,
}

const LOADS: [Load; 10] = [
    Load::Idle,
    Load::NoModule,
    Load::Waiters(Subject::Holdfast),
    Load::Waiters(Subject::Redisson),
    Load::Waiters(Subject::SetNx),
    Load::Watched(Subject::Holdfast),
    Load::Watched(Subject::Redisson),
    Load::Expiring(Subject::Holdfast),
    Load::Expiring(Subject::Redisson),
    Load::Expiring(Subject::SetNx),
];

impl Load {
    fn subject(self) -> Option<Subject> {
        match self {
            Load::NoModule | Load::Idle => None,
            Load::Waiters(subject) | Load::Watched(subject) | Load::Expiring(subject) => Some(subject),
        }
    }

    fn name(self, scale: &Scale) -> String {
        let name = |subject| match subject {
            Subject::Holdfast => "holdfast",
            Subject::Redisson => "redisson",
            Subject::SetNx => "set-nx",
        };
        match self {
            Load::NoModule => "nothing, module not loaded".to_owned(),
            Load::Idle => "nothing".to_owned(),
            Load::Waiters(subject) => format!("{}: {} waiters", name(subject), whole((HOT_LOCKS * WAITERS) as f64)),
            Load::Watched(subject) => format!("{}: {} watched locks", name(subject), whole(scale.watched as f64)),
            Load::Expiring(subject) => {
                format!("{}: {} expiring a second", name(subject), whole((EXPIRING * 1_000) as f64))
            }
        }
    }
}

/// A load, with the latencies that were measured in each round.
struct Measured {
    load: Load,
    gets: Vec<Percentiles>,
    sets: Vec<Percentiles>,
    steps: Vec<f64>,
}

/// A line of the result. Times in microseconds.
#[derive(Serialize)]
struct Row {
    server: String,
    load: String,
    get_p50_us: Spread,
    get_p99_us: Spread,
    get_p999_us: Spread,
    get_max_us: Spread,
    set_p99_us: Spread,
    set_p999_us: Spread,
    /// Hand-offs, renewals or new locks per second.
    steps_per_second: Spread,
    get_p99_over_idle: Option<Spread>,
}

/// Measures on each server.
pub fn run(settings: &Settings, programs: &[Program]) -> Result<Findings> {
    let mut rows = Vec::new();
    let mut goals = Vec::new();
    for program in programs {
        let measured = measure(&settings.scale, program).with_context(|| program.label.clone())?;
        let new = measured.iter().map(|one| one.row(program, &settings.scale, &measured)).collect::<Vec<_>>();
        for (one, row) in measured.iter().zip(&new) {
            if one.load.subject() == Some(Subject::Holdfast) {
                let what = format!("p99 of GET beside {} / idle module ({})", row.load, row.server);
                goals.extend(row.get_p99_over_idle.map(|spread| Goal::at_most(what, 1.1, spread)));
            }
        }
        rows.extend(new);
    }
    Ok(Findings {
        section: "neighbours",
        tables: rows.chunk_by(|a, b| a.server == b.server).map(table).collect(),
        goals,
        plots: plot(&rows).into_iter().collect(),
        data: json!({ "rounds": settings.scale.neighbour_rounds, "rows": rows }),
    })
}

fn measure(scale: &Scale, program: &Program) -> Result<Vec<Measured>> {
    let mut bare = Running::start(program, With::Nothing)?;
    let mut server = Running::start(program, With::Module)?;
    let has_module = server.control.knows("LOCK.ACQUIRE")?;
    let loads = LOADS.into_iter().filter(|load| has_module || load.subject() != Some(Subject::Holdfast));
    let mut measured: Vec<_> = loads.map(|load| Measured { load, gets: vec![], sets: vec![], steps: vec![] }).collect();
    for round in 0..scale.neighbour_rounds {
        for turn in 0..measured.len() {
            let turn = (turn + round) % measured.len();
            let one = &mut measured[turn];
            let server = if one.load == Load::NoModule { &mut bare } else { &mut server };
            one.round(scale, server).with_context(|| one.load.name(scale))?;
            server.clear()?;
        }
    }
    Ok(measured)
}

impl Measured {
    fn round(&mut self, scale: &Scale, server: &mut Running) -> Result<()> {
        let load = self.load;
        let contender = match load.subject() {
            None | Some(Subject::Holdfast) => Box::new(Holdfast::PLAIN) as Box<dyn Contender>,
            Some(Subject::Redisson) => Box::new(Redisson::load(&mut server.control)?),
            Some(Subject::SetNx) => Box::new(SetNx::load(&mut server.control)?),
        };
        let redisson = Redisson::load(&mut server.control)?;
        let port = server.port();
        let (stop, steps) = (AtomicBool::new(false), AtomicU64::new(0));
        let (ready, is_ready) = mpsc::channel();
        let stage = Stage { port, stop: &stop, steps: &steps, ready };
        thread::scope(|scope| {
            let loader = scope.spawn(move || match load {
                Load::NoModule | Load::Idle => stage.ready(),
                Load::Waiters(_) => hand_round(&stage, contender),
                Load::Watched(Subject::Holdfast) => watched_by_the_server(&stage, scale),
                Load::Watched(_) => watched_by_the_client(&stage, scale, &redisson),
                Load::Expiring(_) => expire(&stage, contender.as_ref()),
            });
            let measured = is_ready.recv().context("the load does not start").and_then(|()| {
                let (before, start) = (steps.load(Ordering::Relaxed), Instant::now());
                let times = neighbour(port, load.window(scale))?;
                let done = steps.load(Ordering::Relaxed) - before;
                Ok((times, done as f64 / start.elapsed().as_secs_f64()))
            });
            stop.store(true, Ordering::Relaxed);
            loader.join().map_err(|_| anyhow::anyhow!("the load panicked"))??;
            let ((mut gets, mut sets), steps) = measured?;
            self.gets.push(Percentiles::of(&mut gets));
            self.sets.push(Percentiles::of(&mut sets));
            self.steps.push(steps);
            Ok(())
        })
    }

    fn row(&self, program: &Program, scale: &Scale, all: &[Measured]) -> Row {
        let values = |of: &[Percentiles], get: fn(&Percentiles) -> f64| of.iter().map(get).collect::<Vec<_>>();
        let spread = |of: &[Percentiles], get: fn(&Percentiles) -> f64| Spread::of(&values(of, get));
        let idle = all.iter().find(|other| other.load == Load::Idle && self.load != Load::Idle);
        Row {
            server: program.label.clone(),
            load: self.load.name(scale),
            get_p50_us: spread(&self.gets, |p| p.p50),
            get_p99_us: spread(&self.gets, |p| p.p99),
            get_p999_us: spread(&self.gets, |p| p.p999),
            get_max_us: spread(&self.gets, |p| p.max),
            set_p99_us: spread(&self.sets, |p| p.p99),
            set_p999_us: spread(&self.sets, |p| p.p999),
            steps_per_second: Spread::of(&self.steps),
            get_p99_over_idle: idle
                .map(|idle| Spread::of_ratios(&values(&self.gets, |p| p.p99), &values(&idle.gets, |p| p.p99))),
        }
    }
}

impl Load {
    /// Watched locks are measured long enough for each to be renewed.
    fn window(self, scale: &Scale) -> Duration {
        match self {
            Load::Watched(_) => scale.neighbour_window.max(scale.watched_lease / 3 + Duration::from_secs(1)),
            _ => scale.neighbour_window,
        }
    }
}

/// `GET` and `SET` alternately, each after the reply to the previous one. Returns their times in microseconds.
fn neighbour(port: u16, window: Duration) -> Result<(Vec<f64>, Vec<f64>)> {
    let mut client = Client::connect(port)?;
    let (get, set) = (Request::typed("GET neighbour"), Request::typed("SET neighbour 0123456789abcdef"));
    let (mut gets, mut sets) = (Vec::new(), Vec::new());
    let time = |client: &mut Client, request: &Request| -> Result<f64> {
        let start = Instant::now();
        if let Some(error) = resp::error(&client.ask(request)?) {
            bail!(error);
        }
        Ok(start.elapsed().as_secs_f64() * 1e6)
    };
    machine::run_first();
    let until = Instant::now() + window;
    while Instant::now() < until {
        sets.push(time(&mut client, &set)?);
        gets.push(time(&mut client, &get)?);
    }
    machine::run_as_others();
    Ok((gets, sets))
}

/// The environment of a load: it reports that the load is set up, counts its steps, and stops on request.
struct Stage<'a> {
    port: u16,
    stop: &'a AtomicBool,
    steps: &'a AtomicU64,
    ready: Sender<()>,
}

impl Stage<'_> {
    fn ready(&self) -> Result<()> {
        self.ready.send(()).context("the measurement has ended")
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn step(&self, count: usize) {
        self.steps.fetch_add(count as u64, Ordering::Relaxed);
    }
}

/// Ten hot locks are handed on among a hundred waiters each, and held for ten milliseconds each time.
fn hand_round(stage: &Stage, contender: Box<dyn Contender>) -> Result<()> {
    let clients = HOT_LOCKS * (WAITERS + 1);
    let locks = (0..clients).map(|client| Lock::new(format!("hot:{}", client % HOT_LOCKS), client, LEASE)).collect();
    let mut pool = ClientPool::connect(stage.port, contender, locks)?;
    let mut relays: Vec<Relay> = (0..HOT_LOCKS).map(|_| Relay::default()).collect();
    let mut releases: BinaryHeap<Reverse<(Instant, usize)>> = BinaryHeap::new();
    for client in 0..clients {
        pool.want(client)?;
    }
    let ready_at = Instant::now() + Duration::from_millis(300);
    let mut ready = false;
    while !stage.is_over() {
        let now = Instant::now();
        if !ready && now >= ready_at {
            ready = true;
            stage.ready()?;
        }
        let until = releases.peek().map_or(now + HELD, |Reverse((at, _))| *at);
        if let Some(event) = pool.next(until)? {
            let (ClientEvent::Granted(client, _) | ClientEvent::Released(client) | ClientEvent::Waits(client)) = event;
            match relays[client % HOT_LOCKS].handle(event) {
                None => {}
                Some(Next::Return(leaver)) => pool.want(leaver)?,
                Some(Next::Leave(holder)) => releases.push(Reverse((Instant::now() + HELD, holder))),
            }
        }
        while let Some(Reverse((at, holder))) = releases.peek().copied()
            && at <= Instant::now()
        {
            releases.pop();
            relays[holder % HOT_LOCKS].leave(holder);
            pool.release(holder)?;
            stage.step(1);
        }
    }
    Ok(())
}

fn take(client: &mut Client, contender: &dyn Contender, requests: impl Iterator<Item = Request>) -> Result<()> {
    client.pipeline(requests, 100, |reply| match contender.answer(&reply)? {
        Answer::Granted => Ok(()),
        Answer::Busy(_) => bail!("a free lock was refused"),
    })
}

fn watched_locks(scale: &Scale) -> Vec<Lock> {
    (0..scale.watched).map(|number| Lock::new(format!("lock:{number:08}"), number, scale.watched_lease)).collect()
}

/// The server renews. The client only reads its events.
fn watched_by_the_server(stage: &Stage, scale: &Scale) -> Result<()> {
    let mut client = Client::connect(stage.port)?;
    client.call(&["LOCK.SESSION"])?;
    let locks = watched_locks(scale);
    take(&mut client, &Holdfast::WATCHDOG, locks.iter().map(|lock| Holdfast::WATCHDOG.acquire(lock)))?;
    stage.ready()?;
    // The client reads its events, so that its session stays alive.
    while !stage.is_over() {
        client.call(&["LOCK.EVENTS", "WAIT", "100"])?;
    }
    // No lock may have been lost.
    let held = resp::int(&client.call(&["DBSIZE"])?)?;
    if (held as usize) < locks.len() {
        bail!("of {} watched locks {held} keys are left", locks.len());
    }
    Ok(())
}

/// The client renews like Redisson's watchdog: every third of the lease, a hundred locks with each script.
fn watched_by_the_client(stage: &Stage, scale: &Scale, redisson: &Redisson) -> Result<()> {
    let mut client = Client::connect(stage.port)?;
    let locks = watched_locks(scale);
    take(&mut client, redisson, locks.iter().map(|lock| redisson.acquire(lock)))?;
    stage.ready()?;
    let mut due = Instant::now() + scale.watched_lease / 3;
    while !stage.is_over() {
        thread::sleep(Duration::from_millis(1));
        if Instant::now() < due {
            continue;
        }
        due += scale.watched_lease / 3;
        for some in locks.chunks(100) {
            if resp::int(&client.ask(&redisson.renew_many(some)?)?)? as usize != some.len() {
                bail!("a watched lock was lost");
            }
            stage.step(some.len());
            if stage.is_over() {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// New locks at a constant rate, which are never released.
fn expire(stage: &Stage, contender: &dyn Contender) -> Result<()> {
    let mut client = Client::connect(stage.port)?;
    let start = Instant::now();
    let mut ready = false;
    let mut number = 0;
    let mut due = start;
    while !stage.is_over() {
        let lock = |number: usize| Lock::new(format!("expiring:{number:08}"), number, EXPIRING_LEASE);
        take(&mut client, contender, (number..number + EXPIRING).map(|number| contender.acquire(&lock(number))))?;
        number += EXPIRING;
        stage.step(EXPIRING);
        if !ready && start.elapsed() > EXPIRING_LEASE.mul_f64(1.5) {
            ready = true;
            stage.ready()?;
        }
        due += Duration::from_millis(1);
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

fn table(rows: &[Row]) -> Table {
    let title = rows.first().map_or_else(String::new, |row| format!("Neighbours: {}", row.server));
    let note = format!(
        "GET and SET by one client, one after the other, while something else goes on. Waiters: {HOT_LOCKS} locks with {WAITERS} \
         waiters each, each holder keeps its lock for {} ms. Steps: hand-offs, the client's renewals, new locks.",
        HELD.as_millis()
    );
    let columns = ["beside", "steps/s", "GET p50", "p99", "p99.9", "max", "SET p99", "p99.9", "GET p99 / idle module"];
    let mut table = Table::new(title, note, &columns);
    for row in rows {
        table.row(vec![
            row.load.clone(),
            whole(row.steps_per_second.median),
            micros(row.get_p50_us.median),
            micros(row.get_p99_us.median),
            micros(row.get_p999_us.median),
            micros(row.get_max_us.median),
            micros(row.set_p99_us.median),
            micros(row.set_p999_us.median),
            row.get_p99_over_idle.as_ref().map_or_else(|| "1".to_owned(), ratio),
        ]);
    }
    table
}

fn plot(rows: &[Row]) -> Option<Plot> {
    let rows = rows.chunk_by(|a, b| a.server == b.server).next()?;
    let bars = |of: fn(&Row) -> f64| rows.iter().map(|row| (row.load.clone(), of(row))).collect();
    let server = &rows.first()?.server;
    let groups = vec![(format!("p99, {server}"), bars(|row| row.get_p99_us.median))];
    Some(Plot::bars("neighbours", "A plain GET while the server keeps locks", "µs", groups))
}
