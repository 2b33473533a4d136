//! `WAITED`: a request that waited elsewhere is placed in the queue as if it had arrived that much earlier.

use redis::Value;
use support::{Raw, Server, until};

use crate::lines::{Commands, Reply, SOON, arrives, holders, waiters};

/// Sends a request that waits over a connection of its own.
fn waits(server: &Server, line: &str) -> Raw {
    let mut raw = server.raw();
    assert_eq!(raw.begin(line), None, "{line}");
    raw
}

/// A server with a holder of `key`.
fn held() -> (Server, Raw) {
    let server = Server::start();
    let mut viewer = server.raw();
    viewer.run("LOCK.ACQUIRE key holder LEASE 600000").token();
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
    viewer.run("LOCK.FORCE key");
    for owner in order {
        let place = asked.iter().position(|(it, _)| *it == owner).unwrap();
        arrives(&mut clients[place]).token();
        assert_eq!(viewer.run(&format!("LOCK.RELEASE key {owner}")), Value::Int(1));
    }
}

/// The same for a request for several keys.
#[test]
fn waited_counts_in_all_queues() {
    let server = Server::start();
    let mut viewer = server.raw();
    viewer.run("LOCK.MACQUIRE 3 a b c holder LEASE 600000").token();
    let mut first = waits(&server, "LOCK.ACQUIRE a first WAIT 0");
    let _second = waits(&server, "LOCK.MACQUIRE 2 b c second WAIT 0");
    let mut third = waits(&server, "LOCK.MACQUIRE 3 a b c third LEASE 600000 WAIT 0 WAITED 30000");
    for (key, order) in [("a", ["third", "first"]), ("b", ["third", "second"]), ("c", ["third", "second"])] {
        assert_eq!(waiters(&mut viewer, key), order, "{key}");
    }
    viewer.run("LOCK.MRELEASE 3 a b c holder");
    arrives(&mut third).token();
    viewer.run("LOCK.MRELEASE 3 c b a third");
    arrives(&mut first).token();
}

/// And the remaining time.
#[test]
fn lock_waiters_shows_total_waited_time() {
    let (server, mut viewer) = held();
    let _ordinary = waits(&server, "LOCK.ACQUIRE key ordinary WAIT 0");
    let _claims = waits(&server, "LOCK.ACQUIRE key claims WAIT 30000 WAITED 25000");
    let all = viewer.run("LOCK.WAITERS key");
    let [claims, ordinary] = all.items() else { panic!("{all:?}") };
    assert_eq!(claims.field("owner").text(), "claims");
    assert!((25_000..30_000).contains(&claims.field("waited").int()), "{claims:?}");
    assert!((25_001..=30_000).contains(&claims.field("remaining").int()), "{claims:?}");
    assert!(ordinary.field("waited").int() < 5_000, "{ordinary:?}");
    let top = viewer.run("LOCK.TOP");
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
    assert_eq!(waiters(&mut viewer, "key"), ["a", "b"], "the default limit is a day");
    assert_eq!(viewer.run("CONFIG SET holdfast.max-waited 0"), Value::Okay);
    let _c = ask("c", 60_000);
    assert_eq!(waiters(&mut viewer, "key"), ["a", "b", "c"], "nothing");
    assert_eq!(viewer.run("CONFIG SET holdfast.max-waited 3600000"), Value::Okay);
    let _d = ask("d", 3_600_000);
    assert_eq!(waiters(&mut viewer, "key"), ["a", "b", "d", "c"]);
}

#[test]
fn invalid_waited_is_refused() {
    let server = Server::start();
    let mut connection = server.raw();
    for line in ["LOCK.ACQUIRE key owner WAITED 5", "LOCK.MACQUIRE 2 a b owner WAITED 5"] {
        let error = connection.run(line).error();
        assert!(error.starts_with("ERR WAITED") && error.contains("WAIT"), "{line}: {error}");
    }
    for bad in ["-1", "x", "", "1.5", "315360000001"] {
        let request: [&[u8]; 7] = [b"LOCK.ACQUIRE", b"key", b"owner", b"WAIT", b"0", b"WAITED", bad.as_bytes()];
        let error = connection.call(&request).error();
        assert!(error.starts_with("ERR WAITED must be between 0 and 315360000000"), "{bad}: {error}");
    }
    assert!(connection.run("LOCK.RENEW key owner WAITED 5").error().starts_with("ERR"));
    assert_eq!(connection.run("DBSIZE"), Value::Int(0));
}

/// The head of the queue also waits for another key. The earlier request is granted, because the lock is free.
#[test]
fn waited_request_ahead_of_head_is_granted() {
    let server = Server::start();
    let mut viewer = server.raw();
    viewer.run("LOCK.ACQUIRE taken holder LEASE 600000").token();
    let mut several = waits(&server, "LOCK.MACQUIRE 2 free taken several LEASE 600000 WAIT 0");
    let mut other = server.raw();
    assert!(viewer.run("LOCK.ACQUIRE free owner").is_null(), "it would overtake");
    other.send_line("LOCK.ACQUIRE free owner LEASE 2500 WAIT 0 WAITED 5000");
    let token = arrives(&mut other).token();
    assert_eq!(holders(&mut viewer, "free")["owner"].field("token").int(), token);
    assert_eq!(viewer.run("LOCK.RELEASE taken holder"), Value::Int(1));
    // The lock had no waiter when its lease began, but its expiry is noticed.
    arrives(&mut several).token();
    // It can't be granted all keys, but it is the first in their queues.
    viewer.run("FLUSHALL");
    viewer.run("LOCK.ACQUIRE taken holder LEASE 600000").token();
    let _behind = waits(&server, "LOCK.MACQUIRE 2 taken free behind LEASE 600000 WAIT 0");
    let mut both = waits(&server, "LOCK.MACQUIRE 2 free taken both LEASE 600000 WAIT 0 WAITED 5000");
    assert_eq!(viewer.run("LOCK.FORCE taken"), Value::Int(1));
    arrives(&mut both).token();
    assert_eq!(waiters(&mut viewer, "free"), ["behind"]);
}

/// N overtakes H: then H waits for N, which waits for a lock of H.
#[test]
fn cycle_search_sees_waited_request_in_its_position() {
    let server = Server::start();
    let (mut h, mut y) = (server.raw(), server.raw());
    h.run("LOCK.ACQUIRE a H LEASE 600000").token();
    y.run("LOCK.ACQUIRE b Y LEASE 600000").token();
    let _waiting = waits(&server, "LOCK.ACQUIRE b H LEASE 600000 WAIT 60000");
    let mut n = server.raw();
    let error = n.begin("LOCK.MACQUIRE 2 a b N LEASE 600000 WAIT 60000 WAITED 60000").expect("an answer").error();
    assert!(error.starts_with("DEADLOCK owner 'N' waits for 'a' held by 'H'"), "{error}");
    assert!(error.contains("owner 'H' waits for 'b' waited for ahead of it by 'N'"), "{error}");
    // Behind H, it waits for H only.
    assert_eq!(n.begin("LOCK.MACQUIRE 2 a b N LEASE 600000 WAIT 60000"), None);
    assert_eq!(waiters(&mut h, "b"), ["H", "N"]);
    y.run("LOCK.RELEASE b Y");
    until(SOON, "H holds b", || holders(&mut h, "b").contains_key("H"));
}

/// A client closes a session and repeats its request.
#[test]
fn repeated_request_keeps_its_position() {
    let (server, mut viewer) = held();
    let lost = waits(&server, "LOCK.ACQUIRE key mine LEASE 600000 WAIT 0");
    let _later = waits(&server, "LOCK.ACQUIRE key later LEASE 600000 WAIT 0");
    until(SOON, "some time has passed", || viewer.run("LOCK.WAITERS key").items()[1].field("waited").int() >= 20);
    let waited = viewer.run("LOCK.WAITERS key").items()[0].field("waited").int();
    lost.reset();
    until(SOON, "the old request has left the queue", || waiters(&mut viewer, "key") == ["later"]);
    let mut again = waits(&server, &format!("LOCK.ACQUIRE key mine LEASE 600000 WAIT 0 WAITED {}", waited + 10_000));
    assert_eq!(waiters(&mut viewer, "key"), ["mine", "later"]);
    viewer.run("LOCK.FORCE key");
    arrives(&mut again).token();
}

/// In transactions and scripts both options are ignored: the request is the last in the queue.
#[test]
fn waited_is_ignored_where_nothing_blocks() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE taken holder LEASE 600000").token();
    let _several = waits(&server, "LOCK.MACQUIRE 2 free taken several WAIT 0");
    connection.run("MULTI");
    connection.run("LOCK.ACQUIRE free owner WAIT 0 WAITED 5000");
    connection.run("LOCK.ACQUIRE other owner WAIT 0 WAITED 5000");
    let replies = connection.run("EXEC");
    assert!(replies.items()[0].is_null());
    replies.items()[1].token();
}
