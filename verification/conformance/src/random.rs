//! Clients use eight locks at random for a while, from a seed: two of different languages, or a fleet of all. Meanwhile their
//! connections break and their processes are paused. In a fleet, processes are also killed and restarted, and the server is
//! paused, restarted with its data, and replaced by its replica, which has confirmed every grant.
//!
//! The reports are one history, which is checked like the simulator's.

use std::collections::BTreeMap;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{Proxy, Random, Raw, Server};

use crate::clock::{self, Micros};
use crate::driver::{At, Call, Driver, Outcome};
use crate::history::History;
use crate::left::{self, Moment};
use crate::play::{BOUND, CLEAN, ClientUnderTest};
use crate::scenario::{Feature, Terms};
use crate::servers::DEFAULT_LEASE;

/// Locks and their limits: 0 is any number of readers, or one writer.
const LOCKS: [(&str, u64); 8] =
    [("m1", 1), ("m2", 1), ("m3", 1), ("m4", 1), ("r1", 0), ("r2", 0), ("s2", 2), ("s3", 3)];
/// The number of acquisitions of a client that run or are held at once.
const AT_ONCE: usize = 5;
/// The interval between actions.
const PAUSE: Duration = Duration::from_millis(10);
/// The number of actions of a fleet at a time.
const ACTS: usize = 4;
/// After so many actions, a fleet changes to other locks, so that no lock's history is too long for the search.
const ROUND: usize = 5_000;

/// The participants, and their faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Two clients and a server.
    Pair,
    /// All clients, a server and its replica.
    Fleet,
}

struct Client<'a> {
    name: String,
    under_test: ClientUnderTest<'a>,
    driver: Driver,
    proxy: Proxy,
    /// Calls that have not ended, by their names.
    calls: BTreeMap<u64, (Call, String, Micros, Instant)>,
    held: Vec<String>,
    acquired: u64,
    /// Until when its process is paused, or its connections are refused.
    frozen: Option<Instant>,
    refused: Option<Instant>,
    /// The process that replaces one that was killed.
    starts: Option<JoinHandle<Result<Driver, String>>>,
}

/// The result of a run.
#[derive(Debug, Default)]
pub struct Report {
    /// The failures.
    pub faults: Vec<String>,
    /// The number of grants.
    pub granted: usize,
    /// How many calls of each client have ended, and how many of them were grants.
    pub calls: BTreeMap<String, (u64, u64)>,
    /// How often each fault was injected.
    pub injected_faults: BTreeMap<&'static str, u64>,
    /// The history of the clients.
    pub history: History,
}

/// Runs clients for so long, each with its name.
///
/// # Errors
///
/// If a driver does not start.
pub fn run(kind: Kind, seed: u64, time: Duration, named: &[(String, ClientUnderTest)]) -> Result<Report, String> {
    let lease = DEFAULT_LEASE.as_millis().to_string();
    let start = |builder: support::Builder| builder.module_args(&["default-lease", &lease]).start();
    let servers = match kind {
        Kind::Pair => vec![start(Server::builder())],
        Kind::Fleet => {
            let keeps = || start(Server::builder().arg("appendonly", "yes").arg("appendfsync", "always"));
            let servers = vec![keeps(), keeps()];
            servers[1].replica_of(&servers[0]);
            servers
        }
    };
    let mut clients = Vec::new();
    for (name, under_test) in named {
        clients.push(Client {
            name: name.clone(),
            under_test: *under_test,
            driver: Driver::start(under_test.manifest, under_test.programs)?,
            proxy: Proxy::to(servers[0].addr()),
            calls: BTreeMap::new(),
            held: Vec::new(),
            acquired: 0,
            frozen: None,
            refused: None,
            starts: None,
        });
    }
    let raw = servers[0].raw();
    let mut run = Run { kind, acts: 0, servers, paused: None, raw, clients, report: Report::default() };
    let mut random = Random::from_seed(seed);
    for index in 0..run.clients.len() {
        run.open(index);
    }
    let end = clock::after(time);
    while Instant::now() < end && run.report.faults.is_empty() {
        for _ in 0..if kind == Kind::Fleet { ACTS } else { 1 } {
            run.acts += 1;
            let index = random.index(run.clients.len());
            if kind == Kind::Fleet {
                run.disturb(index, &mut random);
            }
            run.act(index, &mut random);
        }
        run.listen(PAUSE);
    }
    run.end();
    Ok(run.report)
}

struct Run<'a> {
    kind: Kind,
    /// The number of actions so far.
    acts: usize,
    /// The server that has the locks, and its replica, if there is one.
    servers: Vec<Server>,
    /// Until when the server is paused.
    paused: Option<Instant>,
    raw: Raw,
    clients: Vec<Client<'a>>,
    report: Report,
}

impl Run<'_> {
    fn open(&mut self, index: usize) {
        let url = format!("redis://{}/", self.clients[index].proxy.addr());
        self.call(index, Call::Open { url }, "");
    }

    fn count(&mut self, fault: &'static str) {
        *self.report.injected_faults.entry(fault).or_default() += 1;
    }

    /// The current name of a lock.
    fn name_of(&self, lock: &str) -> String {
        match self.kind {
            Kind::Pair => lock.to_owned(),
            Kind::Fleet => format!("{lock}.{}", self.acts / ROUND),
        }
    }

    /// Injects a fault into a client's process, or into the server.
    fn disturb(&mut self, index: usize, random: &mut Random) {
        match random.below(20_000) {
            0..10 => self.kill(index),
            // No command is sent to a server that is paused.
            10..21 if self.paused.is_some() => {}
            10..15 => {
                self.servers[0].stop();
                self.paused = Some(clock::after(Duration::from_millis(random.below(1_500))));
                self.count("server paused");
            }
            15..18 => {
                self.servers[0].kill9();
                self.servers[0].restart();
                self.servers[0].wait_replica_online();
                self.raw = self.servers[0].raw();
                self.count("server killed and restarted");
            }
            18..21 => self.fail_over(),
            _ => {}
        }
    }

    /// Kills a client's process, and starts another one.
    fn kill(&mut self, index: usize) {
        if self.clients[index].starts.is_some() {
            return;
        }
        self.read_reports(index);
        let client = &mut self.clients[index];
        for loss in std::mem::take(&mut client.driver.losses) {
            self.report.history.lost(&client.name, &loss);
        }
        self.report.history.killed(&client.name);
        client.driver.kill();
        client.calls.clear();
        client.held.clear();
        client.frozen = None;
        let (manifest, programs) = (client.under_test.manifest.clone(), client.under_test.programs.clone());
        client.starts = Some(thread::spawn(move || Driver::start(&manifest, &programs)));
        self.count("process killed");
    }

    /// Kills the server, promotes its replica, and restarts the server as a replica.
    fn fail_over(&mut self) {
        // A force of another client needs no confirmation, so wait until the replica has it.
        self.servers[0].wait_for_replica(&self.servers[1]);
        self.servers[0].kill9();
        self.servers[1].replica_of_no_one();
        for client in &self.clients {
            client.proxy.redirect_to(self.servers[1].addr());
        }
        self.servers[0].restart();
        self.servers[0].replica_of(&self.servers[1]);
        self.servers.swap(0, 1);
        self.raw = self.servers[0].raw();
        self.count("replica promoted");
    }

    fn call(&mut self, index: usize, call: Call, hold: &str) {
        let client = &mut self.clients[index];
        let (from, bound) = (clock::now(), clock::after(BOUND + wait_of(&call)));
        if let Call::Release { hold } = &call {
            self.report.history.releases(&client.name, hold, from);
        }
        match client.driver.call(&call) {
            Ok(id) => drop(client.calls.insert(id, (call, hold.to_owned(), from, bound))),
            Err(why) => self.report.faults.push(format!("{}: {why}", client.name)),
        }
    }

    /// An action of a client, or a fault.
    fn act(&mut self, index: usize, random: &mut Random) {
        let client = &mut self.clients[index];
        if client.starts.is_some() {
            return;
        }
        let manifest = client.under_test.manifest;
        match random.below(1_000) {
            0..2 => {
                client.proxy.cut();
                self.count("connections cut");
            }
            2..3 => {
                client.proxy.refuse();
                client.refused = Some(clock::after(Duration::from_millis(random.below(1_500))));
                self.count("connections refused");
            }
            3..4 => {
                client.driver.signal(Signal::STOP);
                client.frozen = Some(clock::after(Duration::from_millis(random.below(3_000))));
                self.count("process paused");
            }
            4..10 if self.paused.is_some() => {}
            4..10 => {
                let ((lock, _), from) = (*random.pick(&LOCKS), clock::now());
                let key = self.name_of(lock);
                self.raw.call(&[b"LOCK.FORCE", key.as_bytes()]);
                self.report.history.broken(&key, from);
                self.count("lock forced");
            }
            10..80 if manifest.has(Feature::Cancel) => {
                let waits = |(call, ..): &&(Call, String, Micros, Instant)| matches!(call, Call::Acquire { .. });
                let running: Vec<String> = client.calls.values().filter(waits).map(|it| it.1.clone()).collect();
                if !running.is_empty() {
                    let hold = random.pick(&running).clone();
                    self.call(index, Call::Cancel { hold }, "");
                }
            }
            80..550 => self.acquire(index, random),
            _ if client.held.is_empty() => {}
            550..600 => {
                let hold = random.pick(&client.held).clone();
                self.call(index, Call::Check { hold: hold.clone() }, &hold);
            }
            600..620 if manifest.has(Feature::Drop) => {
                let hold = client.held.swap_remove(random.index(client.held.len()));
                self.report.history.ends(&client.name, &hold);
                self.call(index, Call::Drop { hold }, "");
            }
            _ => {
                let hold = client.held.swap_remove(random.index(client.held.len()));
                self.call(index, Call::Release { hold: hold.clone() }, &hold);
            }
        }
    }

    fn acquire(&mut self, index: usize, random: &mut Random) {
        let client = &mut self.clients[index];
        let running = client.calls.values().filter(|(call, ..)| matches!(call, Call::Acquire { .. })).count();
        if running + client.held.len() >= AT_ONCE {
            return;
        }
        client.acquired += 1;
        let hold = client.acquired.to_string();
        let (key, limit) = *random.pick(&LOCKS);
        let keys = match random.below(6) {
            0 if client.under_test.manifest.has(Feature::SeveralKeys) => random.some(&["m1", "m2", "m3"], 2),
            _ => vec![key],
        };
        // A lock with readers also has writers.
        let limit = if keys.len() > 1 || (limit == 0 && random.chance(30)) { 1 } else { limit };
        // The same options each time, so that a cached lock is used again.
        let keep = limit == 1 && random.chance(40) && client.under_test.manifest.has(Feature::Keep);
        let terms = Terms {
            wait: Some([0, 20, 500, 3_000][random.index(4)]),
            lease: (!keep && random.chance(30)).then(|| 500 + random.below(2_000)),
            shared: limit == 0,
            limit: (limit > 1).then_some(limit),
            keep: keep.then_some(200),
            keep_uses: (keep && random.chance(30)).then_some(3),
            // The replica must confirm, so that it has every grant when it is promoted.
            replicas: (self.kind == Kind::Fleet).then_some(1),
            ..Terms::default()
        };
        let keys: Vec<String> = keys.into_iter().map(|lock| self.name_of(lock)).collect();
        let client = &mut self.clients[index];
        self.report.history.asks(&client.name, &hold, &keys, &terms);
        self.call(index, Call::Acquire { hold: hold.clone(), keys, terms, at: At::default() }, &hold);
    }

    /// Reads the reports of the clients for a while.
    fn listen(&mut self, time: Duration) {
        let end = clock::after(time);
        loop {
            for index in 0..self.clients.len() {
                self.read_reports(index);
            }
            if Instant::now() >= end {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn read_reports(&mut self, index: usize) {
        if self.paused.take_if(|at| Instant::now() >= *at).is_some() {
            self.servers[0].cont();
        }
        if let Some(starts) = self.clients[index].starts.take_if(|it| it.is_finished()) {
            match starts.join() {
                Ok(Ok(driver)) => {
                    self.clients[index].driver = driver;
                    self.open(index);
                }
                Ok(Err(why)) => self.report.faults.push(why),
                Err(_) => self.report.faults.push("a driver's start panicked".to_owned()),
            }
        }
        let client = &mut self.clients[index];
        if client.starts.is_some() {
            return;
        }
        let is_over = |at: &mut Option<Instant>| at.take_if(|at| Instant::now() >= *at).is_some();
        if is_over(&mut client.frozen) {
            client.driver.signal(Signal::CONT);
        }
        if is_over(&mut client.refused) {
            client.proxy.accept();
        }
        if let Err(why) = client.driver.read() {
            return self.report.faults.push(format!("{}: {why}", client.name));
        }
        let ids: Vec<u64> = client.calls.keys().copied().collect();
        for id in ids {
            let client = &mut self.clients[index];
            if let Some(outcome) = client.driver.ended(id) {
                if let Some((call, hold, asked, _)) = client.calls.remove(&id) {
                    self.ended(index, &call, &hold, asked, &outcome);
                }
            } else if let Some((call, .., bound)) = client.calls.get(&id)
                && Instant::now() > *bound
            {
                let why = format!("{}: {call:?} has not ended {BOUND:?} after its timeout", client.name);
                client.calls.remove(&id);
                self.report.faults.push(why);
            }
        }
    }

    fn ended(&mut self, index: usize, call: &Call, hold: &str, asked: Micros, outcome: &Outcome) {
        let client = &mut self.clients[index];
        let calls = self.report.calls.entry(client.name.clone()).or_default();
        *calls = (calls.0 + 1, calls.1 + u64::from(outcome.outcome == "held" && matches!(call, Call::Acquire { .. })));
        if matches!(call, Call::Acquire { .. }) {
            self.report.history.acquired(&client.name, hold, outcome);
            if outcome.outcome == "held" {
                client.held.push(hold.to_owned());
                self.report.granted += 1;
            }
        } else {
            // A client can't confirm a hold after it has reported its loss.
            let was_told = client.driver.losses.iter().any(|loss| loss.hold == hold && loss.at < asked);
            if was_told && matches!(outcome.outcome.as_str(), "held" | "released") {
                let why = format!("{}: {call:?} after its loss was reported: {outcome:?}", client.name);
                self.report.faults.push(why);
            }
            self.report.history.about(&client.name, hold, call, asked, outcome);
            if outcome.outcome == "lost" {
                client.held.retain(|it| it != hold);
            }
        }
    }

    fn end(&mut self) {
        let wait = Duration::from_secs(5);
        self.paused = self.paused.map(|_| Instant::now());
        // A driver that starts has its own time limit.
        while self.clients.iter().any(|it| it.starts.is_some()) {
            self.listen(PAUSE);
        }
        for client in &mut self.clients {
            client.frozen = client.frozen.map(|_| Instant::now());
            client.refused = client.refused.map(|_| Instant::now());
        }
        let mut end = clock::after(BOUND + wait);
        while self.clients.iter().any(|it| !it.calls.is_empty()) && Instant::now() < end {
            self.listen(PAUSE);
        }
        for index in 0..self.clients.len() {
            for hold in std::mem::take(&mut self.clients[index].held) {
                self.call(index, Call::Release { hold: hold.clone() }, &hold);
            }
        }
        end = clock::after(BOUND + wait);
        while self.clients.iter().any(|it| !it.calls.is_empty()) && Instant::now() < end {
            self.listen(PAUSE);
        }
        self.report.faults.extend(left::after(CLEAN, Moment::Free, &[&self.servers[0]]));
        for index in 0..self.clients.len() {
            for loss in std::mem::take(&mut self.clients[index].driver.losses) {
                self.report.history.lost(&self.clients[index].name, &loss);
            }
            if self.clients[index].under_test.manifest.has(Feature::Close) {
                self.call(index, Call::Close, "");
                self.listen(PAUSE);
            } else {
                self.clients[index].driver.kill();
            }
        }
        self.report.faults.extend(left::after(CLEAN, Moment::Ended, &[&self.servers[0]]));
        if let Err(violation) = self.report.history.verify_certain_operations() {
            self.report.faults.push(format!("the history can't be explained: {violation}"));
        }
    }
}

fn wait_of(call: &Call) -> Duration {
    match call {
        Call::Acquire { terms, .. } => Duration::from_millis(terms.wait.unwrap_or_default()),
        _ => Duration::ZERO,
    }
}
