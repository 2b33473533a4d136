//! The maximum number of keys in one request, and requests with that many keys.

use redis::Value;
use support::{Raw, Server};

use crate::common::Contents;
use crate::lines::{Commands, Reply, arrives, owners, waiters};

/// The maximum.
const MOST: usize = 128;

/// `key:0`, `key:1` …, preceded by their number, as a command has them.
fn keys(count: usize) -> String {
    let keys: Vec<String> = (0..count).map(|index| format!("key:{index}")).collect();
    format!("{count} {}", keys.join(" "))
}

#[test]
fn too_many_keys_are_refused_with_error_that_names_limit() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE key:0 me LEASE 600000").token();
    let before = Contents::read(&mut connection);
    let too_many = keys(MOST + 1);
    let lines = ["LOCK.MACQUIRE # me", "LOCK.MACQUIRE # me WAIT 0", "LOCK.MRENEW # me", "LOCK.MRELEASE # me"];
    for line in lines {
        let error = connection.run(&line.replace('#', &too_many)).error();
        assert!(error.contains("128") && error.contains("129"), "{error}");
    }
    // A limit on the arguments of a request would not replace one on its keys.
    let error = connection.run(&format!("LOCK.MACQUIRE {} key:0 me", i64::MAX)).error();
    assert!(error.starts_with("ERR"), "{error}");
    assert_eq!(Contents::read(&mut connection), before, "nothing has changed");
    assert!(connection.run("LOCK.TOP").items().is_empty(), "nobody waits");

    // The keys that one command can acquire can be renewed and released in one.
    assert_eq!(connection.run("LOCK.RELEASE key:0 me"), Value::Int(1));
    for line in lines {
        let reply = connection.run(&line.replace('#', &keys(MOST)));
        assert!(!matches!(reply, Value::ServerError(_)), "{line}: {reply:?}");
    }
}

/// A server with a holder of `hot`, and a request with the maximum number of keys that waits for it.
fn waiting_for_many_keys() -> (Server, Raw, Raw) {
    let server = Server::start();
    let (mut connection, mut waiting_for_many_keys) = (server.raw(), server.raw());
    connection.run("LOCK.ACQUIRE hot me LEASE 600000").token();
    let names = keys(MOST - 1).replacen("127 ", "128 hot ", 1);
    assert_eq!(
        waiting_for_many_keys.begin(&format!("LOCK.MACQUIRE {names} waiting_for_many_keys LEASE 600000 WAIT 0")),
        None
    );
    (server, connection, waiting_for_many_keys)
}

#[test]
fn new_request_queues_behind_request_for_many_keys() {
    let (server, mut connection, mut waiting_for_many_keys) = waiting_for_many_keys();
    assert!(connection.run("LOCK.ACQUIRE key:7 other").is_null(), "it would overtake");
    let mut second = server.raw();
    assert_eq!(second.begin("LOCK.ACQUIRE key:7 second LEASE 600000 WAIT 0"), None);
    assert_eq!(waiters(&mut connection, "key:7"), ["waiting_for_many_keys", "second"]);

    // Events on its other keys do not end the wait for the held one.
    assert!(connection.run("LOCK.RELEASE key:7 me").is_null());
    assert_eq!(connection.run("LOCK.FORCE key:7"), Value::Int(0));
    connection.run("HSET key:8 foreign 1");
    connection.run("DEL key:8");
    assert!(waiting_for_many_keys.pending() && second.pending());

    assert_eq!(connection.run("LOCK.RELEASE hot me"), Value::Int(1));
    let token = arrives(&mut waiting_for_many_keys).token();
    for key in ["hot", "key:0", "key:7", "key:8", "key:126"] {
        assert_eq!(owners(&mut connection, key), ["waiting_for_many_keys"]);
        assert_eq!(connection.run(&format!("LOCK.INFO {key}")).field("fence"), Value::Int(token));
    }
    assert!(second.pending());
    assert_eq!(connection.run("LOCK.RELEASE key:7 waiting_for_many_keys"), Value::Int(1));
    assert!(arrives(&mut second).token() > token);
}

#[test]
fn request_for_many_keys_waits_for_one_held_key() {
    let (_server, mut connection, mut waiting_for_many_keys) = waiting_for_many_keys();
    connection.run("HSET key:7 foreign 1");
    assert_eq!(connection.run("LOCK.FORCE hot"), Value::Int(1));
    assert!(waiting_for_many_keys.pending());
    assert!(connection.run("LOCK.ACQUIRE hot me").is_null(), "it would overtake");
    assert_eq!(connection.run("LOCK.FORCE key:7"), Value::Int(1));
    arrives(&mut waiting_for_many_keys).token();
    assert_eq!(owners(&mut connection, "hot"), ["waiting_for_many_keys"]);
    // A key that can't be a lock ends the wait for all of them.
    connection.run("LOCK.FORCE key:7");
    connection.run("LOCK.ACQUIRE key:7 me").token();
    assert_eq!(waiting_for_many_keys.begin(&format!("LOCK.MACQUIRE {} later WAIT 0", keys(MOST))), None);
    connection.run("SET key:126 text");
    assert!(arrives(&mut waiting_for_many_keys).error().starts_with("WRONGTYPE"));
    assert!(waiters(&mut connection, "key:7").is_empty());
}

/// An owner waits by 9 requests, each for a key of its own and for 127 others.
#[test]
fn too_many_withdrawn_keys_are_refused_with_error_that_names_limit() {
    let server = Server::start();
    let mut session = server.raw();
    session.run("LOCK.SESSION").field("id");
    for request in 0..9 {
        session.run(&format!("LOCK.ACQUIRE held:{request} other LEASE 600000")).token();
        let others: Vec<String> = (1..MOST).map(|key| format!("key:{request}:{key}")).collect();
        let line = format!("LOCK.MACQUIRE {MOST} held:{request} {} me WAIT 0 SESSION *", others.join(" "));
        assert_eq!(session.run(&line), Value::SimpleString("WAITING".into()));
    }
    let held: Vec<String> = (0..9).map(|request| format!("held:{request}")).collect();
    let error = session.run(&format!("LOCK.MRELEASE 9 {} me ALL", held.join(" "))).error();
    assert!(error.starts_with("ERR") && error.contains("1024") && error.contains("1152"), "{error}");
    assert_eq!(waiters(&mut session, "held:0"), ["me"], "nothing has changed");
    let withdrawn = session.run(&format!("LOCK.MRELEASE 8 {} me ALL", held[1..].join(" ")));
    assert_eq!(withdrawn, Value::Array(vec![Value::Int(1); 8]));
    assert_eq!(session.run("LOCK.RELEASE held:0 me ALL"), Value::Int(1));
    assert!(session.run("LOCK.TOP").items().is_empty(), "nobody waits");
}
