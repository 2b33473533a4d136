//! Scripts with their expected replies. Each is a minimal script that shows one fault.

mod accepted;
mod bindings;
mod clock_steps;
mod cluster;
mod deadlocks;
mod grants;
mod keys;
mod refused_writes;
mod replicas;
mod requests;
mod sessions;
mod simulation;
mod unseen_changes;

use simulator::play::play;
use simulator::redis::Generation;
use simulator::script;

/// The invariants that a script violates, on each generation of servers.
fn violations(text: &str) -> Vec<&'static str> {
    let lines = script::parse(text);
    Generation::ALL.into_iter().filter_map(|it| play(it, &lines, false).err()).map(|it| it.violation.rule).collect()
}

/// Asserts that a script violates no invariant.
#[track_caller]
fn breaks_nothing(text: &str) {
    assert_eq!(violations(text), [""; 0], "{text}");
}

/// Asserts that a script violates no invariant, and that the last reply to this client contains a text.
#[track_caller]
fn expect_reply(text: &str, name: char, expected: &str) {
    let lines = script::parse(text);
    for generation in Generation::ALL {
        let run = play(generation, &lines, true).unwrap_or_else(|failure| panic!("{}\n{text}", failure.violation));
        let mut in_script = run.replies[..run.script.0].iter();
        let last = in_script.rfind(|(to, _)| *to == name).map(|(_, reply)| format!("{reply:?}"));
        let contains = last.as_ref().is_some_and(|last| last.contains(expected));
        assert!(contains, "{generation:?}: got {last:?}, expected {expected}\n{text}");
    }
}
