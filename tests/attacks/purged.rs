//! Holders whose lease is over, and for whose lock nobody waits: all of them are taken out, and soon.

use std::thread;
use std::time::Duration;

use redis::Value;
use support::{Raw, Server, until};

use crate::speak::{Reply, SOON, Speak, now, owners};

/// A server whose cron, from which module work must not depend, runs once a second.
fn slow_cron() -> Server {
    Server::builder().arg("hz", "1").arg("dynamic-hz", "no").start()
}

/// So many share `key` with one who stays; they hold it for `lease` ms.
fn fill(connection: &mut Raw, key: &str, holders: usize, lease: u64) {
    connection.say(&format!("LOCK.ACQUIRE {key} stays SHARED LEASE 600000")).token();
    let lines: Vec<String> =
        (0..holders).map(|index| format!("LOCK.ACQUIRE {key} holder:{index} SHARED LEASE {lease}")).collect();
    for reply in connection.say_all(&lines) {
        reply.token();
    }
}

/// Whether only the one who stays is left: it has two fields, and the lock two.
fn is_purged(connection: &mut Raw, key: &str) -> bool {
    connection.say(&format!("HLEN {key}")) == Value::Int(4)
}

#[test]
fn many_expired_holders_are_removed_at_low_cron_rate() {
    let server = slow_cron();
    let mut connection = server.raw();
    // Together, when all of them hold.
    fill(&mut connection, "many", 2400, 1500);
    fill(&mut connection, "few", 600, 1500);
    let end = now() + 1500;
    until(SOON, "the leases are over", || now() > end);
    until(SOON, "all are taken out", || {
        // Asked seldom, for a server that sleeps has to do it as well.
        thread::sleep(Duration::from_millis(200));
        is_purged(&mut connection, "many") && is_purged(&mut connection, "few")
    });
    assert_eq!(owners(&mut connection, "many"), ["stays"]);
}

#[test]
fn holders_without_expiry_delay_no_removal() {
    let server = slow_cron();
    let mut connection = server.raw();
    let lines = |form: &str| -> Vec<String> { (0..256).map(|it| form.replace('#', &it.to_string())).collect() };
    for reply in connection.say_all(&lines("LOCK.ACQUIRE endless:# me SHARED LEASE 1500")) {
        reply.token();
    }
    let end = now() + 1500;
    assert!(connection.say_all(&lines("PERSIST endless:#")).iter().all(|reply| *reply == Value::Int(1)));
    until(SOON, "their leases would be over", || now() > end);
    for info in connection.say_all(&lines("LOCK.INFO endless:#")) {
        assert_eq!(info.field("holders").items().len(), 1, "without an expiry no lease ends");
    }
    for round in 0..3 {
        let key = format!("key:{round}");
        fill(&mut connection, &key, 300, 100);
        until(SOON, "all are taken out", || is_purged(&mut connection, &key));
    }
    for info in connection.say_all(&lines("LOCK.INFO endless:#")) {
        assert_eq!(info.field("holders").items().len(), 1);
    }
}
