//! Cuts a script that breaks a rule down to the fewest lines that still break it.

use crate::play::{Broken, play};
use crate::redis::Generation;
use crate::script::Line;

/// The shortest script found that breaks the same rule, and how.
pub fn shrink(generation: Generation, lines: &[Line], broken: Box<Broken>) -> (Vec<Line>, Box<Broken>) {
    let mut best = (lines.get(..broken.lines).unwrap_or(lines).to_vec(), broken);
    if fails(generation, &best.0, &best.1).is_none() {
        // It breaks at the end of the run, when everybody goes.
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

/// What is left out as a whole: a line, or a scene, which says what everybody is told only if it is played whole.
fn units(mut lines: &[Line]) -> Vec<Vec<Line>> {
    let mut units = Vec::new();
    while let Some(first) = lines.first() {
        let over = lines.iter().position(|line| *line == Line::Over).map_or(lines.len(), |at| at + 1);
        let (unit, rest) = lines.split_at(if matches!(first, Line::Scene(_)) { over } else { 1 });
        units.push(unit.to_vec());
        lines = rest;
    }
    units
}

/// Leaves out options, and shortens times.
fn simplify(generation: Generation, best: &mut (Vec<Line>, Box<Broken>)) {
    let mut is_scene = false;
    for at in 0..best.0.len() {
        is_scene = matches!(best.0[at], Line::Scene(_)) || is_scene && best.0[at] != Line::Over;
        let Line::Request(name, words) = best.0[at].clone() else { continue };
        if is_scene {
            continue;
        }
        let mut words = words;
        let mut place = words.len();
        while place > 3 {
            place -= 1;
            for count in [2, 1] {
                let Some(rest) = words.get(place + count..) else { continue };
                let fewer = [&words[..place], rest].concat();
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

/// Whether a script breaks the same rule.
fn fails(generation: Generation, lines: &[Line], broken: &Broken) -> Option<Box<Broken>> {
    play(generation, lines, false).err().filter(|it| it.violation.rule == broken.violation.rule)
}
