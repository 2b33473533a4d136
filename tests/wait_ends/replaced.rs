//! Something else takes the lock's place under its key.

use redis::Value;

use super::freed::Scene;
use super::way::{Way, in_every_way, run, run_bytes};
use crate::common::{error, text};
use crate::waiter::{Speak, Tell, Waiter, assert_held, count_waiters, until_nobody_waits};

/// Whether all who wait are told that the key is no lock any more, and whether what is there stays as it is.
fn is_no_lock(way: Way, before: &[&str], commands: &[&str]) {
    let mut scene = Scene::set();
    for line in before {
        scene.client.order(line);
    }
    assert!(scene.first.waits() && scene.second.waits());
    run(&mut scene.client, way, commands);
    all_are_told(scene);
}

fn all_are_told(mut scene: Scene) {
    assert_eq!(scene.first.error(), "WRONGTYPE");
    assert_eq!(scene.second.error(), "WRONGTYPE");
    until_nobody_waits(&scene.server);
    let dump = |scene: &mut Scene| scene.client.say("DUMP key");
    let before = dump(&mut scene);
    assert_eq!(error(&scene.client.say("LOCK.ACQUIRE key holder WAIT 0")).0, "WRONGTYPE");
    assert_eq!(dump(&mut scene), before);
    scene.client.order("DEL key");
    scene.client.take("LOCK.ACQUIRE key holder");
}

in_every_way! {
    set: |way| is_no_lock(way, &[], &["SET key text"]);
    copy: |way| is_no_lock(way, &["SET text x"], &["COPY text key REPLACE"]);
    rename: |way| is_no_lock(way, &["SET text x"], &["RENAME text key"]);
    list_in_its_place: |way| match way {
        // In two steps the first would free it.
        Way::Plainly => is_no_lock(way, &["RPUSH list b a"], &["SORT list ALPHA STORE key"]),
        _ => is_no_lock(way, &[], &["DEL key", "RPUSH key x"]),
    };
    set_operation: |way| is_no_lock(way, &["SADD members x"], &["SUNIONSTORE key members"]);
    a_field_that_is_no_hold: |way| is_no_lock(way, &[], &["HSET key stranger often"]);
    restore: |way| {
        let mut scene = Scene::set();
        scene.client.order("SET text x");
        let Value::BulkString(dump) = scene.client.say("DUMP text") else { panic!("no dump") };
        run_bytes(&mut scene.client, way, &[vec![b"RESTORE", b"key", b"0", &dump, b"REPLACE"]]);
        all_are_told(scene);
    };
    swapdb: |way| {
        let mut scene = Scene::set();
        scene.client.order("SELECT 1");
        scene.client.order("SET key text");
        scene.client.order("SELECT 0");
        run(&mut scene.client, way, &["SWAPDB 0 1"]);
        all_are_told(scene);
    };
    hold_of_a_stranger: |way| {
        let mut scene = Scene::set();
        scene.client.order("LOCK.ACQUIRE other stranger LEASE 60000");
        run(&mut scene.client, way, &["COPY other key REPLACE"]);
        assert!(!support::eventually(std::time::Duration::from_millis(50), || !scene.first.waits()));
        assert_held(&mut scene.client, "key", "stranger");
        scene.client.order("LOCK.RELEASE key stranger");
        scene.serves_in_order();
    };
    hold_of_one_who_waits: |way| {
        let mut scene = Scene::set();
        let other = scene.client.take("LOCK.ACQUIRE other second LEASE 60000");
        run(&mut scene.client, way, &["RENAME other key"]);
        assert_eq!(scene.second.token(), other, "a re-entry, past those ahead");
        assert_eq!(text(&scene.client.say("HGET key second")), "2");
        assert!(scene.first.waits());
        assert_eq!(scene.client.say("LOCK.RELEASE key second ALL"), Value::Int(1));
        assert!(scene.first.token() > other);
        until_nobody_waits(&scene.server);
    };
}

/// Between the commands of a step there is no moment in which the lock is free.
fn stays_taken(way: Way) {
    let mut scene = Scene::set();
    run(&mut scene.client, way, &["DEL key", "HSET key stranger 1", "PEXPIRE key 60000"]);
    assert!(!support::eventually(std::time::Duration::from_millis(50), || !scene.first.waits()));
    assert_held(&mut scene.client, "key", "stranger");
    run(&mut scene.client, way, &["DEL key"]);
    scene.serves_in_order();
}

#[test]
fn lock_freed_and_taken_in_one_transaction_is_not_granted() {
    stays_taken(Way::InATransaction);
}

#[test]
fn lock_freed_and_taken_in_one_script_is_not_granted() {
    stays_taken(Way::InAScript);
}

#[test]
fn waiters_behind_reentry_keep_position() {
    let mut scene = Scene::set();
    let mut third = Waiter::start(&scene.server, "key", "first");
    assert_eq!(scene.first.error(), "SUPERSEDED");
    scene.client.order("LOCK.ACQUIRE other first LEASE 60000");
    scene.client.order("RENAME other key");
    let held = third.token();
    assert_eq!(text(&scene.client.say("HGET key first")), "2");
    assert_eq!(scene.client.take("LOCK.ACQUIRE key first"), held);
    assert_eq!(count_waiters(&mut scene.client, "key"), 1);
    assert!(scene.second.waits());
}
