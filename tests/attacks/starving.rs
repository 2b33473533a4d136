//! One kind of work without an end does not delay the others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use redis::Value;
use support::{Over, Raw, Server, until};

use crate::common::info_number;
use crate::lines::{Commands, Reply, SOON, Watched, arrives, owners};

/// One holder less than the maximum.
const HOLDERS: usize = 2499;

/// A server that never completes its renewals, because too many are due every millisecond. The leases can't expire,
/// because the keys have no expiry.
fn always_renewing() -> (Server, Watched) {
    let server = Server::start();
    let mut holder = Watched::over(server.raw(), &server);
    holder.run("LOCK.ACQUIRE crowd first SHARED LEASE 600000").token();
    assert_eq!(holder.run("PERSIST crowd"), Value::Int(1));
    let lines: Vec<String> =
        (0..HOLDERS).map(|holder| format!("LOCK.ACQUIRE crowd holder:{holder} SHARED LEASE 1 WATCHDOG")).collect();
    for reply in holder.run_all(&lines) {
        reply.token();
    }
    assert_eq!(holder.run("LOCK.INFO crowd").field("holder_count"), Value::Int(HOLDERS as i64 + 1));
    (server, holder)
}

#[test]
fn endless_renewals_delay_no_confirmation() {
    let (server, _holder) = always_renewing();
    let mut client = server.raw();
    client.run("CONFIG SET holdfast.replicas-timeout 50");
    client.send_line("LOCK.ACQUIRE key me LEASE 600000 REPLICAS 1");
    assert!(arrives(&mut client).error().starts_with("UNCONFIRMED"));
    until(SOON, "the grant is revoked", || client.run("EXISTS key") == Value::Int(0));
}

/// A request is granted two locks, of which one is released by a disconnect and the other one expires. Returns the connection
/// of the owner `third`, which held the latter.
#[track_caller]
fn grant_two_locks(server: &Server) -> Raw {
    let (mut gone, mut client, mut third) = (server.raw(), server.raw(), server.raw());
    gone.run("LOCK.ACQUIRE key gone LEASE 600000 EPHEMERAL").token();
    third.run("LOCK.ACQUIRE other third LEASE 300").token();
    assert_eq!(client.begin("LOCK.MACQUIRE 2 key other client LEASE 600000 WAIT 0"), None);
    gone.reset();
    arrives(&mut client).token();
    third
}

#[test]
fn endless_renewals_delay_no_waiter() {
    let (server, _holder) = always_renewing();
    let mut third = grant_two_locks(&server);
    assert_eq!(owners(&mut third, "other"), ["client"]);
    third.send_line("LOCK.ACQUIRE other third WAIT 50");
    assert!(arrives(&mut third).is_null());
}

/// Another client keeps writing locks with thousands of holders, one of them bound. Each event-loop iteration has to read at
/// least one of them again.
#[test]
fn endless_reading_of_large_locks_delays_no_waiter() {
    const CROWD: &str = "for holder = 1, 2400 do redis.call('hset', KEYS[1], 'holder:' .. holder, 1) end";
    const CROWDS: usize = 3;
    let server = Server::start();
    let (holder, mut writer) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    for crowd in 0..CROWDS {
        holder.run(&format!("LOCK.ACQUIRE crowd:{crowd} me SHARED LEASE 600000 WATCHDOG EPHEMERAL")).token();
        let crowd = format!("crowd:{crowd}");
        assert_eq!(writer.call(&[b"EVAL", CROWD.as_bytes(), b"1", crowd.as_bytes()]), Value::Nil);
    }
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let touches: Vec<String> = (0..CROWDS).map(|crowd| format!("HINCRBY crowd:{crowd} holder:1 1")).collect();
            while !over.load(Ordering::Relaxed) {
                writer.run_all(&touches);
            }
        });
        let _over = Over(&over);
        let mut third = grant_two_locks(&server);
        third.run("CONFIG SET holdfast.replicas-timeout 50");
        third.send_line("LOCK.ACQUIRE confirmed third LEASE 600000 REPLICAS 1");
        assert!(arrives(&mut third).error().starts_with("UNCONFIRMED"));
        until(SOON, "the grant is revoked", || third.run("EXISTS confirmed") == Value::Int(0));
        third.send_line("LOCK.ACQUIRE other third WAIT 50");
        assert!(arrives(&mut third).is_null());
    });
}

/// Other clients send many requests at once, so that every event-loop iteration is long.
#[test]
fn long_iterations_delay_no_waiter() {
    let server = Server::start();
    let (client, mut third) = (server.raw(), server.raw());
    let mut client = Watched::over(client, &server);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            let mut neighbour = server.raw();
            let over = &over;
            scope.spawn(move || {
                let fifty_milliseconds = vec!["DEBUG SLEEP 0.0001".to_owned(); 500];
                while !over.load(Ordering::Relaxed) {
                    neighbour.run_all(&fifty_milliseconds);
                }
            });
        }
        let _over = Over(&over);
        client.run("LOCK.ACQUIRE watched client LEASE 6000 WATCHDOG").token();
        third.run("LOCK.ACQUIRE key third LEASE 100").token();
        client.send_line("LOCK.ACQUIRE key client WAIT 0");
        arrives(&mut client).token();
        let renewals = || info_number(&server, "holdfast", "holdfast_watchdog_renewals");
        until(SOON, "the lease is renewed", || renewals() >= 1);
        assert_eq!(third.run("LOCK.RELEASE watched client"), Value::Int(1));
    });
}
