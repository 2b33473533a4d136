//! The tables of the clients' features and of the scenarios that they pass.

use std::fmt::Write;

use crate::driver::Manifest;
use crate::scenario::{Feature, Scenario};

/// Whether a client passes a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passed {
    /// Also with every fault between two messages, as far as these were tried.
    Always,
    /// Not with every fault between two messages.
    WithoutFaults,
    /// Not even without faults.
    Never,
}

/// Two tables in Markdown. `kept` returns whether a client passes a scenario, or `None` if it was not played.
pub fn write(clients: &[Manifest], scenarios: &[Scenario], passed: impl Fn(usize, usize) -> Option<Passed>) -> String {
    let mut page = String::new();
    let names = || clients.iter().map(|it| it.client.as_str());
    row(&mut page, "", names());
    row(&mut page, "---", clients.iter().map(|_| "---"));
    for feature in Feature::ALL {
        row(&mut page, feature.title(), clients.iter().map(|it| if it.has(feature) { "yes" } else { "no" }));
    }
    page.push('\n');
    row(&mut page, "promise", names());
    row(&mut page, "---", clients.iter().map(|_| "---"));
    for (index, scenario) in scenarios.iter().enumerate() {
        let cell = |client| match passed(client, index) {
            Some(Passed::Always) => "passed",
            Some(Passed::WithoutFaults) => "**not always**",
            Some(Passed::Never) => "**failed**",
            None => "can't",
        };
        row(&mut page, &scenario.promise, (0..clients.len()).map(cell));
    }
    page
}

/// The marks around the tables in a page.
const BEGIN: &str = "<!-- made by scripts/conformance --table -->\n";
const END: &str = "<!-- end -->";

/// The page with these tables between its marks, if it has any.
pub fn put_into(page: &str, tables: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}{tables}{END}{after}"))
}

fn row<'a>(page: &mut String, first: &str, cells: impl Iterator<Item = &'a str>) {
    // Writing to a string can't fail.
    let _ = writeln!(page, "| {first} | {} |", cells.collect::<Vec<_>>().join(" | "));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_replaces_older_one() {
        let page = format!("before\n{BEGIN}old\n{END}\nafter\n");
        assert_eq!(put_into(&page, "new\n"), Some(format!("before\n{BEGIN}new\n{END}\nafter\n")));
        assert_eq!(put_into("none", "new\n"), None);
    }
}
