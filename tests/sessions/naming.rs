//! `SESSION id`: how commands name a session, and which users may.

use redis::Value;
use support::{Raw, Server, until};

use super::session::{Session, until_ended, waiting};
use crate::common::{array, error, info_number};
use crate::lines::Reply;
use crate::waiter::{Commands, SOON};

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
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    client.run_ok("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
}

#[test]
fn connection_names_itself() {
    let server = Server::start();
    let mut session = Session::open(&server);
    server.raw().get_token("LOCK.ACQUIRE key holder");
    let line = session.with_session("LOCK.ACQUIRE key owner WAIT 0");
    assert_eq!(session.raw.run(&line), waiting());
    server.raw().run_ok("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
}

#[test]
fn one_connection_makes_requests_for_many_sessions() {
    let server = Server::start();
    let mut client = server.raw();
    let mut sessions: Vec<Session> = (0..10).map(|_| Session::open(&server)).collect();
    client.get_token("LOCK.ACQUIRE key holder SHARED");
    for session in &sessions {
        session.wait(&mut client, "LOCK.ACQUIRE key * WAIT 0");
    }
    client.run_ok("LOCK.RELEASE key holder");
    for session in &mut sessions {
        let owner = session.id.clone();
        session.event().token_of(&["key"], &owner);
        client.run_ok(&format!("LOCK.RELEASE key {owner}"));
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
        let reply = client.run(&format!("{line} SESSION {id}"));
        let (code, message) = error(&reply);
        assert_eq!(code, "NOSESSION", "{line}");
        assert!(message.contains(&id), "{line}: {message}");
    }
    assert_eq!(client.run("EXISTS key"), Value::Int(0), "no request had an effect");
}

#[test]
fn id_of_other_server_run_is_no_session() {
    let mut server = Server::start();
    let id = Session::open(&server).id;
    server.shutdown();
    server.restart();
    // More connections than before: one of them has the same number now.
    let _connections: Vec<Raw> = (0..20).map(|_| server.raw()).collect();
    let mut client = server.raw();
    for line in COMMANDS {
        assert_eq!(error(&client.run(&format!("{line} SESSION {id}"))).0, "NOSESSION", "{line}");
    }
}

#[test]
fn invalid_id_is_refused() {
    let server = Server::start();
    let mut client = server.raw();
    let own = client.run("LOCK.SESSION").field("id").text();
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
        let reply = client.run(&format!("LOCK.ACQUIRE key owner SESSION {id}"));
        let (code, message) = error(&reply);
        assert_eq!(code, "NOSESSION", "{id}");
        assert!(message.len() < 500, "{} bytes", message.len());
    }
    for id in [b"".as_slice(), b"\0", b"\xff\xfe\r\n"] {
        let reply = client.call(&[b"LOCK.ACQUIRE", b"key", b"owner", b"SESSION", id]);
        assert_eq!(error(&reply).0, "NOSESSION");
    }
    assert_eq!(client.run("PING"), Value::SimpleString("PONG".into()));
    assert_eq!(client.run("EXISTS key"), Value::Int(0));
}

#[test]
fn session_option_needs_one_id() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    for line in COMMANDS {
        assert!(
            client.run(&format!("{line} SESSION")).error().starts_with("ERR SESSION must be followed by"),
            "{line}"
        );
        let twice = format!("{line} SESSION {id} SESSION {id}", id = session.id);
        assert_eq!(client.run(&twice).error(), "ERR SESSION is given twice", "{line}");
        let small = format!("{line} session {}", session.id);
        assert_ne!(error_code(&client.run(&small)), Some("ERR".into()), "{line}");
        client.run_ok("DEL key other");
    }
    for line in ["LOCK.RELEASE key owner", "LOCK.INFO key", "LOCK.EVENTS", "LOCK.FORCE key"] {
        assert_eq!(error(&session.request(&mut client, line)).0, "ERR", "{line}");
    }
}

fn error_code(reply: &Value) -> Option<String> {
    if let Value::ServerError(error) = reply { Some(error.code().into()) } else { None }
}

/// A connection with a new user.
fn connection_of(server: &Server, user: &str) -> Raw {
    let mut client = server.raw();
    client.run_ok(&format!("ACL SETUSER {user} on nopass +@all ~*  &*"));
    client.run_ok(&format!("AUTH {user} x"));
    client
}

#[test]
fn session_of_other_user_is_refused() {
    let server = Server::start();
    let mut session = Session::on(connection_of(&server, "one"));
    let mut other = connection_of(&server, "two");
    for line in COMMANDS {
        let reply = session.request(&mut other, line);
        assert_eq!(reply.error(), "NOPERM this session belongs to another user", "{line}");
    }
    assert_eq!(other.run("EXISTS key other"), Value::Int(0), "no request had an effect");
    assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil);
}

#[test]
fn session_of_same_user_is_accepted() {
    let server = Server::start();
    let session = Session::on(connection_of(&server, "one"));
    let mut same = connection_of(&server, "one");
    session.get_token(&mut same, "LOCK.ACQUIRE key owner");
}

#[test]
fn session_that_changed_its_user_is_refused() {
    let server = Server::start();
    let mut session = Session::on(connection_of(&server, "one"));
    let (mut one, mut two) = (connection_of(&server, "one"), connection_of(&server, "two"));
    session.raw.run_ok("AUTH two x");
    assert_eq!(error(&session.request(&mut one, "LOCK.ACQUIRE key owner")).0, "NOPERM");
    session.get_token(&mut two, "LOCK.ACQUIRE key owner");
}

/// The rights count at the time of the grant.
#[test]
fn grant_needs_rights_of_sessions_user() {
    let server = Server::start();
    let mut admin = server.raw();
    admin.get_token("LOCK.ACQUIRE key holder");
    let mut session = Session::on(connection_of(&server, "one"));
    let mut client = connection_of(&server, "one");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    admin.run_ok("ACL SETUSER one resetkeys ~elsewhere");
    admin.run_ok("LOCK.RELEASE key holder");
    let received = session.event().error_of(&["key"], "owner");
    assert!(received.starts_with("NOPERM "), "{received}");
    assert_eq!(admin.run("EXISTS key"), Value::Int(0));
}

#[test]
fn session_is_named_in_transaction() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    client.run_ok("MULTI");
    client.run_ok(&session.with_session("LOCK.ACQUIRE key owner WAIT 0"));
    client.run_ok(&session.with_session("LOCK.ACQUIRE free owner"));
    client.run_ok(&session.with_session("LOCK.RENEW free owner WATCHDOG"));
    client.run_ok("LOCK.RELEASE none none ALL");
    let replies = client.run_ok("EXEC");
    let [waits, token, renewed, cancelled] = array(&replies) else { panic!("{replies:?}") };
    assert_eq!((waits, cancelled), (&waiting(), &Value::Nil));
    assert_eq!(token.token(), renewed.token());
    client.run_ok("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
}

#[test]
fn session_is_named_in_script() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    let script = |line: &str| format!("return redis.call('{}')", session.with_session(line).replace(' ', "','"));
    let mut run = |line: &str| client.call(&[b"EVAL", script(line).as_bytes(), b"0"]);
    assert_eq!(run("LOCK.ACQUIRE key owner WAIT 0 WATCHDOG"), waiting());
    run("LOCK.ACQUIRE free owner EPHEMERAL").token();
    run("LOCK.RENEW free owner WATCHDOG").token();
    client.run_ok("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
}

#[test]
fn connection_is_not_named_in_script() {
    let server = Server::start();
    let mut session = Session::open(&server);
    for words in ["'LOCK.ACQUIRE','free','*'", "'LOCK.ACQUIRE','free','owner','SESSION','*'"] {
        let script = format!("return redis.call({words})");
        let refused = session.raw.call(&[b"EVAL", script.as_bytes(), b"0"]).error();
        assert!(refused.starts_with("ERR * stands for a connection, and a script has none of its own"), "{refused}");
    }
}

#[test]
fn session_of_other_user_is_refused_in_script() {
    let server = Server::start();
    let session = Session::on(connection_of(&server, "one"));
    let (mut one, mut two) = (connection_of(&server, "one"), connection_of(&server, "two"));
    let line = session.with_session("LOCK.ACQUIRE key owner").replace(' ', "','");
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
    client.get_token("LOCK.ACQUIRE key holder");
    let line = session.with_session("FCALL ask 0 LOCK.ACQUIRE key owner WAIT 0");
    assert_eq!(client.run(&line), waiting());
}

#[test]
fn info_counts_open_sessions() {
    let server = Server::start();
    let mut client = server.raw();
    let sessions = || info_number(&server, "holdfast", "holdfast_sessions");
    client.get_token("LOCK.ACQUIRE key owner EPHEMERAL");
    assert_eq!(sessions(), 0);
    let session = Session::open(&server);
    let _other = Session::open(&server);
    assert_eq!(sessions(), 2);
    session.raw.close();
    until(SOON, "the session has ended", || sessions() == 1);
}
