//! Slots of a cluster that move to another node and back.

crate::scripts! {
    /// Key by key: a waiter is redirected once the slot belongs to another node.
    waiter_is_redirected_when_slot_moves: "
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
    /// A free lock whose slot is migrating is granted when the slot stays.
    free_lock_is_granted_when_slot_stays: "
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
    /// Without a key in it, and back again.
    empty_slot_moves_and_returns: "
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
    /// In one step, with a lock in it that a request waits for.
    whole_slot_moves_with_awaited_lock: "
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
    /// The keys are deleted on replicas, too.
    replicas_delete_keys_of_moved_slot: "
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
    /// With a watched hold of a session, and a wait of another one. (Redis 7.0 notices at the next renewal that the
    /// hold is gone, and sends the other session no event.) Both ask for events in the iteration of the grant: they get
    /// null an eighth of the lease later, and the renewal is due a third of the lease later, however late this test
    /// runs.
    sessions_are_notified_when_whole_slot_moves: "
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
