//! Replicas that are paused, killed, slow, or reconnect.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use redis::Value;
use support::{Over, Server, until};

use super::group::{BRIEF, Group, assert_refused, gone, quiet, state};
use crate::lines::{Commands, Reply, SOON};
use crate::waiter::assert_held;

/// One request of each kind waits for absent replicas. When they are back, all requests are confirmed.
fn confirmed_when_back(mut group: Group, back: impl FnOnce(&mut Group)) {
    let needed = group.replicas.len();
    group.control.get_token("LOCK.ACQUIRE held owner LEASE 50000");
    group.control.get_token("LOCK.ACQUIRE kept owner LEASE 50000");
    let lines = [
        "LOCK.ACQUIRE new owner LEASE 60000",
        "LOCK.ACQUIRE held owner LEASE 60000",
        "LOCK.MACQUIRE 2 a b owner LEASE 60000",
        "LOCK.RENEW kept owner LEASE 90000",
    ];
    let mut waiters = lines.map(|line| group.waits(&format!("{line} REPLICAS {needed}")));
    back(&mut group);
    waiters.iter_mut().for_each(|waiter| assert!(waiter.token() > 0));
    let keys = ["new", "held", "kept", "a", "b"];
    let there = group.state(&keys);
    for replica in &group.replicas {
        assert_eq!(state(&mut replica.raw(), &keys), there);
    }
    assert_eq!((group.count("confirmed"), group.count("revoked"), group.count("confirming")), (4, 0, 0));
}

#[test]
fn paused_replica_confirms_in_time() {
    let group = Group::of(2);
    group.stop_replicas();
    confirmed_when_back(group, |group| group.cont_replicas());
}

/// The connection is lost while the replica is paused. The replica reconnects by itself.
#[test]
fn reconnected_replica_confirms_in_time() {
    let group = Group::of(1);
    group.stop_replicas();
    confirmed_when_back(group, |group| {
        assert_eq!(group.control.run("CLIENT KILL TYPE replica"), Value::Int(1));
        assert_eq!(group.primary.info("replication", "connected_slaves").as_deref(), Some("0"));
        group.cont_replicas();
    });
}

/// The replica was a primary for a while, and gets a full copy.
#[test]
fn replica_that_was_a_primary_confirms_in_time() {
    let group = Group::of(1);
    group.replicas[0].replica_of_no_one();
    until(SOON, "the replica is disconnected", || {
        group.primary.info("replication", "connected_slaves").as_deref() == Some("0")
    });
    confirmed_when_back(group, |group| {
        group.replicas[0].raw().run_ok("SET something else");
        group.replicas[0].replica_of(&group.primary);
    });
}

#[test]
fn restarted_replica_confirms_in_time() {
    let mut group = Group::of(1);
    group.replicas[0].kill9();
    confirmed_when_back(group, |group| {
        group.replicas[0].restart();
        group.replicas[0].replica_of(&group.primary);
    });
}

/// There are fewer replicas than requested. One more connects in time.
#[test]
fn new_replica_confirms_in_time() {
    let mut group = Group::of(1);
    let mut waiter = group.waits("LOCK.ACQUIRE key owner LEASE 600000 REPLICAS 2");
    until(SOON, "confirmations are requested repeatedly", || group.count("confirmation_requests") > 2);
    assert!(waiter.waits(), "there is only one replica");
    assert_held(&mut group.control, "key", "owner");
    group.join(quiet().without_module().start());
    waiter.token();
    let there = group.state(&["key"]);
    assert_eq!(state(&mut group.replicas[1].raw(), &["key"]), there);
}

/// While replicas are absent in any way, nothing is granted. When they are back, requests are granted again.
#[test]
fn absent_replicas_allow_no_grant() {
    let mut group = Group::of(1);
    group.wait_for_replicas(BRIEF);
    let refused = |group: &mut Group| {
        assert_refused(&group.control.run("LOCK.ACQUIRE key owner REPLICAS 1"), 0, 1, BRIEF);
        assert!(!group.exists("key"));
    };
    let granted = |group: &mut Group| {
        group.primary.wait_replica_online();
        group.wait_for_replicas(super::group::PATIENT);
        group.control.get_token("LOCK.ACQUIRE key owner REPLICAS 1");
        assert_held(&mut group.replicas[0].raw(), "key", "owner");
        group.control.run_ok("LOCK.RELEASE key owner");
        group.wait_for_replicas(BRIEF);
    };
    group.stop_replicas();
    refused(&mut group);
    assert_eq!(group.control.run("CLIENT KILL TYPE replica"), Value::Int(1));
    refused(&mut group);
    group.cont_replicas();
    granted(&mut group);

    group.replicas[0].replica_of_no_one();
    refused(&mut group);
    group.replicas[0].replica_of(&group.primary);
    granted(&mut group);

    group.replicas[0].kill9();
    refused(&mut group);
    group.replicas[0].restart();
    refused(&mut group);
    group.replicas[0].replica_of(&group.primary);
    granted(&mut group);
}

/// The replica is killed during the confirmation, so one is missing.
#[test]
fn replica_killed_during_confirmation_is_missed() {
    let mut group = Group::of(2);
    group.wait_for_replicas(BRIEF * 4);
    group.stop_replicas();
    let mut waiter = group.waits("LOCK.ACQUIRE key owner REPLICAS 2");
    group.replicas[0].kill9();
    group.replicas[1].cont();
    assert_refused(&waiter.end(), 1, 2, BRIEF * 4);
    assert_eq!(group.state(&["key"]), [gone()]);
    assert_eq!(state(&mut group.replicas[1].raw(), &["key"]).len(), 1);
    group.primary.wait_for_replica(&group.replicas[1]);
    assert_eq!(state(&mut group.replicas[1].raw(), &["key"]), [gone()]);
}

/// Pauses a replica most of the time, while `during` runs.
fn slow<R>(replica: &Server, during: impl FnOnce() -> R) -> R {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                replica.stop();
                thread::sleep(Duration::from_millis(30));
                replica.cont();
                thread::sleep(Duration::from_millis(10));
            }
        });
        let _over = Over(&over);
        during()
    })
}

#[test]
fn slow_replica_confirms_in_time() {
    let group = Group::of(1);
    let replica = &group.replicas[0];
    let (mut client, mut reader) = (group.primary.raw(), replica.raw());
    slow(replica, || {
        for _ in 0..20 {
            client.get_token("LOCK.ACQUIRE key owner LEASE 600000 REPLICAS 1");
            assert_held(&mut reader, "key", "owner");
            client.get_token("LOCK.RENEW key owner LEASE 900000 REPLICAS 1");
            assert_eq!(state(&mut reader, &["key"]), state(&mut client, &["key"]));
            client.run_ok("LOCK.RELEASE key owner");
        }
    });
    assert_eq!((group.count("confirmed"), group.count("revoked")), (40, 0));
}

/// Some confirmations come in time and others do not: the keyspace agrees with the reply.
#[test]
fn late_confirmations_agree_with_keyspace() {
    let mut group = Group::of(1);
    group.wait_for_replicas(12);
    let replica = &group.replicas[0];
    let (mut client, mut reader) = (group.primary.raw(), replica.raw());
    let (mut confirmed, mut refused) = (0, 0);
    slow(replica, || {
        until(SOON * 2, "both outcomes have occurred", || {
            let reply = client.run("LOCK.ACQUIRE key owner LEASE 600000 REPLICAS 1");
            if let Value::Int(_) = reply {
                confirmed += 1;
                assert_held(&mut reader, "key", "owner");
                client.run_ok("LOCK.RELEASE key owner");
            } else {
                refused += 1;
                assert_refused(&reply, 0, 1, 12);
                assert_eq!(client.run("EXISTS key"), Value::Int(0));
            }
            confirmed.min(refused) >= 10
        });
    });
    assert_eq!((group.count("confirmed"), group.count("revoked")), (confirmed, refused));
    group.primary.wait_for_replica(&group.replicas[0]);
    assert_eq!(reader.run("DEBUG DIGEST"), group.control.run("DEBUG DIGEST"));
    assert!(client.run("LOCK.INFO key").is_null());
}
