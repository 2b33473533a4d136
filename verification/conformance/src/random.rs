//! Random runs: clients make random calls on eight locks, chosen from a seed. A pair has two clients of different
//! languages, a fleet has all clients. Connections are cut and processes are paused. In a fleet, processes are also
//! killed and replaced, and the servers are paused. The fleet's [`Kind`] names the other faults.
//!
//! The clients' reports form one history. It is checked here by its intervals, and afterwards by porcupine
//! (`scripts/conformance`).

use std::collections::BTreeMap;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use redis::Value;
use rustix::process::Signal;
use support::{Clock, Cluster, Proxy, Random, Server};

use crate::clock::{self, Micros};
use crate::driver::{At, Call, Driver, Outcome};
use crate::history::History;
use crate::left::{self, Moment};
use crate::play::{BOUND, CLEAN, ClientUnderTest, is_bound};
use crate::scenario::{Feature, Profile, Terms};
use crate::servers::DEFAULT_LEASE;

/// Locks and their limits. 0: any number of readers, or one writer.
const LOCKS: [(&str, u64); 8] =
    [("m1", 1), ("m2", 1), ("m3", 1), ("m4", 1), ("r1", 0), ("r2", 0), ("s2", 2), ("s3", 3)];
/// The locks of a fleet with Redisson. Only its mutexes have Holdfast's layout.
const MUTEXES: [(&str, u64); 8] =
    [("m1", 1), ("m2", 1), ("m3", 1), ("m4", 1), ("m5", 1), ("m6", 1), ("m7", 1), ("m8", 1)];
/// The lease that Redisson's watchdog renews, in ms, as its driver configures it.
const WATCHDOG: u64 = 4_000;
/// The longest pause of a Redisson process, in ms: Redisson does not notice that a lease has expired.
const SHORT_PAUSE: u64 = 2_000;
/// How many locks a client waits for or holds at once, at most.
const AT_ONCE: usize = 5;
/// The same in a fleet with Redisson, which is granted nothing while a client waits.
const FEW: usize = 2;
/// The factor by which Redisson's calls may take longer: it has its own timeouts, and repeats requests.
const LONGER: u32 = 4;
/// The number of nodes of a cluster.
const NODES: usize = 3;
/// The largest offset of a server's clock, in ms.
const MINUTE: u64 = 60_000;
/// The interval between actions.
const PAUSE: Duration = Duration::from_millis(10);
/// The number of actions of a fleet per interval.
const ACTS: usize = 4;
/// After this many actions, a fleet uses other locks, so that porcupine can search the history of each.
const ROUND: usize = 5_000;

/// The clients and servers of a run, and the faults of the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Two clients and one server.
    Pair,
    /// All clients. The server is killed, then restarted with its data or replaced by its replica. The replica has
    /// confirmed every grant.
    Failovers,
    /// All clients that support clusters. Slots move between the nodes.
    Slots,
    /// All clients. The server's clock steps forward and back.
    ClockSteps,
    /// All clients and two Redisson processes, on the same mutexes.
    Redisson,
}

impl Kind {
    /// The kinds of fleets.
    pub const FLEETS: [Self; 4] = [Self::Failovers, Self::Slots, Self::ClockSteps, Self::Redisson];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pair => "pair",
            Self::Failovers => "failovers",
            Self::Slots => "slots",
            Self::ClockSteps => "clock-steps",
            Self::Redisson => "redisson",
        }
    }
}

struct Client<'a> {
    name: String,
    under_test: ClientUnderTest<'a>,
    driver: Driver,
    proxy: Proxy,
    /// Calls that have not ended, by ID: the call, its hold, when it began, and when it must have ended.
    calls: BTreeMap<u64, (Call, String, Micros, Instant)>,
    held: Vec<String>,
    acquired: u64,
    /// When its paused process continues.
    paused_until: Option<Instant>,
    /// When its proxy accepts connections again.
    refused: Option<Instant>,
    /// The start of the process that replaces a killed one.
    starts: Option<JoinHandle<Result<Driver, String>>>,
}

/// The result of a run.
#[derive(Debug, Default)]
pub struct Report {
    /// The failures.
    pub faults: Vec<String>,
    /// The number of grants, of all clients.
    pub granted: usize,
    /// For each client, the number of calls that ended, and how many of them were grants.
    pub calls: BTreeMap<String, (u64, u64)>,
    /// How often each fault was injected.
    pub injected_faults: BTreeMap<&'static str, u64>,
    /// The history of the clients.
    pub history: History,
}

/// Runs these clients, given with their names, for this time.
///
/// # Errors
///
/// If a driver does not start.
pub fn run(kind: Kind, seed: u64, time: Duration, named: &[(String, ClientUnderTest)]) -> Result<Report, String> {
    let lease = DEFAULT_LEASE.as_millis().to_string();
    let settings = |builder: support::Builder| builder.module_args(&["default-lease", &lease]);
    let (mut servers, mut cluster, mut clock) = (Vec::new(), None, None);
    match kind {
        Kind::Pair | Kind::Redisson => servers.push(settings(Server::builder()).start()),
        Kind::Failovers => {
            let keeps = || settings(Server::builder().arg("appendonly", "yes").arg("appendfsync", "always")).start();
            servers = vec![keeps(), keeps()];
            servers[1].replica_of(&servers[0]);
        }
        Kind::Slots => cluster = Some(Cluster::start_with(NODES, settings)),
        Kind::ClockSteps => {
            let (builder, its) = Clock::of(settings(Server::builder())).ok_or("no clock of a container steps")?;
            servers.push(builder.start());
            clock = Some((its, 0));
        }
    }
    let first = cluster.as_ref().map_or_else(|| servers[0].addr(), |it| it.node(0).addr());
    let mut clients = Vec::new();
    for (name, under_test) in named {
        clients.push(Client {
            name: name.clone(),
            under_test: *under_test,
            driver: Driver::start(under_test.manifest, under_test.programs)?,
            proxy: Proxy::to(first),
            calls: BTreeMap::new(),
            held: Vec::new(),
            acquired: 0,
            paused_until: None,
            refused: None,
            starts: None,
        });
    }
    let (acts, report) = (0, Report::default());
    let mut run = Run { kind, acts, servers, cluster, clock, paused: None, moving: None, clients, report };
    let mut random = Random::from_seed(seed);
    for index in 0..run.clients.len() {
        run.open(index);
    }
    let end = clock::after(time);
    while Instant::now() < end && run.report.faults.is_empty() {
        for _ in 0..if kind == Kind::Pair { 1 } else { ACTS } {
            run.acts += 1;
            let index = random.index(run.clients.len());
            if kind != Kind::Pair {
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
    acts: usize,
    /// The primary, and its replica if there is one. Empty with a cluster.
    servers: Vec<Server>,
    cluster: Option<Cluster>,
    /// The server's clock, and its offset in ms.
    clock: Option<(Clock, i64)>,
    /// HoldName server is paused, and until when.
    paused: Option<(usize, Instant)>,
    /// The slot that moves, its source and target, and when the move ends.
    moving: Option<(u16, usize, usize, Instant)>,
    clients: Vec<Client<'a>>,
    report: Report,
}

impl Client<'_> {
    /// Whether a call is running that must end. Redisson's waits may have no timeout.
    fn is_busy(&self) -> bool {
        self.calls.values().any(|(call, ..)| !self.is_foreign() || !matches!(call, Call::Acquire { .. }))
    }

    /// Whether this is a Redisson process.
    fn is_foreign(&self) -> bool {
        self.under_test.manifest.profile == Profile::Foreign
    }
}

impl Run<'_> {
    fn open(&mut self, index: usize) {
        let url = match &self.cluster {
            Some(cluster) => format!("redis+cluster://{}", cluster.node(0).addr()),
            None => format!("redis://{}/", self.clients[index].proxy.addr()),
        };
        self.call(index, Call::Open { url }, "");
    }

    fn count(&mut self, fault: &'static str) {
        *self.report.injected_faults.entry(fault).or_default() += 1;
    }

    fn locks(&self) -> &'static [(&'static str, u64)] {
        if self.kind == Kind::Redisson { &MUTEXES } else { &LOCKS }
    }

    /// The current key of a lock. In a cluster, all mutexes are in one slot, so that one request can name several.
    fn name_of(&self, lock: &str) -> String {
        let round = self.acts / ROUND;
        match self.kind {
            Kind::Pair => lock.to_owned(),
            Kind::Slots => format!("{{{}.{round}}}{lock}", if lock.starts_with('m') { "m" } else { lock }),
            Kind::Failovers | Kind::ClockSteps | Kind::Redisson => format!("{lock}.{round}"),
        }
    }

    /// The servers that clients use: the primary, or the nodes of the cluster.
    fn nodes(&self) -> &[Server] {
        self.cluster.as_ref().map_or_else(|| &self.servers[..1], Cluster::nodes)
    }

    /// The server of this key.
    fn home(&self, key: &str) -> &Server {
        match &self.cluster {
            Some(cluster) => cluster.node(cluster.owner_of(cluster.slot_of(key.as_bytes()))),
            None => &self.servers[0],
        }
    }

    /// Injects a fault into a client's process or a server, or none.
    fn disturb(&mut self, index: usize, random: &mut Random) {
        match (random.below(20_000), self.kind) {
            (0..10, _) => self.kill(index),
            // A paused server replies to nothing, and only one server fault is active at a time.
            (10.., _) if self.paused.is_some() || self.moving.is_some() => {}
            (10..15, _) => {
                let node = random.index(self.nodes().len());
                self.nodes()[node].stop();
                self.paused = Some((node, clock::after(Duration::from_millis(random.below(1_500)))));
                self.count("server paused");
            }
            (15..18, Kind::Failovers) => {
                self.servers[0].kill9();
                self.servers[0].restart();
                self.servers[0].wait_replica_online();
                self.count("server killed and restarted");
            }
            (18..21, Kind::Failovers) => self.fail_over(),
            (15..75, Kind::Slots) => self.begin_move(random),
            // Clients of a cluster connect without a proxy.
            (75..90, Kind::Slots) => {
                random.pick(self.nodes()).raw().call(&[b"CLIENT", b"KILL", b"TYPE", b"normal"]);
                self.count("all connections with a server cut");
            }
            (15..30, Kind::ClockSteps) => self.step_clock(random),
            _ => {}
        }
    }

    /// Begins to move the slot of a random lock to another node.
    fn begin_move(&mut self, random: &mut Random) {
        let Some(cluster) = &self.cluster else { return };
        let (lock, _) = *random.pick(self.locks());
        let slot = cluster.slot_of(self.name_of(lock).as_bytes());
        let from = cluster.owner_of(slot);
        let to = (from + 1 + random.index(NODES - 1)) % NODES;
        cluster.begin_move(slot, from, to);
        self.moving = Some((slot, from, to, clock::after(Duration::from_millis(random.below(600)))));
        self.count("slot moved");
    }

    /// Sets the server's clock to a random offset.
    fn step_clock(&mut self, random: &mut Random) {
        let Some((clock, ahead)) = &mut self.clock else { return };
        let before = *ahead;
        *ahead = random.below(2 * MINUTE).cast_signed() - MINUTE.cast_signed();
        let fault = if *ahead < before { "clock stepped back" } else { "clock stepped forward" };
        if *ahead >= before {
            // A session whose connection was cut has no bindings until it is back.
            let mut server = self.servers[0].raw();
            self.report.history.stepped(clock::now(), |key, token| is_bound(&mut server, key, token));
        }
        clock.set(*ahead);
        self.count(fault);
    }

    /// Kills a client's process, and records its last reports.
    fn end_process(&mut self, index: usize) {
        let client = &mut self.clients[index];
        for loss in std::mem::take(&mut client.driver.losses) {
            self.report.history.lost(&client.name, &loss);
        }
        self.report.history.killed(&client.name);
        client.driver.kill();
        for (call, _, asked, _) in std::mem::take(&mut client.calls).into_values() {
            if let Call::Force { key } = call {
                self.report.history.forced(&client.name, &key, asked, None);
            }
        }
        client.held.clear();
        client.paused_until = None;
    }

    /// Kills a client's process, and starts another one.
    fn kill(&mut self, index: usize) {
        if self.clients[index].starts.is_some() {
            return;
        }
        self.read_reports(index);
        self.end_process(index);
        let client = &mut self.clients[index];
        let (manifest, programs) = (client.under_test.manifest.clone(), client.under_test.programs.clone());
        client.starts = Some(thread::spawn(move || Driver::start(&manifest, &programs)));
        self.count("process killed");
    }

    /// Kills the server, promotes its replica, and restarts the server as a replica.
    fn fail_over(&mut self) {
        // `LOCK.FORCE` waits for no replica, so wait until the replica has its effect.
        self.servers[0].wait_for_replica(&self.servers[1]);
        self.servers[0].kill9();
        self.servers[1].replica_of_no_one();
        for client in &self.clients {
            client.proxy.redirect_to(self.servers[1].addr());
        }
        self.servers[0].restart();
        self.servers[0].replica_of(&self.servers[1]);
        self.servers.swap(0, 1);
        self.count("replica promoted");
    }

    fn call(&mut self, index: usize, call: Call, hold: &str) {
        let client = &mut self.clients[index];
        let longer = if client.is_foreign() { LONGER } else { 1 };
        let (from, bound) = (clock::now(), clock::after(BOUND * longer + wait_of(&call)));
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
            // Clients of a cluster connect without a proxy.
            0..3 if self.cluster.is_some() => {}
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
                let most = if client.is_foreign() { SHORT_PAUSE } else { 3_000 };
                client.paused_until = Some(clock::after(Duration::from_millis(random.below(most))));
                self.count("process paused");
            }
            4..10 if self.paused.is_some() || self.moving.is_some() => {}
            4..10 => {
                let key = self.name_of(random.pick(self.locks()).0);
                self.force(index, key);
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

    /// Force-releases a lock: through Redisson if this client is one of its processes.
    fn force(&mut self, index: usize, key: String) {
        if !self.clients[index].is_foreign() {
            let from = clock::now();
            // An error, such as a redirection, has no effect.
            if let Value::Int(_) = self.home(&key).raw().call(&[b"LOCK.FORCE", key.as_bytes()]) {
                self.report.history.broken(&key, from);
                self.count("lock forced");
            }
            return;
        }
        // One at a time, so that the history knows until when a force may take effect.
        let mut calls = self.clients.iter().flat_map(|it| it.calls.values());
        if !calls.any(|(call, ..)| matches!(call, Call::Force { .. })) {
            self.report.history.forces(&key);
            self.call(index, Call::Force { key }, "");
            self.count("lock forced by Redisson");
        }
    }

    fn acquire(&mut self, index: usize, random: &mut Random) {
        let (locks, kind) = (self.locks(), self.kind);
        let client = &mut self.clients[index];
        let running = client.calls.values().filter(|(call, ..)| matches!(call, Call::Acquire { .. })).count();
        let most = if kind == Kind::Redisson && !client.is_foreign() { FEW } else { AT_ONCE };
        if running + client.held.len() >= most {
            return;
        }
        client.acquired += 1;
        let hold = client.acquired.to_string();
        let (key, limit) = *random.pick(locks);
        if client.is_foreign() {
            let watched = random.chance(50);
            let terms = Terms {
                wait: [Some(0), Some(20), Some(500), Some(3_000), None][random.index(5)],
                lease: Some(if watched { WATCHDOG } else { 500 + random.below(2_000) }),
                watched,
                ..Terms::default()
            };
            return self.ask(index, hold, &[key], terms);
        }
        let keys = match random.below(6) {
            0 if client.under_test.manifest.has(Feature::SeveralKeys) => random.some(&["m1", "m2", "m3"], 2),
            _ => vec![key],
        };
        // A lock with readers also has writers.
        let limit = if keys.len() > 1 || (limit == 0 && random.chance(30)) { 1 } else { limit };
        // Equal options each time, so that a cached hold is used again.
        let keep = limit == 1 && random.chance(40) && client.under_test.manifest.has(Feature::Keep);
        let terms = Terms {
            wait: Some([0, 20, 500, 3_000][random.index(4)]),
            lease: (!keep && random.chance(30)).then(|| 500 + random.below(2_000)),
            shared: limit == 0,
            limit: (limit > 1).then_some(limit),
            keep: keep.then_some(200),
            keep_uses: (keep && random.chance(30)).then_some(3),
            // There is one replica, so it has every grant when it is promoted.
            replicas: (kind == Kind::Failovers).then_some(1),
            ..Terms::default()
        };
        self.ask(index, hold, &keys, terms);
    }

    fn ask(&mut self, index: usize, hold: String, locks: &[&str], terms: Terms) {
        let keys: Vec<String> = locks.iter().map(|lock| self.name_of(lock)).collect();
        let client = &self.clients[index];
        self.report.history.asks(&client.name, &hold, &keys, &terms);
        self.call(index, Call::Acquire { hold: hold.clone(), keys, terms, at: At::default() }, &hold);
    }

    /// Reads the reports of the clients for this time.
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
        if let Some((node, _)) = self.paused.take_if(|(_, at)| Instant::now() >= *at) {
            self.nodes()[node].cont();
        }
        if let Some((slot, from, to, _)) = self.moving.take_if(|(.., at)| Instant::now() >= *at)
            && let Some(cluster) = &self.cluster
        {
            match cluster.try_migrate_keys(slot, from, to) {
                Ok(()) => cluster.finish_move(slot, from, to),
                // A key that exists at both nodes was granted twice, as the history shows.
                Err(why) => self.report.faults.push(format!("slot {slot} moves from {from} to {to}: {why}")),
            }
        }
        if let Some(starts) = self.clients[index].starts.take_if(|it| it.is_finished()) {
            match starts.join() {
                Ok(Ok(driver)) => {
                    self.clients[index].driver = driver;
                    self.open(index);
                }
                Ok(Err(why)) => self.report.faults.push(why),
                Err(_) => self.report.faults.push("the start of a driver panicked".to_owned()),
            }
        }
        let client = &mut self.clients[index];
        if client.starts.is_some() {
            return;
        }
        let is_over = |at: &mut Option<Instant>| at.take_if(|at| Instant::now() >= *at).is_some();
        if is_over(&mut client.paused_until) {
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
            } else if client.calls.get(&id).is_some_and(|(.., bound)| Instant::now() > *bound)
                && let Some((call, hold, asked, _)) = client.calls.remove(&id)
            {
                if client.is_foreign() {
                    let never = Outcome { outcome: "connection".to_owned(), at: clock::now(), ..Outcome::default() };
                    self.ended(index, &call, &hold, asked, &never);
                    self.count("call of Redisson that did not end");
                } else {
                    let why = format!("{}: {call:?} has not ended {BOUND:?} after its timeout", client.name);
                    self.report.faults.push(why);
                }
            }
        }
    }

    fn ended(&mut self, index: usize, call: &Call, hold: &str, asked: Micros, outcome: &Outcome) {
        let client = &mut self.clients[index];
        let calls = self.report.calls.entry(client.name.clone()).or_default();
        *calls = (calls.0 + 1, calls.1 + u64::from(outcome.outcome == "held" && matches!(call, Call::Acquire { .. })));
        if let Call::Force { key } = call {
            let done = (outcome.outcome == "ok").then_some(outcome.at);
            self.report.history.forced(&client.name, key, asked, done);
        } else if matches!(call, Call::Acquire { .. }) {
            if outcome.outcome == "held" && outcome.fence.is_none() != client.is_foreign() {
                let why = format!("{}: {call:?}: {outcome:?}: only Redisson grants without a token", client.name);
                self.report.faults.push(why);
            }
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
        let now = Instant::now();
        self.paused = self.paused.map(|(node, _)| (node, now));
        self.moving = self.moving.map(|(slot, from, to, _)| (slot, from, to, now));
        // Each start of a driver has its own timeout.
        while self.clients.iter().any(|it| it.starts.is_some()) {
            self.listen(PAUSE);
        }
        for client in &mut self.clients {
            client.paused_until = client.paused_until.map(|_| Instant::now());
            client.refused = client.refused.map(|_| Instant::now());
        }
        self.listen(PAUSE);
        let mut end = clock::after(BOUND + wait);
        while self.clients.iter().any(Client::is_busy) && Instant::now() < end {
            self.listen(PAUSE);
        }
        for index in 0..self.clients.len() {
            for hold in std::mem::take(&mut self.clients[index].held) {
                self.call(index, Call::Release { hold: hold.clone() }, &hold);
            }
        }
        end = clock::after(BOUND + wait);
        while self.clients.iter().any(Client::is_busy) && Instant::now() < end {
            self.listen(PAUSE);
        }
        // Redisson releases nothing when it ends, and may have acquired a lock more often than it knows. So its leases
        // must expire.
        for index in 0..self.clients.len() {
            if self.clients[index].is_foreign() {
                self.end_process(index);
            }
        }
        self.clients.retain(|it| !it.is_foreign());
        // Steps back have made the leases of killed processes longer: let them expire.
        if let Some((clock, _)) = &self.clock {
            clock.set((60 * MINUTE).cast_signed());
        }
        self.report.faults.extend(left::after(CLEAN, Moment::Free, &self.nodes().iter().collect::<Vec<_>>()));
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
        self.report.faults.extend(left::after(CLEAN, Moment::Ended, &self.nodes().iter().collect::<Vec<_>>()));
        self.report.faults.extend(self.report.history.verify_intervals().err());
    }
}

fn wait_of(call: &Call) -> Duration {
    match call {
        Call::Acquire { terms, .. } => Duration::from_millis(terms.wait.unwrap_or_default()),
        _ => Duration::ZERO,
    }
}
