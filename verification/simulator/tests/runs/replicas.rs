//! Requests with `REPLICAS`, and the tokens that `FENCE` raises.

use crate::{breaks_nothing, expect_reply};

/// With another `TOKEN` or `FENCE` it is another request, and must not get the outcome of the first.
#[test]
fn renewal_is_refused_when_repeated_with_other_options() {
    const RENEWED: &str = "!replicas 20
         c LOCK.ACQUIRE k0 o1
         +20
         c LOCK.RENEW k0 o1 LEASE 2000 REPLICAS 1 SESSION $t";
    for other in ["TOKEN 7", "TOKEN @c", "FENCE 1800000060849309"] {
        let repeated = format!("{RENEWED}\nc LOCK.RENEW k0 o1 LEASE 2000 {other} REPLICAS 1 SESSION $t");
        breaks_nothing(&repeated);
        expect_reply(&format!("{repeated}\n+1"), 'c', "is being confirmed");
    }
}

/// Locks that were acquired one by one and are renewed together are released one by one.
#[test]
fn release_all_releases_one_lock_during_renewal_of_several() {
    const RENEWED: &str = "!replicas 20
         a LOCK.ACQUIRE u o SESSION $s
         a LOCK.ACQUIRE v o SESSION $s
         a LOCK.ACQUIRE w o SESSION $s
         +5
         a LOCK.MRENEW 3 u v w o REPLICAS 1 SESSION $s
         a LOCK.RELEASE u o ALL
         +50
         x EXISTS u v w
         +5";
    breaks_nothing(RENEWED);
    expect_reply(RENEWED, 'x', "2");
}

/// Its confirmed deadline passes while clients are paused, so that it can't be ended. Then replicas confirm a longer lease.
#[test]
fn re_entry_is_refused_when_hold_was_reported_lost() {
    const SCRIPT: &str = "!replicas 20
         b LOCK.ACQUIRE k o LEASE 50 REPLICAS 1 SESSION $s
         +30
         b LOCK.ACQUIRE k o REPLICAS 1 SESSION $s
         +1
         c DEBUG SLEEP 0.03
         c CLIENT PAUSE 1000
         +200
         s LOCK.EVENTS
         +1";
    breaks_nothing(SCRIPT);
    expect_reply(SCRIPT, 's', "lost before its replicas had confirmed it");
}

#[test]
fn binding_is_made_after_confirmation() {
    breaks_nothing(
        "a LOCK.ACQUIRE k0 o2 LIMIT 2
         a LOCK.ACQUIRE k0 o1 LEASE 400 LIMIT 2 WATCHDOG
         b LOCK.ACQUIRE k0 o1 LEASE 50 LIMIT 2 EPHEMERAL REPLICAS 1
         +2000",
    );
}

/// The release names the token of another lock; the renewal of both locks continues.
#[test]
fn release_with_other_token_keeps_renewal() {
    expect_reply(
        "!replicas 20
         r LOCK.ACQUIRE a o SESSION $s
         +5
         p LOCK.ACQUIRE b o SESSION $s
         +5
         r LOCK.MRENEW 2 a b o REPLICAS 1 SESSION $s
         +5
         r LOCK.RELEASE a o ALL TOKEN @p
         +50
         s LOCK.EVENTS
         +5",
        's',
        "granted",
    );
}

/// History A1: a renewal that shortens the lease is never confirmed. The shorter deadline counts.
#[test]
fn unconfirmed_renewal_counts_earlier_deadline() {
    expect_reply(
        "!replicas 0
         a LOCK.ACQUIRE k a LEASE 30000 REPLICAS 1
         +5
         !replicas never
         a LOCK.RENEW k a LEASE 1000 REPLICAS 1
         b LOCK.ACQUIRE k b WAIT 0
         +3000",
        'b',
        "1800000001",
    );
}

/// History A1: another connection has raised the token of the hold.
#[test]
fn release_returns_nil_for_token_before_raise() {
    expect_reply(
        "r LOCK.ACQUIRE k o
         +1
         b LOCK.RENEW k o FENCE 1800000060000007
         r LOCK.RELEASE k o TOKEN @r
         +1",
        'r',
        "null",
    );
}

/// History A2: a bound hold ends at the deadline that its replicas have confirmed, whatever a later re-entry wrote.
#[test]
fn unconfirmed_reentry_does_not_extend_lease() {
    expect_reply(
        "!replicas 0
         a LOCK.ACQUIRE k a LEASE 2000 WATCHDOG REPLICAS 1
         +5
         !replicas never
         +300
         c LOCK.ACQUIRE k a LEASE 60000 REPLICAS 1
         +1500
         +500
         b LOCK.ACQUIRE k b
         +1",
        'b',
        "1800000002305",
    );
}

/// History A3: the earlier hold stays when the connection closes.
#[test]
fn refused_request_binds_nothing() {
    expect_reply(
        "!replicas 0
         c LOCK.ACQUIRE k o LEASE 2000 WATCHDOG REPLICAS 1
         +5
         !replicas never
         d LOCK.ACQUIRE k o EPHEMERAL REPLICAS 1
         +1100
         d !end
         b LOCK.ACQUIRE k b
         +1",
        'b',
        "null",
    );
}

/// History A4: the session receives no `lost` event before, and no `granted` event after it.
#[test]
fn confirmation_of_lost_hold_is_refused() {
    expect_reply(
        "!replicas 20
         a LOCK.ACQUIRE k a REPLICAS 1 SESSION $s
         +1
         b LOCK.FORCE k
         b LOCK.ACQUIRE k b
         +50
         s LOCK.EVENTS
         +1",
        's',
        "UNCONFIRMED the lock was lost",
    );
}

/// History A5: a revocation ends exactly the unconfirmed request.
#[test]
fn second_request_waits_for_confirmation_of_first() {
    const RE_ENTERED: &str = "!replicas never
         c LOCK.ACQUIRE k o WATCHDOG REPLICAS 1
         +10
         d LOCK.ACQUIRE k o
         +1100
         b LOCK.ACQUIRE k b
         +1";
    expect_reply(RE_ENTERED, 'd', "is being confirmed");
    expect_reply(RE_ENTERED, 'b', "1800000001110");
    expect_reply(
        "!replicas 0
         c LOCK.ACQUIRE k o REPLICAS 1
         +5
         !replicas never
         c LOCK.ACQUIRE k o REPLICAS 1
         +10
         d LOCK.RELEASE k o HOLDS 1
         +1100
         d LOCK.RELEASE k o
         +1",
        'd',
        "1",
    );
}

/// History B3: the server's own error codes would mean that the request had no effect.
#[test]
fn unconfirmed_grant_has_own_error_code() {
    expect_reply(
        "!replicas never
         a LOCK.ACQUIRE k o REPLICAS 1
         +1100",
        'a',
        "UNCONFIRMED",
    );
}

#[test]
fn release_all_ends_request_during_confirmation() {
    expect_reply(
        "!replicas 200
         a LOCK.ACQUIRE k a REPLICAS 1
         +1
         b LOCK.RELEASE k a ALL
         +1",
        'a',
        "the lock was released before its replicas had confirmed it",
    );
}

/// The session closes while replicas confirm its renewal.
#[test]
fn request_behind_renewal_is_served_when_session_closes() {
    breaks_nothing(
        "c LOCK.MACQUIRE 2 k1 k0 o0
         a LOCK.MACQUIRE 3 k2 k1 k0 o1 WAIT 0
         b DEL k0 k1
         b LOCK.RENEW k2 o1 REPLICAS 1 SESSION $s
         b LOCK.ACQUIRE k2 o1 WAIT 0
         +20
         c CLIENT KILL ID #s
         c DEL k0 k1 k2
         c LOCK.RELEASE k2 o1",
    );
}
