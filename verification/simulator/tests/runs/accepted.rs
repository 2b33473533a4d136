//! Runs in which the module is right although it may look wrong: the checker accepts them.

use crate::breaks_nothing;

/// Each comment says what the checker must allow.
#[test]
fn accepted_runs_violate_no_invariant() {
    let runs = [
        // A partial release before the withdrawal: the locks of one grant are not withdrawn together any more.
        "c LOCK.MACQUIRE 2 k0 k1 o1
         b LOCK.ACQUIRE k0 o1 SESSION $s
         a LOCK.ACQUIRE k0 o0 LEASE 50 WAIT 300
         +0
         b LOCK.RELEASE k0 o1 ALL
         c LOCK.RELEASE k1 o1 ALL
         b LOCK.ACQUIRE k0 o1 WAIT 0 SESSION $s",
        // A grant that was read while it was cancelled is not the outcome of a later request in the same
        // iteration.
        r"c LOCK.ACQUIRE k0 o0
         b LOCK.ACQUIRE k0 o1 WAIT 0
         d RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00 REPLACE
         +400
         b SWAPDB 0 1
         +120
         b SWAPDB 0 1
         a LOCK.ACQUIRE k0 o0 WAIT 0 SESSION $s
         d EVAL return_redis.call(unpack(ARGV)) 0 LOCK.FORCE k0
         +1200
         b LOCK.ACQUIRE k0 o2
         s LOCK.EVENTS WAIT 50
         c LOCK.RELEASE k0 o0 ALL
         b LOCK.ACQUIRE k0 o1 WAIT 0
         b LOCK.ACQUIRE k0 o0 WAIT 20 SESSION $s
         d LOCK.RELEASE k0 o0 ALL",
        // A repetition without REPLICAS, before its grant was read, may get the outcome of the one with them.
        "!replicas 0 never 2000
         d LOCK.ACQUIRE k0 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +1
         a PERSIST k2
         c SWAPDB 0 1
         b LOCK.ACQUIRE k0 o1
         a PERSIST k0
         s LOCK.EVENTS WAIT 0
         d LOCK.ACQUIRE k0 o0 WAIT 300 SESSION $s",
        // A grant closes a cycle, because its owner has two queued requests.
        "a LOCK.ACQUIRE k1 o3 WATCHDOG
         b LOCK.ACQUIRE k0 o0
         b LOCK.ACQUIRE k2 o0
         b LOCK.ACQUIRE k1 o1 WAIT 0 SESSION $s
         c LOCK.ACQUIRE k2 o1 WAIT 300
         +20
         c PEXPIRE k0 30
         b LOCK.ACQUIRE k2 o2 WAIT 300
         b LOCK.ACQUIRE k0 o1 WATCHDOG WAIT 20 WAITED 60000
         a LOCK.ACQUIRE k0 o3 WAIT 0",
        // A client that receives `WAITING` late sent its request first.
        "s LOCK.EVENTS WAIT 50
         e LOCK.ACQUIRE k0 o2 LEASE 50
         s !stop-reading
         c !stop-reading
         s LOCK.EVENTS WAIT 50
         c LOCK.ACQUIRE k0 o1 LEASE 50 WAIT 0 SESSION $s
         +1200
         e LOCK.ACQUIRE k0 o2
         a LOCK.ACQUIRE k0 o1 WAIT 300 SESSION $s",
        // A grant with `HOLDS` that was read while it was cancelled is not the outcome of a later request in the same iteration.
        "!replicas 0
         a LOCK.ACQUIRE k0 o1
         a LOCK.MACQUIRE 1 k0 o0 WAIT 300 SESSION $s
         c LOCK.ACQUIRE k0 o0 WAIT 20
         a LOCK.RELEASE k0 o0 ALL
         b LOCK.RELEASE k0 o1
         +0
         b LOCK.ACQUIRE k0 o0 HOLDS 1 REPLICAS 1 SESSION $s",
        // A heartbeat that is read late was composed before another command set an expiry.
        "c LOCK.ACQUIRE k2 o1 LEASE 7200000 WATCHDOG SESSION $s
         b LOCK.ACQUIRE k1 o0
         +400
         c LOCK.ACQUIRE k1 o1 WAIT 20 SESSION $s
         s LOCK.EVENTS WAIT 0 HEARTBEAT
         s !stop-reading
         +400
         b PEXPIRE k2 100000",
        // A renewal that shortens the lease runs after the heartbeat request of the same poll.
        "a LOCK.ACQUIRE k1 o1 LEASE 50 SESSION $s
         e LOCK.ACQUIRE k0 o0 WATCHDOG SESSION $s
         +120
         s LOCK.EVENTS WAIT 0 HEARTBEAT
         d LOCK.MRENEW 1 k0 o0 LEASE 50",
        // A missing confirmation is not the outcome of a request without REPLICAS.
        "b LOCK.ACQUIRE k0 o0 LEASE 50 SESSION $s
         b LOCK.ACQUIRE k0 o2 WAIT 0 SESSION $s
         a !stop-reading
         a LOCK.ACQUIRE k0 o2 WAIT 0 WAITED 60000
         a LOCK.RENEW k0 o2 LEASE 400 REPLICAS 1 SESSION $s
         s LOCK.EVENTS WAIT 0
         +1200
         b LOCK.ACQUIRE k0 o1
         a LOCK.ACQUIRE k0 o2 WAIT 20 SESSION $s",
        // A client that Redis 7.2 might redirect gets its reply after the next run of the cron.
        "b LOCK.ACQUIRE k0 o1 REPLICAS 1
         a DEBUG SLEEP 0.5
         a CLIENT PAUSE 5
         +20
         !slot k0 migrates
         +120
         +400",
        "b LOCK.ACQUIRE k0 o1
         +20
         a LOCK.ACQUIRE k0 o2 WAIT 0
         c LOCK.ACQUIRE k0 o1 REPLICAS 1
         c CLIENT UNBLOCK #a
         +120
         !slot k0 migrates
         a LOCK.FORCE k0
         c LOCK.ACQUIRE k0 o2 WAIT 300
         +120
         +20
         +120
         +120
         +400
         +1
         +400",
        // A queued request was repeated after another one had bound the hold, and moves the binding.
        "!replicas 20 2000
         b LOCK.ACQUIRE k0 o1 SESSION $s
         b LOCK.ACQUIRE k0 o0 WAIT 300 SESSION $s
         b LOCK.ACQUIRE k0 o0 LEASE 400 WAIT 0
         b LOCK.ACQUIRE k0 o0 LEASE 400 WATCHDOG
         b LOCK.ACQUIRE k0 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +400
         a LOCK.RELEASE k0 o1 ALL",
        // A request without a received reply has given the binding a shorter lease.
        "b LOCK.ACQUIRE k2 o1 LEASE 2000 WATCHDOG SESSION $s
         +120
         b !vanish
         b LOCK.ACQUIRE k2 o1 LEASE 400 WATCHDOG SESSION $s
         s LOCK.EVENTS WAIT 50",
        "!replicas 2000 0
         b LOCK.ACQUIRE k2 o1 LEASE 400 WATCHDOG SESSION $s
         a LOCK.ACQUIRE k2 o1 LEASE 50 WATCHDOG REPLICAS 1 SESSION $s
         s !stop-reading
         +400
         s LOCK.EVENTS WAIT 0
         +1200",
        // A renewal that is cancelled in another database has bound the hold in that database.
        "!replicas 0
         d LOCK.ACQUIRE k2 o1
         d LOCK.RENEW k2 o1 EPHEMERAL REPLICAS 1 SESSION $t
         +3
         b SWAPDB 0 1
         b LOCK.RELEASE k2 o1 ALL",
        // A client is redirected after its request was confirmed and bound.
        "!replicas 20
         d LOCK.ACQUIRE k1 o1
         c LOCK.ACQUIRE k1 o1 EPHEMERAL REPLICAS 1
         +1
         !slot k1 moves",
        // A withdrawal does not cancel a later wait.
        "b LOCK.MACQUIRE 2 k2 k1 o1
         b LOCK.FORCE k1
         +0
         d LOCK.ACQUIRE k2 o2
         b LOCK.ACQUIRE k1 o1 WAIT 20 SESSION $s
         d LOCK.RELEASE k2 o1 ALL
         d LOCK.ACQUIRE k1 o0 EPHEMERAL
         d CLIENT KILL ID #d SKIPME",
        // A hold that another command wrote, and whose token is raised, is another hold.
        r"c LOCK.ACQUIRE k1 o0 SESSION $s
         b RESTORE k1 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00 REPLACE
         b LOCK.RENEW k1 o0 FENCE 1800000060613967
         a LOCK.FORCE k1",
        // A lease expires, and again after the clock was set back; both events are read at once.
        "c HDEL k2 #fence
         d CLIENT PAUSE 1000
         c LOCK.ACQUIRE k2 o0 LEASE 400 SESSION $s
         +120
         a LOCK.MRENEW 2 k2 k1 o0 LEASE 2000 SESSION $s
         +400
         !clock -60000",
        // A request that had to wait behind another one of its client has just run.
        "b LOCK.ACQUIRE k3 o2 REPLICAS 1
         b LOCK.ACQUIRE k0 o2 SESSION $s
         +0
         b DEL k0
         !clock -200
         +1200",
        // The locks of one grant are withdrawn together, whatever `FENCE` made of their tokens and
        // whichever session they are bound to.
        "a LOCK.MACQUIRE 2 k0 k2 o0 SESSION $s
         b LOCK.RENEW k0 o0 FENCE 1800000060534282
         b LOCK.RELEASE k2 o0 ALL",
        "c LOCK.MACQUIRE 2 k1 k2 o1 SESSION $s
         b LOCK.RENEW k2 o1 FENCE 1800001200580526
         c LOCK.ACQUIRE k2 o0 WAIT 300
         c LOCK.RELEASE k1 o1 ALL
         d LOCK.MACQUIRE 1 k2 o1 SESSION $t
         b LOCK.RELEASE k1 o1",
        // So is an undelivered grant that another request has re-entered.
        "a LOCK.ACQUIRE k1 o1 LEASE 50
         b LOCK.MACQUIRE 2 k0 k1 o0 WAIT 0 SESSION $s
         s !vanish
         +20
         a LOCK.MACQUIRE 2 k0 k3 o0 WAIT 0
         a LOCK.ACQUIRE k1 o1 WAIT 20
         s LOCK.EVENTS WAIT 0
         a LOCK.ACQUIRE k0 o0
         a LOCK.RELEASE k1 o0 ALL",
        // Of two similar requests, the one without a received outcome was ephemeral.
        "b LOCK.ACQUIRE k2 o1 REPLICAS 1 SESSION $s
         +3
         a LOCK.MACQUIRE 2 k2
         b LOCK.ACQUIRE k0 o0 EPHEMERAL WAIT 300 SESSION $s
         a LOCK.ACQUIRE k0 o1
         +0
         c LOCK.ACQUIRE k1 o0
         b LOCK.ACQUIRE k1 o0 REPLICAS 1
         c LOCK.RELEASE k1 o0
         b LOCK.ACQUIRE k0 o0 SESSION $s
         c LOCK.RENEW k0 o1 LEASE 50
         s !vanish
         s LOCK.EVENTS WAIT 0
         b LOCK.ACQUIRE k0 o0 REPLICAS 1 SESSION $s",
        // A reply that is read late is about a hold that has ended since.
        "!replicas 20
         a LOCK.ACQUIRE k2 o3 EPHEMERAL REPLICAS 1 SESSION $s
         s LOCK.EVENTS WAIT 0
         a !stop-reading
         +1200
         a LOCK.MRENEW 3 k2 k1 k0 o3
         +400
         b CLIENT KILL ID #s",
        // The reply about a binding from before `FENCE` is read after the raise.
        "c LOCK.ACQUIRE k1 o2 EPHEMERAL
         c !stop-reading
         b LOCK.ACQUIRE k1 o2
         c LOCK.RENEW k1 o2 FENCE 1800000060849309",
        "c LOCK.ACQUIRE k1 o2 EPHEMERAL
         +0
         c !stop-reading
         c LOCK.ACQUIRE k3 o0
         b LOCK.ACQUIRE k1 o2
         c LOCK.RENEW k1 o2 FENCE 1800000060849309",
        // A request that got its reply after a similar one has moved the binding, with REPLICAS.
        "!replicas 20
         a LOCK.ACQUIRE k0 o1 SESSION $s
         a LOCK.ACQUIRE k0 o0 WAIT 0 SESSION $s
         b FLUSHALL
         b LOCK.ACQUIRE k0 o0 LEASE 2000 WATCHDOG WAIT 300 WAITED 60000
         b LOCK.ACQUIRE k0 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +120
         s LOCK.EVENTS WAIT 50
         +3
         a LOCK.ACQUIRE k0 o0
         b LOCK.RELEASE k0 o0",
        "!replicas 20
         a LOCK.ACQUIRE k0 o1 SESSION $s
         a LOCK.ACQUIRE k0 o0 WAIT 0 SESSION $s
         b FLUSHALL
         b LOCK.ACQUIRE k0 o0 LEASE 2000 WATCHDOG WAIT 300 WAITED 60000
         b LOCK.ACQUIRE k0 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +120
         s LOCK.EVENTS WAIT 50
         +3
         a LOCK.ACQUIRE k0 o0 SESSION $s
         b LOCK.RELEASE k0 o0",
        // The grant to the second request is not a late reply about the hold that was released in between.
        "!replicas 20
         a LOCK.ACQUIRE k0 o1 SESSION $s
         a LOCK.ACQUIRE k0 o0 WAIT 0 SESSION $s
         b FLUSHALL
         b LOCK.ACQUIRE k0 o0 WAIT 300 WAITED 60000
         b LOCK.RELEASE k0 o0
         b LOCK.ACQUIRE k0 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +120
         s LOCK.EVENTS WAIT 50
         +3
         a LOCK.ACQUIRE k0 o0",
        // A release without a received reply has shortened the lease.
        "a LOCK.ACQUIRE k1 o0
         b LOCK.RELEASE k1 o0 LEASE 100
         c CLIENT KILL ID #b
         b DEBUG SLEEP 0.5
         a LOCK.ACQUIRE k1 o0",
        // A replica that is asked again before it has confirmed confirms late.
        "!replicas 2000 20
         d LOCK.ACQUIRE k3 o2
         d LOCK.ACQUIRE k3 o3 REPLICAS 1 WAIT 0
         a FLUSHDB
         +0
         +20
         b LOCK.ACQUIRE k1 o3 REPLICAS 1",
        // A hold that was restored from a dump is lost twice, and the event names its database.
        r"d RESTORE k1 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00
         e LOCK.ACQUIRE k1 o0 LEASE 50 SESSION $t
         +1200
         a RESTORE k1 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00
         e LOCK.ACQUIRE k1 o0 LEASE 400 SESSION $t
         +1200
         b SWAPDB 0 1",
        // Two requests of one transaction for the same lock: the second waits for replicas, and not with the options of
        // the first.
        "!replicas 20
         a MULTI
         a LOCK.ACQUIRE k2 o3 SHARED WAIT 0 SESSION $s
         a LOCK.ACQUIRE k2 o3 SHARED HOLDS 1 REPLICAS 1 SESSION $s
         a EXEC",
        // A request waits in a database that is swapped for another one, where its owner holds the same
        // lock with WATCHDOG. The wait stays in its database, so it becomes a re-entry of that hold. It binds the hold
        // to its session without WATCHDOG, so renewals stop.
        "a LOCK.ACQUIRE k1 o1 LEASE 2000 WATCHDOG
         c SWAPDB 0 1
         +1200
         a LOCK.ACQUIRE k1 o3
         c LOCK.ACQUIRE k1 o1 LEASE 400 WAIT 0 SESSION $t
         c SWAPDB 0 1",
        // A wait has timed out, but its client does not read. The user loses its rights, so it may neither
        // withdraw the request nor repeat it. The timeout that is read at last is the outcome of that wait; the refused
        // requests have none.
        "d !stop-reading
         b LOCK.ACQUIRE k1 o0
         c LOCK.ACQUIRE k1 o1 WAIT 20 SESSION $t
         d ACL SETUSER guest
         d AUTH guest x
         +1200
         d LOCK.RELEASE k1 o1 ALL
         d LOCK.ACQUIRE k1 o1 WAIT 0 SESSION $t
         t LOCK.EVENTS WAIT 0",
        // A renewal by the watchdog waits for replicas that are gone. A clock step of a minute backwards
        // prolongs this wait by a minute, longer than the clients are connected.
        "!replicas never never 20
         b LOCK.ACQUIRE k0 o1 LEASE 2000 WATCHDOG REPLICAS 1
         +400
         !replicas
         +1200
         !clock -60000",
        // An immediate grant closes a cycle. o3 waits for k1, o1 waits for o3, and o1 gets a place of k1
        // before o3 because of WAITED. It does not wait, so no search for cycles takes place.
        "a LOCK.ACQUIRE k1 o2 LIMIT 3
         a LOCK.ACQUIRE k0 o3 WATCHDOG
         b LOCK.ACQUIRE k1 o3 WAIT 0 SESSION $s
         a LOCK.ACQUIRE k0 o1 WAIT 0
         b LOCK.ACQUIRE k1 o1 LIMIT 2 WATCHDOG WAIT 300 WAITED 5",
        // The owner of a forced lock acquires it again, by a request without EPHEMERAL whose reply is never
        // received. Its token is then raised: that is the token of the new hold.
        "c LOCK.MACQUIRE 2 k0 k1 o0 EPHEMERAL
         +1
         c !vanish
         c LOCK.FORCE k1
         c LOCK.ACQUIRE k1 o0
         a LOCK.RENEW k1 o0 FENCE 1800000060790588",
        // A lease expires during a pause, in which the key can't be removed, and its session is notified.
        // Then the clock is set back, and the hold exists again, unbound. Its owner releases it before the session has
        // read the `lost` event.
        "b LOCK.RELEASE k2 o2
         d CLIENT PAUSE 1000
         b LOCK.ACQUIRE k1 o2 LEASE 50 SESSION $t
         +120
         !clock -60000
         d LOCK.RELEASE k1 o2",
        // A session reads three events at once: a grant, its `unbound` because the server became a replica,
        // and another grant with REPLICAS, which binds the hold again. Another client sets an expiry of 1 ms. A request
        // without REPLICAS extends the key, but not the confirmed deadline, and the hold ends at that.
        "c LOCK.ACQUIRE k0 o2 LEASE 1
         a LOCK.ACQUIRE k0 o1 WAIT 300 SESSION $s
         +1200
         d LOCK.ACQUIRE k0 o1
         a REPLICAOF 127.0.0.1 1
         !replicas 20 2000 never
         +20
         d REPLICAOF NO ONE
         d LOCK.ACQUIRE k0 o1 REPLICAS 1 SESSION $s
         +1200
         s LOCK.EVENTS
         +0
         b PEXPIRE k0 1
         b LOCK.ACQUIRE k0 o1",
        // The clock is set back just before the server refuses writes. The watched hold is over before its
        // key could follow, so it ends as soon as writes are possible. Its client receives the grant only then.
        "a LOCK.ACQUIRE k2 o0 LEASE 50 WATCHDOG
         a !stop-reading
         +400
         b CONFIG SET min-replicas-to-write 1
         !clock -60000
         +400",
        // A client that does not read receives late that it re-entered a hold, which has since ended with
        // its session.
        "b LOCK.ACQUIRE k0 o0 EPHEMERAL SESSION $s
         a !stop-reading
         a LOCK.ACQUIRE k0 o0 WAIT 0
         s !end",
        // A lease has expired, but another client gave the key a later expiry. The owner is granted the
        // lock again and disconnects before replicas have confirmed it. The second hold is revoked, and not the first.
        "b LOCK.ACQUIRE k2 o1 SHARED LEASE 50
         b PEXPIRE k2 100000
         +1200
         b LOCK.ACQUIRE k2 o1 REPLICAS 1
         +1
         b !end",
        // The server becomes a replica, and a primary again in the same iteration. A request from before is
        // granted after that, with EPHEMERAL; a renewal without flags in the same session keeps that.
        "a LOCK.ACQUIRE k0 o3
         b LOCK.ACQUIRE k0 o2 EPHEMERAL WAIT 0 SESSION $s
         +400
         d REPLICAOF 127.0.0.1 1
         d REPLICAOF NO ONE
         a LOCK.RELEASE k0 o3
         s LOCK.EVENTS
         +0
         e LOCK.MRENEW 2 k0 k2 o2 SESSION $s",
        // Another client writes a lock to the owner of a queued request. The owner re-enters it by another
        // request, with WATCHDOG. The outcome of the first wait comes after that: it binds the hold to its session
        // without WATCHDOG, and has not been read yet.
        r"b LOCK.ACQUIRE k0 o1
         e LOCK.ACQUIRE k0 o0 LEASE 2000 WAIT 0 SESSION $t
         +0
         b RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00 REPLACE
         e LOCK.MACQUIRE 1 k0 o0 LEASE 2000 WATCHDOG",
        // A renewal of two locks finds that its owner does not hold one of them, and its client has
        // disconnected. That event is not the outcome of the queued request for the same lock, which times out later.
        "!replicas 20 20 2000
         b LOCK.ACQUIRE k1 o0 SESSION $s
         b LOCK.MRENEW 2 k1 k0 o0 REPLICAS 1 SESSION $s
         a LOCK.ACQUIRE k0 o1
         b !end
         +1200
         b LOCK.ACQUIRE k0 o0 WAIT 20 SESSION $s",
        // Two locks are granted together to a client that disconnects before it reads the reply. A session
        // renews one of them and withdraws the other: the withdrawal ends both.
        "b LOCK.MACQUIRE 2 k2 k0 o0 WATCHDOG
         b !end
         +400
         a LOCK.RENEW k0 o0 SESSION $t
         a LOCK.RELEASE k2 o0 ALL",
        // An unconfirmed hold is not renewed yet, and may end by itself. Two owners that wait for each
        // other close a cycle only once replicas have confirmed it.
        "!replicas 20
         e LOCK.ACQUIRE k1 o1 WATCHDOG
         e LOCK.ACQUIRE k2 o0 WATCHDOG REPLICAS 1
         c LOCK.ACQUIRE k2 o1 WAIT 0
         d LOCK.ACQUIRE k1 o0 WAIT 0",
        // The same, but the binding has ended with its session: the key's expiry counts.
        "b LOCK.ACQUIRE k0 o0
         a LOCK.ACQUIRE k0 o1 LEASE 7200000 WAIT 0 SESSION $t
         +1
         !clock -60000
         t LOCK.EVENTS WAIT 50
         a LOCK.FORCE k0
         +1
         t !end
         +400
         a PEXPIRE k0 1",
        // A session re-enters a watched hold with REPLICAS, and reads once before the confirmation. The
        // re-entry binds the hold again, and the session reads no more, so it is considered dead.
        "!replicas 20
         e LOCK.MACQUIRE 1 k0 o0 LEASE 400 WATCHDOG SESSION $s
         e LOCK.ACQUIRE k0 o0 LEASE 400 REPLICAS 1 SESSION $s
         +3
         s LOCK.EVENTS",
        // A grant with REPLICAS bound a hold to a session that no longer reads. The owner releases to a
        // count and shortens the lease. A re-entry without REPLICAS then extends the key, but not the confirmed
        // deadline.
        "!replicas 0 never 0
         c LOCK.ACQUIRE k1 o0 REPLICAS 1 SESSION $s
         s !vanish
         +1
         s LOCK.EVENTS
         +3
         b LOCK.ACQUIRE k1 o0
         +1
         c LOCK.RELEASE k1 o0 LEASE 100
         b LOCK.ACQUIRE k1 o0",
        // MRENEW of one lock, and RENEW of it with the same options: the second repeats the first, and both
        // have one outcome.
        "a LOCK.ACQUIRE k0 o0
         b LOCK.MRENEW 1 k0 o0 REPLICAS 1 SESSION $s
         d LOCK.RENEW k0 o0 REPLICAS 1 SESSION $s",
        // A hold expires while writes are refused, before its key could follow a clock step, and its
        // session is notified. Then the server becomes a replica, which writes nothing by itself, so the key stays
        // unchanged.
        "b LOCK.ACQUIRE k1 o0 LEASE 2000 WATCHDOG SESSION $s
         +400
         !clock -60000
         c CONFIG SET min-replicas-to-write 1
         +3
         +400
         t LOCK.EVENTS WAIT 0
         +1200
         c REPLICAOF 127.0.0.1 1",
        // A role change ends two waits, and a renewal finds no hold. Each has its outcome, although it is
        // unknown which event belongs to which.
        "c LOCK.ACQUIRE k2 o0
         d LOCK.ACQUIRE k2 o2 WAIT 20 SESSION $t
         +120
         e LOCK.ACQUIRE k2 o2 WAIT 20 SESSION $t
         c REPLICAOF 127.0.0.1 1
         c REPLICAOF NO ONE
         +0
         !replicas 0 20
         e LOCK.RELEASE k1 o0
         c LOCK.MRENEW 2 k0 k2 o2 REPLICAS 1 SESSION $t
         e LOCK.ACQUIRE k0 o2",
        // A request that waited for another one of its owner has re-entered a confirmed hold, and does not
        // extend it.
        "!replicas 20
         s LOCK.ACQUIRE k0 o0 REPLICAS 1
         c LOCK.ACQUIRE k0 o0 LEASE 7200000 WAIT 0 SESSION $s
         +1200
         s LOCK.EVENTS",
        // A renewal without REPLICAS has shortened the lease before the grant was read: the hold ends at that.
        "!replicas 0 20 0
         b LOCK.ACQUIRE k0 o0 REPLICAS 1 WATCHDOG SESSION $t
         +20
         a LOCK.MRENEW 2 k0 k1 o0 LEASE 400
         !replicas
         +20
         +120
         t LOCK.EVENTS",
        // An owner is granted a lock again while SWAPDB has put its hold elsewhere, and ends that
        // grant; then the earlier hold comes back.
        "a LOCK.ACQUIRE k2 o1 EPHEMERAL
         a SWAPDB 0 1
         a LOCK.ACQUIRE k2 o1
         b SWAPDB 0 1
         a LOCK.RELEASE k2 o1
         +3
         b LOCK.MRENEW 2 k2 k3 o1",
        "!replicas 20 20 0
         b LOCK.ACQUIRE k1 o2 EPHEMERAL SESSION $s
         c SWAPDB 0 1
         a LOCK.ACQUIRE k1 o2
         a EVAL return_redis.call(unpack(ARGV)) 0 LOCK.FORCE k1
         d SWAPDB 0 1
         +0
         b LOCK.ACQUIRE k1 o2",
        // A second clock step after a grant that was received late: the hold is over, whatever its key says.
        "a LOCK.ACQUIRE k2 o2 LEASE 400
         a LOCK.ACQUIRE k2 o3 LEASE 2000 WAIT 0 SESSION $t
         +1200
         !misconf on
         !clock -60000
         t LOCK.EVENTS
         +1200
         +400
         !clock -200
         a LOCK.ACQUIRE k1 o0",
        // While the clock steps, the module has not seen yet that another client changed the expiry: the key
        // stays as it is, also at a second step, until writes are possible.
        "a LOCK.ACQUIRE k1 o0
         c LOCK.ACQUIRE k1 o2 WAIT 0
         +0
         d LOCK.ACQUIRE k2 o1 LEASE 7200000 SESSION $t
         c PEXPIRE k2 100000
         a LOCK.ACQUIRE k1 o2 WAIT 0
         +0
         c LOCK.ACQUIRE k2 o0
         !clock 200
         b CLIENT PAUSE 1000
         +20
         !clock 200",
        // A renewal with REPLICAS shortens the lease before its outcome is read.
        "!replicas 20 20
         b LOCK.ACQUIRE k2 o0 LEASE 20 SESSION $s
         b LOCK.ACQUIRE k0 o1 LEASE 2000 WATCHDOG SESSION $s
         +1200
         s LOCK.EVENTS WAIT 0
         b LOCK.RENEW k0 o1 LEASE 400 REPLICAS 1 SESSION $s",
        // Of two requests with REPLICAS, replicas have confirmed the first: the hold ends at its deadline.
        "b LOCK.SESSION REPLACES $a
         b LOCK.ACQUIRE k0 o1 LEASE 50 REPLICAS 1
         +3
         a LOCK.ACQUIRE k0 o1 WAIT 20
         b LOCK.ACQUIRE k0 o1 REPLICAS 1
         !replicas never never",
        // A release with LEASE shortens a confirmed deadline, and a re-entry in the same iteration hides that.
        "!replicas 20 2000
         a LOCK.ACQUIRE k0 o3 EPHEMERAL REPLICAS 1
         +1200
         c LOCK.MRELEASE 2 k0
         d LOCK.ACQUIRE k0 o3 REPLICAS 1
         c LOCK.RELEASE k0 o3 HOLDS 1 LEASE 30
         b CLIENT PAUSE 1000
         +20",
        // Two like requests with different leases: the checker does not know which one bound
        // the hold, nor how often its session is to read.
        "c LOCK.ACQUIRE k1 o2
         s LOCK.ACQUIRE k1 o0 LEASE 50 WATCHDOG WAIT 20 SESSION *
         a RENAME k1 k3
         e LOCK.ACQUIRE k1 o0 WATCHDOG WAIT 0 SESSION $s
         +0
         s LOCK.EVENTS
         +0
         s LOCK.EVENTS WAIT 0",
        "a LOCK.ACQUIRE k2 o0
         a !vanish
         +1200
         s LOCK.ACQUIRE k1 o3 WATCHDOG
         a LOCK.ACQUIRE k1 o3 LEASE 3600001 WATCHDOG SESSION $s
         +1
         s LOCK.EVENTS WAIT 0
         +1200",
        "c LOCK.ACQUIRE k3 o1
         c LOCK.ACQUIRE k0 o1
         c LOCK.ACQUIRE k0 o0 WAIT 300
         c LOCK.ACQUIRE k3 o2 EPHEMERAL WATCHDOG WAIT 20 SESSION $s
         a LOCK.ACQUIRE k3 o2 LEASE 50 EPHEMERAL WATCHDOG WAIT 300 SESSION $s
         c LOCK.MRELEASE 2 k3 k0 o1
         +400
         s LOCK.EVENTS
         +3
         s LOCK.EVENTS WAIT 0",
        // Of a renewal and an acquisition with the same outcomes, it is unknown which one an event ends.
        "!replicas 20 0
         a LOCK.ACQUIRE k1 o0 REPLICAS 1 SESSION $s
         +400
         b LOCK.MRENEW 2 k0 k1 o0 REPLICAS 1 SESSION $s
         s LOCK.EVENTS WAIT 0
         b LOCK.ACQUIRE k1 o0 WAIT 0 SESSION $s
         +1
         b LOCK.ACQUIRE k1 o0 REPLICAS 1 SESSION $s
         b LOCK.RELEASE k1 o0 ALL",
        // Another client writes a hold with a shorter expiry while replicas confirm it, and that is what they
        // confirm.
        r"!replicas never 0
         a RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00
         a LOCK.ACQUIRE k0 o0
         +1200
         b LOCK.ACQUIRE k0 o0 REPLICAS 1 SESSION $s
         a RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00 REPLACE
         a LOCK.ACQUIRE k0 o0 WAIT 0",
        // Within a transaction, the second of two requests of an owner takes over the position of the first,
        // whatever it has WAITED.
        "e LOCK.RELEASE k0 o3
         a LOCK.ACQUIRE k1 o2 WAIT 0
         c MULTI
         c LOCK.ACQUIRE k1 o3 WAIT 20 SESSION $t
         c LOCK.ACQUIRE k1 o3 WAIT 300 WAITED 300 SESSION $s
         c EXEC
         e LOCK.ACQUIRE k1 o0 LEASE 50",
        // A hold is forced, its owner is granted the lock again, and raises that token: a hold with a count of
        // its own.
        "a LOCK.ACQUIRE k0 o2
         b LOCK.MACQUIRE 1 k0 o2
         +20
         a LOCK.RENEW k0 o1
         c LOCK.ACQUIRE k0 o2 WAIT 0 SESSION $s
         a LOCK.FORCE k0
         a LOCK.ACQUIRE k0 o1 REPLICAS 1
         a LOCK.RENEW k0 o2 FENCE 1800001200319410
         c DEBUG SLEEP 3",
        // After a SWAPDB, a hold is looked for under its token first, and only then under a token that FENCE
        // named.
        "!replicas 2000 20 never
         s LOCK.ACQUIRE k2 o2
         c LOCK.RENEW k2 o2 FENCE 1800000060571323
         b SWAPDB 0 1
         b LOCK.ACQUIRE k2 o2
         +0
         c LOCK.ACQUIRE k2 o2 EPHEMERAL
         a SWAPDB 0 1",
        // A hold is bound when replicas have confirmed it, before or after a later request gives it another
        // lease.
        "d LOCK.ACQUIRE k1 o0 REPLICAS 1 WATCHDOG SESSION $t
         +400
         !replicas never
         +20
         c LOCK.ACQUIRE k1 o0 LEASE 400 WATCHDOG SESSION $t
         +0
         t LOCK.EVENTS WAIT 0 HEARTBEAT",
        // A hold expires while clients are paused, and its session reads that right after the pause, before
        // the module could end the hold.
        "!replicas 20
         a LOCK.ACQUIRE k2 o0
         a LOCK.ACQUIRE k2 o1 WAIT 300
         a CLIENT PAUSE 1000
         b LOCK.ACQUIRE k0 o1 LEASE 50 REPLICAS 1 SESSION $t
         b LOCK.ACQUIRE k0 o1 WAIT 0
         b SWAPDB 0 1
         +120
         t LOCK.ACQUIRE k1 o0
         t LOCK.EVENTS WAIT 0",
        // A hold that ended at the deadline that its replicas have confirmed, before its longer lease, and the next one of
        // its owner, whose reply has yet to come.
        "!replicas 20 2000 20
         t LOCK.ACQUIRE k1 o2 LEASE 50 REPLICAS 1
         a LOCK.ACQUIRE k0 o1 LEASE 50
         b LOCK.ACQUIRE k0 o0 WAIT 300
         b AUTH guest x
         a ACL SETUSER guest
         t LOCK.ACQUIRE k1 o2
         b LOCK.MACQUIRE 2 k0 SESSION $t
         b LOCK.ACQUIRE k1 o2 LEASE 50 REPLICAS 1",
        // The owner acquired the lock again under another limit, in a request whose client received no reply.
        // Then a renewal raises the token. The earlier hold had expired, or was forced.
        "!clock -200
         a LOCK.ACQUIRE k2 o2 LEASE 50
         +1200
         c LOCK.ACQUIRE k2 o2 LIMIT 2
         c !end
         +120
         c LOCK.RENEW k2 o2 FENCE 1800000001411147
         c LOCK.ACQUIRE k2 o0 SHARED",
        "a LOCK.ACQUIRE k2 o2
         +20
         b LOCK.FORCE k2
         c LOCK.ACQUIRE k2 o2 LIMIT 2
         c !end
         d LOCK.RENEW k2 o2 FENCE 1800000001411147
         d LOCK.ACQUIRE k2 o0 SHARED",
        // An event that a session had read cannot be the outcome of what it sent afterwards.
        "!replicas 0
         b !stop-reading
         a LOCK.ACQUIRE k0 o0
         b LOCK.MACQUIRE 1 k0 o1 LEASE 50 WAIT 300 SESSION $t
         c DEL k0
         +120
         t LOCK.EVENTS
         t LOCK.ACQUIRE k0 o1 LEASE 50 REPLICAS 1 SESSION *
         a LOCK.ACQUIRE k0 o1 WAIT 20",
        // A renewal of several locks that is repeated gets an outcome for each lock each time.
        "!replicas 0 never 2000
         c LOCK.ACQUIRE k0 o1
         a LOCK.ACQUIRE k0 o0 WAIT 300
         a LOCK.MRENEW 2 k1 k0 o1 LEASE 30000 REPLICAS 1 SESSION $s
         c LOCK.MRENEW 2 k1 k0 o1 LEASE 30000 REPLICAS 1 SESSION $s",
        // The owner's renewal, with a shorter lease, hides that of the watchdog right before.
        "b LOCK.ACQUIRE k0 o1 LEASE 2000 WATCHDOG SESSION $s
         +1200
         s LOCK.EVENTS
         a LOCK.ACQUIRE k0 o0 WAIT 0
         a LOCK.RENEW k0 o1 LEASE 50
         b LOCK.ACQUIRE k0 o0 WAIT 0",
        // A lock that was released and then restored is not bound.
        r"a RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00
         !replicas 2000 2000 20
         s LOCK.EVENTS WAIT 0
         c LOCK.ACQUIRE k0 o0 SESSION $s
         +120
         c LOCK.ACQUIRE k0 o1 WAIT 300
         c LOCK.RELEASE k0 o0
         a RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00 REPLACE
         c RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00
         c LOCK.MACQUIRE 1 k0 o0
         c SET k0 x",
        // A late reply to an earlier request says nothing of a deadline that was seen since.
        "!replicas never 2000 20
         a !stop-reading
         a LOCK.ACQUIRE k0 o2 WATCHDOG SESSION $s
         b LOCK.ACQUIRE k0 o2 REPLICAS 1 SESSION $s
         +20
         a PEXPIRE k0 30
         +20
         s LOCK.EVENTS",
        // What ends while its connection is no session yet is not reported later.
        "!replicas 0 never
         a LOCK.ACQUIRE k0 o2 LEASE 400 EPHEMERAL REPLICAS 1
         c PERSIST k0
         +20
         !misconf on
         +1200
         a LOCK.SESSION REPLACES $s",
        // The outcome may be that of a request whose `WAITING` was never read.
        "!replicas 20
         b LOCK.ACQUIRE k0 o2
         s LOCK.EVENTS WAIT 0
         s LOCK.ACQUIRE k0 o2 REPLICAS 1 SESSION *
         s LOCK.EVENTS WAIT 0
         b LOCK.ACQUIRE k0 o1 WAIT 0
         a LOCK.RELEASE k0 o1
         b PEXPIRE k0 30
         c LOCK.ACQUIRE k0 o0 WAIT 0 SESSION $s
         a !vanish
         c LOCK.RELEASE k0 o0 ALL
         +1
         a LOCK.ACQUIRE k0 o2 WAIT 0 SESSION $s
         c LOCK.ACQUIRE k0 o2 WAIT 20
         a LOCK.ACQUIRE k0 o1 WAIT 20",
        "!replicas never 2000 20
         a !stop-reading
         a LOCK.ACQUIRE k0 o2 WATCHDOG WAIT 0 SESSION $s
         b LOCK.ACQUIRE k0 o2 REPLICAS 1 SESSION $s
         +20
         a PEXPIRE k0 30
         +20
         s LOCK.EVENTS",
        // A late reply is about a hold that a `lost` event named before.
        "!replicas never 2000 20
         a !stop-reading
         b LOCK.ACQUIRE k0 o2 REPLICAS 1 SESSION $s
         +20
         a PEXPIRE k0 30
         +3
         a LOCK.RENEW k0 o2
         +120
         s LOCK.EVENTS",
        // A hold whose key has yet to follow a clock step is over before its connection becomes a session.
        "b LOCK.ACQUIRE k1 o1 LEASE 400 EPHEMERAL
         +1
         !misconf on
         !clock -60000
         t LOCK.EVENTS WAIT 50
         +400
         b LOCK.SESSION REPLACES $a",
        // Another command writes a hold of an owner that has just released its own.
        "s LOCK.EVENTS WAIT 50
         a LOCK.ACQUIRE k0 o0 LEASE 400 WATCHDOG SESSION $s
         s LOCK.EVENTS WAIT 0
         c HSET k0 o0 2
         a LOCK.RELEASE k0 o0",
        // A hold that is over, whatever its key says, stays so when its session ends.
        "a LOCK.ACQUIRE k0 o2 LEASE 50
         s LOCK.ACQUIRE k0 o0 LEASE 400 WAIT 0 SESSION *
         +120
         c CONFIG SET min-replicas-to-write 1
         !clock -60000
         s LOCK.EVENTS WAIT 50
         +1200
         s !end
         +2
         c CONFIG SET min-replicas-to-write 0
         +400",
        // The token is raised before a shorter lease is over, by a request whose reply is not read yet.
        "a LOCK.MACQUIRE 3 k0 k2 k3 o0 EPHEMERAL
         a LOCK.MACQUIRE 2 k2 k0 o0
         c !stop-reading
         a LOCK.RELEASE k2 o0 LEASE 100
         c LOCK.RENEW k2 o0 FENCE 1800000001342133
         +1200
         b LOCK.RENEW k1 o0",
        // A hold ends at its confirmed deadline in the iteration in which its session is killed.
        "!replicas 20 never
         b LOCK.ACQUIRE k1 o0 LEASE 50
         b LOCK.ACQUIRE k1 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +1200
         !clock 200
         d LOCK.ACQUIRE k1 o1 WAIT 0
         d CLIENT KILL ID #s
         b LOCK.ACQUIRE k1 o0",
        // A hold that outlasts a release ends when an earlier grant to its owner is revoked.
        "a LOCK.ACQUIRE k0 o0
         s LOCK.ACQUIRE k2 o0
         b LOCK.ACQUIRE k0 o1 WAIT 0
         b LOCK.RELEASE k0 o0
         b LOCK.ACQUIRE k0 o1 SESSION $s
         b CLIENT UNBLOCK #d
         d LOCK.ACQUIRE k2 o1 WAIT 0
         c LOCK.ACQUIRE k0 o1 WAIT 0
         c !end
         d LOCK.RELEASE k0 o1",
        // A hold is lost under a token that a request without a received reply has raised.
        "b LOCK.ACQUIRE k0 o0 SESSION $s
         s LOCK.EVENTS WAIT 0
         +20
         b !vanish
         b LOCK.RENEW k0 o0 FENCE 1800001200510660
         b LOCK.FORCE k0",
        // A key of the same name in another database is forced and written, and then swapped away.
        "s LOCK.ACQUIRE k0 o1 EPHEMERAL
         b LOCK.MACQUIRE 2 k0 k2 o2 WAIT 0
         a SWAPDB 0 1
         c LOCK.ACQUIRE k0 o1
         c LOCK.FORCE k0
         c DEL k0
         c SWAPDB 0 1
         +0
         a LOCK.MRENEW 3 k2 k1 k0 o1",
        // Which of two similar requests was granted is unknown, and the lease is over before the second began.
        "d LOCK.ACQUIRE k1 o0
         d LOCK.ACQUIRE k1 o1 LEASE 50 WAIT 300 SESSION $s
         d LOCK.ACQUIRE k1 o3 WAIT 0 SESSION $s
         s LOCK.EVENTS WAIT 50
         c CLIENT KILL ID #d
         d LOCK.MRELEASE 1 k1 o0
         c DEBUG SLEEP 3
         a LOCK.ACQUIRE k1 o1 WAIT 0 SESSION $s",
        // A request without a received reply shortened what replicas confirm, before the clock was set back.
        "!replicas 20
         b DEL k0
         b !vanish
         a CLIENT PAUSE 1000
         c LOCK.ACQUIRE k0 o1 LEASE 2000
         c CLIENT PAUSE 1000
         +400
         +1200
         a LOCK.ACQUIRE k0 o1 LEASE 2000
         +120
         b LOCK.ACQUIRE k0 o0 WAIT 0
         b LOCK.RENEW k0 o0 EPHEMERAL REPLICAS 1
         b LOCK.ACQUIRE k0 o0 REPLICAS 1
         +1200
         b LOCK.RELEASE k0 o0 LEASE 100
         +1200
         c LOCK.ACQUIRE k0 o0
         +3
         !clock -200",
        // A hold that is over while writes are refused stays in its key when the server becomes a replica.
        "!replicas never 20 20
         a LOCK.ACQUIRE k2 o1
         b LOCK.MRENEW 1 k2 o1 LEASE 2000 REPLICAS 1 SESSION $s
         +3
         a PEXPIRE k2 100000
         +0
         !misconf on
         +1200
         +1200
         c REPLICAOF 127.0.0.1 1",
        // The same, if its session has read that before.
        "!replicas never 20 20
         a LOCK.ACQUIRE k2 o1
         b LOCK.MRENEW 1 k2 o1 LEASE 2000 REPLICAS 1 SESSION $s
         +3
         a PEXPIRE k2 100000
         +0
         !misconf on
         +1200
         +1200
         s LOCK.EVENTS
         +300
         c REPLICAOF 127.0.0.1 1
         +300
         c REPLICAOF NO ONE
         !misconf off
         +1000",
        // The same, if clients are paused.
        "!replicas never 20 20
         a LOCK.ACQUIRE k2 o1
         b LOCK.MRENEW 1 k2 o1 LEASE 2000 REPLICAS 1 SESSION $s
         +3
         a PEXPIRE k2 100000
         +0
         c CLIENT PAUSE 5000 WRITE
         +1200
         +1200
         c REPLICAOF 127.0.0.1 1",
        // Replies to a binding that its session has made anew since are received late.
        "s LOCK.EVENTS WAIT 0
         a LOCK.ACQUIRE k0 o2 WATCHDOG SESSION $s
         b !stop-reading
         a !stop-reading
         b LOCK.ACQUIRE k0 o2 EPHEMERAL
         s LOCK.ACQUIRE k0 o2 EPHEMERAL
         b LOCK.ACQUIRE k0 o2 SESSION $s
         b LOCK.ACQUIRE k0 o2",
        // A session ends right after its hold was unbound because the slot has moved: the hold ends with its lease.
        "b LOCK.ACQUIRE k1 o3 EPHEMERAL SESSION $t
         t LOCK.ACQUIRE k1 o3 LEASE 50 WATCHDOG
         +120
         !slot k1 moves
         t LOCK.EVENTS
         t !end",
        // After the end of an ephemeral hold, a renewal finds the owner's next one, whose grant nobody read.
        "a LOCK.ACQUIRE k0 o0
         a LOCK.ACQUIRE k0 o0 EPHEMERAL SESSION $s
         +20
         s !end
         b LOCK.ACQUIRE k0 o0
         c CLIENT KILL ID #b
         a LOCK.RENEW k0 o0 FENCE 1800001200592266",
        // A re-entry whose reply nobody read makes the hold ephemeral; the hold's earlier lease goes on after its own.
        "a !stop-reading
         b LOCK.ACQUIRE k2 o3
         a LOCK.ACQUIRE k2 o3 LEASE 50 EPHEMERAL SESSION $s
         +120
         a LOCK.SESSION REPLACES $s",
        // A hold ends at the deadline that replicas have confirmed, and its session in the same iteration.
        "!replicas 0 20
         d LOCK.ACQUIRE k0 o1
         d LOCK.ACQUIRE k1 o1 LEASE 50 REPLICAS 1 SESSION $s
         d LOCK.ACQUIRE k1 o0 WAIT 0
         c LOCK.ACQUIRE k0 o0 WAIT 0
         c LOCK.ACQUIRE k1 o1
         +0
         d LOCK.SESSION REPLACES $s
         c LOCK.ACQUIRE k0 o1 REPLICAS 1
         a LOCK.ACQUIRE k0 o0 WAIT 300
         +3
         b LOCK.ACQUIRE k0 o1",
        // A lease ends while clients are paused. Then another command removes the expiry of its key.
        "c LOCK.ACQUIRE k3 o2 LEASE 2000
         b LOCK.ACQUIRE k3 o1 WAIT 0
         b LOCK.ACQUIRE k0 o2 LEASE 400 LIMIT 2 EPHEMERAL
         b CLIENT PAUSE 1000
         +1200
         b PERSIST k0
         c LOCK.ACQUIRE k0 o1 LIMIT 3",
        // A reply that is received late, after a later request of the same connection has raised the token, says that the
        // hold is ephemeral.
        "!replicas 2000 20 20
         s !stop-reading
         c LOCK.RENEW k1 o2
         s LOCK.ACQUIRE k0 o0 EPHEMERAL
         c LOCK.ACQUIRE k0 o0
         +120
         !clock -60000
         b LOCK.ACQUIRE k1 o0 REPLICAS 1
         b LOCK.ACQUIRE k0 o0 WATCHDOG SESSION $s
         c LOCK.RENEW k0 o0 FENCE 1800001200062523 SESSION $s",
        // A hold whose grant nobody has read yet is over before its key could follow a clock step. Then the role changes,
        // and the key stays.
        "!replicas 2000
         a LOCK.MACQUIRE 2 k2 k1 o1 LEASE 50
         a CONFIG SET min-replicas-to-write 1
         c LOCK.ACQUIRE k2 o0 LEASE 400 WAIT 300 SESSION $s
         +120
         !good 0
         !clock -60000
         +400
         b REPLICAOF 127.0.0.1 1",
        // A renewal without a lease uses that of a binding whose grant nobody has read yet.
        "!replicas 2000 0 0
         d LOCK.ACQUIRE k0 o0 LEASE 50 REPLICAS 1 SESSION $s
         s LOCK.ACQUIRE k1 o1 LEASE 50
         b LOCK.ACQUIRE k1 o0 WAIT 0
         b LOCK.ACQUIRE k0 o0 LEASE 50 REPLICAS 1
         +3
         d LOCK.MRENEW 2 k0 k1 o0",
        // While clients are paused, a hold passes the deadline that replicas have confirmed, by a grant that nobody has
        // read. Then its owner is granted the lock again.
        "!replicas 0 2000 0
         e LOCK.ACQUIRE k1 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +1200
         e LOCK.ACQUIRE k1 o0
         +3
         d CLIENT PAUSE 1000
         b LOCK.ACQUIRE k1 o0 LEASE 400 REPLICAS 1
         +1200",
        // On Redis 7.0, a heartbeat does not yet know of an expiry that an unblocked client has set right before.
        "d LOCK.ACQUIRE k3 o1
         c LOCK.ACQUIRE k2 o0 SESSION $s
         +1
         c LOCK.RENEW k3 o1 WATCHDOG SESSION $s
         c LOCK.ACQUIRE k2 o1 WAIT 20
         b LOCK.FORCE k2
         a LOCK.ACQUIRE k2 o0 WAIT 300
         a PEXPIRE k3 1
         +0
         c LOCK.RELEASE k2 o1
         +0
         s LOCK.EVENTS WAIT 0 HEARTBEAT",
        // What a release has left of a hold belongs to an unread grant of several locks, which is withdrawn by another of them.
        "b LOCK.ACQUIRE k1 o1 LEASE 50
         b LOCK.MACQUIRE 3 k0 k1 k2 o0 WAIT 0 SESSION $s
         +120
         b LOCK.ACQUIRE k0 o0 EPHEMERAL SESSION $s
         b LOCK.MRELEASE 1 k0 o0
         b LOCK.RELEASE k2 o0 ALL",
        // A grant to a client that does not read is not the outcome of its owner's next request.
        "!replicas 20 20 2000
         c LOCK.ACQUIRE k0 o0 LEASE 400
         a !stop-reading
         a LOCK.ACQUIRE k0 o1 LEASE 400 WAIT 0 SESSION $s
         +1200
         a LOCK.ACQUIRE k0 o0
         c LOCK.RELEASE k1 o1
         s LOCK.EVENTS WAIT 50
         c LOCK.ACQUIRE k0 o1 LEASE 50 REPLICAS 1 WAIT 300 SESSION $s
         c LOCK.FORCE k0
         b LOCK.ACQUIRE k0 o1 HOLDS 1 WAIT 300",
        // Another command takes the token of an ephemeral hold, and then its connection becomes a session.
        "b LOCK.ACQUIRE k0 o1 EPHEMERAL
         b PEXPIRE k0 1
         b HDEL k0 #fence
         b LOCK.SESSION REPLACES $c",
        // The watchdog has renewed a hold, which is not seen, and then a release shortens the lease. The session reads no more.
        "s LOCK.ACQUIRE k0 o1 LEASE 2000 WATCHDOG
         a LOCK.ACQUIRE k0 o1
         +400
         +400
         b LOCK.ACQUIRE k1 o0
         a LOCK.ACQUIRE k1 o1 WAIT 20
         s LOCK.EVENTS WAIT 50
         a LOCK.RELEASE k0 o1 LEASE 100
         c LOCK.ACQUIRE k1 o1 WAIT 0
         a LOCK.ACQUIRE k0 o1 LEASE 50",
        // Where other slots move while clients are paused, a key need not follow a clock step, and the release is too late.
        "b LOCK.ACQUIRE k1 o1 SESSION $s
         b CLIENT PAUSE 1000
         +20
         d LOCK.RELEASE k1 o1
         !clock 60000
         !slot k3 goes",
        // An ephemeral hold might have ended, for the checker, before a renewal raised its token.
        "a LOCK.ACQUIRE k0 o1 EPHEMERAL
         c !stop-reading
         a LOCK.ACQUIRE k0 o1 SHARED SESSION $s
         c LOCK.ACQUIRE k0 o1 SHARED EPHEMERAL
         d LOCK.SESSION REPLACES $s
         +3
         c LOCK.RENEW k0 o1 FENCE 1800000060041720",
        // A request keeps the flags of its session that the later of two unread ones has set, after another connection.
        "!replicas 0 never
         b LOCK.ACQUIRE k0 o1 REPLICAS 1 SESSION $s
         +1200
         s LOCK.EVENTS WAIT 50
         e LOCK.ACQUIRE k0 o1 EPHEMERAL REPLICAS 1
         s LOCK.EVENTS WAIT 0
         s LOCK.ACQUIRE k0 o1 REPLICAS 1
         a LOCK.ACQUIRE k0 o1 EPHEMERAL WAIT 0 SESSION $s",
        "!replicas 0
         b LOCK.ACQUIRE k1 o0 REPLICAS 1 SESSION $t
         b LOCK.ACQUIRE k1 o0 EPHEMERAL WAIT 300
         b LOCK.ACQUIRE k1 o0 EPHEMERAL REPLICAS 1 SESSION $t
         +1200
         t LOCK.EVENTS WAIT 0
         +0
         b LOCK.ACQUIRE k1 o0 REPLICAS 1 SESSION $t",
        // The watchdog has renewed a hold since its owner gave it a short lease, which replicas confirm in the iteration
        // in which the session is closed.
        "c CLIENT PAUSE 1000
         a LOCK.ACQUIRE k3 o1
         a LOCK.RENEW k3 o1 LEASE 50 REPLICAS 1
         c LOCK.ACQUIRE k2 o0
         d LOCK.RENEW k2 o0 WATCHDOG SESSION $s
         e LOCK.ACQUIRE k3 o1 REPLICAS 1 WAIT 0
         +1200
         +1200
         s LOCK.EVENTS WAIT 50
         b LOCK.RENEW k2 o0 LEASE 50 REPLICAS 1 SESSION $s
         +400
         !replicas 0 20
         e CLIENT KILL ID #s",
        // The same while writes are refused: the hold ends later.
        "c CLIENT PAUSE 1000
         a LOCK.ACQUIRE k3 o1
         a LOCK.RENEW k3 o1 LEASE 50 REPLICAS 1
         c LOCK.ACQUIRE k2 o0
         d LOCK.RENEW k2 o0 WATCHDOG SESSION $s
         e LOCK.ACQUIRE k3 o1 REPLICAS 1 WAIT 0
         +1200
         +1200
         s LOCK.EVENTS WAIT 50
         b LOCK.RENEW k2 o0 LEASE 50 REPLICAS 1 SESSION $s
         +400
         !replicas 0 20
         e CLIENT KILL ID #s
         !misconf on
         +400",
        // A re-entry opens its key in the last millisecond of the lease, and renews it in the next one.
        "a LOCK.ACQUIRE k3 o2 LEASE 400
         a LOCK.ACQUIRE k3 o2 REPLICAS 1
         +3
         d LOCK.ACQUIRE k2 o2 LEASE 50 SESSION $s
         s LOCK.EVENTS WAIT 0
         +20
         +3
         +120
         +400
         c LOCK.ACQUIRE k2 o1 LEASE 50
         s LOCK.EVENTS WAIT 50
         s LOCK.ACQUIRE k2 o1",
        // The server closes a session's connection while another session is opened for the client's next request.
        "c LOCK.ACQUIRE k2 o1 WATCHDOG
         b HDEL k2 o1
         c LOCK.ACQUIRE k1 o0 REPLICAS 1
         a LOCK.ACQUIRE k2 o0 REPLICAS 1
         a REPLICAOF 127.0.0.1 1
         a REPLICAOF NO ONE
         +0
         !clock 60000
         !slot k1 goes
         c LOCK.ACQUIRE k2 o1 REPLICAS 1 SESSION $s
         c LOCK.ACQUIRE k1 o1",
        // A grant that was received after a clock step and a change of the role, and whose key another command gave a
        // shorter expiry.
        "t LOCK.ACQUIRE k0 o2
         b LOCK.ACQUIRE k0 o1 WAIT 20 SESSION $t
         +0
         e LOCK.RELEASE k0 o2
         e REPLICAOF 127.0.0.1 1
         c REPLICAOF NO ONE
         c LOCK.ACQUIRE k0 o1
         a PEXPIRE k0 1
         t LOCK.EVENTS WAIT 0
         !clock 60000",
        // A renewal raises an ephemeral hold's token before its grant is received, after a release that found
        // nothing.
        "d LOCK.ACQUIRE k0 o3 LIMIT 3
         b LOCK.SESSION REPLACES $s
         a LOCK.ACQUIRE k0 o1
         c LOCK.RELEASE k0 o0
         b LOCK.ACQUIRE k0 o2 WAIT 20
         b !vanish
         a LOCK.ACQUIRE k0 o0 SHARED EPHEMERAL WAIT 0
         b LOCK.RENEW k0 o0 FENCE 1800001200331754
         +0
         +20
         c LOCK.RENEW k0 o0",
        // The late reply to a re-entry without flags, about an ephemeral hold whose token another client has raised
        // since.
        "t LOCK.ACQUIRE k0 o2 EPHEMERAL
         +0
         t !stop-reading
         t LOCK.ACQUIRE k0 o2
         b LOCK.RENEW k0 o2 FENCE 1800000000974491
         +400
         t !resume-reading
         d EVAL return_redis.call(unpack(ARGV)) 0 LOCK.ACQUIRE k0 o2 WATCHDOG SESSION $t",
        // A hold that another key's name brought, with an old token; its owner binds it with replicas and learns of
        // it by a renewal.
        r"!replicas 20 0
         e LOCK.ACQUIRE k1 o0 REPLICAS 1 SESSION $s
         a LOCK.MRELEASE 2 k1 k0 o0 ALL
         +0
         b LOCK.ACQUIRE k1 o0
         d LOCK.ACQUIRE k2 o0
         e RENAME k0 k1
         a LOCK.ACQUIRE k1 o0 LEASE 50 REPLICAS 1 SESSION $s
         d RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00
         +400
         s LOCK.EVENTS WAIT 0
         e LOCK.MRENEW 2 k1 k0 o0 LEASE 30000",
        // The same; the renewal itself binds the hold, which may have been ephemeral.
        "b LOCK.ACQUIRE k1 o1
         b !stop-reading
         b LOCK.ACQUIRE k0 o1
         a LOCK.ACQUIRE k0 o1 EPHEMERAL SESSION $s
         b LOCK.ACQUIRE k1 o0 WAIT 20
         b LOCK.RELEASE k0 o1
         b LOCK.RENEW k0 o1 FENCE 1800001200283987 WATCHDOG SESSION $s
         a LOCK.ACQUIRE k1 o0 WAIT 0",
        // The same; the grant with replicas comes after the renewal of which it is known.
        "!replicas 2000 20 2000
         d LOCK.ACQUIRE k0 o2 REPLICAS 1 SESSION $t
         +120
         a LOCK.RENEW k0 o2 LEASE 50
         +3
         +20
         b LOCK.RENEW k0 o2 SESSION $t
         t LOCK.EVENTS",
        // A request with replicas whose reply its client never receives has bound the hold, and writes are refused
        // when that would be over.
        "a LOCK.MACQUIRE 1 k0 o2 LEASE 400
         !replicas 20 2000 never
         s LOCK.ACQUIRE k0 o2 LEASE 2000 REPLICAS 1 SESSION *
         a LOCK.ACQUIRE k1 o2 SESSION $s
         +1200
         b PERSIST k0
         +1
         !misconf on
         +1200
         +1
         s !end
         +1
         !misconf off
         +400",
        // The slot of an ephemeral hold moves away, which unbinds the hold, and comes back before its session has
        // read that.
        "a LOCK.ACQUIRE k0 o1
         s LOCK.ACQUIRE k0 o1 LEASE 50 EPHEMERAL WATCHDOG
         +400
         !slot k0 unowned
         s LOCK.EVENTS WAIT 0
         +0
         !slot k0 moves
         +400
         !slot k0 comes
         s !end
         +400",
        // A release with a lease prolongs a hold that a request without an outcome has bound with replicas.
        "!replicas 2000 20
         c LOCK.MACQUIRE 1 k0 o1 LEASE 400
         c LOCK.ACQUIRE k0 o1 LEASE 2000 SESSION $s
         s LOCK.ACQUIRE k0 o1 LEASE 400 REPLICAS 1 SESSION *
         +400
         b LOCK.RELEASE k0 o1 LEASE 60000",
        // A heartbeat comes before the outcome of a request that makes the hold depend on replicas.
        "!replicas never 2000 20
         a LOCK.ACQUIRE k0 o2 REPLICAS 1
         +0
         s LOCK.ACQUIRE k1 o1 LEASE 50 WATCHDOG
         s LOCK.EVENTS WAIT 0
         s LOCK.EVENTS WAIT 0 HEARTBEAT
         b LOCK.ACQUIRE k1 o1 LEASE 50 REPLICAS 1 SESSION $s",
        // A hold expires while clients are paused; another command then prolongs it, and its owner enters it again
        // and releases it.
        "s LOCK.ACQUIRE k0 o1 LIMIT 3
         d LOCK.ACQUIRE k0 o3
         c LOCK.ACQUIRE k0 o0 LEASE 50 LIMIT 3 SESSION $s
         +20
         a CLIENT PAUSE 50
         c PERSIST k0
         c LOCK.ACQUIRE k0 o0 LIMIT 3
         d LOCK.ACQUIRE k0 o1
         +1200
         c LOCK.RELEASE k0 o0 ALL",
        // An owner releases one of two holds in the iteration in which the grant of the other is revoked.
        "a LOCK.ACQUIRE k0 o1
         c LOCK.ACQUIRE k0 o0 WAIT 0
         +0
         a LOCK.RELEASE k0 o1
         s LOCK.ACQUIRE k0 o0
         b LOCK.RELEASE k0 o0
         b CLIENT KILL ID #c
         a LOCK.ACQUIRE k0 o1 SESSION $s",
        // The client of a watched hold with replicas has vanished, and these are gone when the hold ends with its
        // connection.
        "!replicas 0 2000 never
         e LOCK.MRELEASE 1 k0
         b LOCK.ACQUIRE k0 o1 $s
         s !vanish
         e LOCK.ACQUIRE k0 o0 LEASE 50
         s LOCK.ACQUIRE k0 o0 LEASE 2000
         +1200
         s LOCK.ACQUIRE k0 o0 LEASE 400 REPLICAS 1 WATCHDOG
         +120
         e LOCK.ACQUIRE k0 o2 WAIT 0
         e LOCK.SESSION REPLACES $s
         +400
         s LOCK.EVENTS WAIT 0
         !replicas",
        // An owner holds a lock in two databases, which are swapped, and the tokens of both holds are raised.
        "s LOCK.ACQUIRE k0 o0 LIMIT 3
         c SWAPDB 0 1
         s LOCK.ACQUIRE k0 o2 SHARED
         b LOCK.ACQUIRE k0 o1
         a LOCK.ACQUIRE k0 o0 WAIT 300 SESSION $t
         +1
         b LOCK.RELEASE k0 o1
         +1200
         d LOCK.RENEW k0 o0 FENCE 1800000060960294
         b SWAPDB 0 1
         a LOCK.RENEW k0 o0 FENCE 1800000060186772
         t LOCK.EVENTS WAIT 0",
        // A session's request, which took over the place of an earlier one, is granted after that one's hold was
        // forced.
        "c CLIENT PAUSE 1000
         b LOCK.RELEASE k0 o0
         a REPLICAOF NO ONE
         c LOCK.ACQUIRE k0 o0
         a LOCK.MACQUIRE 1 k0 o1
         b LOCK.RELEASE k0 o0
         b LOCK.ACQUIRE k0 o0 WAIT 300
         c LOCK.MACQUIRE 1 k0 o1 WAIT 0 SESSION $s
         s LOCK.ACQUIRE k0 o0 SHARED
         a LOCK.RELEASE k0 o1 ALL
         a LOCK.ACQUIRE k0 o1 LIMIT 2 WAIT 300 SESSION $s
         a LOCK.FORCE k0
         a LOCK.RENEW k0 o1 FENCE 1800001200489924",
        // Databases are swapped before the reply is received that makes a hold ephemeral, whose token is raised.
        "a LOCK.ACQUIRE k3 o0
         c LOCK.ACQUIRE k0 o0
         b LOCK.ACQUIRE k3 o1 WAIT 0
         b LOCK.RENEW k0 o0 FENCE 1800000060721130
         b SWAPDB 0 1
         +20
         a LOCK.ACQUIRE k3 o1 WAIT 0
         c LOCK.ACQUIRE k0 o0 EPHEMERAL",
        // Two renewals by one session, of which the earlier finds that its owner does not hold one of its locks.
        "!replicas 20
         a LOCK.ACQUIRE k0 o0
         a LOCK.ACQUIRE k0 o1 WAIT 0
         b LOCK.ACQUIRE k3 o1
         b LOCK.MRENEW 3 k3 k1 k0 o1 LEASE 50 REPLICAS 1 SESSION $t
         a LOCK.ACQUIRE k1 o1 EPHEMERAL
         +0
         a EVAL return_redis.call(unpack(ARGV)) 0 LOCK.ACQUIRE k3 o1 REPLICAS 1 SESSION $t
         b LOCK.RENEW k0 o0 LEASE 50
         +1200
         a LOCK.RELEASE k3 o1
         a !end
         b LOCK.RENEW k1 o1 REPLICAS 1 SESSION $t",
        // Databases are swapped before a waiter's grant is received that binds a hold, whose token is then raised.
        r"!replicas 20 never 20
         c RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00
         a SWAPDB 0 1
         c LOCK.ACQUIRE k0 o2 WAIT 0
         a LOCK.ACQUIRE k0 o0 EPHEMERAL REPLICAS 1 WAIT 0
         +0
         b SWAPDB 0 1
         +20
         c LOCK.ACQUIRE k0 o0 WAIT 20
         c LOCK.RENEW k0 o0 LEASE 50 FENCE 1800001200260041
         a LOCK.ACQUIRE k0 o0
         +20
         a LOCK.ACQUIRE k0 o0",
        // The slot of a watched hold moves away and comes back, so that the hold is not renewed.
        "c LOCK.ACQUIRE k0 o1 LEASE 400 SESSION $s
         +1200
         a LOCK.ACQUIRE k0 o1 LEASE 50 WATCHDOG SESSION $s
         +20
         s LOCK.EVENTS WAIT 50
         !slot k0 moves
         +1
         !slot k0 comes",
        // A hold expires in a pause; the next one's token is raised, and databases are swapped, before its grant is
        // received.
        "a LOCK.ACQUIRE k0 o0 LEASE
         b LOCK.ACQUIRE k0 o0 LEASE
         c LOCK.ACQUIRE k0 o1 LEASE 2000
         +120
         a LOCK.ACQUIRE k0 o1 LEASE 50
         +1200
         s LOCK.ACQUIRE k0 o1 LEASE
         a CLIENT PAUSE 1000
         a LOCK.ACQUIRE k0 o1
         b LOCK.RENEW k0 o1 FENCE 1800001200622772
         c SWAPDB 0 1
         +1200",
        // A session receives the grant of a hold that was released and written again by another command since.
        r"!replicas 2000 20 20
         d RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00
         a LOCK.ACQUIRE k0 o0 REPLICAS 1 SESSION $s
         a LOCK.ACQUIRE k0 o1 WAIT 300
         +120
         a LOCK.ACQUIRE k0 o0
         b LOCK.RELEASE k0 o0
         b LOCK.RELEASE k0 o0
         c RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00 REPLACE
         +120
         s LOCK.EVENTS
         b RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00 REPLACE",
        // What replicas have confirmed of a hold ends while writes are refused, before the clock is set back.
        "!replicas 0 never
         s LOCK.EVENTS WAIT 50
         a LOCK.ACQUIRE k0 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +1200
         !clock -200
         b LOCK.ACQUIRE k0 o0
         +0
         !misconf on
         +1200
         !clock -60000",
        // A hold that a request without a received reply made ephemeral has got a longer lease since, and ends with its
        // session.
        "a !stop-reading
         a LOCK.ACQUIRE k1 o1 LEASE 50 EPHEMERAL SESSION $s
         b LOCK.ACQUIRE k1 o1 HOLDS 1
         +120
         b LOCK.SESSION REPLACES $s",
        // A hold is unbound whose raised token its session does not know yet.
        "c LOCK.ACQUIRE k0 o1 SESSION $s
         +400
         !slot k0 migrates
         b LOCK.RENEW k0 o1 FENCE 1800000060805889
         b !stop-reading
         b FLUSHALL",
    ];
    runs.into_iter().for_each(breaks_nothing);
}
