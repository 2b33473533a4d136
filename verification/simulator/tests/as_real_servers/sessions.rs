//! Sessions and their events.

crate::scripts! {
    session_gets_outcomes_as_events: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 SESSION $s
        a LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0 SESSION $s
        a LOCK.ACQUIRE k ob LEASE 4000000 WAIT 0 SESSION $s
        a LOCK.ACQUIRE k oc LEASE 3000000 SESSION $s
        a LOCK.ACQUIRE k2 * LEASE 3000000 SESSION $s WATCHDOG EPHEMERAL
        a LOCK.INFO k2
        a LOCK.WAITERS k
        s LOCK.EVENTS WAIT 0
        +20
        a LOCK.RELEASE k oa
        a LOCK.INFO k
        s LOCK.EVENTS WAIT 0
        +20
        a LOCK.RENEW k ob LEASE 5000000 SESSION $s WATCHDOG
        a LOCK.FORCE k
        a LOCK.FORCE k2
        +20
        s LOCK.EVENTS
        s LOCK.EVENTS
        s LOCK.EVENTS HEARTBEAT
        +20
    ";
    events_are_read_in_order: "
        a LOCK.ACQUIRE k oa LEASE 3000000
        a LOCK.ACQUIRE k o1 LEASE 3000000 WAIT 0 SESSION $s EPHEMERAL
        a LOCK.ACQUIRE k o2 LEASE 3000000 WAIT 0 SESSION $s EPHEMERAL
        a LOCK.ACQUIRE k3 o3 LEASE 3000000 SESSION $s EPHEMERAL
        +20
        a DEL k
        a LOCK.FORCE k
        a SET k3 x
        a LOCK.RELEASE k o2
        s LOCK.EVENTS COUNT 1
        s LOCK.EVENTS COUNT 2
        s LOCK.EVENTS
        s LOCK.EVENTS
        +20
        s LOCK.EVENTS
        +20
    ";
    session_replaces_another: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 SESSION $s EPHEMERAL
        a LOCK.ACQUIRE w oa LEASE 3000000 SESSION $s WATCHDOG
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k2 oc LEASE 3000000
        a LOCK.ACQUIRE k2 oa LEASE 3000000 WAIT 0 SESSION $s
        d LOCK.ACQUIRE k2 od LEASE 3000000 WAIT 0
        s LOCK.EVENTS WAIT 0
        +20
        t LOCK.SESSION REPLACES nonsense $s
        t LOCK.RENEW k oa SESSION $t
        t LOCK.RENEW w oa LEASE 3000000 WATCHDOG SESSION $t
        t LOCK.WAITERS k2
        +20
        a LOCK.INFO k
        a LOCK.INFO w
        a LOCK.WAITERS k2
        t LOCK.SESSION REPLACES $t
        t LOCK.SESSION REPLACES
        t LOCK.SESSION replacing
        +20
    ";
    closed_session_ends_its_waits: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 SESSION $s EPHEMERAL
        a LOCK.ACQUIRE w oa LEASE 3000000 SESSION $s WATCHDOG
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k2 oc LEASE 3000000
        a LOCK.ACQUIRE k2 oa LEASE 3000000 WAIT 0 SESSION $s
        d LOCK.ACQUIRE k2 od LEASE 3000000 WAIT 0
        +20
        s !end
        a LOCK.INFO k
        a LOCK.WAITERS k2
        a LOCK.INFO w
        +20
        a LOCK.INFO k
        c LOCK.RELEASE k2 oc
        +20
        a LOCK.INFO k2
        +20
    ";
    killed_session_ends_its_waits: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 SESSION $s EPHEMERAL
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0 SESSION $t EPHEMERAL
        t LOCK.EVENTS WAIT 0
        s LOCK.EVENTS WAIT 0
        +20
        a CLIENT KILL ID #s
        a LOCK.ACQUIRE k oa LEASE 3000000 SESSION $s
        a LOCK.ACQUIRE k oa LEASE 3000000
        a LOCK.INFO k
        b LOCK.INFO k
        +20
        b LOCK.INFO k
        a CLIENT KILL ID #t
        a LOCK.INFO k
        +20
        a LOCK.INFO k
        +20
    ";
    /// The session closes after the release that grants to it, and before it has read the event.
    session_closes_in_iteration_of_its_grant: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        a LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0 SESSION $s
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        s LOCK.EVENTS WAIT 0
        +20
        a LOCK.RELEASE k oa
        s !end
        b LOCK.INFO k
        +20
        b LOCK.INFO k
        +20
    ";
    unread_grant_is_revoked: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        a LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0 SESSION $s
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        +20
        a LOCK.RELEASE k oa
        +20
        a LOCK.INFO k
        s !end
        +20
        a LOCK.INFO k
        +20
    ";
    withdrawal_ends_wait_of_session: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 SESSION $s
        a LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0 SESSION $s
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        a LOCK.RELEASE k ob ALL
        a LOCK.RELEASE k ob ALL
        a LOCK.RELEASE k2 ob ALL
        s LOCK.EVENTS
        a LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0 SESSION $s
        +20
        a LOCK.RELEASE k oa ALL
        a LOCK.INFO k
        +20
        a LOCK.ACQUIRE k od LEASE 3000000 WAIT 0 SESSION $s
        +20
        c LOCK.RELEASE k oc
        a LOCK.RELEASE k ob ALL
        a LOCK.RELEASE k od ALL
        s LOCK.EVENTS
        +20
        a LOCK.MACQUIRE 2 m1 m2 om LEASE 3000000 SESSION $s
        a LOCK.RELEASE m1 om ALL
        a LOCK.INFO m2
        s LOCK.EVENTS
        +20
    ";
    losses_of_every_kind_are_notified: "
        !replicas never
        a LOCK.ACQUIRE k1 o LEASE 600 SESSION $s EPHEMERAL
        a LOCK.ACQUIRE k2 o LEASE 3000000 SESSION $s WATCHDOG
        a LOCK.ACQUIRE k3 o LEASE 3000000 SESSION $s WATCHDOG
        a LOCK.ACQUIRE k4 o LEASE 3000000 SESSION $s WATCHDOG
        a LOCK.ACQUIRE k5 o LEASE 3000000 SESSION $s WATCHDOG
        a LOCK.ACQUIRE k6 o LEASE 3000000 SESSION $s WATCHDOG
        a LOCK.ACQUIRE k7 o LEASE 3000000 SESSION $s WATCHDOG
        +1200
        s LOCK.EVENTS
        +20
        a DEL k2
        +20
        s LOCK.EVENTS
        a HDEL k3 o
        +20
        s LOCK.EVENTS
        a RENAME k4 k4b
        +20
        s LOCK.EVENTS
        a HSET k5 #fence 17
        a HSET k6 o 7
        +20
        s LOCK.EVENTS
        a LOCK.INFO k6
        a LOCK.RELEASE k7 o
        +20
        s LOCK.EVENTS
        a FLUSHALL
        +20
        s LOCK.EVENTS
        +20
    ";
    session_waits_for_several_keys: "
        !replicas never
        a LOCK.MACQUIRE 2 k1 k2 o LEASE 3000000 SESSION $s WATCHDOG
        a LOCK.MACQUIRE 2 k2 k3 p LEASE 3000000 WAIT 0 SESSION $s
        +20
        a LOCK.INFO k3
        a LOCK.MRENEW 2 k1 k2 o LEASE 4000000 SESSION $s
        a LOCK.MRELEASE 2 k1 k2 o
        s LOCK.EVENTS
        +20
        a LOCK.MACQUIRE 2 k3 k4 q LEASE 3000000 WAIT 500 SESSION $s
        a LOCK.INFO k4
        s LOCK.EVENTS WAIT 0
        +1800
        s LOCK.EVENTS
        a LOCK.TOP
        +20
    ";
    wait_of_session_is_refused: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        a LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0 SESSION $s
        b LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        s LOCK.EVENTS WAIT 0
        +20
        a SET k x
        +20
        a LOCK.INFO k
        +20
    ";
    session_takes_over_bindings: "
        !replicas never
        a LOCK.ACQUIRE k o LEASE 3000000 SESSION $s EPHEMERAL
        a LOCK.RENEW k o LEASE 4000000 SESSION $t WATCHDOG
        +20
        a LOCK.INFO k
        s !end
        +20
        a LOCK.INFO k
        t !end
        +20
        a LOCK.INFO k
        b LOCK.ACQUIRE k o EPHEMERAL LEASE 3000000
        +20
        b !end
        +20
        a LOCK.INFO k
        +20
    ";
    watchdog_renews_holds: "
        a LOCK.ACQUIRE k o LEASE 3000 WATCHDOG
        b LOCK.ACQUIRE k p LEASE 3000000 WAIT 0
        s LOCK.ACQUIRE k2 * LEASE 3000 SHARED WATCHDOG
        +4000
        c LOCK.INFO k
        a LOCK.INFO k2
        +20
        a !end
        +4000
        c LOCK.INFO k
        c LOCK.INFO k2
        +20
    ";
    /// A wait for events ends in time for the session's renewals, and for nothing else.
    events_returns_in_time_for_renewal: "
        a LOCK.ACQUIRE k oa LEASE 8000 WATCHDOG SESSION $s
        a LOCK.ACQUIRE l ob LEASE 8000000 SESSION $t
        s LOCK.EVENTS WAIT 0
        t LOCK.EVENTS WAIT 0
        +2500
        s LOCK.EVENTS WAIT 0 HEARTBEAT
        +2500
        a LOCK.FORCE k
        a LOCK.FORCE l
        +20
        s LOCK.EVENTS
        +20
    ";
    /// With another `TOKEN` or `FENCE`, a renewal is another request.
    renewal_with_other_options_is_refused: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        +20
        a LOCK.RENEW k oa LEASE 4000000 REPLICAS 1 SESSION $s
        a LOCK.RENEW k oa LEASE 4000000 REPLICAS 1 SESSION $s
        a LOCK.RENEW k oa LEASE 4000000 TOKEN 7 REPLICAS 1 SESSION $s
        a LOCK.RENEW k oa LEASE 4000000 FENCE @a REPLICAS 1 SESSION $s
        s LOCK.EVENTS WAIT 0
        +1500
    ";
    session_of_other_user_is_refused: "
        a ACL SETUSER u reset on nopass ~* +@all
        b AUTH u x
        +20
        b LOCK.ACQUIRE k o SESSION $a
        a LOCK.ACQUIRE k o SESSION $b
        b LOCK.ACQUIRE k o SESSION $b LEASE 3000000
        +20
    ";
}
