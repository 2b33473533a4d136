//! Servers that refuse writes.

use crate::{breaks_nothing, expect_reply};

#[test]
fn module_writes_nothing_when_server_refuses_writes() {
    breaks_nothing(
        "b LOCK.ACQUIRE k2 o3 LEASE 50
         b LOCK.MACQUIRE 1 k2 o0 WAIT 300
         +3
         !misconf on
         +400",
    );
    breaks_nothing(
        "a LOCK.ACQUIRE k1 o1
         a LOCK.RENEW k1 o1 LEASE 400 WATCHDOG
         +400
         a CONFIG SET min-replicas-to-write 1
         +300",
    );
}

/// History B4: a grant that could not be revoked while writes were refused is revoked before the next request.
#[test]
fn revocation_precedes_requests_after_refused_writes() {
    expect_reply(
        "!replicas never
         a LOCK.ACQUIRE k o REPLICAS 1
         +500
         b CONFIG SET min-replicas-to-write 2
         +1000
         b CONFIG SET min-replicas-to-write 0
         c LOCK.ACQUIRE k o
         c LOCK.RELEASE k o
         +1",
        'c',
        "1",
    );
}

/// The server refuses writes from the same transaction on.
#[test]
fn loss_is_notified_while_writes_are_refused() {
    expect_reply(
        "b LOCK.ACQUIRE k o LEASE 60000 SESSION $s
         +1
         c MULTI
         c DEL k
         c CONFIG SET min-replicas-to-write 1
         c EXEC
         +20
         s LOCK.EVENTS
         +1",
        's',
        "lost",
    );
}

/// A waiter is served without delay, although writes were refused when the module last had something to
/// write.
#[test]
fn grant_is_prompt_once_writes_are_accepted_again() {
    breaks_nothing(
        "c LOCK.ACQUIRE k2 o0 SESSION $s
         c CONFIG SET min-replicas-to-write 1
         d LOCK.SESSION REPLACES $s
         +1200
         b REPLICAOF 127.0.0.1 1
         +1
         b REPLICAOF NO ONE
         b CONFIG SET min-replicas-to-write 0
         +400
         f LOCK.ACQUIRE x ann
         +1
         g LOCK.SESSION
         g LOCK.ACQUIRE x ben WATCHDOG WAIT 0
         h LOCK.ACQUIRE x cat WAIT 5000
         +1
         f LOCK.RELEASE x ann
         f CLIENT KILL ID #g
         +5
         h !expect 1",
    );
}

/// Its connection has closed, so the deadline that replicas have confirmed counts no more.
#[test]
fn unbound_hold_lasts_until_its_own_deadline_while_clients_are_paused() {
    breaks_nothing(
        "!replicas 20
         a LOCK.ACQUIRE k0 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +1200
         b LOCK.RENEW k0 o0
         a CLIENT KILL ID #s
         a CLIENT PAUSE 1000
         +1200",
    );
}
