//! How many keys one request may name, and that a request with as many as may be is like any other.

use redis::Value;
use support::{Raw, Server};

use crate::common::Contents;
use crate::speak::{Reply, Speak, arrives, owners, waiters};

/// So many, and no more.
const MOST: usize = 128;

/// `key:0`, `key:1` …, and how many, as a command has them.
fn keys(count: usize) -> String {
    let keys: Vec<String> = (0..count).map(|index| format!("key:{index}")).collect();
    format!("{count} {}", keys.join(" "))
}

#[test]
fn too_many_keys_are_refused_with_error_that_names_limit() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.say("LOCK.ACQUIRE key:0 me LEASE 600000").token();
    let before = Contents::read(&mut connection);
    let too_many = keys(MOST + 1);
    let lines = ["LOCK.MACQUIRE # me", "LOCK.MACQUIRE # me WAIT 0", "LOCK.MRENEW # me", "LOCK.MRELEASE # me"];
    for line in lines {
        let error = connection.say(&line.replace('#', &too_many)).error();
        assert!(error.contains("128") && error.contains("129"), "{error}");
    }
    // Nor does a limit that is set for the arguments of a request rather than for its keys let them through.
    let error = connection.say(&format!("LOCK.MACQUIRE {} key:0 me", i64::MAX)).error();
    assert!(error.starts_with("ERR"), "{error}");
    assert_eq!(Contents::read(&mut connection), before, "nothing has changed");
    assert!(connection.say("LOCK.TOP").items().is_empty(), "nobody waits");

    // What can be taken in one step can be renewed and released in one.
    assert_eq!(connection.say("LOCK.RELEASE key:0 me"), Value::Int(1));
    for line in lines {
        let reply = connection.say(&line.replace('#', &keys(MOST)));
        assert!(!matches!(reply, Value::ServerError(_)), "{line}: {reply:?}");
    }
}

/// A server on which `hot` is held and a request for as many keys as may be waits for it, on its connection.
fn parked() -> (Server, Raw, Raw) {
    let server = Server::start();
    let (mut connection, mut parked) = (server.raw(), server.raw());
    connection.say("LOCK.ACQUIRE hot me LEASE 600000").token();
    let names = keys(MOST - 1).replacen("127 ", "128 hot ", 1);
    assert_eq!(parked.begin(&format!("LOCK.MACQUIRE {names} parked LEASE 600000 WAIT 0")), None);
    (server, connection, parked)
}

#[test]
fn new_request_queues_behind_request_for_many_keys() {
    let (server, mut connection, mut parked) = parked();
    assert!(connection.say("LOCK.ACQUIRE key:7 other").is_null(), "it would overtake");
    let mut second = server.raw();
    assert_eq!(second.begin("LOCK.ACQUIRE key:7 second LEASE 600000 WAIT 0"), None);
    assert_eq!(waiters(&mut connection, "key:7"), ["parked", "second"]);

    // Whatever happens to a key of it, it waits on for the one that is held.
    assert!(connection.say("LOCK.RELEASE key:7 me").is_null());
    assert_eq!(connection.say("LOCK.FORCE key:7"), Value::Int(0));
    connection.say("HSET key:8 foreign 1");
    connection.say("DEL key:8");
    assert!(parked.pending() && second.pending());

    assert_eq!(connection.say("LOCK.RELEASE hot me"), Value::Int(1));
    let token = arrives(&mut parked).token();
    for key in ["hot", "key:0", "key:7", "key:8", "key:126"] {
        assert_eq!(owners(&mut connection, key), ["parked"]);
        assert_eq!(connection.say(&format!("LOCK.INFO {key}")).field("fence"), Value::Int(token));
    }
    assert!(second.pending());
    assert_eq!(connection.say("LOCK.RELEASE key:7 parked"), Value::Int(1));
    assert!(arrives(&mut second).token() > token);
}

#[test]
fn request_for_many_keys_waits_for_one_held_key() {
    let (_server, mut connection, mut parked) = parked();
    connection.say("HSET key:7 foreign 1");
    assert_eq!(connection.say("LOCK.FORCE hot"), Value::Int(1));
    assert!(parked.pending());
    assert!(connection.say("LOCK.ACQUIRE hot me").is_null(), "it would overtake");
    assert_eq!(connection.say("LOCK.FORCE key:7"), Value::Int(1));
    arrives(&mut parked).token();
    assert_eq!(owners(&mut connection, "hot"), ["parked"]);
    // A key that can never be had ends the wait for all of them.
    connection.say("LOCK.FORCE key:7");
    connection.say("LOCK.ACQUIRE key:7 me").token();
    assert_eq!(parked.begin(&format!("LOCK.MACQUIRE {} later WAIT 0", keys(MOST))), None);
    connection.say("SET key:126 text");
    assert!(arrives(&mut parked).error().starts_with("WRONGTYPE"));
    assert!(waiters(&mut connection, "key:7").is_empty());
}
