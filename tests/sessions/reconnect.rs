//! A process whose connection broke carries its holds and requests over to a new session.

use redis::Value;
use support::{Server, until};

use super::session::{Event, Session, until_ended};
use crate::lines::{Reply, holders, waiters};
use crate::waiter::{Commands, SOON, Waiter, assert_held};

#[test]
fn holds_and_waits_are_carried_over() {
    let server = Server::start();
    let mut client = server.raw();
    let old = Session::open(&server);
    let token = old.get_token(&mut client, "LOCK.ACQUIRE held owner WATCHDOG LEASE 5000");
    client.get_token("LOCK.ACQUIRE wanted holder");
    old.wait(&mut client, "LOCK.ACQUIRE wanted waiter HOLDS 1 WAIT 0");
    let id = old.id.clone();
    old.raw.reset();
    until_ended(&mut client, &id);

    let mut new = Session::open(&server);
    assert_eq!(new.get_token(&mut client, &format!("LOCK.RENEW held owner TOKEN {token} WATCHDOG LEASE 5000")), token);
    new.wait(&mut client, "LOCK.ACQUIRE wanted waiter HOLDS 1 WAIT 0");
    assert_eq!(holders(&mut client, "held")["owner"].field("client"), Value::Int(new.client));
    client.run_ok("LOCK.RELEASE wanted holder");
    new.event().token_of(&["wanted"], "waiter");
    client.run_ok("LOCK.FORCE held");
    assert_eq!(new.event(), Event::lost("held", "owner", token, "forced"));
}

/// When the server notices that the old connection is closed, the new session loses nothing.
#[test]
fn new_session_keeps_holds_when_old_one_closes_later() {
    let server = Server::start();
    let mut client = server.raw();
    let (old, mut new) = (Session::open(&server), Session::open(&server));
    let token = old.get_token(&mut client, "LOCK.ACQUIRE held owner WATCHDOG EPHEMERAL");
    client.get_token("LOCK.ACQUIRE wanted holder");
    old.wait(&mut client, "LOCK.ACQUIRE wanted waiter HOLDS 1 WAIT 0");
    new.get_token(&mut client, &format!("LOCK.RENEW held owner TOKEN {token} WATCHDOG"));
    new.wait(&mut client, "LOCK.ACQUIRE wanted waiter HOLDS 1 WAIT 0");
    let id = old.id.clone();
    old.raw.reset();
    until_ended(&mut client, &id);
    until(SOON, "one request waits", || waiters(&mut client, "wanted").len() == 1);
    assert_held(&mut client, "held", "owner");
    client.run_ok("LOCK.RELEASE wanted holder");
    new.event().token_of(&["wanted"], "waiter");
    assert_held(&mut client, "wanted", "waiter");
}

/// The old session has not read its grant, and the new one takes it over. When the old session ends, the hold stays, its
/// event is dropped, and the hold is not counted twice.
fn unread_grant_is_taken_over(line: &str, holds: i64) {
    let server = Server::start();
    let mut client = server.raw();
    let (old, mut new) = (Session::open(&server), Session::open(&server));
    client.get_token("LOCK.ACQUIRE a holder");
    old.wait(&mut client, "LOCK.MACQUIRE 2 a b owner HOLDS 1 WAIT 0 LEASE 3600000");
    client.run_ok("LOCK.RELEASE a holder");
    let mut next = Waiter::start(&server, "a", "next");
    let undelivered = client.run("HGET a #fence").text();
    let received = new.request(&mut client, line);
    let token = if let Value::Array(received) = &received { received[0].token() } else { received.token() };
    assert_eq!(token.to_string(), undelivered);
    let id = old.id.clone();
    old.raw.reset();
    until_ended(&mut client, &id);
    client.run_ok("PING");
    client.run_ok("PING");
    for key in ["a", "b"] {
        let holder = owner_holder(&mut client, key);
        assert_eq!((holder.field("holds"), holder.field("token")), (Value::Int(holds), Value::Int(token)));
        assert_eq!(holder.field("client"), Value::Int(new.client), "the hold is bound to the new session");
    }
    assert!(next.waits());
    client.run_ok("LOCK.FORCE a");
    next.token();
    assert_eq!(new.event(), Event::lost("a", "owner", token, "forced"));
}

fn owner_holder(client: &mut support::Raw, key: &str) -> Value {
    holders(client, key).remove("owner").expect("owner holds the lock")
}

#[test]
fn unread_grant_is_kept_by_repeated_request() {
    unread_grant_is_taken_over("LOCK.MACQUIRE 2 a b owner HOLDS 1 WAIT 0 WATCHDOG", 1);
}

#[test]
fn unread_grant_is_kept_by_renewal() {
    unread_grant_is_taken_over("LOCK.MRENEW 2 a b owner WATCHDOG", 1);
}

/// Of two holds, the undelivered one is revoked.
#[test]
fn unread_grant_is_reduced_after_reentry() {
    unread_grant_is_taken_over("LOCK.MACQUIRE 2 a b owner WAIT 0 WATCHDOG", 1);
}

/// The server handles the end of the old connection and the new request in one event-loop iteration, in either order.
/// It refuses the request, or grants it as if the first one had never been sent.
#[test]
fn repetition_in_iteration_of_old_disconnect() {
    let server = Server::start();
    let mut client = server.raw();
    for round in 0..40 {
        let (old, new) = (Session::open(&server), Session::open(&server));
        client.get_token("LOCK.ACQUIRE key holder");
        old.wait(&mut client, "LOCK.ACQUIRE key owner HOLDS 1 WAIT 0 LEASE 3600000");
        client.run_ok("LOCK.RELEASE key holder");
        let undelivered = client.run("HGET key #fence").text();
        let line = new.with_session("LOCK.ACQUIRE key owner HOLDS 1 WAIT 0 LEASE 3600000 EPHEMERAL");
        let (address, id) = (old.raw.local_addr(), old.id.clone());
        server.stop();
        if round % 2 == 0 {
            client.send_lines(&[&line]);
            old.raw.reset();
        } else {
            old.raw.reset();
            until(SOON, "the disconnect has reached the server", || server.has_lost(address));
            client.send_lines(&[&line]);
        }
        server.cont();
        let token = client.read().unwrap().token();
        until_ended(&mut client, &id);
        client.run_ok("PING");
        client.run_ok("PING");
        // A re-entry, or a new grant.
        assert!(token >= undelivered.parse().expect("a token"), "round {round}");
        assert_held(&mut client, "key", "owner");
        assert_eq!(client.run("HGET key #fence").text(), token.to_string(), "round {round}");
        client.run_ok("LOCK.RELEASE key owner");
    }
}

/// The same for a blocked client that repeats its request over another connection.
#[test]
fn repetition_in_iteration_of_blocked_clients_disconnect() {
    let server = Server::start();
    let mut client = server.raw();
    for round in 0..40 {
        client.get_token("LOCK.ACQUIRE key holder");
        let dying = Waiter::sending(&server, "LOCK.ACQUIRE key owner HOLDS 1 WAIT 0 LEASE 3600000");
        let kill = format!("CLIENT KILL ID {}", dying.id);
        let again = "LOCK.ACQUIRE key owner HOLDS 1 LEASE 3600000";
        let lines = if round % 2 == 0 {
            ["LOCK.RELEASE key holder", again, &kill]
        } else {
            ["LOCK.RELEASE key holder", &kill, again]
        };
        client.send_lines(&lines);
        let replies: Vec<Value> = lines.iter().map(|_| client.read().unwrap()).collect();
        client.run_ok("PING");
        client.run_ok("PING");
        // Whether it was killed before or after: the reply to the request still counts.
        let received = replies[if round % 2 == 0 { 1 } else { 2 }].token();
        assert_held(&mut client, "key", "owner");
        assert_eq!(client.run("HGET key #fence").text(), received.to_string(), "round {round}");
        client.run_ok("LOCK.RELEASE key owner");
    }
}
