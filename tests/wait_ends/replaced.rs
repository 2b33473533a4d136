//! Something else replaces the lock at its key.

use redis::Value;

use super::freed::Fixture;
use super::way::{Way, in_every_way, run, run_bytes};
use crate::common::{error, text};
use crate::waiter::{Commands, Waiter, assert_held, count_waiters, until_no_waiters};

/// All waiters are refused because the key is not a lock any more, and its new value is unchanged.
fn refuses_waiters(way: Way, before: &[&str], commands: &[&str]) {
    let mut fixture = Fixture::set();
    for line in before {
        fixture.client.run_ok(line);
    }
    assert!(fixture.first.waits() && fixture.second.waits());
    run(&mut fixture.client, way, commands);
    assert_all_refused(fixture);
}

fn assert_all_refused(mut fixture: Fixture) {
    assert_eq!(fixture.first.error(), "WRONGTYPE");
    assert_eq!(fixture.second.error(), "WRONGTYPE");
    until_no_waiters(&fixture.server);
    let dump = |fixture: &mut Fixture| fixture.client.run("DUMP key");
    let before = dump(&mut fixture);
    assert_eq!(error(&fixture.client.run("LOCK.ACQUIRE key holder WAIT 0")).0, "WRONGTYPE");
    assert_eq!(dump(&mut fixture), before);
    fixture.client.run_ok("DEL key");
    fixture.client.get_token("LOCK.ACQUIRE key holder");
}

in_every_way! {
    set: |way| refuses_waiters(way, &[], &["SET key text"]);
    copy: |way| refuses_waiters(way, &["SET text x"], &["COPY text key REPLACE"]);
    rename: |way| refuses_waiters(way, &["SET text x"], &["RENAME text key"]);
    list_replaces_lock: |way| match way {
        // In two commands, the first would free the lock.
        Way::Plainly => refuses_waiters(way, &["RPUSH list b a"], &["SORT list ALPHA STORE key"]),
        _ => refuses_waiters(way, &[], &["DEL key", "RPUSH key x"]),
    };
    set_operation: |way| refuses_waiters(way, &["SADD members x"], &["SUNIONSTORE key members"]);
    invalid_owner_field: |way| refuses_waiters(way, &[], &["HSET key stranger often"]);
    restore: |way| {
        let mut fixture = Fixture::set();
        fixture.client.run_ok("SET text x");
        let Value::BulkString(dump) = fixture.client.run("DUMP text") else { panic!("no dump") };
        run_bytes(&mut fixture.client, way, &[vec![b"RESTORE", b"key", b"0", &dump, b"REPLACE"]]);
        assert_all_refused(fixture);
    };
    swapdb: |way| {
        let mut fixture = Fixture::set();
        fixture.client.run_ok("SELECT 1");
        fixture.client.run_ok("SET key text");
        fixture.client.run_ok("SELECT 0");
        run(&mut fixture.client, way, &["SWAPDB 0 1"]);
        assert_all_refused(fixture);
    };
    hold_of_other_owner: |way| {
        let mut fixture = Fixture::set();
        fixture.client.run_ok("LOCK.ACQUIRE other stranger LEASE 60000");
        run(&mut fixture.client, way, &["COPY other key REPLACE"]);
        assert!(!support::eventually(std::time::Duration::from_millis(50), || !fixture.first.waits()));
        assert_held(&mut fixture.client, "key", "stranger");
        fixture.client.run_ok("LOCK.RELEASE key stranger");
        fixture.serves_in_order();
    };
    hold_of_waiter: |way| {
        let mut fixture = Fixture::set();
        let other = fixture.client.get_token("LOCK.ACQUIRE other second LEASE 60000");
        run(&mut fixture.client, way, &["RENAME other key"]);
        assert_eq!(fixture.second.token(), other, "a re-entry, ahead of earlier requests");
        assert_eq!(text(&fixture.client.run("HGET key second")), "2");
        assert!(fixture.first.waits());
        assert_eq!(fixture.client.run("LOCK.RELEASE key second ALL"), Value::Int(1));
        assert!(fixture.first.token() > other);
        until_no_waiters(&fixture.server);
    };
}

/// Between the commands of a transaction or script, the lock is not free.
fn stays_taken(way: Way) {
    let mut fixture = Fixture::set();
    run(&mut fixture.client, way, &["DEL key", "HSET key stranger 1", "PEXPIRE key 60000"]);
    assert!(!support::eventually(std::time::Duration::from_millis(50), || !fixture.first.waits()));
    assert_held(&mut fixture.client, "key", "stranger");
    run(&mut fixture.client, way, &["DEL key"]);
    fixture.serves_in_order();
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
    let mut fixture = Fixture::set();
    let mut third = Waiter::start(&fixture.server, "key", "first");
    assert_eq!(fixture.first.error(), "SUPERSEDED");
    fixture.client.run_ok("LOCK.ACQUIRE other first LEASE 60000");
    fixture.client.run_ok("RENAME other key");
    let held = third.token();
    assert_eq!(text(&fixture.client.run("HGET key first")), "2");
    assert_eq!(fixture.client.get_token("LOCK.ACQUIRE key first"), held);
    assert_eq!(count_waiters(&mut fixture.client, "key"), 1);
    assert!(fixture.second.waits());
}
