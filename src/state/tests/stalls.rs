//! Stalls: a server that has stalled postpones its work once, for one event-loop iteration.

use crate::state::Stalls;

#[test]
fn stalled_server_postpones_work_for_one_iteration() {
    let mut stalls = Stalls::default();
    let first = Some(100);
    assert!(!stalls.postpone(None, 500) && !stalls.postpone(first, 101));
    assert!(stalls.postpone(first, 500));
    assert!(stalls.postpone(first, 501), "in the same iteration");
    stalls.next_iteration();
    assert!(!stalls.postpone(first, 502));
}

/// Two milliseconds late is not late.
#[test]
fn two_milliseconds_late_is_no_stall() {
    let mut stalls = Stalls::default();
    assert!(!stalls.postpone(Some(100), 102));
    assert!(stalls.postpone(Some(100), 103));
}

/// A server that is late in each event-loop iteration does its work in every other one.
#[test]
fn server_that_is_always_late_does_its_work() {
    let mut stalls = Stalls::default();
    for now in [500, 900, 1300] {
        assert!(stalls.postpone(Some(now - 100), now));
        stalls.next_iteration();
        assert!(!stalls.postpone(Some(now - 100), now + 200));
        stalls.next_iteration();
    }
}

/// A backlog is postponed once, and not in every other iteration.
#[test]
fn backlog_is_postponed_once() {
    let mut stalls = Stalls::default();
    assert!(stalls.postpone(Some(100), 500));
    for now in 501..506 {
        stalls.next_iteration();
        assert!(!stalls.postpone(Some(100), now), "{now}");
    }
    // Work that has become due since then may be late because of another stall.
    stalls.next_iteration();
    assert!(stalls.postpone(Some(502), 900));
}
