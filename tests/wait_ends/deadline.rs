//! The lock expires, sooner or later than at the waiter's request.

use std::time::Duration;

use redis::Value;
use support::{NotBefore, Raw, Server, eventually};

use super::AHEAD;
use super::way::{Way, in_every_way, run};
use crate::common::{int, unix_micros};
use crate::waiter::{Commands, Waiter, assert_held, until_no_waiters};

const ROUNDS: usize = 9;

/// When `key` expires, in Unix microseconds.
fn deadline(client: &mut Raw, key: &str) -> i64 {
    let millis = int(&client.run(&format!("PEXPIRETIME {key}")));
    assert!(millis > 0, "{key} has no deadline: {millis}");
    millis * 1000
}

/// Asserts that the grant was not given before the deadline; both are in microseconds. A token is the time of its grant.
/// The benchmarks measure the delay.
#[track_caller]
fn assert_not_before(deadline: i64, token: i64) {
    assert!(token >= deadline, "granted {} µs before the deadline", deadline - token);
}

struct Fixture {
    server: Server,
    client: Raw,
}

impl Fixture {
    /// A server whose cron runs once a second.
    fn slow() -> Self {
        let server = Server::builder().arg("hz", "1").arg("dynamic-hz", "no").start();
        let client = server.raw();
        Self { server, client }
    }

    /// A server that does not expire keys actively.
    fn lazy() -> Self {
        let mut fixture = Self::slow();
        fixture.client.run_ok("DEBUG SET-ACTIVE-EXPIRE 0");
        fixture
    }

    /// `holder` holds the lock for `lease` ms, and a request waits for it.
    #[track_caller]
    fn held_for(&mut self, lease: u64) -> Waiter {
        self.client.get_token(&format!("LOCK.ACQUIRE key holder LEASE {lease}"));
        Waiter::start(&self.server, "key", "waiter")
    }

    /// The waiter is granted at the key's current deadline.
    #[track_caller]
    fn serves_at_the_deadline(mut self, mut waiter: Waiter) {
        let deadline = deadline(&mut self.client, "key");
        assert_not_before(deadline, waiter.token());
        assert_held(&mut self.client, "key", "waiter");
        until_no_waiters(&self.server);
    }

    /// The waiter is not granted in the next `millis`, which include its first deadline.
    #[track_caller]
    fn assert_no_grant_for(&mut self, millis: u64, waiter: &mut Waiter) {
        assert!(!eventually(Duration::from_millis(millis), || !waiter.waits()));
        assert_held(&mut self.client, "key", "holder");
    }
}

/// Waits for locks that expire, one after the other.
fn wait_for_each_expiry(fixture: &mut Fixture) {
    let rounds: Vec<(i64, Waiter)> = (0..ROUNDS).map(|round| begin_round(fixture, round)).collect();
    for (deadline, mut waiter) in rounds {
        assert_not_before(deadline, waiter.token());
    }
}

/// A lock with its own deadline, and a request that waits for it.
fn begin_round(fixture: &mut Fixture, round: usize) -> (i64, Waiter) {
    let (key, lease) = (format!("key:{round}"), AHEAD as i64 + round as i64);
    let token = fixture.client.get_token(&format!("LOCK.ACQUIRE {key} holder LEASE {lease}"));
    // A token is the time of its grant. Leases are in whole milliseconds.
    ((token / 1000 + lease) * 1000, Waiter::start(&fixture.server, &key, "waiter"))
}

#[test]
fn waiter_is_granted_at_deadline() {
    let server = Server::start();
    let client = server.raw();
    wait_for_each_expiry(&mut Fixture { server, client });
}

#[test]
fn waiter_is_granted_at_deadline_with_hz_1() {
    wait_for_each_expiry(&mut Fixture::slow());
}

#[test]
fn waiter_is_granted_at_deadline_without_expiry_cycle() {
    wait_for_each_expiry(&mut Fixture::lazy());
}

/// A hold that was granted by a release has a deadline, too.
#[test]
fn waiter_is_granted_at_deadline_of_queued_grant() {
    let mut fixture = Fixture::lazy();
    for round in 0..ROUNDS {
        let lease = 60 + round as i64;
        fixture.client.get_token("LOCK.ACQUIRE key holder LEASE 3600000");
        let line = format!("LOCK.ACQUIRE key first WAIT 0 LEASE {lease}");
        let mut first = Waiter::sending(&fixture.server, &line);
        let mut second = Waiter::start(&fixture.server, "key", "second");
        fixture.client.run_ok("LOCK.RELEASE key holder");
        // A token is the time of its grant. Leases are in whole milliseconds.
        let deadline = (first.token() / 1000 + lease) * 1000;
        assert_not_before(deadline, second.token());
        fixture.client.run_ok("LOCK.RELEASE key second");
    }
}

/// That holder's deadline is before the key's.
#[test]
fn waiter_is_granted_at_deadline_of_one_of_several_holders() {
    let mut fixture = Fixture::lazy();
    fixture.client.get_token("LOCK.ACQUIRE key long LIMIT 2 LEASE 60000");
    let short = fixture.client.get_token("LOCK.ACQUIRE key short LIMIT 2 LEASE 1500");
    let mut waiter = Waiter::sending(&fixture.server, "LOCK.ACQUIRE key waiter LIMIT 2 WAIT 0");
    assert_not_before((short / 1000 + 1500) * 1000, waiter.token());
}

#[test]
fn waiters_are_granted_one_after_another_by_expiry() {
    let mut fixture = Fixture::lazy();
    fixture.client.get_token(&format!("LOCK.ACQUIRE key holder LEASE {AHEAD}"));
    let lines = (0..5).map(|number| format!("LOCK.ACQUIRE key waiter-{number} LEASE 100 WAIT 0"));
    let waiters: Vec<Waiter> = lines.map(|line| Waiter::sending(&fixture.server, &line)).collect();
    let tokens: Vec<i64> = waiters.into_iter().map(|mut waiter| waiter.token()).collect();
    for pair in tokens.windows(2) {
        assert_not_before((pair[0] / 1000 + 100) * 1000, pair[1]);
    }
}

in_every_way! {
    sooner_by_pexpire: |way| {
        let mut fixture = Fixture::lazy();
        let waiter = fixture.held_for(60_000);
        run(&mut fixture.client, way, &[&format!("PEXPIRE key {AHEAD}")]);
        fixture.serves_at_the_deadline(waiter);
    };
    sooner_by_expireat: |way| {
        let mut fixture = Fixture::lazy();
        let waiter = fixture.held_for(60_000);
        let second = unix_micros() / 1_000_000 + 2;
        run(&mut fixture.client, way, &[&format!("EXPIREAT key {second}")]);
        assert_not_before(second * 1_000_000, { waiter }.token());
    };
    later_by_pexpire: |way| {
        let mut fixture = Fixture::lazy();
        let mut waiter = fixture.held_for(AHEAD);
        run(&mut fixture.client, way, &[&format!("PEXPIRE key {}", 2 * AHEAD)]);
        fixture.assert_no_grant_for(AHEAD + 150, &mut waiter);
        fixture.serves_at_the_deadline(waiter);
    };
    later_by_expireat: |way| {
        let mut fixture = Fixture::lazy();
        let mut waiter = fixture.held_for(AHEAD);
        let second = unix_micros() / 1_000_000 + 4;
        run(&mut fixture.client, way, &[&format!("EXPIREAT key {second}")]);
        fixture.assert_no_grant_for(AHEAD + 150, &mut waiter);
        fixture.serves_at_the_deadline(waiter);
    };
    never_by_persist: |way| {
        let mut fixture = Fixture::lazy();
        let mut waiter = fixture.held_for(AHEAD);
        run(&mut fixture.client, way, &["PERSIST key"]);
        fixture.assert_no_grant_for(AHEAD + 150, &mut waiter);
        run(&mut fixture.client, way, &[&format!("PEXPIRE key {AHEAD}")]);
        fixture.serves_at_the_deadline(waiter);
    };
    first_deadline: |way| {
        let mut fixture = Fixture::lazy();
        fixture.client.run_ok("HSET key holder 1");
        let mut waiter = Waiter::start(&fixture.server, "key", "waiter");
        fixture.assert_no_grant_for(50, &mut waiter);
        run(&mut fixture.client, way, &[&format!("PEXPIRE key {AHEAD}")]);
        fixture.serves_at_the_deadline(waiter);
    };
    later_by_renewal: |way| {
        let mut fixture = Fixture::lazy();
        let mut waiter = fixture.held_for(AHEAD);
        run(&mut fixture.client, way, &[&format!("LOCK.RENEW key holder LEASE {}", 2 * AHEAD)]);
        fixture.assert_no_grant_for(AHEAD + 150, &mut waiter);
        fixture.serves_at_the_deadline(waiter);
    };
    sooner_by_renewal: |way| {
        let mut fixture = Fixture::lazy();
        let waiter = fixture.held_for(60_000);
        run(&mut fixture.client, way, &[&format!("LOCK.RENEW key holder LEASE {AHEAD}")]);
        fixture.serves_at_the_deadline(waiter);
    };
    sooner_by_partial_release: |way| {
        let mut fixture = Fixture::lazy();
        let waiter = fixture.held_for(60_000);
        fixture.client.run_ok("LOCK.ACQUIRE key holder LEASE 60000");
        run(&mut fixture.client, way, &[&format!("LOCK.RELEASE key holder LEASE {AHEAD}")]);
        fixture.serves_at_the_deadline(waiter);
    };
    sooner_by_replaced_lock: |way| {
        let mut fixture = Fixture::lazy();
        let waiter = fixture.held_for(60_000);
        fixture.client.run_ok("LOCK.ACQUIRE other holder LEASE 60000");
        run(&mut fixture.client, way, &[&format!("PEXPIRE other {AHEAD}"), "RENAME other key"]);
        fixture.serves_at_the_deadline(waiter);
    };
}

#[test]
fn deadline_of_reentry_counts() {
    let mut fixture = Fixture::lazy();
    let mut waiter = fixture.held_for(AHEAD);
    fixture.client.run_ok(&format!("LOCK.ACQUIRE key holder HOLDS 1 LEASE {}", 2 * AHEAD));
    fixture.assert_no_grant_for(AHEAD + 150, &mut waiter);
    fixture.serves_at_the_deadline(waiter);
}

/// And not at the lock's deadline.
#[test]
fn waiter_times_out_at_its_own_timeout() {
    let server = Server::start();
    let mut client = server.raw();
    let held = client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut behind = server.raw();
    for wait in [1, 20, 200] {
        // "At most that long": a part of a millisecond less is allowed.
        let due = NotBefore::millis(wait - 1);
        let mut waiter = server.raw();
        waiter.send_lines(&[&format!("LOCK.ACQUIRE key waiter WAIT {wait}")]);
        assert_eq!(waiter.read().unwrap(), Value::Nil);
        due.is_over("the end of the wait");
    }
    until_no_waiters(&server);
    assert_held(&mut client, "key", "holder");
    assert_eq!(client.run("LOCK.ACQUIRE key holder"), Value::Int(held), "the lock is as it was");
    client.run_ok("LOCK.RELEASE key holder ALL");
    behind.get_token("LOCK.ACQUIRE key newcomer");
}

#[test]
fn timeout_in_middle_of_queue_leaves_others() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut first = Waiter::start(&server, "key", "first");
    let mut middle = Waiter::sending_briefly(&server, "LOCK.ACQUIRE key middle WAIT 200");
    let mut last = Waiter::start(&server, "key", "last");
    assert_eq!(middle.end(), Value::Nil);
    client.run_ok("LOCK.RELEASE key holder");
    first.token();
    assert!(last.waits());
    client.run_ok("LOCK.RELEASE key first");
    last.token();
}

/// The longest possible wait does not overflow into a short one.
#[test]
fn very_long_wait_does_not_overflow() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut waiter = Waiter::sending(&server, &format!("LOCK.ACQUIRE key waiter WAIT {}", 365_u64 * 24 * 3_600_000));
    assert!(!eventually(Duration::from_millis(50), || !waiter.waits()));
    client.run_ok("LOCK.RELEASE key holder");
    waiter.token();
}
