//! Roles, replicas, pauses: servers that refuse writes.

crate::scripts! {
    /// Primary, replica, primary, in one write.
    role_changes_twice_in_one_iteration: "
        !replicas
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        b LOCK.INFO k
        a LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0 SESSION $s
        a LOCK.ACQUIRE t oa LEASE 3000000 WATCHDOG SESSION $s
        s LOCK.EVENTS WAIT 0
        t LOCK.EVENTS
        a LOCK.ACQUIRE k od LEASE 3000000 WAIT 0 SESSION $t
        +20
        e REPLICAOF 127.0.0.1 1
        e REPLICAOF NO ONE
        +20
        e LOCK.INFO k
        t LOCK.EVENTS
        s LOCK.EVENTS
        a LOCK.RELEASE k oa
        +20
        e LOCK.INFO k
        a !end
        +20
        e LOCK.INFO t
        e LOCK.INFO k
        +20
    ";
    replica_refuses_lock_commands: "
        !replicas
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        a LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0 SESSION $s
        s LOCK.EVENTS WAIT 0
        +20
        e REPLICAOF 127.0.0.1 1
        +20
        e LOCK.ACQUIRE k o
        e LOCK.RELEASE k oa
        e LOCK.INFO k
        e LOCK.WAITERS k
        e LOCK.RELEASE k oc ALL
        e MULTI
        e LOCK.RELEASE k oa
        e EXEC
        e DEL k
        e SET x y
        s LOCK.EVENTS
        s LOCK.EVENTS
        a !end
        +20
        e LOCK.INFO k
        e REPLICAOF NO ONE
        e LOCK.INFO k
        +20
        e LOCK.INFO k
        e LOCK.ACQUIRE k o LEASE 3000000
        +20
    ";
    /// A release before the role changes, and a request between them.
    requests_run_between_role_changes: "
        !replicas
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        +20
        e LOCK.RELEASE k oa
        e REPLICAOF 127.0.0.1 1
        e LOCK.INFO k
        e REPLICAOF NO ONE
        e LOCK.INFO k
        +20
        e LOCK.INFO k
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        f LOCK.ACQUIRE k of LEASE 3000000 WAIT 0
        +20
        e REPLICAOF 127.0.0.1 1
        e REPLICAOF NO ONE
        e REPLICAOF 127.0.0.1 1
        e REPLICAOF NO ONE
        e LOCK.INFO k
        e LOCK.FORCE k
        +20
        e LOCK.INFO k
        +20
    ";
    too_few_replicas_refuse_writes: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        +20
        e CONFIG SET min-replicas-to-write 2
        e LOCK.ACQUIRE l o
        e LOCK.INFO k
        e SET x y
        e MULTI
        e SET x y
        e EXEC
        e EVAL return\\x20redis.pcall(unpack(ARGV)) 0 LOCK.ACQUIRE l o
        a !end
        +20
        e LOCK.INFO k
        e CONFIG SET min-replicas-to-write 0
        e LOCK.INFO k
        +20
    ";
    pause_delays_requests: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        f LOCK.ACQUIRE l of LEASE 3000000 EPHEMERAL
        +20
        e CLIENT PAUSE 60000 WRITE
        a LOCK.RELEASE k oa
        a LOCK.INFO k
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        d LOCK.INFO k
        d GET x
        f !end
        g MULTI
        g SET y 1
        g EXEC
        h MULTI
        h GET y
        h EXEC
        +20
        d LOCK.INFO k
        d LOCK.INFO l
        +20
        e CLIENT UNPAUSE
        e LOCK.INFO k
        e LOCK.INFO l
        +20
        d LOCK.INFO k
        d LOCK.INFO l
        +20
    ";
    delayed_requests_run_after_pause: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        s LOCK.ACQUIRE k os LEASE 3000000 WAIT 300 SESSION $t
        t LOCK.EVENTS WAIT 0
        e CLIENT PAUSE 1500 WRITE
        a LOCK.RELEASE k oa
        c SET x 1
        c GET x
        d LOCK.INFO k
        +2500
        d LOCK.INFO k
        +20
    ";
    unconfirmed_grant_is_revoked: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 REPLICAS 1
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        d LOCK.INFO k
        +1500
        d LOCK.INFO k
        +20
    ";
    unconfirmed_grant_of_session_is_revoked: "
        !replicas never
        s LOCK.ACQUIRE l os LEASE 3000000 REPLICAS 1 SESSION $t
        t LOCK.EVENTS WAIT 0
        d LOCK.INFO l
        +1500
        d LOCK.INFO l
        +20
    ";
    unconfirmed_renewal_is_refused: "
        !replicas never
        c LOCK.ACQUIRE m oc LEASE 3000000
        c LOCK.RENEW m oc LEASE 4000000 REPLICAS 2
        d LOCK.INFO m
        +1500
        d LOCK.INFO m
        +20
    ";
    replicas_option_without_replicas_is_refused: "
        !replicas
        a LOCK.ACQUIRE k oa LEASE 3000000 REPLICAS 1
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        +1500
        d LOCK.INFO k
        +20
    ";
    confirmed_requests_get_replies: "
        !replicas 0
        a LOCK.ACQUIRE k oa LEASE 3000000 REPLICAS 1
        a LOCK.INFO k
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0 REPLICAS 1
        s LOCK.ACQUIRE l os LEASE 3000000 REPLICAS 1 SESSION $t
        t LOCK.EVENTS WAIT 0
        +300
        a LOCK.RELEASE k oa
        +300
        b LOCK.RENEW k ob LEASE 3500000 REPLICAS 1
        b LOCK.INFO k
        d LOCK.MACQUIRE 2 m1 m2 om LEASE 3000000 REPLICAS 1
        d LOCK.MRENEW 2 m1 m2 om LEASE 3500000 REPLICAS 1 SESSION $t
        t LOCK.EVENTS WAIT 0
        +300
        b LOCK.ACQUIRE k ob LEASE 3000000 REPLICAS 2
        +1500
        t LOCK.EVENTS
        d LOCK.INFO k
        d LOCK.INFO m1
        +20
    ";
    /// Some confirm immediately, some late, one never: each number is reached at its own time.
    replicas_confirm_at_different_times: "
        !replicas 0 50 never
        a LOCK.ACQUIRE k oa LEASE 3000000 REPLICAS 1
        b LOCK.ACQUIRE l ob LEASE 3000000 REPLICAS 2
        +200
        c LOCK.INFO k
        b LOCK.INFO l
        +800
        a LOCK.RENEW k oa LEASE 4000000 REPLICAS 3
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0 REPLICAS 1
        s LOCK.ACQUIRE m os LEASE 3000000 REPLICAS 2 SESSION $t
        t LOCK.EVENTS WAIT 0
        +1800
        a LOCK.RELEASE k oa
        +1000
        d LOCK.INFO k
        d LOCK.INFO m
        +20
    ";
    /// The server counts only the connected replicas that send heartbeats.
    lagging_replicas_refuse_writes: "
        !replicas never never
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        e CONFIG SET min-replicas-to-write 1
        +20
        !good 1
        +20
        c LOCK.ACQUIRE l oc LEASE 3000000
        +20
        !good 0
        +20
        c LOCK.RELEASE l oc
        a !end
        +20
        d LOCK.INFO k
        +20
        !good 2
        +400
        d LOCK.INFO k
        c LOCK.RELEASE l oc
        +20
    ";
    /// Other replicas take their place, with all that was written.
    replaced_replicas_confirm: "
        !replicas 0
        a LOCK.ACQUIRE k oa LEASE 3000000 REPLICAS 1
        +300
        !replicas never
        a LOCK.ACQUIRE l oa LEASE 3000000 REPLICAS 1
        +1500
        !replicas 0 0
        a LOCK.ACQUIRE l oa LEASE 3000000 REPLICAS 2
        b LOCK.RENEW k oa LEASE 4000000 REPLICAS 1
        +300
        d LOCK.INFO k
        d LOCK.INFO l
        +20
    ";
    /// The server refuses writes because a snapshot failed; then one succeeds.
    failed_snapshot_refuses_writes: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE l os LEASE 3000000 SESSION $s
        c LOCK.ACQUIRE n os LEASE 3000000 SESSION $s
        +20
        !misconf on
        c LOCK.ACQUIRE m oc
        c LOCK.RELEASE n os
        c LOCK.RELEASE l os ALL
        c LOCK.INFO l
        c SET x y
        c MULTI
        c SET x y
        c EXEC
        a !end
        +20
        c LOCK.INFO k
        s LOCK.EVENTS HEARTBEAT
        +20
        !misconf off
        +400
        c LOCK.INFO k
        c LOCK.INFO l
        c LOCK.RELEASE n os
        s LOCK.EVENTS HEARTBEAT
        +20
    ";
    /// The client disconnects before the replicas have confirmed.
    client_disconnects_before_confirmation: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 REPLICAS 1
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        a !end
        +50
        c LOCK.INFO k
        +20
    ";
}
