//! Where the server would refuse a write, the module grants and renews nothing. Waits still time out, and everything continues
//! when the server accepts writes again.

use redis::Value;
use support::{Server, skip, until};

use super::session::{Event, Session};
use crate::common::unix_millis;
use crate::lines::{Reply, arrives, deadline};
use crate::replicas::group::Group;
use crate::waiter::{Commands, SOON};

/// A way to make the server refuse writes, and accept them again.
struct Refusal {
    code: &'static str,
    begin: fn(&Server),
    end: fn(&Server),
}

const TOO_FEW_REPLICAS: Refusal = Refusal {
    code: "NOREPLICAS",
    begin: |server| _ = server.raw().run_ok("CONFIG SET min-replicas-to-write 1"),
    end: |server| _ = server.raw().run_ok("CONFIG SET min-replicas-to-write 0"),
};

/// A directory takes the place of the snapshot file.
const NO_SNAPSHOT: Refusal = Refusal {
    code: "MISCONF",
    begin: |server| {
        std::fs::create_dir(server.dir().join("dump.rdb")).expect("made");
        save(server, "err");
    },
    end: |server| {
        std::fs::remove_dir(server.dir().join("dump.rdb")).expect("removed");
        save(server, "ok");
    },
};

fn save(server: &Server, status: &str) {
    assert_eq!(server.raw().call(&[b"CONFIG", b"SET", b"save", b"3600 1000000"]), Value::Okay);
    server.raw().run_ok("BGSAVE");
    until(SOON, "the snapshot has finished", || {
        server.info("persistence", "rdb_last_bgsave_status").as_deref() == Some(status)
    });
}

#[track_caller]
fn nothing_is_written_until_the_server_takes_writes(refusal: &Refusal) {
    let server = Server::builder().arg("save", "").start();
    let [mut holder, mut waiter, mut impatient, mut viewer] = std::array::from_fn(|_| server.raw());
    let mut session = Session::open(&server);
    holder.run("LOCK.SESSION");
    holder.run("LOCK.ACQUIRE key holder LEASE 2500").token();
    holder.run("LOCK.ACQUIRE watched holder LEASE 2700 WATCHDOG").token();
    assert_eq!(waiter.begin("LOCK.ACQUIRE key waiter LEASE 600000 WAIT 0"), None);
    assert_eq!(impatient.begin("LOCK.ACQUIRE key impatient WAIT 2000"), None);
    session.wait(&mut viewer, "LOCK.ACQUIRE watched next LEASE 600000 WAIT 0");
    (refusal.begin)(&server);
    let error = viewer.run("SET some thing").error();
    assert!(error.starts_with(refusal.code), "{error}");

    assert!(arrives(&mut impatient).is_null(), "its timeout has passed");
    until(SOON, "both leases have expired", || viewer.run("EXISTS key watched") == Value::Int(0));
    let renewals = server.info("holdfast", "holdfast_watchdog_renewals");
    // The module checks the queue several times meanwhile.
    let cron = || server.info("server", "lru_clock");
    let clock = cron();
    until(SOON, "a second has passed", || cron() != clock);
    assert!(waiter.pending(), "granted while the server refuses writes");
    assert_eq!(viewer.run("EXISTS key watched"), Value::Int(0));
    assert_eq!(server.info("holdfast", "holdfast_watchdog_renewals"), renewals);

    (refusal.end)(&server);
    arrives(&mut waiter).token();
    session.event().token_of(&["watched"], "next");
}

#[test]
fn sessions_are_granted_nothing_with_too_few_replicas() {
    nothing_is_written_until_the_server_takes_writes(&TOO_FEW_REPLICAS);
}

#[test]
fn sessions_are_granted_nothing_after_failed_snapshot() {
    if Server::start().is_container() {
        return skip("the server's directory is not on this machine");
    }
    nothing_is_written_until_the_server_takes_writes(&NO_SNAPSHOT);
}

/// The expiry is notified although nothing is written. Overdue renewals run once writes are accepted.
#[test]
fn expiry_is_notified_while_writes_are_refused() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    for (key, terms) in [("plain", ""), ("one-of-three", "LIMIT 3")] {
        let token = session.get_token(&mut client, &format!("LOCK.ACQUIRE {key} owner LEASE 600 WATCHDOG {terms}"));
        let kept = session.get_token(&mut client, &format!("LOCK.ACQUIRE kept owner LEASE 3000 WATCHDOG {terms}"));
        let first = deadline(&mut client, "kept");
        // This session reads in time.
        session.raw.run("LOCK.EVENTS");
        (TOO_FEW_REPLICAS.begin)(&server);
        let renewals = server.info("holdfast", "holdfast_watchdog_renewals");
        let received = session.events(1);
        assert_eq!(received, [Event::lost(key, "owner", token, "expired")]);
        assert_eq!(server.info("holdfast", "holdfast_watchdog_renewals"), renewals);
        assert!(client.run("SET some thing").error().starts_with("NOREPLICAS"), "it still refuses writes");
        until(SOON, "the renewal of the other lock is due", || first - unix_millis() < 1500);
        assert_eq!(deadline(&mut client, "kept"), first);
        session.raw.run("LOCK.EVENTS");
        (TOO_FEW_REPLICAS.end)(&server);
        until(SOON, "the other lock is renewed", || deadline(&mut client, "kept") > first);
        assert_eq!(session.request(&mut client, "LOCK.RENEW kept owner").token(), kept);
        client.run_ok("DEL kept");
        assert_eq!(session.event().kind, "lost");
    }
}

/// Also if writes are refused from the same transaction on.
#[test]
fn deletion_is_notified_while_writes_are_refused() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner LEASE 600000");
    for line in ["MULTI", "DEL key", "CONFIG SET min-replicas-to-write 1", "EXEC"] {
        client.run(line);
    }
    assert_eq!(session.events(1), [Event::lost("key", "owner", token, "changed")]);
    assert!(client.run("SET some thing").error().starts_with("NOREPLICAS"), "it still refuses writes");
}

/// The waiter is refused in time, and the grant is revoked later.
#[test]
fn unconfirmed_grant_is_refused_in_time_and_revoked_later() {
    let mut group = Group::of(1);
    let mut session = Session::open(&group.primary);
    group.stop_replicas();
    group.wait_for_replicas(300);
    session.wait(&mut group.control, "LOCK.ACQUIRE key owner LEASE 600000 REPLICAS 1");
    group.control.run_ok("CONFIG SET min-replicas-to-write 2");
    let event = session.event();
    let received = event.detail.unwrap_or_default();
    assert!(event.kind == "refused" && received.starts_with("UNCONFIRMED 0 of 1"), "{received}");
    assert!(group.exists("key"), "the grant can't be revoked yet");
    group.control.run_ok("CONFIG SET min-replicas-to-write 0");
    until(SOON, "the grant is revoked", || !group.exists("key"));
}
