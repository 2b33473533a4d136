//! Ties: each is in all its indices, or in none.

use super::{key, owner};
use crate::books::{NewTie, TieId, Ties, Tying, Why};
use crate::lock::{Deadline, LockKey};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Act {
    Tie { client: u64, key: u8, owner: u8, token: u64, watchdog: bool, lease: u64 },
    Untie { key: u8, owner: u8 },
    UntieAll { key: u8 },
    Changed { key: u8, owner: u8, before: u64, token: u64 },
    DeadlineMoved { nth: u64, at: u64 },
    DeadlineSeen { nth: u64, at: u64 },
    TakeDue { now: u64 },
    Remove { nth: u64 },
    ClientGone { client: u64 },
    NextEnded,
    Retire,
    NextRetired,
    Doubt { key: u8 },
    NextDoubtful,
    Swap,
}

fn act() -> impl Strategy<Value = Act> {
    let (clients, keys, owners, tokens, times) = (1..4_u64, 0..3_u8, 0..3_u8, 1..4_u64, 0..100_u64);
    prop_oneof![
        6 => (clients.clone(), keys.clone(), owners.clone(), tokens.clone(), any::<bool>(), 28..32_u64).prop_map(
            |(client, key, owner, token, watchdog, lease)| Act::Tie { client, key, owner, token, watchdog, lease }
        ),
        1 => (keys.clone(), owners.clone()).prop_map(|(key, owner)| Act::Untie { key, owner }),
        1 => keys.clone().prop_map(|key| Act::UntieAll { key }),
        1 => (keys.clone(), owners, tokens.clone(), tokens)
            .prop_map(|(key, owner, before, token)| Act::Changed { key, owner, before, token }),
        1 => (0..20_u64, times.clone()).prop_map(|(nth, at)| Act::DeadlineMoved { nth, at }),
        1 => (0..20_u64, times.clone()).prop_map(|(nth, at)| Act::DeadlineSeen { nth, at }),
        1 => times.prop_map(|now| Act::TakeDue { now }),
        1 => (0..20_u64).prop_map(|nth| Act::Remove { nth }),
        1 => clients.prop_map(|client| Act::ClientGone { client }),
        1 => Just(Act::NextEnded),
        1 => Just(Act::Retire),
        1 => Just(Act::NextRetired),
        1 => keys.prop_map(|key| Act::Doubt { key }),
        1 => Just(Act::NextDoubtful),
        1 => Just(Act::Swap),
    ]
}

fn in_db(key: LockKey, number: u8) -> LockKey {
    LockKey { db: i32::from(number % 2), ..key }
}

fn carry_out(ties: &mut Ties, act: Act) {
    let place = |number: u8| in_db(key(number), number);
    match act {
        Act::Tie { client, key, owner: who, token, watchdog, lease } => {
            let tying = Tying { watchdog, ephemeral: !watchdog };
            let (key, owner, deadline) = (place(key), owner(who), Deadline::At(50));
            let new = NewTie { client, tying, key, owner, token, lease, replicas: 0, deadline };
            ties.tie(new, 10);
        }
        Act::Untie { key, owner: who } => drop(ties.untie(place(key).db, &place(key).name, &owner(who))),
        Act::UntieAll { key } => drop(ties.untie_all(place(key).db, &place(key).name)),
        Act::Changed { key, owner: who, before, token } => {
            let (key, who) = (place(key), owner(who));
            ties.changed((key.db, &key.name, &who), Some(before), token, Deadline::At(70), 10);
        }
        Act::DeadlineMoved { nth, at } => ties.deadline_moved(TieId(nth), Deadline::At(at), 10),
        Act::DeadlineSeen { nth, at } => ties.deadline_seen(TieId(nth), Deadline::At(at)),
        Act::TakeDue { now } => {
            ties.take_due(now);
        }
        Act::Remove { nth } => drop(ties.remove(TieId(nth))),
        Act::ClientGone { client } => {
            ties.client_gone(client);
        }
        Act::NextEnded => drop(ties.next_ended()),
        Act::Retire => ties.retire_all(),
        Act::NextRetired => drop(ties.next_retired()),
        Act::Doubt { key } => ties.doubt(place(key).db, &place(key).name, Why::Changed),
        Act::NextDoubtful => {
            ties.next_doubtful();
        }
        Act::Swap => ties.swap(0, 1),
    }
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn each_is_in_all_indices_or_in_none(acts in proptest::collection::vec(act(), 0..80)) {
        let mut ties = Ties::default();
        for act in acts {
            carry_out(&mut ties, act.clone());
            prop_assert!(ties.is_consistent(), "{act:?}: {ties:#?}");
        }
    }

    /// Every tie ends in one way, once: nothing is left when all connections are gone and all that ended is taken out.
    #[test]
    fn nothing_is_left_in_the_end(acts in proptest::collection::vec(act(), 0..80)) {
        let mut ties = Ties::default();
        acts.into_iter().for_each(|act| carry_out(&mut ties, act));
        (1..4).for_each(|client| { ties.client_gone(client); });
        while ties.next_ended().is_some() {}
        while ties.next_retired().is_some() {}
        while ties.next_doubtful().is_some() {}
        prop_assert!(ties.is_empty() && !ties.has_work() && ties.next_due().is_none());
    }
}
