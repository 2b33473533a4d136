//! Promises 4 and 5 of docs/guarantees.md, explored exhaustively: [`model`] defines the states and actions.
//!
//! With all rules on, two owners never rely on the lock at the same time, by the replies that they received. Without
//! any one rule they do, and without `REPLICAS` as well: this shows that the model can find a violation.

#[path = "failover/model.rs"]
mod model;

use std::time::Instant;

use model::{Heir, Rules};
use stateright::{Checker, HasDiscoveries, Model};

const ALL: Rules = Rules {
    replicas: 2,
    heir: Heir::Any,
    confirmed_deadline: true,
    one_at_a_time: true,
    only_if_held: true,
    lag: 2,
    holds: 2,
    failovers: 1,
    forces: 1,
    moves: 1,
};

/// The shortest path to a state in which two owners rely on the lock.
fn explore(rules: Rules) -> Option<String> {
    let begin = Instant::now();
    let checker = rules.checker().threads(2).finish_when(HasDiscoveries::Any).spawn_bfs().join();
    let (states, unique, depth) = (checker.state_count(), checker.unique_state_count(), checker.max_depth());
    eprintln!("{rules:?}: {unique} states ({states} reached), depth {depth}, {:?}", begin.elapsed());
    let path = checker.discoveries().into_values().next()?;
    let steps: Vec<String> = path.into_actions().iter().map(|action| format!("    {action:?}")).collect();
    Some(steps.join("\n"))
}

#[track_caller]
fn must_hold(rules: Rules) {
    if let Some(path) = explore(rules) {
        panic!("two believe that they hold the lock, after\n{path}");
    }
}

#[track_caller]
fn must_find(rules: Rules) {
    match explore(rules) {
        Some(path) => eprintln!("  found:\n{path}"),
        None => panic!("no double hold was found, so this model shows nothing"),
    }
}

#[test]
fn no_two_holders_when_all_replicas_confirm_and_any_is_promoted() {
    must_hold(ALL);
}

#[test]
fn no_two_holders_when_confirming_replica_is_promoted() {
    must_hold(Rules { replicas: 1, heir: Heir::Confirmed, ..ALL });
}

#[test]
fn two_holders_are_found_when_other_replica_is_promoted() {
    must_find(Rules { replicas: 1, heir: Heir::Any, ..ALL });
}

#[test]
fn two_holders_are_found_without_replicas() {
    must_find(Rules { replicas: 0, ..ALL });
}

#[test]
fn two_holders_are_found_without_confirmed_deadline() {
    must_find(Rules { confirmed_deadline: false, forces: 0, ..ALL });
}

#[test]
fn two_holders_are_found_without_one_request_at_a_time() {
    must_find(Rules { one_at_a_time: false, forces: 0, ..ALL });
}

#[test]
fn two_holders_are_found_without_check_of_confirmed_hold() {
    must_find(Rules { only_if_held: false, ..ALL });
}
