//! `NEW`: no re-entry.

use redis::Value;
use support::Server;

use crate::common::Contents;
use crate::lines::{Commands, Reply, arrives, holders, waiters};

#[test]
fn new_returns_nil_when_owner_already_holds() {
    let server = Server::start();
    let mut connection = server.raw();
    let token = connection.run("LOCK.ACQUIRE key owner NEW LEASE 600000").token();
    connection.run("LOCK.ACQUIRE readers owner SHARED NEW LEASE 600000").token();
    connection.run("LOCK.MACQUIRE 2 a b owner NEW LEASE 600000").token();
    let before = Contents::read(&mut connection);
    for line in [
        "LOCK.ACQUIRE key owner NEW",
        "LOCK.ACQUIRE key owner NEW WAIT 0 LEASE 3600000",
        "LOCK.ACQUIRE key owner NEW LIMIT 2 WAIT 0",
        "LOCK.ACQUIRE readers owner SHARED NEW",
        "LOCK.ACQUIRE readers owner NEW WAIT 0",
        "LOCK.MACQUIRE 2 a b owner NEW WAIT 0",
        "LOCK.MACQUIRE 2 b free owner NEW WAIT 0",
        "LOCK.MACQUIRE 2 free b owner NEW",
    ] {
        assert!(connection.run(line).is_null(), "{line}");
        assert_eq!(Contents::read(&mut connection), before, "{line}");
    }
    assert!(connection.run("LOCK.TOP").items().is_empty(), "nobody waits");
    assert_eq!(server.info("holdfast", "holdfast_refusals").as_deref(), Some("8"));
    assert_eq!(connection.run("LOCK.RELEASE key owner"), Value::Int(1), "one hold");
    assert!(connection.run("LOCK.ACQUIRE key owner NEW").token() > token);
}

#[test]
fn new_excludes_holds() {
    let server = Server::start();
    let mut connection = server.raw();
    for line in [
        "LOCK.ACQUIRE key owner HOLDS 1 NEW",
        "LOCK.ACQUIRE key owner NEW HOLDS 2",
        "LOCK.MACQUIRE 1 key owner NEW HOLDS 2",
    ] {
        let error = connection.run(line).error();
        assert!(error.starts_with("ERR") && error.contains("HOLDS") && error.contains("NEW"), "{line}: {error}");
    }
    for line in ["LOCK.RELEASE key owner NEW", "LOCK.RENEW key owner NEW", "LOCK.ACQUIRE key owner NEW NEW"] {
        assert!(connection.run(line).error().starts_with("ERR"), "{line}");
    }
    assert_eq!(connection.run("DBSIZE"), Value::Int(0));
}

/// Two requests of one owner wait, each with `NEW`. The second takes over the place, and one is granted.
#[test]
fn last_of_two_waiting_new_requests_is_granted() {
    let server = Server::start();
    let (mut one, mut other, mut viewer) = (server.raw(), server.raw(), server.raw());
    for what in ["ACQUIRE key", "MACQUIRE 2 key more"] {
        viewer.run("LOCK.ACQUIRE key holder LEASE 600000").token();
        for waiter in [&mut one, &mut other] {
            assert_eq!(waiter.begin(&format!("LOCK.{what} owner NEW LEASE 600000 WAIT 0")), None, "{what}");
        }
        assert!(arrives(&mut one).error().starts_with("SUPERSEDED "), "{what}");
        assert_eq!(waiters(&mut viewer, "key"), ["owner"]);
        assert_eq!(viewer.run("LOCK.RELEASE key holder"), Value::Int(1));
        arrives(&mut other).token();
        assert_eq!(holders(&mut viewer, "key")["owner"].field("holds").int(), 1, "{what}");
        viewer.run("FLUSHALL");
    }
    assert_eq!(server.info("holdfast", "holdfast_timeouts").as_deref(), Some("0"));
}
