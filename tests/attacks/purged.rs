//! Expired holders of locks without waiters are removed, and soon.

use std::thread;
use std::time::Duration;

use redis::Value;
use support::{Raw, Server, until};

use crate::lines::{Commands, Reply, SOON, arrives, now, owners};

/// A server whose cron runs once a second. The module must not depend on the cron.
fn slow_cron() -> Server {
    Server::builder().arg("hz", "1").arg("dynamic-hz", "no").start()
}

/// That many owners share `key` for `lease` ms, with one that stays.
fn fill(connection: &mut Raw, key: &str, holders: usize, lease: u64) {
    connection.run(&format!("LOCK.ACQUIRE {key} stays SHARED LEASE 600000")).token();
    let lines: Vec<String> =
        (0..holders).map(|index| format!("LOCK.ACQUIRE {key} holder:{index} SHARED LEASE {lease}")).collect();
    for reply in connection.run_all(&lines) {
        reply.token();
    }
}

/// Whether only the hold that stays is left: it has two fields, and the lock two.
fn is_purged(connection: &mut Raw, key: &str) -> bool {
    connection.run(&format!("HLEN {key}")) == Value::Int(4)
}

#[test]
fn many_expired_holders_are_removed_at_low_cron_rate() {
    let server = slow_cron();
    let mut connection = server.raw();
    // All leases begin when all owners hold the lock.
    fill(&mut connection, "many", 2400, 1500);
    fill(&mut connection, "few", 600, 1500);
    let end = now() + 1500;
    until(SOON, "the leases have expired", || now() > end);
    until(SOON, "all expired holders are removed", || {
        // Polled rarely, because the server must also do it when it is idle.
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
    for reply in connection.run_all(&lines("LOCK.ACQUIRE endless:# me SHARED LEASE 1500")) {
        reply.token();
    }
    let end = now() + 1500;
    assert!(connection.run_all(&lines("PERSIST endless:#")).iter().all(|reply| *reply == Value::Int(1)));
    until(SOON, "their leases would have expired", || now() > end);
    for info in connection.run_all(&lines("LOCK.INFO endless:#")) {
        assert_eq!(info.field("holders").items().len(), 1, "without an expiry no lease ends");
    }
    for round in 0..3 {
        let key = format!("key:{round}");
        fill(&mut connection, &key, 300, 100);
        until(SOON, "all expired holders are removed", || is_purged(&mut connection, &key));
    }
    for info in connection.run_all(&lines("LOCK.INFO endless:#")) {
        assert_eq!(info.field("holders").items().len(), 1);
    }
}

/// The number of event-loop iterations. Redis 7.0 doesn't count them: there, the number of iterations in which the
/// module had work, because it first asks whether the server takes writes.
fn iterations(server: &Server) -> i64 {
    let asked = || server.info("commandstats", "cmdstat_setrange");
    let number = server.info("stats", "eventloop_cycles").or_else(asked).unwrap_or_default();
    let number = number.trim_start_matches("calls=").split(',').next();
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// A request waits for the lock, so the module has read it, and would read it again whenever a lease seems to have
/// ended.
#[test]
fn contended_lock_without_expiry_causes_no_work() {
    let server = slow_cron();
    let (mut connection, mut waiting) = (server.raw(), server.raw());
    fill(&mut connection, "key", 100, 500);
    assert_eq!(connection.run("PERSIST key"), Value::Int(1));
    assert_eq!(waiting.begin("LOCK.ACQUIRE key waits WAIT 0"), None);
    let end = now() + 500;
    until(SOON, "their leases would have expired", || now() > end);
    assert_eq!(connection.run("LOCK.INFO key").field("holder_count"), Value::Int(101));
    let (before, end) = (iterations(&server), now() + 1000);
    until(SOON, "a second is over", || now() > end);
    let made = iterations(&server) - before;
    assert!(made < 50, "{made} iterations in a second without requests");
    // Leases end again once the key has an expiry.
    assert_eq!(connection.run("LOCK.RELEASE key stays"), Value::Int(1));
    assert_eq!(connection.run("PEXPIRE key 600000"), Value::Int(1));
    arrives(&mut waiting).token();
}
