//! The simulator itself: scripts, seeds, histories, and the thin clients.

use crate::violations;
use simulator::play::play;
use simulator::redis::Generation;
use simulator::{history, scenarios, script, seed, shrink, thin};

/// The observations of clients fit some order of operations of the specification
/// (`verification/histories/src/spec.rs`). Runs in which many requests have no reply are left out: they leave too many
/// orders to try.
#[test]
fn histories_are_linearizable() {
    const UNANSWERED: usize = 1;
    let mut operations = 0;
    for number in 1..=250 {
        let run = seed::from_seed(number);
        let lines: Vec<_> = run.lines.into_iter().filter(history::is_expressible).collect();
        let Ok(run) = play(run.generation, &lines, true) else { continue };
        let seen = histories::read(run.history.as_bytes()).expect("the history has the documented format");
        if seen.iter().filter(|it| it.outcome == histories::Outcome::Unknown).count() > UNANSWERED {
            continue;
        }
        operations += seen.len();
        if let Err(violation) = histories::intervals::check(&seen).and_then(|()| histories::check(&seen)) {
            panic!("seed {number}: {violation}\n{}", script::print(&lines));
        }
    }
    assert!(operations > 500, "{operations} operations");
}

#[test]
fn history_with_second_holder_is_refused() {
    let lines = script::parse(
        "a LOCK.ACQUIRE k a LEASE 60000
         +1
         b LOCK.ACQUIRE k b
         +1",
    );
    let run = play(Generation::Redis72, &lines, true).expect("the run violates nothing");
    let mut seen = histories::read(run.history.as_bytes()).expect("the history has the documented format");
    assert!(histories::check(&seen).is_ok());
    let refused = seen.iter_mut().find(|it| it.outcome == histories::Outcome::Null).expect("b was refused");
    refused.outcome = histories::Outcome::Token(1_900_000_000_000_000);
    assert!(histories::check(&seen).is_err());
}

#[test]
fn seed_gives_same_run_each_time() {
    for number in 0..50 {
        let run = seed::from_seed(number);
        let played = || {
            let result = play(run.generation, &run.lines, true);
            result.map_or_else(|failure| format!("{failure:?}"), |run| format!("{run:?}"))
        };
        assert_eq!(played(), played(), "seed {number}");
    }
}

/// An unexpected reply is a violation, and a scenario is reduced as a whole.
#[test]
fn unexpected_reply_violates_scenario() {
    const REQUESTS: &str = "!scenario raised
         a LOCK.ACQUIRE k a
         +1
         b LOCK.ACQUIRE k b
         +1
         b !expect";
    assert_eq!(violations(&format!("{REQUESTS} null")), [""; 0]);
    let lines = script::parse(&format!("c LOCK.SESSION\n{REQUESTS} 1\n!end-scenario\n+1"));
    for generation in Generation::ALL {
        let failure = play(generation, &lines, false).expect_err("b received null");
        assert_eq!(failure.violation.rule, scenarios::RAISE_REPEATED);
        let (cut, _) = shrink::shrink(generation, &lines, failure);
        assert_eq!(cut, script::parse(&format!("{REQUESTS} 1")));
    }
}

#[test]
fn printed_script_parses_to_same_lines() {
    for number in 0..200 {
        let run = seed::from_seed(number);
        assert_eq!(script::parse(&script::print(&run.lines)), run.lines, "seed {number}");
    }
}

#[test]
fn thin_clients_violate_no_invariant() {
    for seed in 1..=300 {
        thin::play(seed, None).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
    }
}

#[test]
fn thin_client_faults_are_found() {
    for fault in thin::Fault::ALL {
        // Not from 1 on: the rarest ones are found soon here.
        let found = (2_001..=3_000).find_map(|seed| Some((seed, thin::play(seed, Some(fault)).err()?)));
        let (seed, violation) = found.unwrap_or_else(|| panic!("no run finds {fault:?}"));
        println!("{fault:?}: seed {seed}: {}", violation.rule);
    }
}
