//! Requests that wait, and what ends their waits.

crate::scripts! {
    /// First come, first served. Requests that a waiting client pipelined run after its reply.
    release_grants_to_next_waiter_and_pipeline_continues: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        b LOCK.RELEASE k ob
        b LOCK.ACQUIRE k ob LEASE 4000000
        b LOCK.INFO k
        c LOCK.ACQUIRE k oc LEASE 5000000 WAIT 0
        c HGETALL k
        d LOCK.ACQUIRE k od LEASE 3000000
        +20
        e LOCK.WAITERS k
        e LOCK.TOP
        a LOCK.RELEASE k oa
        a LOCK.ACQUIRE k oa LEASE 3000000
        d LOCK.ACQUIRE k od LEASE 3000000 WAIT 0
        d LOCK.RELEASE k od
        +20
        a LOCK.INFO k
        c LOCK.RELEASE k oc
        c LOCK.ACQUIRE k oc
        +20
        b LOCK.RELEASE k ob
        +20
        b LOCK.INFO k
        +20
    ";
    /// A release, a request of the next holder and one of a new client arrive in one poll.
    release_and_new_requests_arrive_in_one_poll: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        a LOCK.RELEASE k oa
        b LOCK.RELEASE k ob
        d LOCK.INFO k
        d LOCK.WAITERS k
        +20
        d LOCK.INFO k
        d LOCK.FORCE k
        d LOCK.FORCE k
        c LOCK.RELEASE k oc
        +20
    ";
    /// Commands of one owner on its holds and their tokens.
    holds_and_tokens_of_one_key: "
        !replicas never
        a LOCK.ACQUIRE k o LEASE 3000000
        a LOCK.ACQUIRE k o LEASE 2000000
        a LOCK.ACQUIRE k o HOLDS 2 LEASE 4000000
        a LOCK.ACQUIRE k o HOLDS 5 LEASE 4000000
        a LOCK.ACQUIRE k o LIMIT 2
        a LOCK.ACQUIRE k2 o LEASE 3000000
        +20
        a LOCK.RELEASE k o
        a LOCK.RELEASE k o HOLDS 3
        a LOCK.RELEASE k o HOLDS 3 LEASE 5000000
        a LOCK.RELEASE k o TOKEN @a
        a LOCK.RENEW k o FENCE @a LEASE 6000000
        a LOCK.RENEW k o FENCE 1
        a LOCK.RENEW k o TOKEN 7
        a LOCK.RENEW k other
        a LOCK.INFO k
        +20
        a LOCK.RELEASE k o TOKEN 7 ALL
        a LOCK.RELEASE k o TOKEN @a ALL
        a LOCK.RELEASE k o ALL
        a LOCK.RELEASE k2 o HOLDS 0
        a LOCK.RELEASE k2 o HOLDS 0
        a LOCK.INFO k
        a LOCK.TOP
        a LOCK.WAITERS k
        +20
    ";
    /// A release, then the close of the connection that is granted, in one poll; and in the other order.
    release_and_disconnect_arrive_in_one_poll: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        +20
        a LOCK.RELEASE k oa
        b !end
        d LOCK.INFO k
        +20
        d LOCK.INFO k
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        d LOCK.ACQUIRE k od LEASE 3000000 WAIT 0
        +20
        b !end
        c LOCK.RELEASE k oc
        e LOCK.INFO k
        +20
        e LOCK.INFO k
        +20
    ";
    /// Requests before the close of a connection run, and the close is noticed one iteration later.
    requests_before_disconnect_run: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        +20
        a LOCK.ACQUIRE k2 oa LEASE 3000000 EPHEMERAL
        a !end
        b LOCK.INFO k
        c LOCK.INFO k2
        c LOCK.ACQUIRE k2 oc
        +20
        c LOCK.INFO k
        c LOCK.INFO k2
        c LOCK.ACQUIRE k2 oc LEASE 3000000
        +20
    ";
    /// A client's requests in several pieces of one poll are read together.
    pieces_of_one_poll_are_read_together: "
        !replicas never
        a SET x 1
        b LOCK.ACQUIRE k ob
        a LOCK.ACQUIRE k oa
        c GET x
        a DEL x
        +20
    ";
    /// The holder, a waiter, and both are killed; a client that connects again in the same write is another connection.
    kill_ends_holder_and_waiter: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        +20
        d CLIENT KILL ID #b
        d LOCK.WAITERS k
        d CLIENT KILL ID #a
        d LOCK.INFO k
        d CLIENT KILL ID #a
        +20
        d LOCK.INFO k
        d CLIENT KILL ID #c
        d LOCK.ACQUIRE k oc LEASE 4000000
        +20
        d LOCK.INFO k
        a LOCK.ACQUIRE k2 o LEASE 3000000 EPHEMERAL
        +20
        d CLIENT KILL ID #a
        d LOCK.ACQUIRE k2 o LEASE 3000000
        d LOCK.RENEW k2 o LEASE 4000000
        +20
        d LOCK.INFO k2
        +20
    ";
    /// No further request of a killed client runs.
    killed_client_runs_no_more_requests: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        +20
        b CLIENT KILL ID #a
        a LOCK.RELEASE k oa
        b LOCK.INFO k
        +20
        b LOCK.INFO k
        +20
    ";
    /// A client that is killed between its grant and the reply.
    client_is_killed_between_grant_and_reply: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        +20
        a LOCK.RELEASE k oa
        a CLIENT KILL ID #b
        a LOCK.INFO k
        +20
        a LOCK.INFO k
        +20
    ";
    /// A client that kills itself: its pipelined requests never run, and other clients still see its connection.
    client_kills_itself: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL
        a CLIENT KILL ID #a SKIPME no
        a LOCK.RELEASE k oa
        b LOCK.INFO k
        b LOCK.ACQUIRE k ob WAIT 0 LEASE 3000000
        +20
        b LOCK.INFO k
        b CLIENT KILL ID #b
        b CLIENT KILL ID 999
        +20
    ";
    client_unblock_ends_wait: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        b GET after
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        c GET after
        d LOCK.ACQUIRE k od LEASE 3000000 WAIT 0
        +20
        e CLIENT UNBLOCK #b
        e CLIENT UNBLOCK #b
        e CLIENT UNBLOCK #c ERROR
        e CLIENT UNBLOCK #c TIMEOUT
        e LOCK.WAITERS k
        e CLIENT UNBLOCK #a
        e CLIENT UNBLOCK 999
        +20
        e LOCK.WAITERS k
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        +20
        a LOCK.RELEASE k oa
        a CLIENT UNBLOCK #d
        a LOCK.INFO k
        +20
        e CLIENT UNBLOCK #b ERROR
        d LOCK.RELEASE k od
        +20
        e LOCK.INFO k
        +20
    ";
    /// `CLIENT UNBLOCK` before the release in the same poll.
    client_unblock_precedes_release: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        +20
        e CLIENT UNBLOCK #b
        a LOCK.RELEASE k oa
        e LOCK.INFO k
        +20
        c LOCK.RELEASE k oc
        +20
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        +20
        a LOCK.RELEASE k oa
        e CLIENT UNBLOCK #b ERROR
        e LOCK.INFO k
        +20
        e LOCK.INFO k
        +20
    ";
    client_unblock_of_next_waiter: "
        s LOCK.EVENTS WAIT 0
        s GET x
        t LOCK.EVENTS WAIT 0 HEARTBEAT
        u LOCK.EVENTS WAIT 0
        v LOCK.EVENTS
        v LOCK.EVENTS HEARTBEAT
        +20
        e CLIENT UNBLOCK #s
        e CLIENT UNBLOCK #t
        e CLIENT UNBLOCK #u ERROR
        +20
        s LOCK.EVENTS WAIT 0
        +20
        e LOCK.ACQUIRE k o SESSION $s LEASE 3000000
        e LOCK.FORCE k
        e CLIENT UNBLOCK #s
        +20
        s LOCK.EVENTS
        +20
    ";
    waits_time_out: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 500
        b GET x
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        s LOCK.ACQUIRE k os LEASE 3000000 WAIT 500 SESSION $t
        t LOCK.EVENTS WAIT 400
        e LOCK.WAITERS k
        +1000
        e LOCK.WAITERS k
        t LOCK.EVENTS WAIT 0
        +20
        a LOCK.RELEASE k oa
        +20
    ";
    leases_expire: "
        a LOCK.ACQUIRE k oa LEASE 800
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        a LOCK.ACQUIRE k2 oa LEASE 1000
        c LOCK.ACQUIRE s oc LEASE 1200 LIMIT 2
        c LOCK.ACQUIRE s od LEASE 3000000 LIMIT 2
        d LOCK.ACQUIRE s oe LEASE 3000000 LIMIT 2 WAIT 0
        +1800
        e LOCK.INFO k
        e LOCK.INFO k2
        e LOCK.INFO s
        a LOCK.RELEASE k oa
        a LOCK.RENEW k2 oa
        +20
    ";
    /// The server is paused while leases and timeouts expire and requests arrive.
    timeouts_pass_while_server_is_paused: "
        a LOCK.ACQUIRE k oa LEASE 2000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE l oc LEASE 3000000
        d LOCK.ACQUIRE l od LEASE 3000000 WAIT 2000
        f LOCK.ACQUIRE w of LEASE 30000 WATCHDOG
        s LOCK.ACQUIRE m os LEASE 2000 SESSION $s
        s LOCK.EVENTS WAIT 2500
        +20
        e DEBUG SLEEP 3.2
        c LOCK.RELEASE l oc
        e LOCK.INFO l
        +5000
        e LOCK.INFO k
        e LOCK.INFO l
        e LOCK.INFO w
        d LOCK.ACQUIRE l od LEASE 3000000
        s LOCK.EVENTS
        +20
    ";
    semaphore_admits_up_to_its_limit: "
        !replicas never
        a LOCK.ACQUIRE k oa LIMIT 2 LEASE 4000000
        b LOCK.ACQUIRE k ob LIMIT 2 LEASE 5000000
        c LOCK.ACQUIRE k oc LIMIT 2 LEASE 6000000 WAIT 0
        d LOCK.ACQUIRE k od LIMIT 1 LEASE 7000000 WAIT 0
        e LOCK.ACQUIRE k oe LIMIT 5 LEASE 8000000 WAIT 0
        f LOCK.ACQUIRE k of LIMIT 3 LEASE 9000000
        +20
        f LOCK.INFO k
        f LOCK.INFO k COUNT 1
        f LOCK.WAITERS k COUNT 2
        f LOCK.TOP COUNT 1
        a LOCK.RELEASE k oa
        +20
        b LOCK.RELEASE k ob
        +20
        f LOCK.INFO k
        c LOCK.RELEASE k oc
        +20
        d LOCK.RELEASE k od
        f HGETALL k
        +20
        f LOCK.FORCE k
        +20
    ";
    readers_share_and_writers_exclude: "
        !replicas never
        a LOCK.ACQUIRE k ra SHARED LEASE 4000000
        b LOCK.ACQUIRE k rb SHARED LEASE 5000000
        c LOCK.ACQUIRE k wc LEASE 6000000 WAIT 0
        d LOCK.ACQUIRE k rd SHARED LEASE 7000000 WAIT 0
        e LOCK.ACQUIRE k re SHARED LEASE 8000000 WAIT 0
        f LOCK.ACQUIRE k wf LEASE 9000000 WAIT 0
        g LOCK.ACQUIRE k rg SHARED LEASE 10000000
        a LOCK.ACQUIRE k ra SHARED LEASE 11000000
        +20
        a LOCK.RELEASE k ra ALL
        b LOCK.RELEASE k rb
        g LOCK.INFO k
        +20
        c LOCK.RELEASE k wc
        g LOCK.INFO k
        +20
        g HGETALL k
        d LOCK.RELEASE k rd
        e !end
        +20
        g LOCK.INFO k
        g LOCK.FORCE k
        +20
        g LOCK.INFO k
        +20
    ";
    several_keys_are_granted_together: "
        !replicas never
        a LOCK.MACQUIRE 3 k1 k2 k3 oa LEASE 3000000
        b LOCK.MACQUIRE 2 k2 k4 ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k4 oc LEASE 3000000 WAIT 0
        d LOCK.ACQUIRE k1 od LEASE 3000000 WAIT 0
        e LOCK.MACQUIRE 2 k1 k1 oe
        e LOCK.MACQUIRE 2 k1 k5 oe
        e LOCK.MACQUIRE 5 k1
        e LOCK.MACQUIRE 1 k5 oe LIMIT 3
        +20
        a LOCK.MRENEW 2 k1 k2 oa LEASE 4000000
        a LOCK.MRENEW 2 k1 k9 oa LEASE 5000000 TOKEN @a
        a LOCK.MRELEASE 2 k1 k9 oa
        +20
        a LOCK.MRELEASE 2 k2 k3 oa TOKEN @a
        e LOCK.INFO k4
        +20
        b LOCK.MRELEASE 2 k2 k4 ob ALL
        +20
        e LOCK.TOP
        e LOCK.INFO k1
        e LOCK.INFO k4
        +20
    ";
    deadlocks_are_refused: "
        !replicas never
        a LOCK.ACQUIRE k1 oa LEASE 30000000 WATCHDOG
        b LOCK.ACQUIRE k2 ob LEASE 30000000 WATCHDOG
        c LOCK.ACQUIRE k3 oc LEASE 30000000 WATCHDOG
        +20
        a LOCK.ACQUIRE k2 oa WAIT 0 LEASE 3000000
        b LOCK.ACQUIRE k3 ob WAIT 0 LEASE 3000000
        +20
        c LOCK.ACQUIRE k1 oc WAIT 0 LEASE 3000000
        +20
        c LOCK.RELEASE k3 oc
        +20
        b LOCK.RELEASE k2 ob
        +20
    ";
    transactions_do_not_wait: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        +20
        a MULTI
        a LOCK.RELEASE k oa
        a LOCK.ACQUIRE k oa WAIT 0
        a LOCK.INFO k
        a SET x 1
        a LOCK.ACQUIRE k2 oa LEASE 3000000
        a LOCK.ACQUIRE k3 oa LEASE 3000000 REPLICAS 1
        a LOCK.ACQUIRE k oa SESSION $s WAIT 0 LEASE 3000000
        a LOCK.ACQUIRE k4 oa EPHEMERAL LEASE 3000000
        a EXEC
        s LOCK.EVENTS WAIT 0
        +20
        b LOCK.RELEASE k ob
        +20
        a MULTI
        a LOCK.ACQUIRE k
        a LOCK.ACQUIRE k6 oa
        a EXEC
        a EXEC
        a MULTI
        a LOCK.RELEASE k2 oa
        a DISCARD
        a MULTI
        a LOCK.EVENTS WAIT 0
        a LOCK.ACQUIRE k7 oa LEASE 0
        a EXEC
        a MULTI
        a EXEC
        +20
        a MULTI
        a LOCK.RELEASE k2 oa
        +20
        a DEL k4
        a EXEC
        c MULTI
        c CLIENT KILL ID #s
        c LOCK.INFO k
        c EXEC
        c LOCK.INFO k
        +20
        c LOCK.INFO k
        +20
    ";
    scripts_do_not_wait: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        +20
        c EVAL return\\x20redis.pcall(unpack(ARGV)) 0 LOCK.ACQUIRE k oc WAIT 0
        c EVAL return\\x20redis.pcall(unpack(ARGV)) 0 LOCK.ACQUIRE k2 oc LEASE 3000000
        c EVAL return\\x20redis.pcall(unpack(ARGV)) 0 LOCK.ACQUIRE k3 oc EPHEMERAL
        c EVAL return\\x20redis.pcall(unpack(ARGV)) 0 LOCK.ACQUIRE k *
        c EVAL return\\x20redis.pcall(unpack(ARGV)) 0 LOCK.EVENTS
        c EVAL return\\x20redis.pcall(unpack(ARGV)) 0 LOCK.SESSION
        c EVAL return\\x20redis.pcall(unpack(ARGV)) 0 LOCK.ACQUIRE k oc WAIT 0 SESSION $s LEASE 3000000
        c EVAL return\\x20redis.pcall(unpack(ARGV)) 0 LOCK.ACQUIRE k3 * SESSION $s LEASE 3000000 EPHEMERAL
        c EVAL return\\x20redis.pcall(unpack(ARGV)) 0 LOCK.RELEASE k oa
        c EVAL return\\x20redis.pcall(unpack(ARGV)) 0 LOCK.RELEASE k oa
        c LOCK.INFO k
        +20
        c LOCK.INFO k
        b LOCK.RELEASE k ob
        s LOCK.EVENTS
        s LOCK.EVENTS
        +20
        s !end
        +20
        c LOCK.INFO k3
        +20
    ";
    invalid_requests_are_refused: "
        a LOCK.ACQUIRE
        a LOCK.ACQUIRE k
        a LOCK.ACQUIRE k #owner
        a LOCK.ACQUIRE k o LEASE 0
        a LOCK.ACQUIRE k o LEASE x
        a LOCK.ACQUIRE k o LEASE
        a LOCK.ACQUIRE k o LIMIT 2 SHARED
        a LOCK.ACQUIRE k o WAIT 1 WAIT 2
        a LOCK.ACQUIRE k o NONSENSE
        a LOCK.RELEASE k o ALL HOLDS 2
        a LOCK.ACQUIRE k o SESSION nobody
        a LOCK.ACQUIRE k o SESSION
        a LOCK.RENEW k o FENCE 9007199254740991
        a LOCK.WAITERS k COUNT 0
        a LOCK.INFO
        a LOCK.SESSION
        a LOCK.SESSION x
        a LOCK.ACQUIRE k * LEASE 3000000
        a LOCK.INFO k
        a LOCK.HELP x
        +20
    ";
}
