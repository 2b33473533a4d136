//! A pass over all there are, in pieces.

use crate::books::{Sweep, TieId};
use crate::lock::WaiterId;

/// Who is passed if there are so many of each.
fn pass(sweep: &mut Sweep, waiters: u64, ties: u64) -> (Vec<u64>, Vec<u64>) {
    let mut seen = (Vec::new(), Vec::new());
    while !sweep.is_over() {
        if let Some((from, end)) = sweep.waiters() {
            let next = (from.0..waiters.min(end.0)).next();
            seen.0.extend(next);
            sweep.passed_waiter(next.map(WaiterId));
        }
        if let Some((from, end)) = sweep.ties() {
            let next = (from.0..ties.min(end.0)).next();
            seen.1.extend(next);
            sweep.passed_tie(next.map(TieId));
        }
    }
    seen
}

#[test]
fn everybody_is_passed_once_and_nobody_who_came_later() {
    for (waiters, ties) in [(0, 0), (1, 0), (0, 1), (3, 7), (5, 2)] {
        let mut sweep = Sweep::default();
        assert!(sweep.is_over());
        sweep.begin(None, (WaiterId(waiters), TieId(ties)));
        assert!(!sweep.is_over());
        let seen = pass(&mut sweep, waiters + 10, ties + 10);
        assert_eq!(seen, ((0..waiters).collect(), (0..ties).collect()));
    }
}

#[test]
fn a_second_one_begins_anew_and_concerns_both_databases() {
    let mut sweep = Sweep::default();
    sweep.begin(Some(1), (WaiterId(4), TieId(4)));
    assert!(sweep.concerns(1) && !sweep.concerns(2));
    sweep.passed_waiter(Some(WaiterId(0)));
    sweep.begin(Some(2), (WaiterId(4), TieId(4)));
    assert!(sweep.concerns(1) && sweep.concerns(2));
    assert_eq!(pass(&mut sweep, 4, 4), ((0..4).collect(), (0..4).collect()));
    sweep.begin(Some(3), (WaiterId(4), TieId(4)));
    assert!(sweep.concerns(3) && !sweep.concerns(1));
}
