//! The first replica that comes while a snapshot is being saved has to wait for the next one. Until that begins, the
//! module takes the server for one that nobody follows, and hands on nothing of what it writes.

use redis::Value;
use support::{Raw, Server, until};

use crate::common::{Contents, info_number};
use crate::speak::{Reply, SOON, Speak, Watched, arrives, owners};

/// A server whose snapshot takes some seconds, and that has nobody who follows it.
fn slow_to_save() -> (Server, Raw) {
    let server = Server::builder().arg("propagation-error-behavior", "panic").start();
    let mut connection = server.raw();
    for index in 0..60 {
        connection.say(&format!("SET filler:{index} value"));
    }
    // Microseconds a key.
    assert_eq!(connection.say("CONFIG SET rdb-key-save-delay 100000"), Value::Okay);
    (server, connection)
}

/// Whether a replica is there whose snapshot has not begun.
fn waits_for_a_snapshot(server: &Server) -> bool {
    server.info("replication", "slave0").is_some_and(|replica| replica.contains("state=wait_bgsave"))
        && info_number(server, "persistence", "rdb_bgsave_in_progress") == 1
}

#[test]
fn first_replica_misses_no_write_made_during_sync() {
    let (master, connection) = slow_to_save();
    let mut connection = Watched::over(connection, &master);
    let replica = Server::builder().arg("propagation-error-behavior", "panic").start();
    let mut waiters = [master.raw(), master.raw(), master.raw()];
    for round in 0..3 {
        connection.say(&format!("LOCK.ACQUIRE before:{round} me LEASE 600000")).token();
    }
    connection.say("LOCK.ACQUIRE watched me LEASE 600 WATCHDOG").token();
    assert_eq!(connection.say("BGSAVE"), Value::SimpleString("Background saving started".into()));
    // The fork itself lets the module hand on everything until its cron has looked around once more.
    let renewals = || info_number(&master, "holdfast", "holdfast_watchdog_renewals");
    let before = renewals();
    until(SOON, "the cron has come by often", || renewals() >= before + 3);
    let address = master.addr();
    replica.raw().say(&format!("REPLICAOF {} {}", address.ip(), address.port()));
    until(SOON, "the replica waits behind the snapshot", || waits_for_a_snapshot(&master));

    // Written by commands, by timers, and by the end of a connection.
    let mut gone = master.raw();
    gone.say("LOCK.ACQUIRE ephemeral me LEASE 600000 EPHEMERAL").token();
    connection.say("LOCK.ACQUIRE short me LEASE 100").token();
    connection.say("LOCK.ACQUIRE many me SHARED LEASE 100").token();
    connection.say("LOCK.ACQUIRE many stays SHARED LEASE 600000").token();
    connection.say("LOCK.RELEASE before:1 me");
    for (waiter, key) in waiters.iter_mut().zip(["short", "ephemeral", "before:2"]) {
        assert_eq!(waiter.begin(&format!("LOCK.ACQUIRE {key} next LEASE 600000 WAIT 0")), None);
    }
    gone.reset();
    connection.say("DEL before:2");
    for waiter in &mut waiters {
        arrives(waiter).token();
    }
    let renewed = renewals();
    until(SOON, "the watchdog has renewed", || renewals() > renewed);
    until(SOON, "the short hold is taken out", || owners(&mut connection, "many") == ["stays"]);
    assert!(waits_for_a_snapshot(&master), "all of that was written while it waited");

    connection.say("CONFIG SET rdb-key-save-delay 0");
    until(SOON * 2, "the replica has its copy", || {
        replica.info("replication", "master_link_status").as_deref() == Some("up")
    });
    connection.say("LOCK.RELEASE watched me");
    connection.say("LOCK.ACQUIRE after me LEASE 600000").token();
    master.wait_for_replica(&replica);
    assert_eq!(Contents::read(&mut replica.raw()), Contents::read(&mut connection));
    for server in [&master, &replica] {
        assert!(!server.log().contains("CRITICAL"), "{}", server.log());
    }
}
