//! 7. The longest event-loop iteration: how long another client's `PING` takes while the module does the most that a client can cause.
//!
//! Each state is built on its own server, as 10,000 connections can build it.

mod pinger;
mod stage;
mod states;

use std::time::Instant;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;

use crate::figures::micros;
use crate::report::{Findings, Goal, Table};
use crate::server::{Program, Running, With};
use crate::settings::{Scale, Settings};
use crate::stats::Spread;
use pinger::{Longest, Pinger};
use stage::{Size, Stage};
use states::{IDLE, Scenario};

/// The limit for an iteration, in milliseconds.
const BOUND: f64 = 5.0;
/// The limit for the delay of the last of many timeouts, in milliseconds.
const DELAY_BOUND: f64 = 100.0;

/// The cost of a state in microseconds, and the reply to the step in the last round.
#[derive(Clone, Serialize)]
struct Cost {
    /// The longest `PING` of each round.
    ping_us: Spread,
    /// The most processor time that the server used during one `PING` of each round.
    server_us: Spread,
    /// How late the effects of the step were complete, if the state has a time for that.
    delay_ms: Option<Spread>,
    reply: String,
}

/// A line of the result.
#[derive(Serialize)]
struct Row {
    server: String,
    state: String,
    /// Whether the state has a goal of its own.
    is_judged: bool,
    module: Cost,
    plain: Option<(String, Cost)>,
}

/// Measures on each server.
pub fn run(settings: &Settings, programs: &[Program]) -> Result<Findings> {
    let mut rows = Vec::new();
    for program in programs {
        rows.extend(measure(&settings.scale, program).with_context(|| program.label.clone())?);
    }
    let by_server = || rows.chunk_by(|a: &Row, b: &Row| a.server == b.server);
    Ok(Findings {
        section: "worst",
        tables: by_server().map(|rows| table(&settings.scale, rows)).collect(),
        goals: by_server().flat_map(goals).collect(),
        plots: vec![],
        data: json!({ "rounds": settings.scale.worst_rounds, "rows": rows }),
    })
}

fn measure(scale: &Scale, program: &Program) -> Result<Vec<Row>> {
    let with = |with: With, scenario: Scenario| cost(scale, program, with, scenario);
    let idle = (with(With::Module, IDLE)?, with(With::Nothing, IDLE)?);
    let mut rows = vec![row(program, ("nothing", false), idle.0, Some(("nothing", idle.1)))];
    for state in states::all() {
        // The section takes minutes, and the durations of the states differ widely.
        eprintln!("  {}: {}", program.label, state.name);
        let module = with(With::Module, state.module).context(state.name)?;
        let plain = match state.plain {
            Some((name, scenario)) => Some((name, with(With::Nothing, scenario).context(name)?)),
            None => None,
        };
        rows.push(row(program, (state.name, state.is_judged), module, plain));
    }
    Ok(rows)
}

fn row(program: &Program, (state, is_judged): (&str, bool), module: Cost, plain: Option<(&str, Cost)>) -> Row {
    let plain = plain.map(|(name, cost)| (name.to_owned(), cost));
    Row { server: program.label.clone(), state: state.to_owned(), is_judged, module, plain }
}

fn cost(scale: &Scale, program: &Program, with: With, scenario: Scenario) -> Result<Cost> {
    let size = if scale.judged { Size::FULL } else { Size::QUICK };
    let (mut longest, mut delays) = (Vec::new(), Vec::new());
    let mut reply = String::new();
    for _ in 0..scale.worst_rounds {
        let mut stage = Stage::new(Running::start(program, with)?, size);
        let (one, reply_text) = round(&mut stage, scenario)?;
        longest.push(one);
        delays.extend(stage.delay.map(|delay| delay.as_secs_f64() * 1e3));
        reply = reply_text;
    }
    let spread = |of: fn(&Longest) -> f64| Spread::of(&longest.iter().map(of).collect::<Vec<_>>());
    let delay_ms = (!delays.is_empty()).then(|| Spread::of(&delays));
    Ok(Cost { ping_us: spread(|one| one.took), server_us: spread(|one| one.server), delay_ms, reply })
}

fn round(stage: &mut Stage, scenario: Scenario) -> Result<(Longest, String)> {
    (scenario.build)(stage)?;
    let pinger = Pinger::start(stage.server.port(), stage.server.server.pid())?;
    let begin = Instant::now();
    let reply = (scenario.step)(stage)?;
    stage.wait_for_aftermath();
    Ok((pinger.longest(begin, Instant::now())?, reply))
}

/// The longest iteration of all, that of each state which is judged, and the delays.
fn goals(rows: &[Row]) -> Vec<Goal> {
    let worst = rows.iter().max_by(|a, b| a.module.server_us.median.total_cmp(&b.module.server_us.median));
    let step = |what: &str, row: &Row| {
        let Spread { median, min, max } = row.module.server_us;
        let [median, min, max] = [median, min, max].map(|time| time / 1e3);
        let what = format!("{what}, ms of the server's time: {} ({})", row.state, row.server);
        Goal::at_most(what, BOUND, Spread { median, min, max })
    };
    let judged = rows.iter().filter(|row| row.is_judged).map(|row| step("a step", row));
    let delays = rows.iter().filter_map(|row| {
        let what = format!("ms until all is over: {} ({})", row.state, row.server);
        Some(Goal::at_most(what, DELAY_BOUND, row.module.delay_ms?))
    });
    worst.map(|row| step("longest step", row)).into_iter().chain(judged).chain(delays).collect()
}

fn table(scale: &Scale, rows: &[Row]) -> Table {
    let title = rows.first().map_or_else(String::new, |row| format!("Worst step: {}", row.server));
    let size = if scale.judged { Size::FULL } else { Size::QUICK };
    let note = format!(
        "The longest PING of a second client during the step, and the most processor time that the server used while one \
         PING waited: medians of the rounds' maxima ({}). Many clients are {} connections, many keys 128, many holders or locks {}, \
         or fewer where the server has a limit.",
        scale.worst_rounds, size.clients, size.many
    );
    let columns =
        ["state, and what is done then", "PING", "server's time", "without the module", "PING", "server's time"];
    let mut table = Table::new(title, note, &columns);
    for row in rows {
        let none = || "-".to_owned();
        let plain = row.plain.as_ref();
        table.row(vec![
            row.state.clone(),
            micros(row.module.ping_us.median),
            micros(row.module.server_us.median),
            plain.map_or_else(none, |(name, _)| name.clone()),
            plain.map_or_else(none, |(_, cost)| micros(cost.ping_us.median)),
            plain.map_or_else(none, |(_, cost)| micros(cost.server_us.median)),
        ]);
    }
    table
}
