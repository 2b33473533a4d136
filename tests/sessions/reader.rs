//! A session that reads nothing: what is renewed for it, and when the server ends it.

use std::time::{Duration, Instant};

use redis::Value;
use support::{NotBefore, Raw, Server, eventually, until};

use super::session::{A_WHILE, Event, Session, until_ended};
use crate::common::{deadline, unix_micros};
use crate::speak::Reply;
use crate::waiter::{SOON, Speak, Tell, assert_held};

/// Reads what comes, with a `LOCK.EVENTS` always under way, until `end`.
fn read_until(session: &mut Session, how: &str, end: Instant) {
    while Instant::now() < end {
        let reply = session.raw.say(how);
        assert!(!matches!(reply, Value::ServerError(_)), "{reply:?}");
    }
}

/// Waits until so much or less is left of a hold.
#[track_caller]
fn until_left(client: &mut Raw, key: &str, left: i64) {
    until(SOON, "time passes", || deadline(client, key.as_bytes()) - unix_micros() / 1000 <= left);
}

#[test]
fn holds_of_silent_session_expire() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    for terms in ["", " LIMIT 3", " SHARED"] {
        let token = session.take(&mut client, &format!("LOCK.ACQUIRE key owner WATCHDOG LEASE 600{terms}"));
        let end = deadline(&mut client, b"key");
        until(SOON, "its lease runs out", || {
            let now = deadline(&mut client, b"key");
            assert!(now == end || now == -2, "renewed");
            now == -2
        });
        assert_eq!(session.event(), Event::lost("key", "owner", token, "expired"));
    }
}

#[test]
fn holds_are_renewed_while_session_reads() {
    let server = Server::start();
    for how in ["LOCK.EVENTS WAIT 0 HEARTBEAT", "LOCK.EVENTS WAIT 0", "LOCK.EVENTS WAIT 20"] {
        let (mut client, mut session) = (server.raw(), Session::open(&server));
        session.take(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 1200");
        read_until(&mut session, how, Instant::now() + Duration::from_millis(2600));
        assert_held(&mut client, "key", "owner");
        client.order("DEL key");
    }
}

/// When it reads late, overdue holds are renewed immediately.
#[test]
fn late_reader_loses_nothing() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    for key in ["one", "two"] {
        session.take(&mut client, &format!("LOCK.ACQUIRE {key} owner WATCHDOG LEASE 6000"));
    }
    session.take(&mut client, "LOCK.ACQUIRE long owner WATCHDOG LEASE 600000");
    let long = deadline(&mut client, b"long");
    // They were due after a third.
    until_left(&mut client, "two", 3500);
    let before = ["one", "two"].map(|key| (key, deadline(&mut client, key.as_bytes())));
    assert_eq!(session.raw.say("LOCK.EVENTS"), Value::Nil);
    for (key, before) in before {
        until(SOON, "it is renewed", || deadline(&mut client, key.as_bytes()) > before);
    }
    assert_eq!(deadline(&mut client, b"long"), long, "it was not due");
}

/// Without `HEARTBEAT`, nil comes when a heartbeat would be due, so that the session reads again.
#[test]
fn reader_without_timeout_gets_nil_in_time() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    session.listen(&server);
    session.take(&mut client, "LOCK.ACQUIRE ephemeral owner EPHEMERAL LEASE 80000");
    assert!(!eventually(A_WHILE, || !session.raw.pending()), "nothing is renewed");
    session.take(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 80000");
    assert_eq!(session.raw.read().expect("a reply"), Value::Nil, "it would have come too late");
    session.take(&mut client, "LOCK.ACQUIRE other owner WATCHDOG LEASE 4000");
    for line in ["LOCK.EVENTS WAIT 0", "LOCK.EVENTS WAIT 100000"] {
        let due = NotBefore::millis(499);
        assert_eq!(session.raw.say(line), Value::Nil);
        due.is_over(line);
    }
}

#[test]
fn session_that_stops_reading_heartbeats_is_closed() {
    let server = Server::start();
    let mut client = server.raw();
    client.order("CONFIG SET holdfast.default-lease 1600");
    client.take("LOCK.ACQUIRE key holder");
    let (mut silent, mut asks, mut mute) = (Session::open(&server), Session::open(&server), Session::open(&server));
    silent.wait(&mut client, "LOCK.ACQUIRE key ghost WAIT 0");
    silent.take(&mut client, "LOCK.ACQUIRE mine ghost EPHEMERAL LEASE 600000");
    // This one was promised nothing.
    assert_eq!(mute.raw.say("LOCK.EVENTS"), Value::Nil);
    asks.raw.say("LOCK.EVENTS HEARTBEAT");
    // 200 ms within which an answer was promised, and the default lease.
    let due = NotBefore::millis(1799);
    silent.raw.say("LOCK.EVENTS HEARTBEAT");
    let id = silent.id.clone();
    let ended = || matches!(server.raw().say(&format!("LOCK.ACQUIRE none none SESSION {id}")), Value::ServerError(_));
    until(SOON, "it is ended", || {
        asks.raw.say("LOCK.EVENTS WAIT 20 HEARTBEAT");
        ended()
    });
    due.is_over("the end of the session");
    until_ended(&mut client, &silent.id);
    assert!(silent.raw.read().is_err(), "its connection is closed");
    until(SOON, "its ephemeral hold is released", || client.say("EXISTS mine") == Value::Int(0));
    client.order("LOCK.RELEASE key holder");
    assert_eq!(client.say("EXISTS key"), Value::Int(0), "nothing is granted to a ghost");
    assert_eq!(mute.raw.say("LOCK.EVENTS"), Value::Nil);
    assert!(!matches!(asks.raw.say("LOCK.EVENTS HEARTBEAT"), Value::ServerError(_)));
}

/// However short the default lease is.
#[test]
fn session_is_never_closed_within_a_second() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    client.order("CONFIG SET holdfast.default-lease 1");
    session.take(&mut client, "LOCK.ACQUIRE key owner LEASE 600000");
    let due = NotBefore::millis(1009);
    session.raw.say("LOCK.EVENTS HEARTBEAT");
    until_ended(&mut client, &session.id);
    due.is_over("the end of the session");
}

/// A session without bindings and waits is not closed; its time starts with the first of them.
#[test]
fn idle_session_is_not_closed() {
    let server = Server::start();
    let (mut client, mut idle, mut busy) = (server.raw(), Session::open(&server), Session::open(&server));
    client.order("CONFIG SET holdfast.default-lease 1000");
    idle.raw.say("LOCK.EVENTS HEARTBEAT");
    busy.take(&mut client, "LOCK.ACQUIRE busy owner LEASE 600000");
    busy.raw.say("LOCK.EVENTS HEARTBEAT");
    // This one would have been ended by then, too.
    until_ended(&mut client, &busy.id);
    idle.take(&mut client, "LOCK.ACQUIRE key owner LEASE 600000");
    assert_eq!(idle.raw.say("PING"), Value::SimpleString("PONG".into()));
    let due = NotBefore::millis(900);
    until_ended(&mut client, &idle.id);
    due.is_over("the end of the session");
}

/// It can't read events meanwhile.
#[test]
fn session_blocked_in_other_command_is_not_closed() {
    let server = Server::start();
    let (mut client, mut session, mut busy) = (server.raw(), Session::open(&server), Session::open(&server));
    client.order("CONFIG SET holdfast.default-lease 1000");
    for one in [&mut session, &mut busy] {
        let line = format!("LOCK.ACQUIRE key-{} owner LEASE 600000", one.client);
        one.take(&mut client, &line);
        one.raw.say("LOCK.EVENTS HEARTBEAT");
    }
    session.raw.post("BLPOP list 0");
    until_ended(&mut client, &busy.id);
    client.order("RPUSH list x");
    assert_eq!(session.raw.read().expect("it lives").items().len(), 2);
    assert_eq!(session.raw.say("LOCK.EVENTS HEARTBEAT").items().len(), 1);
}

/// A paused server first reads what was sent meanwhile.
#[test]
fn server_reads_before_it_closes_sessions_after_a_pause() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    client.order("CONFIG SET holdfast.default-lease 1000");
    session.take(&mut client, "LOCK.ACQUIRE mine owner LEASE 600000");
    session.raw.say("LOCK.EVENTS HEARTBEAT");
    server.stop();
    session.raw.post("LOCK.EVENTS WAIT 100");
    let end = Instant::now() + Duration::from_millis(1500);
    until(SOON, "it was paused long enough", || Instant::now() > end);
    server.cont();
    let reply = session.raw.read().expect("the session lives");
    assert_eq!(reply, Value::Nil);
    assert!(!session.withdraw(&mut client, "key", "owner"));
    assert_eq!(session.raw.say("LOCK.EVENTS HEARTBEAT").items().len(), 1);
}
