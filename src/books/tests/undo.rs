//! What is told or promised is not taken back.

use super::{Step, Undo, home, key, owner, undo};
use crate::books::undo::promised_before;
use crate::lock::{Deadline, Hold};

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

#[test]
fn under_which_token_it_came_about() {
    let it = || undo(1, &owner(1), &[key(1), key(2)], (0, 1, 1));
    assert_eq!(it().under(7).steps.iter().map(|step| step.given.token).collect::<Vec<_>>(), [Some(7), Some(7)]);
    // Of several locks that are renewed, those that were held.
    let some = it().under_each(|name| (*name == *key(2).name).then_some(9));
    assert_eq!(some.steps.iter().map(|step| step.given.token).collect::<Vec<_>>(), [Some(9)]);
    assert_eq!(some.keys().collect::<Vec<_>>(), [key(2)]);
}

#[test]
fn what_it_promises_and_builds_on() {
    let first = undo(1, &owner(1), &[key(1)], (0, 2, 2));
    let again = undo(2, &owner(1), &[key(1)], (2, 3, 1));
    assert_eq!((first.promised(&key(1).name), first.promised(&key(2).name)), (2, 0));
    assert_eq!((first.is_re_entry(), again.is_re_entry()), (false, true));
    assert_eq!((first.earlier_deadline(), again.earlier_deadline()), (None, Some(100)));
    assert_eq!(again.without_promise().promised(&key(1).name), 0);
}

#[test]
fn it_follows_its_database() {
    let it = Undo { home: home(2), ..undo(1, &owner(1), &[key(1)], (0, 1, 1)) };
    assert_eq!((it.db(), it.keys().map(|key| key.db).collect::<Vec<_>>()), (2, vec![2]));
    it.home.set(3);
    assert_eq!((it.db(), it.keys().map(|key| key.db).collect::<Vec<_>>()), (3, vec![3]));
}

/// The example of `Undo::rebase`.
#[test]
fn a_deadline_goes_back_to_what_it_was_before_both() {
    let [before, first, second] =
        [(1, 100), (2, 200), (3, 300)].map(|(holds, at)| Hold { holds, deadline: Deadline::At(at), token: Some(1) });
    let step = |before, given| Step {
        before: Some(before),
        given,
        ..undo(1, &owner(1), &[key(1)], (1, 1, 1)).steps.remove(0)
    };
    let gone = step(before, first);
    let mut later = undo(2, &owner(1), &[key(1)], (1, 1, 1));
    later.steps = vec![step(first, second)];
    later.rebase(&gone, 1);
    assert_eq!(later.steps[0].before, Some(before));
    assert_eq!(later.steps[0].given, Hold { holds: 2, ..second });
    // Somebody else moved the deadline in between: that stays.
    let mut later = undo(2, &owner(1), &[key(1)], (1, 1, 1));
    later.steps = vec![step(Hold { deadline: Deadline::At(250), ..first }, second)];
    later.rebase(&gone, 1);
    assert_eq!(later.steps[0].before.map(|it| it.deadline), Some(Deadline::At(250)));
}

#[test]
fn what_has_another_token_by_now_is_found_under_that() {
    let mut it = undo(1, &owner(1), &[key(1), key(2)], (0, 1, 1)).under(7);
    it.retoken(&key(1).name, (Some(6), Some(8)));
    it.retoken(&key(3).name, (Some(7), Some(8)));
    assert!(it.steps.iter().all(|step| step.given.token == Some(7)), "those are other holds");
    it.retoken(&key(1).name, (Some(7), Some(8)));
    assert_eq!(it.steps.iter().map(|step| step.given.token).collect::<Vec<_>>(), [Some(8), Some(7)]);
}

/// A grant gave a hold a newer token and was rolled back: rolling back what was built on it leads to the older one.
#[test]
fn a_token_goes_back_to_what_it_was_before_both() {
    let under = |holds, token| Hold { holds, deadline: Deadline::At(100), token: Some(token) };
    let step = |before, given| Step {
        before: Some(before),
        given,
        ..undo(1, &owner(1), &[key(1)], (1, 1, 1)).steps.remove(0)
    };
    let gone = step(under(1, 7), under(2, 8));
    let mut later = undo(2, &owner(1), &[key(1)], (1, 1, 1));
    later.steps = vec![step(under(2, 8), under(3, 8))];
    later.rebase(&gone, 1);
    assert_eq!(later.steps[0].before, Some(under(1, 7)));
    // It was built on another token.
    later.steps = vec![step(under(2, 9), under(3, 9))];
    later.rebase(&gone, 1);
    assert_eq!(later.steps[0].before, Some(under(1, 9)));
}
