//! Confirmations: each is confirmed, missed or cancelled once, in order.

use super::{key, owner, request};
use crate::server::clock::Now;
use crate::server::replicas::Offsets;
use crate::state::confirmations::{Confirmation, ConfirmationId, ConfirmedItem, Settled};
use crate::state::pending::Ticket;
use crate::state::{Answer, Confirmations, GrantId};

/// A grant that `needed` replicas must have by 100.
fn grant(number: u64, needed: u32) -> Confirmation {
    let request = request(1, Ticket(number), owner(1), [key(1)]);
    let what = ConfirmedItem::Reply { request, answer: Answer::Token(number), grant: GrantId(number) };
    Confirmation { what, needed, target: None, began: Now { micros: 0 }, until: 100 }
}

fn number(it: &Confirmation) -> u64 {
    if let ConfirmedItem::Reply { request, .. } = &it.what { request.requester.ticket.0 } else { 0 }
}

/// Replicas that have confirmed up to these offsets.
fn have(confirmed: &[u64]) -> Offsets {
    Offsets { written: 0, confirmed: confirmed.to_vec() }
}

fn settled(all: &Confirmations, confirmed: &[u64], now: u64) -> Vec<ConfirmationId> {
    all.settled(&have(confirmed), now, 100)
}

#[test]
fn grant_is_confirmed_by_enough_replicas_once_they_were_asked() {
    let mut all = Confirmations::default();
    let id = all.begin(grant(1, 2));
    assert!(settled(&all, &[50, 50], 0).is_empty());
    all.asked(40, 10);
    for too_few in [&[][..], &[40], &[39, 40], &[39, 39, 39]] {
        assert!(settled(&all, too_few, 0).is_empty() && !all.any_confirmed(&have(too_few)), "{too_few:?}");
    }
    assert!(all.any_confirmed(&have(&[40, 7, 41])));
    assert_eq!(settled(&all, &[40, 7, 41], 0), [id]);
    assert_eq!(all.len(), 1);
    let Some(Settled::Confirmed(it)) = all.take(id, &have(&[40, 41])) else { panic!("it is confirmed") };
    assert_eq!(number(&it), 1);
    assert!(all.take(id, &have(&[40, 41])).is_none());
    assert_eq!((all.len(), all.is_empty()), (0, true));
}

#[test]
fn grant_is_missed_when_its_time_is_over() {
    let mut all = Confirmations::default();
    let asked = all.begin(grant(1, 2));
    all.asked(40, 10);
    let never_asked = all.begin(grant(2, 1));
    assert!(settled(&all, &[40], 99).is_empty());
    assert_eq!(settled(&all, &[40], 100), [asked, never_asked]);
    assert!(!all.is_empty());
    assert!(matches!(all.take(asked, &have(&[40, 39])), Some(Settled::Missed(it, 1)) if number(&it) == 1));
    assert!(matches!(all.take(never_asked, &have(&[40])), Some(Settled::Missed(it, 0)) if number(&it) == 2));
}

/// A grant that was written after a request for acknowledgement needs another one: the answer to the first does not
/// cover it.
#[test]
fn acknowledgement_covers_only_earlier_writes() {
    let mut all = Confirmations::default();
    let first = all.begin(grant(1, 1));
    all.asked(40, 10);
    let second = all.begin(grant(2, 1));
    all.asked(60, 11);
    assert_eq!(settled(&all, &[50], 12), [first]);
    assert_eq!(settled(&all, &[60], 12), [first, second]);
    assert_eq!(all.settled(&have(&[60]), 12, 1), [first]);
}

#[test]
fn acknowledgements_are_expected_soon_after_request() {
    let mut all = Confirmations::default();
    all.asked(1, 100);
    assert!(!all.expects_news(100));
    assert!(!all.expects_news(100), "nothing is pending");
    all.begin(grant(1, 1));
    assert!(all.expects_news(105));
    assert!(!all.expects_news(106), "too late");
    all.asked(1, 200);
    assert!(!all.expects_news(200), "in the iteration in which the replicas are asked");
    assert!(all.expects_news(200));
}

/// Grants that can't be confirmed delay no others, however many there are. Those that need fewer replicas are found,
/// and those that need more than there are cost nothing.
#[test]
fn unconfirmable_grants_delay_no_others() {
    let mut all = Confirmations::default();
    for number in 0..10_000 {
        all.begin(grant(number, 3));
    }
    let last = all.begin(grant(10_000, 1));
    all.asked(40, 10);
    assert_eq!(settled(&all, &[40, 40], 12), [last]);
    assert_eq!(settled(&all, &[39, 39, 40], 12), [last]);
    assert_eq!(settled(&all, &[40, 40, 40], 12).len(), 100);
    assert!(all.remove(last).is_some() && all.remove(last).is_none());
    assert!(settled(&all, &[39, 39, 40], 12).is_empty());
    assert_eq!(all.len(), 10_000);
}
