//! Sessions that do not read: which of their leases are renewed, and when the server closes them.

use std::time::{Duration, Instant};

use redis::Value;
use support::{NotBefore, Raw, Server, eventually, until};

use super::session::{A_WHILE, Event, Session, until_ended};
use crate::common::{deadline, unix_micros};
use crate::lines::Reply;
use crate::waiter::{Commands, SOON, assert_held};

/// Waits until the hold's remaining lease is at most `left`.
#[track_caller]
fn until_left(client: &mut Raw, key: &str, left: i64) {
    until(SOON, "most of the lease has passed", || deadline(client, key.as_bytes()) - unix_micros() / 1000 <= left);
}

#[test]
fn holds_of_silent_session_expire() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    for terms in ["", " LIMIT 3", " SHARED"] {
        let token = session.get_token(&mut client, &format!("LOCK.ACQUIRE key owner WATCHDOG LEASE 600{terms}"));
        let end = deadline(&mut client, b"key");
        until(SOON, "the lease expires", || {
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
        session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 3000");
        for _ in 0..2 {
            let before = deadline(&mut client, b"key");
            until(SOON, how, || {
                let reply = session.raw.run(how);
                assert!(!matches!(reply, Value::ServerError(_)), "{reply:?}");
                deadline(&mut client, b"key") > before
            });
        }
        assert_held(&mut client, "key", "owner");
        client.run_ok("DEL key");
    }
}

/// When a session reads late, overdue holds are renewed immediately.
#[test]
fn late_reader_loses_nothing() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    for key in ["one", "two"] {
        session.get_token(&mut client, &format!("LOCK.ACQUIRE {key} owner WATCHDOG LEASE 6000"));
    }
    session.get_token(&mut client, "LOCK.ACQUIRE long owner WATCHDOG LEASE 600000");
    let long = deadline(&mut client, b"long");
    // A renewal is due after a third of the lease.
    until_left(&mut client, "two", 3500);
    let before = ["one", "two"].map(|key| (key, deadline(&mut client, key.as_bytes())));
    assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil);
    for (key, before) in before {
        until(SOON, "the lease is renewed", || deadline(&mut client, key.as_bytes()) > before);
    }
    assert_eq!(deadline(&mut client, b"long"), long, "its renewal was not due");
}

/// Without `HEARTBEAT`, nil comes when a heartbeat would be due, so that the session reads again.
#[test]
fn reader_without_timeout_gets_nil_in_time() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    session.listen(&server);
    session.get_token(&mut client, "LOCK.ACQUIRE ephemeral owner EPHEMERAL LEASE 80000");
    assert!(!eventually(A_WHILE, || !session.raw.pending()), "nothing is renewed");
    session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 80000");
    assert_eq!(session.raw.read().expect("a reply"), Value::Nil, "nil, in time for the renewals");
    session.get_token(&mut client, "LOCK.ACQUIRE other owner WATCHDOG LEASE 4000");
    for line in ["LOCK.EVENTS WAIT 0", "LOCK.EVENTS WAIT 100000"] {
        let due = NotBefore::millis(499);
        assert_eq!(session.raw.run(line), Value::Nil);
        due.is_over(line);
    }
}

#[test]
fn session_that_stops_reading_heartbeats_is_closed() {
    let server = Server::start();
    let mut client = server.raw();
    client.run_ok("CONFIG SET holdfast.default-lease 1600");
    client.get_token("LOCK.ACQUIRE key holder");
    let (mut silent, mut asks, mut mute) = (Session::open(&server), Session::open(&server), Session::open(&server));
    silent.wait(&mut client, "LOCK.ACQUIRE key ghost WAIT 0");
    silent.get_token(&mut client, "LOCK.ACQUIRE mine ghost EPHEMERAL LEASE 600000");
    // No interval was promised to this session.
    assert_eq!(mute.raw.run("LOCK.EVENTS"), Value::Nil);
    asks.raw.run("LOCK.EVENTS HEARTBEAT");
    // The promised interval of 200 ms, and the default lease.
    let due = NotBefore::millis(1799);
    silent.raw.run("LOCK.EVENTS HEARTBEAT");
    let id = silent.id.clone();
    let ended = || matches!(server.raw().run(&format!("LOCK.ACQUIRE none none SESSION {id}")), Value::ServerError(_));
    until(SOON, "the session is closed", || {
        asks.raw.run("LOCK.EVENTS WAIT 20 HEARTBEAT");
        ended()
    });
    due.is_over("the end of the session");
    until_ended(&mut client, &silent.id);
    assert!(silent.raw.read().is_err(), "its connection is closed");
    until(SOON, "its ephemeral hold is released", || client.run("EXISTS mine") == Value::Int(0));
    client.run_ok("LOCK.RELEASE key holder");
    assert_eq!(client.run("EXISTS key"), Value::Int(0), "the closed session's request is not granted");
    assert_eq!(mute.raw.run("LOCK.EVENTS"), Value::Nil);
    assert!(!matches!(asks.raw.run("LOCK.EVENTS HEARTBEAT"), Value::ServerError(_)));
}

/// However short the default lease is.
#[test]
fn session_is_never_closed_within_a_second() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    client.run_ok("CONFIG SET holdfast.default-lease 1");
    session.get_token(&mut client, "LOCK.ACQUIRE key owner LEASE 600000");
    let due = NotBefore::millis(1009);
    session.raw.run("LOCK.EVENTS HEARTBEAT");
    until_ended(&mut client, &session.id);
    due.is_over("the end of the session");
}

/// A session without bindings and waits is not closed; its time starts with the first of them.
#[test]
fn idle_session_is_not_closed() {
    let server = Server::start();
    let (mut client, mut idle, mut busy) = (server.raw(), Session::open(&server), Session::open(&server));
    client.run_ok("CONFIG SET holdfast.default-lease 1000");
    idle.raw.run("LOCK.EVENTS HEARTBEAT");
    busy.get_token(&mut client, "LOCK.ACQUIRE busy owner LEASE 600000");
    busy.raw.run("LOCK.EVENTS HEARTBEAT");
    // By then, this session would have been closed too.
    until_ended(&mut client, &busy.id);
    idle.get_token(&mut client, "LOCK.ACQUIRE key owner LEASE 600000");
    assert_eq!(idle.raw.run("PING"), Value::SimpleString("PONG".into()));
    let due = NotBefore::millis(900);
    until_ended(&mut client, &idle.id);
    due.is_over("the end of the session");
}

/// It can't read events meanwhile.
#[test]
fn session_blocked_in_other_command_is_not_closed() {
    let server = Server::start();
    let (mut client, mut session, mut busy) = (server.raw(), Session::open(&server), Session::open(&server));
    client.run_ok("CONFIG SET holdfast.default-lease 1000");
    for one in [&mut session, &mut busy] {
        let line = format!("LOCK.ACQUIRE key-{} owner LEASE 600000", one.client);
        one.get_token(&mut client, &line);
        one.raw.run("LOCK.EVENTS HEARTBEAT");
    }
    session.raw.send_line("BLPOP list 0");
    until_ended(&mut client, &busy.id);
    client.run_ok("RPUSH list x");
    assert_eq!(session.raw.read().expect("the session is open").items().len(), 2);
    assert_eq!(session.raw.run("LOCK.EVENTS HEARTBEAT").items().len(), 1);
}

/// A paused server first reads what was sent meanwhile.
#[test]
fn server_reads_before_it_closes_sessions_after_a_pause() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    client.run_ok("CONFIG SET holdfast.default-lease 1000");
    session.get_token(&mut client, "LOCK.ACQUIRE mine owner LEASE 600000");
    session.raw.run("LOCK.EVENTS HEARTBEAT");
    server.stop();
    session.raw.send_line("LOCK.EVENTS WAIT 100");
    let end = Instant::now() + Duration::from_millis(1500);
    until(SOON, "the pause was long enough", || Instant::now() > end);
    server.cont();
    let reply = session.raw.read().expect("the session is open");
    assert_eq!(reply, Value::Nil);
    assert!(!session.withdraw(&mut client, "key", "owner"));
    assert_eq!(session.raw.run("LOCK.EVENTS HEARTBEAT").items().len(), 1);
}
