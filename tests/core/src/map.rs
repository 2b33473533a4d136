//! The map that grows in parts: what a plain map would say, and how much it moves at once.

use super::cases;
use crate::lock::Map;
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

/// More than fit into one table.
const MANY: u32 = 3_000;

#[derive(Clone, Debug)]
enum Act {
    /// All keys from the first to the second.
    InsertAll(u32, u32),
    GetOrInsert(u32, u32),
    Change(u32, u32),
    RemoveAll(u32, u32),
}

fn act() -> impl Strategy<Value = Act> {
    let key = || 0..MANY;
    prop_oneof![
        (key(), key()).prop_map(|(from, to)| Act::InsertAll(from, to)),
        (key(), any::<u32>()).prop_map(|(key, value)| Act::GetOrInsert(key, value)),
        (key(), any::<u32>()).prop_map(|(key, value)| Act::Change(key, value)),
        (key(), key()).prop_map(|(from, to)| Act::RemoveAll(from, to)),
    ]
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn it_is_a_map(acts in prop::collection::vec(act(), 0..20)) {
        let (mut map, mut plain) = (Map::<u32, u32>::default(), BTreeMap::<u32, u32>::new());
        for act in acts {
            match act {
                Act::InsertAll(from, to) => {
                    (from..to).try_for_each(|key| -> Result<(), TestCaseError> {
                        prop_assert_eq!(map.insert(key, key ^ to), plain.insert(key, key ^ to));
                        Ok(())
                    })?;
                }
                Act::GetOrInsert(key, value) => {
                    prop_assert_eq!(*map.get_or_insert_with(key, || value), *plain.entry(key).or_insert(value));
                }
                Act::Change(key, value) => {
                    prop_assert_eq!(map.get_mut(&key).map(|it| std::mem::replace(it, value)), plain.get(&key).copied());
                    plain.entry(key).and_modify(|it| *it = value);
                }
                Act::RemoveAll(from, to) => {
                    (from..to).try_for_each(|key| -> Result<(), TestCaseError> {
                        prop_assert_eq!(map.remove(&key), plain.remove(&key));
                        Ok(())
                    })?;
                }
            }
            prop_assert_eq!((map.len(), map.is_empty()), (plain.len(), plain.is_empty()));
            prop_assert!((0..MANY).all(|key| map.get(&key) == plain.get(&key)));
            prop_assert!((0..MANY).all(|key| map.contains_key(&key) == plain.contains_key(&key)));
            let all: BTreeMap<u32, u32> = map.iter().map(|(key, value)| (*key, *value)).collect();
            prop_assert_eq!(&all, &plain);
            let sorted = |mut them: Vec<u32>| { them.sort_unstable(); them };
            prop_assert_eq!(sorted(map.keys().copied().collect()), plain.keys().copied().collect::<Vec<_>>());
            prop_assert_eq!(sorted(map.values().copied().collect()), sorted(plain.values().copied().collect()));
        }
        let mut values: Vec<u32> = map.into_values().collect();
        values.sort_unstable();
        let mut expected: Vec<u32> = plain.into_values().collect();
        expected.sort_unstable();
        prop_assert_eq!(values, expected);
    }
}

thread_local! {
    static HASHED: Cell<usize> = const { Cell::new(0) };
}

/// A key that counts how often keys are hashed, which is done to each that is moved.
#[derive(PartialEq, Eq)]
struct Counted(u32);

impl Hash for Counted {
    fn hash<H: Hasher>(&self, state: &mut H) {
        HASHED.set(HASHED.get() + 1);
        self.0.hash(state);
    }
}

/// The most that one of so many insertions moves.
fn most_moved(many: u32, mut insert: impl FnMut(Counted)) -> usize {
    let moved = (0..many).map(|number| {
        HASHED.set(0);
        insert(Counted(number));
        HASHED.get()
    });
    moved.max().unwrap_or(0)
}

#[test]
fn no_insertion_moves_much() {
    const LARGE: u32 = 200_000;
    let mut map = Map::default();
    assert!(most_moved(LARGE, |key| _ = map.insert(key, ())) < 4_000);
    let mut map = Map::default();
    assert!(most_moved(LARGE, |key| *map.get_or_insert_with(key, || ())) < 4_000);
    // A plain one does.
    let mut plain = foldhash::HashMap::default();
    assert!(most_moved(LARGE, |key| _ = plain.insert(key, ())) > 50_000);
}

/// Wherever what is left lies, there is not much more room than for that; and no removal moves much.
#[test]
fn what_becomes_smaller_gives_room_back() {
    const LARGE: u32 = 200_000;
    for (left, divided) in [(20_000, true), (2_000, true), (100, true), (100, false)] {
        let mut map = Map::default();
        let all = if divided { LARGE } else { 1_000 };
        (0..all).for_each(|key| _ = map.insert(Counted(key), ()));
        let most = most_moved(all - left, |Counted(key)| _ = map.remove(&Counted(left + key)));
        assert!(most < 300, "{most} moved at once, of {all} to {left}");
        let room = 16 * left as usize + if divided { 256 * 16 } else { 16 };
        assert!(map.capacity() <= room, "room for {} where {left} are left", map.capacity());
        assert_eq!(map.len(), left as usize);
    }
}

#[test]
fn only_a_large_one_is_divided() {
    let mut map = Map::default();
    let last = (0..MANY).find(|&key| {
        map.insert(key, ());
        map.is_divided()
    });
    assert_eq!(last, Some(1_024), "what fits into one table is in one");
    let mut map = Map::default();
    let last = (0..MANY).find(|&key| {
        map.get_or_insert_with(key, || ());
        map.is_divided()
    });
    assert_eq!(last, Some(1_024));
}

#[test]
fn an_empty_map_is_whole_again() {
    let mut map = Map::default();
    for _ in 0..2 {
        (0..MANY).for_each(|key| _ = map.insert(key, ()));
        assert!(map.is_divided());
        (1..MANY).for_each(|key| _ = map.remove(&key));
        assert!(map.is_divided());
        map.remove(&0);
        assert!(map.is_empty() && !map.is_divided());
    }
}
