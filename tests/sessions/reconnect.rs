//! A process whose connection broke names its new session for all that it has.

use redis::Value;
use support::{Server, until};

use super::session::{Event, Session, until_ended};
use crate::speak::{Reply, holders, waiters};
use crate::waiter::{SOON, Speak, Tell, assert_held};

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

/// A grant that the old session has not read, and that its owner asks for again on behalf of the new one: it is told there,
/// and stays when the old session ends.
#[test]
fn undelivered_grant_that_is_asked_for_again_stays() {
    let server = Server::start();
    let mut client = server.raw();
    for (keys, line) in [(1, "ACQUIRE a"), (2, "MACQUIRE 2 a b")] {
        let (old, mut new) = (Session::open(&server), Session::open(&server));
        client.take("LOCK.ACQUIRE a holder");
        old.wait(&mut client, &format!("LOCK.{line} owner HOLDS 1 WAIT 0 LEASE 3600000"));
        client.order("LOCK.RELEASE a holder");
        let granted = client.say("HGET a #fence").text();
        let token = new.take(&mut client, &format!("LOCK.{line} owner HOLDS 1 WAIT 0 LEASE 3600000"));
        assert_eq!(token.to_string(), granted);
        let id = old.id.clone();
        old.raw.reset();
        until_ended(&mut client, &id);
        client.order("PING");
        client.order("PING");
        for key in ["a", "b"].iter().take(keys) {
            assert_held(&mut client, key, "owner");
            assert_eq!(holders(&mut client, key)["owner"].field("client"), Value::Int(new.client));
        }
        new.hears_nothing(&mut client);
        client.order("DEL a b");
        new.events(keys);
    }
}
