//! `LOCK.RELEASE … ALL`: an owner releases what it holds and withdraws what it waits for.

use redis::Value;
use support::{Server, until};

use crate::common::{array, int, token};
use crate::replicas::group::Group;
use crate::sessions::session::{Session, events, waiting};
use crate::speak::{Reply, SOON, Speak, owners, waiters};
use crate::waiter::{Tell, Waiter, assert_held};

#[test]
fn release_all_ends_wait_of_another_connection() {
    let server = Server::start();
    let mut client = server.raw();
    client.take("LOCK.ACQUIRE key holder LEASE 600000");
    let mut waiter = Waiter::start(&server, "key", "owner");
    let mut behind = Waiter::start(&server, "key", "behind");
    assert_eq!(client.say("LOCK.RELEASE key owner ALL"), Value::Int(1));
    assert_eq!(waiter.end(), Value::Nil);
    assert_eq!(client.say("LOCK.RELEASE key owner ALL"), Value::Nil, "there is nothing any more");
    client.order("LOCK.RELEASE key holder");
    behind.token();
}

/// With a token, it is about the hold under this token only.
#[test]
fn release_all_with_token_leaves_the_wait() {
    let server = Server::start();
    let mut client = server.raw();
    client.take("LOCK.ACQUIRE key holder LEASE 600000");
    let mut waiter = Waiter::start(&server, "key", "owner");
    assert_eq!(client.say("LOCK.RELEASE key owner ALL TOKEN 7"), Value::Nil);
    assert_eq!(client.say("LOCK.RELEASE key owner"), Value::Nil);
    client.order("LOCK.RELEASE key holder");
    waiter.token();
}

/// Those behind it have their turn, in each queue.
#[test]
fn release_all_of_one_key_withdraws_request_for_several() {
    let server = Server::start();
    let mut client = server.raw();
    for named in ["a", "b", "c"] {
        client.take("LOCK.ACQUIRE b holder LEASE 600000");
        let mut waiter = Waiter::sending(&server, "LOCK.MACQUIRE 3 a b c owner WAIT 0");
        let mut behind = Waiter::sending(&server, "LOCK.ACQUIRE c behind WAIT 0");
        assert_eq!(client.say(&format!("LOCK.RELEASE {named} owner ALL")), Value::Int(1));
        assert_eq!(waiter.end(), Value::Nil);
        behind.token();
        for key in ["a", "b", "c"] {
            assert_eq!(waiters(&mut client, key), [""; 0], "{key}");
        }
        client.order("DEL a b c");
    }
}

#[test]
fn mrelease_all_reports_for_each_key_whether_it_ended_anything() {
    let server = Server::start();
    let mut client = server.raw();
    client.take("LOCK.ACQUIRE a holder LEASE 600000");
    client.take("LOCK.ACQUIRE d owner");
    let mut waiter = Waiter::sending(&server, "LOCK.MACQUIRE 2 a b owner WAIT 0");
    let told = client.say("LOCK.MRELEASE 4 a b c d owner ALL");
    assert_eq!(array(&told), [Value::Int(1), Value::Int(1), Value::Nil, Value::Int(1)]);
    assert_eq!(waiter.end(), Value::Nil);
}

#[test]
fn release_all_notifies_session_of_cancelled_request() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder LEASE 600000");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0 WATCHDOG");
    assert_eq!(client.say("LOCK.RELEASE key owner ALL"), Value::Int(1));
    let told = session.event().error_of(&["key"], "owner");
    assert!(told.starts_with("CANCELLED "), "{told}");
    client.order("LOCK.RELEASE key holder");
    assert_eq!(client.say("EXISTS key"), Value::Int(0));
    session.hears_nothing(&mut client);
}

/// † The grant is there, and its event was not read yet: the event tells the withdrawal instead.
#[test]
fn release_all_overtakes_granted_event() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    for named in ["a", "b"] {
        client.take("LOCK.ACQUIRE a holder LEASE 600000");
        session.wait(&mut client, "LOCK.MACQUIRE 2 a b owner WAIT 0 WATCHDOG");
        session.wait(&mut client, "LOCK.MACQUIRE 2 a b next WAIT 0");
        client.order("LOCK.RELEASE a holder");
        assert_held(&mut client, "a", "owner");
        assert_eq!(client.say(&format!("LOCK.RELEASE {named} owner ALL")), Value::Int(1));
        let told = session.events(2);
        let cancelled = told.iter().find(|event| event.owner == "owner").expect("it is told");
        assert!(cancelled.error_of(&["a", "b"], "owner").starts_with("CANCELLED "), "{told:?}");
        assert_held(&mut client, "b", "next");
        client.order("LOCK.MRELEASE 2 a b next");
    }
    session.hears_nothing(&mut client);
}

/// † What was delivered stands: only the named lock is released.
#[test]
fn release_all_of_one_key_leaves_delivered_others() {
    let server = Server::start();
    let mut client = server.raw();
    client.take("LOCK.MACQUIRE 2 a b owner LEASE 600000");
    assert_eq!(client.say("LOCK.RELEASE a owner ALL"), Value::Int(1));
    assert_eq!(owners(&mut client, "b"), ["owner"]);
}

/// † A request whose connection is dead was granted, and nobody knows: its owner withdraws it.
#[test]
fn release_all_ends_hold_of_stale_request() {
    let server = Server::start();
    let mut client = server.raw();
    client.take("LOCK.ACQUIRE key holder LEASE 600000");
    let stale = Waiter::start(&server, "key", "owner");
    client.order("LOCK.RELEASE key holder");
    until(SOON, "it is granted", || owners(&mut client, "key") == ["owner"]);
    assert_eq!(client.say("LOCK.RELEASE key owner ALL"), Value::Int(1));
    assert_eq!(client.say("EXISTS key"), Value::Int(0));
    drop(stale);
}

#[test]
fn release_all_during_confirmation_returns_unconfirmed() {
    let group = Group::of(1);
    let mut client = group.master.raw();
    group.stop_replicas();
    let mut waiter = group.waits("LOCK.ACQUIRE key owner LEASE 600000 REPLICAS 1");
    let mut session = Session::open(&group.master);
    assert_eq!(session.ask(&mut client, "LOCK.ACQUIRE other owner REPLICAS 1"), waiting());
    for key in ["key", "other"] {
        assert_eq!(client.say(&format!("LOCK.RELEASE {key} owner ALL")), Value::Int(1));
        assert_eq!(client.say(&format!("EXISTS {key}")), Value::Int(0));
    }
    assert_eq!(waiter.error(), "UNCONFIRMED");
    assert!(session.event().error_of(&["other"], "owner").starts_with("CANCELLED "));
    group.cont_replicas();
}

/// While replicas have yet to confirm a request of an owner, others of it queue behind it, and are judged as what they are
/// then.
#[test]
fn request_queues_behind_unconfirmed_one_of_its_owner() {
    for is_confirmed in [true, false] {
        let mut group = Group::of(1);
        if !is_confirmed {
            group.wait_for_replicas(1000);
        }
        let mut client = group.master.raw();
        group.stop_replicas();
        let mut first = group.waits("LOCK.ACQUIRE key owner LEASE 600000 REPLICAS 1");
        let refused = client.say("LOCK.ACQUIRE key owner").error();
        assert!(refused.starts_with("ERR another request of this owner for 'key' is being confirmed"), "{refused}");
        assert!(client.say("LOCK.RENEW key owner").error().contains("is being confirmed"));
        let mut second = group.waits("LOCK.ACQUIRE key owner WAIT 60000 LEASE 600000");
        if is_confirmed {
            group.cont_replicas();
            assert_eq!(second.token(), first.token(), "a re-entry");
            assert_eq!(client.say("LOCK.RELEASE key owner"), Value::Int(0));
        } else {
            assert_eq!(first.error(), "UNCONFIRMED");
            second.token();
            group.cont_replicas();
        }
        assert_eq!(client.say("LOCK.RELEASE key owner"), Value::Int(1), "the only hold");
    }
}

/// A release that leaves no hold is never refused.
#[test]
fn last_release_is_not_refused_during_confirmation() {
    let group = Group::of(1);
    let mut client = group.master.raw();
    let token = client.take("LOCK.ACQUIRE key owner LEASE 600000");
    client.take("LOCK.ACQUIRE key owner");
    group.stop_replicas();
    let mut renewal = group.waits("LOCK.RENEW key owner LEASE 60000 REPLICAS 1");
    assert!(client.say("LOCK.RELEASE key owner").error().contains("is being confirmed"), "it would leave one");
    assert_eq!(client.say(&format!("LOCK.RELEASE key owner TOKEN {token} HOLDS 0")), Value::Int(1));
    group.cont_replicas();
    assert_eq!(renewal.error(), "UNCONFIRMED");
}

/// The grant of a queued request stands in nobody's way.
#[test]
fn undelivered_grant_refuses_no_request() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0 LEASE 600000");
    client.order("LOCK.RELEASE key holder");
    let again = token(&client.say("LOCK.ACQUIRE key owner HOLDS 1"));
    assert_eq!(client.say(&format!("LOCK.RENEW key owner TOKEN {again}")), Value::Int(again));
    // The session ends without having read it: what the other request was told stays.
    drop(session);
    until(SOON, "it has ended", || server.info("holdfast", "holdfast_sessions").as_deref() == Some("0"));
    assert_eq!(int(&client.say(&format!("LOCK.RELEASE key owner TOKEN {again}"))), 1);
}

/// T2: a client that can have read a grant may use it, also where other threads write the replies.
#[test]
fn grant_that_was_read_can_be_released_with_io_threads() {
    const ROUNDS: usize = 2_000;
    let server = Server::builder().arg("io-threads", "4").start();
    let (mut client, mut other) = (server.raw(), server.raw());
    let mut session = Session::open(&server);
    for round in 0..ROUNDS {
        client.take("LOCK.ACQUIRE key holder LEASE 600000");
        session.wait(&mut client, &format!("LOCK.ACQUIRE key owner-{round} WAIT 0 LEASE 600000"));
        session.raw.tell(&["LOCK.EVENTS WAIT 0"]);
        client.tell(&["LOCK.RELEASE key holder"]);
        let told = events(&session.raw.read().expect("connection open"));
        let granted = told[0].token_of(&["key"], &format!("owner-{round}"));
        let released = other.say(&format!("LOCK.RELEASE key owner-{round} TOKEN {granted}"));
        assert_eq!(released, Value::Int(1), "round {round}");
        assert_eq!(client.read().expect("connection open"), Value::Int(1));
    }
}
