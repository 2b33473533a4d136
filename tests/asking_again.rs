//! Requests that are safe to repeat: a queued request, an acquisition with `HOLDS`, a renewal, a raise of the token.

use std::time::Duration;

use redis::Value;
use support::{Server, eventually, until};

use crate::common::error;
use crate::lines::{Commands, Reply, SOON, owners, waiters};
use crate::sessions::session::{Session, waiting};
use crate::waiter::Waiter;

/// A waiter that repeats its request over another connection keeps its place in the queue.
#[test]
fn waiter_keeps_position_when_it_reconnects() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 600000");
    let mut stale = Waiter::start(&server, "key", "owner");
    let mut behind = Waiter::start(&server, "key", "behind");
    let mut again = Waiter::sending(&server, "LOCK.ACQUIRE key owner WAIT 60000 LEASE 60000 WITHWAITED");
    assert_eq!(stale.error(), "SUPERSEDED");
    assert_eq!(waiters(&mut client, "key"), ["owner", "behind"]);
    client.run_ok("LOCK.RELEASE key holder");
    let granted = again.end();
    let [token, waited] = granted.items() else { panic!("{granted:?}") };
    assert!((0..60_000).contains(&waited.int()), "{granted:?}");
    let ttl = client.run("PTTL key").int();
    assert!((1..=60_000).contains(&ttl), "the lease is that of the last request: {ttl}");
    assert!(behind.waits());
    assert_eq!(client.run(&format!("LOCK.RELEASE key owner TOKEN {}", token.token())), Value::Int(1));
    behind.token();
}

#[test]
fn request_takes_over_position_of_session_and_back() {
    let server = Server::start();
    let mut client = server.raw();
    let (mut one, mut other) = (Session::open(&server), Session::open(&server));
    client.get_token("LOCK.ACQUIRE a holder LEASE 600000");
    one.wait(&mut client, "LOCK.MACQUIRE 2 a b owner WAIT 0");
    one.wait(&mut client, "LOCK.MACQUIRE 2 a b owner WAIT 0");
    other.wait(&mut client, "LOCK.MACQUIRE 2 b a owner WAIT 0");
    assert!(one.event().error_of(&["a", "b"], "owner").starts_with("SUPERSEDED "));
    let mut blocked = Waiter::sending(&server, "LOCK.MACQUIRE 2 a b owner WAIT 0");
    assert!(other.event().error_of(&["b", "a"], "owner").starts_with("SUPERSEDED "));
    one.wait(&mut client, "LOCK.MACQUIRE 2 a b owner WAIT 0 LEASE 5000");
    assert_eq!(blocked.error(), "SUPERSEDED");
    // A repeated request of the same session replaces the options, and has one outcome.
    one.wait(&mut client, "LOCK.MACQUIRE 2 a b owner WAIT 0 LEASE 600000");
    client.run_ok("LOCK.RELEASE a holder");
    one.event().token_of(&["a", "b"], "owner");
    assert!(client.run("PTTL a").int() > 500_000);
    one.assert_no_event(&mut client);
}

#[test]
fn repeated_request_with_other_limit_or_keys_is_refused() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE a holder LEASE 600000");
    let mut waiter = Waiter::sending(&server, "LOCK.MACQUIRE 2 a b owner WAIT 0");
    for line in ["LOCK.ACQUIRE a owner WAIT 0", "LOCK.MACQUIRE 3 a b c owner WAIT 0", "LOCK.MACQUIRE 1 a owner WAIT 0"]
    {
        assert!(client.run(line).error().contains("together with other keys"), "{line}");
    }
    assert_eq!(client.run("LOCK.ACQUIRE a owner"), Value::Nil, "without WAIT, nothing waits");
    client.run_ok("LOCK.RELEASE a holder");
    waiter.token();
    client.get_token("LOCK.ACQUIRE one holder LEASE 600000");
    let mut waiter = Waiter::start(&server, "one", "owner");
    assert!(client.run("LOCK.ACQUIRE one owner WAIT 0 SHARED").error().contains("under another limit"));
    client.run_ok("LOCK.RELEASE one holder");
    waiter.token();
}

/// Not the timeout of the request that it replaced.
#[test]
fn timeout_of_last_request_counts() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 600000");
    let mut first = Waiter::start(&server, "key", "owner");
    let mut short = Waiter::sending_briefly(&server, "LOCK.ACQUIRE key owner WAIT 100");
    assert_eq!(first.error(), "SUPERSEDED");
    assert_eq!(short.end(), Value::Nil);
    let mut brief = Waiter::sending_briefly(&server, "LOCK.ACQUIRE key owner WAIT 200");
    let mut last = Waiter::start(&server, "key", "owner");
    let ended = brief.end();
    assert!(ended == Value::Nil || error(&ended).0 == "SUPERSEDED", "{ended:?}");
    assert!(!eventually(Duration::from_millis(250), || !last.waits()));
    drop(last);
    until(SOON, "the queue is empty", || waiters(&mut client, "key").is_empty());
}

/// A request with `HOLDS` can be repeated, also when another owner has lowered the limit. It does not raise the limit.
#[test]
fn holds_repeats_a_grant_under_a_larger_limit_only() {
    let server = Server::start();
    let mut client = server.raw();
    let token = client.get_token("LOCK.ACQUIRE key reader SHARED HOLDS 1 LEASE 600000");
    assert!(client.run("LOCK.ACQUIRE key reader HOLDS 1").error().contains("SHARED"), "an upgrade is not granted");
    client.get_token("LOCK.ACQUIRE key other LIMIT 5");
    for lease in [5, 900_000] {
        assert_eq!(client.get_token(&format!("LOCK.ACQUIRE key reader SHARED HOLDS 1 LEASE {lease}")), token);
    }
    assert_eq!(client.run("LOCK.INFO key").field("limit"), Value::Int(5), "it stays");
    assert!(client.run("LOCK.ACQUIRE key reader LIMIT 4 HOLDS 1").error().contains("LIMIT 5"));
    assert!(client.run("LOCK.ACQUIRE key reader SHARED HOLDS 2").error().contains("LIMIT 5"));
    assert_eq!(client.run("LOCK.RELEASE key reader"), Value::Int(1), "one hold, whatever was repeated");
}

/// A repeated request with a shorter lease does not shorten the granted one.
#[test]
fn repeated_acquire_with_another_lease_keeps_the_later_deadline() {
    let server = Server::start();
    let mut client = server.raw();
    let token = client.get_token("LOCK.ACQUIRE key owner HOLDS 1 LEASE 600000");
    assert_eq!(client.get_token("LOCK.ACQUIRE key owner HOLDS 1 LEASE 1000"), token);
    assert!(client.run("PTTL key").int() > 500_000);
    assert_eq!(client.get_token("LOCK.ACQUIRE key owner HOLDS 1 LEASE 900000"), token);
    assert!(client.run("PTTL key").int() > 800_000);
}

#[test]
fn renew_without_lease_never_shortens() {
    let server = Server::start();
    let mut client = server.raw();
    let token = client.get_token("LOCK.ACQUIRE key owner LEASE 600000");
    assert_eq!(client.run("LOCK.RENEW key owner"), Value::Int(token));
    assert!(client.run("PTTL key").int() > 500_000);
    assert_eq!(client.run("LOCK.RENEW key owner LEASE 5000"), Value::Int(token));
    assert!(client.run("PTTL key").int() <= 5000);
    assert_eq!(client.run("LOCK.MRENEW 1 key owner").items(), [Value::Int(token)]);
    assert!((20_000..=30_000).contains(&client.run("PTTL key").int()), "the default lease");
}

/// Without flags, a renewal keeps the session and the flags of the binding.
#[test]
fn renew_changes_binding_only_with_flags() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    let bound = |client: &mut support::Raw| {
        let holder = client.run("LOCK.INFO key").field("holders").items()[0].clone();
        (holder.field("client"), holder.field("watchdog"))
    };
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner LEASE 600000 WATCHDOG");
    let before = bound(&mut client);
    assert_eq!(before, (Value::Int(session.client), Value::Int(1)));
    assert_eq!(client.run(&format!("LOCK.RENEW key owner TOKEN {token} LEASE 60000")), Value::Int(token));
    assert_eq!(bound(&mut client), before);
    // Without LEASE, the lease is that of the binding.
    assert_eq!(client.run("LOCK.RENEW key owner"), Value::Int(token));
    assert!(client.run("PTTL key").int() > 500_000);
    assert_eq!(client.run("LOCK.RENEW key owner LEASE 60000 UNBIND"), Value::Int(token));
    assert_eq!(bound(&mut client), (Value::Nil, Value::Int(0)));
    drop(session);
    until(SOON, "the session has ended", || server.info("holdfast", "holdfast_sessions").as_deref() == Some("0"));
    assert_eq!(owners(&mut client, "key"), ["owner"]);
    for with in ["SESSION id", "EPHEMERAL"] {
        assert!(client.run(&format!("LOCK.RENEW key owner UNBIND {with}")).error().starts_with("ERR"));
    }
}

/// A raise can be repeated. A late renewal with the old token finds no hold, and shortens nothing.
#[test]
fn raise_can_be_repeated_and_late_renewal_finds_nothing() {
    let server = Server::start();
    let mut client = server.raw();
    for limit in ["", " SHARED"] {
        let token = client.get_token(&format!("LOCK.ACQUIRE key owner{limit}"));
        let raised = token + 1;
        let raise = format!("LOCK.RENEW key owner TOKEN {token} FENCE {raised} LEASE 600000");
        for _ in 0..2 {
            assert_eq!(client.run(&raise), Value::Int(raised));
        }
        assert_eq!(client.run(&format!("LOCK.RENEW key owner TOKEN {token} LEASE 1000")), Value::Nil);
        assert_eq!(client.run(&format!("LOCK.RELEASE key owner TOKEN {token}")), Value::Nil);
        assert!(client.run("PTTL key").int() > 500_000);
        assert_eq!(client.run(&format!("{raise} UNBIND")), Value::Int(raised));
        assert_eq!(client.run(&format!("LOCK.RELEASE key owner TOKEN {raised}")), Value::Int(1));
    }
}

#[test]
fn acquire_reports_its_waiting_time() {
    let server = Server::start();
    let mut client = server.raw();
    let granted = client.run("LOCK.ACQUIRE key owner WITHWAITED");
    assert_eq!(granted.items()[1], Value::Int(0));
    assert_eq!(client.run("LOCK.ACQUIRE key other WITHWAITED"), Value::Nil);
    let several = client.run("LOCK.MACQUIRE 2 a b owner WITHWAITED WAIT 5");
    assert_eq!((several.items().len(), &several.items()[1]), (2, &Value::Int(0)));
    let session = Session::open(&server);
    assert_eq!(session.request(&mut client, "LOCK.ACQUIRE key third WAIT 0 WITHWAITED"), waiting());
}

#[test]
fn version_reports_protocol_and_module() {
    let server = Server::start();
    let mut client = server.raw();
    let received = client.run("LOCK.VERSION");
    assert_eq!(received.field("protocol").items(), [Value::Int(4), Value::Int(4)]);
    assert_eq!(received.field("version").text(), env!("CARGO_PKG_VERSION"));
    assert_eq!(received.field("replicas-timeout"), Value::Int(1000));
    client.run("CONFIG SET holdfast.replicas-timeout 250");
    assert_eq!(client.run("LOCK.VERSION").field("replicas-timeout"), Value::Int(250));
}
