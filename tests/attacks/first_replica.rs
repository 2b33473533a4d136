//! The first replica connects during a snapshot and waits for the next one. Until then, the module sees no replica, and does
//! not replicate its writes.

use redis::Value;
use support::{Raw, Server, until};

use crate::common::{Contents, info_number};
use crate::lines::{Commands, Reply, SOON, Watched, arrives, owners};

/// A server without replicas whose snapshot takes some seconds.
fn slow_to_save() -> (Server, Raw) {
    let server = Server::builder().arg("propagation-error-behavior", "panic").start();
    let mut connection = server.raw();
    for index in 0..60 {
        connection.run(&format!("SET filler:{index} value"));
    }
    // Microseconds for each key.
    assert_eq!(connection.run("CONFIG SET rdb-key-save-delay 100000"), Value::Okay);
    (server, connection)
}

/// Whether a replica waits for its snapshot to begin.
fn waits_for_a_snapshot(server: &Server) -> bool {
    server.info("replication", "slave0").is_some_and(|replica| replica.contains("state=wait_bgsave"))
        && info_number(server, "persistence", "rdb_bgsave_in_progress") == 1
}

#[test]
fn first_replica_misses_no_write_made_during_sync() {
    let (primary, connection) = slow_to_save();
    let mut connection = Watched::over(connection, &primary);
    let replica = Server::builder().arg("propagation-error-behavior", "panic").start();
    let mut waiters = [primary.raw(), primary.raw(), primary.raw()];
    for round in 0..3 {
        connection.run(&format!("LOCK.ACQUIRE before:{round} me LEASE 600000")).token();
    }
    connection.run("LOCK.ACQUIRE watched me LEASE 3000 WATCHDOG").token();
    assert_eq!(connection.run("BGSAVE"), Value::SimpleString("Background saving started".into()));
    // After the fork, the module replicates everything until the next run of the cron.
    let renewals = || info_number(&primary, "holdfast", "holdfast_watchdog_renewals");
    let before = renewals();
    until(SOON, "the cron has run several times", || renewals() >= before + 3);
    let address = primary.addr();
    replica.raw().run(&format!("REPLICAOF {} {}", address.ip(), address.port()));
    until(SOON, "the replica waits for the next snapshot", || waits_for_a_snapshot(&primary));

    // Writes of commands, of timers, and at the end of a connection.
    let mut gone = primary.raw();
    gone.run("LOCK.ACQUIRE ephemeral me LEASE 600000 EPHEMERAL").token();
    connection.run("LOCK.ACQUIRE short me LEASE 100").token();
    connection.run("LOCK.ACQUIRE many me SHARED LEASE 100").token();
    connection.run("LOCK.ACQUIRE many stays SHARED LEASE 600000").token();
    connection.run("LOCK.RELEASE before:1 me");
    for (waiter, key) in waiters.iter_mut().zip(["short", "ephemeral", "before:2"]) {
        assert_eq!(waiter.begin(&format!("LOCK.ACQUIRE {key} next LEASE 600000 WAIT 0")), None);
    }
    gone.reset();
    connection.run("DEL before:2");
    for waiter in &mut waiters {
        arrives(waiter).token();
    }
    let renewed = renewals();
    until(SOON, "the watchdog has renewed", || renewals() > renewed);
    until(SOON, "the expired hold is removed", || owners(&mut connection, "many") == ["stays"]);
    assert!(waits_for_a_snapshot(&primary), "all writes were made while the replica waited");

    connection.run("CONFIG SET rdb-key-save-delay 0");
    until(SOON * 2, "the replica has its copy", || {
        replica.info("replication", "master_link_status").as_deref() == Some("up")
    });
    connection.run("LOCK.RELEASE watched me");
    connection.run("LOCK.ACQUIRE after me LEASE 600000").token();
    primary.wait_for_replica(&replica);
    assert_eq!(Contents::read(&mut replica.raw()), Contents::read(&mut connection));
    for server in [&primary, &replica] {
        assert!(!server.log().contains("CRITICAL"), "{}", server.log());
    }
}
