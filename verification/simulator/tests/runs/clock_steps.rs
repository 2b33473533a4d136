//! Clock steps.

use crate::{breaks_nothing, expect_reply};

/// Also when writes are refused, or both happen in one iteration.
#[test]
fn bound_hold_follows_clock_step_after_swap() {
    breaks_nothing(
        "a LOCK.ACQUIRE k2 o0 WATCHDOG
         +120
         d SWAPDB 0 1
         a CONFIG SET min-replicas-to-write 1
         +1200
         !clock 60000",
    );
    breaks_nothing(
        "b LOCK.ACQUIRE k1 o0 EPHEMERAL
         b LOCK.ACQUIRE k1 o2 WAIT 300
         +1
         c LOCK.ACQUIRE k1 o2
         !clock 60000
         b SWAPDB 0 1
         +0
         !clock 60000",
    );
}

/// History A9: the remaining lease stays the same, also while writes are refused.
#[test]
fn bound_hold_follows_clock_step() {
    for by in ["60000", "-60000", "200"] {
        for flag in ["WATCHDOG", "EPHEMERAL", "SESSION $s"] {
            breaks_nothing(&format!(
                "a LOCK.ACQUIRE k o {flag}
                 b LOCK.ACQUIRE k p WAIT 0
                 +20
                 !clock {by}
                 c LOCK.ACQUIRE k q
                 +400
                 a LOCK.RELEASE k o"
            ));
        }
        breaks_nothing(&format!(
            "a LOCK.ACQUIRE k o WATCHDOG
             a CONFIG SET min-replicas-to-write 1
             +20
             !clock {by}
             +400
             !clock {by}
             +400
             a CONFIG SET min-replicas-to-write 0
             b LOCK.ACQUIRE k p
             +400"
        ));
    }
    // The key expires, and the clock is set back before anything else happens.
    breaks_nothing(
        "c LOCK.ACQUIRE k o SESSION $s
         +3
         c PERSIST k
         !clock 60000
         +3
         !clock -60000
         +400",
    );
}

/// The module writes the lock again after a clock step.
#[test]
fn rewritten_lock_keeps_its_limit() {
    breaks_nothing(
        "c LOCK.ACQUIRE k a SHARED WATCHDOG
         c LOCK.ACQUIRE k b LIMIT 2 WATCHDOG
         +3
         !clock 60000
         d LOCK.ACQUIRE k c LIMIT 3
         +400",
    );
    breaks_nothing(
        "d LOCK.ACQUIRE k a LIMIT 3 EPHEMERAL
         a LOCK.ACQUIRE k b LEASE 3600001 LIMIT 2
         +3
         !clock 60000
         c LOCK.ACQUIRE k c SHARED
         +400",
    );
}

/// The re-entry came over a connection to which nothing is bound.
#[test]
fn rewritten_lock_keeps_limit_of_reentry() {
    expect_reply(
        "a LOCK.ACQUIRE k a SHARED WATCHDOG
         b LOCK.ACQUIRE k b LIMIT 2
         c LOCK.ACQUIRE k a LIMIT 2
         +400
         !clock 60000
         d LOCK.ACQUIRE k d SHARED
         +1
         e LOCK.ACQUIRE k e SHARED
         +400",
        'e',
        "null",
    );
}

/// Another client's change of the expiry follows each later step, however late the module reads the key.
#[test]
fn changed_expiry_follows_later_clock_step_while_writes_are_refused() {
    for before in ["", "b LOCK.ACQUIRE k1 o1 LEASE 7200000 SESSION $s"] {
        for by in ["200", "-200"] {
            breaks_nothing(&format!(
                "{before}
                 b LOCK.ACQUIRE k2 o2 SESSION $s
                 b LOCK.RELEASE k2 o2
                 +20
                 !clock -200
                 b LOCK.ACQUIRE k0 o0 LEASE 7200000 SESSION $s
                 b PEXPIRE k0 100000
                 b CONFIG SET min-replicas-to-write 1
                 +400
                 !clock {by}
                 +400"
            ));
        }
    }
}

/// Another client ends a hold whose key has yet to follow a step, while the server refuses writes: no later step
/// restores it.
#[test]
fn clock_step_restores_no_ended_hold() {
    for ends in ["DEL k0", "PEXPIRE k0 50"] {
        expect_reply(
            &format!(
                "b LOCK.ACQUIRE k0 o0 LEASE 7200000 SESSION $s
                 +20
                 !clock -200
                 c {ends}
                 c CONFIG SET min-replicas-to-write 1
                 +400
                 !clock -200
                 c CONFIG SET min-replicas-to-write 0
                 +400
                 c LOCK.ACQUIRE k0 o1
                 +1"
            ),
            'c',
            "18000",
        );
    }
}

/// A lease expires while clients are paused, so its key is hidden and not removed. A step back does not prolong it.
#[test]
fn clock_step_back_prolongs_no_bound_lease_that_expired_in_pause() {
    for flag in ["EPHEMERAL", "WATCHDOG", "SESSION $s"] {
        for end in ["", "b !end"] {
            expect_reply(
                &format!(
                    "b LOCK.ACQUIRE k o LEASE 50 {flag}
                     a CLIENT PAUSE 1000
                     +400
                     !clock -60000
                     {end}
                     +1200
                     c LOCK.ACQUIRE k p
                     +1"
                ),
                'c',
                "18000",
            );
        }
    }
}

/// A lease expires, its owner waits for the lock, and then the clock is set back, so that the hold exists
/// again.
#[test]
fn waiting_owner_reenters_hold_that_clock_step_restored() {
    breaks_nothing(
        "a LOCK.ACQUIRE k0 o2 LIMIT 3
         c LOCK.ACQUIRE k0 o0 LIMIT 3
         t LOCK.ACQUIRE k0 o2 LIMIT 3
         +0
         a LOCK.RELEASE k0 o2 LEASE 100
         a REPLICAOF 127.0.0.1 1
         a REPLICAOF NO ONE
         +120
         a LOCK.ACQUIRE k0 o2 WAIT 0
         +1
         c LOCK.ACQUIRE k0 o2 SHARED HOLDS 1
         !clock -200",
    );
}

/// Replicas confirm a re-entry, which is then bound anew, while its key can't follow a step.
#[test]
fn hold_that_is_bound_anew_while_writes_are_refused_follows_step() {
    breaks_nothing(
        "!replicas 20 never never
         a CONFIG SET min-replicas-to-write 1
         a LOCK.SESSION REPLACES $s
         +1200
         b LOCK.ACQUIRE k1 o0 EPHEMERAL
         a LOCK.ACQUIRE k1 o0 REPLICAS 1
         +0
         !good 0
         !clock 200
         +20
         +20",
    );
}

/// A request that begins to wait ends the expired holds of its lock: after a step back, that of its owner would exist again.
#[test]
fn expired_hold_of_waiting_owner_is_not_restored() {
    breaks_nothing(
        "a LOCK.ACQUIRE k0 o3 LEASE 50
         a LOCK.ACQUIRE k0 o0 LEASE 50 SHARED WAIT 0
         b LOCK.ACQUIRE k0 o1 SHARED WAIT 0
         +120
         b LOCK.ACQUIRE k0 o0 WAIT 0
         +0
         !clock -60000",
    );
}

/// The module's timer is set for the end of that lease, but the event loop waits by the monotonic clock.
#[test]
fn waiter_is_served_when_a_clock_step_ends_an_unbound_lease() {
    expect_reply(
        "b LOCK.ACQUIRE k0 o3 SHARED
         e LOCK.ACQUIRE k0 o0 LEASE 3600001 LIMIT 3
         a LOCK.ACQUIRE k0 o1 LIMIT 2 WAIT 0
         +0
         !clock 60000
         +500",
        'a',
        "18000",
    );
}

/// A re-entry is confirmed before its key can follow a clock step: its binding must not take the deadline of the key.
#[test]
fn reentry_confirmed_before_its_key_follows_a_step_keeps_its_lease() {
    breaks_nothing(
        "s LOCK.ACQUIRE k0 o1 LEASE 2000
         d LOCK.ACQUIRE k0 o1 LEASE 2000 REPLICAS 1 SESSION $s
         +3
         !misconf on
         !clock 200
         !replicas 20
         +400",
    );
}

/// Its field stays in the key while writes are refused, because the lock has another holder.
#[test]
fn step_back_does_not_restore_an_expired_bound_hold_after_refused_writes() {
    breaks_nothing(
        "a LOCK.ACQUIRE k2 o3 LIMIT 3
         b LOCK.ACQUIRE k2 o2 LEASE 50 LIMIT 3 EPHEMERAL
         +1
         !misconf on
         +120
         !clock -60000",
    );
}

/// The key of a hold that was bound after a step has none to follow: what happens to it is reported at once.
#[test]
fn loss_of_hold_bound_after_a_step_is_reported_in_pause() {
    breaks_nothing(
        r"d RESTORE k0 400
         e CLIENT PAUSE 1000
         b LOCK.ACQUIRE k2 o0
         d LOCK.ACQUIRE k2 o0 $s
         +0
         e LOCK.ACQUIRE k1 o1
         b CLIENT PAUSE 5
         a PERSIST k0
         a DEBUG SLEEP 0.5
         d LOCK.ACQUIRE k0 o0
         a CLIENT PAUSE 1000
         d CLIENT PAUSE 1000
         e CLIENT PAUSE 1000
         e LOCK.ACQUIRE k1 o1 SESSION $s
         !clock -60000
         e RESTORE k1 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00 REPLACE",
    );
}

/// A sweep that a flush began examines no binding that came later, also if databases are swapped meanwhile.
#[test]
fn hold_bound_during_a_sweep_follows_clock_step_after_swap() {
    breaks_nothing(
        "s LOCK.ACQUIRE k2 o1
         a LOCK.ACQUIRE k2 o2 SHARED WAIT 0
         a SWAPDB 0 1
         a LOCK.ACQUIRE k1 o2 SESSION $s
         a SWAPDB 0 1
         b FLUSHALL
         b LOCK.ACQUIRE k2 o1 WAIT 0 SESSION $s
         +0
         !clock 60000",
    );
}
