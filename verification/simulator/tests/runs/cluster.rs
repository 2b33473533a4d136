//! Slots of a cluster.

use crate::{breaks_nothing, expect_reply};

#[test]
fn session_wait_ends_with_moved_when_slot_moves() {
    expect_reply(
        "a LOCK.ACQUIRE k a
         b LOCK.ACQUIRE k b WAIT 0 SESSION $s
         s LOCK.EVENTS WAIT 0
         +20
         !slot k migrates
         x DEL k
         +300
         !slot k moves
         +500",
        's',
        "MOVED",
    );
}

/// It is not renewed, its session is notified, and no request is granted.
#[test]
fn watched_hold_expires_when_cluster_is_down() {
    const DOWN: &str = "!slot k comes
         a LOCK.ACQUIRE k o LEASE 600 WATCHDOG SESSION $s
         a LOCK.ACQUIRE k p WAIT 0 SESSION $t
         +400
         s LOCK.EVENTS HEARTBEAT
         +1
         !cluster fail
         +300
         s LOCK.EVENTS HEARTBEAT
         +700
         s LOCK.EVENTS HEARTBEAT
         +1";
    breaks_nothing(DOWN);
    expect_reply(DOWN, 's', "lost");
    expect_reply(DOWN, 's', "expired");
}

/// It stays bound, and is renewed again if the slot returns in time.
#[test]
fn watched_hold_expires_when_no_node_owns_slot() {
    const UNOWNED: &str = "a LOCK.ACQUIRE k o LEASE 600 WATCHDOG SESSION $s
         +100
         s LOCK.EVENTS
         !slot k unowned
         +300
         s LOCK.EVENTS
         +300
         s LOCK.EVENTS
         +1";
    breaks_nothing(UNOWNED);
    expect_reply(UNOWNED, 's', "expired");
}

#[test]
fn hold_is_renewed_while_slot_is_imported() {
    breaks_nothing(
        "a LOCK.ACQUIRE k o LEASE 600 WATCHDOG SESSION $s
         +100
         s LOCK.EVENTS
         !slot k arrives
         +200
         s LOCK.EVENTS
         +300
         s LOCK.EVENTS
         !slot k comes
         +300
         s LOCK.EVENTS
         +1",
    );
}

/// The holder's request is queued behind one with an earlier `WAITED`, and must not wait until its own
/// hold ends.
#[test]
fn waiting_holder_reenters_when_its_slot_is_served_again() {
    expect_reply(
        "!replicas 20
         c LOCK.ACQUIRE k o REPLICAS 1
         +0
         a LOCK.ACQUIRE k o WAIT 0
         b LOCK.ACQUIRE k p WAIT 0 WAITED 60000
         +0
         !slot k unowned
         +50
         !slot k comes
         +20",
        'a',
        "18000",
    );
}
