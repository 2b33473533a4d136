//! Requests on behalf of a session: the replies, every option, the owner `*`.

use std::time::Duration;

use redis::Value;
use support::{NotBefore, Server, until};

use super::session::{Event, Session, waiting};
use crate::common::{Protocol, deadline, error, fields, unix_micros, unix_millis};
use crate::lines::{Reply, holders};
use crate::waiter::{Commands, SOON, assert_held};

#[test]
fn waiting_is_a_simple_string() {
    let server = Server::start();
    server.raw().get_token("LOCK.ACQUIRE key holder");
    for protocol in Protocol::BOTH {
        let session = Session::open(&server);
        let mut client = protocol.connect(&server);
        let line = session.with_session("LOCK.ACQUIRE key owner WAIT 0");
        assert_eq!(client.call_for_bytes(&crate::common::words(&line)), b"+WAITING\r\n");
    }
}

#[test]
fn free_lock_is_granted_immediately() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    assert_eq!(session.get_token(&mut client, "LOCK.ACQUIRE key owner HOLDS 1"), token, "a re-entry");
    assert_eq!(session.get_token(&mut client, "LOCK.RENEW key owner"), token);
    let several = session.get_token(&mut client, "LOCK.MACQUIRE 2 a b owner WAIT 0");
    let renewed = session.request(&mut client, "LOCK.MRENEW 3 a b none owner");
    assert_eq!(renewed, Value::Array(vec![Value::Int(several), Value::Int(several), Value::Nil]));
    assert_eq!(session.request(&mut client, "LOCK.RENEW none owner"), Value::Nil);
    session.assert_no_event(&mut client);
}

#[test]
fn request_without_wait_never_waits() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    assert_eq!(session.request(&mut client, "LOCK.ACQUIRE key owner"), Value::Nil);
    assert_eq!(session.request(&mut client, "LOCK.MACQUIRE 2 key other owner"), Value::Nil);
    client.run_ok("LOCK.RELEASE key holder");
    session.assert_no_event(&mut client);
    assert_eq!(client.run("EXISTS key"), Value::Int(0));
}

#[test]
fn wait_ends_after_its_timeout() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    let due = NotBefore::millis(149);
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 150");
    assert_eq!(session.event(), Event::timeout(&["key"], "owner"));
    due.is_over("the end of the wait");
    client.run_ok("LOCK.RELEASE key holder");
    session.assert_no_event(&mut client);
    assert_eq!(client.run("EXISTS key"), Value::Int(0));
}

#[test]
fn wait_0_waits_without_limit() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    assert_eq!(client.run("LOCK.WAITERS key").items()[0].field("remaining"), Value::Int(-1));
}

#[test]
fn lease_begins_with_grant() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder LEASE 1500");
    session.wait(&mut client, "LOCK.ACQUIRE key owner LEASE 50000 WAIT 0");
    let asked = unix_millis();
    let token = session.event().token_of(&["key"], "owner");
    let end = deadline(&mut client, b"key");
    assert!(end - token / 1000 >= 49_999, "{} ms", end - token / 1000);
    assert!(end - asked > 50_000, "the lease does not begin with the request");
}

#[test]
fn limit_and_shared_apply_to_sessions() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key writer");
    for owner in ["first", "second"] {
        session.wait(&mut client, &format!("LOCK.ACQUIRE key {owner} SHARED WAIT 0"));
    }
    session.wait(&mut client, "LOCK.ACQUIRE key one-of-two LIMIT 3 WAIT 0");
    session.wait(&mut client, "LOCK.ACQUIRE key last LIMIT 3 WAIT 0");
    client.run_ok("LOCK.RELEASE key writer");
    let events = session.events(3);
    let tokens = [
        events[0].token_of(&["key"], "first"),
        events[1].token_of(&["key"], "second"),
        events[2].token_of(&["key"], "one-of-two"),
    ];
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
    client.run_ok("LOCK.RELEASE key second");
    session.event().token_of(&["key"], "last");
}

#[test]
fn holds_option_applies_to_sessions() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner HOLDS 3 WAIT 0");
    client.run_ok("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
    assert_eq!(client.run("HGET key owner").text(), "3");
    session.get_token(&mut client, "LOCK.ACQUIRE key owner HOLDS 2");
    assert_eq!(client.run("HGET key owner").text(), "3");
    session.get_token(&mut client, "LOCK.ACQUIRE key owner");
    assert_eq!(client.run("HGET key owner").text(), "4");
}

#[test]
fn watchdog_and_ephemeral_bind_to_the_session() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    for (key, flags, watchdog, ephemeral) in
        [("w", "WATCHDOG", true, false), ("e", "EPHEMERAL", false, true), ("b", "WATCHDOG EPHEMERAL", true, true)]
    {
        let at_once = session.get_token(&mut client, &format!("LOCK.ACQUIRE {key} owner {flags}"));
        client.get_token(&format!("LOCK.ACQUIRE {key}:queued holder"));
        session.wait(&mut client, &format!("LOCK.ACQUIRE {key}:queued owner WAIT 0 {flags}"));
        client.run_ok(&format!("LOCK.RELEASE {key}:queued holder"));
        session.event().token_of(&[&format!("{key}:queued")], "owner");
        client.get_token(&format!("LOCK.ACQUIRE {key}:renewed owner"));
        session.get_token(&mut client, &format!("LOCK.RENEW {key}:renewed owner {flags}"));
        session.get_token(&mut client, &format!("LOCK.MACQUIRE 2 {key}:1 {key}:2 owner {flags}"));
        for key in ["", ":queued", ":renewed", ":1", ":2"].map(|end| format!("{key}{end}")) {
            let holder = holders(&mut client, &key).remove("owner").expect("owner holds the lock");
            assert_eq!(holder.field("client"), Value::Int(session.client), "{key}");
            assert_eq!((holder.field("watchdog").truth(), holder.field("ephemeral").truth()), (watchdog, ephemeral));
        }
        assert!(at_once > 0);
    }
}

#[test]
fn request_without_flags_binds_to_session() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner LEASE 60000");
    let holder = holders(&mut client, "key").remove("owner").expect("owner holds the lock");
    assert_eq!(holder.field("client"), Value::Int(session.client));
    assert!(!holder.field("watchdog").truth() && !holder.field("ephemeral").truth());
    client.run_ok("LOCK.FORCE key");
    assert_eq!(session.event(), Event::lost("key", "owner", token, "forced"));
    session.assert_no_event(&mut client);
}

/// And the lease of its renewals.
#[test]
fn request_without_flags_keeps_flags_of_binding() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG EPHEMERAL LEASE 60000");
    for line in ["LOCK.ACQUIRE key owner", "LOCK.ACQUIRE key owner HOLDS 1 LEASE 1000", "LOCK.RENEW key owner"] {
        session.get_token(&mut client, line);
        let holder = holders(&mut client, "key").remove("owner").expect("owner holds the lock");
        assert_eq!(holder.field("client"), Value::Int(session.client), "{line}");
        assert!(holder.field("watchdog").truth() && holder.field("ephemeral").truth(), "{line}");
    }
}

#[test]
fn owner_star_is_the_session() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let id = session.id.clone();
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key *");
    assert_held(&mut client, "key", &id);
    assert_eq!(session.get_token(&mut client, "LOCK.RENEW key *"), token);
    let both = session.get_token(&mut client, "LOCK.MACQUIRE 2 a b *");
    let renewed = session.request(&mut client, "LOCK.MRENEW 2 a b *");
    assert_eq!(renewed, Value::Array(vec![Value::Int(both), Value::Int(both)]));
    client.get_token("LOCK.ACQUIRE other holder");
    session.wait(&mut client, "LOCK.ACQUIRE other * WAIT 0");
    client.run_ok("LOCK.RELEASE other holder");
    session.event().token_of(&["other"], &id);
    assert_eq!(client.run(&format!("LOCK.RELEASE other {id} ALL")), Value::Int(1));
    assert_eq!(client.run("EXISTS other"), Value::Int(0));
    // On the session's own connection, the owner is the same without the option.
    assert_eq!(session.raw.run("LOCK.RENEW key *").token(), token);
    assert_eq!(session.raw.run("LOCK.RELEASE key *"), Value::Int(1));
}

#[test]
fn several_keys_are_granted_together() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE b holder");
    session.wait(&mut client, "LOCK.MACQUIRE 3 c a b owner WAIT 0 WATCHDOG");
    assert_eq!(client.run("EXISTS a c"), Value::Int(0), "a waiter holds nothing");
    client.run_ok("LOCK.RELEASE b holder");
    let token = session.event().token_of(&["c", "a", "b"], "owner");
    for key in ["a", "b", "c"] {
        assert_eq!(client.run(&format!("HGET {key} #fence")).text(), token.to_string());
    }
}

#[test]
fn errors_are_returned_immediately() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.run_ok("SET text text");
    assert_eq!(error(&session.request(&mut client, "LOCK.ACQUIRE text owner WAIT 0")).0, "WRONGTYPE");
    client.get_token("LOCK.ACQUIRE key owner LEASE 600000");
    assert_eq!(error(&session.request(&mut client, "LOCK.ACQUIRE key owner SHARED WAIT 0")).0, "ERR");
    client.get_token("LOCK.ACQUIRE other other LEASE 600000");
    session.wait(&mut client, "LOCK.ACQUIRE other owner WAIT 60000");
    let reply = session.request(&mut client, "LOCK.ACQUIRE key other WAIT 60000");
    assert_eq!(error(&reply).0, "DEADLOCK");
    session.assert_no_event(&mut client);
}

mod repeated {
    use super::*;

    #[test]
    fn repeated_request_keeps_its_position() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder");
        for owner in ["first", "second"] {
            session.wait(&mut client, &format!("LOCK.ACQUIRE key {owner} WAIT 0"));
        }
        session.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0");
        assert_eq!(crate::lines::waiters(&mut client, "key"), ["first", "second"]);
        client.run_ok("LOCK.RELEASE key holder");
        session.event().token_of(&["key"], "first");
        assert_eq!(client.run("HGET key first").text(), "1");
        client.run_ok("LOCK.RELEASE key first");
        session.event().token_of(&["key"], "second");
    }

    #[test]
    fn repeated_request_with_other_limit_is_refused() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder SHARED");
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0 LEASE 500000");
        for other in ["SHARED WATCHDOG", "LIMIT 2"] {
            let reply = session.request(&mut client, &format!("LOCK.ACQUIRE key owner WAIT 0 {other} LEASE 500000"));
            assert_eq!(error(&reply).0, "ERR", "{other}: {reply:?}");
        }
        client.run_ok("LOCK.RELEASE key holder");
        session.event().token_of(&["key"], "owner");
        assert_eq!(client.run("HGETALL key").items().len(), 4, "one hold of limit 1, and the token");
        let holder = holders(&mut client, "key").remove("owner").expect("owner holds the lock");
        assert!(!holder.field("watchdog").truth(), "{holder:?}");
    }

    /// A repetition can't close a cycle that the queued request does not close.
    #[test]
    fn repeated_request_with_stricter_limit_hides_no_deadlock() {
        let server = Server::start();
        let mut client = server.raw();
        let session = Session::open(&server);
        for owner in ["C", "D"] {
            client.get_token(&format!("LOCK.ACQUIRE L {owner} LIMIT 2 LEASE 600000"));
        }
        client.get_token("LOCK.ACQUIRE X A LEASE 600000");
        session.wait(&mut client, "LOCK.ACQUIRE L A LIMIT 2 WAIT 60000");
        session.wait(&mut client, "LOCK.ACQUIRE X D WAIT 60000");
        assert_eq!(error(&session.request(&mut client, "LOCK.ACQUIRE L A WAIT 60000")).0, "ERR");
    }

    /// Whether it has other options as well, or not.
    #[test]
    fn last_wait_of_repeated_request_counts() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder");
        for lease in ["", "LEASE 500000"] {
            session.wait(&mut client, "LOCK.ACQUIRE key long WAIT 20000");
            session.wait(&mut client, &format!("LOCK.ACQUIRE key long WAIT 0 {lease}"));
            session.wait(&mut client, "LOCK.ACQUIRE key short WAIT 0");
            session.wait(&mut client, &format!("LOCK.ACQUIRE key short WAIT 100 {lease}"));
            assert_eq!(session.event(), Event::timeout(&["key"], "short"));
        }
        let waits = client.run("LOCK.WAITERS key");
        let [waits] = waits.items() else { panic!("{waits:?}") };
        assert_eq!(waits.field("remaining"), Value::Int(-1));
        client.run_ok("LOCK.RELEASE key holder");
        session.event().token_of(&["key"], "long");
    }

    /// It does not wait itself, and leaves the queued request as it is.
    #[test]
    fn request_without_wait_leaves_queued_request() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
        assert_eq!(session.request(&mut client, "LOCK.ACQUIRE key owner"), Value::Nil);
        client.run_ok("LOCK.RELEASE key holder");
        session.event().token_of(&["key"], "owner");
        session.assert_no_event(&mut client);
    }

    #[test]
    fn repeated_request_for_several_keys_is_the_same() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE b holder");
        session.wait(&mut client, "LOCK.MACQUIRE 2 a b owner WAIT 0");
        session.wait(&mut client, "LOCK.MACQUIRE 2 a b owner WAIT 0");
        assert_eq!(crate::waiter::count_waiters(&mut client, "a"), 1);
        client.run_ok("LOCK.RELEASE b holder");
        session.event().token_of(&["a", "b"], "owner");
        session.assert_no_event(&mut client);
    }

    #[test]
    fn request_for_other_keys_is_another_request() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE b holder");
        session.wait(&mut client, "LOCK.MACQUIRE 2 a b owner WAIT 0");
        for line in ["LOCK.ACQUIRE a owner WAIT 0", "LOCK.MACQUIRE 2 b c owner WAIT 0"] {
            assert_eq!(error(&session.request(&mut client, line)).0, "ERR", "{line}");
        }
        client.run_ok("LOCK.RELEASE b holder");
        session.event().token_of(&["a", "b"], "owner");
        assert_eq!(client.run("HGET a owner").text(), "1");
    }

    #[test]
    fn request_in_other_database_is_another_request() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
        client.run_ok("SELECT 3");
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
        client.run_ok("LOCK.RELEASE key holder");
        let event = session.event();
        assert_eq!(event.db, 3);
        event.token_of(&["key"], "owner");
        assert_eq!(client.run("LOCK.RELEASE key owner ALL"), Value::Int(1));
        client.run_ok("SELECT 0");
        assert_eq!(crate::waiter::count_waiters(&mut client, "key"), 1, "the first request still waits");
    }

    /// The first outcome is reported, even if the request was repeated before its event was read.
    #[test]
    fn repeated_request_after_grant_is_a_reentry() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(&mut client, "LOCK.ACQUIRE key owner HOLDS 1 WAIT 0");
        client.run_ok("LOCK.RELEASE key holder");
        let line = "LOCK.ACQUIRE key owner HOLDS 1 WAIT 0";
        let again = session.get_token(&mut client, line);
        assert_eq!(session.event().token_of(&["key"], "owner"), again);
        assert_eq!(session.get_token(&mut client, line), again);
        assert_eq!(client.run("HGET key owner").text(), "1");
        session.assert_no_event(&mut client);
    }
}

/// A wait costs no blocked client.
#[test]
fn waiting_session_blocks_no_client() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    for number in 0..100 {
        session.wait(&mut client, &format!("LOCK.ACQUIRE key owner-{number} WAIT 0"));
    }
    assert_eq!(crate::waiter::blocked_clients(&server), 0);
    assert_eq!(crate::waiter::count_waiters(&mut client, "key"), 100);
}

#[test]
fn keys_and_owners_are_arbitrary_bytes() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    for name in crate::common::NAMES {
        client.call(&[b"LOCK.ACQUIRE", name, b"holder"]).token();
        let ask: [&[u8]; 7] = [b"LOCK.ACQUIRE", name, name, b"WAIT", b"0", b"SESSION", session.id.as_bytes()];
        assert_eq!(client.call(&ask), waiting());
        client.call(&[b"LOCK.RELEASE", name, b"holder"]);
        let reply = session.raw.run("LOCK.EVENTS WAIT 20000");
        let event = reply.items()[0].items();
        assert_eq!((crate::common::bytes(&event[2].items()[0]), crate::common::bytes(&event[3])), (name, name));
        assert_eq!(fields(&mut client, name)[name], b"1");
    }
}

/// Even if no command reads the key.
#[test]
fn expiry_of_awaited_lock_is_noticed() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder LEASE 1500");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    session.listen(&server);
    let token = session.read_events()[0].token_of(&["key"], "owner");
    until(SOON, "the lease has expired", || unix_micros() - token > Duration::from_millis(1).as_micros() as i64);
    assert_held(&mut client, "key", "owner");
}
