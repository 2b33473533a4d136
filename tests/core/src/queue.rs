//! The queue: each of its views equals that of a plain list.

use super::{ELSEWHERE, cases, demand, key, owner};
use crate::lock::{LockKey, Owner, Queue, WaiterId};
use proptest::prelude::*;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

const OWNERS: u32 = 3;
const KEYS: [u32; 5] = [0, 1, 2, ELSEWHERE, ELSEWHERE + 1];

#[derive(Clone, Debug)]
enum Act {
    /// Owner, keys, and time of arrival.
    Join(u32, BTreeSet<u32>, u64),
    Leave(usize),
    /// A key is looked at then, or at this time at the latest.
    LookAt(u32, Option<u64>),
    LookEarlier(u32, u64),
    TakeLook(u64),
}

fn act() -> impl Strategy<Value = Act> {
    let some = prop::collection::btree_set(prop::sample::select(KEYS.to_vec()), 1..3);
    prop_oneof![
        3 => (0..OWNERS, some, 0_u64..4).prop_map(|(owner, keys, arrived)| Act::Join(owner, keys, arrived)),
        2 => (0..20_usize).prop_map(Act::Leave),
        2 => (0..3_u32, prop::option::of(0_u64..9)).prop_map(|(key, at)| Act::LookAt(key, at)),
        1 => (0..3_u32, 0_u64..9).prop_map(|(key, at)| Act::LookEarlier(key, at)),
        1 => (0_u64..9).prop_map(Act::TakeLook),
    ]
}

/// The waiters in order of arrival: owner and keys.
type Plain = BTreeMap<WaiterId, (u32, BTreeSet<u32>)>;

fn ids(plain: &Plain, is_meant: impl Fn(u32, &BTreeSet<u32>) -> bool) -> Vec<WaiterId> {
    plain.iter().filter(|(_, (owner, keys))| is_meant(*owner, keys)).map(|(id, _)| *id).collect()
}

fn check(queue: &Queue<()>, plain: &Plain, from: WaiterId) -> Result<(), TestCaseError> {
    let mut contended_keys: Vec<(i32, Reverse<usize>, LockKey)> = Vec::new();
    for number in KEYS {
        let (key, lane) = (key(number), ids(plain, |_, keys| keys.contains(&number)));
        let several = ids(plain, |_, keys| keys.contains(&number) && keys.len() > 1);
        prop_assert!(queue.multi_key_ahead(&key, from).map(|it| it.id).eq(several.into_iter().filter(|id| *id < from)));
        prop_assert!(queue.lane(key.db, &key.name).map(|it| it.id).eq(lane.iter().copied()));
        prop_assert_eq!(queue.head(key.db, &key.name), lane.first().copied());
        prop_assert_eq!(queue.waiting(key.db, &key.name), lane.len());
        prop_assert_eq!(queue.has_behind(&key, from), lane.iter().any(|id| *id > from));
        let is_contended = queue.contended_key(key.db, &key.name).is_some_and(|it| it == key);
        prop_assert_eq!(is_contended, !lane.is_empty());
        if lane.len() > 1 {
            contended_keys.push((key.db, Reverse(lane.len()), key.clone()));
        }
        for who in 0..OWNERS {
            let right = ids(plain, |owner, keys| owner == who && keys.contains(&number));
            prop_assert_eq!(queue.request_of(&owner(who), &key), right.first().copied());
        }
    }
    contended_keys.sort();
    for db in 0..2 {
        let right =
            contended_keys.iter().filter(|(of, ..)| *of == db).map(|(_, Reverse(many), key)| (key.clone(), *many));
        prop_assert_eq!(queue.longest_queues(db).collect::<Vec<_>>(), right.collect::<Vec<_>>());
    }
    for who in 0..OWNERS {
        let own = ids(plain, |owner, _| owner == who);
        prop_assert_eq!(queue.waits(&owner(who)), !own.is_empty());
    }
    let keys: BTreeSet<_> = plain.values().flat_map(|(_, keys)| keys).map(|number| key(*number)).collect();
    prop_assert_eq!((queue.contended(), queue.len(), queue.is_empty()), (keys.len(), plain.len(), plain.is_empty()));
    prop_assert!(queue.iter().map(|it| it.id).eq(plain.keys().copied()));
    prop_assert!(plain.keys().all(|id| *id < queue.end()));
    prop_assert!(queue.from(from).map(|it| it.id).eq(plain.range(from..).map(|(id, _)| *id)));
    Ok(())
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn queue_indexes_agree_with_a_list(acts in prop::collection::vec(act(), 0..40), from in 0..20_u64) {
        let (mut queue, mut plain) = (Queue::default(), Plain::new());
        let mut looks: BTreeMap<u32, u64> = BTreeMap::new();
        for act in acts {
            match act {
                // An owner has one request for a key.
                Act::Join(who, numbers, _) if plain.values().any(|(owner, keys)| *owner == who && !keys.is_disjoint(&numbers)) => {}
                Act::Join(who, numbers, arrived) => {
                    let next = queue.next_id(arrived);
                    let keys: Vec<LockKey> = numbers.iter().map(|number| key(*number)).collect();
                    let id = queue.join(owner(who), keys.clone(), demand(1), arrived, Some(9), ());
                    prop_assert!(id == next && plain.insert(id, (who, numbers)).is_none());
                    let it = queue.get(id).expect("the waiter is queued");
                    prop_assert!(it.owner == owner(who) && *it.keys == *keys && it.until == Some(9));
                }
                Act::Leave(nth) => {
                    let id = plain.keys().nth(nth).copied();
                    let left = id.and_then(|id| queue.leave(id));
                    prop_assert_eq!(left.map(|it| it.id), id);
                    if let Some(id) = id {
                        plain.remove(&id);
                        prop_assert!(queue.leave(id).is_none() && queue.get(id).is_none());
                    }
                }
                Act::LookAt(number, at) => {
                    queue.look_at(&key(number), at);
                    looks.remove(&number);
                    looks.extend(at.map(|at| (number, at)));
                }
                Act::LookEarlier(number, at) => {
                    queue.look_earlier(&key(number), at);
                    let before = looks.entry(number).or_insert(at);
                    *before = at.min(*before);
                }
                Act::TakeLook(now) => {
                    let due = looks.iter().map(|(number, at)| (*at, *number)).min().filter(|(at, _)| *at <= now);
                    prop_assert_eq!(queue.take_look(now), due.map(|(_, number)| key(number)));
                    due.iter().for_each(|(_, number)| { looks.remove(number); });
                }
            }
            // A key is looked at as long as a request waits for it.
            looks.retain(|number, _| plain.values().any(|(_, keys)| keys.contains(number)));
            prop_assert_eq!(queue.first_look(), looks.values().min().copied());
            for who in 0..OWNERS {
                prop_assert!(queue.of_actor(&owner(who), 100).map(|it| it.id).eq(ids(&plain, |owner, _| owner == who)));
            }
            check(&queue, &plain, WaiterId { arrived: from % 4, ticket: from })?;
        }
    }
}

/// A list of the owner's waits that is copied as a whole would take minutes instead of a second.
#[test]
fn many_waits_of_one_owner_cost_as_much_as_of_many_owners() {
    const WAITS: u32 = 400_000;
    let mut queue = Queue::default();
    let ids: Vec<WaiterId> = (0..WAITS)
        .map(|number| queue.join(b"actor##1".as_slice().into(), vec![key(number)], demand(1), 0, None, ()))
        .collect();
    let who: Owner = b"actor##1".as_slice().into();
    for (number, id) in ids.iter().enumerate() {
        let at = key(number as u32);
        assert_eq!(queue.request_of(&who, &at), Some(*id));
        assert_eq!(queue.of_actor(&Owner::from(&b"actor"[..]), 10).next().map(|waiter| waiter.id), Some(*id));
        assert!(queue.leave(*id).is_some());
    }
    assert!(queue.is_empty() && !queue.waits(&who));
}
