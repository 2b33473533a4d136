//! `holdfast.max-session-waits`, and what `INFO holdfast` counts of sessions.

use redis::Value;
use support::{Raw, Server, until};

use super::session::Session;
use crate::common::info_number;
use crate::speak::Reply;
use crate::waiter::{SOON, Speak, Tell};

fn with_limit(limit: u32) -> Server {
    Server::builder().module_args(&["max-session-waits", &limit.to_string()]).start()
}

#[test]
fn beyond_it_a_request_is_refused() {
    let server = with_limit(3);
    let mut client = server.raw();
    let (mut session, other) = (Session::open(&server), Session::open(&server));
    client.take("LOCK.ACQUIRE key holder");
    for number in 0..3 {
        session.wait(&mut client, &format!("LOCK.ACQUIRE key owner-{number} WAIT 0"));
    }
    let refused = session.ask(&mut client, "LOCK.ACQUIRE key one-more WAIT 0").error();
    assert!(refused.starts_with("ERR too many waits"), "{refused}");
    assert!(refused.contains("holdfast.max-session-waits is 3"), "{refused}");
    session.wait(&mut client, "LOCK.ACQUIRE key owner-0 WAIT 0");
    assert_eq!(session.ask(&mut client, "LOCK.ACQUIRE key one-more"), Value::Nil, "which does not wait");
    session.take(&mut client, "LOCK.ACQUIRE free one-more WAIT 0");
    other.wait(&mut client, "LOCK.ACQUIRE key one-more WAIT 0");
    client.order("LOCK.RELEASE key owner-1 ALL");
    session.event();
    session.wait(&mut client, "LOCK.ACQUIRE key one-more WAIT 0");
}

#[test]
fn several_keys_are_one_request() {
    let server = with_limit(2);
    let mut client = server.raw();
    let session = Session::open(&server);
    client.take("LOCK.ACQUIRE a holder");
    session.wait(&mut client, "LOCK.MACQUIRE 3 a b c first WAIT 0");
    session.wait(&mut client, "LOCK.MACQUIRE 3 a b c second WAIT 0");
    assert_eq!(info_number(&server, "holdfast", "holdfast_session_waits"), 2);
    assert!(session.ask(&mut client, "LOCK.ACQUIRE a third WAIT 0").error().starts_with("ERR too many waits"));
}

/// A session that never reads would else be told of one loss after the other, for ever.
#[test]
fn a_session_with_as_many_unread_events_gets_no_new_hold_until_it_reads() {
    let server = with_limit(3);
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let unread = |count| until(SOON, "they are in the mailbox", || figures(&server)[2] == count);
    session.take(&mut client, "LOCK.ACQUIRE kept owner");
    for _ in 0..3 {
        session.take(&mut client, "LOCK.ACQUIRE key owner");
        client.order("LOCK.FORCE key");
    }
    unread(3);
    let full = "ERR too many unread events of this session: holdfast.max-session-waits is 3";
    for line in
        ["LOCK.ACQUIRE key owner", "LOCK.MACQUIRE 2 a b owner", "LOCK.RENEW kept owner", "LOCK.MRENEW 1 kept owner"]
    {
        assert_eq!(session.ask(&mut client, line).error(), full, "{line}");
    }
    assert_eq!(client.say("LOCK.FORCE kept"), Value::Int(1));
    // What it held is told all the same.
    unread(4);
    assert_eq!(session.events(4).len(), 4);
    session.take(&mut client, "LOCK.ACQUIRE key owner");
}

#[test]
fn it_can_be_set_while_the_server_runs() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    let setting = client.say("CONFIG GET holdfast.max-session-waits");
    assert_eq!(setting.field("holdfast.max-session-waits").text(), "100000");
    client.order("CONFIG SET holdfast.max-session-waits 1");
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0");
    assert!(session.ask(&mut client, "LOCK.ACQUIRE key second WAIT 0").error().starts_with("ERR too many waits"));
    client.order("CONFIG SET holdfast.max-session-waits 2");
    session.wait(&mut client, "LOCK.ACQUIRE key second WAIT 0");
    for wrong in ["0", "-1", "x"] {
        assert!(client.say(&format!("CONFIG SET holdfast.max-session-waits {wrong}")).error().starts_with("ERR"));
    }
}

/// The figures of `INFO holdfast` that concern sessions: how many there are, wait, and have not been read.
#[track_caller]
fn figures(server: &Server) -> [i64; 3] {
    ["sessions", "session_waits", "undelivered_events"]
        .map(|name| info_number(server, "holdfast", &format!("holdfast_{name}")))
}

#[test]
fn info_counts() {
    let server = Server::start();
    let mut client: Raw = server.raw();
    let (mut one, mut other) = (Session::open(&server), Session::open(&server));
    assert_eq!(figures(&server), [2, 0, 0]);
    client.take("LOCK.ACQUIRE key holder");
    one.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0");
    one.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0");
    assert_eq!(figures(&server), [1, 1, 0]);
    other.wait(&mut client, "LOCK.ACQUIRE key second WAIT 0");
    other.wait(&mut client, "LOCK.ACQUIRE key third WAIT 0");
    assert_eq!(figures(&server), [2, 3, 0]);
    client.order("LOCK.RELEASE key holder");
    client.order("LOCK.RELEASE key first ALL"); // Which ends the request, too.
    assert_eq!(figures(&server), [2, 1, 2]);
    assert!(one.event().error_of(&["key"], "first").starts_with("CANCELLED "));
    assert_eq!(figures(&server), [2, 1, 1]);
    client.order("LOCK.RELEASE key third ALL");
    assert_eq!(figures(&server), [2, 0, 2]);
    client.order("LOCK.RELEASE key second ALL");
    other.events(2);
    assert_eq!(figures(&server), [2, 0, 0]);
    one.raw.close();
    until(SOON, "one has ended", || figures(&server) == [1, 0, 0]);
    assert_eq!(info_number(&server, "holdfast", "holdfast_grants_queued"), 2);
    assert_eq!(info_number(&server, "holdfast", "holdfast_timeouts"), 0);
}

#[test]
fn a_timeout_is_counted_once() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 10");
    session.event();
    assert_eq!(info_number(&server, "holdfast", "holdfast_timeouts"), 1);
    assert_eq!(session.raw.say("LOCK.EVENTS WAIT 10"), Value::Nil);
    assert_eq!(info_number(&server, "holdfast", "holdfast_timeouts"), 1, "which is no wait for a lock");
}
