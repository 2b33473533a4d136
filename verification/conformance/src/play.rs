//! Plays a scenario to the drivers of a client, and records their reports.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use redis::Value;
use rustix::process::Signal;
use support::{Proxy, Raw, eventually};

use crate::clock::{self, Micros};
use crate::driver::{At, Call, Driver, Manifest, Outcome};
use crate::fault::{Fault, Kind, Watched};
use crate::history::History;
use crate::left::{self, Moment};
use crate::newer;
use crate::scenario::{self, Acquire, Callback, Feature, Network, Scenario, Step, Terms};
use crate::servers::Servers;
use crate::superseded;

/// How much longer than its timeout a call may take: the time limit of a connection, a reconnect, and a stall of this
/// machine.
pub const BOUND: Duration = Duration::from_secs(20);
/// The time in which the server reaches the state that a step waits for, on a busy machine.
pub const SOON: Duration = Duration::from_secs(30);
/// The same if a fault may prevent it.
const WITH_A_FAULT: Duration = Duration::from_secs(2);
/// The interval at which the runner checks whether the message for a cancellation was reached.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// The time in which closed clients leave nothing behind.
pub const CLEAN: Duration = Duration::from_secs(20);

/// The result.
#[derive(Debug, Default)]
pub struct Report {
    /// The failures, each a sentence.
    pub faults: Vec<String>,
    /// The number of messages between the client with the faults and its server.
    pub messages: u64,
    /// The number of grants.
    pub granted: usize,
    /// The history, if there was a failure.
    pub history: Vec<u8>,
}

/// The tested client.
#[derive(Clone, Copy, Debug)]
pub struct ClientUnderTest<'a> {
    /// Its driver.
    pub manifest: &'a Manifest,
    /// The values of the names in its command.
    pub programs: &'a BTreeMap<&'static str, String>,
}

/// A client of the scenario.
struct Client {
    name: String,
    driver: Driver,
    proxy: Proxy,
    holds: BTreeMap<String, DriverHold>,
    /// The hold, its running call, and the call's time limit.
    running: BTreeMap<String, (u64, Duration)>,
    killed: bool,
}

/// A hold that a driver reports.
struct DriverHold {
    keys: Vec<String>,
    fence: u64,
    watched: bool,
}

/// A scenario in progress.
pub struct Play<'a> {
    scenario: &'a Scenario,
    fault: Option<Fault>,
    servers: Servers,
    /// A connection to the server that has the locks.
    raw: Raw,
    clients: Vec<Client>,
    history: History,
    /// Whether the outcomes of the steps are checked: not with a fault between messages.
    strict: bool,
    /// Whether a client can be closed; else its process is ended.
    closes: bool,
    /// Whether a wait can be cancelled; else the process with an endless wait is ended.
    cancels: bool,
    /// The messages of the client with the faults.
    watched: Option<Watched>,
    report: Report,
}

/// The drivers of a scenario's clients, which the next scenario uses again.
pub type Drivers = BTreeMap<String, Driver>;

/// Plays a scenario to a client once, with a fault if one is given. `drivers` are those of the previous scenario.
///
/// # Errors
///
/// If it can't be played: a driver doesn't start.
pub fn play(
    scenario: &Scenario,
    fault: Option<Fault>,
    client: &ClientUnderTest,
    drivers: &mut Drivers,
) -> Result<Report, String> {
    // A scenario that the runner can't play does not end the others.
    let mut own = std::mem::take(drivers);
    match catch_unwind(AssertUnwindSafe(|| play_once(scenario, fault, client, &mut own))) {
        Ok(report) => {
            *drivers = own;
            report
        }
        Err(_) => Ok(Report { faults: vec!["the runner panicked".to_owned()], ..Report::default() }),
    }
}

fn play_once(
    scenario: &Scenario,
    fault: Option<Fault>,
    client: &ClientUnderTest,
    drivers: &mut Drivers,
) -> Result<Report, String> {
    let servers = Servers::start(scenario);
    let mut clients = Vec::new();
    for name in &scenario.clients {
        let driver = match drivers.remove(name) {
            Some(driver) => driver,
            None => Driver::start(client.manifest, client.programs)?,
        };
        let (holds, running) = (BTreeMap::new(), BTreeMap::new());
        clients.push(Client {
            name: name.clone(),
            driver,
            proxy: Proxy::to(servers.now().addr()),
            holds,
            running,
            killed: false,
        });
    }
    let strict = fault.is_none();
    let (closes, cancels) = (client.manifest.has(Feature::Close), client.manifest.has(Feature::Cancel));
    let raw = servers.now().raw();
    let (history, report) = (History::default(), Report::default());
    let mut play =
        Play { scenario, fault, servers, raw, clients, history, strict, closes, cancels, watched: None, report };
    play.watched = scenario.positions.as_ref().and_then(|name| {
        let client = play.clients.iter().find(|it| it.name == *name)?;
        Some(Watched::begin(&client.proxy, fault))
    });
    play.open();
    for step in &scenario.steps {
        if play.strict && !play.report.faults.is_empty() {
            break;
        }
        play.step(step);
    }
    play.finish();
    play.report.messages = play.watched.as_ref().map_or(0, Watched::messages);
    if !play.report.faults.is_empty() {
        // With enough memory, the server accepts all writes.
        let _ = play.history.write(&mut play.report.history);
    }
    let Play { clients, report, .. } = play;
    // A driver that did not end cleanly is not used again.
    if report.faults.is_empty() {
        drivers.extend(clients.into_iter().filter(|it| !it.killed).map(|it| (it.name, it.driver)));
    }
    Ok(report)
}

impl Client {
    /// The fences of a lock that the client relies on: watched holds without a reported loss.
    fn counts(&mut self, key: &str) -> Vec<u64> {
        // The next call shows whether the driver still runs.
        let _ = self.driver.read();
        let is_lost = |hold: &str| self.driver.losses.iter().any(|it| it.hold == hold);
        let is_of = |held: &DriverHold| held.watched && held.keys.iter().any(|it| it == key);
        self.holds.iter().filter(|(hold, held)| is_of(held) && !is_lost(hold)).map(|(_, held)| held.fence).collect()
    }
}

impl Play<'_> {
    fn wrong(&mut self, why: String) {
        self.report.faults.push(why);
    }

    fn expect(&mut self, is_so: bool, why: impl FnOnce() -> String) {
        if self.strict && !is_so {
            self.wrong(why());
        }
    }

    /// The time in which the server reaches a state.
    fn patience(&self) -> Duration {
        if self.strict { SOON } else { WITH_A_FAULT }
    }

    fn client(&mut self, name: &str) -> &mut Client {
        let index = self.clients.iter().position(|it| it.name == *name).expect("scenarios name their clients");
        &mut self.clients[index]
    }

    fn open(&mut self) {
        for name in &self.scenario.clients {
            let over_proxy = format!("redis://{}/", self.client(name).proxy.addr());
            let url = self.servers.url().unwrap_or(over_proxy);
            let Some(id) = self.call(name, &Call::Open { url }) else { continue };
            if let Some(outcome) = self.outcome(name, id, BOUND, "open")
                && outcome.outcome != "ok"
            {
                self.expect(false, || format!("{name}: open ended as {}", describe(&outcome)));
            }
        }
    }

    fn call(&mut self, client: &str, call: &Call) -> Option<u64> {
        match self.client(client).driver.call(call) {
            Ok(id) => Some(id),
            Err(why) => {
                self.wrong(format!("{client}: {why}"));
                None
            }
        }
    }

    /// The outcome of a call: each ends within its time.
    fn outcome(&mut self, client: &str, id: u64, within: Duration, what: &str) -> Option<Outcome> {
        match self.outcome_within(client, id, within) {
            Ok(Some(outcome)) => return Some(outcome),
            Ok(None) => self.wrong(format!("{client}: {what} has not ended after {within:?}")),
            Err(why) => self.wrong(format!("{client}: {what}: {why}")),
        }
        None
    }

    fn outcome_within(&mut self, client: &str, id: u64, within: Duration) -> Result<Option<Outcome>, String> {
        let end = clock::after(within);
        loop {
            self.act_if_reached();
            let left = clock::left(end);
            let outcome = self.client(client).driver.outcome(id, left.min(CHECK_INTERVAL))?;
            if outcome.is_some() || left.is_zero() {
                return Ok(outcome);
            }
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Acquire(acquire) => self.acquire(acquire),
            Step::Ended { client, hold, ends, within, at_most } => {
                self.ended(client, hold, (ends, *at_most), Duration::from_millis(*within));
            }
            Step::Release(it) => self.about(it, Call::Release { hold: it.hold.clone() }),
            Step::Check(it) => self.about(it, Call::Check { hold: it.hold.clone() }),
            Step::Renew { client, hold, lease, ends } => {
                let (client, hold, ends) = (client.clone(), hold.clone(), ends.clone());
                let call = Call::Renew { hold: hold.clone(), lease: *lease };
                self.about(&scenario::Call { client, hold, ends, names: Vec::new() }, call);
            }
            Step::Cancel(which) => self.cancel(&which.client, &which.hold),
            Step::Drop(which) => self.drop_hold(&which.client, &which.hold),
            Step::Fork { client } => self.done(client, &Call::Fork, "ok", BOUND),
            Step::Say { words } => {
                self.history.forgets();
                let words: Vec<&[u8]> = words.iter().map(String::as_bytes).collect();
                if let Value::ServerError(why) = self.raw.call(&words) {
                    self.wrong(format!("the scenario's command is invalid: {why}"));
                }
            }
            Step::Restart { data } => {
                if !data {
                    self.history.forgets();
                }
                self.servers.restart();
                self.raw = self.servers.now().raw();
            }
            Step::Failover => {
                self.servers.fail_over();
                self.switch_server();
            }
            Step::Demote { time } => {
                self.servers.demote();
                // The period in which clients find no primary here.
                thread::sleep(Duration::from_millis(*time));
                self.switch_server();
            }
            Step::Opened { client, at_most } => {
                let count = self.client(client).proxy.flows();
                self.expect(count <= *at_most, || {
                    format!("{client}: {count} connections were opened, at most {at_most} are expected")
                });
            }
            Step::MoveSlot { key } => {
                self.servers.move_slot(key);
                self.switch_server();
            }
            Step::Asked { command, at_most } => {
                let field = format!("cmdstat_{}", command.to_lowercase());
                let calls = self.servers.now().info("commandstats", &field).and_then(|it| calls_of(&it)).unwrap_or(0);
                self.expect(calls <= *at_most, || {
                    format!("{command} was sent {calls} times, at most {at_most} are expected")
                });
            }
            Step::Block { client, time } => {
                let within = Duration::from_millis(*time) + BOUND;
                self.done(client, &Call::Block { time: *time }, "ok", within);
            }
            Step::Runtime { client, is, holds } => {
                holds.iter().for_each(|hold| self.history.ends(client, hold));
                self.done(client, &Call::Runtime { is: *is }, "ok", BOUND);
                holds.iter().for_each(|hold| drop(self.client(client).holds.remove(hold)));
            }
            Step::Close { client } => self.close(client),
            Step::Kill { client } => self.kill(client),
            Step::Quit { client } => self.quit(client),
            Step::Connections { client, at_most } => {
                let time = self.patience();
                // Those that a client has just closed may still be open here.
                let proxy = &self.client(client).proxy;
                let is_so = eventually(time, || proxy.connections() <= *at_most);
                let count = proxy.connections();
                self.expect(is_so, || {
                    format!("{client}: {count} connections are open, at most {at_most} are expected")
                });
            }
            Step::Lost { client, hold, reason, within } => {
                self.lost(client, hold, reason, Duration::from_millis(*within))
            }
            Step::Force { key } => self.end_all("LOCK.FORCE", key),
            Step::Delete { key } => self.end_all("DEL", key),
            Step::Until { key, holders, waiters } => {
                // A server that closes idle connections may have closed this one.
                self.raw = self.servers.now().raw();
                let is_so = eventually(self.patience(), || {
                    self.act_if_reached();
                    let (held, waited) = (self.holders(key).len() as u64, self.waiters(key));
                    holders.is_none_or(|it| it == held) && waiters.is_none_or(|it| it == waited)
                });
                let wanted = format!("holders {holders:?}, waiters {waiters:?}");
                let (held, waited) = (self.holders(key).len(), self.waiters(key));
                self.expect(is_so, || format!("{key}: never {wanted}; at the end {held} and {waited}"));
            }
            Step::Renewed { lease } => self.until_renewed(*lease),
            Step::Superseded { client, requests } => {
                let held_back = superseded::hold_back(&self.client(client).proxy);
                let is_so = eventually(self.patience(), || held_back.load(Ordering::SeqCst) >= *requests);
                let count = held_back.load(Ordering::SeqCst);
                self.expect(is_so, || format!("{client}: never {requests} superseded requests; at the end {count}"));
            }
            Step::Network { client, is } => {
                let counts_messages = self.scenario.positions.is_some();
                let proxy = &self.client(client).proxy;
                match is {
                    Network::Cut => proxy.cut(),
                    Network::Refused => proxy.refuse(),
                    Network::Silent => proxy.silence(),
                    Network::Whole if counts_messages => proxy.accept(),
                    Network::Whole => {
                        proxy.pass();
                        proxy.accept();
                    }
                    Network::Newer => newer::speaks(proxy),
                }
            }
            Step::Pause { client, time, cut, check } => {
                self.pause(client.as_deref(), Duration::from_millis(*time), *cut, check.as_ref());
            }
        }
    }

    fn acquire(&mut self, it: &Acquire) {
        let call =
            Call::Acquire { hold: it.hold.clone(), keys: it.keys.clone(), terms: it.terms.clone(), at: At::default() };
        self.history.asks(&it.client, &it.hold, &it.keys, &it.terms);
        let Some(id) = self.call(&it.client, &call) else { return };
        let wait = it.terms.wait.map_or(Duration::MAX, Duration::from_millis);
        self.client(&it.client).running.insert(it.hold.clone(), (id, wait));
        if it.ends != "later" {
            self.ended(&it.client, &it.hold, (&it.ends, it.at_most), wait.min(SOON).saturating_add(BOUND));
        }
    }

    fn ended(&mut self, client: &str, hold: &str, (ends, at_most): (&str, Option<u64>), within: Duration) {
        let Some((id, _)) = self.client(client).running.get(hold).copied() else {
            return self.expect(false, || format!("{client}: no pending acquisition of {hold}"));
        };
        if self.strict {
            if let Some(outcome) = self.outcome(client, id, within, &format!("acquire {hold}")) {
                let how = describe(&outcome);
                let as_expected = ends.split('|').any(|it| it == outcome.outcome);
                self.expect(as_expected, || format!("{client}: acquire {hold} ended as {how}, not {ends}"));
                let took = self.history.took(client, hold, outcome.at) / 1_000;
                let in_time = at_most.is_none_or(|most| took <= most);
                self.expect(in_time, || format!("{client}: acquire {hold} took {took} ms"));
                self.note_acquired(client, hold, &outcome);
            }
        } else if let Ok(Some(outcome)) = self.outcome_within(client, id, within.min(WITH_A_FAULT)) {
            // With a fault it may still wait; the end of the scenario shows that it ends.
            self.note_acquired(client, hold, &outcome);
        }
    }

    fn note_acquired(&mut self, client: &str, hold: &str, outcome: &Outcome) {
        let (terms, keys) = self.terms_of(client, hold);
        self.history.acquired(client, hold, outcome);
        let of = self.client(client);
        of.running.remove(hold);
        if outcome.outcome == "held" {
            let watched = terms.lease.is_none() || terms.watched;
            let held = DriverHold { keys, fence: outcome.fence.unwrap_or_default(), watched };
            of.holds.insert(hold.to_owned(), held);
            self.report.granted += 1;
        }
    }

    fn terms_of(&self, client: &str, hold: &str) -> (Terms, Vec<String>) {
        let asks = self.scenario.steps.iter().find_map(|step| match step {
            Step::Acquire(it) if it.client == client && it.hold == hold => Some((it.terms.clone(), it.keys.clone())),
            _ => None,
        });
        asks.unwrap_or_default()
    }

    /// A call about a hold.
    fn about(&mut self, it: &scenario::Call, call: Call) {
        if !self.client(&it.client).holds.contains_key(&it.hold) {
            return self.expect(false, || format!("{}: {call:?}: no such hold", it.client));
        }
        let from = clock::now();
        if matches!(call, Call::Release { .. }) {
            self.history.releases(&it.client, &it.hold, from);
        }
        if let Some(id) = self.call(&it.client, &call) {
            self.answered(it, call, (id, from));
        }
    }

    /// The outcome.
    fn answered(&mut self, it: &scenario::Call, call: Call, (id, from): (u64, Micros)) {
        let scenario::Call { client, hold, ends, names } = it;
        let what = format!(
            "{} {hold}",
            match call {
                Call::Release { .. } => "release",
                Call::Renew { .. } => "renew",
                _ => "check",
            }
        );
        let Some(outcome) = self.outcome(client, id, BOUND, &what) else { return };
        let as_expected = ends.split('|').any(|it| {
            let (ended, reason) = it.split_once(' ').unwrap_or((it, ""));
            outcome.outcome == ended && (reason.is_empty() || outcome.reason.as_deref() == Some(reason))
        });
        self.expect(as_expected, || format!("{client}: {what} ended as {}, not {ends}", describe(&outcome)));
        for name in names {
            let name = name.replace("{pid}", &self.client(client).driver.pid().to_string());
            let text = outcome.text.as_deref().unwrap_or_default();
            self.expect(text.contains(&name), || format!("{client}: {what}: \"{text}\" does not name {name}"));
        }
        self.history.about(client, hold, &call, from, &outcome);
        // The client must release whatever a failed release leaves.
        if matches!(call, Call::Release { .. }) || outcome.outcome == "lost" {
            self.client(client).holds.remove(hold);
        }
    }

    fn cancel(&mut self, client: &str, hold: &str) {
        let Some(id) = self.call(client, &Call::Cancel { hold: hold.to_owned() }) else { return };
        self.outcome(client, id, BOUND, "cancel");
    }

    /// The client with the faults cancels all its waits, or drops all its handles, if the message for that was reached.
    fn act_if_reached(&mut self) {
        let Some(name) = self.scenario.positions.clone() else { return };
        if !self.watched.as_ref().is_some_and(Watched::is_reached) {
            return;
        }
        if self.fault.is_some_and(|it| it.kind == Kind::Drop) {
            let holds: Vec<String> = self.client(&name).holds.keys().cloned().collect();
            holds.iter().for_each(|hold| self.drop_hold(&name, hold));
        } else {
            let running: Vec<String> = self.client(&name).running.keys().cloned().collect();
            running.iter().for_each(|hold| self.cancel(&name, hold));
        }
        self.client(&name).proxy.pass();
    }

    fn drop_hold(&mut self, client: &str, hold: &str) {
        self.history.ends(client, hold);
        if let Some(id) = self.call(client, &Call::Drop { hold: hold.to_owned() }) {
            self.outcome(client, id, BOUND, "drop");
            self.client(client).holds.remove(hold);
        }
    }

    fn close(&mut self, client: &str) {
        self.history.all_end(client);
        if let Some(id) = self.call(client, &Call::Close) {
            self.outcome(client, id, BOUND, "close");
        }
        // Every wait was cancelled with it.
        let running: Vec<(String, u64)> =
            self.client(client).running.iter().map(|(hold, (id, _))| (hold.clone(), *id)).collect();
        for (hold, id) in running {
            if let Some(outcome) = self.outcome(client, id, BOUND, &format!("acquire {hold}, after close")) {
                self.history.acquired(client, &hold, &outcome);
            }
        }
        let client = self.client(client);
        client.running.clear();
        client.holds.clear();
    }

    fn lost(&mut self, client: &str, hold: &str, reason: &str, within: Duration) {
        let within = if self.strict { within } else { Duration::ZERO };
        match self.client(client).driver.loss(hold, within) {
            Ok(Some(loss)) => self.expect(reason.split('|').any(|it| it == loss.reason), || {
                format!("{client}: {hold} is lost because {}, not {reason}", loss.reason)
            }),
            Ok(None) => self.expect(false, || format!("{client}: no loss of {hold} after {within:?}")),
            Err(why) => self.wrong(format!("{client}: {why}")),
        }
    }

    fn end_all(&mut self, command: &str, key: &str) {
        let from = clock::now();
        self.raw.call(&[command.as_bytes(), key.as_bytes()]);
        self.history.broken(key, from);
    }

    fn pause(&mut self, client: Option<&str>, time: Duration, cut: bool, check: Option<&scenario::Call>) {
        match client {
            Some(name) => self.client(name).driver.signal(Signal::STOP),
            None => self.servers.now().stop(),
        }
        if cut {
            self.clients.iter().filter(|it| client.is_none_or(|name| name == it.name)).for_each(|it| it.proxy.cut());
        }
        // The duration of the pause.
        thread::sleep(time);
        let asked = check.and_then(|it| {
            let (call, from) = (Call::Check { hold: it.hold.clone() }, clock::now());
            Some((it, self.call(&it.client, &call)?, from))
        });
        match client {
            Some(name) => self.client(name).driver.signal(Signal::CONT),
            None => self.servers.now().cont(),
        }
        if let Some((it, id, from)) = asked {
            self.answered(it, Call::Check { hold: it.hold.clone() }, (id, from));
        }
    }

    /// Waits until all locks of the scenario have been renewed within a tenth of their lease, after two fifths of it at
    /// most. So the next step begins with nearly a whole lease, even on a busy machine.
    fn until_renewed(&mut self, lease: u64) {
        self.raw = self.servers.now().raw();
        let keys: BTreeSet<&str> = self.scenario.keys().collect();
        let info: Vec<[&str; 2]> = keys.into_iter().map(|key| ["LOCK.INFO", key]).collect();
        // The end of the lease that ends first, before its renewal.
        let mut end = None;
        let mut left = 0;
        let is_so = eventually(self.patience(), || {
            let asked = clock::now() / 1_000;
            left = self.raw.call_all(&info).iter().map(time_left).min().unwrap_or_default();
            let answered = clock::now() / 1_000;
            if left < lease * 9 / 10 {
                end = Some(asked + left);
                return false;
            }
            end.is_some_and(|it| answered + left <= it + lease * 2 / 5)
        });
        self.expect(is_so, || format!("not all locks are renewed in time; one has {left} ms left"));
    }

    /// Switches to the server that has the locks now.
    fn switch_server(&mut self) {
        let server = self.servers.now();
        self.clients.iter().for_each(|it| it.proxy.redirect_to(server.addr()));
        self.raw = server.raw();
    }

    /// An action of the program around a client, which is always possible.
    fn done(&mut self, client: &str, call: &Call, ends: &str, within: Duration) {
        if let Some(id) = self.call(client, call)
            && let Some(outcome) = self.outcome(client, id, within, &format!("{call:?}"))
            && outcome.outcome != ends
        {
            self.wrong(format!("{client}: {call:?}: {}", describe(&outcome)));
        }
    }

    fn holders(&mut self, key: &str) -> Vec<u64> {
        holders(&mut self.raw, key)
    }

    fn waiters(&mut self, key: &str) -> u64 {
        match field(&self.raw.call(&[b"LOCK.INFO", key.as_bytes()]), "waiters") {
            Some(Value::Int(count)) => u64::try_from(*count).unwrap_or_default(),
            _ => 0,
        }
    }

    /// The end of every scenario. The drivers' holds are those of the server; all calls end. After all releases, no
    /// lock is held or waited for beyond the drivers' holds; after all clients have ended, nothing is left; the history
    /// can be explained.
    fn finish(&mut self) {
        for client in &self.clients {
            client.proxy.accept();
        }
        if self.strict && self.report.faults.is_empty() {
            self.compare();
        }
        // With a fault, endless waits are cancelled, and the others time out.
        self.running_clients().iter().for_each(|name| self.release_all(name));
        // Silent connections stay silent, for the client to notice. All other faults end.
        if self.fault.is_none_or(|it| it.kind != Kind::Swallow) {
            self.clients.iter().for_each(|it| it.proxy.pass());
        }
        if let Some(left) = left::after(CLEAN, Moment::Free, &self.servers.all()) {
            self.wrong(left);
        }
        self.check_recovery();
        let closed = self.running_clients();
        closed.iter().for_each(|name| if self.closes { self.close(name) } else { self.kill(name) });
        self.clients.iter().for_each(|it| it.proxy.pass());
        if let Some(left) = left::after(CLEAN, Moment::Ended, &self.servers.all()) {
            self.wrong(left);
        }
        for name in closed {
            let proxy = &self.client(&name).proxy;
            if !eventually(CLEAN, || proxy.connections() == 0) {
                let left = proxy.connections();
                self.wrong(format!("{name}: {left} connections are open {CLEAN:?} after it was closed"));
            }
            self.count_threads(&name);
        }
        for index in 0..self.clients.len() {
            let client = &mut self.clients[index];
            let _ = client.driver.read();
            for loss in std::mem::take(&mut client.driver.losses) {
                self.history.lost(&client.name, &loss);
            }
        }
        if let Err(violation) = self.history.verify() {
            self.wrong(format!("the history can't be explained: {violation}"));
        }
    }

    /// A closed client has left no thread and no task, in this scenario or an earlier one of its program.
    fn count_threads(&mut self, name: &str) {
        // A callback that never returns is the program's own fault, and keeps its thread.
        let blocks = |it: &Step| matches!(it, Step::Acquire(it) if it.terms.callback == Some(Callback::Blocks));
        if self.scenario.steps.iter().any(blocks) {
            return self.kill(name);
        }
        if self.client(name).killed {
            return;
        }
        let driver = &mut self.client(name).driver;
        let mut left = Ok(None);
        eventually(CLEAN, || {
            left = driver.threads_left();
            !matches!(left, Ok(Some(_)))
        });
        match left {
            Ok(None) => {}
            Ok(Some(left)) => {
                self.wrong(format!("{name}: {left} threads more than at first {CLEAN:?} after it was closed"))
            }
            Err(why) => self.wrong(format!("{name}: {why}")),
        }
    }

    /// The client recovers from any fault: it can acquire a lock, and release it.
    fn check_recovery(&mut self) {
        let Some(name) = self.scenario.positions.clone().filter(|_| self.fault.is_some()) else { return };
        if self.client(&name).killed {
            return;
        }
        let end = clock::after(CLEAN + BOUND);
        for attempt in 0.. {
            let (hold, keys) = (format!("afterwards {attempt}"), vec!["afterwards".to_owned()]);
            let terms = Terms { wait: Some(5_000), ..Terms::default() };
            let acquire = Call::Acquire { hold: hold.clone(), keys, terms, at: At::default() };
            let Some(id) = self.call(&name, &acquire) else { return };
            let Some(outcome) = self.outcome(&name, id, BOUND, "acquire, afterwards") else { return };
            if outcome.outcome == "held" {
                // The fault may be at one of these messages: then the call fails, and all is released all the same.
                if let Some(id) = self.call(&name, &Call::Release { hold }) {
                    self.outcome(&name, id, BOUND, "release, afterwards");
                }
                return;
            }
            if clock::left(end).is_zero() {
                return self.wrong(format!("{name}: it acquires no lock afterwards: {}", describe(&outcome)));
            }
        }
    }

    /// The drivers' holds are those of the server.
    fn compare(&mut self) {
        self.raw = self.servers.now().raw();
        let keys: BTreeSet<&str> = self.scenario.keys().collect();
        for key in keys {
            let (mut counted, mut held) = (Vec::new(), Vec::new());
            let is_so = eventually(SOON, || {
                counted = self.clients.iter_mut().flat_map(|it| it.counts(key)).collect();
                held = self.holders(key);
                counted.iter().all(|it| held.contains(it))
            });
            self.expect(is_so, || format!("{key}: the clients report {counted:?}, the server {held:?}"));
        }
    }

    fn running_clients(&self) -> Vec<String> {
        self.clients.iter().filter(|it| !it.killed).map(|it| it.name.clone()).collect()
    }

    /// A client cancels its waits and releases its holds.
    fn release_all(&mut self, name: &str) {
        let running: Vec<(String, u64, Duration)> =
            self.client(name).running.iter().map(|(hold, (id, wait))| (hold.clone(), *id, *wait)).collect();
        let waits_for_ever = running.iter().any(|(.., wait)| *wait == Duration::MAX);
        if waits_for_ever && !self.cancels {
            return self.kill(name);
        }
        for (hold, id, wait) in running {
            if wait == Duration::MAX {
                self.cancel(name, &hold);
            }
            let within = if wait == Duration::MAX { BOUND } else { wait.saturating_add(BOUND) };
            if let Some(outcome) = self.outcome(name, id, within, &format!("acquire {hold}")) {
                self.note_acquired(name, &hold, &outcome);
            }
        }
        let holds: Vec<String> = self.client(name).holds.keys().cloned().collect();
        for hold in holds {
            let call = Call::Release { hold: hold.clone() };
            let from = clock::now();
            let Some(id) = self.call(name, &call) else { return };
            if let Some(outcome) = self.outcome(name, id, BOUND, &format!("release {hold}, at the end")) {
                self.history.about(name, &hold, &call, from, &outcome);
            }
        }
        self.client(name).holds.clear();
    }

    fn quit(&mut self, name: &str) {
        self.history.all_end(name);
        if !self.client(name).driver.quit(SOON) {
            self.wrong(format!("{name}: its program has not ended after {SOON:?}"));
        }
        self.kill(name);
    }

    fn kill(&mut self, name: &str) {
        self.history.all_end(name);
        let client = self.client(name);
        // Earlier reports count.
        let _ = client.driver.read();
        client.driver.kill();
        client.killed = true;
        client.holds.clear();
        client.running.clear();
    }
}

/// The tokens of a lock's holders, according to the server.
pub fn holders(raw: &mut Raw, key: &str) -> Vec<u64> {
    shown_holders(raw, key).iter().map(token).collect()
}

/// Whether the hold of this token is bound to a connection, according to the server.
pub fn is_bound(raw: &mut Raw, key: &str, of: u64) -> bool {
    let holders = shown_holders(raw, key);
    let holder = holders.iter().find(|holder| token(holder) == of);
    holder.is_some_and(|holder| matches!(field(holder, "client"), Some(Value::Int(_))))
}

fn shown_holders(raw: &mut Raw, key: &str) -> Vec<Value> {
    match field(&raw.call(&[b"LOCK.INFO", key.as_bytes()]), "holders") {
        Some(Value::Array(holders)) => holders.clone(),
        _ => Vec::new(),
    }
}

fn token(holder: &Value) -> u64 {
    match field(holder, "token") {
        Some(Value::Int(token)) => u64::try_from(*token).unwrap_or_default(),
        _ => 0,
    }
}

/// What is left of a lock's lease in ms, according to the server; 0: it is free.
fn time_left(info: &Value) -> u64 {
    match field(info, "ttl") {
        Some(Value::Int(left)) => u64::try_from(*left).unwrap_or_default(),
        _ => 0,
    }
}

/// How often a command was called, according to `INFO commandstats`.
fn calls_of(statistics: &str) -> Option<u64> {
    statistics.split(',').find_map(|it| it.strip_prefix("calls=")?.parse().ok())
}

fn describe(outcome: &Outcome) -> String {
    let more = [outcome.reason.as_deref(), outcome.text.as_deref()];
    let more: Vec<&str> = more.into_iter().flatten().collect();
    format!("{} {}", outcome.outcome, more.join(" ")).trim().to_owned()
}

fn field<'a>(map: &'a Value, name: &str) -> Option<&'a Value> {
    let is_named = |key: &Value| {
        matches!(key, Value::BulkString(it) if it == name.as_bytes())
            || matches!(key, Value::SimpleString(it) if it == name)
    };
    match map {
        Value::Array(elements) => elements.as_chunks::<2>().0.iter().find(|it| is_named(&it[0])).map(|it| &it[1]),
        Value::Map(pairs) => pairs.iter().find(|(key, _)| is_named(key)).map(|(_, value)| value),
        _ => None,
    }
}
