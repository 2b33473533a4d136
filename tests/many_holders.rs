//! Ten thousand holders of one lock: what a request costs the server is printed.

use std::thread;
use std::time::Duration;

use redis::Value;
use support::{Raw, Server, until};

use crate::speak::{Reply, SOON, Speak, arrives, processor_time};

const HOLDERS: usize = 10_000;
const REQUESTS: usize = 1_000;
/// There is room for that many more.
const LIMIT: usize = HOLDERS + REQUESTS;

#[test]
fn ten_thousand_holders_of_one_lock() {
    let mut server = Server::builder().arg("appendonly", "yes").start();
    let mut connection = server.raw();
    fill(&mut connection);
    println!("with {HOLDERS} holders on one key:");
    costs(&mut connection);
    expiries(&server, &mut connection);

    server.restart();
    let mut connection = server.raw();
    let first =
        time_of(&mut connection, "lock.acquire", &[format!("LOCK.ACQUIRE key first LEASE 600000 LIMIT {LIMIT}")]);
    println!("the first grant after a restart: {first} µs");
    assert_eq!(connection.say("LOCK.RELEASE key first"), Value::Int(0));
    assert_eq!(count(&mut connection), HOLDERS);
    costs(&mut connection);
    assert_eq!(connection.say("LOCK.FORCE key"), Value::Int(HOLDERS as i64));
}

fn fill(connection: &mut Raw) {
    // Deadlines in no order: the next to end is never the next in the hash.
    let lease = |index: usize| 600_000 + (index * 7919) % HOLDERS;
    let lines: Vec<String> = (0..HOLDERS)
        .map(|index| format!("LOCK.ACQUIRE key holder:{index} LEASE {} LIMIT {LIMIT}", lease(index)))
        .collect();
    for reply in connection.say_all(&lines) {
        reply.token();
    }
    assert_eq!(count(connection), HOLDERS);
}

/// Holders, by what lies in the keyspace: two fields each, and two of the lock.
fn count(connection: &mut Raw) -> usize {
    (connection.say("HLEN key").int() as usize - 2) / 2
}

fn costs(connection: &mut Raw) {
    let lines = |form: &dyn Fn(usize) -> String| (0..REQUESTS).map(form).collect::<Vec<String>>();
    let refuse = lines(&|index| format!("LOCK.ACQUIRE key more:{index} LEASE 600000 LIMIT {HOLDERS}"));
    let grant = lines(&|index| format!("LOCK.ACQUIRE key more:{index} LEASE 600000 LIMIT {LIMIT}"));
    let renew = lines(&|index| format!("LOCK.RENEW key more:{index} LEASE 610000"));
    let release = lines(&|index| format!("LOCK.RELEASE key more:{index}"));
    println!("  a refusal: {} µs", time_of(connection, "lock.acquire", &refuse));
    assert_eq!(count(connection), HOLDERS);
    println!("  a grant: {} µs", time_of(connection, "lock.acquire", &grant));
    assert_eq!(count(connection), HOLDERS + REQUESTS);
    println!("  a renewal: {} µs", time_of(connection, "lock.renew", &renew));
    println!("  a release: {} µs", time_of(connection, "lock.release", &release));
    assert_eq!(count(connection), HOLDERS);
}

/// The server's own account of what these took each, in µs.
fn time_of(connection: &mut Raw, command: &str, lines: &[String]) -> String {
    connection.say("CONFIG RESETSTAT");
    for (line, reply) in lines.iter().zip(connection.say_all(lines)) {
        assert!(!matches!(reply, Value::ServerError(_)), "{line}: {reply:?}");
    }
    let stats = connection.say("INFO commandstats").text();
    let name = format!("cmdstat_{command}:");
    let line = stats.lines().find(|line| line.to_ascii_lowercase().starts_with(&name)).expect("it was counted");
    assert!(line.contains(&format!("calls={},", lines.len())), "{line}");
    line.split("usec_per_call=").nth(1).and_then(|rest| rest.split(',').next()).expect("a time").to_owned()
}

/// Holders whose leases end one by one, while somebody waits for each place and while nobody does.
fn expiries(server: &Server, connection: &mut Raw) {
    let ask = |owner: &str, lease: usize| format!("LOCK.ACQUIRE key {owner} LEASE {lease} LIMIT {LIMIT}");
    let brief: Vec<String> = (0..REQUESTS).map(|index| ask(&format!("brief:{index}"), 2000 + index / 2)).collect();
    for reply in connection.say_all(&brief) {
        reply.token();
    }
    let mut waiters: Vec<Raw> = (0..REQUESTS).map(|_| server.raw()).collect();
    for (index, waiter) in waiters.iter_mut().enumerate() {
        assert_eq!(waiter.begin(&format!("{} WAIT 0", ask(&format!("next:{index}"), 600_000))), None);
    }
    let idle = time_in(server, || thread::sleep(Duration::from_millis(500)));
    let spent = time_in(server, || {
        for waiter in &mut waiters {
            arrives(waiter).token();
        }
    });
    let each = spent.saturating_sub(idle) / REQUESTS as u32;
    println!("  an expiry and the grant to the one who waits, all that the server does: {each:?}");
    let release: Vec<String> = (0..REQUESTS).map(|index| format!("LOCK.RELEASE key next:{index}")).collect();
    assert!(connection.say_all(&release).iter().all(|left| *left == Value::Int(0)));
    assert_eq!(count(connection), HOLDERS, "of those who expired nothing is left");

    let brief: Vec<String> = (0..REQUESTS).map(|index| ask(&format!("brief:{index}"), 300)).collect();
    for reply in connection.say_all(&brief) {
        reply.token();
    }
    let last = format!("LOCK.RELEASE key brief:{} HOLDS 1", REQUESTS - 1);
    until(SOON, "the brief leases are over", || connection.say(&last).is_null());
    let grant = time_of(connection, "lock.acquire", &[ask("after", 600_000)]);
    println!("  a grant that finds up to {REQUESTS} expired: {grant} µs");
    assert_eq!(connection.say("LOCK.RELEASE key after"), Value::Int(0));
    until(SOON, "of those who expired nothing is left", || count(connection) == HOLDERS);
}

/// The processor time that the server spends meanwhile.
fn time_in(server: &Server, work: impl FnOnce()) -> Duration {
    let before = processor_time(server);
    work();
    processor_time(server).saturating_sub(before)
}
