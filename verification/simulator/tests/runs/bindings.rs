//! Bindings of holds to connections and sessions.

use crate::{breaks_nothing, expect_reply};

#[test]
fn ephemeral_hold_is_not_reentered_after_disconnect() {
    breaks_nothing(
        "b LOCK.MACQUIRE 2 k0 k2 o1 EPHEMERAL
         b !end
         d LOCK.ACQUIRE k2 o1
         +10",
    );
}

/// The key of a hold has lost its expiry, so the hold never ends.
#[test]
fn endless_hold_does_not_delay_other_renewals() {
    breaks_nothing(
        "a LOCK.ACQUIRE k1 o2 LEASE 50 LIMIT 2 WATCHDOG
         e LOCK.ACQUIRE k1 o1 LIMIT 3 WATCHDOG
         c LOCK.ACQUIRE k2 o2 LEASE 2000 SHARED EPHEMERAL
         b PERSIST k2
         +2100
         +100",
    );
}

/// The locks that the owner already holds get another token.
#[test]
fn partly_held_request_keeps_bindings() {
    breaks_nothing(
        "a LOCK.MACQUIRE 2 k2 k1 mk2k1 WATCHDOG EPHEMERAL
         +0
         b LOCK.ACQUIRE k0 o2 LEASE 50
         a RENAME k0 k1
         a LOCK.MACQUIRE 2 k2 k1 mk2k1 WAIT 300
         +10",
    );
}

/// Another hold has taken the place of the ephemeral one. Redis 7.0 processes the renaming later in the same iteration.
#[test]
fn renamed_hold_stays_when_ephemeral_connection_closes() {
    expect_reply(
        "a LOCK.ACQUIRE k1 o EPHEMERAL
         b LOCK.ACQUIRE k2 o
         +1
         b RENAME k2 k1
         a !end
         c LOCK.ACQUIRE k1 c
         +1",
        'c',
        "null",
    );
}

/// Another hold of its owner has taken the place of the bound one, and is released.
#[test]
fn bound_hold_is_lost_when_overwriting_hold_is_released() {
    breaks_nothing(
        "s LOCK.ACQUIRE k1 o WATCHDOG
         b LOCK.ACQUIRE k2 o
         +1
         b RENAME k2 k1
         a LOCK.RELEASE k1 o TOKEN @b
         +1
         s LOCK.EVENTS
         +1",
    );
}

/// A renewal over any connection keeps it. `UNBIND` ends the binding.
#[test]
fn renewal_without_flags_keeps_binding() {
    const HELD: &str = "r LOCK.ACQUIRE k o LEASE 600 WATCHDOG SESSION $s
         t LOCK.EVENTS
         +1";
    let renewed = format!("{HELD}\nt LOCK.RENEW k o\n+1\ns LOCK.EVENTS\n+1");
    breaks_nothing(&renewed);
    expect_reply(&renewed, 's', "null");
    let unbound = format!("{HELD}\ns LOCK.RENEW k o LEASE 500 UNBIND\n+600\ns LOCK.EVENTS\n+1\nb LOCK.ACQUIRE k b\n+1");
    breaks_nothing(&unbound);
    expect_reply(&unbound, 's', "null");
    expect_reply(&unbound, 'b', "1800000000");
}
