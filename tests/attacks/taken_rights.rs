//! A waiting user loses rights: its request is refused, and the next waiter is granted.

use redis::Value;
use support::{Raw, Server, skip, until};

use crate::lines::{Commands, Reply, SOON, arrives, owners, waiters};

/// A user with all rights over all keys.
const RIGHTS: &str = "ACL SETUSER app reset on >secret ~* &* +@all";

/// Each command removes a right that a request for `key` needs.
const REMOVALS: [&str; 4] = [
    "ACL SETUSER app resetkeys nocommands",
    "ACL SETUSER app resetkeys ~other:*",
    "ACL SETUSER app -lock.acquire -lock.macquire",
    "ACL SETUSER app resetkeys %R~*",
];

/// A connection of the user.
#[track_caller]
fn of_app(server: &Server) -> Raw {
    let mut connection = server.raw();
    assert_eq!(connection.run("AUTH app secret"), Value::Okay);
    connection
}

/// `key` and `second` are held by `holder`.
#[track_caller]
fn hold(connection: &mut Raw) {
    assert_eq!(connection.run(RIGHTS), Value::Okay);
    connection.run("LOCK.ACQUIRE key holder LEASE 600000").token();
    connection.run("LOCK.ACQUIRE second holder LEASE 600000").token();
}

#[track_caller]
fn is_refused(reply: &Value) {
    assert!(reply.error().starts_with("NOPERM"), "{reply:?}");
}

#[test]
fn waiter_without_rights_is_refused_and_next_is_granted() {
    let server = Server::start();
    let mut connection = server.raw();
    for removal in REMOVALS {
        for ends in ["LOCK.RELEASE key holder", "LOCK.FORCE key", "DEL key", "PEXPIRE key 1"] {
            hold(&mut connection);
            let (mut first, mut next) = (of_app(&server), server.raw());
            assert_eq!(first.begin("LOCK.ACQUIRE key first WAIT 0"), None);
            assert_eq!(next.begin("LOCK.ACQUIRE key next LEASE 600000 WAIT 0"), None);
            assert_eq!(connection.run(removal), Value::Okay);
            assert!(first.pending(), "its rights are unchanged");
            connection.run(ends);
            is_refused(&arrives(&mut first));
            arrives(&mut next).token();
            assert_eq!(owners(&mut connection, "key"), ["next"], "{removal}, {ends}");
            connection.run("FLUSHALL");
        }
    }
}

#[test]
fn reader_without_rights_does_not_block_readers_behind_it() {
    let server = Server::start();
    let mut connection = server.raw();
    hold(&mut connection);
    let mut readers = [server.raw(), of_app(&server), server.raw()];
    for (index, reader) in readers.iter_mut().enumerate() {
        assert_eq!(reader.begin(&format!("LOCK.ACQUIRE key reader:{index} LEASE 600000 SHARED WAIT 0")), None);
    }
    connection.run(REMOVALS[0]);
    connection.run("LOCK.RELEASE key holder");
    let [mut one, mut two, mut three] = readers;
    let token = arrives(&mut one).token();
    is_refused(&arrives(&mut two));
    assert!(arrives(&mut three).token() > token);
    assert_eq!(owners(&mut connection, "key"), ["reader:0", "reader:2"]);
}

#[test]
fn waiter_for_several_locks_needs_rights_to_all() {
    let server = Server::start();
    let mut connection = server.raw();
    for removal in REMOVALS.into_iter().chain(["ACL SETUSER app resetkeys ~key"]) {
        hold(&mut connection);
        let (mut first, mut next) = (of_app(&server), server.raw());
        assert_eq!(first.begin("LOCK.MACQUIRE 3 key second free first WAIT 0"), None);
        assert_eq!(next.begin("LOCK.MACQUIRE 2 second key next LEASE 600000 WAIT 0"), None);
        connection.run(removal);
        connection.run("LOCK.RELEASE key holder");
        assert!(first.pending() && next.pending());
        connection.run("LOCK.RELEASE second holder");
        is_refused(&arrives(&mut first));
        arrives(&mut next).token();
        assert_eq!(owners(&mut connection, "key"), ["next"]);
        assert_eq!(connection.run("EXISTS free"), Value::Int(0), "{removal}");
        connection.run("FLUSHALL");
    }
}

#[test]
fn restored_rights_allow_grant() {
    let server = Server::start();
    let mut connection = server.raw();
    hold(&mut connection);
    let mut first = of_app(&server);
    assert_eq!(first.begin("LOCK.ACQUIRE key first WAIT 0"), None);
    connection.run(REMOVALS[0]);
    connection.run("ACL SETUSER app ~key +lock.acquire");
    connection.run("LOCK.RELEASE key holder");
    arrives(&mut first).token();
}

/// The requests that wait are of a blocked client, and of a session for several keys.
#[test]
fn rights_to_a_database_allow_grant_there() {
    let server = Server::start();
    let mut connection = server.raw();
    for (db, rights, allowed) in [(0, "db=0", true), (3, "db=0,3", true), (3, "db=0", false)] {
        connection.run(&format!("SELECT {db}"));
        hold(&mut connection);
        if connection.run("ACL SETUSER app resetdbs db=0,3") != Value::Okay {
            return skip("rights can't name databases on this server");
        }
        let (mut one, mut several) = (of_app(&server), of_app(&server));
        for connection in [&mut one, &mut several] {
            assert_eq!(connection.run(&format!("SELECT {db}")), Value::Okay);
        }
        several.run("LOCK.SESSION");
        assert_eq!(one.begin("LOCK.ACQUIRE key one WAIT 0"), None);
        several.run("LOCK.MACQUIRE 2 second third several WAIT 0 SESSION *");
        connection.run(&format!("ACL SETUSER app resetdbs {rights}"));
        connection.run("LOCK.RELEASE key holder");
        connection.run("LOCK.RELEASE second holder");
        let is_granted = matches!(arrives(&mut one), Value::Int(_));
        assert_eq!(is_granted, allowed, "{rights} in {db}");
        let expected = |owner| if allowed { vec![owner] } else { Vec::new() };
        assert_eq!(owners(&mut connection, "key"), expected("one"), "{rights} in {db}");
        assert_eq!(owners(&mut connection, "second"), expected("several"), "{rights} in {db}");
        connection.run("FLUSHALL");
    }
}

#[test]
fn waits_of_deleted_user_end() {
    let server = Server::start();
    let mut connection = server.raw();
    hold(&mut connection);
    let (mut one, mut several) = (of_app(&server), of_app(&server));
    let (mut next, mut last) = (server.raw(), server.raw());
    assert_eq!(one.begin("LOCK.ACQUIRE key one WAIT 0"), None);
    assert_eq!(several.begin("LOCK.MACQUIRE 2 key second several WAIT 0"), None);
    assert_eq!(next.begin("LOCK.ACQUIRE key next LEASE 600000 WAIT 0"), None);
    assert_eq!(last.begin("LOCK.ACQUIRE second last LEASE 600000 WAIT 0"), None);
    assert_eq!(connection.run("ACL DELUSER app"), Value::Int(1));
    connection.run("LOCK.RELEASE key holder");
    connection.run("LOCK.RELEASE second holder");
    arrives(&mut next).token();
    arrives(&mut last).token();
    assert!(one.read().is_err() && several.read().is_err(), "the connections are closed without a grant");
    for (key, owner) in [("key", "next"), ("second", "last")] {
        assert_eq!(owners(&mut connection, key), [owner]);
        assert!(waiters(&mut connection, key).is_empty());
    }
}

/// A session of the user with two requests: for `key`, and for `key` and `second`.
fn session(server: &Server) -> Raw {
    let (mut session, mut sender) = (of_app(server), of_app(server));
    let id = session.run("LOCK.SESSION").field("id").text();
    for line in ["LOCK.ACQUIRE key first", "LOCK.MACQUIRE 2 key second third"] {
        let reply = sender.run(&format!("{line} WAIT 0 LEASE 600000 SESSION {id}"));
        assert_eq!(reply, Value::SimpleString("WAITING".into()));
    }
    session
}

#[test]
fn session_request_without_rights_is_refused() {
    let server = Server::start();
    let mut connection = server.raw();
    for removal in REMOVALS {
        hold(&mut connection);
        let (mut session, mut next) = (session(&server), server.raw());
        assert_eq!(next.begin("LOCK.MACQUIRE 2 key second next LEASE 600000 WAIT 0"), None);
        connection.run(removal);
        connection.run("LOCK.RELEASE second holder");
        connection.run("LOCK.RELEASE key holder");
        arrives(&mut next).token();
        assert_eq!(owners(&mut connection, "key"), ["next"]);
        assert_eq!(owners(&mut connection, "second"), ["next"]);
        connection.run(RIGHTS); // The right to read its events.
        let mut received = Vec::new();
        until(SOON, "both requests are refused", || {
            let events = session.run("LOCK.EVENTS");
            let new = if events.is_null() { &[] } else { events.items() };
            received.extend(new.iter().map(|event| [0, 3, 5].map(|at| event.items()[at].text())));
            received.len() >= 2
        });
        for ([kind, owner, detail], expected) in received.iter().zip(["first", "third"]) {
            assert_eq!((kind.as_str(), owner.as_str()), ("refused", expected));
            assert!(detail.starts_with("NOPERM"), "{detail}");
        }
        assert_eq!(received.len(), 2);
        connection.run("FLUSHALL");
    }
}

#[test]
fn session_of_deleted_user_is_granted_nothing() {
    let server = Server::start();
    let mut connection = server.raw();
    hold(&mut connection);
    let (mut session, mut next) = (session(&server), server.raw());
    assert_eq!(next.begin("LOCK.MACQUIRE 2 key second next LEASE 600000 WAIT 0"), None);
    assert_eq!(connection.run("ACL DELUSER app"), Value::Int(1));
    connection.run("LOCK.RELEASE key holder");
    connection.run("LOCK.RELEASE second holder");
    arrives(&mut next).token();
    assert!(session.read().is_err());
    assert_eq!(owners(&mut connection, "key"), ["next"]);
}

/// The server deletes the user, and closes its connections only after the command that frees the lock: what it writes to
/// them is lost.
#[test]
fn deleted_user_is_granted_nothing_in_the_same_transaction() {
    let server = Server::start();
    let mut connection = server.raw();
    hold(&mut connection);
    let (mut one, mut reader, mut sender) = (of_app(&server), of_app(&server), of_app(&server));
    let (mut next, mut last) = (server.raw(), server.raw());
    assert_eq!(one.begin("LOCK.ACQUIRE key one LEASE 600000 WAIT 0"), None);
    let id = reader.run("LOCK.SESSION").field("id").text();
    let waits = sender.run(&format!("LOCK.ACQUIRE second reader LEASE 600000 WAIT 0 SESSION {id}"));
    assert_eq!(waits, Value::SimpleString("WAITING".into()));
    assert_eq!(reader.begin("LOCK.EVENTS WAIT 0"), None);
    assert_eq!(next.begin("LOCK.ACQUIRE key next LEASE 600000 WAIT 0"), None);
    assert_eq!(last.begin("LOCK.ACQUIRE second last LEASE 600000 WAIT 0"), None);
    for line in ["MULTI", "ACL DELUSER app", "LOCK.RELEASE key holder", "LOCK.RELEASE second holder"] {
        connection.run_ok(line);
    }
    assert_eq!(connection.run("EXEC"), Value::Array(vec![Value::Int(1); 3]));
    arrives(&mut next).token();
    arrives(&mut last).token();
    assert!(one.read().is_err() && reader.read().is_err(), "the connections are closed without a reply");
    assert_eq!(owners(&mut connection, "key"), ["next"]);
    assert_eq!(owners(&mut connection, "second"), ["last"]);
}
