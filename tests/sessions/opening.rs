//! `LOCK.SESSION`, and no other command, makes a connection a session.

use redis::Value;
use support::{Server, until};

use super::session::{Event, Session, waiting};
use crate::common::error;
use crate::lines::{Reply, holders, owners};
use crate::waiter::{Commands, SOON, is_blocked};

/// Requests that need a session.
const OF_SESSIONS: [&str; 6] = [
    "LOCK.EVENTS",
    "LOCK.EVENTS WAIT 0 HEARTBEAT",
    "LOCK.ACQUIRE key owner SESSION *",
    "LOCK.ACQUIRE key owner WATCHDOG",
    "LOCK.ACQUIRE key owner CONTENTION",
    "LOCK.MACQUIRE 2 key other owner WATCHDOG EPHEMERAL",
];

/// A library may reconnect without its application's knowledge. The next command must not bind to the new connection.
#[test]
fn reconnected_connection_is_no_session() {
    let server = Server::start();
    let mut session = Session::open(&server);
    session.raw.get_token("LOCK.ACQUIRE mine owner WATCHDOG");
    session.raw.close();
    let mut connection = server.raw();
    for line in OF_SESSIONS {
        assert_eq!(error(&connection.run(line)).0, "NOSESSION", "{line}");
    }
    assert_eq!(connection.run("EXISTS key"), Value::Int(0), "no request had an effect");
}

/// Its owner `*` has the form of a session's id, and is none.
#[test]
fn plain_connection_cannot_be_named_as_session() {
    let server = Server::start();
    let (mut plain, mut client) = (server.raw(), server.raw());
    plain.get_token("LOCK.ACQUIRE mine *");
    let id = owners(&mut client, "mine").remove(0);
    assert!(id.ends_with(&format!(":{}", plain.client_id())), "{id}");
    for connection in [&mut plain, &mut client] {
        let reply = connection.run(&format!("LOCK.ACQUIRE key owner SESSION {id}"));
        assert_eq!(error(&reply).0, "NOSESSION", "{reply:?}");
    }
}

#[test]
fn watchdog_needs_session() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE held owner");
    for line in [
        "LOCK.ACQUIRE key owner WATCHDOG",
        "LOCK.MACQUIRE 2 key other owner WATCHDOG EPHEMERAL",
        "LOCK.RENEW held owner WATCHDOG",
        "LOCK.MRENEW 1 held owner WATCHDOG",
    ] {
        let reply = client.run(line);
        assert_eq!(error(&reply).0, "NOSESSION", "{line}");
    }
    assert_eq!(client.run("EXISTS key other"), Value::Int(0));
}

#[test]
fn session_reply_names_id_and_versions() {
    let server = Server::start();
    let mut connection = server.raw();
    let reply = connection.run("LOCK.SESSION");
    let id = reply.field("id").text();
    assert!(id.ends_with(&format!(":{}", connection.client_id())), "{id}");
    assert_eq!(reply.field("protocol").items(), [Value::Int(4), Value::Int(4)]);
    assert_eq!(reply.field("version").text(), connection.run("LOCK.VERSION").field("version").text());
    assert_eq!(connection.run("LOCK.SESSION"), reply, "it is one already");
}

/// Whether or not the request names the session.
#[test]
fn grant_over_session_is_bound_to_it() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    for line in ["LOCK.ACQUIRE key owner", "LOCK.ACQUIRE key owner SESSION *", "LOCK.MACQUIRE 1 key owner WATCHDOG"] {
        let token = session.raw.get_token(line);
        assert_eq!(holders(&mut client, "key")["owner"].field("client").int(), session.client, "{line}");
        client.run_ok("LOCK.FORCE key");
        assert_eq!(session.event(), Event::lost("key", "owner", token, "forced"), "{line}");
    }
}

/// Its grant is bound all the same.
#[test]
fn request_without_session_blocks_its_connection() {
    let server = Server::start();
    let (mut client, mut observer) = (server.raw(), server.raw());
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    assert_eq!(session.raw.run("LOCK.ACQUIRE key named WAIT 0 SESSION *"), waiting());
    session.raw.send_line("LOCK.ACQUIRE key owner WAIT 0");
    until(SOON, "the request is blocked", || is_blocked(&mut observer, session.client));
    assert!(session.withdraw(&mut client, "key", "named"));
    client.run_ok("LOCK.RELEASE key holder");
    let token = session.raw.read().expect("a reply").token();
    client.run_ok("LOCK.FORCE key");
    let events = session.events(2);
    assert!(events[0].error_of(&["key"], "named").starts_with("CANCELLED "));
    assert_eq!(events[1], Event::lost("key", "owner", token, "forced"));
}

#[test]
fn connection_with_an_ephemeral_hold_cannot_become_a_session() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.get_token("LOCK.ACQUIRE key owner EPHEMERAL");
    let reply = connection.run("LOCK.SESSION");
    let (code, message) = error(&reply);
    assert_eq!(code, "ERR");
    assert!(message.contains("EPHEMERAL"), "{message}");
    connection.run_ok("LOCK.RELEASE key owner");
    connection.run_ok("LOCK.SESSION");
}

/// A script that runs on a session's connection binds only with an explicit id.
#[test]
fn script_binds_with_explicit_id_only() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let id = session.id.clone();
    let mut run = |words: &str| {
        let script = format!("return redis.call({words})");
        session.raw.call(&[b"EVAL", script.as_bytes(), b"0"])
    };
    run("'LOCK.ACQUIRE', 'free', 'owner'").token();
    assert_eq!(holders(&mut client, "free")["owner"].field("client"), Value::Nil);
    run(&format!("'LOCK.ACQUIRE', 'bound', 'owner', 'SESSION', '{id}'")).token();
    assert_eq!(holders(&mut client, "bound")["owner"].field("client").int(), session.client);
    let mut run = |words: &str| {
        let script = format!("return redis.call({words})");
        error(&session.raw.call(&[b"EVAL", script.as_bytes(), b"0"])).0.to_owned()
    };
    assert_eq!(run("'LOCK.ACQUIRE', 'key', 'owner', 'SESSION', '*'"), "ERR");
    assert_eq!(run("'LOCK.ACQUIRE', 'key', 'owner', 'WATCHDOG'"), "ERR");
    assert_eq!(run("'LOCK.SESSION'"), "ERR");
}
