//! Clients that do not read, and clients that vanish without closing their connections.

crate::scripts! {
    /// The server replies to a client that does not read, and the client reads it later.
    client_that_does_not_read_gets_replies_later: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        +20
        a !stop-reading
        b !stop-reading
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
        b !resume-reading
        a !resume-reading
        +20
        a LOCK.RELEASE k oa
        +20
    ";
    /// Written replies count as delivered, even if the server can't send them.
    unsent_grant_counts_as_delivered: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        c LOCK.ACQUIRE l oc LEASE 3000000 EPHEMERAL
        +20
        b !stop-reading
        c !stop-reading
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
    /// The events of a session that does not read for a while arrive later, in order.
    session_that_does_not_read_gets_events_later: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        a LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0 SESSION $s
        a LOCK.ACQUIRE l oc LEASE 3000000 SESSION $s
        s LOCK.EVENTS WAIT 0
        +20
        s !stop-reading
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
        s !resume-reading
        +20
        s LOCK.EVENTS
        +20
    ";
    /// The same without a wait, and with a watched hold.
    watched_session_that_does_not_read_ends: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL SESSION $s
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        a LOCK.ACQUIRE l oa LEASE 3000000
        a LOCK.ACQUIRE l oc LEASE 3000000 WAIT 0 SESSION $s
        +20
        s !stop-reading
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
    /// The server notices a vanished client only when its connection closes.
    vanished_clients_stay_until_connections_close: "
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
