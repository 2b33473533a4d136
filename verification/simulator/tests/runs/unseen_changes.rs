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
        // A lease of a shared lock ends unseen, during a long command, and another command then removes the expiry of
        // the key: the hold is back, under a token that is older than the newest.
        "b LOCK.ACQUIRE k2 o0 LEASE
         d DEBUG SLEEP 3
         d CLIENT KILL ID #b
         b LOCK.ACQUIRE k0 o1 SHARED LEASE 50
         b PEXPIRE k0 100000
         c LOCK.MACQUIRE 2 k1 k2 o0
         +20
         c PERSIST k0",
        // A queued request is granted after one that was sent later, and binds the hold: it ends at what replicas have
        // confirmed.
        "!replicas 20
         c LOCK.SESSION REPLACES $s
         b LOCK.SESSION REPLACES $c
         +1200
         c LOCK.ACQUIRE k1 o1 LEASE 2000 SESSION $s
         c LOCK.ACQUIRE k1 o1 LEASE 50 REPLICAS 1 SESSION $s
         a CLIENT PAUSE 1000
         b LOCK.ACQUIRE k1 o1 LEASE 50 REPLICAS 1 WATCHDOG WAIT 0 SESSION $s
         +120
         c LOCK.ACQUIRE k0 o0
         c CLIENT PAUSE 1000
         b LOCK.ACQUIRE k1 o0 WAIT 300
         b LOCK.ACQUIRE k1 o1 LEASE 2000",
        // Which of two like requests was granted is unknown: the one without flags keeps the binding, and so what
        // replicas have confirmed of it.
        "!replicas never 20 2000
         s LOCK.ACQUIRE k0 o2 LEASE 50 LIMIT 3 REPLICAS 1
         s LOCK.EVENTS
         e LOCK.ACQUIRE k0 o2 LIMIT 3 WATCHDOG WAIT 0 SESSION $s
         e LOCK.ACQUIRE k0 o2 LIMIT 3 WAIT 0 SESSION $s",
        // No node serves the slot of a re-entry when its replicas have confirmed it: its client receives an error, and
        // the hold is ephemeral all the same.
        "!replicas 20 2000
         c LOCK.ACQUIRE k2 o2 LIMIT 3
         b LOCK.ACQUIRE k3 o0
         +120
         c LOCK.ACQUIRE k3 o1
         c LOCK.RENEW k1 o3 WATCHDOG
         +20
         c LOCK.ACQUIRE k3 o2 REPLICAS 1 WAIT 300
         c LOCK.ACQUIRE k2 o2 LIMIT 3 EPHEMERAL REPLICAS 1
         +120
         +20
         d LOCK.RELEASE k3 o0
         +1
         +20
         !slot k2 unowned
         +120",
        // Two queued requests of an owner are granted in the reverse order, and their outcomes are read together: the
        // one with REPLICAS has bound the hold last.
        r"!replicas 0
         t LOCK.ACQUIRE k0 o3
         a LOCK.ACQUIRE k0 o2 WAIT 300 WAITED 300 SESSION $t
         a LOCK.ACQUIRE k0 o1 WAIT 20
         b RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00 REPLACE
         a LOCK.ACQUIRE k0 o2 LEASE 400 REPLICAS 1 SESSION $t
         b LOCK.ACQUIRE k0 o2 LEASE 400 WAIT 20 SESSION $s
         b LOCK.RELEASE k0 o0
         b LOCK.ACQUIRE k0 o1 WAIT 0
         +20
         a PERSIST k0
         t LOCK.EVENTS WAIT 50
         s LOCK.EVENTS WAIT 0
         a LOCK.ACQUIRE k0 o2",
        // A queued request re-enters a hold that a swap of databases has brought to it, and whose grant is read in the
        // same event-loop iteration.
        "d SELECT 1
         c LOCK.ACQUIRE k2 o1
         b LOCK.ACQUIRE k2 o2 WAIT 300
         +120
         a LOCK.ACQUIRE k2 o3 WAIT 0
         d LOCK.ACQUIRE k2 o3
         e SWAPDB 0 1",
        // A token is raised while it is unknown whether releases have ended the hold. The grant that is read later is
        // of the same hold, and its binding stays.
        "d !stop-reading
         e LOCK.ACQUIRE k2 o0 EPHEMERAL
         e LOCK.ACQUIRE k2 o0
         d SELECT 1
         a !stop-reading
         d LOCK.RELEASE k2 o0
         d SELECT 0
         a LOCK.RELEASE k2 o0
         a LOCK.ACQUIRE k2 o0
         +0
         d LOCK.RENEW k2 o0 FENCE 1800000060604066",
        // An ephemeral grant is withdrawn after a request of the same session has re-entered it: the hold stays ephemeral.
        "!replicas never 20 2000
         s LOCK.ACQUIRE k0 o2 LEASE 50
         b LOCK.MACQUIRE 3 k2 k1 k0 o1 WAIT 0 EPHEMERAL SESSION $s
         +1200
         e LOCK.ACQUIRE k2 o1 REPLICAS 1 SESSION $s
         +400
         d LOCK.RELEASE k0 o1 ALL
         s LOCK.EVENTS
         +120
         s !end",
        // Copies of a lock are in two databases that are swapped: a token does not tell which one was granted.
        "a LOCK.ACQUIRE k0 o1
         c LOCK.ACQUIRE k0 o0 LEASE 2000 WAIT 300
         b RESTORE k0 400 \\x10\\x40\\x1f\\x1f\\x00\\x00\\x00\\x04\\x00\\x82o0\\x03\\x01\\x01\\x86#fence\\x07\\xf4\\x00@\\x1e\\x18$\\x0a\\x06\\x00\\x09\\xff\\x0a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00 REPLACE
         b SWAPDB 0 1
         +1200
         b RESTORE k0 400 \\x10\\x40\\x1f\\x1f\\x00\\x00\\x00\\x04\\x00\\x82o0\\x03\\x01\\x01\\x86#fence\\x07\\xf4\\x00@\\x1e\\x18$\\x0a\\x06\\x00\\x09\\xff\\x0a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00
         c LOCK.ACQUIRE k0 o0
         c SWAPDB 0 1
         c LOCK.ACQUIRE k0 o0 LEASE 50",
        // After the clock was set back, an owner whose hold has expired is granted the lock again. In the same iteration, its token
        // is raised, and databases are swapped: the raised hold is the new one, which is ephemeral.
        "c LOCK.ACQUIRE k2 o1
         c LOCK.ACQUIRE k2 o0 LEASE 50 WAIT 0
         !clock -60000
         b SWAPDB 0 1
         +120
         a LOCK.RELEASE k0 o0
         c LOCK.RENEW k2 o0 LEASE 30000 FENCE 1800001200365733
         c SWAPDB 0 1
         a LOCK.ACQUIRE k2 o0 EPHEMERAL",
        // A hold is confirmed right after `LOCK.EVENTS … HEARTBEAT` in the same iteration: that heartbeat does not cover it.
        "!replicas 0 20
         b LOCK.MACQUIRE 2 k1 k2 o0 LEASE 400 SESSION $s
         +1200
         a LOCK.ACQUIRE k0 o0 REPLICAS 1 WATCHDOG SESSION $s
         c DEBUG SLEEP 0.03
         s LOCK.ACQUIRE k2 o1 WATCHDOG
         b LOCK.ACQUIRE k3 o1 REPLICAS 1
         +20
         s LOCK.EVENTS WAIT 0 HEARTBEAT
         e LOCK.MACQUIRE 2 k2 k3 o1 WAIT 300
         s LOCK.EVENTS WAIT 0
         a LOCK.MACQUIRE 2 k1 k2 o0 WAIT 20 WAITED 60000",
        // The hold that replicas have confirmed ends by its lease in the iteration in which its session is killed. Its `WAITING` counted
        // as a repetition of a request of long before, whose `timeout` was not read.
        "!replicas 2000 0
         b LOCK.ACQUIRE k0 o1 LEASE 50
         a EVAL return_redis.call(unpack(ARGV)) 0 LOCK.ACQUIRE k0 o0 WAIT 20 SESSION $s
         +1200
         s LOCK.ACQUIRE k0 o0 LEASE 50 REPLICAS 1 SESSION *
         a LOCK.ACQUIRE k0 o1 WAIT 0
         a CLIENT KILL ID #s
         b LOCK.ACQUIRE k0 o0 WAIT 0",
        // A request whose client is gone raises the token. The `unbound` event with that token reports the loss.
        "a LOCK.ACQUIRE k0 o0
         +1
         b LOCK.RELEASE k0 o1
         s LOCK.EVENTS WAIT 50
         !slot k0 migrates
         b !vanish
         +0
         a LOCK.RENEW k0 o1
         b LOCK.RENEW k0 o0 FENCE 1800000060140531
         b DEL k0
         a LOCK.ACQUIRE k0 o0 SESSION $s",
        // Another command shortens the lease at the end of an iteration of Redis 7.0, whose timers wait up to a millisecond for one
        // that is due already: the heartbeat meanwhile does not know of it.
        "!replicas 0 never never
         a LOCK.ACQUIRE k1 o0
         c LOCK.ACQUIRE k3 o0 SESSION $s
         +400
         !clock -60000
         s LOCK.EVENTS WAIT 0 HEARTBEAT
         c LOCK.ACQUIRE k1 o1 WAIT 0
         c PEXPIRE k3 30
         s LOCK.EVENTS WAIT 0 HEARTBEAT
         c LOCK.ACQUIRE k0 o0
         a LOCK.ACQUIRE k3 o0 WATCHDOG SESSION $s
         b LOCK.ACQUIRE k2 o0 WAIT 20
         c LOCK.ACQUIRE k0 o1 WAIT 300 SESSION $s
         a LOCK.ACQUIRE k2 o0 REPLICAS 1 SESSION $s
         +0
         +1
         b LOCK.ACQUIRE k1 o1 WAIT 300 SESSION $s
         +0
         +0
         b LOCK.ACQUIRE k0 o1 WAIT 300",
    ];
    runs.into_iter().for_each(breaks_nothing);
}
