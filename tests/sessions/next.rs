//! `LOCK.EVENTS`: returns each event of a session once, oldest first.

use std::time::Duration;

use redis::Value;
use support::{NotBefore, Server, eventually, until};

use super::session::{A_WHILE, Event, Session, events};
use crate::common::{Protocol, array, error, info_number};
use crate::lines::{Reply, SOON};
use crate::waiter::{Commands, Waiter, blocked_clients, is_blocked};

/// Causes this many events: the requests of different owners for different keys are granted, in this order.
#[track_caller]
fn grant_requests(server: &Server, session: &Session, count: usize) {
    let mut client = server.raw();
    let each = |line: &str| (0..count).map(|number| line.replace('?', &number.to_string())).collect::<Vec<_>>();
    client.run_all(&each("LOCK.ACQUIRE key-? holder"));
    client.run_all(&each(&session.with_session("LOCK.ACQUIRE key-? owner-? WAIT 0")));
    client.run_all(&each("LOCK.RELEASE key-? holder"));
}

#[track_caller]
fn assert_granted(event: &Event, number: usize) {
    event.token_of(&[&format!("key-{number}")], &format!("owner-{number}"));
}

#[test]
fn events_returns_nil_immediately_without_wait() {
    let server = Server::start();
    for protocol in Protocol::BOTH {
        let mut raw = protocol.connect(&server);
        raw.run_ok("LOCK.SESSION");
        assert_eq!(raw.call_for_bytes(&[b"LOCK.EVENTS"]), protocol.null());
        assert_eq!(raw.call_for_bytes(&[b"LOCK.EVENTS", b"COUNT", b"5"]), protocol.null());
    }
}

#[test]
fn events_returns_nil_after_its_timeout() {
    let server = Server::start();
    for protocol in Protocol::BOTH {
        let mut raw = protocol.connect(&server);
        raw.run_ok("LOCK.SESSION");
        let due = NotBefore::millis(119);
        assert_eq!(raw.call_for_bytes(&[b"LOCK.EVENTS", b"WAIT", b"120"]), protocol.null());
        due.is_over("the end of the wait");
        assert_eq!(raw.run("PING"), Value::SimpleString("PONG".into()));
    }
}

#[test]
fn wait_0_blocks_until_an_event_comes() {
    let server = Server::start();
    let mut session = Session::open(&server);
    session.listen(&server);
    assert!(!eventually(A_WHILE, || !session.raw.pending()));
    grant_requests(&server, &session, 1);
    assert_granted(&session.read_events()[0], 0);
}

#[test]
fn queued_events_are_returned_immediately() {
    let server = Server::start();
    let mut session = Session::open(&server);
    for line in ["LOCK.EVENTS", "LOCK.EVENTS WAIT 0", "LOCK.EVENTS WAIT 100000"] {
        grant_requests(&server, &session, 1);
        let received = events(&session.raw.run(line));
        assert_eq!(received.len(), 1, "{line}");
        assert_granted(&received[0], 0);
        server.raw().run_ok("LOCK.RELEASE key-0 owner-0");
    }
}

#[test]
fn events_are_returned_once_oldest_first_up_to_count() {
    let server = Server::start();
    let mut session = Session::open(&server);
    grant_requests(&server, &session, 10);
    let mut all = Vec::new();
    for (line, expected) in [("COUNT 1", 1), ("COUNT 4", 4), ("WAIT 0 COUNT 2", 2), ("COUNT 1000", 3)] {
        let received = events(&session.raw.run(&format!("LOCK.EVENTS {line}")));
        assert_eq!(received.len(), expected, "{line}");
        all.extend(received);
    }
    for (number, event) in all.iter().enumerate() {
        assert_granted(event, number);
    }
    assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil);
}

#[test]
fn default_count_is_a_thousand() {
    let server = Server::start();
    let mut session = Session::open(&server);
    grant_requests(&server, &session, 2500);
    let counts: Vec<usize> = ["", "", " COUNT 2147483647"]
        .iter()
        .map(|end| session.raw.run(&format!("LOCK.EVENTS{end}")).items().len())
        .collect();
    assert_eq!(counts, [1000, 1000, 500]);
}

#[test]
fn blocked_reader_gets_at_most_count_events() {
    let server = Server::start();
    let mut session = Session::open(&server);
    session.raw.send_lines(&["LOCK.EVENTS WAIT 0 COUNT 2", "LOCK.EVENTS WAIT 0 COUNT 2"]);
    until(SOON, "the session is blocked", || blocked_clients(&server) == 1);
    let mut client = server.raw();
    grant_requests_in_one_command(&mut client, &session, 3);
    let (first, second) = (session.read_events(), session.read_events());
    assert_eq!((first.len(), second.len()), (2, 1));
}

fn grant_requests_in_one_command(client: &mut support::Raw, session: &Session, count: usize) {
    client.get_token("LOCK.ACQUIRE together writer");
    for number in 0..count {
        session.wait(client, &format!("LOCK.ACQUIRE together reader-{number} SHARED WAIT 0"));
    }
    client.run_ok("LOCK.RELEASE together writer");
}

/// Events of one command are returned in one reply.
#[test]
fn blocked_reader_gets_all_events_of_a_command() {
    let server = Server::start();
    let mut session = Session::open(&server);
    session.listen(&server);
    let mut client = server.raw();
    // Few enough for one time slice, even on a busy machine.
    grant_requests_in_one_command(&mut client, &session, 10);
    assert_eq!(session.read_events().len(), 10);
}

#[test]
fn invalid_arguments_are_refused() {
    let server = Server::start();
    let mut raw = server.raw();
    let wrong = [
        ("WAIT", "WAIT must be followed by"),
        ("WAIT x", "WAIT must be between"),
        ("WAIT -1", "WAIT must be between"),
        ("WAIT 315360000001", "WAIT must be between"),
        ("COUNT 0", "COUNT must be between"),
        ("COUNT", "COUNT must be followed by"),
        ("COUNT 1 COUNT 1", "COUNT is given twice"),
        ("LEASE 5", "unknown argument 'LEASE': allowed here are WAIT, COUNT, HEARTBEAT"),
        ("HEARTBEAT HEARTBEAT", "HEARTBEAT is given twice"),
        ("HEARTBEAT 5", "unknown argument '5'"),
    ];
    for (end, message) in wrong {
        let reply = raw.run(&format!("LOCK.EVENTS {end}"));
        let (code, details) = error(&reply);
        assert_eq!(code, "ERR", "{end}");
        assert!(details.starts_with(message), "{end}: {details}");
    }
}

#[test]
fn events_does_not_block_in_transaction() {
    let server = Server::start();
    let mut session = Session::open(&server);
    grant_requests(&server, &session, 1);
    session.raw.send_lines(&["MULTI", "LOCK.EVENTS WAIT 0", "LOCK.EVENTS WAIT 0", "EXEC"]);
    for _ in 0..3 {
        session.raw.read().unwrap();
    }
    let replies = session.raw.read().unwrap();
    let [first, second] = array(&replies) else { panic!("{replies:?}") };
    assert_granted(&events(first)[0], 0);
    assert_eq!(*second, Value::Nil);
}

#[test]
fn events_is_refused_in_script() {
    let server = Server::start();
    let mut session = Session::open(&server);
    grant_requests(&server, &session, 1);
    let reply = session.raw.call(&[b"EVAL", b"return redis.call('LOCK.EVENTS')", b"0"]);
    assert!(error(&reply).1.contains("a script has none of its own"), "{reply:?}");
    assert_granted(&session.event(), 0);
}

#[test]
fn client_unblock_returns_nil() {
    let server = Server::start();
    for protocol in Protocol::BOTH {
        let mut session = Session::on(protocol.connect(&server));
        let mut client = server.raw();
        for how in ["", " TIMEOUT"] {
            session.listen(&server);
            assert_eq!(client.run(&format!("CLIENT UNBLOCK {}{how}", session.client)), Value::Int(1));
            assert_eq!(session.raw.read().unwrap(), Value::Nil);
        }
        // The session stays open, with all requests that wait on its behalf.
        grant_requests(&server, &session, 1);
        assert_granted(&session.event(), 0);
        client.run_ok("DEL key-0");
    }
}

#[test]
fn client_unblock_error_returns_error_as_blpop() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let mut blpop = Waiter::sending(&server, "BLPOP list 0");
    session.listen(&server);
    for id in [session.client, blpop.id] {
        assert_eq!(client.run(&format!("CLIENT UNBLOCK {id} ERROR")), Value::Int(1));
    }
    assert_eq!(error(&session.raw.read().unwrap()), error(&blpop.end()));
    grant_requests(&server, &session, 1);
    assert_granted(&session.event(), 0);
}

/// The event is in this reply or in the next one, once.
#[test]
fn client_unblock_in_command_of_event_loses_no_event() {
    let server = Server::start();
    let mut client = server.raw();
    for how in ["", " ERROR"] {
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
        session.listen(&server);
        client.send_lines(&[
            "MULTI",
            "LOCK.RELEASE key holder",
            &format!("CLIENT UNBLOCK {}{how}", session.client),
            "EXEC",
        ]);
        for _ in 0..3 {
            client.read().unwrap();
        }
        assert_eq!(array(&client.read().unwrap()), [Value::Int(1), Value::Int(1)]);
        let mut received = session.read_unblocked(how);
        if received.is_empty() {
            received = session.next();
        }
        assert_eq!(received.len(), 1);
        received[0].token_of(&["key"], "owner");
        session.assert_no_event(&mut client);
        client.run_ok("DEL key");
    }
}

#[test]
fn pipelined_calls_return_in_order() {
    let server = Server::start();
    let mut session = Session::open(&server);
    session.raw.send_lines(&["LOCK.EVENTS WAIT 0", "LOCK.EVENTS WAIT 0", "PING"]);
    until(SOON, "the session is blocked", || blocked_clients(&server) == 1);
    grant_requests(&server, &session, 1);
    assert_eq!(session.read_events().len(), 1);
    until(SOON, "the session is blocked", || blocked_clients(&server) == 1);
    server.raw().run_ok("DEL key-0");
    grant_requests(&server, &session, 1);
    assert_eq!(session.read_events().len(), 1);
    assert_eq!(session.raw.read().unwrap(), Value::SimpleString("PONG".into()));
}

/// Other connections of the same user have their own events.
#[test]
fn events_are_those_of_the_connection() {
    let server = Server::start();
    let (mut one, mut other) = (Session::open(&server), Session::open(&server));
    grant_requests(&server, &one, 1);
    assert_eq!(other.raw.run("LOCK.EVENTS"), Value::Nil);
    assert_granted(&one.event(), 0);
}

#[test]
fn events_needs_no_key_rights() {
    let server = Server::start();
    let mut admin = server.raw();
    admin.run_ok("ACL SETUSER reader on nopass +lock.session +lock.events resetkeys");
    let mut reader = server.raw();
    reader.run_ok("AUTH reader x");
    reader.run_ok("LOCK.SESSION");
    assert_eq!(reader.run("LOCK.EVENTS"), Value::Nil);
}

#[test]
fn shutdown_ends_blocked_reader() {
    let mut server = Server::start();
    let mut session = Session::open(&server);
    session.listen(&server);
    server.shutdown();
    match session.raw.read() {
        Err(_) | Ok(Value::ServerError(_)) => {}
        Ok(other) => panic!("{other:?}"),
    }
    server.restart();
    assert_eq!(info_number(&server, "holdfast", "holdfast_sessions"), 0);
}

#[test]
fn killed_reader_leaves_nothing() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    session.raw.send_lines(&["LOCK.EVENTS WAIT 300"]);
    until(SOON, "the session is blocked", || is_blocked(&mut client, session.client));
    client.run_ok(&format!("CLIENT KILL ID {}", session.client));
    until(SOON, "the session has ended", || info_number(&server, "holdfast", "holdfast_sessions") == 0);
    assert_eq!(blocked_clients(&server), 0);
    assert!(!eventually(Duration::from_millis(400), || client.run("PING") != Value::SimpleString("PONG".into())));
}

/// No event is lost between two calls.
#[test]
fn events_between_two_calls_are_queued() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    for round in 0..50 {
        session.listen(&server);
        session.get_token(&mut client, "LOCK.ACQUIRE key owner EPHEMERAL");
        client.run_ok("LOCK.FORCE key");
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
        client.run_ok("LOCK.RELEASE key holder");
        let mut received = session.read_events();
        while received.len() < 2 {
            received.extend(session.next());
        }
        assert_eq!((received[0].kind.as_str(), received[1].kind.as_str()), ("lost", "granted"), "round {round}");
        client.run_ok("LOCK.RELEASE key owner");
    }
}

/// Each reply is written in one command.
#[test]
fn reply_names_at_most_two_thousand_keys() {
    const EACH: usize = 100;
    const REQUESTS: usize = 21;
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    for gate in 0..REQUESTS {
        client.get_token(&format!("LOCK.ACQUIRE {gate}:0 holder LEASE 3600000"));
        let keys: Vec<String> = (0..EACH).map(|key| format!("{gate}:{key}")).collect();
        session.wait(&mut client, &format!("LOCK.MACQUIRE {EACH} {} owner WAIT 0", keys.join(" ")));
    }
    let forces = (0..REQUESTS).map(|gate| format!("LOCK.FORCE {gate}:0"));
    client.run_all(&[vec!["MULTI".into()], forces.collect(), vec!["EXEC".into()]].concat());
    until(SOON, "the last request is granted", || client.run("EXISTS 20:1") == Value::Int(1));
    let replies = [session.next(), session.next()];
    assert_eq!(replies.map(|events| events.len()), [20, 1]);
}
