//! `LOCK.RELEASE … ALL`: an owner releases what it holds and withdraws what it waits for.

use redis::Value;
use support::{Server, until};

use crate::common::{array, int, token};
use crate::lines::{Commands, Reply, SOON, owners, waiters};
use crate::replicas::group::Group;
use crate::sessions::session::{Session, events, waiting};
use crate::waiter::{Waiter, assert_held};

#[test]
fn release_all_ends_wait_of_another_connection() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 600000");
    let mut waiter = Waiter::start(&server, "key", "owner");
    let mut behind = Waiter::start(&server, "key", "behind");
    assert_eq!(client.run("LOCK.RELEASE key owner ALL"), Value::Int(1));
    assert_eq!(waiter.end(), Value::Nil);
    assert_eq!(client.run("LOCK.RELEASE key owner ALL"), Value::Nil, "there is nothing any more");
    client.run_ok("LOCK.RELEASE key holder");
    behind.token();
}

/// With a token, it affects the hold with this token only.
#[test]
fn release_all_with_token_leaves_the_wait() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 600000");
    let mut waiter = Waiter::start(&server, "key", "owner");
    assert_eq!(client.run("LOCK.RELEASE key owner ALL TOKEN 7"), Value::Nil);
    assert_eq!(client.run("LOCK.RELEASE key owner"), Value::Nil);
    client.run_ok("LOCK.RELEASE key holder");
    waiter.token();
}

/// The requests behind it are granted, in each queue.
#[test]
fn release_all_of_one_key_withdraws_request_for_several() {
    let server = Server::start();
    let mut client = server.raw();
    for named in ["a", "b", "c"] {
        client.get_token("LOCK.ACQUIRE b holder LEASE 600000");
        let mut waiter = Waiter::sending(&server, "LOCK.MACQUIRE 3 a b c owner WAIT 0");
        let mut behind = Waiter::sending(&server, "LOCK.ACQUIRE c behind WAIT 0");
        assert_eq!(client.run(&format!("LOCK.RELEASE {named} owner ALL")), Value::Int(1));
        assert_eq!(waiter.end(), Value::Nil);
        behind.token();
        for key in ["a", "b", "c"] {
            assert_eq!(waiters(&mut client, key), [""; 0], "{key}");
        }
        client.run_ok("DEL a b c");
    }
}

#[test]
fn mrelease_all_reports_for_each_key_whether_it_ended_anything() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE a holder LEASE 600000");
    client.get_token("LOCK.ACQUIRE d owner");
    let mut waiter = Waiter::sending(&server, "LOCK.MACQUIRE 2 a b owner WAIT 0");
    let received = client.run("LOCK.MRELEASE 4 a b c d owner ALL");
    assert_eq!(array(&received), [Value::Int(1), Value::Int(1), Value::Nil, Value::Int(1)]);
    assert_eq!(waiter.end(), Value::Nil);
}

#[test]
fn release_all_notifies_session_of_cancelled_request() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder LEASE 600000");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0 WATCHDOG");
    assert_eq!(client.run("LOCK.RELEASE key owner ALL"), Value::Int(1));
    let received = session.event().error_of(&["key"], "owner");
    assert!(received.starts_with("CANCELLED "), "{received}");
    client.run_ok("LOCK.RELEASE key holder");
    assert_eq!(client.run("EXISTS key"), Value::Int(0));
    session.assert_no_event(&mut client);
}

/// The lock is granted, but its event is unread. The withdrawal replaces the event.
#[test]
fn release_all_overtakes_granted_event() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    for named in ["a", "b"] {
        client.get_token("LOCK.ACQUIRE a holder LEASE 600000");
        session.wait(&mut client, "LOCK.MACQUIRE 2 a b owner WAIT 0 WATCHDOG");
        session.wait(&mut client, "LOCK.MACQUIRE 2 a b next WAIT 0");
        client.run_ok("LOCK.RELEASE a holder");
        assert_held(&mut client, "a", "owner");
        assert_eq!(client.run(&format!("LOCK.RELEASE {named} owner ALL")), Value::Int(1));
        let received = session.events(2);
        let cancelled = received.iter().find(|event| event.owner == "owner").expect("the owner has an event");
        assert!(cancelled.error_of(&["a", "b"], "owner").starts_with("CANCELLED "), "{received:?}");
        assert_held(&mut client, "b", "next");
        client.run_ok("LOCK.MRELEASE 2 a b next");
    }
    session.assert_no_event(&mut client);
}

/// A delivered grant stays: only the named lock is released.
#[test]
fn release_all_of_one_key_leaves_delivered_others() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.MACQUIRE 2 a b owner LEASE 600000");
    assert_eq!(client.run("LOCK.RELEASE a owner ALL"), Value::Int(1));
    assert_eq!(owners(&mut client, "b"), ["owner"]);
}

/// A request on a dead connection was granted, and its client does not know. Its owner releases the lock.
#[test]
fn release_all_ends_hold_of_stale_request() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 600000");
    let stale = Waiter::start(&server, "key", "owner");
    client.run_ok("LOCK.RELEASE key holder");
    until(SOON, "the dead connection's request is granted", || owners(&mut client, "key") == ["owner"]);
    assert_eq!(client.run("LOCK.RELEASE key owner ALL"), Value::Int(1));
    assert_eq!(client.run("EXISTS key"), Value::Int(0));
    drop(stale);
}

#[test]
fn release_all_during_confirmation_returns_unconfirmed() {
    let group = Group::of(1);
    let mut client = group.primary.raw();
    group.stop_replicas();
    let mut waiter = group.waits("LOCK.ACQUIRE key owner LEASE 600000 REPLICAS 1");
    let mut session = Session::open(&group.primary);
    assert_eq!(session.request(&mut client, "LOCK.ACQUIRE other owner REPLICAS 1"), waiting());
    for key in ["key", "other"] {
        assert_eq!(client.run(&format!("LOCK.RELEASE {key} owner ALL")), Value::Int(1));
        assert_eq!(client.run(&format!("EXISTS {key}")), Value::Int(0));
    }
    assert_eq!(waiter.error(), "UNCONFIRMED");
    assert!(session.event().error_of(&["other"], "owner").starts_with("CANCELLED "));
    group.cont_replicas();
}

/// While replicas have yet to confirm a request of an owner, other requests of that owner queue behind it. They are decided
/// when it is complete.
#[test]
fn request_queues_behind_unconfirmed_one_of_its_owner() {
    for is_confirmed in [true, false] {
        let mut group = Group::of(1);
        if !is_confirmed {
            group.wait_for_replicas(1000);
        }
        let mut client = group.primary.raw();
        group.stop_replicas();
        let mut first = group.waits("LOCK.ACQUIRE key owner LEASE 600000 REPLICAS 1");
        let refused = client.run("LOCK.ACQUIRE key owner").error();
        assert!(refused.starts_with("ERR another request of this owner for 'key' is being confirmed"), "{refused}");
        assert!(client.run("LOCK.RENEW key owner").error().contains("is being confirmed"));
        let mut second = group.waits("LOCK.ACQUIRE key owner WAIT 60000 LEASE 600000");
        if is_confirmed {
            group.cont_replicas();
            assert_eq!(second.token(), first.token(), "a re-entry");
            assert_eq!(client.run("LOCK.RELEASE key owner"), Value::Int(0));
        } else {
            assert_eq!(first.error(), "UNCONFIRMED");
            second.token();
            group.cont_replicas();
        }
        assert_eq!(client.run("LOCK.RELEASE key owner"), Value::Int(1), "the only hold");
    }
}

/// A release that leaves no hold is never refused.
#[test]
fn last_release_is_not_refused_during_confirmation() {
    let group = Group::of(1);
    let mut client = group.primary.raw();
    let token = client.get_token("LOCK.ACQUIRE key owner LEASE 600000");
    client.get_token("LOCK.ACQUIRE key owner");
    client.get_token("LOCK.ACQUIRE once owner LEASE 600000");
    group.stop_replicas();
    let mut renewals =
        ["key", "once"].map(|key| group.waits(&format!("LOCK.RENEW {key} owner LEASE 60000 REPLICAS 1")));
    assert_eq!(client.run("LOCK.RELEASE once owner"), Value::Int(1));
    assert!(client.run("LOCK.RELEASE key owner").error().contains("is being confirmed"), "it would leave one");
    assert_eq!(client.run(&format!("LOCK.RELEASE key owner TOKEN {token} HOLDS 0")), Value::Int(1));
    group.cont_replicas();
    renewals.iter_mut().for_each(|renewal| assert_eq!(renewal.error(), "UNCONFIRMED"));
}

/// An undelivered grant refuses no request of its owner.
#[test]
fn undelivered_grant_refuses_no_request() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0 LEASE 600000");
    client.run_ok("LOCK.RELEASE key holder");
    let again = token(&client.run("LOCK.ACQUIRE key owner HOLDS 1"));
    assert_eq!(client.run(&format!("LOCK.RENEW key owner TOKEN {again}")), Value::Int(again));
    // The session ends without having read the event. The reply to the other request still counts.
    drop(session);
    until(SOON, "the session has ended", || server.info("holdfast", "holdfast_sessions").as_deref() == Some("0"));
    assert_eq!(int(&client.run(&format!("LOCK.RELEASE key owner TOKEN {again}"))), 1);
}

/// A client may use a grant as soon as it can have read it, also if other threads write the replies.
#[test]
fn grant_that_was_read_can_be_released_with_io_threads() {
    const ROUNDS: usize = 2_000;
    let server = Server::builder().arg("io-threads", "4").start();
    let (mut client, mut other) = (server.raw(), server.raw());
    let mut session = Session::open(&server);
    for round in 0..ROUNDS {
        client.get_token("LOCK.ACQUIRE key holder LEASE 600000");
        session.wait(&mut client, &format!("LOCK.ACQUIRE key owner-{round} WAIT 0 LEASE 600000"));
        session.raw.send_lines(&["LOCK.EVENTS WAIT 0"]);
        client.send_lines(&["LOCK.RELEASE key holder"]);
        let received = events(&session.raw.read().expect("connection open"));
        let granted = received[0].token_of(&["key"], &format!("owner-{round}"));
        let released = other.run(&format!("LOCK.RELEASE key owner-{round} TOKEN {granted}"));
        assert_eq!(released, Value::Int(1), "round {round}");
        assert_eq!(client.read().expect("connection open"), Value::Int(1));
    }
}
