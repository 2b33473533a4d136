//! Where the server would refuse a write, the module writes nothing of its own accord: nobody is granted anything, nothing
//! is renewed. Waits end by their time all the same, and everything goes on when the server takes writes again.

use redis::Value;
use support::{Server, skip, until};

use super::session::{Event, Session};
use crate::common::unix_millis;
use crate::replicas::group::Group;
use crate::speak::{Reply, arrives, deadline};
use crate::waiter::{SOON, Speak, Tell};

/// What makes the server refuse writes, and take them again.
struct Refusal {
    code: &'static str,
    begin: fn(&Server),
    end: fn(&Server),
}

const TOO_FEW_REPLICAS: Refusal = Refusal {
    code: "NOREPLICAS",
    begin: |server| _ = server.raw().order("CONFIG SET min-replicas-to-write 1"),
    end: |server| _ = server.raw().order("CONFIG SET min-replicas-to-write 0"),
};

/// A directory stands where the snapshot should be.
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
    server.raw().order("BGSAVE");
    until(SOON, "the snapshot is over", || {
        server.info("persistence", "rdb_last_bgsave_status").as_deref() == Some(status)
    });
}

#[track_caller]
fn nothing_is_written_until_the_server_takes_writes(refusal: &Refusal) {
    let server = Server::builder().arg("save", "").start();
    let [mut holder, mut waiter, mut impatient, mut viewer] = std::array::from_fn(|_| server.raw());
    let mut session = Session::open(&server);
    holder.say("LOCK.SESSION");
    holder.say("LOCK.ACQUIRE key holder LEASE 700").token();
    holder.say("LOCK.ACQUIRE watched holder LEASE 900 WATCHDOG").token();
    assert_eq!(waiter.begin("LOCK.ACQUIRE key waiter LEASE 600000 WAIT 0"), None);
    assert_eq!(impatient.begin("LOCK.ACQUIRE key impatient WAIT 300"), None);
    session.wait(&mut viewer, "LOCK.ACQUIRE watched next LEASE 600000 WAIT 0");
    (refusal.begin)(&server);
    let error = viewer.say("SET some thing").error();
    assert!(error.starts_with(refusal.code), "{error}");

    assert!(arrives(&mut impatient).is_null(), "its time is over");
    until(SOON, "both leases are over", || viewer.say("EXISTS key watched") == Value::Int(0));
    let renewals = server.info("holdfast", "holdfast_watchdog_renewals");
    // More than one look at the queue later.
    let cron = || server.info("server", "lru_clock");
    let clock = cron();
    until(SOON, "a second has passed", || cron() != clock);
    assert!(waiter.pending(), "granted while the server refuses writes");
    assert_eq!(viewer.say("EXISTS key watched"), Value::Int(0));
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
        return skip("the server's directory is out of reach");
    }
    nothing_is_written_until_the_server_takes_writes(&NO_SNAPSHOT);
}

/// Although nothing is written. Overdue renewals happen once they are possible.
#[test]
fn expiry_is_notified_while_writes_are_refused() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    for (key, terms) in [("plain", ""), ("one-of-three", "LIMIT 3")] {
        let token = session.take(&mut client, &format!("LOCK.ACQUIRE {key} owner LEASE 600 WATCHDOG {terms}"));
        let kept = session.take(&mut client, &format!("LOCK.ACQUIRE kept owner LEASE 3000 WATCHDOG {terms}"));
        let first = deadline(&mut client, "kept");
        // It asks in time.
        session.raw.say("LOCK.EVENTS");
        (TOO_FEW_REPLICAS.begin)(&server);
        let renewals = server.info("holdfast", "holdfast_watchdog_renewals");
        let told = session.events(1);
        assert_eq!(told, [Event::lost(key, "owner", token, "expired")]);
        assert_eq!(server.info("holdfast", "holdfast_watchdog_renewals"), renewals);
        assert!(client.say("SET some thing").error().starts_with("NOREPLICAS"), "it still refuses writes");
        until(SOON, "the other one is due", || first - unix_millis() < 1500);
        assert_eq!(deadline(&mut client, "kept"), first);
        session.raw.say("LOCK.EVENTS");
        (TOO_FEW_REPLICAS.end)(&server);
        until(SOON, "the other one is renewed", || deadline(&mut client, "kept") > first);
        assert_eq!(session.ask(&mut client, "LOCK.RENEW kept owner").token(), kept);
        client.order("DEL kept");
        assert_eq!(session.event().kind, "lost");
    }
}

/// Also if writes are refused from the same transaction on.
#[test]
fn deletion_is_notified_while_writes_are_refused() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    let token = session.take(&mut client, "LOCK.ACQUIRE key owner LEASE 600000");
    for line in ["MULTI", "DEL key", "CONFIG SET min-replicas-to-write 1", "EXEC"] {
        client.say(line);
    }
    assert_eq!(session.events(1), [Event::lost("key", "owner", token, "changed")]);
    assert!(client.say("SET some thing").error().starts_with("NOREPLICAS"), "it still refuses writes");
}

/// Who waits for confirmations is told in time that there are too few, and the grant is revoked later.
#[test]
fn unconfirmed_grant_is_refused_in_time_and_revoked_later() {
    let mut group = Group::of(1);
    let mut session = Session::open(&group.master);
    group.stop_replicas();
    group.wait_for_replicas(300);
    session.wait(&mut group.control, "LOCK.ACQUIRE key owner LEASE 600000 REPLICAS 1");
    group.control.order("CONFIG SET min-replicas-to-write 2");
    let event = session.event();
    let told = event.detail.unwrap_or_default();
    assert!(event.kind == "refused" && told.starts_with("UNCONFIRMED 0 of 1"), "{told}");
    assert!(group.exists("key"), "it can't be revoked");
    group.control.order("CONFIG SET min-replicas-to-write 0");
    until(SOON, "it is revoked", || !group.exists("key"));
}
