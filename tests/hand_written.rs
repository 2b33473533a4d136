//! Hashes that another client wrote by hand: tokens, deadlines and expiries that the module never set.

use redis::Value;
use support::{Feature, Raw, Server, skip, until};

use crate::common::{Contents, keys, unix_micros, unix_millis, words};
use crate::lines::{Commands, Reply, SOON, Watched, deadline, fields, holders, now, owners};

const HOUR: i64 = 60 * 60 * 1_000_000;
/// Tokens that no server can have returned: the last ones below 2^52 and 2^53, and one just over an hour ahead.
fn impossible_tokens() -> [i64; 3] {
    [(1 << 52) - 1, (1 << 53) - 1, unix_micros() + HOUR + HOUR / 60]
}

/// Hashes with the token in each place that can have one.
fn forged(token: i64) -> [String; 3] {
    let end = now() + 600_000;
    [
        format!("HSET app:x me 1 #fence {token}"),
        format!("HSET app:x me 1 #fence {token} #limit 0 #@me {end}:{token}"),
        format!("HSET app:x #fence {token}"),
    ]
}

/// The token is the current time, within the delay of a busy machine.
#[track_caller]
fn assert_current_time(token: i64) {
    let ahead = token - unix_micros();
    assert!(ahead.abs() < HOUR / 60, "{token} is {ahead} µs ahead of the clock");
}

/// Runs every command that makes the module read the hash.
fn read_key(connection: &mut Raw, key: &str) {
    for line in ["LOCK.INFO", "LOCK.WAITERS"] {
        connection.run(&format!("{line} {key}"));
    }
    for line in ["LOCK.ACQUIRE # other", "LOCK.ACQUIRE # other SHARED", "LOCK.RENEW # other", "LOCK.RELEASE # other"] {
        connection.run(&line.replace('#', key));
    }
}

#[test]
fn implausible_token_raises_no_other_token() {
    let server = Server::start();
    let mut connection = server.raw();
    for token in impossible_tokens() {
        for forged in forged(token) {
            connection.run(&forged);
            read_key(&mut connection, "app:x");
            assert_current_time(connection.run("LOCK.ACQUIRE elsewhere me").token());
            assert_eq!(connection.run("LOCK.FORCE elsewhere"), Value::Int(1));
            connection.run("DEL app:x");
            assert_current_time(connection.run("LOCK.ACQUIRE app:x me").token());
            connection.run("DEL app:x");
        }
    }
}

#[test]
fn plausible_token_of_other_server_counts() {
    let server = Server::start();
    let mut connection = server.raw();
    let mut newest = 0;
    for (index, forged) in forged(0).iter().enumerate() {
        // Another server's clock may be ahead, by less than an hour.
        let token = unix_micros() + HOUR / 2 + HOUR / 10 * index as i64;
        connection.run(&forged.replace("#fence 0", &format!("#fence {token}")).replace(":0", &format!(":{token}")));
        read_key(&mut connection, "app:x");
        newest = connection.run("LOCK.ACQUIRE elsewhere me SHARED").token();
        assert!(newest > token, "{newest} after {token}");
        connection.run("FLUSHALL");
    }
    assert!(connection.run("LOCK.ACQUIRE elsewhere me").token() > newest);
}

#[test]
fn hold_with_a_foreign_token_is_valid_until_re_entry() {
    let server = Server::start();
    let mut connection = server.raw();
    for token in impossible_tokens() {
        for (forged, limit) in forged(token).iter().zip(["", "SHARED"]) {
            connection.run(forged);
            connection.run("PEXPIRE app:x 600000");
            let info = connection.run("LOCK.INFO app:x");
            assert_eq!(info.field("fence"), Value::Int(token), "as written");
            assert_eq!(holders(&mut connection, "app:x")["me"].field("token"), Value::Int(token), "as written");
            assert!(connection.run(&format!("LOCK.RELEASE app:x me TOKEN {}", token - 1)).is_null());
            assert_eq!(connection.run(&format!("LOCK.RENEW app:x me TOKEN {token}")), Value::Int(token));
            // A new holder gets a greater token, and keeps it.
            let entered = connection.run(&format!("LOCK.ACQUIRE app:x me {limit}")).token();
            assert_current_time(entered);
            assert_eq!(connection.run(&format!("LOCK.ACQUIRE app:x me {limit}")), Value::Int(entered));
            assert_eq!(connection.run("LOCK.INFO app:x").field("fence"), Value::Int(entered));
            assert_eq!(holders(&mut connection, "app:x")["me"].field("token"), Value::Int(entered));
            assert_eq!(connection.run(&format!("LOCK.RELEASE app:x me ALL TOKEN {entered}")), Value::Int(1));

            connection.run(forged);
            assert_eq!(connection.run(&format!("LOCK.RELEASE app:x me TOKEN {token}")), Value::Int(1));
        }
    }
}

#[test]
fn grant_follows_clock_after_implausible_token() {
    let server = Server::start();
    let mut connection = server.raw();
    for token in impossible_tokens() {
        let [mutex, many, remains] = forged(token);
        connection.run(&many);
        connection.run("PEXPIRE app:x 600000");
        let second = connection.run("LOCK.ACQUIRE app:x you SHARED").token();
        assert_current_time(second);
        assert_eq!(connection.run("LOCK.INFO app:x").field("fence"), Value::Int(second), "the newest grant's");
        assert_eq!(owners(&mut connection, "app:x"), ["me", "you"]);
        connection.run("DEL app:x");

        connection.run(&remains);
        let first = connection.run("LOCK.ACQUIRE app:x you").token();
        assert_current_time(first);
        assert_eq!(connection.run("HGET app:x #fence").text(), first.to_string());
        connection.run("DEL app:x");

        connection.run(&mutex);
        let several = connection.run("LOCK.MACQUIRE 1 app:x me").token();
        assert_current_time(several);
        assert_eq!(connection.run("HGET app:x #fence").text(), several.to_string());
        connection.run("FLUSHALL");
    }
}

/// Writes all of the forged tokens, and acquires locks before, between and afterwards. Returns the last token.
fn attack(connection: &mut Raw) -> i64 {
    let mut last = connection.run("LOCK.ACQUIRE given me").token();
    for token in impossible_tokens() {
        for (index, forged) in forged(token).iter().enumerate() {
            for (key, rest) in [("app:stays", ""), ("app:goes", "DEL app:goes")] {
                connection.run(&forged.replace("app:x", &format!("{key}{index}")));
                read_key(connection, &format!("{key}{index}"));
                if !rest.is_empty() {
                    connection.run(&format!("{rest}{index}"));
                }
                connection.run("LOCK.FORCE given");
                let next = connection.run("LOCK.ACQUIRE given me").token();
                assert!(next > last, "{next} after {last}");
                last = next;
            }
        }
    }
    last
}

/// The tokens after a restart or failover are greater than `last`, whatever the keyspace contains.
fn tokens_continue(connection: &mut Raw, last: i64) {
    let new = connection.run("LOCK.ACQUIRE new me").token();
    assert!(new > last, "{new} after {last}");
    for index in 0..3 {
        read_key(connection, &format!("app:stays{index}"));
    }
    let newer = connection.run("LOCK.ACQUIRE newer me").token();
    assert!(newer > new, "{newer} after {new}");
    assert_current_time(newer);
}

#[test]
fn tokens_increase_after_restart_from_append_only_file() {
    let mut server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let last = attack(&mut server.raw());
    server.kill9();
    server.restart();
    tokens_continue(&mut server.raw(), last);
}

#[test]
fn tokens_increase_after_restart_from_rdb_file() {
    let mut server = Server::start();
    let last = attack(&mut server.raw());
    assert_eq!(server.raw().run("SAVE"), Value::Okay);
    server.kill9();
    server.restart();
    tokens_continue(&mut server.raw(), last);
}

#[test]
fn tokens_increase_after_failover() {
    let [primary, replica] = [Server::start(), Server::start()];
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let last = attack(&mut primary.raw());
    primary.wait_for_replica(&replica);
    let mut connection = replica.raw();
    // The module on the replica reads the locks too, without deciding.
    for index in 0..3 {
        connection.run(&format!("LOCK.INFO app:stays{index}"));
    }
    drop(primary);
    replica.replica_of_no_one();
    tokens_continue(&mut connection, last);
}

/// Deadlines that no server accepts as an expiry: beyond 63 bits.
const BEYOND: [&str; 3] = ["9223372036854775808", "9999999999999999999", "18446744073709551616"];
/// The last deadline that servers accept, and one that means no expiry. Both are beyond every clock.
const FARTHEST: [&str; 2] = ["9223372036854775806", "9223372036854775807"];

/// A primary and a replica that exit if their data differ, and a log from which the primary restarts.
fn strict() -> [Server; 2] {
    let strict = || Server::builder().arg("propagation-error-behavior", "panic");
    let [primary, replica] =
        [strict().arg("appendonly", "yes").arg("appendfsync", "always"), strict()].map(|it| it.start());
    replica.replica_of(&primary);
    primary.wait_replica_online();
    [primary, replica]
}

/// Primary, replica and append-only file have the same locks, as data and as the module reads them.
#[track_caller]
fn assert_same_locks([primary, replica]: &mut [Server; 2]) {
    let before = shown(primary);
    primary.wait_for_replica(replica);
    assert_eq!(shown(replica), before, "the replica");
    assert!(!replica.ended() && !replica.log().contains("CRITICAL"), "{}", replica.log());
    primary.kill9();
    primary.restart();
    assert_eq!(shown(primary), before, "the append-only file");
}

/// The contents, and the owner, hold count and token of each hold.
fn shown(server: &Server) -> (Contents, Vec<(String, i64, Value)>) {
    let mut connection = server.raw();
    let mut holds = Vec::new();
    for key in keys(&mut connection) {
        let key = String::from_utf8(key).expect("text");
        let of_key = holders(&mut connection, &key).into_iter();
        holds.extend(of_key.map(|(owner, it)| (format!("{key} {owner}"), it.field("holds").int(), it.field("token"))));
    }
    (Contents::read(&mut connection), holds)
}

#[test]
fn hash_with_impossible_deadline_is_no_lock() {
    let mut servers = strict();
    for end in BEYOND {
        let mut connection = servers[0].raw();
        connection.run(&format!("HSET g b 1 #limit 0 #@b {end}:5"));
        connection.run("PEXPIRE g 100000");
        let before = Contents::read(&mut connection);
        for line in [
            "LOCK.ACQUIRE g a SHARED LEASE 1000",
            "LOCK.ACQUIRE g b SHARED LEASE 200000",
            "LOCK.ACQUIRE g a LEASE 1000 WAIT 10",
            "LOCK.MACQUIRE 1 g a",
            "LOCK.RENEW g b LEASE 200000",
            "LOCK.RELEASE g b",
            "LOCK.RELEASE g b LEASE 200000",
            "LOCK.FORCE g",
            "LOCK.INFO g",
        ] {
            let error = connection.run(line).error();
            assert!(error.starts_with("WRONGTYPE"), "{line}: {error}");
        }
        assert_eq!(Contents::read(&mut connection), before, "the hash is unchanged");
        servers[0].wait_for_replica(&servers[1]);
        assert_eq!(Contents::read(&mut servers[1].raw()), before);
        connection.run("DEL g");
    }
    servers[0].raw().run("LOCK.ACQUIRE after a SHARED").token();
    assert_same_locks(&mut servers);
}

#[test]
fn primary_replica_and_log_agree_on_latest_deadlines() {
    let mut servers = strict();
    let mut connection = servers[0].raw();
    for end in FARTHEST {
        for (index, line) in [
            "LOCK.ACQUIRE # a SHARED LEASE 200000",
            "LOCK.ACQUIRE # b SHARED LEASE 200000",
            "LOCK.RENEW # b LEASE 200000",
            "LOCK.RELEASE # b HOLDS 1",
            "LOCK.RELEASE # c",
            "PERSIST #",
        ]
        .iter()
        .enumerate()
        {
            let key = format!("g{index}:{end}");
            connection.run(&format!("HSET {key} b 2 c 1 #fence 5 #limit 0 #@b {end}:5"));
            connection.run(&format!("PEXPIRE {key} 100000"));
            let reply = connection.run(&line.replace('#', &key));
            assert!(!matches!(reply, Value::ServerError(_) | Value::Nil), "{line}: {reply:?}");
        }
    }
    assert_same_locks(&mut servers);
}

#[test]
fn holder_without_deadline_lasts_as_long_as_key() {
    let mut servers = strict();
    let mut connection = servers[0].raw();
    connection.run("HSET g b 1 #limit 0");
    connection.run("PEXPIRE g 100000");
    let end = deadline(&mut connection, "g");
    connection.run("LOCK.ACQUIRE g short SHARED LEASE 50000").token();
    assert_eq!(deadline(&mut connection, "g"), end, "a shorter lease ends no other hold");
    connection.run("LOCK.ACQUIRE g long SHARED LEASE 200000").token();
    let end = deadline(&mut connection, "g");
    connection.run("LOCK.RELEASE g long");
    assert_eq!(deadline(&mut connection, "g"), end);
    assert!(owners(&mut connection, "g").contains(&"b".to_owned()));
    // A re-entry gives it a deadline of its own.
    connection.run("LOCK.ACQUIRE g b SHARED LEASE 300000").token();
    connection.run("LOCK.RELEASE g b HOLDS 1");
    assert_same_locks(&mut servers);
}

/// The remaining ms of each holder of `key`, as `LOCK.INFO` shows them.
fn left(connection: &mut Raw, key: &str) -> Vec<(String, i64)> {
    holders(connection, key).into_iter().map(|(owner, it)| (owner, it.field("ttl").int())).collect()
}

#[track_caller]
fn assert_left(connection: &mut Raw, expected: &[(&str, i64)]) {
    let left = left(connection, "key");
    assert_eq!(left.len(), expected.len(), "{left:?}");
    for ((owner, left), (expected, most)) in left.iter().zip(expected) {
        let least = if *most < 0 { *most } else { most - 20_000 };
        assert_eq!(owner, expected);
        assert!((least..=*most).contains(left), "{owner} has {left} ms left, not {most}");
    }
}

/// Two owners hold the lock under `LIMIT 2`, `a` twice. Then the key loses its expiry.
fn persisted(connection: &mut Raw) {
    connection.run("FLUSHALL");
    connection.run("LOCK.ACQUIRE key a LIMIT 2 LEASE 60000 HOLDS 2").token();
    connection.run("LOCK.ACQUIRE key b LIMIT 2 LEASE 60000").token();
    assert_eq!(connection.run("PERSIST key"), Value::Int(1));
}

#[test]
fn promised_deadline_survives_persist() {
    let server = Server::start();
    let mut connection = server.raw();
    // Commands that run while the key has no expiry, and the remaining leases of a and b once it has one again.
    for (line, a, b) in [
        ("LOCK.ACQUIRE key a LIMIT 2 LEASE 60000", 60_000, 60_000),
        ("LOCK.ACQUIRE key a LIMIT 2 LEASE 5", 60_000, 60_000),
        ("LOCK.ACQUIRE key a LIMIT 2 LEASE 120000", 120_000, 60_000),
        ("LOCK.ACQUIRE key a LIMIT 2 HOLDS 2", 60_000, 60_000),
        ("LOCK.RELEASE key a", 60_000, 60_000),
        ("LOCK.RELEASE key a LEASE 90000", 90_000, 60_000),
        ("LOCK.RENEW key a LEASE 90000", 90_000, 60_000),
        ("LOCK.INFO key", 60_000, 60_000),
    ] {
        persisted(&mut connection);
        connection.run(line);
        assert_left(&mut connection, &[("a", -1), ("b", -1)]);
        assert_eq!(connection.run("PEXPIRE key 200000"), Value::Int(1));
        assert_left(&mut connection, &[("a", a), ("b", b)]);
        assert!(connection.run("LOCK.ACQUIRE key c LIMIT 2").is_null(), "{line}");
        // A server that reads the key for the first time gets the same deadlines.
        connection.run("COPY key other");
        connection.run("RENAME other key");
        assert_left(&mut connection, &[("a", a), ("b", b)]);
        // When another client sets the key's expiry, all holds end with the key.
        assert_eq!(connection.run("PEXPIRE key 30000"), Value::Int(1));
        assert_left(&mut connection, &[("a", 30_000), ("b", 30_000)]);
    }
}

#[test]
fn no_lease_ends_while_key_has_no_expiry() {
    let server = Server::start();
    let mut connection = server.raw();
    let begin = unix_millis();
    let taken = ["a", "b"].map(|owner| format!("LOCK.ACQUIRE key {owner} LIMIT 2 LEASE 400"));
    connection.call_all(&["MULTI", &taken[0], &taken[1], "PERSIST key", "EXEC"].map(words));
    until(SOON, "the leases have expired", || unix_millis() > begin + 800);
    assert!(connection.run("LOCK.ACQUIRE key c LIMIT 2").is_null());
    assert_left(&mut connection, &[("a", -1), ("b", -1)]);
}

#[test]
fn primary_replica_and_log_agree_on_lock_without_expiry() {
    let mut servers = strict();
    let mut connection = servers[0].raw();
    for (index, line) in [
        "LOCK.ACQUIRE # a LIMIT 2 LEASE 60000",
        "LOCK.RELEASE # a",
        "LOCK.RENEW # a LEASE 90000",
        "LOCK.RELEASE # b",
        "PEXPIRE # 60000",
    ]
    .iter()
    .enumerate()
    {
        for then in ["PTTL #", "PEXPIRE # 90000"] {
            let key = format!("g{index}:{}", then.len());
            connection.run(&format!("LOCK.ACQUIRE {key} a LIMIT 2 LEASE 60000 HOLDS 2")).token();
            connection.run(&format!("LOCK.ACQUIRE {key} b LIMIT 2 LEASE 60000")).token();
            connection.run(&format!("PERSIST {key}"));
            let reply = connection.run(&line.replace('#', &key));
            assert!(!matches!(reply, Value::ServerError(_) | Value::Nil), "{line}: {reply:?}");
            connection.run(&then.replace('#', &key));
        }
    }
    assert_same_locks(&mut servers);
}

/// A server whose hashes have field expiry, its replica, and a log. `None` if the server has no such fields.
fn with_field_expiry() -> Option<[Server; 2]> {
    if !Server::builder().without_module().start().can(Feature::HashFieldExpiry) {
        skip("this server has no field expiry");
        return None;
    }
    Some(strict())
}

/// Sets an expiry in `ms` for each field that makes the hold of `me`.
fn let_fields_expire(connection: &mut Raw, key: &str, ms: i64) -> usize {
    let fields = fields(connection, key.as_bytes());
    for field in fields.keys().filter(|field| !field.ends_with(b"you")) {
        let reply = connection.call(&[b"HPEXPIRE", key.as_bytes(), ms.to_string().as_bytes(), b"FIELDS", b"1", field]);
        assert_eq!(reply.items(), [Value::Int(1)]);
    }
    fields.len()
}

/// The number of lock fields that have an expiry.
fn expiring(connection: &mut Raw) -> usize {
    let mut count = 0;
    for key in keys(connection) {
        for field in fields(connection, &key).keys() {
            let reply = connection.call(&[b"HPTTL", &key, b"FIELDS", b"1", field]);
            count += usize::from(reply.items() != [Value::Int(-1)]);
        }
    }
    count
}

#[test]
fn grant_removes_the_expiry_of_its_fields() {
    let Some(mut servers) = with_field_expiry() else { return };
    let mut connection = servers[0].raw();
    for (index, limit) in ["", "SHARED", "LIMIT 5"].into_iter().enumerate() {
        for (number, line) in [
            "LOCK.RENEW # me LEASE 90000",
            "LOCK.RENEW # me LEASE 40000",
            "LOCK.ACQUIRE # me LIMIT! LEASE 90000",
            "LOCK.ACQUIRE # me LIMIT! LEASE 5",
            "LOCK.ACQUIRE # me LIMIT! LEASE 5 HOLDS 2",
            "LOCK.RELEASE # me LEASE 90000",
            "LOCK.RELEASE # me LEASE 90000 HOLDS 2",
            "LOCK.MRENEW 1 # me LEASE 90000",
        ]
        .into_iter()
        .enumerate()
        {
            let key = format!("g{index}:{number}");
            connection.run(&format!("LOCK.ACQUIRE {key} me LEASE 60000 HOLDS 2 {limit}")).token();
            assert!(let_fields_expire(&mut connection, &key, 50_000) >= 2);
            let reply = connection.run(&line.replace('#', &key).replace("LIMIT!", limit));
            assert!(!matches!(reply, Value::ServerError(_) | Value::Nil), "{line}: {reply:?}");
            assert_eq!(expiring(&mut connection), 0, "{line} {limit}");
        }
    }
    let mut several = "LOCK.MACQUIRE 2 m n me LEASE 60000";
    connection.run(several).token();
    for _ in 0..2 {
        let_fields_expire(&mut connection, "m", 50_000);
        connection.run(several).token();
        assert_eq!(expiring(&mut connection), 0, "{several}");
        several = "LOCK.MACQUIRE 2 m n me LEASE 600000";
    }
    assert_same_locks(&mut servers);
    for server in &servers {
        assert_eq!(expiring(&mut server.raw()), 0, "primary, replica and log have no field expiry");
    }
}

#[test]
fn renewed_hold_outlives_expiry_of_its_fields() {
    let Some(servers) = with_field_expiry() else { return };
    let connection = servers[0].raw();
    let mut connection = Watched::over(connection, &servers[0]);
    for (key, limit) in [("mutex", ""), ("many", "SHARED")] {
        connection.run(&format!("LOCK.ACQUIRE {key} me LEASE 60000 {limit}")).token();
        let_fields_expire(&mut connection, key, 3000);
        connection.run(&format!("LOCK.RENEW {key} me LEASE 70000")).token();
        // Renewed after two seconds, to allow for a pause of the machine of two and a half.
        connection.run(&format!("LOCK.ACQUIRE {key}:watched me LEASE 6000 WATCHDOG {limit}")).token();
        let_fields_expire(&mut connection, &format!("{key}:watched"), 4500);
    }
    // An unrenewed field with a later expiry, by the server's own clock.
    connection.run("HSET other field value");
    connection.run("HPEXPIRE other 5000 FIELDS 1 field");
    until(SOON, "the fields would have expired", || connection.run("EXISTS other") == Value::Int(0));
    for key in ["mutex", "many", "mutex:watched", "many:watched"] {
        assert_eq!(owners(&mut connection, key), ["me"], "{key}");
        assert!(connection.run(&format!("LOCK.ACQUIRE {key} you")).is_null(), "{key}");
    }
}

/// The module removes the expiry of a mutex's fields once, and again after another client has written the key.
#[test]
fn renewal_removes_the_expiry_of_fields() {
    let Some(servers) = with_field_expiry() else { return };
    let mut connection = servers[0].raw();
    let expire = "HPEXPIRE key 60000 FIELDS 1 me";
    let of_another = "HPEXPIRE other 60000 FIELDS 1 me";
    let ways: [&[&str]; 8] = [
        &[expire],
        &["MULTI", expire, "EXEC"],
        &["EVAL redis.call('HPEXPIRE','key',60000,'FIELDS',1,'me') 0"],
        &["COPY key other", of_another, "RENAME other key"],
        &["COPY key other", of_another, "DEL key", "COPY other key"],
        &["COPY key key DB 1", "SELECT 1", expire, "SELECT 0", "SWAPDB 0 1"],
        &["COPY key key DB 1", "SELECT 1", expire, "SELECT 0", "DEL key", "SELECT 1", "MOVE key 0", "SELECT 0"],
        &[expire, "LOCK.ACQUIRE key me", expire, "LOCK.RELEASE key me", expire],
    ];
    for way in ways {
        connection.run("LOCK.ACQUIRE key me LEASE 60000").token();
        for _ in 0..2 {
            connection.run("LOCK.RENEW key me LEASE 70000").token();
        }
        for line in way {
            let reply = connection.run(line);
            assert!(!matches!(reply, Value::ServerError(_)), "{line}: {reply:?}");
        }
        let left = connection.run("HPTTL key FIELDS 1 me");
        assert!(matches!(left.items(), [Value::Int(1..)]), "{way:?}: {left:?}");
        connection.run("LOCK.RENEW key me LEASE 80000").token();
        let left = connection.run("HPTTL key FIELDS 2 me #fence");
        assert_eq!(left.items(), [Value::Int(-1), Value::Int(-1)], "{way:?}");
        connection.run("FLUSHALL");
    }
}

#[test]
fn holder_stays_when_limit_field_expires() {
    let Some(servers) = with_field_expiry() else { return };
    let mut connection = servers[0].raw();
    connection.run("LOCK.ACQUIRE key me SHARED LEASE 60000").token();
    let_fields_expire(&mut connection, "key", 300);
    connection.run("LOCK.ACQUIRE key you SHARED LEASE 60000").token();
    connection.run("HSET other field value");
    connection.run("HPEXPIRE other 1000 FIELDS 1 field");
    until(SOON, "the fields would have expired", || connection.run("EXISTS other") == Value::Int(0));
    assert_eq!(owners(&mut connection, "key"), ["you"]);
    assert_eq!(connection.run("LOCK.INFO key").field("limit"), Value::Int(0));
    connection.run("LOCK.RENEW key you").token();
    assert!(connection.run("LOCK.ACQUIRE key strict").is_null());
}

#[test]
fn expired_field_is_not_renewed() {
    let Some(servers) = with_field_expiry() else { return };
    let mut connection = servers[0].raw();
    for limit in ["", "SHARED"] {
        connection.run("FLUSHALL");
        connection.run(&format!("LOCK.ACQUIRE key me LEASE 60000 {limit}")).token();
        connection.run(&format!("LOCK.ACQUIRE key you LEASE 60000 {limit}"));
        connection.run("HPEXPIRE key 1 FIELDS 1 me");
        until(SOON, "the field is gone", || connection.run("HGET key me").is_null());
        for line in ["LOCK.RENEW key me", "LOCK.RENEW key me LEASE 1000", "LOCK.RELEASE key me"] {
            assert!(connection.run(line).is_null(), "{line} {limit}");
        }
    }
}

/// A hash without owner fields is a free lock only if all its fields are the module's own.
#[test]
fn foreign_hash_is_no_lock_and_stays() {
    let server = Server::start();
    let mut connection = server.raw();
    let hashes = [
        "#red 1 #blue 2",
        "#fence 7 #red 1",
        "#limit 3 #red 1",
        "#@home x",
        "#@#x 1:1",
        "#",
        "#fence 7 #limit 0 #@o 1:1 #x y",
    ];
    for (number, fields) in hashes.iter().enumerate() {
        let key = format!("tags:{number}");
        let line = if *fields == "#" { format!("HSET {key} # 1") } else { format!("HSET {key} {fields}") };
        connection.run(&line).int();
        let before = Contents::read(&mut connection);
        for request in ["LOCK.ACQUIRE # a", "LOCK.ACQUIRE # a SHARED", "LOCK.MACQUIRE 2 # other a", "LOCK.FORCE #"] {
            let error = connection.run(&request.replace('#', &key)).error();
            assert!(error.starts_with("WRONGTYPE"), "{fields}: {request}: {error}");
        }
        assert_eq!(Contents::read(&mut connection), before, "{fields}");
    }
    for (number, fields) in ["#fence 7", "#limit 0", "#fence 7 #limit 0 #@o 1800000000000:7"].iter().enumerate() {
        connection.run(&format!("HSET left:{number} {fields}")).int();
        connection.run(&format!("LOCK.ACQUIRE left:{number} a")).token();
        assert_eq!(fields_of(&mut connection, &format!("left:{number}")), ["#fence", "a"]);
    }
    // Beside an owner field, such fields are ignored.
    connection.run("HSET held o 1 #red 1").int();
    assert!(connection.run("LOCK.ACQUIRE held a").is_null());
}

fn fields_of(connection: &mut Raw, key: &str) -> Vec<String> {
    let mut names: Vec<String> = connection.run(&format!("HKEYS {key}")).items().iter().map(Reply::text).collect();
    names.sort();
    names
}
