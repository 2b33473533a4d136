//! Large locks that another client wrote: one event-loop iteration reads a part of them.

use redis::Value;
use support::{Raw, Server, until};

use crate::lines::{Commands, Reply, SOON, arrives};

/// The size of a lock, three of which exceed what one request may read.
const FIELDS: usize = 2500;

/// Another client makes `crowd:0` to `crowd:2`, each of them a lock with many holders.
const LARGE_LOCKS: &str = "for key = 0, 2 do \
     redis.call('hset', 'crowd:' .. key, '#limit', 5000) \
     for field = 1, ARGV[1] do redis.call('hset', 'crowd:' .. key, 'holder:' .. field, 1) end \
     end";

/// Another client adds fields that are no owners to `key:1` to `key:7`.
const MARKS: &str = "for key = 1, 7 do \
     for field = 1, ARGV[1] do redis.call('hset', 'key:' .. key, '#mark:' .. field, 1) end \
     end";

fn script(connection: &mut Raw, text: &str, fields: usize) {
    let reply = connection.call(&[b"EVAL", text.as_bytes(), b"0", fields.to_string().as_bytes()]);
    assert_eq!(reply, Value::Nil, "{text}");
}

fn is_too_large(error: &str, key: &str) -> bool {
    error.starts_with("ERR too many holders") && error.contains("holdfast.max-holders") && error.contains(key)
}

#[test]
fn request_for_several_locks_reads_less_of_each() {
    let server = Server::start();
    let mut connection = server.raw();
    for line in ["LOCK.MACQUIRE # me", "LOCK.MACQUIRE # me WAIT 0", "LOCK.MRENEW # me", "LOCK.MRELEASE # me"] {
        script(&mut connection, LARGE_LOCKS, FIELDS);
        let line = line.replace('#', "3 crowd:0 crowd:1 crowd:2");
        let error = connection.run(&line).error();
        assert!(is_too_large(&error, "'crowd:0'") && error.contains("833"), "{line}: {error}");
        assert_eq!(connection.run("LOCK.TOP").items().len(), 0, "nobody waits");
        // Once each of them has been read alone, the module has cached its holders.
        (0..3).for_each(|key| drop(connection.run(&format!("LOCK.INFO crowd:{key} COUNT 1"))));
        if !line.contains("WAIT") {
            let reply = connection.run(&line);
            assert!(!matches!(reply, Value::ServerError(_)), "{line}: {reply:?}");
        }
    }
    // Locks that one request may read together.
    connection.run("FLUSHALL");
    script(&mut connection, LARGE_LOCKS, 800);
    assert_eq!(connection.run("LOCK.MRENEW 3 crowd:0 crowd:1 crowd:2 me").items().len(), 3);
    // A few large locks, each alone, and many small ones, are unaffected.
    script(&mut connection, LARGE_LOCKS, FIELDS);
    for key in 0..3 {
        assert_eq!(connection.run(&format!("LOCK.INFO crowd:{key}")).field("holder_count"), Value::Int(FIELDS as i64));
    }
}

/// The request waits for one key. Meanwhile another client makes the others too large to be read in one command.
#[test]
fn waiting_request_ends_when_its_locks_become_unreadable() {
    let server = Server::start();
    let (mut connection, mut waiter, mut behind) = (server.raw(), server.raw(), server.raw());
    connection.run("LOCK.ACQUIRE hot holder LEASE 600000").token();
    let keys: Vec<String> = (1..8).map(|key| format!("key:{key}")).collect();
    assert_eq!(waiter.begin(&format!("LOCK.MACQUIRE 8 hot {} waiter WAIT 0", keys.join(" "))), None);
    assert_eq!(behind.begin("LOCK.ACQUIRE hot behind LEASE 600000 WAIT 0"), None);
    script(&mut connection, MARKS, 1000);
    let error = arrives(&mut waiter).error();
    assert!(is_too_large(&error, "'key:"), "{error}");
    assert!(behind.pending());
    assert_eq!(connection.run("LOCK.RELEASE hot holder"), Value::Int(1));
    arrives(&mut behind).token();
}

/// Another client has made all of the locks large meanwhile.
#[test]
fn unconfirmed_grants_of_large_locks_are_revoked_one_by_one() {
    let server = Server::start();
    let (mut connection, mut client) = (server.raw(), server.raw());
    connection.run("CONFIG SET holdfast.replicas-timeout 500");
    let keys: Vec<String> = (0..9).map(|key| format!("key:{key}")).collect();
    let request = format!("LOCK.MACQUIRE 9 {} me LEASE 600000 REPLICAS 1", keys.join(" "));
    assert_eq!(client.begin(&request), None);
    script(&mut connection, MARKS, 998);
    assert!(arrives(&mut client).error().starts_with("UNCONFIRMED"));
    until(SOON, "all locks are free", || connection.run("DBSIZE") == Value::Int(0));
}
