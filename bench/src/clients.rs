//! 9. The Rust client, compared with the same commands sent by hand, and with a client that polls.

mod overhead;
mod tasks;

use anyhow::{Context, Result};
use serde_json::json;

use crate::figures::{micros, ratio, whole};
use crate::report::{Findings, Goal, Table};
use crate::server::{Program, Running, With};
use crate::settings::Settings;

/// The limit on the client's latency for a pair, as a ratio.
const MOST_LATENCY: f64 = 1.1;

/// Measures on each server.
pub fn run(settings: &Settings, programs: &[Program]) -> Result<Findings> {
    let scale = &settings.scale;
    let (mut pairs, mut contended) = (Vec::new(), Vec::new());
    for program in programs {
        let mut server = Running::start(program, With::Module)?;
        pairs.push(overhead::measure(scale, program, &mut server).with_context(|| program.label.clone())?);
        contended.extend(tasks::measure(scale, program, &mut server).with_context(|| program.label.clone())?);
    }
    let goal = |row: &overhead::Row| {
        let what = format!("latency of acquire and release, client for Rust / raw commands ({})", row.server);
        Goal::at_most(what, MOST_LATENCY, row.client_over_raw)
    };
    Ok(Findings {
        section: "clients",
        tables: vec![pair_table(&pairs), contention_table(&contended)],
        goals: pairs.iter().map(goal).collect(),
        plots: vec![],
        data: json!({ "rounds": scale.client_rounds, "pairs": pairs, "contended": contended }),
    })
}

fn pair_table(rows: &[overhead::Row]) -> Table {
    let note = "Acquire and release by one task, over the same connection: by the client for Rust, and the same commands sent \
                with the crate redis.";
    let columns = ["server", "client p50", "raw p50", "client p99", "raw p99", "p50, client / raw"];
    let mut table = Table::new("The client for Rust beside raw commands", note, &columns);
    for row in rows {
        table.row(vec![
            row.server.clone(),
            micros(row.client_p50_us.median),
            micros(row.raw_p50_us.median),
            micros(row.client_p99_us.median),
            micros(row.raw_p99_us.median),
            ratio(&row.client_over_raw),
        ]);
    }
    table
}

fn contention_table(rows: &[tasks::Row]) -> Table {
    let note = format!(
        "{} tasks of one process want {} locks, all of which are held until all tasks wait. Then each takes its turn (1 ms), and \
         asks again, until all had one, or for {} s.",
        whole(rows.first().map_or(0.0, |row| row.tasks as f64)),
        tasks::LOCKS,
        rows.first().map_or(0.0, |row| row.limit_s),
    );
    let columns = [
        "who",
        "all had a turn after",
        "had one",
        "turns/s",
        "Jain",
        "server CPU a turn",
        "connections",
        "client's bytes a task",
    ];
    let mut table = Table::new("Many tasks of one process", note, &columns);
    for row in rows {
        let all = row.had_a_turn.median >= row.tasks as f64;
        table.row(vec![
            format!("{} ({})", row.name, row.server),
            if all { format!("{:.2} s", row.seconds.median) } else { format!("> {:.0} s", row.limit_s) },
            whole(row.had_a_turn.median),
            whole(row.turns_per_second.median),
            format!("{:.3}", row.jain.median),
            micros(row.cpu_us.median),
            whole(row.connections.median),
            whole(row.bytes_a_task.median),
        ]);
    }
    table
}
