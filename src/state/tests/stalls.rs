//! A server that has stalled puts its work off once, until its event loop has gone round.

use crate::state::Stalls;

#[test]
fn a_stalled_server_waits_one_turn() {
    let mut stalls = Stalls::default();
    let first = Some(100);
    assert!(!stalls.put_off(None, 500) && !stalls.put_off(first, 101));
    assert!(stalls.put_off(first, 500));
    assert!(stalls.put_off(first, 501), "in the same turn");
    stalls.next_turn();
    assert!(!stalls.put_off(first, 502));
}

/// Two milliseconds late is not late.
#[test]
fn a_little_late_is_in_time() {
    let mut stalls = Stalls::default();
    assert!(!stalls.put_off(Some(100), 102));
    assert!(stalls.put_off(Some(100), 103));
}

/// A server that is late in each turn does its work in every other.
#[test]
fn a_server_that_is_always_late_does_its_work() {
    let mut stalls = Stalls::default();
    for now in [500, 900, 1300] {
        assert!(stalls.put_off(Some(now - 100), now));
        stalls.next_turn();
        assert!(!stalls.put_off(Some(now - 100), now + 200));
        stalls.next_turn();
    }
}

/// A backlog is put off once, and not in every other turn.
#[test]
fn a_backlog_is_put_off_once() {
    let mut stalls = Stalls::default();
    assert!(stalls.put_off(Some(100), 500));
    for now in 501..506 {
        stalls.next_turn();
        assert!(!stalls.put_off(Some(100), now), "{now}");
    }
    // What has become due since then may be due to another stall.
    stalls.next_turn();
    assert!(stalls.put_off(Some(502), 900));
}
