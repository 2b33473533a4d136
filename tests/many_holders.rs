//! One lock with many holders: the maximum, and every request with ten thousand. The benchmarks measure the cost.

use redis::Value;
use support::{Raw, Server, until};

use crate::common::Contents;
use crate::lines::{Commands, Reply, SOON, arrives, holders, now};

const HOLDERS: usize = 10_000;
const REQUESTS: usize = 1_000;
/// The limit of the lock: it leaves room for the tests' own requests.
const LIMIT: usize = HOLDERS + REQUESTS;

#[test]
fn one_lock_can_have_ten_thousand_holders() {
    let most = (LIMIT + 1).to_string();
    let mut server = Server::builder().arg("appendonly", "yes").arg("holdfast.max-holders", &most).start();
    let mut connection = server.raw();
    fill(&mut connection);
    every_request(&mut connection);
    expiries(&server, &mut connection);

    server.restart();
    let mut connection = server.raw();
    connection.run(&format!("LOCK.ACQUIRE key first LEASE 600000 LIMIT {LIMIT}")).token();
    assert_eq!(connection.run("LOCK.RELEASE key first"), Value::Int(1));
    assert_eq!(count(&mut connection), HOLDERS);
    every_request(&mut connection);
    assert_eq!(connection.run("LOCK.FORCE key"), Value::Int(HOLDERS as i64));
}

fn fill(connection: &mut Raw) {
    // Deadlines in random order: the next to expire is not the next in the hash.
    let lease = |index: usize| 600_000 + (index * 7919) % HOLDERS;
    let lines: Vec<String> = (0..HOLDERS)
        .map(|index| format!("LOCK.ACQUIRE key holder:{index} LEASE {} LIMIT {LIMIT}", lease(index)))
        .collect();
    for reply in connection.run_all(&lines) {
        reply.token();
    }
    assert_eq!(count(connection), HOLDERS);
}

/// The number of holders, from the number of fields: each holder has two, and the lock two more.
fn count(connection: &mut Raw) -> usize {
    (connection.run("HLEN key").int() as usize - 2) / 2
}

fn every_request(connection: &mut Raw) {
    let mut say_all = |form: &str| {
        let lines: Vec<String> = (0..REQUESTS).map(|index| form.replace('#', &index.to_string())).collect();
        (connection.run_all(&lines), count(connection))
    };
    let (refused, held) = say_all(&format!("LOCK.ACQUIRE key more:# LEASE 600000 LIMIT {HOLDERS}"));
    assert!(refused.iter().all(Reply::is_null) && held == HOLDERS);
    let (granted, held) = say_all(&format!("LOCK.ACQUIRE key more:# LEASE 600000 LIMIT {LIMIT}"));
    assert!(granted.iter().all(|token| token.token() > 0) && held == HOLDERS + REQUESTS);
    let (renewed, _) = say_all("LOCK.RENEW key more:# LEASE 610000");
    assert_eq!(renewed, granted);
    let (released, held) = say_all("LOCK.RELEASE key more:#");
    assert!(released.iter().all(|left| matches!(left, Value::Int(_))) && held == HOLDERS);
}

/// Leases expire one by one, with a request waiting for each place, and without.
fn expiries(server: &Server, connection: &mut Raw) {
    let ask = |owner: &str, lease: usize| format!("LOCK.ACQUIRE key {owner} LEASE {lease} LIMIT {LIMIT}");
    let brief: Vec<String> = (0..REQUESTS).map(|index| ask(&format!("brief:{index}"), 600_000)).collect();
    for reply in connection.run_all(&brief) {
        reply.token();
    }
    let mut waiters: Vec<Raw> = (0..REQUESTS).map(|_| server.raw()).collect();
    for (index, waiter) in waiters.iter_mut().enumerate() {
        assert_eq!(waiter.begin(&format!("{} WAIT 0", ask(&format!("next:{index}"), 600_000))), None);
    }
    // Not before all requests wait.
    let end = |index: usize| format!("LOCK.RENEW key brief:{index} LEASE {}", 1000 + index / 2);
    assert!(connection.run_all(&(0..REQUESTS).map(end).collect::<Vec<_>>()).iter().all(|reply| !reply.is_null()));
    for waiter in &mut waiters {
        arrives(waiter).token();
    }
    let release: Vec<String> = (0..REQUESTS).map(|index| format!("LOCK.RELEASE key next:{index}")).collect();
    assert!(connection.run_all(&release).iter().all(|left| *left == Value::Int(1)));
    assert_eq!(count(connection), HOLDERS, "no field of expired holders is left");

    let brief: Vec<String> = (0..REQUESTS).map(|index| ask(&format!("brief:{index}"), 300)).collect();
    for reply in connection.run_all(&brief) {
        reply.token();
    }
    let last = format!("LOCK.RELEASE key brief:{} HOLDS 1", REQUESTS - 1);
    until(SOON, "the brief leases have expired", || connection.run(&last).is_null());
    connection.run(&ask("after", 600_000)).token();
    assert_eq!(connection.run("LOCK.RELEASE key after"), Value::Int(1));
    until(SOON, "no field of expired holders is left", || count(connection) == HOLDERS);
}

/// A server with `max-holders` 5.
fn with_five_holders() -> Server {
    Server::builder().arg("holdfast.max-holders", "5").start()
}

#[track_caller]
fn assert_too_many_holders(reply: &Value) {
    let error = reply.error();
    assert!(error.starts_with("ERR ") && error.contains("holdfast.max-holders is 5"), "{error}");
}

#[test]
fn max_holders_bounds_holders() {
    let server = with_five_holders();
    let mut connection = server.raw();
    for limit in ["SHARED", "LIMIT 9"] {
        for index in 0..5 {
            connection.run(&format!("LOCK.ACQUIRE key owner:{index} {limit}")).token();
        }
        let before = Contents::read(&mut connection);
        for rest in ["", "WAIT 1000", "HOLDS 2 LEASE 5", "EPHEMERAL"] {
            assert_too_many_holders(&connection.run(&format!("LOCK.ACQUIRE key late {limit} {rest}")));
        }
        assert_eq!(Contents::read(&mut connection), before);
        assert!(connection.run("LOCK.ACQUIRE key late LIMIT 5").is_null(), "its own limit goes first");
        connection.run(&format!("LOCK.ACQUIRE key owner:0 {limit}")).token();
        connection.run("LOCK.RENEW key owner:1").token();
        assert_eq!(connection.run("LOCK.RELEASE key owner:2"), Value::Int(1));
        connection.run(&format!("LOCK.ACQUIRE key late {limit}")).token();
        assert_too_many_holders(&connection.run(&format!("LOCK.ACQUIRE key owner:2 {limit}")));
        assert_eq!(connection.run("LOCK.FORCE key"), Value::Int(5));
    }
}

#[test]
fn raised_max_holders_counts_at_once_and_lowered_ends_no_hold() {
    let server = with_five_holders();
    let mut connection = server.raw();
    for index in 0..5 {
        connection.run(&format!("LOCK.ACQUIRE key owner:{index} SHARED")).token();
    }
    connection.run("CONFIG SET holdfast.max-holders 7");
    connection.run("LOCK.ACQUIRE key owner:5 SHARED").token();
    connection.run("CONFIG SET holdfast.max-holders 2");
    assert!(connection.run("LOCK.ACQUIRE key late SHARED").error().contains("holdfast.max-holders is 2"));
    assert_eq!(holders(&mut connection, "key").len(), 6);
    for index in 0..5 {
        connection.run(&format!("LOCK.RENEW key owner:{index}")).token();
        assert_eq!(connection.run(&format!("LOCK.RELEASE key owner:{index}")), Value::Int(1));
    }
    connection.run("LOCK.ACQUIRE key late SHARED").token();
}

#[test]
fn waiter_beyond_max_holders_is_refused() {
    let server = with_five_holders();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE key writer").token();
    let mut readers: Vec<Raw> = (0..8).map(|_| server.raw()).collect();
    for (index, reader) in readers.iter_mut().enumerate() {
        assert_eq!(reader.begin(&format!("LOCK.ACQUIRE key reader:{index} SHARED WAIT 0")), None);
    }
    assert_eq!(connection.run("LOCK.RELEASE key writer"), Value::Int(1));
    for (index, reader) in readers.iter_mut().enumerate() {
        match arrives(reader) {
            reply if index < 5 => drop(reply.token()),
            reply => assert_too_many_holders(&reply),
        }
    }
    assert_eq!(holders(&mut connection, "key").len(), 5);
}

/// A lock with that many holders, written without the module.
fn write_holders(connection: &mut Raw, holders: usize) {
    let end = now() + 600_000;
    connection.run("DEL key");
    for first in (0..holders).step_by(1000) {
        let fields: Vec<String> = (first..holders.min(first + 1000))
            .map(|index| {
                format!("holder:{index} 1 #@holder:{index} {}:{}", end + (index * 7919 % holders) as i64, index + 1)
            })
            .collect();
        connection.run(&format!("HSET key #limit 0 {}", fields.join(" ")));
    }
    connection.run("PEXPIRE key 700000");
}

#[test]
fn hash_with_more_than_max_holders_is_no_lock() {
    let server = with_five_holders();
    let mut connection = server.raw();
    write_holders(&mut connection, 600);
    let before = Contents::read(&mut connection);
    for line in ["LOCK.INFO key", "LOCK.ACQUIRE key me SHARED", "LOCK.RELEASE key holder:1", "LOCK.FORCE key"] {
        let error = connection.run(line).error();
        assert!(error.starts_with("WRONGTYPE"), "{line}: {error}");
    }
    assert_eq!(Contents::read(&mut connection), before);
    connection.run("CONFIG SET holdfast.max-holders 2000");
    assert_eq!(holders(&mut connection, "key").len(), 600);
    assert_eq!(connection.run("LOCK.RELEASE key holder:1"), Value::Int(1));
}
