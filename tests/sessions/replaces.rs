//! `LOCK.SESSION REPLACES id …`: a new session closes those that its client may still have open. `ends.rs` covers the effects
//! of their end.

use redis::Value;
use support::{Raw, Server, until};

use super::session::Session;
use crate::common::{error, info_number, int, token};
use crate::lines::Reply;
use crate::waiter::{Commands, SOON};

/// The replies to requests that are sent in one packet.
fn at_once(client: &mut Raw, lines: &[String]) -> Vec<Value> {
    client.send_lines(&lines.iter().map(String::as_str).collect::<Vec<_>>());
    lines.iter().map(|_| client.read().expect("a reply")).collect()
}

/// Even if the old connection would have stayed open for minutes.
#[test]
fn late_requests_of_replaced_session_are_refused() {
    let server = Server::start();
    let mut client = server.raw();
    let (old, new) = (Session::open(&server), Session::open(&server));
    let held = old.get_token(&mut client, "LOCK.ACQUIRE mine owner EPHEMERAL");
    let watched = old.get_token(&mut client, "LOCK.ACQUIRE kept owner WATCHDOG LEASE 60000");
    client.get_token("LOCK.ACQUIRE busy holder");
    old.wait(&mut client, "LOCK.ACQUIRE busy owner WAIT 0");
    let mut raw = new.raw;
    let replies = at_once(
        &mut raw,
        &[
            format!("LOCK.SESSION REPLACES {}", old.id),
            format!("LOCK.RENEW mine owner TOKEN {held} SESSION {}", old.id),
            format!("LOCK.ACQUIRE late owner SESSION {}", old.id),
            "LOCK.RENEW mine owner HOLDS".into(),
            format!("LOCK.RENEW mine owner TOKEN {held} SESSION {}", new.id),
            format!("LOCK.ACQUIRE mine somebody SESSION {}", new.id),
            format!("LOCK.RENEW kept owner TOKEN {watched} WATCHDOG SESSION {}", new.id),
            "LOCK.RELEASE busy holder".into(),
            "LOCK.INFO busy".into(),
        ],
    );
    assert_eq!(replies[0].field("id").text(), new.id);
    assert_eq!([&replies[1], &replies[2]].map(|reply| error(reply).0), ["NOSESSION"; 2]);
    assert_eq!(error(&replies[3]).0, "ERR");
    assert_eq!(replies[4], Value::Nil, "the hold ended with its session");
    assert!(token(&replies[5]) > held);
    assert_eq!(token(&replies[6]), watched, "its watched hold is carried over");
    assert_eq!((int(&replies[7]), &replies[8]), (1, &Value::Nil), "its request has ended");
    assert_eq!(client.run("LOCK.INFO kept").field("holders").items()[0].field("client").int(), new.client);
}

/// A client that still uses it gets an error.
#[test]
fn replaced_session_is_closed() {
    let server = Server::start();
    let (mut old, mut new) = (Session::open(&server), Session::open(&server));
    let mut listening = Session::open(&server);
    listening.listen(&server);
    new.raw.run_ok(&format!("LOCK.SESSION REPLACES {} {} {}", old.id, listening.id, old.id));
    assert!(old.raw.read().is_err() && listening.raw.read().is_err());
    until(SOON, "no connection is blocked", || info_number(&server, "clients", "blocked_clients") == 0);
    // It can be repeated.
    assert_eq!(new.raw.run(&format!("LOCK.SESSION REPLACES {} {}", old.id, listening.id)).field("id").text(), new.id);
}

#[test]
fn unknown_ids_are_ignored() {
    let server = Server::start();
    let mut session = Session::open(&server);
    let (run, number) = session.id.split_once(':').expect("two parts");
    let ids = [
        format!("{run}:999999"),
        format!("{run}:0"),
        format!("{run}:{number}x"),
        "00000000-0000-4000-8000-000000000000:1".into(),
        "nonsense".into(),
        "REPLACES".into(),
    ];
    for id in &ids {
        assert_eq!(session.raw.run(&format!("LOCK.SESSION REPLACES {id}")).field("id").text(), session.id, "{id}");
    }
    assert_eq!(session.raw.run(&format!("lock.session replaces {}", ids.join(" "))).field("id").text(), session.id);
    let many = vec!["x"; 128].join(" ");
    assert_eq!(session.raw.run(&format!("LOCK.SESSION REPLACES {many}")).field("id").text(), session.id);
    let reply = session.raw.run(&format!("LOCK.SESSION REPLACES {many} x")).error();
    assert_eq!(reply, "ERR REPLACES must be followed by 1 to 128 session ids, got 129");
    let reply = session.raw.run("LOCK.SESSION REPLACES").error();
    assert_eq!(reply, "ERR REPLACES must be followed by 1 to 128 session ids, got 0");
    let reply = session.raw.run("LOCK.SESSION replace x").error();
    assert_eq!(reply, "ERR unknown argument 'replace': allowed here are REPLACES");
    let own = session.id.clone();
    let reply = session.raw.run(&format!("LOCK.SESSION REPLACES {own}")).error();
    assert_eq!(reply, "ERR a session can't replace itself");
}

/// All sessions are replaced or none, and the error shows only that another user's session exists.
#[test]
fn session_of_other_user_is_not_replaced() {
    let server = Server::start();
    let mut admin = server.raw();
    let mut stranger = server.raw();
    for user in ["one", "two"] {
        // Closing an own session needs no right to CLIENT KILL.
        admin.run_ok(&format!("ACL SETUSER {user} on nopass -@all +lock.session +ping +client|id"));
    }
    stranger.run_ok("AUTH one x");
    let mut own = server.raw();
    own.run_ok("AUTH two x");
    let (mut theirs, mut old) = (Session::on(stranger), Session::on(own));
    let mut new = server.raw();
    new.run_ok("AUTH two x");
    let reply = new.run(&format!("LOCK.SESSION REPLACES {} {}", old.id, theirs.id)).error();
    assert_eq!(reply, "NOPERM this session belongs to another user");
    for session in [&mut theirs, &mut old] {
        assert_eq!(session.raw.run("PING"), Value::SimpleString("PONG".into()));
    }
    new.run_ok(&format!("LOCK.SESSION REPLACES {}", old.id));
    assert!(old.raw.read().is_err());
}

#[test]
fn replaces_works_in_transaction_and_not_in_script() {
    let server = Server::start();
    let mut client = server.raw();
    let (mut old, mut new) = (Session::open(&server), Session::open(&server));
    old.get_token(&mut client, "LOCK.ACQUIRE key owner EPHEMERAL");
    let script = format!("return redis.call('LOCK.SESSION', 'REPLACES', '{}')", old.id);
    assert!(error(&client.call(&[b"EVAL", script.as_bytes(), b"0"])).1.contains("a script has none of its own"));
    assert_eq!(old.raw.run("PING"), Value::SimpleString("PONG".into()));
    let lines =
        ["MULTI".into(), format!("LOCK.SESSION REPLACES {}", old.id), "LOCK.ACQUIRE key next".into(), "EXEC".into()];
    let replies = at_once(&mut new.raw, &lines);
    let replies = replies[3].items();
    assert_eq!(replies[0].field("id").text(), new.id);
    assert!(token(&replies[1]) > 0, "{replies:?}");
}

/// A replica's link, a subscriber, and any other connection.
#[test]
fn connections_that_are_no_sessions_are_not_closed() {
    let server = Server::start();
    let mut session = Session::open(&server);
    let (mut plain, mut holder, mut subscriber) = (server.raw(), server.raw(), server.raw());
    holder.get_token("LOCK.ACQUIRE key owner EPHEMERAL");
    let mut ids: Vec<i64> = [&mut plain, &mut holder, &mut subscriber].map(Raw::client_id).to_vec();
    subscriber.run_ok("SUBSCRIBE channel");
    let replica = Server::start();
    replica.replica_of(&server);
    server.wait_replica_online();
    let link = plain.run("CLIENT LIST TYPE replica").text();
    let link: i64 = link.strip_prefix("id=").and_then(|it| it.split(' ').next()?.parse().ok()).expect("one link");
    ids.push(link);
    let (run, _) = session.id.split_once(':').expect("two parts");
    let ids: Vec<String> = ids.iter().map(|id| format!("{run}:{id}")).collect();
    session.raw.run_ok(&format!("LOCK.SESSION REPLACES {}", ids.join(" ")));
    for connection in [&mut plain, &mut holder] {
        assert_eq!(connection.run("PING"), Value::SimpleString("PONG".into()));
    }
    assert_eq!(plain.run("PUBLISH channel x"), Value::Int(1), "the subscriber is still there");
    assert_eq!(plain.run("EXISTS key"), Value::Int(1));
    let still = plain.run("CLIENT LIST TYPE replica").text();
    assert!(still.starts_with(&format!("id={link} ")), "the link is still there: {still}");
}
