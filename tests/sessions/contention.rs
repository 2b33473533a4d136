//! `CONTENTION`: a session is told when somebody else wants what it holds, once.

use redis::Value;
use support::{Raw, Server};

use super::session::{Event, Session};
use crate::common::{deadline, error, info_number, int};
use crate::replicas::group::Group;
use crate::speak::{Reply, holders};
use crate::waiter::{Speak, Tell, Waiter, assert_held};

/// What another client may ask for who cannot have `key`.
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
            let token = session.take(&mut client, &format!("LOCK.ACQUIRE key owner {terms} CONTENTION"));
            session.hears_nothing(&mut client);
            session.listen(&server);
            assert_eq!(client.say(other), Value::Nil, "{other}");
            assert_eq!(session.heard(), [Event::contended("key", "owner", token)], "{terms}: {other}");
            for other in OTHERS {
                assert_eq!(client.say(other), Value::Nil);
            }
            session.hears_nothing(&mut client);
            assert_eq!(int(&client.say("LOCK.RELEASE key owner")), 1);
        }
    }
}

/// Not without the option, nor for a request that is granted, a re-entry, or a request for another key.
#[test]
fn contention_is_not_notified_without_cause() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    session.take(&mut client, "LOCK.ACQUIRE unasked owner WATCHDOG");
    session.take(&mut client, "LOCK.ACQUIRE shared owner SHARED");
    session.take(&mut client, "LOCK.ACQUIRE key owner CONTENTION");
    client.order("LOCK.ACQUIRE unasked other");
    assert_eq!(session.ask(&mut client, "LOCK.ACQUIRE key owner NEW CONTENTION"), Value::Nil);
    session.take(&mut client, "LOCK.ACQUIRE key owner");
    client.take("LOCK.ACQUIRE another other");
    client.order("SELECT 1");
    client.take("LOCK.ACQUIRE key other");
    client.order("LOCK.ACQUIRE key third");
    client.order("SELECT 0");
    client.order("LOCK.ACQUIRE shared other");
    session.hears_nothing(&mut client);
}

/// A request may already wait at the grant: `contended` follows immediately, and not before the grant.
#[test]
fn contended_follows_grant_when_a_request_waits() {
    let server = Server::start();
    let mut client = server.raw();
    for line in ["LOCK.ACQUIRE key owner WAIT 0 CONTENTION", "LOCK.MACQUIRE 2 other key owner WAIT 0 CONTENTION"] {
        let mut session = Session::open(&server);
        client.take("LOCK.ACQUIRE key holder");
        session.wait(&mut client, line);
        let mut next = Waiter::start(&server, "key", "next");
        client.order("LOCK.RELEASE key holder");
        let events = session.events(2);
        let token = events[0].token.expect("granted");
        assert_eq!((events[0].kind.as_str(), &events[1]), ("granted", &Event::contended("key", "owner", token)));
        client.order("LOCK.FORCE key");
        next.token();
        client.order("LOCK.FORCE key");
    }
}

/// A renewal asks again, also for another session; so does a re-entry.
#[test]
fn renewal_and_reentry_rearm_contention() {
    let server = Server::start();
    let mut client = server.raw();
    let (mut first, mut second) = (Session::open(&server), Session::open(&server));
    let token = first.take(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
    let mut waiting = Session::open(&server);
    waiting.wait(&mut client, "LOCK.ACQUIRE key other WAIT 0");
    first.hears_nothing(&mut client);
    for line in ["LOCK.RENEW key owner CONTENTION", "LOCK.ACQUIRE key owner HOLDS 1 CONTENTION"] {
        first.take(&mut client, line);
        assert_eq!(first.event(), Event::contended("key", "owner", token), "{line}");
    }
    second.take(&mut client, "LOCK.RENEW key owner CONTENTION");
    assert_eq!(first.event(), Event::unbound("key", "owner", token, "taken"));
    assert_eq!(second.event(), Event::contended("key", "owner", token));
    let renewed = second.ask(&mut client, "LOCK.MRENEW 1 key owner CONTENTION");
    assert_eq!(renewed, Value::Array(vec![Value::Int(token)]));
    assert_eq!(second.event(), Event::contended("key", "owner", token));
    assert_eq!(int(&client.say("LOCK.RELEASE key owner ALL")), 1);
    waiting.event().token_of(&["key"], "other");
}

/// While a grant is being confirmed, its session is not notified; then it is notified of the waiter.
#[test]
fn contended_follows_confirmed_grant() {
    let mut group = Group::of(1);
    let mut session = Session::open(&group.master);
    let mut other = Session::open(&group.master);
    group.stop_replicas();
    session.wait(&mut group.control, "LOCK.ACQUIRE key owner REPLICAS 1 CONTENTION");
    other.wait(&mut group.control, "LOCK.ACQUIRE key other WAIT 0");
    assert_eq!(session.raw.say("LOCK.EVENTS"), Value::Nil);
    group.cont_replicas();
    let events = session.events(2);
    let token = events[0].token.expect("granted");
    assert_eq!((events[0].kind.as_str(), &events[1]), ("granted", &Event::contended("key", "owner", token)));
    session.wait(&mut group.control, "LOCK.RENEW key owner REPLICAS 1 CONTENTION");
    let events = session.events(2);
    assert_eq!((events[0].kind.as_str(), &events[1]), ("granted", &Event::contended("key", "owner", token)));
    assert!(other.raw.say("LOCK.EVENTS") == Value::Nil);
}

/// `LOCK.INFO` shows that a holder may only cache the lock.
#[test]
fn info_shows_cached_lock() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    session.take(&mut client, "LOCK.ACQUIRE key owner CONTENTION");
    session.take(&mut client, "LOCK.ACQUIRE unasked owner");
    let contention = |client: &mut _, key| holders(client, key)["owner"].field("contention");
    assert_eq!((contention(&mut client, "key"), contention(&mut client, "unasked")), (Value::Int(1), Value::Int(0)));
    let kept = || info_number(&server, "holdfast", "holdfast_cached_locks");
    assert_eq!(kept(), 1);
    let mut waiting = Session::open(&server);
    waiting.wait(&mut client, "LOCK.ACQUIRE key other WAIT 0");
    // It was told, so it is kept no more: but it says who it was that kept it.
    assert_eq!((contention(&mut client, "key"), kept()), (Value::Int(1), 0));
    client.order("LOCK.RELEASE key owner");
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
            let reply = session.ask(client, line);
            assert!(error(&reply).1.contains("a lock that has one holder"), "{line}: {reply:?}");
        };
        refused(&format!("LOCK.ACQUIRE key owner {limit} CONTENTION"), &mut client);
        assert_eq!(client.say("EXISTS key"), Value::Int(0));
        session.take(&mut client, &format!("LOCK.ACQUIRE key owner {limit} LEASE 50000"));
        let before = deadline(&mut client, b"key");
        refused("LOCK.RENEW key owner LEASE 90000 CONTENTION", &mut client);
        assert_eq!(deadline(&mut client, b"key"), before, "nothing has changed");
        client.order("LOCK.FORCE key");
    }
}

#[test]
fn contention_needs_session() {
    let server = Server::start();
    let mut client = server.raw();
    for line in
        ["LOCK.ACQUIRE key owner CONTENTION", "LOCK.MACQUIRE 1 key owner CONTENTION", "LOCK.RENEW key owner CONTENTION"]
    {
        let reply = client.say(line);
        assert_eq!(error(&reply).0, "NOSESSION", "{line}");
    }
    assert_eq!(client.say("EXISTS key"), Value::Int(0));
}
