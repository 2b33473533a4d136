//! The results of a section: tables as text, JSON for programs, plots for the README.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};

use crate::figures::ratio;
use crate::machine::{self, Machine};
use crate::plot::Plot;
use crate::stats::Spread;

/// A table with a note.
#[derive(Clone, Debug)]
pub struct Table {
    title: String,
    note: String,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    pub fn new(title: impl Into<String>, note: impl Into<String>, columns: &[&str]) -> Self {
        let columns = columns.iter().map(|&column| column.to_owned()).collect();
        Self { title: title.into(), note: note.into(), columns, rows: Vec::new() }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The table in Markdown, with aligned columns.
    pub fn markdown(&self) -> String {
        let widths: Vec<usize> = (0..self.columns.len()).map(|column| self.width(column)).collect();
        let rule = widths.iter().enumerate().map(|(column, &width)| match column {
            0 => "-".repeat(width),
            _ => format!("{}:", "-".repeat(width.saturating_sub(1))),
        });
        let mut lines = vec![padded(&self.columns, &widths), padded(&rule.collect::<Vec<_>>(), &widths)];
        lines.extend(self.rows.iter().map(|row| padded(row, &widths)));
        let note = if self.note.is_empty() { String::new() } else { format!("{}\n\n", self.note) };
        format!("### {}\n\n{note}{}\n", self.title, lines.join("\n"))
    }

    fn width(&self, column: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(column)).chain(self.columns.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    }
}

fn padded(cells: &[String], widths: &[usize]) -> String {
    let cells = cells.iter().zip(widths).enumerate().map(|(column, (cell, &width))| match column {
        0 => format!("{cell:<width$}"),
        _ => format!("{cell:>width$}"),
    });
    format!("| {} |", cells.collect::<Vec<_>>().join(" | "))
}

/// A limit for a figure.
#[derive(Clone, Debug, Serialize)]
pub struct Goal {
    /// The figure.
    pub what: String,
    /// The limit.
    pub limit: f64,
    /// The measured value.
    pub measured: Spread,
    /// Whether the median is within the limit.
    pub met: bool,
}

impl Goal {
    /// A figure that must not exceed `limit`.
    pub fn at_most(what: impl Into<String>, limit: f64, measured: Spread) -> Self {
        Self { what: what.into(), limit, measured, met: measured.median <= limit }
    }

    fn row(&self) -> Vec<String> {
        let verdict =
            if self.met { "met".to_owned() } else { format!("missed by {:.2}", self.measured.median - self.limit) };
        vec![self.what.clone(), format!("{:.2}", self.limit), ratio(&self.measured), verdict]
    }
}

/// The results of a section.
pub struct Findings {
    /// The section's name.
    pub section: &'static str,
    /// The tables.
    pub tables: Vec<Table>,
    /// The limits.
    pub goals: Vec<Goal>,
    /// The data as JSON.
    pub data: Value,
    /// The plots.
    pub plots: Vec<Plot>,
}

impl Findings {
    /// Prints the tables, and writes `section.md`, `section.json` and the plots to `out`.
    pub fn publish(&self, machine: &Machine, judged: bool, out: &Path) -> Result<()> {
        let text: String = self.tables.iter().map(|table| format!("{}\n", table.markdown())).collect();
        println!("{text}");
        fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))?;
        let load_after = machine::load();
        let data = json!({
            "section": self.section, "machine": machine, "load_after": load_after, "judged": judged,
            "goals": self.goals, "data": self.data,
        });
        let head = format!(
            "Measured {} on {} ({} cores), {}, commit {}; load average {:.1} before, {load_after:.1} after.\n\n",
            machine.started, machine.processor, machine.cores, machine.kernel, machine.commit, machine.load_before,
        );
        write(out, &format!("{}.md", self.section), &(head + &text))?;
        write(out, &format!("{}.json", self.section), &(serde_json::to_string_pretty(&data)? + "\n"))?;
        self.plots.iter().try_for_each(|plot| write(out, &format!("{}.svg", plot.file), &plot.svg()))
    }
}

fn write(out: &Path, name: &str, text: &str) -> Result<()> {
    let path = out.join(name);
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}

/// All goals in one table.
pub fn goals(goals: &[Goal]) -> Table {
    let mut table = Table::new(
        "Goals",
        "Median of the rounds (lowest..highest round); ratios, if nothing else is said.",
        &["what", "at most", "measured", ""],
    );
    goals.iter().for_each(|goal| table.row(goal.row()));
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_aligned_markdown() {
        let mut table = Table::new("T", "", &["who", "µs"]);
        table.row(vec!["a".into(), "1.5".into()]);
        assert_eq!(table.markdown(), "### T\n\n| who |  µs |\n| --- | --: |\n| a   | 1.5 |\n");
    }
}
