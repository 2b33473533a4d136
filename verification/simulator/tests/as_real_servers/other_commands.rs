//! Commands of other clients that change the keyspace.

crate::scripts! {
    databases_have_separate_locks: "
        !replicas never
        a SELECT 1
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000
        c SELECT 1
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        d LOCK.ACQUIRE k od LEASE 4000000 WAIT 0
        s LOCK.EVENTS WAIT 0
        a LOCK.ACQUIRE t oa LEASE 3000000 SESSION $s WATCHDOG
        +20
        e SWAPDB 0 1
        e LOCK.INFO k
        e LOCK.TOP
        +20
        e SELECT 1
        e LOCK.INFO k
        e LOCK.TOP
        s LOCK.EVENTS
        +20
        e SWAPDB 1 2
        +20
        e LOCK.INFO k
        e SELECT 2
        e LOCK.INFO k
        s LOCK.EVENTS
        +20
        e SWAPDB 0 99
        +20
    ";
    locks_are_moved_and_renamed: "
        // not on Valkey 8: 8.1 replicates a MOVE that a module follows up as if it had been sent in the other database
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE l oc LEASE 3000000
        d LOCK.ACQUIRE l od LEASE 3000000 WAIT 0
        +20
        e MOVE k 1
        e LOCK.INFO k
        +20
        e RENAME l m
        e LOCK.INFO l
        e LOCK.INFO m
        +20
        e LOCK.INFO l
        e MOVE nothing 1
        e RENAME nothing x
        e RENAME m l
        +20
        e LOCK.INFO l
        a !end
        +20
        e LOCK.INFO k
        e SELECT 1
        e LOCK.INFO k
        e MOVE k 1
        +20
    ";
    lock_is_renamed_to_awaited_key: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        a LOCK.ACQUIRE l ob LEASE 3000000
        +20
        e RENAME l k
        +20
        e LOCK.INFO k
        e LOCK.RELEASE k ob
        +20
        e LOCK.INFO k
        +20
    ";
    /// Redis 8 blocks the sender of `FLUSHALL` until another thread has finished. Its later requests would run later
    /// than elsewhere, so it sends none.
    flushall_deletes_locks: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000 EPHEMERAL
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE l oc LEASE 3000000 SESSION $s WATCHDOG
        d SELECT 1
        d LOCK.ACQUIRE k od LEASE 3000000
        f SELECT 1
        f LOCK.ACQUIRE k of LEASE 3000000 WAIT 0
        s LOCK.EVENTS WAIT 0
        +20
        d FLUSHDB
        g SELECT 1
        g LOCK.INFO k
        h LOCK.INFO k
        +20
        g LOCK.INFO k
        e FLUSHALL
        h LOCK.INFO k
        h LOCK.ACQUIRE k oe
        +20
        h LOCK.INFO k
        s LOCK.EVENTS
        +20
        g LOCK.INFO k
        d FLUSHDB
        +20
        e FLUSHALL
        +20
    ";
    transaction_flushes_locks: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k oc LEASE 3000000 WAIT 0
        +20
        e MULTI
        e FLUSHALL
        e LOCK.INFO k
        e SET x 1
        e EXEC
        +20
        e LOCK.INFO k
        +20
    ";
    del_deletes_many_locks: "
        !replicas never
        a LOCK.MACQUIRE 4 k1 k2 k3 k4 oa LEASE 3000000
        b LOCK.ACQUIRE k1 ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE k2 oc LEASE 3000000 WAIT 0
        d LOCK.ACQUIRE k3 od LEASE 3000000 WAIT 0
        f LOCK.ACQUIRE k1 of LEASE 3000000 WAIT 0
        g LOCK.MACQUIRE 2 k4 k5 og LEASE 3000000 WAIT 0
        +20
        e DEL k3 k1 nothing k2 k4
        e LOCK.INFO k1
        +20
        e LOCK.INFO k2
        e MULTI
        e DEL k1
        e DEL k3
        e SET k3 y
        e DEL k4
        e EXEC
        e EXISTS k1 k3 k4
        +20
        e DEL k3
        e LOCK.TOP
        +20
    ";
    hash_commands_change_mutex: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        +20
        e HSET k oa 3
        e LOCK.INFO k
        e HDEL k nobody
        e HDEL k oa
        e HGETALL k
        +20
        e HGETALL k
        e LOCK.INFO k
        e HDEL k oa #fence
        +20
        e LOCK.INFO k
        e HDEL k ob #fence
        e HSET redisson u:1 1
        e PEXPIRE redisson 3000000
        e LOCK.INFO redisson
        e LOCK.ACQUIRE redisson u:1
        e LOCK.ACQUIRE redisson u:2
        e LOCK.RELEASE redisson u:1
        e LOCK.RELEASE redisson u:1
        e HSET nolock a b c d
        e LOCK.ACQUIRE nolock o
        e HGET redisson x
        +20
    ";
    hash_commands_change_semaphore: "
        !replicas never
        a LOCK.ACQUIRE k oa LIMIT 2 LEASE 4000000
        b LOCK.ACQUIRE k ob LIMIT 2 LEASE 5000000
        c LOCK.ACQUIRE k oc LIMIT 2 LEASE 6000000 WAIT 0
        +20
        e HDEL k oa
        e LOCK.INFO k
        +20
        e LOCK.INFO k
        e HSET k #limit 3
        e LOCK.ACQUIRE k od LIMIT 3 LEASE 7000000
        +20
        e HDEL k #@ob
        e LOCK.INFO k
        e PERSIST k
        e LOCK.INFO k
        e PEXPIRE k 2000000
        e LOCK.INFO k
        +20
        e HDEL k #limit
        e LOCK.INFO k
        e LOCK.RELEASE k oc
        +20
    ";
    other_types_replace_locks: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE l oc LEASE 3000000
        d LOCK.ACQUIRE l od LEASE 3000000 WAIT 0
        +20
        e SET k text
        e LOCK.INFO k
        e LOCK.RELEASE k oa
        +20
        e RPUSH l x
        e DEL l
        e RPUSH l x
        +20
        e LOCK.INFO l
        e DEL l
        e RPUSH l x
        e LOCK.ACQUIRE l oe
        e LOCK.FORCE l
        e LOCK.RENEW l od
        e HSET l a 1
        e HGETALL l
        e GET k
        e HDEL k a
        +20
    ";
    /// Without a stream: the server's cron may find an expired key before the module does, and then the deletion is a
    /// unit of its own.
    expire_commands_change_deadlines: "
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        c LOCK.ACQUIRE l oc LEASE 3000000
        d LOCK.ACQUIRE l od LEASE 3000000 WAIT 0
        +20
        e PERSIST k
        e LOCK.INFO k
        e PTTL k
        e PERSIST k
        e PEXPIRE k 100
        +800
        e LOCK.INFO k
        e LOCK.INFO l
        e PEXPIRE nothing 100
        e PTTL nothing
        +20
    ";
    expiry_in_the_past_deletes_lock: "
        // not on Valkey 8: it says that such a key has expired, as Valkey 9 does; Redis says that it was deleted
        !replicas never
        c LOCK.ACQUIRE l oc LEASE 3000000
        d LOCK.ACQUIRE l od LEASE 3000000 WAIT 0
        +20
        e PEXPIREAT l 1000
        e LOCK.INFO l
        +20
        e PEXPIRE l -5
        e LOCK.INFO l
        e PEXPIRE l 0
        +20
    ";
    restore_replaces_locks: "
        !replicas never
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        +20
        e RESTORE k 0 \\x10\\x0c\\x0c\\x00\\x00\\x00\\x02\\x00\\x82\\x6d\\x65\\x03\\x01\\x01\\xff\\x0a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00
        e RESTORE k 0 \\x10\\x0e\\x0e\\x00\\x00\\x00\\x02\\x00\\x82\\x6d\\x65\\x03\\x01\\x01\\xff\\x0a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00 REPLACE
        e LOCK.INFO k
        +20
        e LOCK.RELEASE k me
        +20
        e RESTORE n 3000000 \\x10\\x0e\\x0e\\x00\\x00\\x00\\x02\\x00\\x82\\x6d\\x65\\x03\\x01\\x01\\xff\\x0a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00
        e LOCK.INFO n
        e RESTORE n 3000000 nonsense REPLACE
        e RESTORE o 1000 \\x10\\x0e\\x0e\\x00\\x00\\x00\\x02\\x00\\x82\\x6d\\x65\\x03\\x01\\x01\\xff\\x0a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00 ABSTTL
        e EXISTS o
        +20
    ";
    messages_are_published: "
        p SUBSCRIBE redisson_lock__channel:{k}
        p SUBSCRIBE __keyevent@0__:lock.acquired
        p SUBSCRIBE __keyevent@0__:lock.released
        p SUBSCRIBE __keyevent@0__:lock.expired
        p SUBSCRIBE __keyevent@0__:lock.forced
        a LOCK.ACQUIRE k oa LEASE 3000000
        b LOCK.ACQUIRE k ob LEASE 3000000 WAIT 0
        a LOCK.ACQUIRE k oa
        a LOCK.RELEASE k oa
        +20
        a LOCK.RELEASE k oa
        +20
        b LOCK.RELEASE k ob
        b LOCK.ACQUIRE k ob LEASE 300
        +1000
        b LOCK.ACQUIRE k ob LEASE 3000000
        b LOCK.FORCE k
        b LOCK.ACQUIRE k ob LEASE 3000000
        b DEL k
        b CONFIG SET notify-keyspace-events KE
        b LOCK.ACQUIRE k ob LEASE 3000000
        b LOCK.RELEASE k ob
        +20
    ";
    users_need_rights: "
        !replicas never
        a ACL SETUSER u reset on nopass ~* +@all
        a LOCK.ACQUIRE k oa LEASE 3000000
        a LOCK.ACQUIRE l oa LEASE 3000000
        u AUTH u x
        u LOCK.ACQUIRE k ou LEASE 3000000 WAIT 0
        v AUTH u x
        v LOCK.ACQUIRE l ov LEASE 3000000 WAIT 0
        w LOCK.ACQUIRE l ow LEASE 3000000 WAIT 0
        +20
        a ACL SETUSER u resetkeys ~k*
        a LOCK.RELEASE k oa
        a LOCK.RELEASE l oa
        +20
        u LOCK.RELEASE k ou
        v LOCK.ACQUIRE l ov
        a ACL SETUSER u -lock.acquire
        v LOCK.ACQUIRE k ov
        v LOCK.RELEASE k ov
        u MULTI
        u LOCK.ACQUIRE k ou
        u EXEC
        +20
        a LOCK.INFO k
        a LOCK.INFO l
        +20
    ";
}
