//! What is told or promised is not taken back.

use super::{key, owner, undo};
use crate::books::undo::promised_before;

#[test]
fn what_is_promised_of_the_holds_from_before() {
    // One more: nothing is said of those that were there.
    assert_eq!(promised_before(1, 1, 2), 0);
    // HOLDS 1 where there was 1: that one.
    assert_eq!(promised_before(1, 1, 1), 1);
    // HOLDS 3 where there were 2: those two.
    assert_eq!(promised_before(3, 2, 3), 2);
    // HOLDS 1 where there were 5: one of them.
    assert_eq!(promised_before(1, 5, 5), 1);
    // HOLDS 3 where there was none.
    assert_eq!(promised_before(3, 0, 3), 0);
}

#[test]
fn what_was_told_is_not_taken_back() {
    let mut it = undo(1, &owner(1), &[key(1), key(2)], (0, 2, 1));
    assert_eq!(it.steps[0].added(), 2);
    it.acknowledge(&key(1).name, 1);
    assert_eq!((it.steps[0].added(), it.steps[1].added()), (1, 2));
    it.acknowledge(&key(1).name, 100);
    assert_eq!(it.steps[0].added(), 0);
    it.acknowledge(&key(3).name, 100);
    assert_eq!(it.steps[1].added(), 2);
}

/// A grant, then `HOLDS 1` again, neither of them told; the first is taken back and the second promises that hold: it
/// stays, and is taken back with the second.
#[test]
fn what_is_promised_later_is_taken_back_later() {
    let first = undo(1, &owner(1), &[key(1)], (0, 1, 1));
    let mut second = undo(2, &owner(1), &[key(1)], (1, 1, 1));
    assert_eq!(second.steps[0].added(), 0);
    second.rebase(&first.steps[0], 0);
    assert_eq!(second.steps[0].added(), 1);
}

/// One hold more each: what one added is taken back with it, and the other's stays what it is.
#[test]
fn each_takes_back_its_own() {
    let first = undo(1, &owner(1), &[key(1)], (0, 1, 1));
    let mut second = undo(2, &owner(1), &[key(1)], (1, 2, 1));
    second.rebase(&first.steps[0], 1);
    assert_eq!((second.steps[0].added(), second.steps[0].given.holds), (1, 1));
}
