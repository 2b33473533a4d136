//! Maps by lock name, compared with a plain map.

use super::{ELSEWHERE, cases, key};
use crate::lock::{KeyMap, LockKey};
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Act {
    Insert(u32, u32),
    GetOrDefault(u32),
    Change(u32, u32),
    Remove(u32),
    Swap,
    Clear,
}

fn act() -> impl Strategy<Value = Act> {
    let number = || prop_oneof![0..4_u32, ELSEWHERE..ELSEWHERE + 4];
    prop_oneof![
        6 => (number(), 1..9_u32).prop_map(|(key, value)| Act::Insert(key, value)),
        3 => number().prop_map(Act::GetOrDefault),
        3 => (number(), 1..9_u32).prop_map(|(key, value)| Act::Change(key, value)),
        4 => number().prop_map(Act::Remove),
        1 => Just(Act::Swap),
        1 => Just(Act::Clear),
    ]
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn key_map_behaves_as_a_map(acts in prop::collection::vec(act(), 0..40)) {
        let (mut map, mut plain) = (KeyMap::<u32>::default(), BTreeMap::<LockKey, u32>::new());
        for act in acts {
            match act {
                Act::Insert(of, value) => prop_assert_eq!(map.insert(key(of), value), plain.insert(key(of), value)),
                Act::GetOrDefault(of) => {
                    prop_assert_eq!(*map.get_or_default(&key(of)), *plain.entry(key(of)).or_default());
                }
                Act::Change(of, value) => {
                    let (key, there) = (key(of), map.get_mut(key(of).db, &key(of).name));
                    prop_assert_eq!(there.map(|it| std::mem::replace(it, value)), plain.get(&key).copied());
                    plain.entry(key).and_modify(|it| *it = value);
                }
                Act::Remove(of) => {
                    let key = key(of);
                    prop_assert_eq!(map.remove(key.db, &key.name), plain.remove(&key));
                }
                Act::Swap => {
                    map.swap(0, 1);
                    plain = plain.into_iter().map(|(key, it)| (LockKey { db: 1 - key.db, ..key }, it)).collect();
                }
                Act::Clear => {
                    map.clear();
                    plain.clear();
                }
            }
            prop_assert_eq!((map.len(), map.is_empty()), (plain.len(), plain.is_empty()));
            let mut keys: Vec<LockKey> = map.keys().collect();
            keys.sort();
            prop_assert!(keys.iter().eq(plain.keys()), "{:?}, and not {:?}", keys, plain);
            for number in (0..4).chain(ELSEWHERE..ELSEWHERE + 4) {
                let key = key(number);
                prop_assert_eq!(map.get(key.db, &key.name), plain.get(&key));
            }
        }
        let (mut values, mut right): (Vec<u32>, Vec<u32>) = (map.into_values().collect(), plain.into_values().collect());
        values.sort_unstable();
        right.sort_unstable();
        prop_assert_eq!(values, right);
    }
}
