//! Holds that are bound to a session: which requests bind, what a binding follows, which losses are not notified.

use redis::Value;
use support::{Server, until};

use super::session::{Event, Session};
use crate::common::{deadline, words};
use crate::lines::{Reply, holders};
use crate::waiter::{Commands, SOON, assert_held};

#[test]
fn watchdog_renews_while_session_is_open() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 3000");
    let mut seen = vec![deadline(&mut client, b"key")];
    until(SOON, "the lease is renewed five times", || {
        let now = deadline(&mut client, b"key");
        assert!(now > 0, "the lock is held");
        if seen.last() != Some(&now) {
            seen.push(now);
        }
        assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil, "it reads, or nothing would be renewed");
        seen.len() > 5
    });
    session.assert_no_event(&mut client);
}

/// The session is not notified of the owner's own releases.
#[test]
fn owners_own_requests_cause_no_events() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let ways: [&[&str]; 8] = [
        &["LOCK.RELEASE key owner"],
        &["LOCK.RELEASE key owner ALL"],
        &["LOCK.RELEASE key owner HOLDS 0"],
        &["LOCK.ACQUIRE key owner", "LOCK.RELEASE key owner", "LOCK.RELEASE key owner"],
        &["LOCK.MRELEASE 1 key owner"],
        &["LOCK.RENEW key owner LEASE 100000", "LOCK.RELEASE key owner"],
        &["LOCK.RENEW key owner FENCE 5", "LOCK.MRELEASE 2 none key owner ALL"],
        &["MULTI", "LOCK.RELEASE key owner", "LOCK.ACQUIRE key owner", "LOCK.RELEASE key owner", "EXEC"],
    ];
    for way in ways {
        session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG EPHEMERAL");
        for line in way {
            client.run_ok(line);
        }
        assert_eq!(client.run("EXISTS key"), Value::Int(0), "{way:?}");
        session.assert_no_event(&mut client);
    }
}

/// A grant or renewal on behalf of a session is bound to it, also without flags.
#[test]
fn losses_of_holds_without_flags_are_notified() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner");
    client.run_ok("LOCK.FORCE key");
    assert_eq!(session.event(), Event::lost("key", "owner", token, "forced"));
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner LEASE 20");
    assert_eq!(session.event(), Event::lost("key", "owner", token, "expired"));
    let token = client.get_token("LOCK.ACQUIRE key owner");
    session.get_token(&mut client, "LOCK.RENEW key owner");
    client.run_ok("DEL key");
    assert_eq!(session.event(), Event::lost("key", "owner", token, "changed"));
    session.assert_no_event(&mut client);
}

#[test]
fn other_session_takes_over_binding() {
    let server = Server::start();
    let mut client = server.raw();
    let (mut one, mut other) = (Session::open(&server), Session::open(&server));
    let token = one.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG EPHEMERAL");
    other.get_token(&mut client, "LOCK.RENEW key owner WATCHDOG");
    let holder = holders(&mut client, "key").remove("owner").expect("owner holds the lock");
    assert_eq!(holder.field("client"), Value::Int(other.client));
    assert!(holder.field("watchdog").truth() && !holder.field("ephemeral").truth());
    client.run_ok("LOCK.FORCE key");
    assert_eq!(other.event(), Event::lost("key", "owner", token, "forced"));
    assert_eq!(one.event(), Event::unbound("key", "owner", token, "taken"));
    one.assert_no_event(&mut client);
}

/// A later hold of the same owner has its own events, and the loss of the first is reported once.
#[test]
fn lost_event_names_token_of_the_hold() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
    client.send_lines(&["DEL key", "LOCK.ACQUIRE key owner", "DEL key"]);
    client.read().unwrap();
    assert!(client.read().unwrap().token() > token);
    client.read().unwrap();
    assert_eq!(session.event(), Event::lost("key", "owner", token, "changed"));
    session.assert_no_event(&mut client);
}

#[test]
fn loss_is_notified_when_lock_is_acquired_again_at_once() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    for loss in ["DEL key", "LOCK.FORCE key", "FLUSHALL", "SET key x PX 1"] {
        let first = session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
        let again = session.with_session("LOCK.ACQUIRE key owner WATCHDOG");
        client.send_lines(&["MULTI", loss, "DEL key", &again, "EXEC"]);
        for _ in 0..4 {
            client.read().unwrap();
        }
        let second = client.read().unwrap().items()[2].token();
        let why = if loss.starts_with("LOCK") { "forced" } else { "changed" };
        assert_eq!(session.event(), Event::lost("key", "owner", first, why), "{loss}");
        assert_eq!(holders(&mut client, "key")["owner"].field("client"), Value::Int(session.client), "{loss}");
        client.run_ok("LOCK.FORCE key");
        assert_eq!(session.event(), Event::lost("key", "owner", second, "forced"), "{loss}");
    }
    session.assert_no_event(&mut client);
}

/// `FENCE` changes the hold's token.
#[test]
fn fence_changes_token_in_events() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
    let raised = token + 1_000_000;
    assert_eq!(client.run(&format!("LOCK.RENEW key owner FENCE {raised}")), Value::Int(raised));
    client.run_ok("LOCK.FORCE key");
    assert_eq!(session.event(), Event::lost("key", "owner", raised, "forced"));
}

/// The fence of a majority increases from grant to grant, on whichever of its servers.
#[test]
fn tokens_increase_after_fence() {
    let server = Server::start();
    let mut client = server.raw();
    let raised = client.get_token("LOCK.ACQUIRE key owner") + 60_000_000;
    assert_eq!(client.run(&format!("LOCK.RENEW key owner FENCE {raised}")), Value::Int(raised));
    assert!(client.get_token("LOCK.ACQUIRE other owner") > raised);
}

/// The token of one of several keys is raised: no hold is lost.
#[test]
fn raised_token_of_one_key_loses_no_hold() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let both = session.get_token(&mut client, "LOCK.MACQUIRE 2 a b owner WATCHDOG");
    let raised = session.get_token(&mut client, &format!("LOCK.RENEW a owner FENCE {}", both + 1000));
    assert_eq!(raised, both + 1000);
    client.run_ok("LOCK.FORCE a");
    assert_eq!(session.event(), Event::lost("a", "owner", raised, "forced"));
    client.run_ok("LOCK.FORCE b");
    assert_eq!(session.event(), Event::lost("b", "owner", both, "forced"));
}

#[test]
fn losses_and_grants_are_notified_in_order() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key first WATCHDOG");
    session.wait(&mut client, "LOCK.ACQUIRE key second WAIT 0 WATCHDOG");
    client.run_ok("LOCK.FORCE key");
    let events = session.events(2);
    assert_eq!(events[0], Event::lost("key", "first", token, "forced"));
    events[1].token_of(&["key"], "second");
    assert_held(&mut client, "key", "second");
}

/// The connection that forces its own hold is notified: it did not release it.
#[test]
fn session_that_forces_its_own_lock_is_notified() {
    let server = Server::start();
    let mut session = Session::open(&server);
    let line = session.with_session("LOCK.ACQUIRE key owner WATCHDOG");
    let token = session.raw.get_token(&line);
    session.raw.run_ok("LOCK.FORCE key");
    assert_eq!(session.event(), Event::lost("key", "owner", token, "forced"));
}

/// Each loss is notified once.
#[test]
fn ten_thousand_losses_in_one_command_are_notified() {
    const MANY: usize = 10_000;
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let lines: Vec<String> =
        (0..MANY).map(|number| session.with_session(&format!("LOCK.ACQUIRE key-{number} owner WATCHDOG"))).collect();
    let tokens: Vec<i64> = client.run_all(&lines).iter().map(Reply::token).collect();
    client.run_ok("FLUSHALL");
    let mut events = session.events(MANY);
    events.sort_by_key(|event| event.token);
    for (number, (event, token)) in events.iter().zip(tokens).enumerate() {
        assert_eq!(*event, Event::lost(&format!("key-{number}"), "owner", token, "changed"));
    }
    session.assert_no_event(&mut client);
}

/// One command of a transaction serves waiters in several databases: each grant is bound in its database.
#[test]
fn transaction_grant_is_bound_in_its_database() {
    let server = Server::start();
    let (mut client, mut other) = (server.raw(), server.raw());
    other.run_ok("SELECT 1");
    let mut session = Session::open(&server);
    for connection in [&mut client, &mut other] {
        for key in ["mutex", "shared"] {
            connection.run(&format!("LOCK.ACQUIRE {key} first")).token();
        }
        session.wait(connection, "LOCK.ACQUIRE mutex second WAIT 0 WATCHDOG LEASE 3000");
        session.wait(connection, "LOCK.ACQUIRE shared second SHARED WAIT 0 WATCHDOG LEASE 3000");
    }
    // The deletion in one database is noticed before the release in the other one serves its queue.
    let lines =
        ["MULTI", "SELECT 1", "DEL mutex shared", "SELECT 0", "LOCK.MRELEASE 2 mutex shared first", "SET here x"];
    for line in lines {
        client.run_ok(line);
    }
    client.run_ok("EXEC");
    let granted = session.events(4);
    assert_eq!(client.run("EXISTS here"), Value::Int(1), "the transaction is still in its database");
    let client_id = session.client;
    for (db, connection) in [(0, &mut client), (1, &mut other)] {
        for key in ["mutex", "shared"] {
            let event = granted.iter().find(|event| event.db == db && event.keys == [key]).expect("both are granted");
            let holder = &holders(connection, key)["second"];
            assert_eq!(holder.field("token").int(), event.token.expect("a token"), "{key} of {db}");
            assert_eq!(holder.field("client").int(), client_id, "{key} of {db}");
            let before = deadline(connection, key.as_bytes());
            until(SOON, "the lease is renewed", || {
                assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil, "nothing is lost");
                deadline(connection, key.as_bytes()) > before
            });
            assert_eq!(connection.run(&format!("LOCK.RELEASE {key} second")), Value::Int(1));
        }
    }
    session.assert_no_event(&mut client);
}

/// Even if the server itself never reads the key.
#[test]
fn deadline_set_by_other_client_is_reported_when_over() {
    let server = Server::start();
    let mut client = server.raw();
    client.run_ok("DEBUG SET-ACTIVE-EXPIRE 0");
    let mut session = Session::open(&server);
    for (limit, lease, other) in
        [("", 300, 700), ("", 3_600_000, 300), (" LIMIT 2", 300, 700), (" LIMIT 2", 3_600_000, 300)]
    {
        let token = session.get_token(&mut client, &format!("LOCK.ACQUIRE key owner EPHEMERAL LEASE {lease}{limit}"));
        client.run_ok(&format!("PEXPIRE key {other}"));
        assert_eq!(session.event(), Event::lost("key", "owner", token, "expired"), "{lease}, then {other}{limit}");
    }
}

/// One of several holders has expired. Its loss is reported even if the last other holder releases the lock before any
/// command reads it.
#[test]
fn expired_holder_is_notified_after_last_release() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    for (line, reply) in [("LOCK.RELEASE key other", 1), ("LOCK.FORCE key", 1)] {
        client.get_token("LOCK.ACQUIRE key other LIMIT 2 LEASE 3600000");
        let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner LIMIT 2 LEASE 100 EPHEMERAL");
        let replies = client.call_all(&[words("DEBUG SLEEP 0.3"), words(line)]);
        assert_eq!(replies[1], Value::Int(reply), "{line}");
        assert_eq!(session.event(), Event::lost("key", "owner", token, "expired"), "{line}");
    }
}
