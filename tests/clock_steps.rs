//! A server whose clock steps: a bound hold keeps the rest of its lease.

use redis::Value;
use support::{Clock, Raw, Server, skip, until};

use crate::lines::{Commands, Reply, SOON, Watched, arrives, deadline, owners, until_gone, waiters};
use crate::waiter::Waiter;

const MINUTE: i64 = 60_000;
const HOUR: i64 = 60 * MINUTE;

/// A server with its own clock, or `None` if the server can't have one.
fn start() -> Option<(Server, Clock)> {
    let Some((builder, clock)) = Clock::of(Server::builder()) else {
        skip("the library to preload is not in the container");
        return None;
    };
    Some((builder.start(), clock))
}

/// The key's remaining lease.
fn left(connection: &mut Raw, key: &str) -> i64 {
    connection.run(&format!("PTTL {key}")).int()
}

#[test]
fn forward_step_does_not_end_bound_hold() {
    let Some((server, clock)) = start() else { return };
    let (holder, mut other) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    let token = holder.run("LOCK.ACQUIRE bound a LEASE 60000 EPHEMERAL").token();
    assert_eq!(holder.run("LOCK.ACQUIRE bound a HOLDS 3 LEASE 60000 EPHEMERAL").token(), token);
    holder.run("LOCK.ACQUIRE watched a LEASE 60000 WATCHDOG").token();
    holder.run("LOCK.ACQUIRE one-of-two a LEASE 60000 LIMIT 2 EPHEMERAL").token();
    other.run("LOCK.ACQUIRE one-of-two b LEASE 60000 LIMIT 2").token();
    other.run("LOCK.ACQUIRE unbound b LEASE 60000").token();
    let mut for_bound = Waiter::start(&server, "bound", "c");
    let mut for_unbound = Waiter::start(&server, "unbound", "c");
    let mut for_permit = Waiter::sending(&server, "LOCK.ACQUIRE one-of-two c LIMIT 2 WAIT 0");

    clock.set(HOUR);
    // The lock that is not bound has expired.
    assert!(arrives(&mut for_unbound.raw).token() > token);
    assert!(arrives(&mut for_permit.raw).token() > token);
    for key in ["bound", "watched"] {
        until(SOON, "the key's deadline follows the clock", || (1..=MINUTE).contains(&left(&mut other, key)));
        assert_eq!(owners(&mut other, key), ["a"]);
    }
    assert_eq!(owners(&mut other, "one-of-two"), ["a", "c"]);
    assert_eq!(waiters(&mut other, "bound"), ["c"]);
    assert_eq!(holder.run(&format!("LOCK.RELEASE bound a TOKEN {token}")), Value::Int(0), "the count is as it was");
    assert_eq!(holder.run("LOCK.RELEASE bound a ALL"), Value::Int(1));
    assert!(arrives(&mut for_bound.raw).token() > token);
}

#[test]
fn no_request_acquires_bound_lock_after_forward_step() {
    let Some((server, clock)) = start() else { return };
    let (holder, mut other) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    for (round, ms) in (1..=50).zip((1..).map(|round| round * HOUR)) {
        let token = holder.run(&format!("LOCK.ACQUIRE k{round} a LEASE 4000 WATCHDOG")).token();
        clock.set(ms);
        // Immediately, before the server's cron runs.
        assert!(other.run(&format!("LOCK.ACQUIRE k{round} b")).is_null(), "round {round}");
        assert_eq!(holder.run(&format!("LOCK.RENEW k{round} a TOKEN {token} LEASE 60000")), Value::Int(token));
        // The same if another command lets the key expire.
        clock.set(ms + HOUR / 2);
        other.run(&format!("EXISTS k{round}"));
        assert!(other.run(&format!("LOCK.ACQUIRE k{round} b")).is_null(), "round {round}");
        assert_eq!(owners(&mut other, &format!("k{round}")), ["a"]);
    }
}

#[test]
fn backward_step_does_not_extend_bound_hold() {
    let Some((server, clock)) = start() else { return };
    let (holder, mut other) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    let id = holder.client_id();
    holder.run("LOCK.ACQUIRE bound a LEASE 60000 EPHEMERAL").token();
    holder.run("LOCK.ACQUIRE watched a LEASE 4000 WATCHDOG").token();
    other.run("LOCK.ACQUIRE unbound b LEASE 60000").token();
    clock.set(-HOUR);
    until(SOON, "the server reads its clock", || left(&mut other, "unbound") > HOUR - MINUTE);
    for (key, lease) in [("bound", MINUTE), ("watched", 4000)] {
        until(SOON, "the key's deadline follows the clock", || (1..=lease).contains(&left(&mut other, key)));
    }
    assert!(left(&mut other, "unbound") > HOUR - MINUTE, "an unbound lock expires like any other key");
    // The server renews at the same intervals as before.
    for _ in 0..2 {
        let before = deadline(&mut other, "watched");
        until(SOON, "the lease is renewed", || deadline(&mut other, "watched") > before);
    }
    holder.reset();
    until_gone(&mut other, id);
    until(SOON, "the lease expires", || deadline(&mut other, "watched") == -2);
}

#[test]
fn session_gets_replies_in_time_despite_clock_steps() {
    let Some((server, clock)) = start() else { return };
    let (mut reader, client) = (server.raw(), server.raw());
    let mut client = Watched::over(client, &server);
    let id = reader.run("LOCK.SESSION").field("id").text();
    client.run(&format!("LOCK.ACQUIRE k a LEASE 4000 WATCHDOG SESSION {id}")).token();
    for step in [0, -HOUR, HOUR, -2 * HOUR, 0] {
        for _ in 0..2 {
            reader.send(&[b"LOCK.EVENTS", b"WAIT", b"0", b"HEARTBEAT"]).expect("sent");
            clock.set(step);
            // Every eighth of the lease: within half a second.
            let events = arrives(&mut reader);
            let alive = events.items()[0].items()[5].text();
            let sure: i64 = alive.split(' ').nth(2).expect("sure").parse().expect("a number");
            assert!((1..=1000).contains(&sure), "after a step to {step}: {alive}");
        }
    }
    assert_eq!(owners(&mut client, "k"), ["a"]);
}
