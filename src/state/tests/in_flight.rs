//! Grants in flight: each is settled or taken back, hold by hold, once.

use super::{home, key, owner};
use crate::lock::Deadline;
use crate::lock::map::tests::SEARCHED;
use crate::state::owed::{OnBehalf, Ticket};
use crate::state::{Grant, GrantId, GrantedHold, InFlight, TakeBack};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn grant(client: u64, who: u8, keys: &[u8], back: TakeBack) -> Grant {
    let hold = |number: &u8| GrantedHold { name: key(*number).name, token: client, deadline: Deadline::At(100) };
    let (holds, on_behalf) = (keys.iter().map(hold).collect(), OnBehalf::Session);
    Grant { home: home(0), owner: owner(who), client, on_behalf, ticket: Ticket(client), back, holds }
}

/// A connection goes on behind a reply that is written and not sent: when that has ended, the reply is still not sent.
#[test]
fn behind_its_own_grant_a_connection_begins_another() {
    let mut all = InFlight::default();
    let first = all.begin(grant(1, 1, &[1, 2], TakeBack::Hold));
    let second = all.begin(grant(1, 1, &[1], TakeBack::One));
    let of = |all: &InFlight, number: u8| all.of(0, &key(number).name, &owner(1));
    assert_eq!((of(&all, 1), of(&all, 2)), (Some(second), Some(first)));
    all.owe(second);
    assert_eq!(all.next_owed().map(|owed| owed.back), Some(TakeBack::One));
    assert_eq!((of(&all, 1), all.is_consistent()), (Some(first), true));
    all.settle(first);
    assert_eq!((of(&all, 1), of(&all, 2), all.is_consistent()), (None, None, true));
}

/// Behind the answer to a re-entry, its connection gives one hold back: nothing of it is taken back any more. A new hold
/// is, all of it.
#[test]
fn what_was_given_back_behind_its_answer_is_not_taken_back_as_well() {
    let mut all = InFlight::default();
    let one = all.begin(grant(1, 1, &[1, 2], TakeBack::One));
    all.gave_one_back(0, &key(1).name, &owner(1));
    all.owe(one);
    assert_eq!(all.next_owed().map(|owed| owed.key), Some(key(2)));
    assert_eq!((all.next_owed(), all.is_empty(), all.is_consistent()), (None, true, true));
    let hold = all.begin(grant(1, 1, &[1], TakeBack::Hold));
    all.gave_one_back(0, &key(1).name, &owner(1));
    all.owe(hold);
    assert_eq!(all.next_owed().map(|owed| owed.back), Some(TakeBack::Hold));
}

/// What is only in flight is not looked for before each look at a lock, a new hold that is owed ends.
#[test]
fn a_new_hold_that_is_owed_is_over() {
    let mut all = InFlight::default();
    let ids = [TakeBack::Hold, TakeBack::One].map(|back| all.begin(grant(1, back as u8, &[1], back)));
    let ends = |all: &InFlight, back: TakeBack, open| all.ends(0, &key(1).name, &owner(back as u8), |_| open);
    assert!(!ends(&all, TakeBack::Hold, true) && ends(&all, TakeBack::Hold, false));
    ids.iter().for_each(|id| all.owe(*id));
    assert!(ends(&all, TakeBack::Hold, true) && !ends(&all, TakeBack::One, true));
}

/// F6: a renewal asks for each of its keys whether a request of its owner is in flight, and however many are, goes through
/// none of the others.
#[test]
fn one_of_many_is_found_by_its_key_and_owner() {
    let mut all = InFlight::default();
    let ids: Vec<GrantId> =
        (0..200).map(|who| all.begin(grant(u64::from(who), who, &[who % 4], TakeBack::Hold))).collect();
    SEARCHED.set(0);
    for (who, id) in (0..200).zip(&ids) {
        assert_eq!(all.of(0, &key(who % 4).name, &owner(who)), Some(*id));
        assert_eq!(all.of(0, &key(4).name, &owner(who)), None);
    }
    all.settle(ids[7]);
    assert_eq!(all.of(0, &key(3).name, &owner(7)), None);
    assert_eq!(SEARCHED.get(), 0);
}

#[derive(Clone, Debug)]
enum Act {
    Begin { who: u8, keys: Vec<u8>, back: TakeBack },
    Settle(usize),
    Owe(usize),
    NextOwed,
    TakeOwed(u8),
    RemoveHold(usize, u8),
}

fn act() -> impl Strategy<Value = Act> {
    let backs = prop_oneof![Just(TakeBack::Hold), Just(TakeBack::One), Just(TakeBack::Nothing)];
    let keys = proptest::collection::btree_set(0..4_u8, 1..4).prop_map(|keys| keys.into_iter().collect());
    prop_oneof![
        4 => (0..3_u8, keys, backs).prop_map(|(who, keys, back)| Act::Begin { who, keys, back }),
        2 => (0..9_usize).prop_map(Act::Settle),
        2 => (0..9_usize).prop_map(Act::Owe),
        2 => Just(Act::NextOwed),
        2 => (0..4_u8).prop_map(Act::TakeOwed),
        1 => (0..9_usize, 0..4_u8).prop_map(|(nth, key)| Act::RemoveHold(nth, key)),
    ]
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn each_hold_is_dealt_with_once(acts in proptest::collection::vec(act(), 0..80)) {
        let mut all = InFlight::default();
        // What is left of each grant, and what of it is to be taken back.
        let mut plain: BTreeMap<GrantId, (u8, Vec<u8>, TakeBack, bool)> = BTreeMap::new();
        let take = |plain: &mut BTreeMap<GrantId, (u8, Vec<u8>, TakeBack, bool)>, who: &[u8], name: &[u8]| {
            let found = plain.values_mut().find(|it| it.3 && *owner(it.0) == *who && it.1.iter().any(|it| *key(*it).name == *name));
            found.map(|it| { it.1.retain(|it| *key(*it).name != *name); it.2 })
        };
        for act in acts {
            let nth = |nth: usize| plain.keys().nth(nth % plain.len().max(1)).copied();
            match act {
                Act::Begin { who, keys, back } => {
                    if plain.values().all(|it| it.0 != who || !keys.iter().any(|key| it.1.contains(key))) {
                        plain.insert(all.begin(grant(1, who, &keys, back)), (who, keys, back, false));
                    }
                }
                Act::Settle(number) => if let Some(id) = nth(number).filter(|id| !plain[id].3) {
                    let (_, keys, ..) = plain.remove(&id).expect("it is there");
                    prop_assert_eq!(all.settle(id).map(|it| it.holds.len()), Some(keys.len()));
                    prop_assert!(all.get(id).is_none() && all.settle(id).is_none());
                },
                Act::Owe(number) => if let Some(id) = nth(number) {
                    all.owe(id);
                    prop_assert!(all.get(id).is_none());
                    if plain[&id].2 == TakeBack::Nothing { plain.remove(&id); } else { plain.get_mut(&id).expect("there").3 = true; }
                },
                Act::NextOwed => match all.next_owed() {
                    Some(it) => prop_assert_eq!(take(&mut plain, &it.owner, &it.key.name), Some(it.back)),
                    None => {
                        prop_assert!(plain.values().all(|it| !it.3 || it.1.is_empty()));
                        plain.retain(|_, it| !it.3);
                    }
                },
                Act::TakeOwed(number) => {
                    let name = key(number).name;
                    let ends = plain.len() as u64; // whether or not any session has ended
                    for it in all.take_owed(0, &name, ends, |_| true) {
                        prop_assert_eq!(take(&mut plain, &it.owner, &name), Some(it.back));
                    }
                    prop_assert!(plain.values().all(|it| !it.3 || !it.1.contains(&number)));
                }
                Act::RemoveHold(number, of) => if let Some(id) = nth(number) {
                    let keys = &mut plain.get_mut(&id).expect("it is there").1;
                    prop_assert_eq!(all.remove_hold(id, &key(of).name).is_some(), keys.contains(&of));
                    keys.retain(|it| *it != of);
                },
            }
            prop_assert!(all.is_consistent(), "{:#?}", all);
            for (who, keys, _, owed) in plain.values() {
                prop_assert!(keys.iter().all(|it| all.of(0, &key(*it).name, &owner(*who)).is_some() != *owed));
            }
        }
    }
}

#[test]
fn they_follow_their_database() {
    let mut all = InFlight::default();
    let grant = grant(1, 1, &[1], TakeBack::Hold);
    let home = grant.home.clone();
    let id = all.begin(grant);
    all.swap(0, 3);
    home.set(3);
    assert_eq!((all.of(0, &key(1).name, &owner(1)), all.of(3, &key(1).name, &owner(1))), (None, Some(id)));
    all.owe(id);
    assert_eq!(all.next_owed().map(|it| it.key.db), Some(3));
    assert!(all.next_owed().is_none() && all.is_empty());
}

/// What is dropped with the role is neither settled nor taken back later.
#[test]
fn names_are_not_used_twice() {
    let mut all = InFlight::default();
    let before = all.begin(grant(1, 1, &[1], TakeBack::Hold));
    all.owe(before);
    all.clear();
    let after = all.begin(grant(1, 1, &[1], TakeBack::Hold));
    all.owe(before);
    assert!(before != after && all.settle(before).is_none() && !all.is_owed() && all.get(after).is_some());
    assert_eq!(all.len(), 1);
}
