//! Clock steps of the server. Bound holds follow them.

crate::scripts! {
    bound_holds_follow_step_forward: "
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
    /// An unbound hold ends, and a waiter is granted the lock.
    unbound_hold_ends_at_step_forward: "
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
    request_just_after_step_sees_bound_hold: "
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
    bound_holds_follow_step_backward: "
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
    /// Waits and leases of a session end after the same time as without steps.
    session_waits_and_leases_follow_two_steps: "
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
