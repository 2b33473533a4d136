//! 50,000 watched locks, and a server that answers all the while.

use std::time::{Duration, Instant};

use redis::Value;
use support::{Raw, Server, until};

use crate::speak::{Reply, SOON, Speak, now, processor_time, until_gone};

const LOCKS: usize = 50_000;
const LEASE: i64 = 6_000;

#[test]
fn fifty_thousand_watched_locks_are_renewed_while_the_server_answers() {
    let server = Server::start();
    let (mut holder, mut viewer) = (server.raw(), server.raw());
    let (before, _) = longest_ping(&mut viewer, |elapsed| elapsed > Duration::from_secs(1));
    take(&mut holder, LEASE);
    // Past the first deadlines: what still stands has been renewed.
    let end = now() + LEASE + LEASE / 4;
    let (longest, pings) = longest_ping(&mut viewer, |_| now() > end);
    println!("longest of {pings} PINGs beside {LOCKS} watched locks: {longest:?}; before there were any: {before:?}");
    assert_eq!(viewer.say("DBSIZE"), Value::Int(LOCKS as i64), "a watched lock was lost");
    let lines: Vec<String> = (0..LOCKS).map(|index| format!("PEXPIRETIME key:{index}")).collect();
    let late = viewer.say_all(&lines).iter().filter(|at| at.int() <= end).count();
    assert_eq!(late, 0, "so many have a lease that is over");

    let id = holder.client_id();
    holder.reset();
    until_gone(&mut viewer, id);
    let ends = viewer.say_all(&lines);
    // Long enough for each to have come round once.
    let noticed = now();
    until(SOON, "half a lease has passed", || now() > noticed + LEASE / 2);
    let later = viewer.say_all(&lines);
    assert!(later.iter().zip(&ends).all(|(later, end)| later.int() == -2 || later == end), "renewed with nobody there");
}

#[test]
fn the_processor_time_of_watched_locks_that_are_not_due_is_printed() {
    let server = Server::start();
    let mut holder = server.raw();
    let idle = time_of_two_seconds(&server);
    take(&mut holder, 3_600_000);
    let watching = time_of_two_seconds(&server);
    println!("processor time in 2 s: {watching:?} with {LOCKS} watched locks, none due; {idle:?} with none");
    assert_eq!(holder.say("DBSIZE"), Value::Int(LOCKS as i64));
}

fn take(holder: &mut Raw, lease: i64) {
    let lines: Vec<String> =
        (0..LOCKS).map(|index| format!("LOCK.ACQUIRE key:{index} owner LEASE {lease} WATCHDOG")).collect();
    for reply in holder.say_all(&lines) {
        reply.token();
    }
}

/// The longest of all `PING`s sent until `enough`, and how many there were.
fn longest_ping(connection: &mut Raw, enough: impl Fn(Duration) -> bool) -> (Duration, usize) {
    let begin = Instant::now();
    let (mut longest, mut count) = (Duration::ZERO, 0);
    while !enough(begin.elapsed()) {
        let sent = Instant::now();
        connection.say("PING");
        longest = longest.max(sent.elapsed());
        count += 1;
        // As a client that is not alone: the processor belongs to the server, and to the tests beside.
        std::thread::sleep(Duration::from_micros(200));
    }
    (longest, count)
}

fn time_of_two_seconds(server: &Server) -> Duration {
    let before = processor_time(server);
    std::thread::sleep(Duration::from_secs(2));
    processor_time(server) - before
}
