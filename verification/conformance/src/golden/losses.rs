//! The reasons of losses, and how soon the holder is notified.

use serde::Deserialize;

use super::{Played, can, rows};
use crate::play::{ClientUnderTest, Drivers, play as play_scenario};
use crate::scenario::{Acquire, Call, Feature, Scenario, Shape, Step, Terms};

/// A cause, the options of the hold, and the reported reason.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    cause: String,
    steps: Vec<Step>,
    terms: Vec<Terms>,
    reason: String,
    within: u64,
}

pub fn play(client: &ClientUnderTest) -> Result<Played, String> {
    let mut played = Played::default();
    if !client.manifest.has(Feature::LossReports) {
        return Ok(played);
    }
    let mut drivers = Drivers::new();
    for row in rows::<Row>("losses")? {
        for terms in row.terms.iter().filter(|terms| can(client, terms, 1)) {
            let report = play_scenario(&scenario(&row, terms), None, client, &mut drivers)?;
            let differs = |why| (row.cause.clone(), format!("{terms:?}: {why}"));
            played.rows += 1;
            played.differences.extend(report.faults.into_iter().map(differs));
        }
    }
    Ok(played)
}

/// A scenario of one client, which reports the loss by itself, and again when it releases the lost hold.
fn scenario(row: &Row, terms: &Terms) -> Scenario {
    let (client, hold) = (|| "A".to_owned(), || "a".to_owned());
    let ends = "held".to_owned();
    let acquire = Acquire {
        client: client(),
        hold: hold(),
        keys: vec!["k".to_owned()],
        terms: terms.clone(),
        ends,
        at_most: None,
    };
    let mut steps = vec![Step::Acquire(acquire)];
    steps.extend(row.steps.iter().cloned());
    steps.push(Step::Lost { client: client(), hold: hold(), reason: row.reason.clone(), within: row.within });
    let (ends, names) = (format!("lost {}", row.reason), Vec::new());
    steps.push(Step::Release(Call { client: client(), hold: hold(), ends, names }));
    let promise = row.cause.clone();
    Scenario {
        name: "losses".to_owned(),
        promise,
        rules: Vec::new(),
        profile: None,
        needs: Vec::new(),
        servers: Shape::One,
        clients: vec![client()],
        positions: None,
        steps,
    }
}
