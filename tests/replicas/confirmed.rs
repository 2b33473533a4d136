//! The order of a confirmed request: granted, replicated, confirmed, then its reply.

use redis::Value;
use support::{Random, Raw, Server, until};

use super::group::{Group, PATIENT, state};
use crate::common::int;
use crate::lines::{Commands, Reply, SOON, deadline, holders};
use crate::waiter::{Waiter, assert_held};

/// When the client reads the reply, every requested replica has the grant.
#[test]
fn granted_lock_is_on_replicas_at_reply() {
    let mut group = Group::of(2);
    let mut client = group.primary.raw();
    let mut readers: Vec<Raw> = group.replicas.iter().map(Server::raw).collect();
    let mut random = Random::new();
    for _ in 0..20 {
        let lease = 30_000 + random.below(30_000);
        let (mut next, mut after) = (group.primary.raw(), group.primary.raw());
        let mut compare = |control: &mut Raw, keys: &[&str], what: &str| {
            let there = state(control, keys);
            for reader in &mut readers {
                assert_eq!(state(reader, keys), there, "{what}");
            }
        };
        let token = client.get_token(&format!("LOCK.ACQUIRE a first LEASE {lease} REPLICAS 2"));
        compare(&mut group.control, &["a"], "granted immediately");
        assert_eq!(client.get_token("LOCK.ACQUIRE a first LEASE 70000 REPLICAS 2"), token);
        compare(&mut group.control, &["a"], "re-entry");
        assert_eq!(client.get_token(&format!("LOCK.RENEW a first LEASE {lease} REPLICAS 2")), token);
        compare(&mut group.control, &["a"], "renewed");

        next.send_lines(&["LOCK.ACQUIRE a second WAIT 0 REPLICAS 2"]);
        after.send_lines(&["LOCK.MACQUIRE 2 b a third WAIT 0 REPLICAS 2"]);
        until(SOON, "both wait", || group.control.run("LOCK.WAITERS a").items().len() == 2);
        client.run_ok("LOCK.RELEASE a first ALL");
        assert!(next.read().expect("connection open").token() > token);
        compare(&mut group.control, &["a"], "granted from the queue");
        next.run_ok("LOCK.RELEASE a second");
        let both = after.read().expect("connection open").token();
        compare(&mut group.control, &["a", "b"], "several");
        let renewed = after.run("LOCK.MRENEW 3 a c b third LEASE 90000 REPLICAS 2");
        assert_eq!(renewed.items(), [Value::Int(both), Value::Nil, Value::Int(both)]);
        compare(&mut group.control, &["a", "b", "c"], "several keys renewed");
        after.run_ok("LOCK.MRELEASE 2 a b third");
    }
    assert_eq!(group.count("confirmed"), 20 * 6);
    assert_eq!((group.count("revoked"), group.count("confirming")), (0, 0));
}

#[test]
fn unconfirmed_grant_holds_lock_without_reply() {
    let mut group = Group::of(1);
    let mut client = group.primary.raw();
    client.get_token("LOCK.ACQUIRE queued holder LEASE 600000");
    let mut queued = group.waits("LOCK.ACQUIRE queued owner LEASE 600000 WAIT 0 REPLICAS 1");
    group.stop_replicas();
    client.run_ok("LOCK.RELEASE queued holder");
    let mut at_once = group.waits("LOCK.ACQUIRE at-once owner LEASE 600000 REPLICAS 1");

    for key in ["at-once", "queued"] {
        assert!(group.exists(key));
        assert_held(&mut group.control, key, "owner");
        assert!(group.control.run(&format!("LOCK.ACQUIRE {key} other")).is_null());
        assert!(group.control.run(&format!("LOCK.ACQUIRE {key} other WAIT 1")).is_null());
        assert!(group.control.run(&format!("LOCK.RELEASE {key} other")).is_null());
        let holder = &holders(&mut group.control, key)["owner"];
        assert!(holder.field("ttl").int() > 500_000, "{holder:?}");
    }
    assert_eq!(group.count("confirming"), 2);
    assert!(at_once.waits() && queued.waits(), "no reply yet");

    let mut next = group.waits("LOCK.ACQUIRE at-once next WAIT 0");
    group.cont_replicas();
    let first = at_once.token();
    let received = [first, queued.token()];
    for (key, token) in ["at-once", "queued"].into_iter().zip(received) {
        assert_eq!(holders(&mut group.control, key)["owner"].field("token").int(), token);
    }
    assert!(next.waits(), "the lock is still held");
    client.run_ok("LOCK.RELEASE at-once owner");
    assert!(next.token() > first);
    assert_eq!((group.count("confirmed"), group.count("confirming"), group.count("revoked")), (2, 0, 0));
}

#[test]
fn requested_number_of_replicas_is_enough() {
    let group = Group::of(2);
    for stopped in 0..2 {
        group.replicas[stopped].stop();
        let mut client = group.primary.raw();
        client.get_token(&format!("LOCK.ACQUIRE one:{stopped} owner REPLICAS 1"));
        let mut both = group.waits(&format!("LOCK.ACQUIRE both:{stopped} owner REPLICAS 2"));
        client.get_token(&format!("LOCK.RENEW one:{stopped} owner REPLICAS 1"));
        assert!(both.waits(), "one of two replicas has confirmed");
        group.replicas[stopped].cont();
        both.token();
    }
}

/// `WAIT` limits the time in the queue. The confirmation has its own timeout.
#[test]
fn short_wait_does_not_shorten_confirmation() {
    let group = Group::of(1);
    let mut client = group.primary.raw();
    group.stop_replicas();
    client.get_token("LOCK.ACQUIRE queued holder");
    let mut at_once = group.waits("LOCK.ACQUIRE at-once owner WAIT 1 REPLICAS 1");
    let mut queued = group.waits("LOCK.ACQUIRE queued owner WAIT 1000 REPLICAS 1");
    client.run_ok("LOCK.RELEASE queued holder");
    let mut waiting = group.waits("LOCK.ACQUIRE queued late WAIT 1001 REPLICAS 1");
    assert_eq!(waiting.end(), Value::Nil, "the time in the queue has passed");
    assert!(at_once.waits() && queued.waits());
    group.cont_replicas();
    at_once.token();
    queued.token();
}

/// A request that is not granted or renewed needs no confirmation.
#[test]
fn refusal_needs_no_confirmation() {
    let mut group = Group::of(1);
    group.stop_replicas();
    let mut client = group.primary.raw();
    group.control.get_token("LOCK.ACQUIRE key other LEASE 600000");
    assert!(client.run("LOCK.ACQUIRE key owner REPLICAS 1").is_null());
    assert!(client.run("LOCK.ACQUIRE key owner WAIT 1 REPLICAS 1").is_null());
    assert!(client.run("LOCK.MACQUIRE 2 free key owner REPLICAS 1").is_null());
    assert!(client.run("LOCK.RENEW key owner REPLICAS 1").is_null());
    assert!(client.run("LOCK.RENEW key other TOKEN 1 REPLICAS 1").is_null());
    assert_eq!(client.run("LOCK.MRENEW 2 free key owner REPLICAS 1").items(), [Value::Nil, Value::Nil]);
    assert_eq!(client.run("EXISTS free"), Value::Int(0));
    assert_eq!((group.count("confirming"), group.count("confirmation_requests")), (0, 0));
}

#[test]
fn info_reports_confirmation_time() {
    let group = Group::of(1);
    let times = || ["p50", "p99", "p999", "max"].map(|which| group.count(&format!("confirmation_usec_{which}")));
    assert_eq!(times(), [0; 4]);
    let mut client = group.primary.raw();
    for number in 0..20 {
        client.get_token(&format!("LOCK.ACQUIRE quick:{number} owner REPLICAS 1"));
    }
    let quick = times();
    assert!(quick[0] > 0 && quick.is_sorted(), "{quick:?}");
    assert_eq!(group.count("confirmed"), 20);

    group.stop_replicas();
    let begin = std::time::Instant::now();
    let mut slow = group.waits("LOCK.ACQUIRE slow owner REPLICAS 1");
    // Longer than all confirmations before.
    until(SOON, "the slow confirmation takes longest", || begin.elapsed().as_micros() as i64 > quick[3] + 100_000);
    group.cont_replicas();
    slow.token();
    let after = times();
    assert!(after.is_sorted() && after[3] > quick[3], "{quick:?}, then {after:?}");
}

/// A client with a reply has the lock on the promoted server.
#[test]
fn failover_keeps_confirmed_lock() {
    let mut primary = super::group::quiet().start();
    let replica = super::group::quiet().start();
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let mut client = primary.raw();
    super::group::set_timeout(&mut client, PATIENT);
    let token = client.get_token("LOCK.ACQUIRE key owner LEASE 600000 REPLICAS 1");
    let end = deadline(&mut client, "key");
    primary.kill9();
    replica.replica_of_no_one();
    let mut client = replica.raw();
    assert!(client.run("LOCK.ACQUIRE key other").is_null());
    assert_eq!(deadline(&mut client, "key"), end);
    assert_eq!(int(&client.run(&format!("LOCK.RELEASE key owner TOKEN {token}"))), 1);
    assert!(client.get_token("LOCK.ACQUIRE key other") > token);
}

/// Requests for confirmation are not written to the log.
#[test]
fn append_only_file_has_no_confirmation_requests() {
    let mut primary = super::group::quiet().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let replica = super::group::quiet().without_module().start();
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let mut client = primary.raw();
    super::group::set_timeout(&mut client, PATIENT);
    client.get_token("LOCK.ACQUIRE key owner LEASE 600000 REPLICAS 1");
    let mut next = Waiter::sending(&primary, "LOCK.ACQUIRE key next LEASE 600000 WAIT 0 REPLICAS 1");
    client.run_ok("LOCK.RELEASE key owner");
    next.token();
    let before = state(&mut client, &["key"]);
    let files = std::fs::read_dir(primary.dir().join("appendonlydir")).expect("the server's files");
    let files: Vec<u8> =
        files.flat_map(|file| std::fs::read(file.expect("a file").path()).expect("can be read")).collect();
    let files = String::from_utf8_lossy(&files).to_ascii_uppercase();
    assert!(files.contains("RESTORE") && !files.contains("GETACK"), "{files}");
    primary.kill9();
    primary.restart();
    assert_eq!(state(&mut primary.raw(), &["key"]), before);
}
