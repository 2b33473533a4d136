//! 8. Sessions: the server's cost of a waiting request, and of a hand-off with an event.

mod busy;
mod memory;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;

use crate::contenders::{Contender, Holdfast, List, Redisson, Session};
use crate::figures::{micros, ratio, whole};
use crate::handoff::{self, Round};
use crate::report::{Findings, Goal, Table};
use crate::server::{Program, Running, With};
use crate::settings::{Scale, Settings};
use crate::stats::Spread;
use memory::SESSIONS;

/// Waiters of the one lock.
const WAITERS: [usize; 3] = [1, 10, 1_000];

/// A scenario of hand-offs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Scenario {
    /// One lock among this many waiters and a holder, each with its own session.
    OneLock(usize),
    /// Many locks among the tasks of ten processes.
    Busy,
}

impl Scenario {
    fn all() -> impl Iterator<Item = Self> {
        WAITERS.into_iter().map(Self::OneLock).chain([Self::Busy])
    }

    fn name(self) -> String {
        match self {
            Self::OneLock(1) => "one lock, one waiter with a session of its own".into(),
            Self::OneLock(waiters) => format!("one lock, {} waiters, a session for each", whole(waiters as f64)),
            Self::Busy => format!(
                "{} locks, {} requests over {} sessions, or connections",
                busy::LOCKS,
                whole(busy::TASKS as f64),
                busy::PROCESSES
            ),
        }
    }

    /// The limit on the CPU of a hand-off, as a ratio to `BLPOP`+`LPUSH`.
    fn most_cpu(self) -> f64 {
        match self {
            Self::OneLock(_) => 1.4,
            Self::Busy => 0.5,
        }
    }

    fn round(self, server: &mut Running, contender: Box<dyn Contender>, scale: &Scale) -> Result<Round> {
        match self {
            Self::OneLock(waiters) => handoff::round(server, contender, waiters, scale),
            Self::Busy => busy::round(server, contender, scale),
        }
    }
}

/// A line of the result.
#[derive(Serialize)]
struct Row {
    server: String,
    scenario: Scenario,
    name: String,
    per_second: Spread,
    p50_us: Spread,
    p99_us: Spread,
    /// Microseconds of the server's main thread for a hand-off.
    cpu_us: Spread,
    cpu_over_floor: Option<Spread>,
    p99_over_floor: Option<Spread>,
}

/// Measures on each server.
pub fn run(settings: &Settings, programs: &[Program]) -> Result<Findings> {
    let (mut memory, mut rows) = (Vec::new(), Vec::new());
    let mut scale = settings.scale.clone();
    // A round ends when every client had three grants, or after this time.
    scale.handoff_least = scale.session_window;
    scale.handoff_most = scale.session_window * 2;
    for program in programs {
        memory.extend(memory::measure(&scale, program).with_context(|| program.label.clone())?);
        for scenario in Scenario::all() {
            rows.extend(
                measure(&scale, program, scenario)
                    .with_context(|| format!("{}, {}", program.label, scenario.name()))?,
            );
        }
    }
    let tables = rows.chunk_by(|a, b| a.server == b.server && a.scenario == b.scenario).map(table);
    Ok(Findings {
        section: "sessions",
        tables: std::iter::once(memory_table(&memory)).chain(tables).collect(),
        goals: memory.iter().filter_map(memory::goal).chain(rows.iter().flat_map(goals)).collect(),
        plots: vec![],
        data: json!({ "rounds": scale.session_rounds, "memory": memory, "rows": rows }),
    })
}

fn measure(scale: &Scale, program: &Program, scenario: Scenario) -> Result<Vec<Row>> {
    let mut server = Running::start(program, With::Module)?;
    let mut rounds: Vec<(&str, Vec<Round>)> = Vec::new();
    for round in 0..scale.session_rounds {
        let mut contenders: Vec<Box<dyn Contender>> = vec![
            Box::new(List),
            Box::new(Session),
            Box::new(Holdfast::PLAIN),
            Box::new(Redisson::load(&mut server.control)?),
        ];
        if round == 0 {
            rounds = contenders.iter().map(|contender| (contender.name(), Vec::new())).collect();
        }
        let first = round % contenders.len();
        contenders.rotate_left(first);
        for contender in contenders {
            let name = contender.name();
            let measured = scenario.round(&mut server, contender, scale).context(name)?;
            rounds.iter_mut().filter(|(of, _)| *of == name).for_each(|(_, rounds)| rounds.push(measured.clone()));
            server.clear()?;
        }
    }
    let floor =
        rounds.iter().find(|(name, _)| *name == List::NAME).map(|(_, rounds)| rounds.clone()).unwrap_or_default();
    Ok(rounds.iter().map(|(name, rounds)| row(program, scenario, name, rounds, &floor)).collect())
}

fn row(program: &Program, scenario: Scenario, name: &str, rounds: &[Round], floor: &[Round]) -> Row {
    let all = |rounds: &[Round], of: fn(&Round) -> f64| rounds.iter().map(of).collect::<Vec<_>>();
    let spread = |of: fn(&Round) -> f64| Spread::of(&all(rounds, of));
    let over =
        |of: fn(&Round) -> f64| (name != List::NAME).then(|| Spread::of_ratios(&all(rounds, of), &all(floor, of)));
    Row {
        server: program.label.clone(),
        scenario,
        name: name.to_owned(),
        per_second: spread(|r| r.per_second),
        p50_us: spread(|r| r.times.p50),
        p99_us: spread(|r| r.times.p99),
        cpu_us: spread(|r| r.cpu_us),
        cpu_over_floor: over(|r| r.cpu_us),
        p99_over_floor: over(|r| r.times.p99),
    }
}

fn goals(row: &Row) -> Vec<Goal> {
    if row.name != Session::NAME {
        return Vec::new();
    }
    let goal = |what: &str, most, measured: Option<Spread>| {
        let what = format!("{what} of a hand-off, sessions / {}: {} ({})", List::NAME, row.scenario.name(), row.server);
        measured.map(|measured| Goal::at_most(what, most, measured))
    };
    let cpu = goal("CPU", row.scenario.most_cpu(), row.cpu_over_floor);
    let p99 = if row.scenario == Scenario::Busy { goal("p99", 1.0, row.p99_over_floor) } else { None };
    cpu.into_iter().chain(p99).collect()
}

fn memory_table(rows: &[memory::Row]) -> Table {
    let note = format!(
        "Growth of the server's `used_memory` for one request that waits; owners of 40 bytes. Those of sessions are over \
         {SESSIONS} sessions, each of which reads its events."
    );
    let mut table = Table::new("A request that waits", note, &["who", "count", "bytes for one"]);
    for row in rows {
        table.row(vec![format!("{} ({})", row.name, row.server), whole(row.count as f64), whole(row.bytes)]);
    }
    table
}

fn table(rows: &[Row]) -> Table {
    let title =
        rows.first().map_or_else(String::new, |row| format!("Sessions: {}, {}", row.server, row.scenario.name()));
    let columns = ["who", "per s", "p50", "p99", "server CPU", "p99 / floor", "CPU / floor"];
    let mut table = Table::new(title, "", &columns);
    for row in rows {
        let over = |spread: &Option<Spread>| spread.as_ref().map_or_else(|| "1".to_owned(), ratio);
        table.row(vec![
            row.name.clone(),
            whole(row.per_second.median),
            micros(row.p50_us.median),
            micros(row.p99_us.median),
            micros(row.cpu_us.median),
            over(&row.p99_over_floor),
            over(&row.cpu_over_floor),
        ]);
    }
    table
}
