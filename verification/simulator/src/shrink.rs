//! Reduces a script that violates an invariant to the fewest lines that still do.

use crate::play::{Failure, play};
use crate::redis::Generation;
use crate::script::Line;

/// The shortest script found that violates the same invariant, with its violation.
pub fn shrink(generation: Generation, lines: &[Line], broken: Box<Failure>) -> (Vec<Line>, Box<Failure>) {
    let mut best = (lines.get(..broken.lines).unwrap_or(lines).to_vec(), broken);
    if fails(generation, &best.0, &best.1).is_none() {
        // The violation comes at the end of the run, when all clients disconnect.
        best.0 = lines.to_vec();
    }
    let mut units = units(&best.0);
    let mut size = units.len().div_ceil(2);
    loop {
        let before = units.len();
        let mut at = 0;
        while at < units.len() {
            let end = (at + size).min(units.len());
            let rest = [&units[..at], &units[end..]].concat();
            match fails(generation, &rest.concat(), &best.1) {
                Some(broken) => (best, units) = ((rest.concat(), broken), rest),
                None => at = end,
            }
        }
        if size == 1 && units.len() == before {
            break;
        }
        size = (size / 2).max(1);
    }
    simplify(generation, &mut best);
    best
}

/// The units that are removed as a whole: a line, or a scenario, whose expected replies need all of its lines.
fn units(mut lines: &[Line]) -> Vec<Vec<Line>> {
    let mut units = Vec::new();
    while let Some(first) = lines.first() {
        let over = lines.iter().position(|line| *line == Line::EndScenario).map_or(lines.len(), |at| at + 1);
        let (unit, rest) = lines.split_at(if matches!(first, Line::Scenario(_)) { over } else { 1 });
        units.push(unit.to_vec());
        lines = rest;
    }
    units
}

/// Removes options of requests.
fn simplify(generation: Generation, best: &mut (Vec<Line>, Box<Failure>)) {
    let mut is_scenario = false;
    for at in 0..best.0.len() {
        is_scenario = matches!(best.0[at], Line::Scenario(_)) || is_scenario && best.0[at] != Line::EndScenario;
        let Line::Request(name, words) = best.0[at].clone() else { continue };
        if is_scenario {
            continue;
        }
        let mut words = words;
        let mut position = words.len();
        while position > 3 {
            position -= 1;
            for count in [2, 1] {
                let Some(rest) = words.get(position + count..) else { continue };
                let fewer = [&words[..position], rest].concat();
                let mut lines = best.0.clone();
                lines[at] = Line::Request(name, fewer.clone());
                if let Some(broken) = fails(generation, &lines, &best.1) {
                    *best = (lines, broken);
                    words = fewer;
                    break;
                }
            }
        }
    }
}

/// Whether a script violates the same invariant.
fn fails(generation: Generation, lines: &[Line], broken: &Failure) -> Option<Box<Failure>> {
    play(generation, lines, false).err().filter(|it| it.violation.rule == broken.violation.rule)
}
