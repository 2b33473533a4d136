//! The rules of docs/client-protocol.md, and what checks each.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::scenario::Scenario;

/// Marks the number of a rule that no scenario or vector checks.
const BY_INSPECTION: char = '°';

/// A rule: `B` of the basic profile or `S` of sessions, and its number.
pub type Rule = (char, u32);

/// All rules of the specification, and whether a scenario or a vector checks them.
pub fn of(specification: &str) -> BTreeMap<Rule, bool> {
    let bold = specification.split("**").zip(specification.split("**").skip(1));
    let rule = |(name, rest): (&str, &str)| {
        let letter = name.chars().next().filter(|it| "BS".contains(*it))?;
        Some(((letter, name[1..].parse().ok()?), !rest.starts_with(BY_INSPECTION)))
    };
    bold.filter_map(rule).collect()
}

/// Its name in scenarios and vectors.
pub fn name((letter, number): &Rule) -> String {
    format!("{letter}{number}")
}

/// The first line of a vector.
#[derive(Debug, Deserialize)]
pub struct Vector {
    /// Its title.
    pub vector: String,
    /// The rules that it checks.
    pub rules: Vec<String>,
}

/// The first lines of the vectors of a folder.
///
/// # Errors
///
/// If a vector is invalid, with the file's name.
pub fn vectors(folder: &Path) -> Result<Vec<Vector>, String> {
    let mut found = Vec::new();
    for file in fs::read_dir(folder).map_err(|why| why.to_string())?.filter_map(Result::ok).map(|it| it.path()) {
        if file.extension().is_some_and(|it| it == "jsonl") {
            let wrong = |why: &dyn std::fmt::Display| format!("{}: {why}", file.display());
            let text = fs::read_to_string(&file).map_err(|why| wrong(&why))?;
            let first = text.lines().next().unwrap_or_default();
            found.push(serde_json::from_str(first).map_err(|why| wrong(&why))?);
        }
    }
    Ok(found)
}

/// The checks of each rule.
pub fn checks(scenarios: &[Scenario], vectors: &[Vector]) -> BTreeMap<String, Vec<String>> {
    let of_scenarios = scenarios.iter().map(|it| (&it.rules, it.name.clone()));
    let of_vectors = vectors.iter().map(|it| (&it.rules, format!("vector: {}", it.vector)));
    let mut all = BTreeMap::<String, Vec<String>>::new();
    for (rules, name) in of_scenarios.chain(of_vectors) {
        for rule in rules {
            all.entry(rule.clone()).or_default().push(name.clone());
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::read_all;

    #[test]
    fn scenarios_name_every_checkable_rule_and_no_unknown_one() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let rules = of(&fs::read_to_string(here.join("../../docs/client-protocol.md")).unwrap());
        let checks = checks(&read_all(&here.join("scenarios")).unwrap(), &vectors(&here.join("../vectors")).unwrap());
        assert!(rules.len() > 50, "{rules:?}");
        let wrong: Vec<_> =
            rules.iter().filter(|(rule, has_check)| **has_check != checks.contains_key(&name(rule))).collect();
        assert!(wrong.is_empty(), "no check, or a ° in spite of one: {wrong:?}");
        let unknown: Vec<_> = checks.keys().filter(|it| !rules.keys().any(|rule| name(rule) == **it)).collect();
        assert!(unknown.is_empty(), "unknown rules {unknown:?}");
    }

    #[test]
    fn rule_with_degree_sign_is_checked_by_inspection() {
        let rules = of("* **B1** one\n* **B2**° two, see B1 and **S3**, **Both**");
        assert_eq!(rules, BTreeMap::from([(('B', 1), true), (('B', 2), false), (('S', 3), true)]));
    }
}
