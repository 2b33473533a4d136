//! `LOCK.SESSION` makes a connection a session, and nothing else does.

use redis::Value;
use support::{Server, until};

use super::session::{Event, Session, waiting};
use crate::common::error;
use crate::speak::{Reply, holders};
use crate::waiter::{SOON, Speak, Tell, is_blocked};

/// What only a session may have.
const OF_SESSIONS: [&str; 6] = [
    "LOCK.EVENTS",
    "LOCK.EVENTS WAIT 0 HEARTBEAT",
    "LOCK.ACQUIRE key owner SESSION *",
    "LOCK.ACQUIRE key owner WATCHDOG",
    "LOCK.ACQUIRE key owner CONTENTION",
    "LOCK.MACQUIRE 2 key other owner WATCHDOG EPHEMERAL",
];

/// The next command of a library that reconnects silently fails.
#[test]
fn reconnected_connection_is_no_session() {
    let server = Server::start();
    let mut session = Session::open(&server);
    session.raw.take("LOCK.ACQUIRE mine owner WATCHDOG");
    session.raw.close();
    let mut connection = server.raw();
    for line in OF_SESSIONS {
        assert_eq!(error(&connection.say(line)).0, "NOSESSION", "{line}");
    }
    assert_eq!(connection.say("EXISTS key"), Value::Int(0), "nothing was done");
    let plain = format!("{}:{}", session.id.split(':').next().expect("a run"), connection.client_id());
    let named = connection.say(&format!("LOCK.ACQUIRE key owner SESSION {plain}"));
    assert_eq!(error(&named).0, "NOSESSION", "it is there, and no session");
}

#[test]
fn session_reply_names_id_and_versions() {
    let server = Server::start();
    let mut connection = server.raw();
    let reply = connection.say("LOCK.SESSION");
    let id = reply.field("id").text();
    assert!(id.ends_with(&format!(":{}", connection.client_id())), "{id}");
    assert_eq!(reply.field("protocol").items(), [Value::Int(4), Value::Int(4)]);
    assert_eq!(reply.field("version").text(), connection.say("LOCK.VERSION").field("version").text());
    assert_eq!(connection.say("LOCK.SESSION"), reply, "it is one already");
}

/// Whether or not the request names the session.
#[test]
fn grant_over_session_is_bound_to_it() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    for line in ["LOCK.ACQUIRE key owner", "LOCK.ACQUIRE key owner SESSION *", "LOCK.MACQUIRE 1 key owner WATCHDOG"] {
        let token = session.raw.take(line);
        assert_eq!(holders(&mut client, "key")["owner"].field("client").int(), session.client, "{line}");
        client.order("LOCK.FORCE key");
        assert_eq!(session.event(), Event::lost("key", "owner", token, "forced"), "{line}");
    }
}

/// Its grant is bound all the same.
#[test]
fn request_without_session_blocks_its_connection() {
    let server = Server::start();
    let (mut client, mut observer) = (server.raw(), server.raw());
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    assert_eq!(session.raw.say("LOCK.ACQUIRE key named WAIT 0 SESSION *"), waiting());
    session.raw.post("LOCK.ACQUIRE key owner WAIT 0");
    until(SOON, "it is blocked", || is_blocked(&mut observer, session.client));
    assert!(session.withdraw(&mut client, "key", "named"));
    client.order("LOCK.RELEASE key holder");
    let token = session.raw.read().expect("a reply").token();
    client.order("LOCK.FORCE key");
    let events = session.events(2);
    assert!(events[0].error_of(&["key"], "named").starts_with("CANCELLED "));
    assert_eq!(events[1], Event::lost("key", "owner", token, "forced"));
}

#[test]
fn connection_with_an_ephemeral_hold_cannot_become_a_session() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.take("LOCK.ACQUIRE key owner EPHEMERAL");
    let reply = connection.say("LOCK.SESSION");
    let (code, message) = error(&reply);
    assert_eq!(code, "ERR");
    assert!(message.contains("EPHEMERAL"), "{message}");
    connection.order("LOCK.RELEASE key owner");
    connection.order("LOCK.SESSION");
}

/// A script that runs on a session's connection binds only by an explicit id.
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
