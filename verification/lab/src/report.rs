//! The results of a scenario, and the table that the lab prints.

use std::fmt;

/// One line of the table: the faults of one scenario, and the results.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// The scenario, in a few words.
    pub scenario: String,
    /// How often it was run.
    pub runs: u64,
    /// Faults injected (kills, stops, cuts, restarts, slots moved, …).
    pub faults: u64,
    /// Requests that clients sent.
    pub requests: u64,
    /// Violated guarantees. The lab fails if any row has one.
    pub violations: u64,
    /// Other results, e.g. double holds that are allowed.
    pub note: String,
}

impl Row {
    /// A row for a scenario that could not be completed, which counts as a violation.
    pub fn not_run(scenario: &str, why: impl fmt::Display) -> Row {
        Row { scenario: scenario.to_owned(), violations: 1, note: format!("could not be run: {why}"), ..Row::default() }
    }
}

/// All rows of a run, printed as an aligned table.
#[derive(Debug, Default)]
pub struct Report {
    rows: Vec<Row>,
}

impl Report {
    /// Adds the rows of a scenario.
    pub fn extend(&mut self, rows: Vec<Row>) {
        self.rows.extend(rows);
    }

    /// The sum of the column `violations`.
    pub fn violations(&self) -> u64 {
        self.rows.iter().map(|row| row.violations).sum()
    }

    /// Whether no scenario returned a row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

const HEAD: [&str; 6] = ["scenario", "runs", "faults", "requests", "violations", "note"];

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<[String; 6]> =
            std::iter::once(HEAD.map(str::to_owned)).chain(self.rows.iter().map(cells)).collect();
        let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
        for line in &lines {
            let [scenario, numbers @ .., note] = line;
            write!(f, "{scenario:<0$}", widths[0])?;
            for (number, width) in numbers.iter().zip(&widths[1..]) {
                write!(f, "  {number:>width$}")?;
            }
            writeln!(f, "  {note}")?;
        }
        Ok(())
    }
}

fn cells(row: &Row) -> [String; 6] {
    [
        row.scenario.clone(),
        row.runs.to_string(),
        row.faults.to_string(),
        row.requests.to_string(),
        row.violations.to_string(),
        row.note.clone(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut report = Report::default();
        report.extend(vec![Row {
            scenario: "a".into(),
            requests: 1_234_567_890_123,
            note: "n".into(),
            ..Row::default()
        }]);
        let text = report.to_string();
        let ends: Vec<usize> = text
            .lines()
            .zip(["requests", "1234567890123"])
            .map(|(line, word)| line.find(word).unwrap() + word.len())
            .collect();
        assert_eq!(ends[0], ends[1], "{text}");
    }

    #[test]
    fn scenario_that_could_not_run_fails() {
        let mut report = Report::default();
        report.extend(vec![Row::not_run("x", "no engine")]);
        assert_eq!(report.violations(), 1);
    }
}
