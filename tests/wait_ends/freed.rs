//! The lock becomes free, by any command of any client.

use redis::Value;
use support::{Raw, Server, lua};

use super::way::{Way, in_every_way, run, run_bytes};
use crate::common::int;
use crate::waiter::{Commands, SOON, Waiter, assert_held, holders_in_hash, is_blocked, until_no_waiters};

/// `holder` holds `key`, `first` and `second` wait for it.
pub(super) struct Fixture {
    pub(super) server: Server,
    pub(super) client: Raw,
    pub(super) held: i64,
    pub(super) first: Waiter,
    pub(super) second: Waiter,
}

impl Fixture {
    #[track_caller]
    pub(super) fn set() -> Self {
        let server = Server::start();
        let mut client = server.raw();
        let held = client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
        let first = Waiter::start(&server, "key", "first");
        let second = Waiter::start(&server, "key", "second");
        Self { server, client, held, first, second }
    }

    /// The lock has become free: `first` is granted, and only after it `second`.
    #[track_caller]
    pub(super) fn serves_in_order(mut self) {
        let first = self.first.token();
        assert!(first > self.held, "{first} > {}", self.held);
        assert_held(&mut self.client, "key", "first");
        assert_eq!(self.client.run("HGET key #fence"), Value::BulkString(first.to_string().into()));
        let left = int(&self.client.run("PTTL key"));
        assert!((1..=30_000).contains(&left), "a lease of its own: {left} ms");
        self.still_waits();
        assert_eq!(self.client.run("LOCK.RELEASE key first"), Value::Int(1));
        assert!(self.second.token() > first);
        assert_held(&mut self.client, "key", "second");
        until_no_waiters(&self.server);
    }

    #[track_caller]
    fn still_waits(&mut self) {
        assert!(self.second.waits());
        assert!(is_blocked(&mut self.client, self.second.id));
    }
}

/// Asserts that the lock becomes free by `commands`, after those of `before`.
fn frees(way: Way, before: &[&str], commands: &[&str]) {
    let mut fixture = Fixture::set();
    for line in before {
        fixture.client.run_ok(line);
    }
    assert!(fixture.first.waits() && fixture.second.waits(), "both wait while the lock is held");
    run(&mut fixture.client, way, commands);
    fixture.serves_in_order();
}

in_every_way! {
    release: |way| frees(way, &[], &["LOCK.RELEASE key holder"]);
    release_by_count: |way| frees(way, &["LOCK.ACQUIRE key holder"], &["LOCK.RELEASE key holder HOLDS 0"]);
    release_of_all: |way| frees(way, &["LOCK.ACQUIRE key holder"], &["LOCK.RELEASE key holder ALL"]);
    release_of_several_keys: |way| frees(way, &["LOCK.ACQUIRE other holder"], &["LOCK.MRELEASE 2 other key holder"]);
    last_of_several_holds: |way| frees(
        way,
        &["LOCK.ACQUIRE key holder", "LOCK.ACQUIRE key holder", "LOCK.RELEASE key holder", "LOCK.RELEASE key holder"],
        &["LOCK.RELEASE key holder"],
    );
    several_holds_at_once: |way| frees(
        way,
        &["LOCK.ACQUIRE key holder"],
        &["LOCK.RELEASE key holder", "LOCK.RELEASE key holder"],
    );
    force: |way| frees(way, &["LOCK.ACQUIRE key holder"], &["LOCK.FORCE key"]);
    del: |way| frees(way, &[], &["DEL key"]);
    unlink: |way| frees(way, &[], &["UNLINK key"]);
    hdel_of_holder: |way| frees(way, &[], &["HDEL key holder"]);
    hdel_of_every_field: |way| frees(way, &[], &["HDEL key holder #fence"]);
    rename_away: |way| frees(way, &[], &["RENAME key elsewhere"]);
    renamenx_away: |way| frees(way, &[], &["RENAMENX key elsewhere"]);
    rename_of_free_lock: |way| frees(way, &["HSET free #fence 1"], &["RENAME free key"]);
    // SELECT 0: on Valkey 8.1, a client that moved a key is left in the other database if a module subscribes to events
    // (valkey#4024).
    move_away: |way| frees(way, &[], &["MOVE key 1", "SELECT 0"]);
    copy_of_free_lock: |way| frees(way, &["HSET free #fence 1"], &["COPY free key REPLACE"]);
    empty_result_stored: |way| frees(way, &[], &["SUNIONSTORE key nothing"]);
    flushdb: |way| frees(way, &[], &["FLUSHDB SYNC"]);
    flushdb_async: |way| frees(way, &[], &["FLUSHDB ASYNC"]);
    flushall: |way| frees(way, &[], &["FLUSHALL SYNC"]);
    flushall_async: |way| frees(way, &[], &["FLUSHALL ASYNC"]);
    swapdb: |way| frees(way, &[], &["SWAPDB 0 1"]);
    swapdb_in_reverse_order: |way| frees(way, &[], &["SWAPDB 1 0"]);
    pexpire_to_now: |way| frees(way, &[], &["PEXPIRE key 0"]);
    expire_in_the_past: |way| frees(way, &[], &["EXPIRE key -1"]);
    expireat_in_the_past: |way| frees(way, &[], &["EXPIREAT key 1"]);
}

in_every_way! {
    restore_of_free_lock: |way| {
        let mut fixture = Fixture::set();
        fixture.client.run_ok("HSET free #fence 1");
        let Value::BulkString(dump) = fixture.client.run("DUMP free") else { panic!("no dump") };
        run_bytes(&mut fixture.client, way, &[vec![b"RESTORE", b"key", b"0", &dump, b"REPLACE"]]);
        fixture.serves_in_order();
    };
    rename_keeps_hold_under_new_name: |way| {
        let mut fixture = Fixture::set();
        run(&mut fixture.client, way, &["RENAME key elsewhere"]);
        fixture.first.token();
        assert_held(&mut fixture.client, "elsewhere", "holder");
        assert_eq!(fixture.client.run("LOCK.ACQUIRE elsewhere stranger"), Value::Nil);
    };
    flush_of_other_database: |way| {
        let mut fixture = Fixture::set();
        run(&mut fixture.client, way, &["SELECT 1", "FLUSHDB", "SELECT 0"]);
        assert_held(&mut fixture.client, "key", "holder");
        assert!(fixture.first.waits() && fixture.second.waits());
        run(&mut fixture.client, way, &["DEL key"]);
        fixture.serves_in_order();
    };
    swapdb_with_held_lock: |way| {
        let mut fixture = Fixture::set();
        let mut other = fixture.server.raw();
        other.run_ok("SELECT 1");
        other.get_token("LOCK.ACQUIRE key stranger LEASE 60000");
        let mut waiter = Waiter::on(other, &fixture.server, "LOCK.ACQUIRE key holder WAIT 0");
        run(&mut fixture.client, way, &["SWAPDB 0 1"]);
        assert_eq!(waiter.token(), fixture.held, "a re-entry: its owner holds the lock of database 1 now");
        assert!(fixture.first.waits() && fixture.second.waits());
        assert_held(&mut fixture.client, "key", "stranger");
        run(&mut fixture.client, way, &["LOCK.RELEASE key stranger"]);
        fixture.serves_in_order();
    };
    redisson_unlock: |way| {
        let mut fixture = Fixture::set();
        let channel = lua::channel(b"key");
        let unlock: Vec<&[u8]> =
            vec![b"EVAL", lua::RELEASE.as_bytes(), b"2", b"key", &channel, b"30000", b"holder"];
        let again: Vec<&[u8]> = vec![b"EVAL", lua::ACQUIRE.as_bytes(), b"1", b"key", b"30000", b"holder"];
        match way {
            // A script can't call another script, so this is the script itself.
            Way::InAScript => {
                assert_eq!(fixture.client.call(&again), Value::Nil);
                assert_eq!(fixture.client.call(&unlock), Value::Int(0));
                assert!(fixture.first.waits(), "one hold is left");
                assert_eq!(fixture.client.call(&unlock), Value::Int(1));
            }
            _ => assert_eq!(run_bytes(&mut fixture.client, way, &[unlock]), Value::Int(1)),
        }
        fixture.serves_in_order();
    };
}

/// However often one command acquires and releases it, the lock is free in the end.
#[test]
fn lock_freed_twice_in_one_command_is_granted() {
    for way in [Way::InATransaction, Way::InAScript] {
        frees(way, &[], &["DEL key", "SET key text", "DEL key", "HSET key holder 1", "DEL key"]);
    }
}

#[test]
fn waiter_gets_lock_that_redisson_releases() {
    let server = Server::start();
    let mut client = server.raw();
    let acquire = |owner: &'static [u8]| -> Vec<&'static [u8]> {
        vec![b"EVAL", lua::ACQUIRE.as_bytes(), b"1", b"key", b"60000", owner]
    };
    assert_eq!(client.call(&acquire(b"redisson")), Value::Nil);
    let mut waiter = Waiter::start(&server, "key", "ours");
    let channel = lua::channel(b"key");
    let unlock = [b"EVAL", lua::RELEASE.as_bytes(), b"2", b"key", &channel, b"30000", b"redisson"];
    assert_eq!(client.call(&unlock), Value::Int(1));
    waiter.token();
    // A Redisson script between the wake-up and the grant would acquire the lock.
    assert!(int(&client.call(&acquire(b"redisson"))) > 0);
    assert_held(&mut client, "key", "ours");
}

#[test]
fn partial_release_frees_nothing() {
    let mut fixture = Fixture::set();
    assert_eq!(fixture.client.run("LOCK.ACQUIRE key holder"), Value::Int(fixture.held));
    assert_eq!(fixture.client.run("LOCK.RELEASE key holder"), Value::Int(0));
    assert!(!support::eventually(std::time::Duration::from_millis(50), || !fixture.first.waits()));
    assert_eq!(fixture.client.run("LOCK.RELEASE key holder"), Value::Int(1));
    fixture.serves_in_order();
}

#[test]
fn last_reader_frees_lock_for_writer() {
    let server = Server::start();
    let mut client = server.raw();
    for reader in ["one", "two", "three"] {
        client.get_token(&format!("LOCK.ACQUIRE key {reader} SHARED"));
    }
    let mut writer = Waiter::start(&server, "key", "writer");
    for reader in ["one", "two"] {
        client.run_ok(&format!("LOCK.RELEASE key {reader}"));
        assert!(writer.waits());
    }
    client.run_ok("LOCK.RELEASE key three");
    writer.token();
    assert_held(&mut client, "key", "writer");
}

#[test]
fn other_commands_free_nothing() {
    let mut fixture = Fixture::set();
    for line in ["LOCK.RELEASE key stranger", "LOCK.RELEASE key first", "LOCK.RELEASE key holder TOKEN 1"] {
        assert_eq!(fixture.client.run(line), Value::Nil, "{line}");
    }
    for line in ["HSET key #fence 1", "EXISTS key", "HDEL key nobody", "PEXPIRE key 60000", "DEL another"] {
        fixture.client.run_ok(line);
    }
    assert!(!support::eventually(std::time::Duration::from_millis(50), || !fixture.first.waits()));
    assert_eq!(holders_in_hash(&mut fixture.client, "key"), [("holder".into(), "1".into())]);
    support::until(SOON, "both still wait", || fixture.first.waits() && fixture.second.waits());
}
