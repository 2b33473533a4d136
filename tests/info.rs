//! The counters of `INFO holdfast`.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::Value;
use support::{Raw, Server, until};

use crate::common::{array, ask, ask_int, ask_token, int, map, text};
use crate::lines::{Commands, Reply, Watched, encode};

const SOON: Duration = Duration::from_secs(30);

type Section = BTreeMap<String, i64>;

/// The fields of the section, by name.
#[track_caller]
fn section(raw: &mut Raw) -> Section {
    let lines = text(&ask(raw, "INFO holdfast"));
    let fields = lines.lines().filter_map(|line| line.strip_prefix("holdfast_")?.split_once(':'));
    let numbers = fields.filter(|(name, _)| !name.ends_with("_buckets") && *name != "version");
    numbers.map(|(name, value)| (name.to_owned(), value.trim().parse().expect("a number"))).collect()
}

/// The fields that changed, and by how much.
fn changes(before: &Section, after: &Section) -> BTreeMap<String, i64> {
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    let changes = after.iter().map(|(name, value)| (name.clone(), value - before[name]));
    changes.filter(|(name, change)| *change != 0 && !name.contains("_usec_") && !name.ends_with("_msec")).collect()
}

/// Requests, and the counters that each increments.
const COUNTED: [(&str, &[(&str, i64)]); 22] = [
    ("LOCK.ACQUIRE k me LEASE 100000", &[("grants_at_once", 1)]),
    ("LOCK.ACQUIRE k me", &[("grants_at_once", 1)]),
    ("LOCK.ACQUIRE k you", &[("refusals", 1)]),
    ("LOCK.ACQUIRE k you WAIT 1", &[("deadlock_searches", 1), ("timeouts", 1)]),
    ("LOCK.MACQUIRE 2 k l you WAIT 1", &[("deadlock_searches", 1), ("timeouts", 1)]),
    ("LOCK.RENEW k me", &[("renewals", 1)]),
    ("LOCK.RENEW k you", &[("renewals_lost", 1)]),
    ("LOCK.RENEW k me TOKEN 1", &[("renewals_lost", 1)]),
    ("LOCK.RELEASE k me", &[("releases", 1)]),
    ("LOCK.RELEASE k you", &[]),
    ("LOCK.RELEASE k me TOKEN 1", &[]),
    ("LOCK.RELEASE k me", &[("releases", 1)]),
    ("LOCK.RELEASE k me", &[]),
    ("LOCK.FORCE k", &[]),
    ("LOCK.ACQUIRE k me SHARED", &[("grants_at_once", 1)]),
    ("LOCK.ACQUIRE k you SHARED", &[("grants_at_once", 1)]),
    ("LOCK.FORCE k", &[("forced", 2)]),
    ("LOCK.ACQUIRE k me LEASE 0", &[]),
    ("LOCK.INFO k", &[]),
    ("LOCK.SESSION", &[("sessions", 1)]),
    ("LOCK.TOP", &[]),
    ("LOCK.HELP", &[]),
];

#[test]
fn each_request_increments_only_its_counter() {
    let server = Server::start();
    let mut raw = server.raw();
    for (line, expected) in COUNTED {
        let before = section(&mut raw);
        ask(&mut raw, line);
        let expected = expected.iter().map(|(name, by)| (name.to_string(), *by)).collect();
        assert_eq!(changes(&before, &section(&mut raw)), expected, "{line}");
    }
}

#[test]
fn gauges_follow_current_state() {
    let server = Server::start();
    let mut raw = server.raw();
    let now = |raw: &mut Raw| ["waiters", "contended_locks", "bound_holds"].map(|name| section(raw)[name]);
    assert_eq!(now(&mut raw), [0, 0, 0]);
    ask_token(&mut raw, "LOCK.ACQUIRE a me EPHEMERAL");
    ask_token(&mut raw, "LOCK.ACQUIRE b me EPHEMERAL");
    assert_eq!(now(&mut raw), [0, 0, 2]);
    let before = section(&mut raw);
    let mut waiting: Vec<Raw> = ["a", "a", "b"].iter().map(|key| waiter(&server, key)).collect();
    until(SOON, "three requests wait for two locks", || now(&mut raw) == [3, 2, 2]);
    assert_eq!(ask_int(&mut raw, "LOCK.RELEASE b me"), 1);
    assert!(matches!(waiting[2].read(), Ok(Value::Int(1..))));
    assert_eq!(now(&mut raw), [2, 1, 1]);
    let change = changes(&before, &section(&mut raw));
    assert_eq!((change["grants_queued"], change["releases"]), (1, 1));
    waiting.clear();
    until(SOON, "no request waits", || now(&mut raw) == [0, 0, 1]);
    assert_eq!(ask_int(&mut raw, "LOCK.FORCE a"), 1);
    assert_eq!(now(&mut raw), [0, 0, 0]);
}

fn waiter(server: &Server, key: &str) -> Raw {
    let mut raw = server.raw();
    let owner = raw.local_addr().to_string();
    raw.send(&[b"LOCK.ACQUIRE", key.as_bytes(), owner.as_bytes(), b"WAIT", b"0"]).expect("sent");
    raw
}

#[test]
fn ended_leases_and_connections_are_counted() {
    let server = Server::start();
    let mut raw = server.raw();
    let before = section(&mut raw);
    ask_token(&mut raw, "LOCK.ACQUIRE short me LEASE 500");
    let mut next = waiter(&server, "short");
    assert!(matches!(next.read(), Ok(Value::Int(1..))));
    until(SOON, "the expiry is counted", || section(&mut raw)["expired"] == before["expired"] + 1);
    ask_token(&mut raw, "LOCK.ACQUIRE shared me SHARED LEASE 500");
    ask_token(&mut raw, "LOCK.ACQUIRE shared you SHARED");
    until(SOON, "the lease has expired", || section(&mut raw)["expired"] == before["expired"] + 2);
    let mut gone = server.raw();
    ask_token(&mut gone, "LOCK.ACQUIRE bound me EPHEMERAL");
    gone.reset();
    let ended = |raw: &mut Raw| section(raw)["released_by_disconnect"];
    until(SOON, "the hold ended with its connection", || ended(&mut raw) == before["released_by_disconnect"] + 1);
    let mut watched = Watched::over(server.raw(), &server);
    watched.run("LOCK.ACQUIRE watched me LEASE 3000 WATCHDOG").token();
    until(SOON, "the watchdog renews", || section(&mut raw)["watchdog_renewals"] >= before["watchdog_renewals"] + 2);
}

#[test]
fn waits_and_hand_offs_are_timed() {
    let server = Server::start();
    let mut raw = server.raw();
    ask_token(&mut raw, "LOCK.ACQUIRE k me");
    let mut next = waiter(&server, "k");
    until(SOON, "the request waits", || section(&mut raw)["waiters"] == 1);
    let begin = std::time::Instant::now();
    until(SOON, "20 ms have passed", || begin.elapsed().as_millis() >= 20);
    assert_eq!(ask_int(&mut raw, "LOCK.RELEASE k me"), 1);
    assert!(matches!(next.read(), Ok(Value::Int(1..))));
    let after = section(&mut raw);
    for name in ["wait", "handoff"] {
        let [p50, p99, p999, max] =
            ["p50", "p99", "p999", "max"].map(|quantile| after[&format!("{name}_usec_{quantile}")]);
        assert!(p50 <= p99 && p99 <= p999 && p999 <= max && max > 0, "{name}: {p50} {p99} {p999} {max}");
    }
    for name in ["wait", "handoff"] {
        assert_eq!(after[&format!("{name}_usec_count")], 1);
        assert!(after[&format!("{name}_usec_sum")] > 0);
        let buckets = buckets(&mut raw, name);
        assert!(buckets.is_sorted() && buckets.first() == Some(&(10, 0)), "{buckets:?}");
        assert_eq!(buckets.last(), Some(&(1_000_000_000, 1)));
    }
    let within = |limit| buckets(&mut raw, "wait").into_iter().find(|(bound, _)| *bound == limit).expect("a bound").1;
    let [short, long] = [10_000, 100_000_000].map(within);
    assert_eq!((short, long), (0, 1));
    // To two digits, the histogram's precision.
    assert!(after["wait_usec_p50"] >= 19_000, "{after:?}");
}

#[test]
fn version_is_shown_as_text_and_as_number() {
    let server = Server::start();
    let mut raw = server.raw();
    let info = text(&ask(&mut raw, "INFO holdfast"));
    let version = info.lines().find_map(|line| line.strip_prefix("holdfast_version:")).expect("the field");
    assert_eq!(version, env!("CARGO_PKG_VERSION"));
    // MODULE LIST returns it as one integer, with two digits for each part.
    let digits: Vec<String> = version.split('.').map(|part| format!("{part:0>2}")).collect();
    let modules = ask(&mut raw, "MODULE LIST");
    let ours = array(&modules)
        .iter()
        .map(map)
        .find(|module| text(&module[&b"name"[..]]) == "holdfast")
        .expect("the module is listed");
    assert_eq!(int(&ours[&b"ver"[..]]), digits.concat().parse::<i64>().expect("a number"));
}

/// The cumulative counts of a histogram by their upper bounds.
fn buckets(raw: &mut Raw, name: &str) -> Vec<(i64, i64)> {
    let info = text(&ask(raw, "INFO holdfast"));
    let prefix = format!("holdfast_{name}_usec_buckets:");
    let line = info.lines().find_map(|line| line.strip_prefix(&prefix)).expect("the field is there");
    let number = |text: &str| text.parse().expect("a number");
    line.trim().split(',').filter_map(|it| it.split_once('=')).map(|(at, count)| (number(at), number(count))).collect()
}

/// The time ends when the session has read the event.
#[test]
fn hand_off_to_session_is_timed() {
    let server = Server::start();
    let [mut raw, mut session] = [server.raw(), server.raw()];
    let id = ask(&mut session, "LOCK.SESSION").field("id").text();
    ask_token(&mut raw, "LOCK.ACQUIRE k me");
    assert_eq!(
        ask(&mut raw, &format!("LOCK.ACQUIRE k you WAIT 0 SESSION {id}")),
        Value::SimpleString("WAITING".into())
    );
    assert_eq!(ask_int(&mut raw, "LOCK.RELEASE k me"), 1);
    assert_eq!(section(&mut raw)["handoff_usec_count"], 0, "the event has not been read");
    let begin = std::time::Instant::now();
    until(SOON, "20 ms have passed", || begin.elapsed().as_millis() >= 20);
    assert!(matches!(ask(&mut session, "LOCK.EVENTS"), Value::Array(_)));
    let after = section(&mut raw);
    assert_eq!((after["handoff_usec_count"], after["wait_usec_count"]), (1, 1));
    assert!(after["handoff_usec_max"] >= 19_000, "{after:?}");
}

#[test]
fn longest_wait_is_that_of_first_waiter() {
    let server = Server::start();
    let mut raw = server.raw();
    assert_eq!(section(&mut raw)["oldest_wait_msec"], 0);
    ask_token(&mut raw, "LOCK.ACQUIRE a me");
    ask_token(&mut raw, "LOCK.ACQUIRE b me");
    let mut first = waiter(&server, "a");
    until(SOON, "the oldest wait is 50 ms", || section(&mut raw)["oldest_wait_msec"] >= 50);
    let _second = waiter(&server, "b");
    until(SOON, "two requests wait", || section(&mut raw)["waiters"] == 2);
    assert!(section(&mut raw)["oldest_wait_msec"] >= 50);
    ask_int(&mut raw, "LOCK.RELEASE a me");
    assert!(matches!(first.read(), Ok(Value::Int(1..))));
    assert_eq!(section(&mut raw)["waiters"], 1);
    assert_eq!(ask_int(&mut raw, "LOCK.FORCE b"), 1);
    until(SOON, "no request waits", || section(&mut raw)["oldest_wait_msec"] == 0);
}

#[test]
fn bound_holds_ended_by_other_commands_are_counted() {
    let server = Server::start();
    let mut raw = server.raw();
    for (number, command) in ["DEL k", "SET k v", "HDEL k me"].into_iter().enumerate() {
        ask(&mut raw, "DEL k");
        ask_token(&mut raw, "LOCK.ACQUIRE k me EPHEMERAL");
        ask(&mut raw, command);
        until(SOON, command, || section(&mut raw)["changed"] == number as i64 + 1);
    }
    ask(&mut raw, "DEL k");
    ask_token(&mut raw, "LOCK.ACQUIRE k me EPHEMERAL");
    assert_eq!(ask_int(&mut raw, "LOCK.RELEASE k me"), 1);
    assert_eq!(section(&mut raw)["changed"], 3);
}

#[test]
fn info_section_is_returned_by_name_and_with_all() {
    let server = Server::start();
    let mut raw = server.raw();
    assert!(section(&mut raw).len() > 15);
    for line in ["INFO everything", "INFO modules"] {
        assert!(text(&ask(&mut raw, line)).contains("holdfast_grants_at_once:"), "{line}");
    }
}

/// An expired key ends the holds of all its holders.
#[test]
fn all_holds_that_end_with_key_are_counted() {
    let server = Server::start();
    let mut raw = server.raw();
    for owner in ["a", "b", "c"] {
        ask_token(&mut raw, &format!("LOCK.ACQUIRE k {owner} SHARED LEASE 300"));
    }
    let before = section(&mut raw);
    // The server finds the key expired before the module reads it.
    raw.send_bytes(&["DEBUG SLEEP 0.5", "EXISTS k"].map(encode).concat()).expect("sent");
    assert_eq!((raw.read().expect("a reply"), raw.read().expect("a reply")), (Value::Okay, Value::Int(0)));
    until(SOON, "the expiries are counted", || section(&mut raw)["expired"] > before["expired"]);
    assert_eq!(section(&mut raw)["expired"] - before["expired"], 3);
}
