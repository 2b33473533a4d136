//! `holdfast.max-session-bytes`, and the session counters of `INFO holdfast`.

use redis::Value;
use support::{Raw, Server, until};

use super::session::Session;
use crate::common::info_number;
use crate::lines::{Reply, arrives};
use crate::waiter::{Commands, SOON, assert_held, count_waiters};

/// A server with this limit on the bytes of a session's events.
fn with_limit(limit: u32) -> Server {
    Server::builder().module_args(&["max-session-bytes", &limit.to_string()]).start()
}

const FULL: &str = "ERR too many waits, bound holds and unread events of this session";

/// Makes requests until one is refused. Returns how many wait.
fn fill(session: &Session, client: &mut Raw, what: &str) -> usize {
    for number in 0.. {
        match session.request(client, &what.replace('?', &number.to_string())) {
            Value::ServerError(error) => {
                let message = format!("{} {}", error.code(), error.details().unwrap_or_default());
                assert!(message.starts_with(FULL) && message.contains("holdfast.max-session-bytes"), "{message}");
                return number;
            }
            reply => assert_ne!(reply, Value::Nil, "{number}"),
        }
    }
    0
}

#[test]
fn request_is_refused_when_its_events_might_not_fit() {
    let server = with_limit(20_000);
    let mut client = server.raw();
    let (mut session, other) = (Session::open(&server), Session::open(&server));
    client.get_token("LOCK.ACQUIRE key holder");
    let count = fill(&session, &mut client, "LOCK.ACQUIRE key owner-? WAIT 0");
    assert!((10..40).contains(&count), "{count}");
    assert!(session.request(&mut client, "LOCK.ACQUIRE free one-more").error().starts_with(FULL), "it would be bound");
    assert_eq!(session.request(&mut client, "LOCK.ACQUIRE key one-more"), Value::Nil, "it neither waits nor is bound");
    client.get_token("LOCK.ACQUIRE free one-more");
    other.wait(&mut client, "LOCK.ACQUIRE key one-more WAIT 0");
    // Reading an event makes room.
    assert!(session.withdraw(&mut client, "key", "owner-1"));
    session.event();
    session.wait(&mut client, "LOCK.ACQUIRE key again WAIT 0");
}

/// More keys need more bytes.
#[test]
fn request_for_many_keys_takes_more_bytes() {
    let server = with_limit(40_000);
    let mut client = server.raw();
    let session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE a holder");
    let several = fill(&session, &mut client, "LOCK.MACQUIRE 3 a b c owner-? WAIT 0");
    assert_eq!(info_number(&server, "holdfast", "holdfast_session_waits"), several as i64);
    let other = Session::open(&server);
    let single = fill(&other, &mut client, "LOCK.ACQUIRE a other-? WAIT 0");
    assert!(several * 2 < single, "{several} {single}");
}

/// All waits may end at the same time: no reader is disconnected, and all events are delivered.
#[test]
fn all_admitted_events_are_delivered() {
    let server = with_limit(200_000);
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    let count = fill(&session, &mut client, "LOCK.ACQUIRE key owner-? WAIT 0");
    client.run_ok("SET key text");
    until(SOON, "all requests are refused", || figures(&server)[1..] == [0, count as i64]);
    assert_eq!(session.events(count).len(), count);
    session.get_token(&mut client, "LOCK.ACQUIRE free owner");
}

/// A session that never reads would otherwise collect loss events forever.
#[test]
fn session_with_many_unread_events_gets_no_new_hold() {
    let server = with_limit(8_192);
    let mut client = server.raw();
    let mut session = Session::open(&server);
    session.get_token(&mut client, "LOCK.ACQUIRE kept owner");
    let mut lost = 0;
    while let Value::Int(_) = session.request(&mut client, "LOCK.ACQUIRE key owner") {
        client.run_ok("LOCK.FORCE key");
        lost += 1;
        assert!(lost < 100);
    }
    until(SOON, "the losses are in the event queue", || figures(&server)[2] == lost);
    for line in ["LOCK.ACQUIRE key owner", "LOCK.MACQUIRE 2 a b owner"] {
        assert!(session.request(&mut client, line).error().starts_with(FULL), "{line}");
    }
    assert_eq!(client.run("LOCK.FORCE kept"), Value::Int(1));
    // A loss of its existing hold is still notified.
    until(SOON, "the loss is in the event queue", || figures(&server)[2] == lost + 1);
    session.events(lost as usize + 1);
    session.get_token(&mut client, "LOCK.ACQUIRE key owner");
}

/// Otherwise it would lose its holds, though it reads all its events.
#[test]
fn full_session_renews_and_repeats_what_it_has() {
    let server = with_limit(4_096);
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE others holder");
    client.get_token("LOCK.ACQUIRE plain owner");
    assert!(fill(&session, &mut client, "LOCK.ACQUIRE key-? owner HOLDS 1 LEASE 600000") > 2);
    let token = client.run("HGET key-0 #fence").text();
    let renewal = format!("LOCK.RENEW key-0 owner TOKEN {token} LEASE 600000");
    for line in [&renewal, "LOCK.ACQUIRE key-0 owner HOLDS 1 LEASE 600000", &format!("{renewal} WATCHDOG CONTENTION")] {
        assert_eq!(session.get_token(&mut client, line).to_string(), token, "{line}");
        assert_eq!(session.raw.run(line).token().to_string(), token, "{line}");
    }
    assert_eq!(session.request(&mut client, "LOCK.MRENEW 2 key-0 key-1 owner").items().len(), 2);
    assert_eq!(session.raw.run("LOCK.RENEW plain owner").token(), client.get_token("LOCK.RENEW plain owner"));
    // Nothing is bound.
    for line in ["LOCK.ACQUIRE others owner", "LOCK.RENEW none owner"] {
        assert_eq!(session.request(&mut client, line), Value::Nil, "{line}");
    }
    for line in ["LOCK.RENEW plain owner", "LOCK.ACQUIRE new owner", "LOCK.ACQUIRE others owner WAIT 0"] {
        assert!(session.request(&mut client, line).error().starts_with(FULL), "{line}");
    }
    assert_eq!(client.run("EXISTS new"), Value::Int(0));
    session.raw.run(&format!("LOCK.RENEW key-0 owner TOKEN {token} UNBIND")).token();
    session.get_token(&mut client, "LOCK.ACQUIRE new owner");
}

#[test]
fn full_session_replaces_its_request() {
    let server = with_limit(4_096);
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    let count = fill(&session, &mut client, "LOCK.ACQUIRE key owner-? WAIT 0");
    session.wait(&mut client, "LOCK.ACQUIRE key owner-1 WAIT 0 LEASE 5000 WATCHDOG");
    assert!(session.request(&mut client, "LOCK.ACQUIRE key one-more WAIT 0").error().starts_with(FULL));
    assert_eq!(figures(&server), [1, count as i64, 0]);
    assert!(session.withdraw(&mut client, "key", "owner-1"));
    session.event();
    session.wait(&mut client, "LOCK.ACQUIRE key one-more WAIT 0");
    assert!(session.request(&mut client, "LOCK.ACQUIRE key another WAIT 0").error().starts_with(FULL));
}

/// Its hold will be bound, too.
#[test]
fn blocked_request_of_session_connection_counts() {
    let server = with_limit(4_096);
    let mut client = server.raw();
    let (mut blocked, other) = (Session::open(&server), Session::open(&server));
    client.get_token("LOCK.ACQUIRE busy holder");
    let free = fill(&other, &mut client, "LOCK.ACQUIRE o-? other-owner");
    for end in ["LOCK.RELEASE busy owner ALL", "LOCK.RELEASE busy holder"] {
        blocked.raw.send_line("LOCK.ACQUIRE busy owner WAIT 0");
        until(SOON, "it waits", || count_waiters(&mut client, "busy") == 1);
        assert_eq!(fill(&blocked, &mut client, "LOCK.ACQUIRE k-? owner") + 1, free, "{end}");
        client.run_ok(end);
        let reply = arrives(&mut blocked.raw);
        let is_granted = reply != Value::Nil;
        let refused = blocked.request(&mut client, "LOCK.ACQUIRE new owner");
        assert_eq!(matches!(refused, Value::ServerError(_)), is_granted, "{reply:?} {refused:?}");
        client.run("DEL new");
        for number in 0..free {
            client.run(&format!("LOCK.RELEASE k-{number} owner ALL"));
        }
        if !is_granted {
            blocked.event(); // The loss of `new`.
        }
    }
    assert_held(&mut client, "busy", "owner");
}

/// It would otherwise collect an event with each renewal.
#[test]
fn renewal_with_contention_is_refused_while_too_much_is_unread() {
    let server = with_limit(4_096);
    let mut client = server.raw();
    let (mut session, other) = (Session::open(&server), Session::open(&server));
    session.get_token(&mut client, "LOCK.ACQUIRE key owner CONTENTION");
    other.wait(&mut client, "LOCK.ACQUIRE key other WAIT 0");
    let mut count = 0;
    while let Value::Int(_) = session.request(&mut client, "LOCK.RENEW key owner CONTENTION") {
        count += 1;
        assert!(count < 100);
    }
    session.get_token(&mut client, "LOCK.RENEW key owner");
    session.next();
    session.get_token(&mut client, "LOCK.RENEW key owner CONTENTION");
}

#[test]
fn max_session_bytes_is_set_at_run_time() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    let setting = client.run("CONFIG GET holdfast.max-session-bytes");
    assert_eq!(setting.field("holdfast.max-session-bytes").text(), "134217728");
    client.run_ok("CONFIG SET holdfast.max-session-bytes 4096");
    client.get_token("LOCK.ACQUIRE key holder");
    fill(&session, &mut client, "LOCK.ACQUIRE key owner-? WAIT 0");
    client.run_ok("CONFIG SET holdfast.max-session-bytes 1000000");
    session.wait(&mut client, "LOCK.ACQUIRE key second WAIT 0");
    for wrong in ["0", "-1", "x"] {
        assert!(client.run(&format!("CONFIG SET holdfast.max-session-bytes {wrong}")).error().starts_with("ERR"));
    }
}

/// The session counters of `INFO holdfast`: open sessions, waits, unread events.
#[track_caller]
fn figures(server: &Server) -> [i64; 3] {
    ["sessions", "session_waits", "undelivered_events"]
        .map(|name| info_number(server, "holdfast", &format!("holdfast_{name}")))
}

#[test]
fn info_counts_session_bytes() {
    let server = Server::start();
    let mut client: Raw = server.raw();
    let (mut one, other) = (Session::open(&server), Session::open(&server));
    assert_eq!(figures(&server), [2, 0, 0]);
    client.get_token("LOCK.ACQUIRE key holder");
    one.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0");
    one.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0");
    assert_eq!(figures(&server), [2, 1, 0]);
    other.wait(&mut client, "LOCK.ACQUIRE key second WAIT 0");
    other.wait(&mut client, "LOCK.ACQUIRE key third WAIT 0");
    assert_eq!(figures(&server), [2, 3, 0]);
    client.run_ok("LOCK.RELEASE key holder");
    client.run_ok("LOCK.RELEASE key first ALL"); // This withdraws the request, too.
    assert_eq!(figures(&server), [2, 1, 2]);
    assert!(one.event().error_of(&["key"], "first").starts_with("CANCELLED "));
    assert_eq!(figures(&server), [2, 1, 1]);
    assert!(other.withdraw(&mut client, "key", "third"));
    assert_eq!(figures(&server), [2, 0, 2]);
    assert!(other.withdraw(&mut client, "key", "second"));
    assert_eq!(figures(&server), [2, 0, 2], "in place of its grant");
    one.raw.close();
    until(SOON, "one session has ended", || figures(&server) == [1, 0, 2]);
    assert_eq!(info_number(&server, "holdfast", "holdfast_grants_queued"), 2);
    assert_eq!(info_number(&server, "holdfast", "holdfast_timeouts"), 0);
}

#[test]
fn timeout_is_counted_once() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 10");
    session.event();
    assert_eq!(info_number(&server, "holdfast", "holdfast_timeouts"), 1);
    assert_eq!(session.raw.run("LOCK.EVENTS WAIT 10"), Value::Nil);
    assert_eq!(info_number(&server, "holdfast", "holdfast_timeouts"), 1, "LOCK.EVENTS does not count");
}
