//! Sums over the batches of a scenario, and its row in the table.

use std::collections::BTreeMap;

use crate::checker::Verdict;
use crate::engine::LabError;
use crate::history::{Assurance, History, Micros, Outcome};
use crate::report::Row;
use crate::session::field;

/// How many violations are printed in full. All are counted.
const SHOWN: u64 = 20;

/// The results of a scenario so far.
#[derive(Debug, Default)]
pub struct Tally {
    /// Batches: a load, some faults, a check.
    pub runs: u64,
    /// Faults injected.
    pub faults: u64,
    /// Slots moved.
    pub moves: u64,
    requests: u64,
    failed: u64,
    violations: u64,
    took: Vec<Micros>,
    grants: BTreeMap<Assurance, u64>,
    doubles: BTreeMap<Assurance, u64>,
    writes_refused: u64,
    writes_taken: u64,
    bound: u64,
    notified: u64,
    notified_within: Option<Micros>,
    broken: bool,
}

impl Tally {
    /// Adds a failover that took this long.
    pub fn failover(&mut self, took: Micros) {
        self.faults += 1;
        self.took.push(took);
    }

    /// Adds a checked batch.
    pub fn add(&mut self, history: &History, verdict: Verdict) {
        self.runs += 1;
        self.requests += history.requests.len() as u64;
        self.failed += history
            .requests
            .iter()
            .filter(|request| matches!(request.outcome, Outcome::Failed | Outcome::Unanswered))
            .count() as u64;
        for violation in &verdict.violations {
            self.violation(&violation.to_string());
        }
        if !verdict.violations.is_empty() {
            let spans: Vec<String> = history.all_faults().map(|it| format!("{} to {}", it.from, it.until)).collect();
            eprintln!("The faults of that run, in µs: {}", spans.join(", "));
        }
        add(&mut self.grants, &verdict.grants);
        add(&mut self.doubles, &verdict.doubles);
        self.writes_refused += verdict.writes_refused;
        self.writes_taken += verdict.writes_taken;
        self.bound += verdict.bound;
        self.notified += verdict.notified;
        self.notified_within = self.notified_within.max(verdict.notified_within);
    }

    /// Adds a violation.
    pub fn violation(&mut self, what: &str) {
        self.violations += 1;
        if self.violations <= SHOWN {
            eprintln!("VIOLATION: {what}");
        }
    }

    /// The scenario could not continue, which counts as a violation.
    pub fn broke_off(&mut self, why: &LabError, crashes: Vec<String>) {
        self.violation(&format!("broke off: {why}"));
        self.broken = true;
        self.crashes(crashes);
    }

    /// Adds lines of servers' logs that report a crash.
    pub fn crashes(&mut self, lines: Vec<String>) {
        for line in lines {
            self.violation(&format!("server's log: {line}"));
        }
    }

    /// Checks `INFO holdfast` of servers without clients: no request may wait or be confirmed there.
    pub fn left_waiting(&mut self, infos: &[String]) {
        for info in infos {
            for name in ["holdfast_waiters", "holdfast_confirming", "holdfast_internal_errors"] {
                if field(info, name).is_some_and(|value| value != "0") {
                    self.violation(&format!("left over: {}", info.replace("\r\n", " ")));
                }
            }
        }
    }

    /// The results that have no column, as text.
    pub fn summary(&self) -> String {
        let mut parts = Vec::new();
        for (assurance, name) in NAMES {
            if let Some(grants) = self.grants.get(&assurance) {
                let doubles = self.doubles.get(&assurance).unwrap_or(&0);
                parts.push(format!("{doubles} double holds of {grants} {name}"));
            }
        }
        if let Some(median) = median(&self.took) {
            parts.push(format!("failover {:.1} s (median)", median as f64 / 1e6));
        }
        if self.moves > 0 {
            parts.push(format!("{} slots moved", self.moves));
        }
        parts.push(format!(
            "store refused {} late writes of {}",
            self.writes_refused,
            self.writes_refused + self.writes_taken
        ));
        if self.bound > 0 {
            parts.push(format!("{} losses of {} bound holds notified", self.notified, self.bound));
        }
        if let Some(within) = self.notified_within {
            parts.push(format!("a force notified within {} ms", within.div_ceil(1_000)));
        }
        parts.push(format!("{} requests met an error", self.failed));
        if self.broken {
            parts.push("BROKE OFF".to_owned());
        }
        parts.join("; ")
    }

    /// The row for the table.
    pub fn row(&self, scenario: &str) -> Row {
        Row {
            scenario: scenario.to_owned(),
            runs: self.runs,
            faults: self.faults + self.moves,
            requests: self.requests,
            violations: self.violations,
            note: self.summary(),
        }
    }
}

const NAMES: [(Assurance, &str); 4] = [
    (Assurance::Plain, "plain grants"),
    (Assurance::Confirmed, "grants confirmed by WAIT 1"),
    (Assurance::Unconfirmed, "grants that WAIT 1 did not confirm"),
    (Assurance::Replicas, "grants with REPLICAS"),
];

fn add(to: &mut BTreeMap<Assurance, u64>, from: &BTreeMap<Assurance, u64>) {
    for (assurance, count) in from {
        *to.entry(*assurance).or_default() += count;
    }
}

fn median(values: &[Micros]) -> Option<Micros> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied()
}
