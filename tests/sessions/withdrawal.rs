//! `LOCK.RELEASE … ALL` of a session's owner: it withdraws queued requests and undelivered grants.

use redis::Value;
use support::Server;

use super::session::{Event, Session};
use crate::common::info_number;
use crate::lines::{Reply, owners, waiters};
use crate::waiter::{Commands, Waiter, assert_held};

const CANCELLED: &str = "CANCELLED ";

/// The owner has no hold and no request.
#[track_caller]
fn assert_withdrawn(server: &Server, session: &Session, key: &str, owner: &str) {
    let mut client = server.raw();
    assert!(!waiters(&mut client, key).contains(&owner.to_owned()), "the owner has no request");
    assert!(!owners(&mut client, key).contains(&owner.to_owned()), "the owner holds nothing");
    assert!(!session.withdraw(&mut client, key, owner), "nothing is left to release");
}

#[test]
fn release_all_without_request_returns_nil() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    assert!(!session.withdraw(&mut client, "key", "owner"));
    session.assert_no_event(&mut client);
}

#[test]
fn withdrawn_request_is_notified_once() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    for line in ["LOCK.ACQUIRE key owner WAIT 0", "LOCK.ACQUIRE key owner WAIT 60000 WATCHDOG EPHEMERAL"] {
        session.wait(&mut client, line);
        assert!(session.withdraw(&mut client, "key", "owner"));
        assert!(session.event().error_of(&["key"], "owner").starts_with(CANCELLED));
        assert_withdrawn(&server, &session, "key", "owner");
        session.assert_no_event(&mut client);
    }
    client.run_ok("LOCK.RELEASE key holder");
    assert_eq!(client.run("EXISTS key"), Value::Int(0));
    assert_eq!(info_number(&server, "holdfast", "holdfast_session_waits"), 0);
}

#[test]
fn waiters_behind_withdrawn_request_are_served() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key reader SHARED");
    session.wait(&mut client, "LOCK.ACQUIRE key writer WAIT 0");
    session.wait(&mut client, "LOCK.ACQUIRE key second-reader SHARED WAIT 0");
    let mut third = Waiter::sending(&server, "LOCK.ACQUIRE key third-reader SHARED WAIT 0");
    assert!(session.withdraw(&mut client, "key", "writer"));
    let events = session.events(2);
    assert!(events[0].error_of(&["key"], "writer").starts_with(CANCELLED));
    assert!(events[1].token_of(&["key"], "second-reader") < third.token());
}

/// Whichever of its keys is named.
#[test]
fn request_for_several_keys_leaves_all_queues() {
    let server = Server::start();
    let mut client = server.raw();
    for named in ["a", "b", "c"] {
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE b holder");
        session.wait(&mut client, "LOCK.MACQUIRE 3 a b c owner WAIT 0");
        assert!(session.withdraw(&mut client, named, "owner"), "{named}");
        assert!(session.event().error_of(&["a", "b", "c"], "owner").starts_with(CANCELLED));
        for key in ["a", "b", "c"] {
            assert_eq!(waiters(&mut client, key), [""; 0], "{key}");
        }
        assert_withdrawn(&server, &session, named, "owner");
        client.run_ok("DEL a b c");
    }
}

/// `RELEASE ALL` overtakes the event, and replaces the undelivered grant.
#[test]
fn undelivered_grant_is_withdrawn() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let mut next = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0 WATCHDOG EPHEMERAL");
    next.wait(&mut client, "LOCK.ACQUIRE key next WAIT 0");
    client.run_ok("LOCK.RELEASE key holder");
    assert_held(&mut client, "key", "owner");
    assert!(session.withdraw(&mut client, "key", "owner"));
    next.event().token_of(&["key"], "next");
    assert!(session.event().error_of(&["key"], "owner").starts_with(CANCELLED));
    assert_withdrawn(&server, &session, "key", "owner");
    session.assert_no_event(&mut client);
}

#[test]
fn undelivered_grant_of_several_keys_is_withdrawn_whole() {
    let server = Server::start();
    let mut client = server.raw();
    for named in ["a", "b", "c"] {
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE b holder");
        session.wait(&mut client, "LOCK.MACQUIRE 3 a b c owner WAIT 0");
        client.run_ok("LOCK.RELEASE b holder");
        assert_eq!(client.run("EXISTS a b c"), Value::Int(3), "{named}");
        assert!(session.withdraw(&mut client, named, "owner"), "{named}");
        assert_eq!(client.run("EXISTS a b c"), Value::Int(0), "{named}");
        assert!(session.event().error_of(&["a", "b", "c"], "owner").starts_with(CANCELLED));
    }
}

/// An unread grant follows its locks into the other database.
#[test]
fn undelivered_grant_is_withdrawn_after_swapdb() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE a holder");
    session.wait(&mut client, "LOCK.MACQUIRE 2 a b owner WAIT 0");
    client.run_ok("LOCK.RELEASE a holder");
    client.run_ok("SWAPDB 0 1");
    client.run_ok("SELECT 1");
    assert_eq!(client.run("EXISTS a b"), Value::Int(2));
    assert!(session.withdraw(&mut client, "a", "owner"));
    assert_eq!(client.run("EXISTS a b"), Value::Int(0));
    assert!(session.event().error_of(&["a", "b"], "owner").starts_with(CANCELLED));
}

/// Only the named key is released.
#[test]
fn delivered_grant_is_released_key_by_key() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE b holder");
    session.wait(&mut client, "LOCK.MACQUIRE 3 a b c owner WAIT 0");
    client.run_ok("LOCK.RELEASE b holder");
    session.event().token_of(&["a", "b", "c"], "owner");
    assert!(session.withdraw(&mut client, "a", "owner"));
    assert_eq!(client.run("EXISTS a b c"), Value::Int(2));
    assert_eq!(client.run("LOCK.MRELEASE 3 a b c owner ALL").items(), [Value::Nil, Value::Int(1), Value::Int(1)]);
    session.assert_no_event(&mut client);
}

#[test]
fn other_unread_events_stay() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 50");
    support::until(crate::waiter::SOON, "the request times out", || waiters(&mut client, "key").is_empty());
    assert!(!session.withdraw(&mut client, "key", "owner"));
    assert_eq!(session.event(), Event::timeout(&["key"], "owner"));
    let token = session.get_token(&mut client, "LOCK.ACQUIRE lost owner WATCHDOG");
    client.run_ok("LOCK.FORCE lost");
    assert!(!session.withdraw(&mut client, "lost", "owner"));
    assert_eq!(session.event(), Event::lost("lost", "owner", token, "forced"));
}

/// A user that may release a lock may withdraw the request.
#[test]
fn request_is_withdrawn_over_any_connection() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    client.get_token("LOCK.ACQUIRE key holder");
    let mut blocked = Waiter::start(&server, "key", "blocked");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    let mut other = server.raw();
    for owner in ["blocked", "owner"] {
        assert_eq!(other.run(&format!("LOCK.RELEASE key {owner} ALL")), Value::Int(1));
    }
    assert_eq!(blocked.raw.read().expect("a reply"), Value::Nil);
    assert!(session.event().error_of(&["key"], "owner").starts_with(CANCELLED));
    assert_eq!(other.run("LOCK.RELEASE key owner ALL"), Value::Nil);
}
