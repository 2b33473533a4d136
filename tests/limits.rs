//! `LIMIT` and `SHARED`: mutexes, read-write locks and semaphores follow one rule with one number.

use std::collections::BTreeMap;

use redis::Value;
use support::{Raw, Server, module_path, until};

use crate::common::Bytes;
use crate::lines::{Commands, Reply, SOON, Watched, arrives, deadline, fields, holders, now, owners, waiters};

/// The options for a limit, and the number that the lock stores.
const LIMITS: [(&str, i64); 3] = [("LIMIT 1", 1), ("LIMIT 5", 5), ("SHARED", 0)];

/// How many ms after a deadline the token was generated.
fn lateness(token: i64, deadline: i64) -> f64 {
    (token - deadline * 1000) as f64 / 1000.0
}

#[test]
fn invalid_limits_are_refused_and_change_nothing() {
    let server = Server::start();
    let mut connection = server.raw();
    let wrong = [
        "LIMIT 0",
        "LIMIT -1",
        "LIMIT many",
        "LIMIT 1.5",
        "LIMIT 1e3",
        "LIMIT +2",
        "LIMIT 2147483648",
        "LIMIT 4294967297",
        "LIMIT 18446744073709551617",
        "LIMIT",
        "LIMIT SHARED",
        "LIMIT 2 SHARED",
        "SHARED LIMIT 2",
    ];
    for words in wrong {
        let error = connection.run(&format!("LOCK.ACQUIRE key owner {words}")).error();
        assert!(error.starts_with("ERR "), "{words}: {error}");
        assert!(error.contains("LIMIT") || error.contains("SHARED"), "{words}: {error}");
    }
    let empty = connection.call(&[b"LOCK.ACQUIRE", b"key", b"owner", b"LIMIT", b""]).error();
    assert!(empty.starts_with("ERR "), "{empty}");
    assert_eq!(connection.run("DBSIZE"), Value::Int(0));
    connection.run("LOCK.ACQUIRE key owner LIMIT 2147483647").token();
    assert_eq!(connection.run("HGET key #limit").text(), "2147483647");
}

#[test]
fn default_limit_is_one() {
    let server = Server::start();
    let mut connection = server.raw();
    let token = connection.run("LOCK.ACQUIRE key owner LIMIT 1").token();
    connection.run("LOCK.ACQUIRE key owner").token();
    let expected = [(b"#fence".to_vec(), token.to_string().into_bytes()), (b"owner".to_vec(), b"2".to_vec())];
    assert_eq!(fields(&mut connection, b"key").into_iter().collect::<Vec<_>>(), expected);
    assert!(connection.run("LOCK.ACQUIRE key other LIMIT 5").is_null());
    assert!(connection.run("LOCK.ACQUIRE key other SHARED").is_null());
}

#[test]
fn limit_bounds_number_of_holders() {
    let server = Server::start();
    let mut connection = server.raw();
    let mut last = 0;
    for index in 0..5 {
        let token = connection.run(&format!("LOCK.ACQUIRE key owner:{index} LIMIT 5")).token();
        assert!(token > last, "each holder has its own token");
        last = token;
    }
    assert!(connection.run("LOCK.ACQUIRE key late LIMIT 5").is_null());
    assert!(connection.run("LOCK.ACQUIRE key late SHARED").is_null());
    assert!(connection.run("LOCK.ACQUIRE key late LIMIT 6").is_null());
    assert_eq!(connection.run("LOCK.RELEASE key owner:2"), Value::Int(1));
    connection.run("LOCK.ACQUIRE key late LIMIT 6").token();
    assert_eq!(owners(&mut connection, "key"), ["late", "owner:0", "owner:1", "owner:3", "owner:4"]);
}

#[test]
fn smallest_limit_counts_until_lock_is_free() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE key one SHARED").token();
    connection.run("LOCK.ACQUIRE key two SHARED").token();
    connection.run("LOCK.ACQUIRE key three LIMIT 3").token();
    assert_eq!(connection.run("HGET key #limit").text(), "3");
    assert!(connection.run("LOCK.ACQUIRE key four SHARED").is_null());
    assert_eq!(connection.run("LOCK.RELEASE key three"), Value::Int(1));
    // The holder that named the limit is gone; the limit remains.
    connection.run("LOCK.ACQUIRE key four SHARED").token();
    assert!(connection.run("LOCK.ACQUIRE key five SHARED").is_null());
    assert_eq!(connection.run("LOCK.INFO key").field("limit").int(), 3);
    for owner in ["one", "two", "four"] {
        assert_eq!(connection.run(&format!("LOCK.RELEASE key {owner}")), Value::Int(1));
    }
    for index in 0..6 {
        connection.run(&format!("LOCK.ACQUIRE key owner:{index} SHARED")).token();
    }
    assert_eq!(connection.run("LOCK.INFO key").field("limit").int(), 0);
}

#[test]
fn stricter_request_waits_for_its_own_limit() {
    let server = Server::start();
    let (mut strict, mut connection) = (server.raw(), server.raw());
    for index in 0..3 {
        connection.run(&format!("LOCK.ACQUIRE key owner:{index} LIMIT 9")).token();
    }
    assert_eq!(strict.begin("LOCK.ACQUIRE key strict LIMIT 2 WAIT 0"), None);
    connection.run("LOCK.RELEASE key owner:0");
    assert!(strict.pending(), "two other owners hold the lock");
    connection.run("LOCK.RELEASE key owner:1");
    arrives(&mut strict).token();
    assert_eq!(connection.run("LOCK.INFO key").field("limit").int(), 2);
}

#[test]
fn reentry_with_other_limit_is_refused() {
    let server = Server::start();
    let mut connection = server.raw();
    for (held, _) in LIMITS {
        for (named, _) in LIMITS.into_iter().filter(|(named, _)| *named != held) {
            connection.run("FLUSHALL");
            connection.run(&format!("LOCK.ACQUIRE key owner {held}")).token();
            let before = (fields(&mut connection, b"key"), deadline(&mut connection, "key"));
            for rest in ["LEASE 600000", "HOLDS 5", "WAIT 0", "EPHEMERAL"] {
                let error = connection.run(&format!("LOCK.ACQUIRE key owner {named} {rest}")).error();
                assert!(error.starts_with("ERR "), "{held}, {named}: {error}");
                assert_eq!(
                    (fields(&mut connection, b"key"), deadline(&mut connection, "key")),
                    before,
                    "{held}, {named}"
                );
            }
            assert!(holders(&mut connection, "key")["owner"].field("client").is_null());
        }
    }
    // The limit of the lock counts, which another holder lowered.
    connection.run("FLUSHALL");
    connection.run("LOCK.ACQUIRE key one SHARED").token();
    connection.run("LOCK.ACQUIRE key two LIMIT 5").token();
    assert!(connection.run("LOCK.ACQUIRE key one SHARED").error().starts_with("ERR "));
    connection.run("LOCK.ACQUIRE key one LIMIT 5").token();
}

#[test]
fn stored_layout_matches_reference() {
    let server = Server::start();
    let mut connection = server.raw();
    for (words, limit) in [("LIMIT 5", "5"), ("SHARED", "0")] {
        connection.run("FLUSHALL");
        let begin = now();
        let first = connection.run(&format!("LOCK.ACQUIRE key one LEASE 60000 HOLDS 3 {words}")).token();
        let second = connection.run(&format!("LOCK.ACQUIRE key two LEASE 90000 {words}")).token();
        let end = now();
        let fields = text_fields(&mut connection, "key");
        let details = |owner: &str, lease: i64, token: i64| {
            let details = &fields[&format!("#@{owner}")];
            let (at, named) = details.split_once(':').expect("<deadline>:<token>");
            assert_eq!(named, token.to_string());
            let at: i64 = at.parse().unwrap();
            assert!((begin + lease..=end + lease).contains(&at), "{details}");
            at
        };
        details("one", 60_000, first);
        let last = details("two", 90_000, second);
        assert_eq!(deadline(&mut connection, "key"), last, "the key expires with the last of its holders");
        let expected = [("one", "3"), ("two", "1"), ("#limit", limit), ("#fence", &second.to_string())];
        for (field, value) in expected {
            assert_eq!(fields[field], value, "{field}");
        }
        assert_eq!(fields.len(), 6, "{fields:?}");

        connection.run("LOCK.RENEW key one LEASE 120000").token();
        let renewed = text_fields(&mut connection, "key")["#@one"].clone();
        assert_eq!(renewed, format!("{}:{first}", deadline(&mut connection, "key")));
        assert_eq!(connection.run("LOCK.RELEASE key one ALL"), Value::Int(1));
        let left: Vec<String> = text_fields(&mut connection, "key").into_keys().collect();
        assert_eq!(left, ["#@two", "#fence", "#limit", "two"]);
        assert_eq!(deadline(&mut connection, "key"), last, "the key expires with the last remaining holder");
        assert_eq!(connection.run("LOCK.RELEASE key two"), Value::Int(1));
        assert_eq!(connection.run("EXISTS key"), Value::Int(0));
    }
}

fn text_fields(connection: &mut Raw, key: &str) -> BTreeMap<String, String> {
    let text = |bytes| String::from_utf8(bytes).expect("text");
    fields(connection, key.as_bytes()).into_iter().map(|(field, value)| (text(field), text(value))).collect()
}

#[test]
fn semaphore_owners_are_arbitrary_bytes() {
    let server = Server::start();
    let mut connection = server.raw();
    let (first, second): (&[u8], &[u8]) = (b"\0one\xff", b"@two:\r\n");
    for owner in [first, second] {
        connection.call(&[b"LOCK.ACQUIRE", b"\0key", owner, b"LIMIT", b"2"]).token();
    }
    let fields = fields(&mut connection, b"\0key");
    for owner in [first, second] {
        assert_eq!(fields[owner], b"1");
        assert!(fields.contains_key(&[b"#@", owner].concat()));
    }
    assert!(connection.call(&[b"LOCK.ACQUIRE", b"\0key", b"third", b"LIMIT", b"2"]).is_null());
    assert_eq!(connection.call(&[b"LOCK.RELEASE", b"\0key", first]), Value::Int(1));
}

#[test]
fn later_readers_wait_behind_waiting_writer() {
    let server = Server::start();
    let [mut writer, mut second_writer, mut connection] = [server.raw(), server.raw(), server.raw()];
    let mut readers: Vec<Raw> = (0..4).map(|_| server.raw()).collect();
    connection.run("LOCK.ACQUIRE key first SHARED").token();
    assert_eq!(writer.begin("LOCK.ACQUIRE key writer WAIT 0"), None);
    assert!(connection.run("LOCK.ACQUIRE key passing SHARED").is_null(), "nobody passes a waiter");
    for (index, reader) in readers.iter_mut().enumerate().take(3) {
        assert_eq!(reader.begin(&format!("LOCK.ACQUIRE key reader:{index} SHARED WAIT 0")), None);
    }
    assert_eq!(second_writer.begin("LOCK.ACQUIRE key second-writer WAIT 0"), None);
    assert_eq!(readers[3].begin("LOCK.ACQUIRE key reader:3 SHARED WAIT 0"), None);
    let order = ["writer", "reader:0", "reader:1", "reader:2", "second-writer", "reader:3"];
    assert_eq!(waiters(&mut connection, "key"), order);

    connection.run("LOCK.RELEASE key first");
    arrives(&mut writer).token();
    assert!(readers.iter_mut().all(Raw::pending));
    connection.run("LOCK.RELEASE key writer");
    for reader in &mut readers[..3] {
        arrives(reader).token();
    }
    assert_eq!(owners(&mut connection, "key"), ["reader:0", "reader:1", "reader:2"], "granted together");
    assert!(second_writer.pending() && readers[3].pending());
    for index in [2, 0, 1] {
        assert!(second_writer.pending());
        connection.run(&format!("LOCK.RELEASE key reader:{index}"));
    }
    arrives(&mut second_writer).token();
    connection.run("LOCK.FORCE key");
    arrives(&mut readers[3]).token();
}

#[test]
fn head_of_queue_blocks_later_requests() {
    let server = Server::start();
    let [mut strict, mut loose, mut connection] = [server.raw(), server.raw(), server.raw()];
    connection.run("LOCK.ACQUIRE key one LIMIT 9").token();
    connection.run("LOCK.ACQUIRE key two LIMIT 9").token();
    assert_eq!(strict.begin("LOCK.ACQUIRE key strict LIMIT 2 WAIT 0"), None);
    assert_eq!(loose.begin("LOCK.ACQUIRE key loose SHARED WAIT 0"), None);
    connection.run("LOCK.ACQUIRE key one LIMIT 9").token();
    assert!(loose.pending(), "its own limit would allow it, but it is not first");
    strict.reset();
    arrives(&mut loose).token();
}

#[test]
fn each_holder_has_its_own_count_token_and_deadline() {
    let server = Server::start();
    let mut connection = server.raw();
    for (words, _) in LIMITS.into_iter().skip(1) {
        connection.run("FLUSHALL");
        let first = connection.run(&format!("LOCK.ACQUIRE key one LEASE 60000 {words}")).token();
        let second = connection.run(&format!("LOCK.ACQUIRE key two LEASE 120000 HOLDS 2 {words}")).token();
        assert_eq!(connection.run(&format!("LOCK.ACQUIRE key one LEASE 1000 {words}")), Value::Int(first));
        assert!(connection.run(&format!("LOCK.RELEASE key one TOKEN {second}")).is_null());
        assert_eq!(connection.run(&format!("LOCK.RELEASE key two TOKEN {second} HOLDS 1")), Value::Int(0));
        assert_eq!(connection.run(&format!("LOCK.RENEW key two LEASE 30000 TOKEN {second}")), Value::Int(second));
        let all = holders(&mut connection, "key");
        let of = |owner: &str| {
            let holder = &all[owner];
            (holder.field("holds").int(), holder.field("token").int(), holder.field("ttl").int())
        };
        let ((two, first_token, first_ttl), (one, second_token, second_ttl)) = (of("one"), of("two"));
        assert_eq!((two, first_token, one, second_token), (2, first, 1, second));
        assert!((50_000..=60_000).contains(&first_ttl), "a re-entry does not shorten: {first_ttl}");
        assert!((20_000..=30_000).contains(&second_ttl), "a renewal may: {second_ttl}");
        let info = connection.run("LOCK.INFO key");
        assert_eq!(info.field("fence").int(), second);
        assert!((50_000..=60_000).contains(&info.field("ttl").int()), "{info:?}");
        assert_eq!(connection.run("LOCK.RELEASE key two LEASE 5000 ALL"), Value::Int(1));
        assert_eq!(owners(&mut connection, "key"), ["one"]);
    }
}

#[test]
fn expired_holder_does_not_count() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE key brief LEASE 1500 LIMIT 2").token();
    connection.run("LOCK.ACQUIRE key long LEASE 60000 LIMIT 2").token();
    let end = holder_deadline(&mut connection, "key", "brief");
    let mut token = None;
    until(SOON, "a place is free", || {
        let asked = now();
        let reply = connection.run("LOCK.ACQUIRE key next LEASE 60000 LIMIT 2");
        assert!(asked <= end || !reply.is_null(), "asked {} ms after the deadline: {reply:?}", asked - end);
        token = (!reply.is_null()).then(|| reply.token());
        token.is_some()
    });
    assert!(token.unwrap() / 1000 >= end, "before the deadline");
    assert!(connection.run("LOCK.RELEASE key brief").is_null());
    assert!(connection.run("LOCK.RENEW key brief").is_null());
    assert_eq!(owners(&mut connection, "key"), ["long", "next"]);
    assert!(connection.run("LOCK.ACQUIRE key brief LIMIT 2").is_null());
}

/// The deadline in a holder's field.
fn holder_deadline(connection: &mut Raw, key: &str, owner: &str) -> i64 {
    let details = connection.run(&format!("HGET {key} #@{owner}")).text();
    details.split(':').next().and_then(|at| at.parse().ok()).expect("a deadline")
}

#[test]
fn waiter_gets_place_of_expired_holder() {
    const HOLDERS: usize = 100;
    let server = Server::start();
    let mut connection = server.raw();
    let take = |owner: String| format!("LOCK.ACQUIRE key {owner} LEASE 600000 LIMIT {}", HOLDERS + 1);
    let lines: Vec<String> = (0..HOLDERS).map(|index| take(format!("brief:{index}"))).collect();
    for reply in connection.run_all(&lines) {
        reply.token();
    }
    connection.run(&take("long".to_owned())).token();
    let mut waiting: Vec<Raw> = (0..HOLDERS).map(|_| server.raw()).collect();
    for (index, client) in waiting.iter_mut().enumerate() {
        assert_eq!(client.begin(&format!("{} WAIT 0", take(format!("next:{index}")))), None);
    }
    // Only now, so that no lease ends before its successor waits, even on a busy machine.
    let lines: Vec<String> =
        (0..HOLDERS).map(|index| format!("LOCK.RENEW key brief:{index} LEASE {}", 600 + index * 7)).collect();
    for reply in connection.run_all(&lines) {
        reply.token();
    }
    let mut ends: Vec<i64> =
        (0..HOLDERS).map(|index| holder_deadline(&mut connection, "key", &format!("brief:{index}"))).collect();
    ends.sort_unstable();
    let mut late: Vec<f64> = Vec::new();
    for (client, end) in waiting.iter_mut().zip(ends) {
        late.push(lateness(arrives(client).token(), end));
    }
    assert!(late.iter().all(|&late| late >= 0.0), "granted before the deadline: {late:?}");
    late.sort_by(f64::total_cmp);
    println!(
        "place granted after the deadline: median {:.3} ms, longest {:.3} ms",
        late[HOLDERS / 2],
        late[HOLDERS - 1]
    );
    assert_eq!(holders(&mut connection, "key").len(), HOLDERS + 1);
}

#[test]
fn writer_is_granted_when_last_reader_expires() {
    let server = Server::start();
    let [mut writer, mut connection] = [server.raw(), server.raw()];
    for (owner, lease) in [("one", 100), ("two", 400), ("three", 200)] {
        connection.run(&format!("LOCK.ACQUIRE key {owner} LEASE {lease} SHARED")).token();
    }
    let end = holder_deadline(&mut connection, "key", "two");
    assert_eq!(writer.begin("LOCK.ACQUIRE key writer WAIT 0"), None);
    let late = lateness(arrives(&mut writer).token(), end);
    println!("the writer was granted the lock {late:.3} ms after the last deadline");
    assert!(late >= 0.0);
    assert_eq!(owners(&mut connection, "key"), ["writer"]);
    // No field of the readers is left.
    let left: Vec<String> = text_fields(&mut connection, "key").into_keys().collect();
    assert_eq!(left, ["#fence", "writer"]);
}

#[test]
fn last_release_removes_the_key_with_expired_holders() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE key brief LEASE 20 LIMIT 5").token();
    connection.run("LOCK.ACQUIRE key long LEASE 60000 LIMIT 5").token();
    until(SOON, "the brief lease has expired", || owners(&mut connection, "key") == ["long"]);
    assert_eq!(connection.run("LOCK.RELEASE key long"), Value::Int(1));
    assert_eq!(connection.run("EXISTS key"), Value::Int(0));
    connection.run("LOCK.ACQUIRE key writer").token();
}

#[test]
fn key_expiry_ends_every_hold() {
    let server = Server::start();
    let [mut writer, mut connection] = [server.raw(), server.raw()];
    connection.run("LOCK.ACQUIRE key one LEASE 60000 SHARED").token();
    connection.run("LOCK.ACQUIRE key two LEASE 90000 SHARED").token();
    assert_eq!(writer.begin("LOCK.ACQUIRE key writer WAIT 0"), None);
    assert_eq!(connection.run("PEXPIRE key 30"), Value::Int(1));
    arrives(&mut writer).token();
    assert_eq!(owners(&mut connection, "key"), ["writer"]);
}

#[test]
fn holders_stay_without_key_expiry() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE key one LEASE 1500 LIMIT 2").token();
    connection.run("LOCK.ACQUIRE key two LEASE 1500 LIMIT 2").token();
    let end = deadline(&mut connection, "key");
    assert_eq!(connection.run("PERSIST key"), Value::Int(1));
    until(SOON, "the leases have expired", || now() > end + 50);
    assert!(connection.run("LOCK.ACQUIRE key three LIMIT 2").is_null());
    assert_eq!(connection.run("LOCK.RELEASE key one"), Value::Int(1));
    connection.run("LOCK.ACQUIRE key three LIMIT 2").token();
    assert_eq!(owners(&mut connection, "key"), ["three", "two"]);
}

#[test]
fn every_command_works_for_every_limit() {
    let server = Server::start();
    for (words, limit) in LIMITS {
        let [holder, mut waiter, mut connection] = [server.raw(), server.raw(), server.raw()];
        let mut holder = Watched::over(holder, &server);
        connection.run("FLUSHALL");
        let token = holder.run(&format!("LOCK.ACQUIRE key owner LEASE 60000 HOLDS 3 {words} EPHEMERAL")).token();
        assert_eq!(holder.run(&format!("LOCK.ACQUIRE key owner HOLDS 2 {words}")), Value::Int(token));
        assert!(connection.run(&format!("LOCK.RELEASE key owner TOKEN {}", token - 1)).is_null());
        assert_eq!(connection.run(&format!("LOCK.RELEASE key owner TOKEN {token}")), Value::Int(0));
        assert_eq!(connection.run("LOCK.RENEW key owner LEASE 90000"), Value::Int(token));
        // A request with limit 1 waits for holders of any limit.
        assert_eq!(waiter.begin("LOCK.ACQUIRE key writer WAIT 60000"), None);
        let info = connection.run("LOCK.INFO key");
        assert_eq!(info.field("limit").int(), limit, "{words}");
        assert_eq!((info.field("waiters").int(), info.field("fence").int()), (1, token));
        let shown = info.field("holders").items()[0].clone();
        assert_eq!((shown.field("owner").text(), shown.field("holds").int()), ("owner".into(), 2));
        assert_eq!(shown.field("client").int(), holder.client_id());
        assert!(shown.field("ephemeral").truth() && !shown.field("watchdog").truth());
        let waiting = connection.run("LOCK.WAITERS key");
        let first = &waiting.items()[0];
        assert_eq!((first.field("owner").text(), first.field("limit").int()), ("writer".into(), 1));
        holder.run(&format!("LOCK.ACQUIRE watched owner LEASE 3000 {words} WATCHDOG")).token();
        let end = deadline(&mut connection, "watched");
        until(SOON, "the lease has been renewed", || deadline(&mut connection, "watched") > end);
        assert_eq!(connection.run("LOCK.RELEASE watched owner"), Value::Int(1));
        holder.close();
        arrives(&mut waiter).token();
        assert_eq!(connection.run("LOCK.FORCE key"), Value::Int(1));
    }
}

#[test]
fn force_counts_the_holders_of_every_limit() {
    let server = Server::start();
    let [mut writer, mut connection] = [server.raw(), server.raw()];
    for (words, count) in [("LIMIT 1", 1), ("LIMIT 5", 4), ("SHARED", 7)] {
        for index in 0..count {
            connection.run(&format!("LOCK.ACQUIRE key owner:{index} {words}")).token();
        }
        assert_eq!(writer.begin("LOCK.ACQUIRE key writer WAIT 0"), None);
        assert_eq!(connection.run("LOCK.FORCE key"), Value::Int(count));
        arrives(&mut writer).token();
        assert_eq!(connection.run("LOCK.RELEASE key writer"), Value::Int(1));
        assert_eq!(connection.run("LOCK.FORCE key"), Value::Int(0));
    }
}

#[test]
fn lock_waiters_shows_requested_limit() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE key holder").token();
    let mut clients: Vec<Raw> = LIMITS.iter().map(|_| server.raw()).collect();
    for (client, (words, limit)) in clients.iter_mut().zip(LIMITS) {
        assert_eq!(client.begin(&format!("LOCK.ACQUIRE key waiter:{limit} {words} WAIT 0")), None);
    }
    let shown = connection.run("LOCK.WAITERS key");
    let shown: Vec<i64> = shown.items().iter().map(|waiter| waiter.field("limit").int()).collect();
    assert_eq!(shown, [1, 5, 0]);
}

#[test]
fn binding_belongs_to_one_of_several_holders() {
    let server = Server::start();
    let [watched, mut ephemeral, mut waiter, mut connection] = [server.raw(), server.raw(), server.raw(), server.raw()];
    let mut watched = Watched::over(watched, &server);
    watched.run("LOCK.ACQUIRE key watched LEASE 3000 LIMIT 3 WATCHDOG").token();
    ephemeral.run("LOCK.ACQUIRE key ephemeral LEASE 60000 LIMIT 3 EPHEMERAL").token();
    connection.run("LOCK.ACQUIRE key plain LEASE 60000 LIMIT 3").token();
    let plain = holder_deadline(&mut connection, "key", "plain");
    assert_eq!(waiter.begin("LOCK.ACQUIRE key next LEASE 60000 LIMIT 3 WAIT 0 EPHEMERAL"), None);
    let end = now() + 4500;
    until(SOON, "the watched lease has been renewed", || holder_deadline(&mut connection, "key", "watched") > end);
    assert!(waiter.pending());
    assert_eq!(holder_deadline(&mut connection, "key", "plain"), plain, "only the watched one is renewed");
    ephemeral.reset();
    arrives(&mut waiter).token();
    assert_eq!(owners(&mut connection, "key"), ["next", "plain", "watched"]);
    assert_eq!(holders(&mut connection, "key")["next"].field("client").int(), waiter.client_id());
    watched.reset();
    until(SOON, "the watched lease expires", || owners(&mut connection, "key") == ["next", "plain"]);
}

/// The lock has several places, so the release of another holder may end the wait.
#[test]
fn cycle_of_reader_and_writer_is_not_refused() {
    let server = Server::start();
    for (round, (words, _)) in LIMITS.iter().enumerate() {
        // Own keys for each round: waiters of the round before may still be queued.
        let [a, b] = [format!("a:{round}"), format!("b:{round}")];
        let [mut one, mut two] = [server.raw(), server.raw()];
        one.run(&format!("LOCK.ACQUIRE {a} one {words} LEASE 600000")).token();
        two.run(&format!("LOCK.ACQUIRE {b} two {words} LEASE 600000")).token();
        assert_eq!(one.begin(&format!("LOCK.ACQUIRE {b} one WAIT 60000")), None);
        let reply = two.begin(&format!("LOCK.ACQUIRE {a} two WAIT 60000"));
        if *words == "LIMIT 1" {
            let error = reply.expect("refused").error();
            assert!(error.starts_with("DEADLOCK "), "{error}");
        } else {
            assert_eq!(reply, None, "{words}");
        }
    }
}

/// Three holders of a semaphore, two readers and a mutex, each with its own lease.
fn acquire_some(connection: &mut Raw) {
    let lines = [
        "LOCK.ACQUIRE permits one LEASE 3000 LIMIT 3",
        "LOCK.ACQUIRE permits two LEASE 600000 HOLDS 4 LIMIT 3",
        "LOCK.ACQUIRE permits three LEASE 4000 LIMIT 3",
        "LOCK.ACQUIRE report reader:1 LEASE 3500 SHARED",
        "LOCK.ACQUIRE report reader:2 LEASE 600000 SHARED",
        "LOCK.ACQUIRE mutex owner LEASE 600000",
    ];
    for line in lines {
        connection.run(line).token();
    }
}

/// The deadlines and fields of these locks.
fn contents(connection: &mut Raw) -> Vec<(i64, BTreeMap<Bytes, Bytes>)> {
    ["permits", "report", "mutex"]
        .map(|key| (deadline(connection, key), fields(connection, key.as_bytes())))
        .into_iter()
        .collect()
}

/// The holders keep their tokens, counts and deadlines, and each place is free after its deadline.
fn assert_continues(connection: &mut Raw, waiter: &mut Raw) {
    let (one, three) = (holder_deadline(connection, "permits", "one"), holder_deadline(connection, "permits", "three"));
    assert!(connection.run("LOCK.ACQUIRE report writer").is_null());
    assert!(connection.run("LOCK.ACQUIRE mutex other").is_null());
    assert_eq!(holders(connection, "permits")["two"].field("holds").int(), 4);
    for (owner, end) in [("fourth", one), ("fifth", three)] {
        let reply = waiter.begin(&format!("LOCK.ACQUIRE permits {owner} LEASE 600000 LIMIT 3 WAIT 0"));
        let token = reply.unwrap_or_else(|| arrives(waiter)).token();
        assert!(token / 1000 >= end, "{owner} was granted a place {} ms before the deadline", -lateness(token, end));
    }
    assert_eq!(owners(connection, "permits"), ["fifth", "fourth", "two"]);
    assert!(connection.run("LOCK.ACQUIRE permits sixth LIMIT 3").is_null());
    until(SOON, "the first reader's lease has expired", || owners(connection, "report") == ["reader:2"]);
    assert_eq!(connection.run("LOCK.RELEASE permits two ALL"), Value::Int(1));
    connection.run("LOCK.ACQUIRE permits sixth LIMIT 3").token();
}

#[test]
fn holders_survive_a_restart_with_an_append_only_file() {
    let mut server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    acquire_some(&mut server.raw());
    let before = contents(&mut server.raw());
    server.kill9();
    server.restart();
    assert_eq!(contents(&mut server.raw()), before);
    assert_continues(&mut server.raw(), &mut server.raw());
}

#[test]
fn holders_survive_a_restart_with_a_rewritten_append_only_file() {
    let mut server = Server::builder().arg("appendonly", "yes").arg("aof-use-rdb-preamble", "no").start();
    acquire_some(&mut server.raw());
    let mut connection = server.raw();
    let before = contents(&mut connection);
    connection.run("BGREWRITEAOF");
    until(SOON, "the append-only file is rewritten", || {
        let field = |name| server.info("persistence", name).unwrap_or_default();
        field("aof_rewrite_in_progress") == "0" && field("aof_rewrite_scheduled") == "0"
    });
    server.restart();
    assert_eq!(contents(&mut server.raw()), before);
    assert_continues(&mut server.raw(), &mut server.raw());
}

#[test]
fn holders_survive_a_restart_with_a_snapshot() {
    let mut server = Server::builder().arg("save", "3600 1").start();
    acquire_some(&mut server.raw());
    let before = contents(&mut server.raw());
    server.restart();
    assert_eq!(contents(&mut server.raw()), before);
    assert_continues(&mut server.raw(), &mut server.raw());
}

#[test]
fn holders_survive_unloading_and_loading_the_module() {
    let server = Server::start();
    let mut connection = server.raw();
    acquire_some(&mut connection);
    let before = contents(&mut connection);
    assert_eq!(connection.run("MODULE UNLOAD holdfast"), Value::Okay);
    assert_eq!(contents(&mut connection), before);
    let path = module_path();
    assert_eq!(connection.run(&format!("MODULE LOAD {}", path.display())), Value::Okay);
    assert_eq!(contents(&mut connection), before);
    assert_continues(&mut connection, &mut server.raw());
}

#[test]
fn holders_are_replicated_to_a_server_without_the_module() {
    let primary = Server::start();
    let replica = Server::builder().without_module().start();
    let mut connection = primary.raw();
    connection.run("LOCK.ACQUIRE early one LEASE 600000 SHARED").token();
    replica.replica_of(&primary);
    primary.wait_replica_online();
    acquire_some(&mut connection);
    connection.run("LOCK.RENEW early one LEASE 700000").token();
    connection.run("LOCK.ACQUIRE early two LEASE 900000 LIMIT 2").token();
    connection.run("LOCK.ACQUIRE brief one LEASE 30 LIMIT 2").token();
    connection.run("LOCK.ACQUIRE brief two LEASE 600000 LIMIT 2").token();
    connection.run("LOCK.ACQUIRE brief three LEASE 600000 LIMIT 2 WAIT 0").token();
    primary.wait_for_replica(&replica);
    let mut copy = replica.raw();
    assert_eq!(contents(&mut copy), contents(&mut connection));
    for key in ["early", "brief"] {
        assert_eq!(deadline(&mut copy, key), deadline(&mut connection, key), "{key}");
        assert_eq!(fields(&mut copy, key.as_bytes()), fields(&mut connection, key.as_bytes()), "{key}");
    }
    // The replica is promoted, and loads the module later.
    replica.replica_of_no_one();
    assert_eq!(copy.run(&format!("MODULE LOAD {}", module_path().display())), Value::Okay);
    assert_continues(&mut copy, &mut replica.raw());
}

#[test]
fn promoted_replica_with_module_continues() {
    let (primary, replica) = (Server::start(), Server::start());
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let mut connection = primary.raw();
    acquire_some(&mut connection);
    primary.wait_for_replica(&replica);
    // The module must not remember what it computes for requests while the server is a replica.
    let mut copy = replica.raw();
    copy.run("LOCK.INFO permits");
    connection.run("LOCK.RELEASE permits two").int();
    connection.run("LOCK.ACQUIRE permits two LIMIT 3").token();
    primary.wait_for_replica(&replica);
    replica.replica_of_no_one();
    assert_continues(&mut copy, &mut replica.raw());
}

#[test]
fn holders_can_be_changed_by_other_commands() {
    let server = Server::start();
    let [mut waiter, mut connection] = [server.raw(), server.raw()];
    connection.run("LOCK.ACQUIRE key one LEASE 60000 LIMIT 2").token();
    connection.run("LOCK.ACQUIRE key two LEASE 60000 LIMIT 2").token();
    assert_eq!(waiter.begin("LOCK.ACQUIRE key three LIMIT 2 WAIT 0"), None);
    assert_eq!(connection.run("HDEL key one #@one"), Value::Int(2));
    arrives(&mut waiter).token();
    // The same number of fields, with other contents.
    let token = connection.run("HGET key #fence").text();
    connection.run("HDEL key two #@two");
    connection.run(&format!("HSET key four 2 #@four {}:{token}", now() + 60_000));
    assert_eq!(owners(&mut connection, "key"), ["four", "three"]);
    assert!(connection.run("LOCK.ACQUIRE key five LIMIT 2").is_null());
    assert_eq!(connection.run("LOCK.RELEASE key four"), Value::Int(0));
    assert!(connection.run("LOCK.RELEASE key two").is_null());
}

#[test]
fn expired_holders_are_removed_while_others_hold() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE key long LEASE 600000 SHARED").token();
    for index in 0..20 {
        connection.run(&format!("LOCK.ACQUIRE key brief:{index} LEASE {} SHARED", 20 + index)).token();
    }
    // No request waits, and no other command is sent.
    until(SOON, "only two fields of the holder and two of the lock are left", || {
        connection.run("HLEN key") == Value::Int(4)
    });
    let left: Vec<String> = text_fields(&mut connection, "key").into_keys().collect();
    assert_eq!(left, ["#@long", "#fence", "#limit", "long"]);
}
