//! A process whose connection broke names its new session for all that it has.

use redis::Value;
use support::{Server, until};

use super::session::{Event, Session, until_ended};
use crate::common::deadline;
use crate::speak::{Reply, holders, waiters};
use crate::waiter::{SOON, Speak, Tell, Waiter, assert_held};

#[test]
fn its_holds_and_waits_go_along() {
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

/// The server has not heard yet that the old connection is gone. When it does, nothing of what the new one has goes.
#[test]
fn before_the_server_has_noticed() {
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

/// A grant that the old session has not read: for as long as it may, the owner's other requests are refused and change
/// nothing. When it has ended, the grant is as if it had never been: the next in the queue has it, and the owner waits.
fn a_grant_that_was_not_read(line: &str) {
    let server = Server::start();
    let mut client = server.raw();
    let (old, mut new) = (Session::open(&server), Session::open(&server));
    client.take("LOCK.ACQUIRE key holder");
    old.wait(&mut client, "LOCK.ACQUIRE key owner HOLDS 1 WAIT 0 LEASE 3600000");
    client.order("LOCK.RELEASE key holder");
    let mut next = Waiter::start(&server, "key", "next");
    let before = (client.say("HGETALL key"), deadline(&mut client, b"key"));
    assert!(new.ask(&mut client, line).error().contains("is being confirmed"));
    assert_eq!((client.say("HGETALL key"), deadline(&mut client, b"key")), before);
    assert!(next.waits());
    let id = old.id.clone();
    old.raw.reset();
    until_ended(&mut client, &id);
    if line.starts_with("LOCK.RENEW") {
        assert_eq!(new.ask(&mut client, line), Value::Nil, "it holds no more");
    } else {
        new.wait(&mut client, line);
    }
    next.token();
    assert_held(&mut client, "key", "next");
    client.order("LOCK.RELEASE key next");
    if !line.starts_with("LOCK.RENEW") {
        let token = new.event().token_of(&["key"], "owner");
        let holder = holders(&mut client, "key").remove("owner").expect("it holds");
        assert_eq!((holder.field("holds"), holder.field("token")), (Value::Int(1), Value::Int(token)));
        assert_eq!(holder.field("client"), Value::Int(new.client), "and the tie is the new one's");
        client.order("LOCK.FORCE key");
        assert_eq!(new.event(), Event::lost("key", "owner", token, "forced"));
    }
    assert_eq!(client.say("EXISTS key"), Value::Int(0));
    new.hears_nothing(&mut client);
}

#[test]
fn a_grant_that_was_not_read_and_asked_for_again() {
    a_grant_that_was_not_read("LOCK.ACQUIRE key owner HOLDS 1 WAIT 0 WATCHDOG");
}

#[test]
fn a_grant_that_was_not_read_and_renewed() {
    a_grant_that_was_not_read("LOCK.RENEW key owner WATCHDOG");
}

#[test]
fn a_grant_that_was_not_read_and_re_entered() {
    a_grant_that_was_not_read("LOCK.ACQUIRE key owner WAIT 0 WATCHDOG");
}

/// The same of several keys.
#[test]
fn a_grant_of_several_keys_that_was_not_read_and_asked_for_again() {
    let server = Server::start();
    let mut client = server.raw();
    let (old, mut new) = (Session::open(&server), Session::open(&server));
    client.take("LOCK.ACQUIRE a holder");
    old.wait(&mut client, "LOCK.MACQUIRE 2 a b owner HOLDS 1 WAIT 0 LEASE 3600000");
    client.order("LOCK.RELEASE a holder");
    let unheard = client.say("HGET a #fence").text();
    let line = "LOCK.MACQUIRE 2 a b owner HOLDS 1 WAIT 0";
    assert!(new.ask(&mut client, line).error().contains("is being confirmed"));
    let id = old.id.clone();
    old.raw.reset();
    until_ended(&mut client, &id);
    let token = new.take(&mut client, line).to_string();
    assert_ne!(token, unheard, "as if it had never been granted");
    client.order("PING");
    client.order("PING");
    for key in ["a", "b"] {
        assert_held(&mut client, key, "owner");
        assert_eq!(client.say(&format!("HGET {key} #fence")).text(), token);
    }
    new.hears_nothing(&mut client);
}

/// The old connection ends and the new request comes in the same turn of the event loop, in either order: it is refused,
/// or granted as if the first one had never been.
#[test]
fn in_the_turn_in_which_the_old_connection_ends() {
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
        let token = match client.read().unwrap() {
            reply @ Value::ServerError(_) => {
                assert!(reply.error().contains("is being confirmed"), "round {round}: {reply:?}");
                until_ended(&mut client, &id);
                client.say(&line).token()
            }
            reply => reply.token(),
        };
        client.order("PING");
        client.order("PING");
        assert_ne!(token.to_string(), unheard, "round {round}");
        assert_held(&mut client, "key", "owner");
        assert_eq!(client.say("HGET key #fence").text(), token.to_string(), "round {round}");
        client.order("LOCK.RELEASE key owner");
    }
}

/// The same for a client that was blocked, and asks again over another connection.
#[test]
fn of_a_blocked_client_in_the_turn_in_which_it_ends() {
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
        if round % 2 == 0 {
            assert!(replies[1].error().contains("is being confirmed"), "round {round}: {replies:?}");
            assert_eq!(client.say("EXISTS key"), Value::Int(0), "it is taken back");
        } else {
            assert_held(&mut client, "key", "owner");
            assert_eq!(client.say("HGET key #fence").text(), replies[2].token().to_string(), "round {round}");
            client.order("LOCK.RELEASE key owner");
        }
    }
}
