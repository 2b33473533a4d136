//! `WAITED`: a request that waited elsewhere takes the place of one that arrived that much earlier.

use redis::Value;
use support::{Raw, Server, until};

use crate::speak::{Reply, SOON, Speak, arrives, holders, waiters};

/// Lets a request wait on a connection of its own.
fn waits(server: &Server, line: &str) -> Raw {
    let mut raw = server.raw();
    assert_eq!(raw.begin(line), None, "{line}");
    raw
}

/// A server on which somebody holds `key`.
fn held() -> (Server, Raw) {
    let server = Server::start();
    let mut viewer = server.raw();
    viewer.say("LOCK.ACQUIRE key holder LEASE 600000").token();
    (server, viewer)
}

#[test]
fn waited_requests_are_ordered_by_claimed_arrival() {
    let (server, mut viewer) = held();
    let asked = [("a", 0), ("b", 20_000), ("c", 40_000), ("d", 20_000), ("e", 0), ("f", 50_000)];
    let mut clients: Vec<Raw> = asked
        .iter()
        .map(|(owner, waited)| waits(&server, &format!("LOCK.ACQUIRE key {owner} LEASE 600000 WAIT 0 WAITED {waited}")))
        .collect();
    let order = ["f", "c", "b", "d", "a", "e"];
    assert_eq!(waiters(&mut viewer, "key"), order);
    viewer.say("LOCK.FORCE key");
    for owner in order {
        let place = asked.iter().position(|(it, _)| *it == owner).unwrap();
        arrives(&mut clients[place]).token();
        assert_eq!(viewer.say(&format!("LOCK.RELEASE key {owner}")), Value::Int(1));
    }
}

/// Also for a request for several keys.
#[test]
fn waited_counts_in_all_queues() {
    let server = Server::start();
    let mut viewer = server.raw();
    viewer.say("LOCK.MACQUIRE 3 a b c holder LEASE 600000").token();
    let mut first = waits(&server, "LOCK.ACQUIRE a first WAIT 0");
    let _second = waits(&server, "LOCK.MACQUIRE 2 b c second WAIT 0");
    let mut third = waits(&server, "LOCK.MACQUIRE 3 a b c third LEASE 600000 WAIT 0 WAITED 30000");
    for (key, order) in [("a", ["third", "first"]), ("b", ["third", "second"]), ("c", ["third", "second"])] {
        assert_eq!(waiters(&mut viewer, key), order, "{key}");
    }
    viewer.say("LOCK.MRELEASE 3 a b c holder");
    arrives(&mut third).token();
    viewer.say("LOCK.MRELEASE 3 c b a third");
    arrives(&mut first).token();
}

/// And the remaining time.
#[test]
fn lock_waiters_shows_total_waited_time() {
    let (server, mut viewer) = held();
    let _ordinary = waits(&server, "LOCK.ACQUIRE key ordinary WAIT 0");
    let _claims = waits(&server, "LOCK.ACQUIRE key claims WAIT 30000 WAITED 25000");
    let all = viewer.say("LOCK.WAITERS key");
    let [claims, ordinary] = all.items() else { panic!("{all:?}") };
    assert_eq!(claims.field("owner").text(), "claims");
    assert!((25_000..30_000).contains(&claims.field("waited").int()), "{claims:?}");
    assert!((25_001..=30_000).contains(&claims.field("remaining").int()), "{claims:?}");
    assert!(ordinary.field("waited").int() < 5_000, "{ordinary:?}");
    let top = viewer.say("LOCK.TOP");
    assert!((25_000..30_000).contains(&top.items()[0].field("oldest").int()), "{top:?}");
    let oldest: u64 = server.info("holdfast", "holdfast_oldest_wait_msec").unwrap().parse().unwrap();
    assert!((25_000..30_000).contains(&oldest), "{oldest}");
}

#[test]
fn setting_bounds_waited() {
    let (server, mut viewer) = held();
    let ask = |owner: &str, waited: u64| waits(&server, &format!("LOCK.ACQUIRE key {owner} WAIT 0 WAITED {waited}"));
    let _a = ask("a", 86_400_000);
    let _b = ask("b", 315_360_000_000);
    assert_eq!(waiters(&mut viewer, "key"), ["a", "b"], "a day, unless it is set");
    assert_eq!(viewer.say("CONFIG SET holdfast.max-waited 0"), Value::Okay);
    let _c = ask("c", 60_000);
    assert_eq!(waiters(&mut viewer, "key"), ["a", "b", "c"], "nothing");
    assert_eq!(viewer.say("CONFIG SET holdfast.max-waited 3600000"), Value::Okay);
    let _d = ask("d", 3_600_000);
    assert_eq!(waiters(&mut viewer, "key"), ["a", "b", "d", "c"]);
}

#[test]
fn invalid_waited_is_refused() {
    let server = Server::start();
    let mut connection = server.raw();
    for line in ["LOCK.ACQUIRE key owner WAITED 5", "LOCK.MACQUIRE 2 a b owner WAITED 5"] {
        let error = connection.say(line).error();
        assert!(error.starts_with("ERR WAITED") && error.contains("WAIT"), "{line}: {error}");
    }
    for bad in ["-1", "x", "", "1.5", "315360000001"] {
        let request: [&[u8]; 7] = [b"LOCK.ACQUIRE", b"key", b"owner", b"WAIT", b"0", b"WAITED", bad.as_bytes()];
        let error = connection.call(&request).error();
        assert!(error.starts_with("ERR WAITED must be between 0 and 315360000000"), "{bad}: {error}");
    }
    assert!(connection.say("LOCK.RENEW key owner WAITED 5").error().starts_with("ERR"));
    assert_eq!(connection.say("DBSIZE"), Value::Int(0));
}

/// The first in the queue also waits for another key; the earlier request need not, because the lock is free.
#[test]
fn waited_request_ahead_of_head_is_granted() {
    let server = Server::start();
    let mut viewer = server.raw();
    viewer.say("LOCK.ACQUIRE taken holder LEASE 600000").token();
    let mut several = waits(&server, "LOCK.MACQUIRE 2 free taken several LEASE 600000 WAIT 0");
    let mut other = server.raw();
    assert!(viewer.say("LOCK.ACQUIRE free owner").is_null(), "it would overtake");
    other.post("LOCK.ACQUIRE free owner LEASE 200 WAIT 0 WAITED 5000");
    let token = arrives(&mut other).token();
    assert_eq!(holders(&mut viewer, "free")["owner"].field("token").int(), token);
    assert_eq!(viewer.say("LOCK.RELEASE taken holder"), Value::Int(1));
    // Its lease is looked after although nobody waited for it when the others began to.
    arrives(&mut several).token();
    // Where it can't have all, it stands first all the same.
    viewer.say("FLUSHALL");
    viewer.say("LOCK.ACQUIRE taken holder LEASE 600000").token();
    let _behind = waits(&server, "LOCK.MACQUIRE 2 taken free behind LEASE 600000 WAIT 0");
    let mut both = waits(&server, "LOCK.MACQUIRE 2 free taken both LEASE 600000 WAIT 0 WAITED 5000");
    assert_eq!(viewer.say("LOCK.FORCE taken"), Value::Int(1));
    arrives(&mut both).token();
    assert_eq!(waiters(&mut viewer, "free"), ["behind"]);
}

/// N overtakes H: then H waits for N, which waits for a lock of H.
#[test]
fn cycle_search_sees_waited_request_in_its_position() {
    let server = Server::start();
    let (mut h, mut y) = (server.raw(), server.raw());
    h.say("LOCK.ACQUIRE a H LEASE 600000").token();
    y.say("LOCK.ACQUIRE b Y LEASE 600000").token();
    let _waiting = waits(&server, "LOCK.ACQUIRE b H LEASE 600000 WAIT 60000");
    let mut n = server.raw();
    let error = n.begin("LOCK.MACQUIRE 2 a b N LEASE 600000 WAIT 60000 WAITED 60000").expect("an answer").error();
    assert!(error.starts_with("DEADLOCK owner 'N' waits for 'a' held by 'H'"), "{error}");
    assert!(error.contains("owner 'H' waits for 'b' waited for ahead of it by 'N'"), "{error}");
    // Behind it, it waits for H alone.
    assert_eq!(n.begin("LOCK.MACQUIRE 2 a b N LEASE 600000 WAIT 60000"), None);
    assert_eq!(waiters(&mut h, "b"), ["H", "N"]);
    y.say("LOCK.RELEASE b Y");
    until(SOON, "H has it", || holders(&mut h, "b").contains_key("H"));
}

/// A client that closes a session and requests again.
#[test]
fn repeated_request_keeps_its_position() {
    let (server, mut viewer) = held();
    let lost = waits(&server, "LOCK.ACQUIRE key mine LEASE 600000 WAIT 0");
    let _later = waits(&server, "LOCK.ACQUIRE key later LEASE 600000 WAIT 0");
    until(SOON, "some time has passed", || viewer.say("LOCK.WAITERS key").items()[1].field("waited").int() >= 20);
    let waited = viewer.say("LOCK.WAITERS key").items()[0].field("waited").int();
    lost.reset();
    until(SOON, "it has left", || waiters(&mut viewer, "key") == ["later"]);
    let mut again = waits(&server, &format!("LOCK.ACQUIRE key mine LEASE 600000 WAIT 0 WAITED {}", waited + 10_000));
    assert_eq!(waiters(&mut viewer, "key"), ["mine", "later"]);
    viewer.say("LOCK.FORCE key");
    arrives(&mut again).token();
}

/// Where nothing blocks, both words are ignored: it stands last.
#[test]
fn waited_is_ignored_where_nothing_blocks() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.say("LOCK.ACQUIRE taken holder LEASE 600000").token();
    let _several = waits(&server, "LOCK.MACQUIRE 2 free taken several WAIT 0");
    connection.say("MULTI");
    connection.say("LOCK.ACQUIRE free owner WAIT 0 WAITED 5000");
    connection.say("LOCK.ACQUIRE other owner WAIT 0 WAITED 5000");
    let replies = connection.say("EXEC");
    assert!(replies.items()[0].is_null());
    replies.items()[1].token();
}
