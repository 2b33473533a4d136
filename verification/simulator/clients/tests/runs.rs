//! Runs of clients beside the module violate no invariant, and their steps as text reproduce them.

use holdfast_core::Core;
use simulator_clients::text::{Text, parse_input, parse_settings};
use simulator_clients::{plan, play};

/// The number of runs, each of one to four clients.
const RUNS: u64 = 1_500;

/// The most requests that a run may take.
const MOST: u64 = 5_000;

#[test]
fn client_runs_violate_no_invariant() {
    let (mut steps, mut commands) = (0, 0);
    for seed in 1..=RUNS {
        let plan = plan(seed);
        let run = play(&plan, false);
        assert!(run.violation.is_none(), "{}\n{plan}", run.violation.expect("there is one"));
        // A client pauses before it repeats a request. A run without pauses sent 165,000 requests.
        assert!(run.commands < MOST, "seed {seed}: {} commands", run.commands);
        (steps, commands) = (steps + run.steps, commands + run.commands);
    }
    assert!(steps > 50 * RUNS && commands > 30 * RUNS, "{steps} steps, {commands} commands");
}

/// Runs that a draft of the checker took for violations.
#[test]
fn accepted_client_runs_violate_no_invariant() {
    // Requests of other clients that a pause delays force-release, at its end, what was granted during it.
    let plan = plan(37_054);
    let run = play(&plan, false);
    assert!(run.violation.is_none(), "{}\n{plan}", run.violation.expect("there is one"));
}

/// What a core does follows from its steps alone, and steps can be read from text.
#[test]
fn steps_read_from_text_reproduce_run() {
    let mut steps = 0;
    for seed in 1..=50 {
        for (by, script) in play(&plan(seed), true).scripts.into_iter().filter(|(by, _)| by != "server") {
            let mut lines = script.iter();
            let settings = lines.next().and_then(|line| parse_settings(line)).expect("the settings come first");
            let mut core = Core::new(settings);
            for line in lines {
                let said = core.take().map(|output| format!("> {}", Text(&output)));
                if line.starts_with('>') {
                    assert_eq!(said.as_ref(), Some(line), "seed {seed}, {by}");
                    continue;
                }
                assert_eq!(said, None, "seed {seed}, {by}, before {line}");
                let (now, input) = parse_input(line).unwrap_or_else(|| panic!("not a step: {line}"));
                core.step(now, input);
                steps += 1;
            }
        }
    }
    assert!(steps > 2_000, "{steps} steps");
}
