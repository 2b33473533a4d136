//! What names a session, and who may.

use redis::Value;
use support::{Raw, Server, until};

use super::session::{Session, until_ended, waiting};
use crate::common::{array, error, info_number};
use crate::speak::Reply;
use crate::waiter::{SOON, Speak, Tell};

/// Every command that takes `SESSION id`, for a lock that is held by `holder`.
const COMMANDS: [&str; 4] = [
    "LOCK.ACQUIRE key owner WAIT 0",
    "LOCK.MACQUIRE 2 key other owner WAIT 0",
    "LOCK.RENEW key owner WATCHDOG",
    "LOCK.MRENEW 2 key other owner",
];

#[test]
fn session_id_is_its_owner_star() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    client.order("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
}

#[test]
fn connection_names_itself() {
    let server = Server::start();
    let mut session = Session::open(&server);
    server.raw().take("LOCK.ACQUIRE key holder");
    let line = session.naming("LOCK.ACQUIRE key owner WAIT 0");
    assert_eq!(session.raw.say(&line), waiting());
    server.raw().order("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
}

#[test]
fn one_connection_makes_requests_for_many_sessions() {
    let server = Server::start();
    let mut client = server.raw();
    let mut sessions: Vec<Session> = (0..10).map(|_| Session::open(&server)).collect();
    client.take("LOCK.ACQUIRE key holder SHARED");
    for session in &sessions {
        session.wait(&mut client, "LOCK.ACQUIRE key * WAIT 0");
    }
    client.order("LOCK.RELEASE key holder");
    for session in &mut sessions {
        let owner = session.id.clone();
        session.event().token_of(&["key"], &owner);
        client.order(&format!("LOCK.RELEASE key {owner}"));
    }
}

#[test]
fn closed_connection_is_no_session() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    let id = session.id.clone();
    session.raw.reset();
    until_ended(&mut client, &id);
    for line in COMMANDS {
        let reply = client.say(&format!("{line} SESSION {id}"));
        let (code, message) = error(&reply);
        assert_eq!(code, "NOSESSION", "{line}");
        assert!(message.contains(&id), "{line}: {message}");
    }
    assert_eq!(client.say("EXISTS key"), Value::Int(0), "nothing was done");
}

#[test]
fn id_of_other_server_run_is_no_session() {
    let mut server = Server::start();
    let id = Session::open(&server).id;
    server.shutdown();
    server.restart();
    // As many connections as there were before, and some: one of them has that number now.
    let _connections: Vec<Raw> = (0..20).map(|_| server.raw()).collect();
    let mut client = server.raw();
    for line in COMMANDS {
        assert_eq!(error(&client.say(&format!("{line} SESSION {id}"))).0, "NOSESSION", "{line}");
    }
}

#[test]
fn invalid_id_is_refused() {
    let server = Server::start();
    let mut client = server.raw();
    let own = client.say("LOCK.SESSION").field("id").text();
    let (run, number) = own.split_once(':').expect("a run and a connection");
    let ids = [
        "x".into(),
        number.to_owned(),
        run.to_owned(),
        format!("{run}:"),
        format!("{run}:0"),
        format!("{run}:-1"),
        format!("{run}:+{number}"),
        format!("{run}:0{number}"),
        format!("{run}:{number}x"),
        format!("{run}:{number}:{number}"),
        format!("{run};{number}"),
        format!("{run}:999999999"),
        format!("{run}:18446744073709551615"),
        format!("{run}:18446744073709551616"),
        format!("{}:{number}", run.to_uppercase()),
        format!("00000000-0000-4000-8000-000000000000:{number}"),
        "x".repeat(100_000),
    ];
    for id in ids {
        let reply = client.say(&format!("LOCK.ACQUIRE key owner SESSION {id}"));
        let (code, message) = error(&reply);
        assert_eq!(code, "NOSESSION", "{id}");
        assert!(message.len() < 500, "{} bytes", message.len());
    }
    for id in [b"".as_slice(), b"\0", b"\xff\xfe\r\n"] {
        let reply = client.call(&[b"LOCK.ACQUIRE", b"key", b"owner", b"SESSION", id]);
        assert_eq!(error(&reply).0, "NOSESSION");
    }
    assert_eq!(client.say("PING"), Value::SimpleString("PONG".into()));
    assert_eq!(client.say("EXISTS key"), Value::Int(0));
}

#[test]
fn session_option_needs_one_id() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    for line in COMMANDS {
        assert!(
            client.say(&format!("{line} SESSION")).error().starts_with("ERR SESSION must be followed by"),
            "{line}"
        );
        let twice = format!("{line} SESSION {id} SESSION {id}", id = session.id);
        assert_eq!(client.say(&twice).error(), "ERR SESSION is given twice", "{line}");
        let small = format!("{line} session {}", session.id);
        assert_ne!(error_code(&client.say(&small)), Some("ERR".into()), "{line}");
        client.order("DEL key other");
    }
    for line in ["LOCK.RELEASE key owner", "LOCK.INFO key", "LOCK.EVENTS", "LOCK.FORCE key"] {
        assert_eq!(error(&session.ask(&mut client, line)).0, "ERR", "{line}");
    }
}

fn error_code(reply: &Value) -> Option<String> {
    if let Value::ServerError(error) = reply { Some(error.code().into()) } else { None }
}

/// A connection of a user of its own.
fn connection_of(server: &Server, user: &str) -> Raw {
    let mut client = server.raw();
    client.order(&format!("ACL SETUSER {user} on nopass +@all ~*  &*"));
    client.order(&format!("AUTH {user} x"));
    client
}

#[test]
fn session_of_other_user_is_refused() {
    let server = Server::start();
    let mut session = Session::on(connection_of(&server, "one"));
    let mut other = connection_of(&server, "two");
    for line in COMMANDS {
        let reply = session.ask(&mut other, line);
        assert_eq!(reply.error(), "NOPERM this session belongs to another user", "{line}");
    }
    assert_eq!(other.say("EXISTS key other"), Value::Int(0), "nothing was done");
    assert_eq!(session.raw.say("LOCK.EVENTS"), Value::Nil);
}

#[test]
fn session_of_same_user_is_accepted() {
    let server = Server::start();
    let session = Session::on(connection_of(&server, "one"));
    let mut same = connection_of(&server, "one");
    session.take(&mut same, "LOCK.ACQUIRE key owner");
}

#[test]
fn session_that_changed_its_user_is_refused() {
    let server = Server::start();
    let mut session = Session::on(connection_of(&server, "one"));
    let (mut one, mut two) = (connection_of(&server, "one"), connection_of(&server, "two"));
    session.raw.order("AUTH two x");
    assert_eq!(error(&session.ask(&mut one, "LOCK.ACQUIRE key owner")).0, "NOPERM");
    session.take(&mut two, "LOCK.ACQUIRE key owner");
}

/// At the time of the grant.
#[test]
fn grant_needs_rights_of_sessions_user() {
    let server = Server::start();
    let mut admin = server.raw();
    admin.take("LOCK.ACQUIRE key holder");
    let mut session = Session::on(connection_of(&server, "one"));
    let mut client = connection_of(&server, "one");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    admin.order("ACL SETUSER one resetkeys ~elsewhere");
    admin.order("LOCK.RELEASE key holder");
    let told = session.event().error_of(&["key"], "owner");
    assert!(told.starts_with("NOPERM "), "{told}");
    assert_eq!(admin.say("EXISTS key"), Value::Int(0));
}

#[test]
fn session_is_named_in_transaction() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    client.order("MULTI");
    client.order(&session.naming("LOCK.ACQUIRE key owner WAIT 0"));
    client.order(&session.naming("LOCK.ACQUIRE free owner"));
    client.order(&session.naming("LOCK.RENEW free owner WATCHDOG"));
    client.order("LOCK.RELEASE none none ALL");
    let replies = client.order("EXEC");
    let [waits, token, renewed, cancelled] = array(&replies) else { panic!("{replies:?}") };
    assert_eq!((waits, cancelled), (&waiting(), &Value::Nil));
    assert_eq!(token.token(), renewed.token());
    client.order("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
}

#[test]
fn session_is_named_in_script() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    let script = |line: &str| format!("return redis.call('{}')", session.naming(line).replace(' ', "','"));
    let mut run = |line: &str| client.call(&[b"EVAL", script(line).as_bytes(), b"0"]);
    assert_eq!(run("LOCK.ACQUIRE key owner WAIT 0 WATCHDOG"), waiting());
    run("LOCK.ACQUIRE free owner EPHEMERAL").token();
    run("LOCK.RENEW free owner WATCHDOG").token();
    client.order("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
}

#[test]
fn session_of_other_user_is_refused_in_script() {
    let server = Server::start();
    let session = Session::on(connection_of(&server, "one"));
    let (mut one, mut two) = (connection_of(&server, "one"), connection_of(&server, "two"));
    let line = session.naming("LOCK.ACQUIRE key owner").replace(' ', "','");
    let script = format!("return redis.call('{line}')");
    let call: [&[u8]; 3] = [b"EVAL", script.as_bytes(), b"0"];
    let refused = two.call(&call);
    assert!(refused.error().contains("NOPERM"), "{refused:?}");
    one.call(&call).token();
}

#[test]
fn session_is_named_in_function() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    let library = "#!lua name=holdfast_tests\n\
        redis.register_function('ask', function(_, words) return redis.call(unpack(words)) end)";
    client.call(&[b"FUNCTION", b"LOAD", library.as_bytes()]);
    client.take("LOCK.ACQUIRE key holder");
    let line = session.naming("FCALL ask 0 LOCK.ACQUIRE key owner WAIT 0");
    assert_eq!(client.say(&line), waiting());
}

#[test]
fn info_counts_open_sessions() {
    let server = Server::start();
    let mut client = server.raw();
    let sessions = || info_number(&server, "holdfast", "holdfast_sessions");
    client.take("LOCK.ACQUIRE key owner EPHEMERAL");
    assert_eq!(sessions(), 0);
    let session = Session::open(&server);
    let _other = Session::open(&server);
    assert_eq!(sessions(), 2);
    session.raw.close();
    until(SOON, "it has ended", || sessions() == 1);
}
