//! Undelivered grants: each is delivered or revoked once, hold by hold. Revoking one takes nothing that another grant
//! relies on.

use super::{home, key, owner};
use crate::lock::Deadline;
use crate::state::pending::{OnBehalf, Ticket};
use crate::state::{Basis, Grant, GrantId, GrantedHold, Progress, Revocation, Undelivered};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn grant(client: u64, who: u8, keys: &[u8], basis: Basis, undo: u64) -> Grant {
    let hold = |number: &u8| GrantedHold {
        name: key(*number).name,
        token: 7,
        deadline: Deadline::At(100),
        undo,
        binding: None,
    };
    let (holds, on_behalf) = (keys.iter().map(hold).collect(), OnBehalf::Session);
    let (home, owner, ticket) = (home(0), owner(who), Ticket(client));
    Grant { home, owner, client, on_behalf, ticket, basis, holds, event: None }
}

/// An undelivered grant of key 1.
fn begin(all: &mut Undelivered, basis: Basis, undo: u64) -> GrantId {
    all.begin(grant(1, 1, &[1], basis, undo), Progress::Delivering)
}

/// By how much the next revocation lowers the hold of key 1.
fn revoked(all: &mut Undelivered) -> Option<u64> {
    all.next_revoked().map(|it| it.undo)
}

fn keep(all: &mut Undelivered, budget: u64) -> u64 {
    let (name, who) = (key(1).name, owner(1));
    all.keep((0, &name, &who), 7, budget)
}

#[test]
fn revoke_undoes_what_grant_added() {
    for (basis, undo) in [(Basis::New, 3), (Basis::OneMore, 1)] {
        let mut all = Undelivered::default();
        let id = begin(&mut all, basis, undo);
        all.revoke(id);
        all.revoke(id);
        assert!(all.get(id).is_none() && all.is_revoked());
        assert_eq!([revoked(&mut all), revoked(&mut all)], [Some(undo), None]);
        assert!(all.is_empty() && all.is_consistent());
    }
    let mut all = Undelivered::default();
    let id = begin(&mut all, Basis::Renewal, 0);
    all.revoke(id);
    assert!(all.is_empty() && !all.is_revoked());
}

/// An earlier hold of the owner has ended, and its grant was not delivered.
#[test]
fn repetition_keeps_no_grant_of_another_hold() {
    let mut all = Undelivered::default();
    let first = begin(&mut all, Basis::New, 1);
    let (name, who) = (key(1).name, owner(1));
    assert_eq!(all.keep((0, &name, &who), 8, 0), 0);
    all.revoke(first);
    assert_eq!(revoked(&mut all), Some(1));
}

/// A request that repeats an undelivered one, and is answered at once, keeps the hold: revoking the first undoes
/// nothing.
#[test]
fn repetition_that_is_answered_keeps_the_hold() {
    let mut all = Undelivered::default();
    let first = begin(&mut all, Basis::New, 1);
    assert_eq!(keep(&mut all, 0), 1);
    all.revoke(first);
    assert!(all.is_empty() && !all.is_revoked());
    // Holds beyond those that the repetition relies on can be undone.
    let first = begin(&mut all, Basis::New, 3);
    assert_eq!(keep(&mut all, 2), 1);
    all.revoke(first);
    assert_eq!(revoked(&mut all), Some(2));
}

/// If neither a grant nor its repetition is delivered, the hold is undone, whichever fails first. If one is, it stays.
#[test]
fn hold_is_undone_when_grant_and_repetition_fail() {
    for order in [[0, 1], [1, 0]] {
        let mut all = Undelivered::default();
        let first = begin(&mut all, Basis::New, 1);
        let undo = keep(&mut all, 0);
        let both = [first, begin(&mut all, Basis::Repetition, undo)];
        all.revoke(both[order[0]]);
        assert_eq!((revoked(&mut all), all.is_consistent()), (None, true));
        all.revoke(both[order[1]]);
        assert_eq!((revoked(&mut all), revoked(&mut all), all.is_empty()), (Some(1), None, true));
    }
    for delivered in [0, 1] {
        let mut all = Undelivered::default();
        let first = begin(&mut all, Basis::New, 1);
        let undo = keep(&mut all, 0);
        let both = [first, begin(&mut all, Basis::Repetition, undo)];
        all.delivered(both[delivered]);
        all.revoke(both[1 - delivered]);
        assert_eq!((revoked(&mut all), all.is_empty(), all.is_consistent()), (None, true, true));
    }
}

/// A re-entry adds a hold, which is undone independently.
#[test]
fn reentry_is_undone_independently() {
    let mut all = Undelivered::default();
    let [first, more] = [(Basis::New, 1), (Basis::OneMore, 1)].map(|(basis, undo)| begin(&mut all, basis, undo));
    all.delivered(first);
    all.revoke(more);
    assert_eq!((revoked(&mut all), revoked(&mut all), all.is_empty()), (Some(1), None, true));
}

#[test]
fn repetition_does_not_undo_a_delivered_reentry() {
    let mut all = Undelivered::default();
    let (first, reentry) = (begin(&mut all, Basis::New, 1), begin(&mut all, Basis::OneMore, 1));
    // The repetition relies on one of the two holds.
    let undo = keep(&mut all, 1);
    let repetition = begin(&mut all, Basis::Repetition, undo);
    all.delivered(reentry);
    all.revoke(repetition);
    all.revoke(first);
    assert_eq!([revoked(&mut all), revoked(&mut all)], [Some(1), None]);
}

#[test]
fn repetition_does_not_undo_an_undelivered_reentry() {
    let mut all = Undelivered::default();
    let (first, reentry) = (begin(&mut all, Basis::New, 1), begin(&mut all, Basis::OneMore, 1));
    let undo = keep(&mut all, 1);
    let repetition = begin(&mut all, Basis::Repetition, undo);
    all.revoke(repetition);
    all.revoke(first);
    assert_eq!([revoked(&mut all), revoked(&mut all)], [Some(1), None]);
    all.revoke(reentry);
    assert_eq!([revoked(&mut all), revoked(&mut all)], [Some(1), None]);
}

/// Each repetition relies on the hold that it found, even after a later one has failed.
#[test]
fn hold_stays_for_an_earlier_repetition_when_a_later_one_fails() {
    let mut all = Undelivered::default();
    let first = begin(&mut all, Basis::New, 1);
    let [earlier, later] = [(); 2].map(|()| {
        let undo = keep(&mut all, 0);
        begin(&mut all, Basis::Repetition, undo)
    });
    all.revoke(later);
    all.revoke(first);
    assert_eq!(revoked(&mut all), None);
    all.revoke(earlier);
    assert_eq!([revoked(&mut all), revoked(&mut all)], [Some(1), None]);
}

/// A grant is found only while replicas have yet to confirm it.
#[test]
fn confirming_grant_is_found_by_its_hold() {
    let mut all = Undelivered::default();
    let (name, who) = (key(1).name, owner(1));
    begin(&mut all, Basis::New, 1);
    assert_eq!(all.confirming(0, &name, &who), None);
    let id = all.begin(grant(1, 1, &[1, 2], Basis::OneMore, 1), Progress::Confirming);
    assert_eq!((all.confirming(0, &name, &who), all.confirming(1, &name, &who)), (Some(id), None));
    all.confirmed(id);
    assert_eq!((all.confirming(0, &name, &who), all.of(0, &name, &who).len()), (None, 2));
}

/// A new hold that is to be revoked is over, even if so far only its session has ended.
#[test]
fn new_hold_that_is_revoked_is_over() {
    let mut all = Undelivered::default();
    let ids = [(0, Basis::New), (1, Basis::OneMore)]
        .map(|(who, basis)| all.begin(grant(1, who, &[1], basis, 1), Progress::Delivering));
    let ends = |all: &Undelivered, who, open| all.ends(0, &key(1).name, &owner(who), |_| open);
    assert!(!ends(&all, 0, true) && ends(&all, 0, false));
    ids.iter().for_each(|id| all.revoke(*id));
    assert!(ends(&all, 0, true) && !ends(&all, 1, true));
}

/// A renewal checks for each of its keys whether a request of its owner awaits replicas. The check visits no other
/// requests, however many there are.
#[test]
fn confirming_grant_is_found_among_many_by_key_and_owner() {
    let mut all = Undelivered::default();
    let begin = |all: &mut Undelivered, who: u8| {
        all.begin(grant(u64::from(who), who, &[who % 4], Basis::New, 1), Progress::Confirming)
    };
    let ids: Vec<GrantId> = (0..200).map(|who| begin(&mut all, who)).collect();
    for (who, id) in (0..200).zip(&ids) {
        assert_eq!(all.confirming(0, &key(who % 4).name, &owner(who)), Some(*id));
        assert_eq!(all.confirming(0, &key(4).name, &owner(who)), None);
    }
    all.delivered(ids[7]);
    assert_eq!(all.confirming(0, &key(3).name, &owner(7)), None);
}

#[derive(Clone, Debug)]
enum Act {
    Begin { who: u8, keys: Vec<u8>, basis: Basis },
    Deliver(usize),
    Revoke(usize),
    NextRevoked,
    TakeRevoked(u8),
    RemoveHold(usize, u8),
}

fn act() -> impl Strategy<Value = Act> {
    let bases = prop_oneof![Just(Basis::New), Just(Basis::OneMore), Just(Basis::Renewal)];
    let keys = proptest::collection::btree_set(0..4_u8, 1..4).prop_map(|keys| keys.into_iter().collect());
    prop_oneof![
        4 => (0..3_u8, keys, bases).prop_map(|(who, keys, basis)| Act::Begin { who, keys, basis }),
        2 => (0..9_usize).prop_map(Act::Deliver),
        2 => (0..9_usize).prop_map(Act::Revoke),
        2 => Just(Act::NextRevoked),
        2 => (0..4_u8).prop_map(Act::TakeRevoked),
        1 => (0..9_usize, 0..4_u8).prop_map(|(nth, key)| Act::RemoveHold(nth, key)),
    ]
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn each_hold_is_delivered_or_revoked_once(acts in proptest::collection::vec(act(), 0..80)) {
        let mut all = Undelivered::default();
        // The model: the remaining holds of each grant, and whether it is to be revoked. Each grant has a token of its
        // own.
        type Model = BTreeMap<GrantId, (u8, Vec<u8>, Basis, bool)>;
        let (mut model, mut begun) = (Model::new(), 0);
        let take = |model: &mut Model, it: &Revocation| {
            let (who, keys, _, is_revoked) = model.get_mut(&GrantId(it.token))?;
            let at = keys.iter().position(|number| *key(*number).name == *it.key.name)?;
            keys.swap_remove(at);
            (*is_revoked && owner(*who) == it.owner).then_some(())
        };
        for act in acts {
            let nth = |nth: usize| model.keys().nth(nth % model.len().max(1)).copied();
            match act {
                Act::Begin { who, keys, basis } => {
                    let undo = u64::from(basis != Basis::Renewal);
                    let mut grant = grant(1, who, &keys, basis, undo);
                    grant.holds.iter_mut().for_each(|hold| hold.token = begun);
                    let id = all.begin(grant, Progress::Delivering);
                    prop_assert_eq!(id, GrantId(begun));
                    begun += 1;
                    model.insert(id, (who, keys, basis, false));
                }
                Act::Deliver(number) => if let Some(id) = nth(number).filter(|id| !model[id].3) {
                    let (_, keys, ..) = model.remove(&id).expect("it is there");
                    prop_assert_eq!(all.delivered(id).map(|it| it.holds.len()), Some(keys.len()));
                    prop_assert!(all.get(id).is_none() && all.delivered(id).is_none());
                },
                Act::Revoke(number) => if let Some(id) = nth(number) {
                    all.revoke(id);
                    prop_assert!(all.get(id).is_none());
                    let of_id = model.get_mut(&id).expect("there");
                    of_id.3 = true;
                    if of_id.2 == Basis::Renewal || of_id.1.is_empty() { model.remove(&id); }
                },
                Act::NextRevoked => match all.next_revoked() {
                    Some(it) => prop_assert!(take(&mut model, &it).is_some()),
                    None => {
                        prop_assert!(model.values().all(|it| !it.3 || it.1.is_empty()));
                        model.retain(|_, it| !it.3);
                    }
                },
                Act::TakeRevoked(number) => {
                    let name = key(number).name;
                    let ends = model.len() as u64; // varies, as if sessions had ended
                    prop_assert!(all.failed(0, &name, ends, |_| true).iter().all(|id| all.get(*id).is_none()));
                    for it in all.take_revoked(0, &name) {
                        prop_assert!(take(&mut model, &it).is_some());
                    }
                    prop_assert!(model.values().all(|it| !it.3 || !it.1.contains(&number)));
                }
                Act::RemoveHold(number, of) => if let Some(id) = nth(number) {
                    let keys = &mut model.get_mut(&id).expect("it is there").1;
                    prop_assert_eq!(all.remove_hold(id, &key(of).name).is_some(), keys.contains(&of));
                    keys.retain(|it| *it != of);
                },
            }
            prop_assert!(all.is_consistent(), "{:#?}", all);
            for (id, (who, keys, _, is_revoked)) in &model {
                let is_found = |it: &u8| all.of(0, &key(*it).name, &owner(*who)).contains(id) != *is_revoked;
                prop_assert!(keys.iter().all(is_found));
            }
        }
    }
}

#[test]
fn undelivered_grants_follow_their_database() {
    let mut all = Undelivered::default();
    let grant = grant(1, 1, &[1], Basis::New, 1);
    let home = grant.home.clone();
    let id = all.begin(grant, Progress::Delivering);
    all.swap(0, 3);
    home.set(3);
    let of = |all: &Undelivered, db| all.of(db, &key(1).name, &owner(1));
    assert_eq!((of(&all, 0), of(&all, 3)), (vec![], vec![id]));
    all.revoke(id);
    assert_eq!(all.next_revoked().map(|it| it.key.db), Some(3));
    assert!(all.next_revoked().is_none() && all.is_empty());
}

/// A grant that is dropped after a change of role is neither delivered nor revoked later.
#[test]
fn grant_ids_are_not_used_twice() {
    let mut all = Undelivered::default();
    let before = begin(&mut all, Basis::New, 1);
    all.revoke(before);
    all.clear();
    let after = begin(&mut all, Basis::New, 1);
    all.revoke(before);
    assert!(before != after && all.delivered(before).is_none() && !all.is_revoked() && all.get(after).is_some());
    assert_eq!(all.len(), 1);
}
