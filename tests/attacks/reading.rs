//! Locks that others have written, each of which has to be read whole: of a thousand, no step reads all.

use redis::Value;
use support::{Raw, Server, until};

use crate::speak::{Reply, SOON, Speak, arrives};

/// Locks so large that three of them are more than may be read for one request.
const FIELDS: usize = 2500;

/// Another client makes `crowd:0` to `crowd:2`, each of them a lock with many holders.
const CROWDS: &str = "for key = 0, 2 do \
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

fn names_the_limit(error: &str, key: &str) -> bool {
    error.starts_with("ERR too many holders") && error.contains("holdfast.max-holders") && error.contains(key)
}

#[test]
fn request_for_several_locks_reads_less_of_each() {
    let server = Server::start();
    let mut connection = server.raw();
    for line in ["LOCK.MACQUIRE # me", "LOCK.MACQUIRE # me WAIT 0", "LOCK.MRENEW # me", "LOCK.MRELEASE # me"] {
        script(&mut connection, CROWDS, FIELDS);
        let line = line.replace('#', "3 crowd:0 crowd:1 crowd:2");
        let error = connection.say(&line).error();
        assert!(names_the_limit(&error, "'crowd:0'") && error.contains("833"), "{line}: {error}");
        assert_eq!(connection.say("LOCK.TOP").items().len(), 0, "nobody waits");
        // Once each of them has been read alone, it is known.
        (0..3).for_each(|key| drop(connection.say(&format!("LOCK.INFO crowd:{key} COUNT 1"))));
        if !line.contains("WAIT") {
            let reply = connection.say(&line);
            assert!(!matches!(reply, Value::ServerError(_)), "{line}: {reply:?}");
        }
    }
    // Locks of a size that a part is enough for are like any others.
    connection.say("FLUSHALL");
    script(&mut connection, CROWDS, 800);
    assert_eq!(connection.say("LOCK.MRENEW 3 crowd:0 crowd:1 crowd:2 me").items().len(), 3);
    // Each of them alone is like any other, and so are many small ones.
    script(&mut connection, CROWDS, FIELDS);
    for key in 0..3 {
        assert_eq!(connection.say(&format!("LOCK.INFO crowd:{key}")).field("holder_count"), Value::Int(FIELDS as i64));
    }
}

/// It waits for one key; meanwhile somebody makes the others so large that they can't be read in one step.
#[test]
fn waiting_request_ends_when_its_locks_become_unreadable() {
    let server = Server::start();
    let (mut connection, mut waiter, mut behind) = (server.raw(), server.raw(), server.raw());
    connection.say("LOCK.ACQUIRE hot holder LEASE 600000").token();
    let keys: Vec<String> = (1..8).map(|key| format!("key:{key}")).collect();
    assert_eq!(waiter.begin(&format!("LOCK.MACQUIRE 8 hot {} waiter WAIT 0", keys.join(" "))), None);
    assert_eq!(behind.begin("LOCK.ACQUIRE hot behind LEASE 600000 WAIT 0"), None);
    script(&mut connection, MARKS, 1000);
    let error = arrives(&mut waiter).error();
    assert!(names_the_limit(&error, "'key:"), "{error}");
    assert!(behind.pending());
    assert_eq!(connection.say("LOCK.RELEASE hot holder"), Value::Int(1));
    arrives(&mut behind).token();
}

/// Grants are revoked, lock by lock, when another client has made all of them large meanwhile.
#[test]
fn unconfirmed_grants_of_large_locks_are_revoked_one_by_one() {
    let server = Server::start();
    let (mut connection, mut client) = (server.raw(), server.raw());
    connection.say("CONFIG SET holdfast.replicas-timeout 500");
    let keys: Vec<String> = (0..9).map(|key| format!("key:{key}")).collect();
    let request = format!("LOCK.MACQUIRE 9 {} me LEASE 600000 REPLICAS 1", keys.join(" "));
    assert_eq!(client.begin(&request), None);
    script(&mut connection, MARKS, 998);
    assert!(arrives(&mut client).error().starts_with("UNCONFIRMED"));
    until(SOON, "all are free", || connection.say("DBSIZE") == Value::Int(0));
}
