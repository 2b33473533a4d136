//! Slots of a cluster that move to another node, and come back.

crate::scripts! {
    /// Key by key: a waiter is redirected once the slot is another node's.
    a_slot_that_moves: "
        a LOCK.ACQUIRE {k} oa LEASE 3000000
        b LOCK.ACQUIRE {k} ob LEASE 3000000 WAIT 0
        a LOCK.ACQUIRE {k} oc LEASE 3000000 WAIT 0 SESSION $s
        a LOCK.ACQUIRE {k}2 os LEASE 3000000 SESSION $s
        s LOCK.EVENTS WAIT 0
        +20
        !slot {k} migrates
        d LOCK.INFO {k}
        d LOCK.INFO {k}9
        d LOCK.ACQUIRE {k}9 od
        d DEL {k}2
        +300
        s LOCK.EVENTS WAIT 0
        d LOCK.INFO {k}2
        d DEL {k}
        +300
        !slot {k} moves
        d LOCK.INFO {k}
        d LOCK.RELEASE {k} oa
        +500
        s LOCK.EVENTS
        +300
    ";
    /// A lock that is free while its slot is on its way is granted when the slot stays.
    a_slot_that_stays: "
        a LOCK.ACQUIRE {k} oa LEASE 3000000
        b LOCK.ACQUIRE {k} ob LEASE 3000000 WAIT 0
        +20
        !slot {k} migrates
        a LOCK.RELEASE {k} oa
        +300
        d LOCK.INFO {k}
        +20
        !slot {k} comes
        +500
        d LOCK.INFO {k}
        +20
    ";
    /// Without anything in it, and back again.
    an_empty_slot: "
        a LOCK.INFO {k}
        +20
        !slot {k} moves
        a LOCK.ACQUIRE {k} oa LEASE 3000000
        a LOCK.MACQUIRE 2 {k} {k}2 oa LEASE 3000000
        a MULTI
        a LOCK.ACQUIRE {k} oa LEASE 3000000
        a EXEC
        +20
        !slot {k} comes
        a LOCK.ACQUIRE {k} oa LEASE 3000000
        +20
    ";
    /// In one step, with a lock in it that somebody waits for.
    a_slot_that_goes: "
        a LOCK.ACQUIRE {k} oa LEASE 3000000
        b LOCK.ACQUIRE {k} ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE {k} oc LEASE 3000000 WAIT 5000
        +20
        !slot {k} goes
        +20
        a LOCK.RELEASE {k} oa
        d EXISTS {k}
        +300
        !slot {k} comes
        d EXISTS {k}
        a LOCK.RELEASE {k} oa
        d LOCK.ACQUIRE {k} od LEASE 3000000
        b LOCK.ACQUIRE {k} ob LEASE 3000000 WAIT 0
        +20
        d LOCK.RELEASE {k} od
        +20
    ";
    /// What goes is deleted, also at the replicas.
    a_slot_that_goes_with_replicas: "
        // not on Redis 8.4: it sends its replicas TRIMSLOTS, and the state of the move
        !replicas 0
        a LOCK.ACQUIRE {k} oa LEASE 3000000
        b LOCK.ACQUIRE {k} ob LEASE 3000000 WAIT 0
        +20
        !slot {k} goes
        +300
        !slot {k} comes
        b LOCK.ACQUIRE {k} ob LEASE 3000000
        +20
    ";
    /// With a hold of a session that is renewed, and a wait of another one. (Redis 7.0 sees at the next renewal that the hold is gone, and
    /// tells the other one nothing.) Both ask for events in the turn of the grant: an eighth of its lease later they are answered
    /// null, and a third of it later it is to be renewed, however late this test is.
    a_slot_that_goes_from_sessions: "
        a LOCK.ACQUIRE {k} os LEASE 6000 WATCHDOG SESSION $s
        a LOCK.ACQUIRE {k} other LEASE 3000000 WAIT 0 SESSION $t
        s LOCK.EVENTS WAIT 0
        t LOCK.EVENTS WAIT 0
        +20
        !slot {k} goes
        +2500
        s LOCK.EVENTS
        t LOCK.EVENTS
        a LOCK.RENEW {k} os LEASE 3000000
        +20
        !slot {k} comes
        a LOCK.RENEW {k} os LEASE 3000000
        a LOCK.RELEASE {k} other ALL
        a LOCK.ACQUIRE {k} ou LEASE 3000000
        a LOCK.ACQUIRE {k}2 os LEASE 3000000 SESSION $s
        +20
        s LOCK.EVENTS
        t LOCK.EVENTS
        +20
    ";
}
