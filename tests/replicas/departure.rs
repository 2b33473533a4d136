//! The client disconnects while its grant or renewal is being confirmed.

use redis::Value;
use support::{Raw, until};

use super::group::Group;
use crate::lines::{Commands, Reply, SOON, holders};
use crate::waiter::{Waiter, assert_held};

type Leave = fn(Waiter, &mut Raw);

const WAYS: [(&str, Leave); 5] = [
    ("closed", |waiter, _| waiter.raw.close()),
    ("reset", |waiter, _| waiter.raw.reset()),
    ("killed", |mut waiter, control| {
        assert_eq!(control.run(&format!("CLIENT KILL ID {}", waiter.id)), Value::Int(1));
        assert!(waiter.raw.read().is_err());
    }),
    ("unblocked", |mut waiter, control| {
        assert_eq!(control.run(&format!("CLIENT UNBLOCK {}", waiter.id)), Value::Int(1));
        assert_eq!(waiter.end(), Value::Nil);
        assert_eq!(waiter.raw.run("PING"), Value::SimpleString("PONG".into()));
    }),
    ("unblocked-with-error", |mut waiter, control| {
        assert_eq!(control.run(&format!("CLIENT UNBLOCK {} ERROR", waiter.id)), Value::Int(1));
        assert_eq!(waiter.error(), "UNBLOCKED");
        assert_eq!(waiter.raw.run("PING"), Value::SimpleString("PONG".into()));
    }),
];

const FLAGS: [&str; 3] = ["", " EPHEMERAL", " EPHEMERAL HOLDS 3"];

/// The replica is paused and the timeout is an hour, so only the disconnect ends the request.
fn group() -> Group {
    let group = Group::of(1);
    group.stop_replicas();
    group
}

/// The request leaves no trace, even when the replica continues.
fn assert_over(group: &mut Group) {
    until(SOON, "nothing is being confirmed", || group.count("confirming") == 0);
    assert_eq!((group.count("confirmed"), group.count("waiters"), group.count("bound_holds")), (0, 0, 0));
    group.cont_replicas();
    group.primary.wait_for_replica(&group.replicas[0]);
    assert_eq!(group.replicas[0].raw().run("DEBUG DIGEST"), group.control.run("DEBUG DIGEST"));
    assert_eq!(group.count("confirmed"), 0);
}

/// `leaver` holds the lock until it leaves, and then `next` does.
#[track_caller]
fn assert_passed_on(control: &mut Raw, way: &str, leave: Leave, leaver: Waiter, mut next: Waiter) {
    assert_held_by(control, way, "leaver");
    leave(leaver, control);
    next.token();
    assert_held(control, way, "next");
    control.run_ok(&format!("LOCK.RELEASE {way} next"));
}

/// The grant of each way with each flag was revoked, and nothing is left.
#[track_caller]
fn assert_all_undelivered(group: &mut Group) {
    assert_eq!(group.count("grants_undelivered"), (WAYS.len() * FLAGS.len()) as i64);
    assert_over(group);
}

#[test]
fn immediate_grant_is_revoked_when_client_leaves() {
    let mut group = group();
    for (way, leave) in WAYS {
        for flags in FLAGS {
            let leaver = group.waits(&format!("LOCK.ACQUIRE {way} leaver LEASE 600000{flags} REPLICAS 1"));
            let next = group.waits(&format!("LOCK.ACQUIRE {way} next LEASE 600000 WAIT 0"));
            assert_passed_on(&mut group.control, way, leave, leaver, next);
        }
    }
    assert_all_undelivered(&mut group);
}

#[test]
fn queued_grant_is_revoked_when_client_leaves() {
    let mut group = group();
    for (way, leave) in WAYS {
        for flags in FLAGS {
            group.control.get_token(&format!("LOCK.ACQUIRE {way} first LEASE 600000"));
            let leaver = group.waits(&format!("LOCK.ACQUIRE {way} leaver LEASE 600000 WAIT 0{flags} REPLICAS 1"));
            let next = group.waits(&format!("LOCK.ACQUIRE {way} next LEASE 600000 WAIT 0"));
            group.control.run_ok(&format!("LOCK.RELEASE {way} first"));
            assert_passed_on(&mut group.control, way, leave, leaver, next);
        }
    }
    assert_all_undelivered(&mut group);
}

/// Without waiters, the key is deleted.
#[test]
fn revoked_lock_without_waiters_is_deleted() {
    let mut group = group();
    for (way, leave) in WAYS {
        let one = group.waits(&format!("LOCK.ACQUIRE {way} leaver LEASE 600000 REPLICAS 1"));
        let several = group.waits(&format!("LOCK.MACQUIRE 2 {way}:a {way}:b leaver LEASE 600000 REPLICAS 1"));
        for waiter in [one, several] {
            leave(waiter, &mut group.control);
        }
    }
    until(SOON, "all keys are deleted", || group.control.run("DBSIZE") == Value::Int(0));
    assert_over(&mut group);
}

/// A re-entry loses the hold that it added. A hold count that was named stays, and so does the deadline. A renewal loses
/// nothing.
#[test]
fn revoked_reentry_loses_one_hold_and_renewal_none() {
    let mut group = group();
    let requests = [
        ("ACQUIRE {} owner", "2"),
        ("ACQUIRE {} owner HOLDS 5", "5"),
        ("RENEW {} owner", "2"),
        ("MACQUIRE 1 {} owner", "2"),
        ("MRENEW 1 {} owner", "2"),
    ];
    for (way, leave) in WAYS {
        for (number, (request, holds)) in requests.iter().enumerate() {
            let key = format!("{way}:{number}");
            group.control.get_token(&format!("LOCK.ACQUIRE {key} owner LEASE 600000 HOLDS 2"));
            let before = group.state(&[&key]);
            let leaver = group.waits(&format!("LOCK.{} LEASE 900000 REPLICAS 1", request.replace("{}", &key)));
            let mut left = group.state(&[&key]);
            assert_ne!(left, before, "{way}, {request}");
            left[0].1.insert(b"owner".to_vec(), holds.as_bytes().to_vec());
            leave(leaver, &mut group.control);
            until(SOON, &format!("{way}: {request} is over"), || group.count("confirming") == 0);
            until(SOON, &format!("{way}: {request} is revoked"), || group.state(&[&key]) == left);
            // Nothing is pending any more: the owner can continue.
            group.control.get_token(&format!("LOCK.RENEW {key} owner LEASE 900000"));
            assert_eq!(group.control.run(&format!("HGET {key} owner")).text(), *holds, "{way}, {request}");
        }
    }
    assert_over(&mut group);
}

/// Of readers that are confirmed together, only the one that disconnects is revoked.
#[test]
fn only_the_leaving_reader_is_revoked() {
    let mut group = group();
    let mut readers: Vec<Waiter> = (0..WAYS.len() + 2)
        .map(|number| group.waits(&format!("LOCK.ACQUIRE key reader-{number} LEASE 600000 SHARED REPLICAS 1")))
        .collect();
    for (_, leave) in WAYS {
        leave(readers.remove(1), &mut group.control);
    }
    let last = format!("reader-{}", WAYS.len() + 1);
    until(SOON, "the other readers hold the lock", || {
        holders(&mut group.control, "key").into_keys().eq(["reader-0", &last])
    });
    assert!(readers.iter_mut().all(Waiter::waits));
    group.cont_replicas();
    readers.iter_mut().for_each(|reader| assert!(reader.token() > 0));
    assert_eq!(group.count("confirmed"), 2);
}

#[track_caller]
fn assert_held_by(control: &mut Raw, key: &str, owner: &str) {
    assert!(holders(control, key).into_keys().eq([owner]));
}
