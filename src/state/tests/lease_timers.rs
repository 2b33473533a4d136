//! LeaseTimers: at most one for each lock, the earliest first.

use super::key;
use crate::state::LeaseTimers;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Act {
    Schedule(u8, Option<u64>),
    Earlier(u8, u64),
    Take(u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (0..4_u8, proptest::option::of(0..50_u64)).prop_map(|(key, at)| Act::Schedule(key, at)),
        (0..4_u8, 0..50_u64).prop_map(|(key, at)| Act::Earlier(key, at)),
        (0..50_u64).prop_map(Act::Take),
    ]
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn as_a_plain_table_would(acts in proptest::collection::vec(act(), 0..60)) {
        let (mut timers, mut plain) = (LeaseTimers::default(), BTreeMap::new());
        for act in acts {
            match act {
                Act::Schedule(number, at) => {
                    timers.schedule(&key(number), at);
                    plain.remove(&key(number));
                    plain.extend(at.map(|at| (key(number), at)));
                }
                Act::Earlier(number, at) => {
                    timers.schedule_earlier(&key(number), at);
                    let before = plain.entry(key(number)).or_insert(at);
                    *before = at.min(*before);
                }
                Act::Take(now) => {
                    let due = plain.iter().map(|(key, at)| (*at, key.clone())).min().filter(|(at, _)| *at <= now);
                    prop_assert_eq!(timers.take_due(now), due.as_ref().map(|(_, key)| key.clone()));
                    due.iter().for_each(|(_, key)| { plain.remove(key); });
                }
            }
            prop_assert_eq!(timers.first(), plain.values().min().copied());
        }
    }
}

/// A server that has stalled puts its work off once, until its event loop has gone round.
#[test]
fn a_stalled_server_waits_one_turn() {
    let mut timers = LeaseTimers::default();
    timers.schedule(&key(1), Some(100));
    assert!(!timers.put_off_if_stalled(101, None));
    assert!(timers.put_off_if_stalled(500, None));
    assert!(timers.put_off_if_stalled(501, None), "in the same turn");
    timers.next_turn();
    assert!(!timers.put_off_if_stalled(502, None));
}

/// Two milliseconds late is not late.
#[test]
fn a_little_late_is_in_time() {
    let mut timers = LeaseTimers::default();
    timers.schedule(&key(1), Some(100));
    assert!(!timers.put_off_if_stalled(102, None));
    assert!(timers.put_off_if_stalled(103, None));
}

/// A server that is late in each turn does its work in every other.
#[test]
fn a_server_that_is_always_late_does_its_work() {
    let mut timers = LeaseTimers::default();
    for now in [500, 900, 1300] {
        timers.schedule(&key(1), Some(now - 100));
        assert!(timers.put_off_if_stalled(now, None));
        timers.next_turn();
        assert!(!timers.put_off_if_stalled(now + 200, None));
        assert_eq!(timers.take_due(now + 200), Some(key(1)));
        timers.next_turn();
    }
}

/// A backlog is put off once, and not in every other turn.
#[test]
fn a_backlog_is_put_off_once() {
    let mut timers = LeaseTimers::default();
    (0..5).for_each(|number| timers.schedule(&key(number), Some(100)));
    assert!(timers.put_off_if_stalled(500, None));
    for now in 501..506 {
        timers.next_turn();
        assert!(!timers.put_off_if_stalled(now, None), "{now}");
        assert!(timers.take_due(now).is_some());
    }
    // What has become due since then may be due to another stall.
    timers.schedule(&key(1), Some(502));
    timers.next_turn();
    assert!(timers.put_off_if_stalled(900, None));
}
