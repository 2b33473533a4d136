//! `CONTENTION`: a session is notified once when another client requests a lock that it holds.

use redis::Value;
use support::{Raw, Server};

use super::session::{Event, Session};
use crate::common::{deadline, error, info_number, int};
use crate::lines::{Reply, holders};
use crate::replicas::group::Group;
use crate::waiter::{Commands, Waiter, assert_held};

/// Requests of other clients that are not granted `key`.
const OTHERS: [&str; 5] = [
    "LOCK.ACQUIRE key other",
    "LOCK.ACQUIRE key other WAIT 10",
    "LOCK.ACQUIRE key other SHARED",
    "LOCK.MACQUIRE 2 free key other",
    "LOCK.MACQUIRE 2 free key other WAIT 10",
];

#[test]
fn refused_or_waiting_request_is_notified_once() {
    let server = Server::start();
    let mut client = server.raw();
    for terms in ["", "WATCHDOG", "EPHEMERAL", "LIMIT 1 LEASE 90000"] {
        for other in OTHERS {
            let mut session = Session::open(&server);
            let token = session.get_token(&mut client, &format!("LOCK.ACQUIRE key owner {terms} CONTENTION"));
            session.assert_no_event(&mut client);
            session.listen(&server);
            assert_eq!(client.run(other), Value::Nil, "{other}");
            assert_eq!(session.read_events(), [Event::contended("key", "owner", token)], "{terms}: {other}");
            for other in OTHERS {
                assert_eq!(client.run(other), Value::Nil);
            }
            session.assert_no_event(&mut client);
            assert_eq!(int(&client.run("LOCK.RELEASE key owner")), 1);
        }
    }
}

/// Without the option, for requests that are granted, for re-entries, and for other keys, there is no event.
#[test]
fn contention_is_not_notified_without_cause() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    session.get_token(&mut client, "LOCK.ACQUIRE unasked owner WATCHDOG");
    session.get_token(&mut client, "LOCK.ACQUIRE shared owner SHARED");
    session.get_token(&mut client, "LOCK.ACQUIRE key owner CONTENTION");
    client.run_ok("LOCK.ACQUIRE unasked other");
    assert_eq!(session.request(&mut client, "LOCK.ACQUIRE key owner NEW CONTENTION"), Value::Nil);
    session.get_token(&mut client, "LOCK.ACQUIRE key owner");
    client.get_token("LOCK.ACQUIRE another other");
    client.run_ok("SELECT 1");
    client.get_token("LOCK.ACQUIRE key other");
    client.run_ok("LOCK.ACQUIRE key third");
    client.run_ok("SELECT 0");
    client.run_ok("LOCK.ACQUIRE shared other");
    session.assert_no_event(&mut client);
}

/// A request may already wait at the grant: `contended` follows immediately, and not before the grant.
#[test]
fn contended_follows_grant_when_a_request_waits() {
    let server = Server::start();
    let mut client = server.raw();
    for line in ["LOCK.ACQUIRE key owner WAIT 0 CONTENTION", "LOCK.MACQUIRE 2 other key owner WAIT 0 CONTENTION"] {
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(&mut client, line);
        let mut next = Waiter::start(&server, "key", "next");
        client.run_ok("LOCK.RELEASE key holder");
        let events = session.events(2);
        let token = events[0].token.expect("granted");
        assert_eq!((events[0].kind.as_str(), &events[1]), ("granted", &Event::contended("key", "owner", token)));
        client.run_ok("LOCK.FORCE key");
        next.token();
        client.run_ok("LOCK.FORCE key");
    }
}

/// A renewal or a re-entry enables the event again, also for another session.
#[test]
fn renewal_and_reentry_rearm_contention() {
    let server = Server::start();
    let mut client = server.raw();
    let (mut first, mut second) = (Session::open(&server), Session::open(&server));
    let token = first.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
    let mut waiting = Session::open(&server);
    waiting.wait(&mut client, "LOCK.ACQUIRE key other WAIT 0");
    first.assert_no_event(&mut client);
    for line in ["LOCK.RENEW key owner CONTENTION", "LOCK.ACQUIRE key owner HOLDS 1 CONTENTION"] {
        first.get_token(&mut client, line);
        assert_eq!(first.event(), Event::contended("key", "owner", token), "{line}");
    }
    second.get_token(&mut client, "LOCK.RENEW key owner CONTENTION");
    assert_eq!(first.event(), Event::unbound("key", "owner", token, "taken"));
    assert_eq!(second.event(), Event::contended("key", "owner", token));
    let renewed = second.request(&mut client, "LOCK.MRENEW 1 key owner CONTENTION");
    assert_eq!(renewed, Value::Array(vec![Value::Int(token)]));
    assert_eq!(second.event(), Event::contended("key", "owner", token));
    assert_eq!(int(&client.run("LOCK.RELEASE key owner ALL")), 1);
    waiting.event().token_of(&["key"], "other");
}

/// While a grant is being confirmed, its session is not notified. Afterwards it is notified of the waiter.
#[test]
fn contended_follows_confirmed_grant() {
    let mut group = Group::of(1);
    let mut session = Session::open(&group.primary);
    let mut other = Session::open(&group.primary);
    group.stop_replicas();
    session.wait(&mut group.control, "LOCK.ACQUIRE key owner REPLICAS 1 CONTENTION");
    other.wait(&mut group.control, "LOCK.ACQUIRE key other WAIT 0");
    assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil);
    group.cont_replicas();
    let events = session.events(2);
    let token = events[0].token.expect("granted");
    assert_eq!((events[0].kind.as_str(), &events[1]), ("granted", &Event::contended("key", "owner", token)));
    session.wait(&mut group.control, "LOCK.RENEW key owner REPLICAS 1 CONTENTION");
    let events = session.events(2);
    assert_eq!((events[0].kind.as_str(), &events[1]), ("granted", &Event::contended("key", "owner", token)));
    assert!(other.raw.run("LOCK.EVENTS") == Value::Nil);
}

/// `LOCK.INFO` shows that the holder asked for contention events: the lock may be cached.
#[test]
fn info_shows_cached_lock() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    session.get_token(&mut client, "LOCK.ACQUIRE key owner CONTENTION");
    session.get_token(&mut client, "LOCK.ACQUIRE unasked owner");
    let contention = |client: &mut _, key| holders(client, key)["owner"].field("contention");
    assert_eq!((contention(&mut client, "key"), contention(&mut client, "unasked")), (Value::Int(1), Value::Int(0)));
    let kept = || info_number(&server, "holdfast", "holdfast_cached_locks");
    assert_eq!(kept(), 1);
    let mut waiting = Session::open(&server);
    waiting.wait(&mut client, "LOCK.ACQUIRE key other WAIT 0");
    // The session was notified, so the lock is not cached any more.
    assert_eq!((contention(&mut client, "key"), kept()), (Value::Int(1), 0));
    client.run_ok("LOCK.RELEASE key owner");
    waiting.event().token_of(&["key"], "other");
    assert_held(&mut client, "key", "other");
}

/// A lock with thousands of holders would need thousands of events in one command.
#[test]
fn contention_is_refused_for_shared_locks() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    for limit in ["SHARED", "LIMIT 2"] {
        let refused = |line: &str, client: &mut Raw| {
            let reply = session.request(client, line);
            assert!(error(&reply).1.contains("a lock that has one holder"), "{line}: {reply:?}");
        };
        refused(&format!("LOCK.ACQUIRE key owner {limit} CONTENTION"), &mut client);
        assert_eq!(client.run("EXISTS key"), Value::Int(0));
        session.get_token(&mut client, &format!("LOCK.ACQUIRE key owner {limit} LEASE 50000"));
        let before = deadline(&mut client, b"key");
        refused("LOCK.RENEW key owner LEASE 90000 CONTENTION", &mut client);
        assert_eq!(deadline(&mut client, b"key"), before, "nothing has changed");
        client.run_ok("LOCK.FORCE key");
    }
}

#[test]
fn contention_needs_session() {
    let server = Server::start();
    let mut client = server.raw();
    for line in
        ["LOCK.ACQUIRE key owner CONTENTION", "LOCK.MACQUIRE 1 key owner CONTENTION", "LOCK.RENEW key owner CONTENTION"]
    {
        let reply = client.run(line);
        assert_eq!(error(&reply).0, "NOSESSION", "{line}");
    }
    assert_eq!(client.run("EXISTS key"), Value::Int(0));
}
