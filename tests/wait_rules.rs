//! The rules of waiting: which request is granted, when the lease begins, which requests do not wait, and what clients
//! can read of the queue.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::Value;
use support::{Raw, Server, eventually, until};

use crate::common::{Bytes, array, bytes, deadline, error, info_number, int, map};
use crate::waiter::{Commands, SOON, Waiter, assert_held, count_waiters, holders_in_hash, until_no_waiters};

/// Long enough to notice an unexpected reply.
const A_WHILE: Duration = Duration::from_millis(50);

/// A server whose lock `key` is held by `holder`.
fn held() -> (Server, Raw, i64) {
    let server = Server::start();
    let mut client = server.raw();
    let held = client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    (server, client, held)
}

#[test]
fn waiters_are_granted_in_order_of_arrival() {
    let (server, mut client, mut token) = held();
    let mut queue: Vec<Waiter> =
        (0..50).map(|number| Waiter::start(&server, "key", &format!("waiter-{number}"))).collect();
    let mut holder = "holder".to_owned();
    for number in 0..queue.len() {
        assert!(queue[number..].iter_mut().all(Waiter::waits), "the others still wait");
        assert_eq!(client.run(&format!("LOCK.RELEASE key {holder} TOKEN {token}")), Value::Int(1));
        let next = queue[number].token();
        assert!(next > token);
        (holder, token) = (format!("waiter-{number}"), next);
        assert_held(&mut client, "key", &holder);
    }
    until_no_waiters(&server);
}

#[test]
fn each_key_and_database_has_its_own_queue() {
    let (server, mut client, _) = held();
    client.get_token("LOCK.ACQUIRE other holder LEASE 60000");
    let mut elsewhere = server.raw();
    elsewhere.run_ok("SELECT 1");
    elsewhere.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut here = Waiter::start(&server, "key", "waiter");
    let mut other = Waiter::start(&server, "other", "waiter");
    let mut there = {
        let mut raw = server.raw();
        raw.run_ok("SELECT 1");
        Waiter::on(raw, &server, "LOCK.ACQUIRE key waiter WAIT 0")
    };
    elsewhere.run_ok("LOCK.RELEASE key holder");
    there.token();
    assert!(here.waits() && other.waits());
    client.run_ok("LOCK.RELEASE other holder");
    other.token();
    assert!(here.waits());
    client.run_ok("LOCK.RELEASE key holder");
    here.token();
}

/// A client that releases and requests again immediately, even in one packet or transaction, queues behind the waiters.
#[test]
fn released_lock_goes_to_waiter_before_new_request() {
    let (server, mut client, _) = held();
    for round in 0..20 {
        let mut waiter = Waiter::start(&server, "key", "waiter");
        let (release, again) = match round % 2 {
            0 => {
                client.send_lines(&["LOCK.RELEASE key holder", "LOCK.ACQUIRE key holder"]);
                (client.read().unwrap(), client.read().unwrap())
            }
            _ => {
                client.send_lines(&["MULTI", "LOCK.RELEASE key holder", "LOCK.ACQUIRE key holder", "EXEC"]);
                let replies: Vec<Value> = (0..4).map(|_| client.read().unwrap()).collect();
                let executed = array(&replies[3]);
                (executed[0].clone(), executed[1].clone())
            }
        };
        assert_eq!((release, again), (Value::Int(1), Value::Nil), "round {round}");
        waiter.token();
        assert_held(&mut client, "key", "waiter");
        client.run_ok("LOCK.RELEASE key waiter");
        client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    }
}

/// The same if another command deleted the key.
#[test]
fn deleted_lock_goes_to_waiter_before_new_request() {
    let (server, mut client, _) = held();
    for commands in [
        ["DEL key", "LOCK.ACQUIRE key newcomer"],
        ["PEXPIRE key 0", "LOCK.ACQUIRE key newcomer SHARED"],
        ["RENAME key elsewhere", "LOCK.ACQUIRE key newcomer LIMIT 5"],
    ] {
        for transaction in [false, true] {
            let mut waiter = Waiter::start(&server, "key", "waiter");
            if transaction {
                client.send_lines(&["MULTI", commands[0], commands[1], "EXEC"]);
                let replies: Vec<Value> = (0..4).map(|_| client.read().unwrap()).collect();
                assert_eq!(array(&replies[3])[1], Value::Nil, "{commands:?} in a transaction");
            } else {
                client.send_lines(&commands);
                client.read().unwrap();
                assert_eq!(client.read().unwrap(), Value::Nil, "{commands:?}");
            }
            waiter.token();
            assert_held(&mut client, "key", "waiter");
            client.run_ok("LOCK.RELEASE key waiter");
            client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
        }
    }
}

#[test]
fn new_request_queues_behind_unserved_waiter() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key reader SHARED LEASE 60000");
    let mut writer = Waiter::start(&server, "key", "writer");
    assert_eq!(client.run("LOCK.ACQUIRE key newcomer SHARED"), Value::Nil, "the writer is ahead");
    let mut second = Waiter::sending(&server, "LOCK.ACQUIRE key second SHARED WAIT 0");
    let mut third = Waiter::sending(&server, "LOCK.ACQUIRE key third SHARED WAIT 0");
    let mut last = Waiter::start(&server, "key", "last");
    client.run_ok("LOCK.RELEASE key reader");
    writer.token();
    assert!(second.waits() && third.waits());
    client.run_ok("LOCK.RELEASE key writer");
    assert!(second.token() < third.token(), "in the order of the queue");
    assert!(last.waits());
    let names: Vec<String> = holders_in_hash(&mut client, "key").into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["second", "third"]);
}

#[test]
fn lease_starts_at_grant() {
    let (server, mut client, _) = held();
    let mut waiter = Waiter::sending(&server, "LOCK.ACQUIRE key waiter LEASE 600000 WAIT 0");
    assert!(!eventually(Duration::from_millis(300), || !waiter.waits()));
    client.run_ok("LOCK.RELEASE key holder");
    let granted = waiter.token();
    assert_eq!(deadline(&mut client, b"key") - granted / 1000, 600_000, "ms from the grant on");
}

#[test]
fn request_without_wait_does_not_wait() {
    let (server, mut client, _) = held();
    assert_eq!(client.run("LOCK.ACQUIRE key newcomer"), Value::Nil);
    assert_eq!(client.run("LOCK.ACQUIRE key newcomer LIMIT 2"), Value::Nil);
    assert_eq!(count_waiters(&mut client, "key"), 0);
    until_no_waiters(&server);
}

#[test]
fn free_lock_is_granted_immediately_with_wait() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key reader SHARED WAIT 0");
    client.get_token("LOCK.ACQUIRE key second SHARED WAIT 1");
    client.get_token("LOCK.ACQUIRE free holder WAIT 0");
}

#[test]
fn request_does_not_wait_in_transaction() {
    let (server, mut client, _) = held();
    client.send_lines(&[
        "MULTI",
        "LOCK.ACQUIRE key newcomer WAIT 0",
        "LOCK.MACQUIRE 2 free key newcomer WAIT 0",
        "EXEC",
    ]);
    for _ in 0..3 {
        client.read().unwrap();
    }
    assert_eq!(client.read().unwrap(), Value::Array(vec![Value::Nil, Value::Nil]));
    assert_eq!(count_waiters(&mut client, "key"), 0);
    until_no_waiters(&server);
}

#[test]
fn request_does_not_wait_in_script() {
    let (server, mut client, _) = held();
    let script = b"return {redis.call('LOCK.ACQUIRE', KEYS[1], 'newcomer', 'WAIT', '0'), 'went on'}";
    let reply = client.call(&[b"EVAL", script, b"1", b"key"]);
    assert_eq!(reply, Value::Array(vec![Value::Nil, Value::BulkString(b"went on".into())]));
    assert_eq!(count_waiters(&mut client, "key"), 0);
    until_no_waiters(&server);
}

#[test]
fn script_acquires_free_lock() {
    let server = Server::start();
    let mut client = server.raw();
    let script = b"return redis.call('LOCK.ACQUIRE', KEYS[1], 'script', 'WAIT', '0')";
    assert!(int(&client.call(&[b"EVAL", script, b"1", b"key"])) > 0);
    assert_held(&mut client, "key", "script");
}

/// Commands behind a waiting one in a pipeline run after it.
#[test]
fn pipeline_keeps_its_order() {
    let (server, mut client, _) = held();
    let mut waiter = server.raw();
    let id = waiter.client_id();
    waiter.send_lines(&[
        "ECHO before",
        "LOCK.ACQUIRE key waiter WAIT 0",
        "LOCK.RELEASE key waiter",
        "LOCK.ACQUIRE key waiter WAIT 0",
        "CLIENT ID",
    ]);
    assert_eq!(waiter.read().unwrap(), Value::BulkString(b"before".into()));
    assert!(!eventually(A_WHILE, || !waiter.pending()), "later commands wait");
    let mut behind = Waiter::start(&server, "key", "behind");
    client.run_ok("LOCK.RELEASE key holder");
    let first = int(&waiter.read().unwrap());
    assert_eq!(waiter.read().unwrap(), Value::Int(1));
    let between = behind.token();
    assert!(waiter.pending(), "its second request is queued like any other");
    client.run_ok("LOCK.RELEASE key behind");
    let second = int(&waiter.read().unwrap());
    assert!(first < between && between < second);
    assert_eq!(waiter.read().unwrap(), Value::Int(id));
}

mod same_owner {
    use super::*;

    #[test]
    fn owner_reenters_while_others_wait() {
        let (server, mut client, token) = held();
        let mut waiter = Waiter::start(&server, "key", "waiter");
        assert_eq!(client.run("LOCK.ACQUIRE key holder WAIT 0"), Value::Int(token));
        assert_eq!(server.raw().run("LOCK.ACQUIRE key holder"), Value::Int(token), "from any connection");
        assert_eq!(holders_in_hash(&mut client, "key"), [("holder".to_owned(), "3".to_owned())]);
        assert!(waiter.waits());
    }

    /// The last request of an owner takes over the position of its first.
    #[test]
    fn owner_is_granted_over_its_last_connection() {
        let (server, mut client, _) = held();
        let mut one = Waiter::start(&server, "key", "twice");
        let mut between = Waiter::start(&server, "key", "between");
        let mut two = Waiter::start(&server, "key", "twice");
        assert_eq!(one.error(), "SUPERSEDED");
        client.run_ok("LOCK.RELEASE key holder");
        let token = two.token();
        assert_held(&mut client, "key", "twice");
        assert!(between.waits());
        assert_eq!(client.run("LOCK.ACQUIRE key twice WAIT 0"), Value::Int(token), "one hold, one token");
        assert_eq!(client.run("LOCK.RELEASE key twice"), Value::Int(0));
        assert!(!eventually(A_WHILE, || !between.waits()));
        assert_eq!(client.run("LOCK.RELEASE key twice"), Value::Int(1));
        between.token();
    }

    #[test]
    fn owner_names_hold_count() {
        let (server, mut client, _) = held();
        let line = "LOCK.ACQUIRE key twice WAIT 0 HOLDS 1";
        let mut one = Waiter::sending(&server, line);
        let mut two = Waiter::sending(&server, line);
        assert_eq!(one.error(), "SUPERSEDED");
        client.run_ok("LOCK.RELEASE key holder");
        let token = two.token();
        assert_eq!(client.run(line), Value::Int(token), "a repetition, once the other has its reply");
        assert_held(&mut client, "key", "twice");
    }

    /// A hundred connections of one owner: each takes over the position of the previous one.
    #[test]
    fn owner_is_granted_once_for_repeated_requests() {
        let (server, mut client, _) = held();
        let mut waiters: Vec<Waiter> = (0..100).map(|_| Waiter::start(&server, "key", "many")).collect();
        let mut last = Waiter::start(&server, "key", "last");
        client.run_ok("LOCK.RELEASE key holder");
        waiters.pop().expect("a hundred").token();
        waiters.iter_mut().for_each(|waiter| assert_eq!(waiter.error(), "SUPERSEDED"));
        assert_eq!(holders_in_hash(&mut client, "key"), [("many".to_owned(), "1".to_owned())]);
        assert!(last.waits());
        client.run_ok("LOCK.RELEASE key many ALL");
        last.token();
    }

    /// The owner waits, and acquires the lock over another connection: the waiting request re-enters.
    #[test]
    fn waiting_owner_reenters_when_it_acquires_elsewhere() {
        let (server, mut client, _) = held();
        let mut first = Waiter::start(&server, "key", "first");
        let mut waiter = Waiter::start(&server, "key", "waiter");
        for line in ["MULTI", "HDEL key holder", "HSET key waiter 1", "EXEC"] {
            client.run_ok(line);
        }
        waiter.token();
        assert_eq!(holders_in_hash(&mut client, "key"), [("waiter".to_owned(), "2".to_owned())]);
        assert!(first.waits());
    }
}

mod max_waiters {
    use super::*;

    #[test]
    fn max_waiters_refuses_further_waits() {
        let (server, mut client, token) = held();
        client.run_ok("CONFIG SET holdfast.max-waiters 2");
        client.get_token("LOCK.ACQUIRE other holder LEASE 60000");
        let mut first = Waiter::start(&server, "key", "first");
        let mut second = Waiter::start(&server, "key", "second");
        let refused = client.run("LOCK.ACQUIRE key third WAIT 0");
        assert_eq!(error(&refused).0, "ERR");
        assert!(error(&refused).1.contains("too many waiters"), "{refused:?}");
        assert_eq!(client.run("LOCK.ACQUIRE key third"), Value::Nil, "who does not wait is not one too many");
        assert_eq!(client.run("LOCK.ACQUIRE key holder WAIT 0"), Value::Int(token), "nor is a re-entry");
        assert_eq!(count_waiters(&mut client, "key"), 2);
        let mut elsewhere = Waiter::start(&server, "other", "third");
        client.run_ok("LOCK.RELEASE key holder ALL");
        first.token();
        let mut third = Waiter::start(&server, "key", "third");
        client.run_ok("LOCK.RELEASE key first");
        second.token();
        client.run_ok("LOCK.RELEASE key second");
        third.token();
        assert!(elsewhere.waits());
    }

    #[test]
    fn lowered_max_waiters_ends_no_wait() {
        let (server, mut client, _) = held();
        let mut first = Waiter::start(&server, "key", "first");
        let mut second = Waiter::start(&server, "key", "second");
        client.run_ok("CONFIG SET holdfast.max-waiters 1");
        assert_eq!(error(&client.run("LOCK.ACQUIRE key third WAIT 0")).0, "ERR");
        client.run_ok("CONFIG SET holdfast.max-waiters 0");
        let mut third = Waiter::start(&server, "key", "third");
        client.run_ok("LOCK.RELEASE key holder");
        first.token();
        assert!(second.waits() && third.waits());
    }
}

mod sight {
    use super::*;

    fn maps(reply: &Value) -> Vec<BTreeMap<Bytes, Value>> {
        array(reply).iter().map(map).collect()
    }

    fn number(map: &BTreeMap<Bytes, Value>, name: &str) -> i64 {
        int(&map[name.as_bytes()])
    }

    fn both_protocols(server: &Server) -> [Raw; 2] {
        let mut new = server.raw();
        new.hello3();
        [server.raw(), new]
    }

    #[test]
    fn lock_waiters_lists_queue() {
        let (server, _client, _) = held();
        let odd: &[u8] = b"own\0er\r\n\xff";
        let first = {
            let mut raw = server.raw();
            let id = raw.client_id();
            raw.send(&[b"LOCK.ACQUIRE", b"key", odd, b"WAIT", b"0"]).unwrap();
            until(SOON, "the request waits", || count_waiters(&mut server.raw(), "key") == 1);
            Waiter { raw, id }
        };
        let second = Waiter::sending(&server, "LOCK.ACQUIRE key second WAIT 50000 LIMIT 3");
        let third = Waiter::sending(&server, "LOCK.ACQUIRE key third WAIT 0 SHARED");
        for mut client in both_protocols(&server) {
            until(SOON, "some time passes", || number(&maps(&client.run("LOCK.WAITERS key"))[2], "waited") > 0);
            let all = maps(&client.run("LOCK.WAITERS key"));
            let owners: Vec<&[u8]> = all.iter().map(|waiter| bytes(&waiter[b"owner".as_slice()])).collect();
            assert_eq!(owners, [odd, b"second", b"third"]);
            let ids: Vec<i64> = all.iter().map(|waiter| number(waiter, "client")).collect();
            assert_eq!(ids, [first.id, second.id, third.id]);
            let limits: Vec<i64> = all.iter().map(|waiter| number(waiter, "limit")).collect();
            assert_eq!(limits, [1, 3, 0], "0: no limit");
            let remaining: Vec<i64> = all.iter().map(|waiter| number(waiter, "remaining")).collect();
            assert_eq!((remaining[0], remaining[2]), (-1, -1));
            assert!((1..=50_000).contains(&remaining[1]), "{remaining:?}");
            let waited: Vec<i64> = all.iter().map(|waiter| number(waiter, "waited")).collect();
            assert!(waited[0] >= waited[1] && waited[1] >= waited[2] && waited[2] > 0, "{waited:?}");
            let two = maps(&client.run("LOCK.WAITERS key COUNT 2"));
            assert_eq!(two.iter().map(|waiter| number(waiter, "client")).collect::<Vec<_>>(), [first.id, second.id]);
            assert_eq!(maps(&client.run("LOCK.WAITERS key COUNT 100")).len(), 3);
            assert!(maps(&client.run("LOCK.WAITERS another")).is_empty());
            assert_eq!(count_waiters(&mut client, "key"), 3);
        }
    }

    #[test]
    fn lock_info_shows_waiters_of_free_key() {
        let server = Server::start();
        let mut client = server.raw();
        // The first request waits for its second key, and is queued for the first one, which is free.
        client.get_token("LOCK.ACQUIRE held holder LEASE 60000");
        let mut waiter = Waiter::sending(&server, "LOCK.MACQUIRE 2 free held waiter WAIT 0");
        assert_eq!(count_waiters(&mut client, "free"), 1);
        let info = map(&client.run("LOCK.INFO free"));
        assert!(array(&info[b"holders".as_slice()]).is_empty());
        client.run_ok("LOCK.RELEASE held holder");
        waiter.token();
        client.run_ok("LOCK.MRELEASE 2 free held waiter");
        assert_eq!(client.run("LOCK.INFO free"), Value::Nil);
    }

    #[test]
    fn lock_top_lists_contended_keys() {
        let (server, mut client, _) = held();
        client.get_token("LOCK.ACQUIRE busy one LEASE 60000 SHARED");
        client.get_token("LOCK.ACQUIRE busy two LEASE 60000 SHARED");
        client.get_token("LOCK.ACQUIRE quiet holder LEASE 60000");
        let mut kept: Vec<Waiter> =
            (0..3).map(|number| Waiter::start(&server, "busy", &format!("waiter-{number}"))).collect();
        kept.push(Waiter::start(&server, "key", "waiter"));
        for mut client in both_protocols(&server) {
            until(SOON, "some time passes", || number(&maps(&client.run("LOCK.TOP"))[1], "oldest") > 0);
            let top = maps(&client.run("LOCK.TOP"));
            let keys: Vec<&[u8]> = top.iter().map(|lock| bytes(&lock[b"key".as_slice()])).collect();
            assert_eq!(keys, [b"busy".as_slice(), b"key"], "most waiters first; no request waits for the third key");
            assert_eq!((number(&top[0], "waiters"), number(&top[1], "waiters")), (3, 1));
            assert!(number(&top[0], "oldest") >= number(&top[1], "oldest"));
            assert!((1..=60_000).contains(&number(&top[0], "ttl")));
            let mut holders: Vec<&[u8]> = array(&top[0][b"holders".as_slice()]).iter().map(bytes).collect();
            holders.sort_unstable();
            assert_eq!(holders, [b"one", b"two"]);
            assert_eq!(maps(&client.run("LOCK.TOP COUNT 1")).len(), 1);
            client.run_ok("SELECT 1");
            assert!(maps(&client.run("LOCK.TOP")).is_empty(), "of this database");
        }
        drop(kept);
        until_no_waiters(&server);
        assert!(maps(&client.run("LOCK.TOP")).is_empty());
    }

    #[test]
    fn lock_top_lists_ten_keys_by_default() {
        let server = Server::start();
        let mut client = server.raw();
        let mut kept = Vec::new();
        for key in 0..12 {
            client.get_token(&format!("LOCK.ACQUIRE key-{key} holder LEASE 60000"));
            kept.push(Waiter::start(&server, &format!("key-{key}"), "waiter"));
        }
        assert_eq!(array(&client.run("LOCK.TOP")).len(), 10);
        assert_eq!(array(&client.run("LOCK.TOP COUNT 12")).len(), 12);
    }

    #[test]
    fn info_counts_waiters() {
        let server = Server::start();
        let mut client = server.raw();
        let of = |field: &str| info_number(&server, "holdfast", &format!("holdfast_{field}"));
        client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
        client.get_token("LOCK.ACQUIRE other holder LEASE 60000");
        assert_eq!((of("grants_at_once"), of("grants_queued")), (2, 0));
        let mut first = Waiter::start(&server, "key", "first");
        let mut second = Waiter::start(&server, "key", "second");
        let mut third = Waiter::sending_briefly(&server, "LOCK.ACQUIRE other third WAIT 20");
        assert_eq!(third.end(), Value::Nil);
        let _third = Waiter::start(&server, "other", "third");
        assert_eq!((of("waiters"), of("contended_locks"), of("timeouts")), (3, 2, 1));
        assert!(!eventually(Duration::from_millis(100), || !first.waits()));
        client.run_ok("LOCK.RELEASE key holder");
        first.token();
        client.run_ok("LOCK.RELEASE key first");
        second.token();
        assert_eq!((of("grants_queued"), of("waiters"), of("contended_locks")), (2, 1, 1));
        for times in ["wait", "handoff"] {
            let quantiles = ["p50", "p99", "p999", "max"].map(|which| of(&format!("{times}_usec_{which}")));
            assert!(quantiles[0] > 0 && quantiles.is_sorted(), "{times}: {quantiles:?}");
        }
        assert!(of("wait_usec_p50") >= 100_000, "both have waited for longer");
    }
}
