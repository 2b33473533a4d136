//! Slots of a cluster that move to another node, and come back.

crate::scripts! {
    /// Key by key: whoever waits is redirected once the slot is another node's.
    a_slot_that_moves: "
        a LOCK.ACQUIRE {k} oa LEASE 3000000
        b LOCK.ACQUIRE {k} ob LEASE 3000000 WAIT 0
        a LOCK.ACQUIRE {k} oc LEASE 3000000 WAIT 0 SESSION $s
        a LOCK.ACQUIRE {k}2 os LEASE 3000000 SESSION $s
        s LOCK.NEXT WAIT 0
        +20
        !slot {k} migrates
        d LOCK.INFO {k}
        d LOCK.INFO {k}9
        d LOCK.ACQUIRE {k}9 od
        d DEL {k}2
        +300
        s LOCK.NEXT WAIT 0
        d LOCK.INFO {k}2
        d DEL {k}
        +300
        !slot {k} moves
        d LOCK.INFO {k}
        d LOCK.RELEASE {k} oa
        +500
        s LOCK.NEXT
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
}
