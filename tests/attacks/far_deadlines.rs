//! Deadlines so far away that the server's timers cannot count to them.

use std::thread;

use redis::Value;
use support::{Server, until};

use crate::common::info_number;
use crate::speak::{Reply, SOON, Speak, Watched, arrives, now};

/// Deadlines whose distance in microseconds does not fit into 64 bits. What is left of it there is a time span of thirty
/// years into the past: by the time of day that was in 1995, but a clock that counts from the machine's start never
/// shows it. A server that reckons with both would not call any module's timer again.
fn far() -> [i64; 3] {
    const PAST: u128 = 1_000_000_000_000_000;
    let at = |rounds: u128| i64::try_from(((rounds << 64) - PAST) / 1000).expect("a deadline") + now();
    [at(1), at(250), at(499)]
}

#[test]
fn very_late_deadline_delays_no_other_timer() {
    // Each of them waits most of the time.
    thread::scope(|scope| {
        for far in far() {
            scope.spawn(move || holds_up_nobody(far));
        }
    });
}

fn holds_up_nobody(far: i64) {
    let server = Server::start();
    let (mut holder, mut waiter, third) = (server.raw(), server.raw(), server.raw());
    let mut third = Watched::over(third, &server);
    let token = holder.say("LOCK.ACQUIRE key holder").token();
    holder.say(&format!("HSET forged me 1 #fence {token}"));
    assert_eq!(holder.say(&format!("PEXPIREAT forged {far}")), Value::Int(1));
    assert_eq!(waiter.begin("LOCK.ACQUIRE forged waiter WAIT 0"), None);
    // Work for this turn of the event loop, while nothing else is to be done at any time but that deadline.
    holder.say("FLUSHDB ASYNC");
    arrives(&mut waiter).token();
    third.post("LOCK.ACQUIRE forged third WAIT 50");
    assert!(arrives(&mut third).is_null(), "a wait beside a deadline at {far}");
    third.say("LOCK.ACQUIRE watched third LEASE 6000 WATCHDOG").token();
    until(SOON, "the lease is renewed", || info_number(&server, "holdfast", "holdfast_watchdog_renewals") >= 1);
    third.reset();
    until(SOON, "and ends with its connection", || holder.say("EXISTS watched") == Value::Int(0));
}
