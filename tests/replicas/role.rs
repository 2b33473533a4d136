//! The primary becomes a replica while grants are being confirmed.

use std::thread;
use std::time::Duration;

use support::Server;

use super::group::{BRIEF, Group, follow, quiet, state};
use crate::lines::{Commands, Reply};
use crate::waiter::{Waiter, until_no_waiters};

const KEYS: [&str; 6] = ["new", "held", "renewed", "a", "b", "queued"];

/// One request of each kind, being confirmed.
fn confirming(group: &mut Group) -> Vec<Waiter> {
    for key in ["held", "renewed", "queued"] {
        group.control.get_token(&format!("LOCK.ACQUIRE {key} owner LEASE 600000"));
    }
    group.stop_replicas();
    let lines = [
        "LOCK.ACQUIRE new owner LEASE 600000 EPHEMERAL",
        "LOCK.ACQUIRE held owner LEASE 900000 EPHEMERAL",
        "LOCK.RENEW renewed owner LEASE 900000",
        "LOCK.MACQUIRE 2 a b owner LEASE 600000",
        "LOCK.ACQUIRE queued next LEASE 600000 WAIT 0",
    ];
    let mut waiters: Vec<Waiter> = lines.iter().map(|line| group.waits(&format!("{line} REPLICAS 1"))).collect();
    group.control.run_ok("LOCK.RELEASE queued owner");
    waiters.push(group.waits("LOCK.ACQUIRE new other WAIT 0"));
    assert_eq!(group.count("confirming"), 5);
    waiters
}

/// Its new primary is unreachable, so its data stay as they are.
#[test]
fn demoted_primary_writes_nothing() {
    let mut group = Group::of(1);
    group.wait_for_replicas(BRIEF * 8);
    let waiters = confirming(&mut group);
    let before = group.state(&KEYS);
    let digest = group.control.run("DEBUG DIGEST");
    // The replica is paused, and does not reply to its new replica.
    group.control.run_ok(&follow(&group.replicas[0]));
    for mut waiter in waiters {
        assert_eq!(waiter.error(), "UNBLOCKED");
        // Disconnects change nothing either, with or without a reply.
        waiter.raw.close();
    }
    until_no_waiters(&group.primary);
    assert_eq!(group.count("confirming"), 0);
    thread::sleep(Duration::from_millis(BRIEF as u64 * 8)); // Nothing was revoked after the timeout.
    assert_eq!(group.state(&KEYS), before);
    assert_eq!(group.control.run("DEBUG DIGEST"), digest);
    assert_eq!((group.count("confirmed"), group.count("revoked")), (0, 0));

    // When it is a primary again, holds last until their leases end.
    group.control.run_ok("REPLICAOF NO ONE");
    assert!(group.control.run("LOCK.ACQUIRE new other").is_null());
    assert_eq!(group.state(&KEYS), before);
    assert_eq!(group.control.run("LOCK.RELEASE new owner").int(), 1);
    group.control.get_token("LOCK.ACQUIRE new other");
}

#[test]
fn demoted_primary_takes_data_of_new_primary() {
    let mut group = Group::of(0);
    group.join(quiet().start());
    let waiters = confirming(&mut group);
    // The pending requests end with their connections.
    group.control.run_ok("CLIENT KILL TYPE replica");
    group.cont_replicas();
    let successor = group.replicas.pop().expect("one");
    successor.replica_of_no_one();
    let mut client = successor.raw();
    client.run_ok("LOCK.FORCE renewed");
    client.get_token("LOCK.ACQUIRE renewed another LEASE 600000");
    client.get_token("LOCK.ACQUIRE elsewhere another LEASE 600000");
    group.primary.replica_of(&successor);
    let mut received = 0;
    for mut waiter in waiters {
        match waiter.end() {
            // The successor may have received the grant before its promotion.
            redis::Value::Int(_) => received += 1,
            reply => assert!(reply.error().starts_with("UNBLOCKED"), "{reply:?}"),
        }
        waiter.raw.close();
    }
    assert!(received <= 5);
    successor.wait_for_replica(&group.primary);
    let there = state(&mut client, &KEYS);
    assert_eq!(group.state(&KEYS), there);
    assert_eq!(group.control.run("DEBUG DIGEST"), client.run("DEBUG DIGEST"));
    assert!(group.control.run("LOCK.ACQUIRE free owner REPLICAS 1").error().starts_with("READONLY"));
    assert_same_offsets(&group.primary, &successor);
}

/// Only the primary has written to the stream.
#[track_caller]
fn assert_same_offsets(replica: &Server, primary: &Server) {
    primary.wait_for_replica(replica);
    assert_eq!(replica.info("replication", "slave_repl_offset"), primary.info("replication", "master_repl_offset"));
}
