//! Clients that take nothing from the network, and clients that are gone without a word.

crate::scripts! {
    /// A client that reads nothing is answered all the same, and reads it later.
    clients_that_take_nothing: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        +20
        a !deaf
        b !deaf
        +20
        a LOCK.RELEASE k oa
        +20
        d LOCK.INFO k
        a LOCK.ACQUIRE k oa LEASE 3000000 WAIT 0
        +20
        d LOCK.RELEASE k ob
        d LOCK.INFO k
        +20
        d LOCK.RELEASE k oc
        +20
        d LOCK.INFO k
        b !hears
        a !hears
        +20
        a LOCK.RELEASE k oa
        +20
    ";
    /// What the server has written counts as heard, though it can't get rid of it.
    a_grant_that_never_leaves_the_server: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        c LOCK.ACQUIRE l oc LEASE 3000000 EPHEMERAL
        +20
        b !deaf
        c !deaf
        +20
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        +20
        a LOCK.RELEASE k oa
        +20
        d LOCK.INFO k
        d CLIENT KILL ID #b
        d CLIENT KILL ID #c
        d LOCK.INFO k
        d LOCK.INFO l
        +20
        d LOCK.INFO k
        d LOCK.RELEASE k ob
        +20
    ";
    /// A session that takes nothing from the network for a while: what it was told in the meantime arrives later, in order.
    a_session_that_takes_nothing: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        a LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0 SESSION $s
        a LOCK.ACQUIRE l oc LEASE 3000000 SESSION $s
        s LOCK.EVENTS WAIT 0
        +20
        s !deaf
        +20
        a LOCK.RELEASE k oa
        +20
        a LOCK.FORCE l
        d LOCK.INFO k
        s LOCK.EVENTS WAIT 0
        +20
        a LOCK.FORCE k
        s LOCK.EVENTS
        +20
        s !hears
        +20
        s LOCK.EVENTS
        +20
    ";
    /// The same where it was waiting for nothing, and is watched.
    a_session_that_takes_nothing_and_ends: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL SESSION $s
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        a LOCK.ACQUIRE l oa LEASE 3000000
        a LOCK.ACQUIRE l oc LEASE 3000000 WAIT 0 SESSION $s
        +20
        s !deaf
        +20
        a LOCK.RELEASE l oa
        s LOCK.EVENTS WAIT 0
        +20
        d LOCK.INFO l
        s !end
        +20
        d LOCK.INFO k
        d LOCK.INFO l
        +20
    ";
    /// Nobody knows that they are gone until their connections end.
    clients_that_are_gone_without_a_word: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE l oc LEASE 3000000 EPHEMERAL
        a LOCK.ACQUIRE m os LEASE 3000000 WATCHDOG EPHEMERAL SESSION $s
        a LOCK.ACQUIRE k os LEASE 3000000 WAIT 0 SESSION $s
        s LOCK.EVENTS
        +20
        b !vanish
        c !vanish
        s !vanish
        +20
        a LOCK.RELEASE k oa
        +20
        d LOCK.INFO k
        d LOCK.INFO l
        d LOCK.RELEASE k ob
        +20
        d LOCK.INFO k
        d LOCK.WAITERS k
        b !end
        c !end
        s !end
        +20
        d LOCK.INFO k
        d LOCK.INFO l
        d LOCK.INFO m
        +20
    ";
}
