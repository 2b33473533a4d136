//! Sweeps over all waiters and bindings, in slices.

use crate::lock::WaiterId;
use crate::state::{BindingId, Sweep};

fn nth(ticket: u64) -> WaiterId {
    WaiterId { ticket, ..WaiterId::FIRST }
}

/// The waiters and bindings that a sweep passes if there are so many of each.
fn pass(sweep: &mut Sweep, waiters: u64, bindings: u64) -> (Vec<u64>, Vec<u64>) {
    let mut seen = (Vec::new(), Vec::new());
    while !sweep.is_over() {
        if let Some((from, end)) = sweep.waiters() {
            let next = (from.ticket..waiters.min(end.ticket)).next();
            seen.0.extend(next);
            sweep.passed_waiter(next.map(nth));
        }
        if let Some((from, end)) = sweep.bindings() {
            let next = (from.0..bindings.min(end.0)).next();
            seen.1.extend(next);
            sweep.passed_binding(next.map(BindingId));
        }
    }
    seen
}

#[test]
fn sweep_passes_each_once_and_none_that_came_later() {
    for (waiters, bindings) in [(0, 0), (1, 0), (0, 1), (3, 7), (5, 2)] {
        let mut sweep = Sweep::default();
        assert!(sweep.is_over());
        sweep.begin(None, (nth(waiters), BindingId(bindings)));
        assert!(!sweep.is_over());
        let seen = pass(&mut sweep, waiters + 10, bindings + 10);
        assert_eq!(seen, ((0..waiters).collect(), (0..bindings).collect()));
    }
}

#[test]
fn second_sweep_follows_first() {
    let mut sweep = Sweep::default();
    let four = (nth(4), BindingId(4));
    sweep.begin(Some(1), four);
    sweep.passed_waiter(Some(nth(0)));
    sweep.begin(Some(2), four);
    assert!(sweep.concerns(1) && !sweep.concerns(2));
    let seen = pass(&mut sweep, 4, 4);
    assert_eq!(seen, ([1, 2, 3, 0, 1, 2, 3].into(), [0, 1, 2, 3, 0, 1, 2, 3].into()));
    assert!(sweep.concerns(2) && !sweep.concerns(1));
    // Sweeps that have to wait are merged into one: of all databases, if they are of two.
    for (dbs, concerns_both) in [([1, 1], false), ([1, 2], true)] {
        let mut sweep = Sweep::default();
        sweep.begin(Some(3), four);
        dbs.iter().for_each(|db| sweep.begin(Some(*db), four));
        sweep.passed_waiter(None);
        sweep.passed_binding(None);
        assert_eq!((sweep.concerns(1), sweep.concerns(2), sweep.is_over()), (true, concerns_both, false));
    }
}

/// However often a database is flushed meanwhile, every waiter is passed in the end.
#[test]
fn sweep_completes_while_others_are_requested() {
    let mut sweep = Sweep::default();
    let mut seen = Vec::new();
    sweep.begin(None, (nth(3), BindingId(0)));
    for _ in 0..6 {
        sweep.begin(None, (nth(3), BindingId(0)));
        let (from, _) = sweep.waiters().expect("there are more");
        let next = (from.ticket < 3).then_some(from);
        seen.extend(next.map(|id| id.ticket));
        sweep.passed_waiter(next);
        sweep.passed_binding(None);
    }
    assert_eq!(seen[..4], [0, 1, 2, 0]);
}

#[test]
fn end_of_bindings_is_that_of_the_last_sweep() {
    let mut sweep = Sweep::default();
    assert_eq!(sweep.end_of_bindings(), BindingId::FIRST);
    sweep.begin(None, (nth(1), BindingId(4)));
    sweep.begin(None, (nth(1), BindingId(7)));
    assert_eq!(sweep.end_of_bindings(), BindingId(7));
    sweep.passed_waiter(None);
    sweep.passed_binding(None);
    assert_eq!(sweep.end_of_bindings(), BindingId(7));
    sweep.passed_binding(None);
    assert_eq!(sweep.end_of_bindings(), BindingId::FIRST);
}
