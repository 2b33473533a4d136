//! Two clients, of different languages where there are several, do what they like to eight locks for a while, from a seed, while their
//! connections break and their processes stand still.
//!
//! What they were told is one history, judged as the simulator's are.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{Proxy, Random, Raw, Server};

use crate::clock::{self, Micros};
use crate::driver::{At, Call, Driver, Outcome};
use crate::history::History;
use crate::left::{self, When};
use crate::play::{BOUND, CLEAN, Judged};
use crate::scenario::{Feature, Terms};
use crate::servers::DEFAULT_LEASE;

/// Locks, and how many may hold each: 0 is any number of readers, or one writer.
const LOCKS: [(&str, u64); 8] =
    [("m1", 1), ("m2", 1), ("m3", 1), ("m4", 1), ("r1", 0), ("r2", 0), ("s2", 2), ("s3", 3)];
/// So many acquisitions of a client run or are held at once.
const AT_ONCE: usize = 5;
/// How often something is done.
const PAUSE: Duration = Duration::from_millis(10);

struct Client<'a> {
    name: String,
    judged: Judged<'a>,
    driver: Driver,
    proxy: Proxy,
    /// Calls that have not ended, by their names.
    calls: BTreeMap<u64, (Call, String, Micros, Instant)>,
    held: Vec<String>,
    acquired: u64,
    /// Until when its process is stopped, or its connections are refused.
    frozen: Option<Instant>,
    refused: Option<Instant>,
}

/// What came of a run.
#[derive(Debug, Default)]
pub struct Report {
    /// What was wrong.
    pub faults: Vec<String>,
    /// How many acquisitions were granted.
    pub granted: usize,
    /// What the clients were told.
    pub history: History,
}

/// Lets two clients work for so long.
///
/// # Errors
///
/// If it can't be done: a driver doesn't start.
pub fn run(seed: u64, time: Duration, both: [Judged; 2]) -> Result<Report, String> {
    let lease = DEFAULT_LEASE.as_millis().to_string();
    let server = Server::builder().module_args(&["default-lease", &lease]).start();
    let mut clients = Vec::new();
    for (name, judged) in ["X", "Y"].into_iter().zip(both) {
        clients.push(Client {
            name: name.to_owned(),
            judged,
            driver: Driver::start(judged.manifest, judged.programs)?,
            proxy: Proxy::to(server.addr()),
            calls: BTreeMap::new(),
            held: Vec::new(),
            acquired: 0,
            frozen: None,
            refused: None,
        });
    }
    let mut run = Run { raw: server.raw(), clients, report: Report::default() };
    let mut random = Random::from_seed(seed);
    for index in 0..run.clients.len() {
        let url = format!("redis://{}/", run.clients[index].proxy.addr());
        run.call(index, Call::Open { url }, "");
    }
    let end = clock::after(time);
    while Instant::now() < end && run.report.faults.is_empty() {
        let index = random.index(run.clients.len());
        run.act(index, &mut random);
        run.listen(PAUSE);
    }
    run.end(&server);
    Ok(run.report)
}

struct Run<'a> {
    raw: Raw,
    clients: Vec<Client<'a>>,
    report: Report,
}

impl Run<'_> {
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

    /// Something happens to a client, or is done by it.
    fn act(&mut self, index: usize, random: &mut Random) {
        let client = &mut self.clients[index];
        let manifest = client.judged.manifest;
        match random.below(1_000) {
            0..2 => client.proxy.cut(),
            2..3 => {
                client.proxy.refuse();
                client.refused = Some(clock::after(Duration::from_millis(random.below(1_500))));
            }
            3..4 => {
                client.driver.signal(Signal::STOP);
                client.frozen = Some(clock::after(Duration::from_millis(random.below(3_000))));
            }
            4..10 => {
                let ((key, _), from) = (*random.pick(&LOCKS), clock::now());
                self.raw.call(&[b"LOCK.FORCE", key.as_bytes()]);
                self.report.history.broken(key, from);
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
            0 if client.judged.manifest.has(Feature::SeveralKeys) => random.some(&["m1", "m2", "m3"], 2),
            _ => vec![key],
        };
        // A lock that has readers has writers, too.
        let limit = if keys.len() > 1 || (limit == 0 && random.chance(30)) { 1 } else { limit };
        // The same terms again and again, so that what is kept is used again.
        let keep = limit == 1 && random.chance(40) && client.judged.manifest.has(Feature::Keep);
        let terms = Terms {
            wait: Some([0, 20, 500, 3_000][random.index(4)]),
            lease: (!keep && random.chance(30)).then(|| 500 + random.below(2_000)),
            shared: limit == 0,
            limit: (limit > 1).then_some(limit),
            keep: keep.then_some(200),
            keep_uses: (keep && random.chance(30)).then_some(3),
            ..Terms::default()
        };
        let keys: Vec<String> = keys.into_iter().map(str::to_owned).collect();
        self.report.history.asks(&client.name, &hold, &keys, &terms);
        self.call(index, Call::Acquire { hold: hold.clone(), keys, terms, at: At::default() }, &hold);
    }

    /// Takes in what the clients say for a while.
    fn listen(&mut self, time: Duration) {
        let end = clock::after(time);
        loop {
            for index in 0..self.clients.len() {
                self.hear(index);
            }
            if Instant::now() >= end {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn hear(&mut self, index: usize) {
        let client = &mut self.clients[index];
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
                let why = format!("{}: {call:?} has not ended {BOUND:?} after its own time", client.name);
                client.calls.remove(&id);
                self.report.faults.push(why);
            }
        }
    }

    fn ended(&mut self, index: usize, call: &Call, hold: &str, asked: Micros, outcome: &Outcome) {
        let client = &mut self.clients[index];
        if matches!(call, Call::Acquire { .. }) {
            self.report.history.acquired(&client.name, hold, outcome);
            if outcome.outcome == "held" {
                client.held.push(hold.to_owned());
                self.report.granted += 1;
            }
        } else {
            // What a client has called lost it can't confirm afterwards.
            let was_told = client.driver.told.iter().any(|loss| loss.hold == hold && loss.at < asked);
            if was_told && matches!(outcome.outcome.as_str(), "held" | "released") {
                let why = format!("{}: {call:?} after its loss was told: {outcome:?}", client.name);
                self.report.faults.push(why);
            }
            self.report.history.about(&client.name, hold, call, asked, outcome);
            if outcome.outcome == "lost" {
                client.held.retain(|it| it != hold);
            }
        }
    }

    fn end(&mut self, server: &Server) {
        let wait = Duration::from_secs(5);
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
        self.report.faults.extend(left::after(CLEAN, When::Free, &[server]));
        for index in 0..self.clients.len() {
            for loss in std::mem::take(&mut self.clients[index].driver.told) {
                self.report.history.lost(&self.clients[index].name, &loss);
            }
            if self.clients[index].judged.manifest.has(Feature::Close) {
                self.call(index, Call::Close, "");
                self.listen(PAUSE);
            } else {
                self.clients[index].driver.kill();
            }
        }
        self.report.faults.extend(left::after(CLEAN, When::Ended, &[server]));
        if let Err(violation) = self.report.history.judge_what_is_certain() {
            self.report.faults.push(format!("what was told can't be explained: {violation}"));
        }
    }
}

fn wait_of(call: &Call) -> Duration {
    match call {
        Call::Acquire { terms, .. } => Duration::from_millis(terms.wait.unwrap_or_default()),
        _ => Duration::ZERO,
    }
}
