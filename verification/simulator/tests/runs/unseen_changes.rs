//! Runs in which something changes a hold before its owner, or the checker, can see it: the module is right, and the
//! checker accepts them.

use crate::breaks_nothing;

/// Each comment says what the checker must allow.
#[test]
fn unseen_changes_violate_no_invariant() {
    let runs = [
        // Another command shortens the expiry of a shared lock, and the next grant replaces that expiry at once. A clock
        // step restores no more than the shorter one.
        "b LOCK.SESSION REPLACES $s
         b LOCK.ACQUIRE k0 o1 SHARED LEASE 50
         b PEXPIRE k0 30
         a LOCK.ACQUIRE k0 o2 LIMIT 2 REPLICAS 1
         +20
         !clock 200",
    ];
    runs.into_iter().for_each(breaks_nothing);
}
