//! The master becomes a replica while grants are being confirmed.

use std::thread;
use std::time::Duration;

use support::Server;

use super::group::{BRIEF, Group, follow, quiet, state};
use crate::speak::{Reply, Speak};
use crate::waiter::{Tell, Waiter, until_nobody_waits};

const KEYS: [&str; 6] = ["new", "held", "renewed", "a", "b", "queued"];

/// One of each kind, being confirmed.
fn confirming(group: &mut Group) -> Vec<Waiter> {
    for key in ["held", "renewed", "queued"] {
        group.control.take(&format!("LOCK.ACQUIRE {key} owner LEASE 600000"));
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
    group.control.order("LOCK.RELEASE queued owner");
    waiters.push(group.waits("LOCK.ACQUIRE new other WAIT 0"));
    assert_eq!(group.count("confirming"), 5);
    waiters
}

/// Its new primary can't be reached: the data stay as the old primary left them.
#[test]
fn demoted_primary_writes_nothing() {
    let mut group = Group::of(1);
    group.wait_for_replicas(BRIEF * 8);
    let waiters = confirming(&mut group);
    let before = group.state(&KEYS);
    let digest = group.control.say("DEBUG DIGEST");
    // It is paused, and will not answer its new replica.
    group.control.order(&follow(&group.replicas[0]));
    for mut waiter in waiters {
        assert_eq!(waiter.error(), "UNBLOCKED");
        // Nor does the departure of those who were answered, or not, change anything.
        waiter.raw.close();
    }
    until_nobody_waits(&group.master);
    assert_eq!(group.count("confirming"), 0);
    thread::sleep(Duration::from_millis(BRIEF as u64 * 8)); // What was to be revoked by then is not.
    assert_eq!(group.state(&KEYS), before);
    assert_eq!(group.control.say("DEBUG DIGEST"), digest);
    assert_eq!((group.count("confirmed"), group.count("revoked")), (0, 0));

    // A master again, it decides: what is held is held until its lease ends.
    group.control.order("REPLICAOF NO ONE");
    assert!(group.control.say("LOCK.ACQUIRE new other").is_null());
    assert_eq!(group.state(&KEYS), before);
    assert_eq!(group.control.say("LOCK.RELEASE new owner").int(), 1);
    group.control.take("LOCK.ACQUIRE new other");
}

#[test]
fn demoted_primary_takes_data_of_new_primary() {
    let mut group = Group::of(0);
    group.join(quiet().start());
    let waiters = confirming(&mut group);
    // What was under way goes with the connection.
    group.control.order("CLIENT KILL TYPE replica");
    group.cont_replicas();
    let successor = group.replicas.pop().expect("one");
    successor.replica_of_no_one();
    let mut client = successor.raw();
    client.order("LOCK.FORCE renewed");
    client.take("LOCK.ACQUIRE renewed another LEASE 600000");
    client.take("LOCK.ACQUIRE elsewhere another LEASE 600000");
    group.master.replica_of(&successor);
    let mut told = 0;
    for mut waiter in waiters {
        match waiter.end() {
            // The successor may have had it before it was one.
            redis::Value::Int(_) => told += 1,
            reply => assert!(reply.error().starts_with("UNBLOCKED"), "{reply:?}"),
        }
        waiter.raw.close();
    }
    assert!(told <= 5);
    successor.wait_for_replica(&group.master);
    let there = state(&mut client, &KEYS);
    assert_eq!(group.state(&KEYS), there);
    assert_eq!(group.control.say("DEBUG DIGEST"), client.say("DEBUG DIGEST"));
    assert!(group.control.say("LOCK.ACQUIRE free owner REPLICAS 1").error().starts_with("READONLY"));
    assert_same_offsets(&group.master, &successor);
}

/// Nobody but the master wrote anything.
#[track_caller]
fn assert_same_offsets(replica: &Server, master: &Server) {
    master.wait_for_replica(replica);
    assert_eq!(replica.info("replication", "slave_repl_offset"), master.info("replication", "master_repl_offset"));
}
