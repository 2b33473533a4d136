//! A process whose connection broke names its new session for all that it has.

use redis::Value;
use support::{Server, until};

use super::session::{Event, Session, until_ended};
use crate::speak::{Reply, holders, waiters};
use crate::waiter::{SOON, Speak, Tell, Waiter, assert_held};

#[test]
fn holds_and_waits_are_carried_over() {
    let server = Server::start();
    let mut client = server.raw();
    let old = Session::open(&server);
    let token = old.take(&mut client, "LOCK.ACQUIRE held owner WATCHDOG LEASE 5000");
    client.take("LOCK.ACQUIRE wanted holder");
    old.wait(&mut client, "LOCK.ACQUIRE wanted waiter HOLDS 1 WAIT 0");
    let id = old.id.clone();
    old.raw.reset();
    until_ended(&mut client, &id);

    let mut new = Session::open(&server);
    assert_eq!(new.take(&mut client, &format!("LOCK.RENEW held owner TOKEN {token} WATCHDOG LEASE 5000")), token);
    new.wait(&mut client, "LOCK.ACQUIRE wanted waiter HOLDS 1 WAIT 0");
    assert_eq!(holders(&mut client, "held")["owner"].field("client"), Value::Int(new.client));
    client.order("LOCK.RELEASE wanted holder");
    new.event().token_of(&["wanted"], "waiter");
    client.order("LOCK.FORCE held");
    assert_eq!(new.event(), Event::lost("held", "owner", token, "forced"));
}

/// When the server notices that the old connection is closed, the new session loses nothing.
#[test]
fn new_session_keeps_holds_when_old_one_closes_later() {
    let server = Server::start();
    let mut client = server.raw();
    let (old, mut new) = (Session::open(&server), Session::open(&server));
    let token = old.take(&mut client, "LOCK.ACQUIRE held owner WATCHDOG EPHEMERAL");
    client.take("LOCK.ACQUIRE wanted holder");
    old.wait(&mut client, "LOCK.ACQUIRE wanted waiter HOLDS 1 WAIT 0");
    new.take(&mut client, &format!("LOCK.RENEW held owner TOKEN {token} WATCHDOG"));
    new.wait(&mut client, "LOCK.ACQUIRE wanted waiter HOLDS 1 WAIT 0");
    let id = old.id.clone();
    old.raw.reset();
    until_ended(&mut client, &id);
    until(SOON, "the old wait is gone", || waiters(&mut client, "wanted").len() == 1);
    assert_held(&mut client, "held", "owner");
    client.order("LOCK.RELEASE wanted holder");
    new.event().token_of(&["wanted"], "waiter");
    assert_held(&mut client, "wanted", "waiter");
}

/// A grant that the old session has not read. What the new session has been notified of stays when the old one has ended; its
/// event is not read any more, and nothing is counted twice.
fn a_grant_that_was_not_read(line: &str, holds: i64) {
    let server = Server::start();
    let mut client = server.raw();
    let (old, mut new) = (Session::open(&server), Session::open(&server));
    client.take("LOCK.ACQUIRE a holder");
    old.wait(&mut client, "LOCK.MACQUIRE 2 a b owner HOLDS 1 WAIT 0 LEASE 3600000");
    client.order("LOCK.RELEASE a holder");
    let mut next = Waiter::start(&server, "a", "next");
    let unheard = client.say("HGET a #fence").text();
    let told = new.ask(&mut client, line);
    let token = if let Value::Array(told) = &told { told[0].token() } else { told.token() };
    assert_eq!(token.to_string(), unheard);
    let id = old.id.clone();
    old.raw.reset();
    until_ended(&mut client, &id);
    client.order("PING");
    client.order("PING");
    for key in ["a", "b"] {
        let holder = support_holder(&mut client, key);
        assert_eq!((holder.field("holds"), holder.field("token")), (Value::Int(holds), Value::Int(token)));
        assert_eq!(holder.field("client"), Value::Int(new.client), "it is bound to the new one");
    }
    assert!(next.waits());
    client.order("LOCK.FORCE a");
    next.token();
    assert_eq!(new.event(), Event::lost("a", "owner", token, "forced"));
}

fn support_holder(client: &mut support::Raw, key: &str) -> Value {
    holders(client, key).remove("owner").expect("it holds")
}

#[test]
fn unread_grant_is_kept_by_repeated_request() {
    a_grant_that_was_not_read("LOCK.MACQUIRE 2 a b owner HOLDS 1 WAIT 0 WATCHDOG", 1);
}

#[test]
fn unread_grant_is_kept_by_renewal() {
    a_grant_that_was_not_read("LOCK.MRENEW 2 a b owner WATCHDOG", 1);
}

/// Of two holds, the undelivered one is revoked.
#[test]
fn unread_grant_is_reduced_after_reentry() {
    a_grant_that_was_not_read("LOCK.MACQUIRE 2 a b owner WAIT 0 WATCHDOG", 1);
}

/// The old connection ends and the new request comes in the same turn of the event loop, in either order: it is refused,
/// or granted as if the first one had never been.
#[test]
fn repetition_in_iteration_of_old_disconnect() {
    let server = Server::start();
    let mut client = server.raw();
    for round in 0..40 {
        let (old, new) = (Session::open(&server), Session::open(&server));
        client.take("LOCK.ACQUIRE key holder");
        old.wait(&mut client, "LOCK.ACQUIRE key owner HOLDS 1 WAIT 0 LEASE 3600000");
        client.order("LOCK.RELEASE key holder");
        let unheard = client.say("HGET key #fence").text();
        let line = new.naming("LOCK.ACQUIRE key owner HOLDS 1 WAIT 0 LEASE 3600000 EPHEMERAL");
        let (address, id) = (old.raw.local_addr(), old.id.clone());
        server.stop();
        if round % 2 == 0 {
            client.tell(&[&line]);
            old.raw.reset();
        } else {
            old.raw.reset();
            until(SOON, "the server's side has heard", || server.has_lost(address));
            client.tell(&[&line]);
        }
        server.cont();
        let token = client.read().unwrap().token();
        until_ended(&mut client, &id);
        client.order("PING");
        client.order("PING");
        // A re-entry, or granted anew.
        assert!(token >= unheard.parse().expect("a token"), "round {round}");
        assert_held(&mut client, "key", "owner");
        assert_eq!(client.say("HGET key #fence").text(), token.to_string(), "round {round}");
        client.order("LOCK.RELEASE key owner");
    }
}

/// The same for a blocked client that repeats its request over another connection.
#[test]
fn repetition_in_iteration_of_blocked_clients_disconnect() {
    let server = Server::start();
    let mut client = server.raw();
    for round in 0..40 {
        client.take("LOCK.ACQUIRE key holder");
        let dying = Waiter::sending(&server, "LOCK.ACQUIRE key owner HOLDS 1 WAIT 0 LEASE 3600000");
        let kill = format!("CLIENT KILL ID {}", dying.id);
        let again = "LOCK.ACQUIRE key owner HOLDS 1 LEASE 3600000";
        let lines = if round % 2 == 0 {
            ["LOCK.RELEASE key holder", again, &kill]
        } else {
            ["LOCK.RELEASE key holder", &kill, again]
        };
        client.tell(&lines);
        let replies: Vec<Value> = lines.iter().map(|_| client.read().unwrap()).collect();
        client.order("PING");
        client.order("PING");
        // Killed after that, or before it: what the request was told stays.
        let told = replies[if round % 2 == 0 { 1 } else { 2 }].token();
        assert_held(&mut client, "key", "owner");
        assert_eq!(client.say("HGET key #fence").text(), told.to_string(), "round {round}");
        client.order("LOCK.RELEASE key owner");
    }
}
