//! A clock of the server that steps. What is bound goes along with it.

crate::scripts! {
    a_step_forward: "
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        f LOCK.ACQUIRE m of LEASE 3000000 LIMIT 2 SESSION $s
        f LOCK.ACQUIRE m og LEASE 3000000 LIMIT 2
        g LOCK.ACQUIRE m oh LEASE 3000000 LIMIT 2 WAIT 0
        +20
        !clock 40000000
        +600
        e LOCK.INFO k
        e LOCK.INFO m
        s LOCK.EVENTS
        +20
        a LOCK.RELEASE k oa
        f LOCK.RENEW m of LEASE 5000000
        +20
        e LOCK.INFO k
        e LOCK.INFO m
        +20
    ";
    /// A hold that is not bound ends, and a waiter is granted it.
    a_step_forward_without_a_binding: "
        c LOCK.ACQUIRE l oc LEASE 3000000
        d LOCK.ACQUIRE l od LEASE 3000000 WAIT 0
        +20
        !clock 40000000
        +600
        e LOCK.INFO l
        c LOCK.RELEASE l oc
        +20
    ";
    /// A request arrives before the server has had time for anything else.
    a_request_right_behind_a_step: "
        a LOCK.ACQUIRE k oa LEASE 3000000 WATCHDOG
        a LOCK.ACQUIRE k oa HOLDS 3 LEASE 3000000 WATCHDOG
        b LOCK.ACQUIRE l ob LEASE 3000000
        +20
        !clock 40000000
        c LOCK.ACQUIRE k oc
        c LOCK.ACQUIRE l oc LEASE 3000000
        b LOCK.RELEASE l ob
        a LOCK.RELEASE k oa
        +600
        e LOCK.INFO k
        e LOCK.INFO l
        +20
    ";
    a_step_back: "
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE l oc LEASE 3000000
        d LOCK.ACQUIRE l od LEASE 3000000 WAIT 0
        +20
        !clock -40000000
        +600
        e LOCK.INFO k
        e LOCK.INFO l
        +20
        a !end
        c LOCK.RELEASE l oc
        +20
        e LOCK.INFO k
        e LOCK.INFO l
        +20
    ";
    /// Waits and leases of a session end after as long as before.
    a_session_at_two_steps: "
        a LOCK.ACQUIRE k oa LEASE 3000000 SESSION $s
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0 SESSION $s
        s LOCK.EVENTS WAIT 0
        +20
        !clock 40000000
        +600
        a LOCK.RELEASE k oa
        +20
        !clock -40000000
        +600
        s LOCK.EVENTS
        e LOCK.INFO k
        +20
        e LOCK.FORCE k
        +20
        s LOCK.EVENTS
        +20
    ";
}
