//! What replicas have yet to confirm: each is confirmed, missed or given up once, in order.

use super::{key, owner, undo};
use crate::books::confirmations::{Confirmation, ConfirmationId, Settled, What};
use crate::books::owed::Ticket;
use crate::books::{Answer, Confirmations};
use crate::server::clock::Now;
use crate::server::replicas::Offsets;

/// A grant that this many replicas must have by 100.
fn grant(serial: u64, of: u8, needed: u32) -> Confirmation {
    let undo = undo(serial, &owner(of), &[key(1)], (0, 1, 1));
    let what = What::Reply(Ticket(serial), Answer::Token(serial));
    Confirmation { what, undo, needed, target: None, began: Now { micros: 0 }, until: 100 }
}

/// Replicas that have confirmed so much.
fn have(confirmed: &[u64]) -> Offsets {
    Offsets { written: 0, confirmed: confirmed.to_vec() }
}

fn settled(all: &Confirmations, confirmed: &[u64], now: u64) -> Vec<ConfirmationId> {
    all.settled(&have(confirmed), now, 100)
}

fn serials(all: &mut Confirmations, of: u8) -> Vec<u64> {
    let mut serials = Vec::new();
    all.of_owner(&owner(of), |undo| serials.push(undo.serial));
    serials
}

#[test]
fn by_enough_replicas_and_not_before_they_were_asked() {
    let mut all = Confirmations::default();
    let id = all.begin(grant(1, 1, 2));
    assert!(settled(&all, &[50, 50], 0).is_empty());
    all.asked(40, 10);
    for too_few in [&[][..], &[40], &[39, 40], &[39, 39, 39]] {
        assert!(settled(&all, too_few, 0).is_empty() && !all.any_confirmed(&have(too_few)), "{too_few:?}");
    }
    assert!(all.any_confirmed(&have(&[40, 7, 41])));
    assert_eq!(settled(&all, &[40, 7, 41], 0), [id]);
    assert_eq!(all.len(), 1);
    let Some(Settled::Confirmed(it)) = all.take(id, &have(&[40, 41])) else { panic!("it is confirmed") };
    assert_eq!(it.undo.serial, 1);
    assert!(all.take(id, &have(&[40, 41])).is_none());
    assert_eq!((all.len(), all.is_empty()), (0, true));
}

#[test]
fn missed_when_its_time_is_over() {
    let mut all = Confirmations::default();
    let asked = all.begin(grant(1, 1, 2));
    all.asked(40, 10);
    let never_asked = all.begin(grant(2, 1, 1));
    assert!(settled(&all, &[40], 99).is_empty());
    assert_eq!(settled(&all, &[40], 100), [asked, never_asked]);
    assert!(!all.is_empty());
    assert!(matches!(all.take(asked, &have(&[40, 39])), Some(Settled::Missed(it, 1)) if it.undo.serial == 1));
    assert!(matches!(all.take(never_asked, &have(&[40])), Some(Settled::Missed(it, 0)) if it.undo.serial == 2));
}

/// What was written after the question needs another one; an answer to the first says nothing of it.
#[test]
fn each_question_is_about_what_was_written_before_it() {
    let mut all = Confirmations::default();
    let first = all.begin(grant(1, 1, 1));
    all.asked(40, 10);
    let second = all.begin(grant(2, 1, 1));
    all.asked(60, 11);
    assert_eq!(settled(&all, &[50], 12), [first]);
    assert_eq!(settled(&all, &[60], 12), [first, second]);
    assert_eq!(all.settled(&have(&[60]), 12, 1), [first]);
}

#[test]
fn answers_are_expected_soon_after_the_question_was_sent() {
    let mut all = Confirmations::default();
    all.asked(1, 100);
    assert!(!all.expects_news(100));
    assert!(!all.expects_news(100), "nothing is pending");
    all.begin(grant(1, 1, 1));
    assert!(all.expects_news(105));
    assert!(!all.expects_news(106), "too late");
    all.asked(1, 200);
    assert!(!all.expects_news(200), "in the turn of the question");
    assert!(all.expects_news(200));
}

#[test]
fn each_owner_has_its_own() {
    let mut all = Confirmations::default();
    let [first, second, third] = [(1, 1), (2, 2), (3, 1)].map(|(serial, of)| all.begin(grant(serial, of, 1)));
    assert_eq!((serials(&mut all, 1), serials(&mut all, 2)), (vec![1, 3], vec![2]));
    assert_eq!(all.abandon(first).map(|undo| undo.serial), Some(1));
    assert!(all.abandon(first).is_none());
    assert_eq!(serials(&mut all, 1), [3]);
    assert!(all.take(third, &have(&[])).is_some());
    assert!(serials(&mut all, 1).is_empty());
    assert_eq!(serials(&mut all, 2), [2]);
    assert!(all.abandon(second).is_some() && all.is_empty());
}

#[test]
fn those_of_before_are_others() {
    let mut all = Confirmations::default();
    let before = all.begin(grant(1, 1, 1));
    all.begin(grant(2, 1, 1));
    let mut retired = all.retire();
    assert!(all.is_empty() && serials(&mut all, 1).is_empty());
    let after = all.begin(grant(3, 1, 1));
    assert!(all.abandon(before).is_none() && retired.abandon(after).is_none());
    let mut left = || retired.take_any().map(|it| it.undo.serial);
    assert_eq!([left(), left(), left()], [Some(1), Some(2), None]);
}
