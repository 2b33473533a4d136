//! Deadlines so far in the future that the server's timers overflow.

use std::thread;

use redis::Value;
use support::{Server, until};

use crate::common::info_number;
use crate::lines::{Commands, Reply, SOON, Watched, arrives, now};

/// Deadlines whose distance in microseconds overflows 64 bits. What remains is a time thirty years in the past: 1995 by the
/// time of day, but before the start of a clock that counts from the machine's boot. A server that combines both clocks
/// would never call a module's timer again.
fn far() -> [i64; 3] {
    const PAST: u128 = 1_000_000_000_000_000;
    let at = |rounds: u128| i64::try_from(((rounds << 64) - PAST) / 1000).expect("a deadline") + now();
    [at(1), at(250), at(499)]
}

#[test]
fn very_late_deadline_delays_no_other_timer() {
    // Each request waits most of the time.
    thread::scope(|scope| {
        for far in far() {
            scope.spawn(move || assert_no_delay(far));
        }
    });
}

fn assert_no_delay(far: i64) {
    let server = Server::start();
    let (mut holder, mut waiter, third) = (server.raw(), server.raw(), server.raw());
    let mut third = Watched::over(third, &server);
    let token = holder.run("LOCK.ACQUIRE key holder").token();
    holder.run(&format!("HSET forged me 1 #fence {token}"));
    assert_eq!(holder.run(&format!("PEXPIREAT forged {far}")), Value::Int(1));
    assert_eq!(waiter.begin("LOCK.ACQUIRE forged waiter WAIT 0"), None);
    // Work for this event-loop iteration, while that deadline is the only timer.
    holder.run("FLUSHDB ASYNC");
    arrives(&mut waiter).token();
    third.send_line("LOCK.ACQUIRE forged third WAIT 50");
    assert!(arrives(&mut third).is_null(), "a wait beside a deadline at {far}");
    third.run("LOCK.ACQUIRE watched third LEASE 6000 WATCHDOG").token();
    until(SOON, "the lease is renewed", || info_number(&server, "holdfast", "holdfast_watchdog_renewals") >= 1);
    third.reset();
    until(SOON, "the ephemeral hold ends with its connection", || holder.run("EXISTS watched") == Value::Int(0));
}
