//! One server: killed, shut down, reloaded, rewritten, replicated, without its module for a while, out of memory, with clock
//! steps. `docs/guarantees.md` says what happens to leases and tokens.

mod clients;
mod clock_steps;
mod faults;
mod lines;
mod memory;
mod stepped;
mod witness;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use support::{Builder, Server, eventually};

use crate::checker::check;
use crate::clock::{micros, now};
use crate::history::{Assurance, Fault, History, Probe};
use crate::operations;
use crate::options::Options;
use crate::report::Row;
use clients::{CLIENTS, Record, Shared, work};
use faults::Injector;
pub use stepped::{SteppedClock, TempDir};
use witness::Witness;

/// The longest lease of the clients, with an allowance for a busy machine.
const LEASE_IS_OVER: Duration = Duration::from_secs(4);
/// After a fault, clients must get locks again within this time.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(15);
/// How many violations of a row are printed in full.
const SHOWN_VIOLATIONS: usize = 5;

/// One fault, repeated while clients run.
pub struct Trial {
    name: &'static str,
    server: fn() -> Builder,
    /// Whether the settings allow the fault to lose acknowledged writes. Losses are then reported, and not violations.
    may_lose: bool,
    injector: fn(&Server) -> Box<dyn Injector>,
}

/// Runs every fault for its share of the time.
pub fn run(options: &Options) -> Vec<Row> {
    let trials = faults::trials();
    let each = options.budget / (trials.len() as u32 + 1);
    let mut rows: Vec<Row> = trials.iter().map(|trial| guarded(trial.name, || trial.run(each, options.seed))).collect();
    rows.push(guarded("memory limit reached", memory::run));
    rows
}

/// Runs the clock steps, once each.
pub fn run_clock(_: &Options) -> Vec<Row> {
    clock_steps::run()
}

/// The support crate panics if a server does not start, so a panic counts as a violation.
fn guarded(name: &str, scenario: impl FnOnce() -> Row + std::panic::UnwindSafe) -> Row {
    std::panic::catch_unwind(scenario).unwrap_or_else(|_| Row::not_run(name, "it panicked; see above"))
}

impl Trial {
    fn run(&self, budget: Duration, seed: u64) -> Row {
        let end = Instant::now() + budget;
        let mut server = (self.server)().start();
        let mut injector = (self.injector)(&server);
        let shared = Shared {
            address: server.addr(),
            over: AtomicBool::new(false),
            no_waits: AtomicBool::new(false),
            grants: AtomicU64::new(0),
            may_lose: self.may_lose,
        };
        let mut log = Log::default();
        let mut rng = Rng::with_seed(seed);
        let records: Vec<Record> = thread::scope(|scope| {
            let workers: Vec<_> = (0..CLIENTS)
                .map(|number| {
                    let shared = &shared;
                    scope.spawn(move || work(shared, number, seed * 100 + number))
                })
                .collect();
            while Instant::now() < end && log.wrong.is_empty() {
                thread::sleep(Duration::from_millis(rng.u64(50..400)));
                self.fault(&mut server, injector.as_mut(), &shared, &mut log);
            }
            shared.over.store(true, Ordering::Relaxed);
            workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
        });
        if let Err(why) = injector.at_the_end(&server) {
            log.wrong.push(why);
        }
        let probes = probe(&server);
        self.summarize(records, log, probes)
    }

    /// One fault, with locks of every layout held throughout.
    fn fault(&self, server: &mut Server, injector: &mut dyn Injector, shared: &Shared, log: &mut Log) {
        let name = format!("witness:{}", log.faults.len());
        let witness = match Witness::take(&name, &mut server.connect()) {
            Ok(witness) => witness,
            Err(error) => {
                return log.wrong.push(format!("before fault {}: {error}", log.faults.len()));
            }
        };
        let from = now();
        if let Err(why) = injector.inject(server, shared) {
            log.wrong.push(why);
        }
        let differences = witness.differences(&mut server.connect()).unwrap_or_else(|error| vec![error.to_string()]);
        log.witnesses += 1;
        if self.may_lose {
            log.witnesses_lost += u64::from(!differences.is_empty());
        } else {
            log.wrong.extend(differences);
        }
        let before = shared.grants.load(Ordering::Relaxed);
        let back = eventually(RECOVERY_TIMEOUT, || shared.grants.load(Ordering::Relaxed) > before + CLIENTS);
        if !back {
            log.wrong.push(format!("clients got no more locks after fault {}", log.faults.len()));
        }
        log.faults.push(Fault { from, until: now() });
        if let Err(error) = witness.release(&mut server.connect()) {
            log.wrong.push(error.to_string());
        }
    }

    fn summarize(&self, records: Vec<Record>, log: Log, probes: Vec<Probe>) -> Row {
        let mut wrong = log.wrong;
        if records.len() as u64 != CLIENTS {
            wrong.push("a client panicked".into());
        }
        let mut row = Row { scenario: self.name.into(), runs: 1, faults: log.faults.len() as u64, ..Row::default() };
        let mut history = History { faults: log.faults, probes, ..History::default() };
        let mut lost = 0;
        for record in records {
            row.requests += record.requests;
            lost += record.lost;
            wrong.extend(record.odd);
            history.add(record.events);
        }
        operations::keep(&history, &format!("{}{}", if self.may_lose { "" } else { "nothing lost, " }, self.name));
        let verdict = check(&history);
        wrong.extend(verdict.violations.iter().map(ToString::to_string));
        // The checkers of histories; afterwards, `scripts/lab` runs porcupine. If nothing may be lost, the server is
        // one lock service for them, whatever the faults.
        if !self.may_lose {
            let seen = operations::operations(&history);
            if let Err(why) = histories::intervals::check(&seen).and_then(|()| histories::check(&seen)) {
                wrong.push(why.to_string());
            }
        }
        if lost > 0 && !self.may_lose {
            wrong.push(format!("{lost} holds were lost within their leases"));
        }
        for what in wrong.iter().take(SHOWN_VIOLATIONS) {
            eprintln!("{}: {what}", self.name);
        }
        row.violations = wrong.len() as u64;
        row.note = self.note(
            verdict.grants(Assurance::Plain),
            lost,
            verdict.doubles(Assurance::Plain),
            log.witnesses,
            log.witnesses_lost,
        );
        row
    }

    fn note(&self, grants: u64, lost: u64, doubles: u64, witnesses: u64, witnesses_lost: u64) -> String {
        if self.may_lose {
            format!(
                "{grants} grants, {lost} lost, {doubles} double holds; {witnesses_lost} of {witnesses} faults lost older locks"
            )
        } else {
            format!("{grants} grants, none lost, every deadline and token kept")
        }
    }
}

#[derive(Default)]
struct Log {
    faults: Vec<Fault>,
    wrong: Vec<String>,
    witnesses: u64,
    witnesses_lost: u64,
}

/// All clients have stopped: each lock must be acquired within the rest of the last lease.
fn probe(server: &Server) -> Vec<Probe> {
    let mut connection = server.connect();
    clients::locks()
        .into_iter()
        .map(|(key, _)| {
            let due = now() + micros(LEASE_IS_OVER);
            let token: Option<u64> = redis::cmd("LOCK.ACQUIRE")
                .arg(&key)
                .arg("the last one")
                .arg("WAIT")
                .arg(LEASE_IS_OVER.as_millis() as u64)
                .query(&mut connection)
                .unwrap_or(None);
            Probe { key, due, had: token.map(|_| now()) }
        })
        .collect()
}
