//! `LOCK.CANCEL`: from its reply on the owner neither waits for, nor holds, nor will be given the key.

use redis::Value;
use support::{Server, until};

use super::session::{Event, Session, waiting};
use crate::common::{deadline, error, info_number, unix_millis};
use crate::speak::{Reply, owners, waiters};
use crate::waiter::{SOON, Speak, Tell, Waiter, assert_held};

/// Nothing of the owner's is left, and nothing of it comes.
#[track_caller]
fn is_given_up(server: &Server, session: &mut Session, key: &str, owner: &str) {
    let mut client = server.raw();
    assert!(!waiters(&mut client, key).contains(&owner.to_owned()), "it does not wait");
    assert!(!owners(&mut client, key).contains(&owner.to_owned()), "it does not hold");
    assert_eq!(session.cancel(&mut client, key, owner), 0, "there is nothing any more");
    session.hears_nothing(&mut client);
}

#[test]
fn one_that_was_never_asked_for() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    assert_eq!(session.cancel(&mut client, "key", "owner"), 0);
    is_given_up(&server, &mut session, "key", "owner");
}

#[test]
fn one_that_waits() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    assert_eq!(session.cancel(&mut client, "key", "owner"), 1);
    is_given_up(&server, &mut session, "key", "owner");
    client.order("LOCK.RELEASE key holder");
    assert_eq!(client.say("EXISTS key"), Value::Int(0));
    assert_eq!(info_number(&server, "holdfast", "holdfast_session_waits"), 0);
}

/// The server has not noticed yet that the lease is over when the hold is given up: its end is not told afterwards.
#[test]
fn one_whose_lease_has_just_run_out() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    for (key, more) in [("mutex", "WATCHDOG"), ("many", "EPHEMERAL SHARED")] {
        session.take(&mut client, &format!("LOCK.ACQUIRE {key} owner LEASE 300 {more}"));
        let end = deadline(&mut client, key.as_bytes());
        server.stop();
        let cancel = [&b"LOCK.CANCEL"[..], key.as_bytes(), b"owner", b"SESSION", session.id.as_bytes()];
        client.send(&cancel).expect("sent");
        until(SOON, "the lease is over", || unix_millis() > end + 100);
        server.cont();
        client.read().expect("an answer");
        session.hears_nothing(&mut client);
        is_given_up(&server, &mut session, key, "owner");
    }
}

#[test]
fn one_that_waits_with_a_time() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 100");
    session.wait(&mut client, "LOCK.ACQUIRE key later WAIT 150");
    assert_eq!(session.cancel(&mut client, "key", "owner"), 1);
    assert_eq!(session.event(), Event::timeout(&["key"], "later"), "no timeout of the other");
}

/// Those behind it have their turn.
#[test]
fn one_who_holds_up_others() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key reader SHARED");
    session.wait(&mut client, "LOCK.ACQUIRE key writer WAIT 0");
    session.wait(&mut client, "LOCK.ACQUIRE key second-reader SHARED WAIT 0");
    let mut third = Waiter::sending(&server, "LOCK.ACQUIRE key third-reader SHARED WAIT 0");
    assert_eq!(session.cancel(&mut client, "key", "writer"), 1);
    assert!(session.event().token_of(&["key"], "second-reader") < third.token());
}

/// It leaves the queues of all its keys, whichever of them is named.
#[test]
fn one_that_waits_for_several_keys() {
    let server = Server::start();
    let mut client = server.raw();
    for named in ["a", "b", "c"] {
        let mut session = Session::open(&server);
        client.take("LOCK.ACQUIRE b holder");
        session.wait(&mut client, "LOCK.MACQUIRE 3 a b c owner WAIT 0");
        session.wait(&mut client, "LOCK.ACQUIRE c behind WAIT 0");
        assert_eq!(session.cancel(&mut client, named, "owner"), 1, "{named}");
        session.event().token_of(&["c"], "behind");
        for key in ["a", "b", "c"] {
            assert_eq!(waiters(&mut client, key), [""; 0], "{key}");
        }
        is_given_up(&server, &mut session, named, "owner");
        client.order("DEL a b c");
    }
}

#[test]
fn one_that_was_granted_and_not_told() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let mut next = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0 WATCHDOG EPHEMERAL");
    next.wait(&mut client, "LOCK.ACQUIRE key next WAIT 0");
    client.order("LOCK.RELEASE key holder");
    assert_held(&mut client, "key", "owner");
    assert_eq!(session.cancel(&mut client, "key", "owner"), 1);
    next.event().token_of(&["key"], "next");
    is_given_up(&server, &mut session, "key", "owner");
}

#[test]
fn one_that_was_granted_and_told() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0 WATCHDOG");
    client.order("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
    let mut next = Waiter::start(&server, "key", "next");
    assert_eq!(session.cancel(&mut client, "key", "owner"), 1);
    next.token();
    is_given_up(&server, &mut session, "key", "owner");
}

#[test]
fn one_that_was_granted_at_once() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let mut holds = 0;
    for flags in ["", "WATCHDOG", "EPHEMERAL", "HOLDS 7"] {
        holds += 1;
        let owner = format!("owner-{holds}");
        session.take(&mut client, &format!("LOCK.ACQUIRE key {owner} {flags}"));
        session.take(&mut client, &format!("LOCK.ACQUIRE key {owner}"));
        assert_eq!(session.cancel(&mut client, "key", &owner), 1);
        assert_eq!(client.say("EXISTS key"), Value::Int(0));
        is_given_up(&server, &mut session, "key", &owner);
    }
}

/// Of several keys that were granted together all are given up, whichever is named.
#[test]
fn several_that_were_granted_together() {
    let server = Server::start();
    let mut client = server.raw();
    for (named, how) in ["a", "b", "c"].iter().zip(["at once", "unread", "read"]) {
        let mut session = Session::open(&server);
        if how == "at once" {
            session.take(&mut client, "LOCK.MACQUIRE 3 a b c owner");
        } else {
            client.take("LOCK.ACQUIRE b holder");
            session.wait(&mut client, "LOCK.MACQUIRE 3 a b c owner WAIT 0");
            client.order("LOCK.RELEASE b holder");
        }
        if how == "read" {
            session.event().token_of(&["a", "b", "c"], "owner");
        }
        assert_eq!(client.say("EXISTS a b c"), Value::Int(3), "{how}");
        assert_eq!(session.cancel(&mut client, named, "owner"), 1, "{how}");
        assert_eq!(client.say("EXISTS a b c"), Value::Int(0), "{how}");
        is_given_up(&server, &mut session, named, "owner");
    }
}

#[test]
fn one_that_timed_out() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 50");
    assert_eq!(session.event(), Event::timeout(&["key"], "owner"));
    assert_eq!(session.cancel(&mut client, "key", "owner"), 0);
    is_given_up(&server, &mut session, "key", "owner");
}

/// An event of it that has not been read is an event of it.
#[test]
fn one_whose_timeout_was_not_read() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 50");
    support::until(crate::waiter::SOON, "it times out", || waiters(&mut client, "key").is_empty());
    assert_eq!(session.cancel(&mut client, "key", "owner"), 0);
    is_given_up(&server, &mut session, "key", "owner");
}

#[test]
fn one_whose_refusal_was_not_read() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    client.order("SET key text");
    support::until(crate::waiter::SOON, "it is refused", || waiters(&mut client, "key").is_empty());
    client.order("DEL key");
    assert_eq!(session.cancel(&mut client, "key", "owner"), 0);
    is_given_up(&server, &mut session, "key", "owner");
}

/// A hold of it that was lost, which was not read.
#[test]
fn one_whose_loss_was_not_read() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    session.take(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
    client.order("LOCK.FORCE key");
    assert_eq!(session.cancel(&mut client, "key", "owner"), 0);
    is_given_up(&server, &mut session, "key", "owner");
}

#[test]
fn others_of_the_same_owner_and_key_stay() {
    let server = Server::start();
    let mut client = server.raw();
    let (mut one, mut other) = (Session::open(&server), Session::open(&server));
    client.take("LOCK.ACQUIRE key holder");
    one.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    other.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    let mut blocked = Waiter::start(&server, "key", "owner");
    assert_eq!(one.cancel(&mut client, "key", "owner"), 1);
    assert_eq!(crate::waiter::count_waiters(&mut client, "key"), 2);
    client.order("LOCK.RELEASE key holder");
    // Both have their turn; of two, one at a time is answered with success.
    assert_eq!(blocked.error(), "ERR");
    other.event().token_of(&["key"], "owner");
    one.hears_nothing(&mut client);
}

/// The same for one who blocks and is the only one left.
#[test]
fn a_blocked_one_of_the_same_owner_and_key_stays() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    let mut blocked = Waiter::start(&server, "key", "owner");
    assert_eq!(session.cancel(&mut client, "key", "owner"), 1);
    client.order("LOCK.RELEASE key holder");
    blocked.token();
    session.hears_nothing(&mut client);
}

/// What the owner holds on behalf of another session, it does not hold on behalf of this one.
#[test]
fn a_hold_that_is_tied_to_another_session_stays() {
    let server = Server::start();
    let mut client = server.raw();
    let (one, mut other) = (Session::open(&server), Session::open(&server));
    one.take(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
    other.take(&mut client, "LOCK.RENEW key owner WATCHDOG");
    assert_eq!(one.cancel(&mut client, "key", "owner"), 0);
    assert_held(&mut client, "key", "owner");
    assert_eq!(other.cancel(&mut client, "key", "owner"), 1);
    other.hears_nothing(&mut client);
}

/// Nothing is remembered: what the same owner asks for afterwards is a request like any other.
#[test]
fn whoever_asks_again_asks_anew() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    for _ in 0..2 {
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
        assert_eq!(session.cancel(&mut client, "key", "owner"), 1);
    }
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    client.order("LOCK.RELEASE key holder");
    let token = session.event().token_of(&["key"], "owner");
    assert_eq!(session.ask(&mut client, "LOCK.RENEW key owner"), Value::Int(token));
    assert_eq!(session.cancel(&mut client, "key", "owner"), 1);
    is_given_up(&server, &mut session, "key", "owner");
}

#[test]
fn without_the_word_it_is_the_callers_own() {
    let server = Server::start();
    let mut session = Session::open(&server);
    server.raw().take("LOCK.ACQUIRE key holder");
    let line = session.naming("LOCK.ACQUIRE key owner WAIT 0");
    assert_eq!(session.raw.say(&line), waiting());
    assert_eq!(session.raw.say("LOCK.CANCEL key owner"), Value::Int(1));
    let script: [&[u8]; 3] = [b"EVAL", b"return redis.call('LOCK.CANCEL', 'key', 'owner')", b"0"];
    assert!(error(&session.raw.call(&script)).1.contains("SESSION is missing"));
}

/// A hold that was only re-entered on behalf of the session is given up all the same.
#[test]
fn a_re_entry() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let token = client.take("LOCK.ACQUIRE key owner");
    session.wait(&mut client, "LOCK.ACQUIRE key next WAIT 0");
    assert_eq!(session.take(&mut client, "LOCK.ACQUIRE key owner WAIT 0"), token);
    assert_eq!(client.say("HGET key owner").text(), "2");
    assert_eq!(session.cancel(&mut client, "key", "owner"), 1);
    session.event().token_of(&["key"], "next");
}

#[test]
fn what_is_no_lock() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    client.order("SET key text");
    assert_eq!(session.cancel(&mut client, "key", "owner"), 0);
    assert_eq!(client.say("GET key").text(), "text");
}
