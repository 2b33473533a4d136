//! Cycles of waits.

use crate::{breaks_nothing, expect_reply};

#[test]
fn repeated_request_closes_no_cycle() {
    breaks_nothing(
        "c LOCK.ACQUIRE l c LIMIT 2 WATCHDOG
         d LOCK.ACQUIRE l d LIMIT 2 WATCHDOG
         a LOCK.ACQUIRE x a WATCHDOG
         e LOCK.ACQUIRE l a LIMIT 2 WAIT 0 SESSION $s
         e LOCK.ACQUIRE x d WAIT 0 SESSION $s
         e LOCK.ACQUIRE l a WAIT 0 SESSION $s
         +500",
    );
}

/// Its session was replaced in the same iteration.
#[test]
fn ended_ephemeral_hold_closes_no_cycle() {
    expect_reply(
        "r LOCK.ACQUIRE x o##1 EPHEMERAL SESSION $s
         y LOCK.ACQUIRE y y
         z LOCK.ACQUIRE x y WAIT 0
         +5
         b LOCK.SESSION REPLACES $s
         r LOCK.ACQUIRE y o##2 WAIT 5000 SESSION $b
         +5",
        'r',
        "WAITING",
    );
}

/// History C1: because of `WAITED`, the request would be placed ahead of one that already waits, whose owner holds `a`.
#[test]
fn waited_request_is_searched_from_its_queue_position() {
    const OVERTAKES: &str = "h LOCK.ACQUIRE a h LEASE 600000
         y LOCK.ACQUIRE b y LEASE 600000
         +1
         h LOCK.ACQUIRE b h WAIT 0
         +1
         n LOCK.MACQUIRE 2 a b n WAIT 0 WAITED 60000
         +1
         y LOCK.RELEASE b y
         +500";
    expect_reply(OVERTAKES, 'n', "DEADLOCK");
    expect_reply(OVERTAKES, 'h', "1800000000003001");
}

/// History C2: the expiry of the lease would end the cycle, but it would be a loss.
#[test]
fn cycle_is_refused_although_lease_would_end_it() {
    expect_reply(
        "t LOCK.ACQUIRE x o##1 LEASE 1000
         u LOCK.ACQUIRE x o##2 WAIT 5000
         +1500",
        'u',
        "DEADLOCK",
    );
}

/// History C4: the requests are shared, and the holders are exclusive.
#[test]
fn cycle_of_readers_and_exclusive_holders_is_refused() {
    expect_reply(
        "a LOCK.ACQUIRE x a WATCHDOG
         b LOCK.ACQUIRE y b WATCHDOG
         +1
         a LOCK.ACQUIRE y a SHARED WAIT 0
         +1
         b LOCK.ACQUIRE x b SHARED WAIT 0
         +500",
        'b',
        "DEADLOCK",
    );
}

/// The holder of the requested lock is known without a search, but not what it waits for.
#[test]
fn cycle_is_refused_when_one_other_lock_is_waited_for() {
    expect_reply(
        "a LOCK.ACQUIRE k0 o1
         d LOCK.ACQUIRE k1 o4
         b LOCK.ACQUIRE k1 o2 WAIT 300
         c LOCK.ACQUIRE k1 o3 WAIT 300
         +1
         d LOCK.RELEASE k1 o4
         +1
         b LOCK.ACQUIRE k0 o2 WAIT 300
         +1
         a LOCK.ACQUIRE k1 o1 WAIT 300
         +1",
        'a',
        "DEADLOCK",
    );
}

#[test]
fn deadlock_search_follows_holder_written_by_other_client() {
    expect_reply(
        "a LOCK.ACQUIRE k a
         z LOCK.ACQUIRE other z
         d LOCK.ACQUIRE m d
         +1
         b LOCK.ACQUIRE k b WAIT 0
         c LOCK.ACQUIRE k c WAIT 0
         z LOCK.ACQUIRE m z WAIT 0
         +1
         x RENAME other k
         +1
         d LOCK.ACQUIRE k d WAIT 0
         +500",
        'd',
        "DEADLOCK owner 'd' waits for 'k' held by 'z'",
    );
}
