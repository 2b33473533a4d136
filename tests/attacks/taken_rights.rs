//! Rights that are taken away while somebody waits: what it asked for is not granted, and the next in the queue gets it.

use redis::Value;
use support::{Raw, Server, until};

use crate::speak::{Reply, SOON, Speak, arrives, owners, waiters};

/// A user with all rights over all keys.
const RIGHTS: &str = "ACL SETUSER app reset on >secret ~* &* +@all";

/// Each takes away what a request for `key` needs.
const TAKEN: [&str; 4] = [
    "ACL SETUSER app resetkeys nocommands",
    "ACL SETUSER app resetkeys ~other:*",
    "ACL SETUSER app -lock.acquire -lock.macquire",
    "ACL SETUSER app resetkeys %R~*",
];

/// A connection of the user.
#[track_caller]
fn of_app(server: &Server) -> Raw {
    let mut connection = server.raw();
    assert_eq!(connection.say("AUTH app secret"), Value::Okay);
    connection
}

/// `key` and `second` are held by `holder`.
#[track_caller]
fn hold(connection: &mut Raw) {
    assert_eq!(connection.say(RIGHTS), Value::Okay);
    connection.say("LOCK.ACQUIRE key holder LEASE 600000").token();
    connection.say("LOCK.ACQUIRE second holder LEASE 600000").token();
}

#[track_caller]
fn is_refused(reply: &Value) {
    assert!(reply.error().starts_with("NOPERM"), "{reply:?}");
}

#[test]
fn waiter_without_rights_is_refused_and_next_is_granted() {
    let server = Server::start();
    let mut connection = server.raw();
    for taken in TAKEN {
        for ends in ["LOCK.RELEASE key holder", "LOCK.FORCE key", "DEL key", "PEXPIRE key 1"] {
            hold(&mut connection);
            let (mut first, mut next) = (of_app(&server), server.raw());
            assert_eq!(first.begin("LOCK.ACQUIRE key first WAIT 0"), None);
            assert_eq!(next.begin("LOCK.ACQUIRE key next LEASE 600000 WAIT 0"), None);
            assert_eq!(connection.say(taken), Value::Okay);
            assert!(first.pending(), "it has lost nothing yet");
            connection.say(ends);
            is_refused(&arrives(&mut first));
            arrives(&mut next).token();
            assert_eq!(owners(&mut connection, "key"), ["next"], "{taken}, {ends}");
            connection.say("FLUSHALL");
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
    connection.say(TAKEN[0]);
    connection.say("LOCK.RELEASE key holder");
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
    for taken in TAKEN.into_iter().chain(["ACL SETUSER app resetkeys ~key"]) {
        hold(&mut connection);
        let (mut first, mut next) = (of_app(&server), server.raw());
        assert_eq!(first.begin("LOCK.MACQUIRE 3 key second free first WAIT 0"), None);
        assert_eq!(next.begin("LOCK.MACQUIRE 2 second key next LEASE 600000 WAIT 0"), None);
        connection.say(taken);
        connection.say("LOCK.RELEASE key holder");
        assert!(first.pending() && next.pending());
        connection.say("LOCK.RELEASE second holder");
        is_refused(&arrives(&mut first));
        arrives(&mut next).token();
        assert_eq!(owners(&mut connection, "key"), ["next"]);
        assert_eq!(connection.say("EXISTS free"), Value::Int(0), "{taken}");
        connection.say("FLUSHALL");
    }
}

#[test]
fn restored_rights_allow_grant() {
    let server = Server::start();
    let mut connection = server.raw();
    hold(&mut connection);
    let mut first = of_app(&server);
    assert_eq!(first.begin("LOCK.ACQUIRE key first WAIT 0"), None);
    connection.say(TAKEN[0]);
    connection.say("ACL SETUSER app ~key +lock.acquire");
    connection.say("LOCK.RELEASE key holder");
    arrives(&mut first).token();
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
    assert_eq!(connection.say("ACL DELUSER app"), Value::Int(1));
    connection.say("LOCK.RELEASE key holder");
    connection.say("LOCK.RELEASE second holder");
    arrives(&mut next).token();
    arrives(&mut last).token();
    assert!(one.read().is_err() && several.read().is_err(), "their connections are closed, nothing was granted");
    for (key, owner) in [("key", "next"), ("second", "last")] {
        assert_eq!(owners(&mut connection, key), [owner]);
        assert!(waiters(&mut connection, key).is_empty());
    }
}

/// A session of the user that waits for `key`, and for `key` and `second`.
fn session(server: &Server) -> Raw {
    let (mut session, mut sender) = (of_app(server), of_app(server));
    let id = session.say("LOCK.SESSION").field("id").text();
    for line in ["LOCK.ACQUIRE key first", "LOCK.MACQUIRE 2 key second third"] {
        let reply = sender.say(&format!("{line} WAIT 0 LEASE 600000 SESSION {id}"));
        assert_eq!(reply, Value::SimpleString("WAITING".into()));
    }
    session
}

#[test]
fn session_request_without_rights_is_refused() {
    let server = Server::start();
    let mut connection = server.raw();
    for taken in TAKEN {
        hold(&mut connection);
        let (mut session, mut next) = (session(&server), server.raw());
        assert_eq!(next.begin("LOCK.MACQUIRE 2 key second next LEASE 600000 WAIT 0"), None);
        connection.say(taken);
        connection.say("LOCK.RELEASE second holder");
        connection.say("LOCK.RELEASE key holder");
        arrives(&mut next).token();
        assert_eq!(owners(&mut connection, "key"), ["next"]);
        assert_eq!(owners(&mut connection, "second"), ["next"]);
        connection.say(RIGHTS); // So that it may ask for what has come meanwhile.
        let mut told = Vec::new();
        until(SOON, "both requests are refused", || {
            let events = session.say("LOCK.EVENTS");
            let new = if events.is_null() { &[] } else { events.items() };
            told.extend(new.iter().map(|event| [0, 3, 5].map(|at| event.items()[at].text())));
            told.len() >= 2
        });
        for ([kind, owner, detail], expected) in told.iter().zip(["first", "third"]) {
            assert_eq!((kind.as_str(), owner.as_str()), ("refused", expected));
            assert!(detail.starts_with("NOPERM"), "{detail}");
        }
        assert_eq!(told.len(), 2);
        connection.say("FLUSHALL");
    }
}

#[test]
fn session_of_deleted_user_is_granted_nothing() {
    let server = Server::start();
    let mut connection = server.raw();
    hold(&mut connection);
    let (mut session, mut next) = (session(&server), server.raw());
    assert_eq!(next.begin("LOCK.MACQUIRE 2 key second next LEASE 600000 WAIT 0"), None);
    assert_eq!(connection.say("ACL DELUSER app"), Value::Int(1));
    connection.say("LOCK.RELEASE key holder");
    connection.say("LOCK.RELEASE second holder");
    arrives(&mut next).token();
    assert!(session.read().is_err());
    assert_eq!(owners(&mut connection, "key"), ["next"]);
}
