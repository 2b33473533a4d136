//! Runs of clients beside the module break no rule, and their steps as text say all of them.

use holdfast_core::{Core, Input, Settings};
use simulator_clients::{plan, play};

/// So many runs, each of one to four clients.
const RUNS: u64 = 1_500;

/// No run takes so many requests.
const MOST: u64 = 5_000;

#[test]
fn runs_break_no_rule() {
    let (mut steps, mut commands) = (0, 0);
    for seed in 1..=RUNS {
        let plan = plan(seed);
        let run = play(&plan, false);
        assert!(run.violation.is_none(), "{}\n{plan}", run.violation.expect("there is one"));
        // Who asks again does so after a pause: a run that asked without one sent 165,000 requests.
        assert!(run.commands < MOST, "seed {seed}: {} commands", run.commands);
        (steps, commands) = (steps + run.steps, commands + run.commands);
    }
    assert!(steps > 50 * RUNS && commands > 30 * RUNS, "{steps} steps, {commands} commands");
}

/// Runs in which nothing was wrong but what the judge said.
#[test]
fn no_rule_is_broken_by() {
    // Strangers who are kept waiting by a pause break what was granted when it ends.
    let plan = plan(37_054);
    let run = play(&plan, false);
    assert!(run.violation.is_none(), "{}\n{plan}", run.violation.expect("there is one"));
}

/// What a core does follows from its steps alone, and they can be read.
#[test]
fn steps_as_text_give_the_same_again() {
    let mut steps = 0;
    for seed in 1..=50 {
        for (by, script) in play(&plan(seed), true).scripts.into_iter().filter(|(by, _)| by != "server") {
            let mut lines = script.iter();
            let settings = lines.next().and_then(|line| Settings::parse(line)).expect("the settings come first");
            let mut core = Core::new(settings);
            for line in lines {
                let said = core.take().map(|output| format!("> {output}"));
                if line.starts_with('>') {
                    assert_eq!(said.as_ref(), Some(line), "seed {seed}, {by}");
                    continue;
                }
                assert_eq!(said, None, "seed {seed}, {by}, before {line}");
                let (now, input) = Input::parse(line).unwrap_or_else(|| panic!("not a step: {line}"));
                core.step(now, input);
                steps += 1;
            }
        }
    }
    assert!(steps > 2_000, "{steps} steps");
}
