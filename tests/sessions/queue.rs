//! One queue: blocked clients and requests of sessions are queued together, in order of arrival.

use redis::Value;
use support::{Raw, Server};

use super::session::{Event, Session};
use crate::lines::{Reply, waiters};
use crate::waiter::{Commands, Waiter, assert_held, until_no_waiters};

#[test]
fn queue_serves_sessions_and_clients_in_order_of_arrival() {
    let server = Server::start();
    let mut client = server.raw();
    let (mut one, mut other) = (Session::open(&server), Session::open(&server));
    client.get_token("LOCK.ACQUIRE key holder");
    let mut first = Waiter::start(&server, "key", "first");
    one.wait(&mut client, "LOCK.ACQUIRE key second WAIT 0");
    let mut third = Waiter::start(&server, "key", "third");
    other.wait(&mut client, "LOCK.ACQUIRE key fourth WAIT 0");
    one.wait(&mut client, "LOCK.ACQUIRE key fifth WAIT 0");
    assert_eq!(waiters(&mut client, "key"), ["first", "second", "third", "fourth", "fifth"]);
    client.run_ok("LOCK.RELEASE key holder");
    let mut tokens = vec![first.token()];
    client.run_ok("LOCK.RELEASE key first");
    tokens.push(one.event().token_of(&["key"], "second"));
    assert!(third.waits());
    client.run_ok("LOCK.RELEASE key second");
    tokens.push(third.token());
    assert_eq!(other.raw.run("LOCK.EVENTS"), Value::Nil);
    client.run_ok("LOCK.RELEASE key third");
    tokens.push(other.event().token_of(&["key"], "fourth"));
    client.run_ok("LOCK.RELEASE key fourth");
    tokens.push(one.event().token_of(&["key"], "fifth"));
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
    until_no_waiters(&server);
}

#[test]
fn released_lock_goes_to_waiter_before_new_request() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key reader SHARED");
    session.wait(&mut client, "LOCK.ACQUIRE key writer WAIT 0");
    assert_eq!(client.run("LOCK.ACQUIRE key newcomer SHARED"), Value::Nil);
    let mut behind = Waiter::sending(&server, "LOCK.ACQUIRE key second-reader SHARED WAIT 0");
    session.wait(&mut client, "LOCK.ACQUIRE key third-reader SHARED WAIT 0");
    client.run_ok("LOCK.RELEASE key reader");
    session.event().token_of(&["key"], "writer");
    assert!(behind.waits());
    client.run_ok("LOCK.RELEASE key writer");
    assert!(behind.token() < session.event().token_of(&["key"], "third-reader"));
}

#[test]
fn request_for_several_keys_keeps_its_position() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE a holder");
    session.wait(&mut client, "LOCK.MACQUIRE 2 a b both WAIT 0");
    let mut behind = Waiter::start(&server, "b", "behind");
    client.run_ok("LOCK.RELEASE a holder");
    session.event().token_of(&["a", "b"], "both");
    assert!(behind.waits());
    client.run_ok("LOCK.RELEASE b both");
    behind.token();
}

#[test]
fn lock_waiters_shows_session() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner LIMIT 3 WAIT 50000");
    let waiters = client.run("LOCK.WAITERS key");
    let [waiter] = waiters.items() else { panic!("{waiters:?}") };
    assert_eq!(waiter.field("owner").text(), "owner");
    assert_eq!(waiter.field("client"), Value::Int(session.client));
    assert_eq!(waiter.field("limit"), Value::Int(3));
    assert!((0..=50_000).contains(&waiter.field("remaining").int()));
    assert_eq!(client.run("LOCK.INFO key").field("waiters"), Value::Int(1));
    assert_eq!(client.run("LOCK.TOP").items()[0].field("waiters"), Value::Int(1));
}

#[test]
fn cycle_of_session_and_blocked_client_is_refused() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE a one LEASE 600000");
    client.get_token("LOCK.ACQUIRE b two LEASE 600000");
    let _blocked = Waiter::start(&server, "b", "one");
    let refused = session.request(&mut client, "LOCK.ACQUIRE a two WAIT 60000");
    assert!(refused.error().starts_with("DEADLOCK owner 'two'"), "{refused:?}");
    client.get_token("LOCK.ACQUIRE c three LEASE 600000");
    session.wait(&mut client, "LOCK.ACQUIRE c two WAIT 60000");
    let refused = client.run("LOCK.ACQUIRE b three WAIT 60000");
    assert!(refused.error().starts_with("DEADLOCK owner 'three'"), "{refused:?}");
}

/// Each lock is released when its grant has been read.
#[test]
fn thousand_requests_of_ten_sessions_are_granted_in_order() {
    const OWNERS: usize = 1000;
    let server = Server::start();
    let mut client = server.raw();
    let mut sessions: Vec<Session> = (0..10).map(|_| Session::open(&server)).collect();
    client.get_token("LOCK.ACQUIRE key holder");
    let lines: Vec<String> = (0..OWNERS)
        .map(|number| sessions[number % 10].with_session(&format!("LOCK.ACQUIRE key owner-{number} WAIT 0")))
        .collect();
    client.run_all(&lines);
    client.run_ok("LOCK.RELEASE key holder");
    let mut last = 0;
    for number in 0..OWNERS {
        let owner = format!("owner-{number}");
        let token = sessions[number % 10].event().token_of(&["key"], &owner);
        assert!(token > last);
        last = token;
        client.run_ok(&format!("LOCK.RELEASE key {owner}"));
    }
    assert_eq!(client.run("EXISTS key"), Value::Int(0));
    for session in &mut sessions {
        session.assert_no_event(&mut client);
    }
}

/// With an error or an event, depending on the client.
#[test]
fn all_waits_end_when_key_is_no_lock_any_more() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0");
    let mut second = Waiter::start(&server, "key", "second");
    session.wait(&mut client, "LOCK.ACQUIRE key third WAIT 0");
    client.run_ok("SET key text");
    assert_eq!(second.error(), "WRONGTYPE");
    let wrong = "WRONGTYPE Operation against a key holding the wrong kind of value";
    let expected = ["first", "third"].map(|owner| Event::refused(&["key"], owner, wrong));
    assert_eq!(session.events(2), expected);
}

fn pipelined(client: &mut Raw, lines: &[String]) -> Vec<Value> {
    client.run_all(lines)
}

/// All three in one event-loop iteration. An owner may withdraw an undelivered grant.
#[test]
fn hold_wait_and_release_in_one_packet() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let lines = [
        "LOCK.ACQUIRE key holder".into(),
        session.with_session("LOCK.ACQUIRE key first WAIT 0"),
        session.with_session("LOCK.ACQUIRE key second WAIT 0"),
        "LOCK.RELEASE key holder".into(),
        "LOCK.RELEASE key first ALL".into(),
        "LOCK.RELEASE key second HOLDS 0".into(),
        session.with_session("LOCK.ACQUIRE key third WAIT 0"),
    ];
    let replies = pipelined(&mut client, &lines);
    assert_eq!(replies[3..6], [1, 1, 1].map(Value::Int));
    replies[6].token();
    let events = session.events(2);
    for (event, owner) in events.iter().zip(["first", "second"]) {
        let refused = event.error_of(&["key"], owner);
        assert!(refused.starts_with("CANCELLED "), "{owner}: {refused}");
    }
    assert_held(&mut client, "key", "third");
    session.assert_no_event(&mut client);
}
