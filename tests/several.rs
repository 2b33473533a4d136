//! Several locks in one command: `LOCK.MACQUIRE`, `LOCK.MRELEASE`, `LOCK.MRENEW`.

use std::collections::BTreeMap;

use redis::Value;
use support::{Cluster, Raw, Server, until};

use crate::common::Contents;
use crate::lines::{
    Commands, Reply, SOON, Watched, arrives, deadline, fields, holders, now, owners, until_gone, waiters,
};

#[test]
fn all_keys_are_granted_with_one_token() {
    let server = Server::start();
    let mut connection = server.raw();
    let token = connection.run("LOCK.MACQUIRE 3 a b c owner LEASE 60000").token();
    for key in ["a", "b", "c"] {
        let fields = fields(&mut connection, key.as_bytes());
        let expected = [(b"#fence".to_vec(), token.to_string().into_bytes()), (b"owner".to_vec(), b"1".to_vec())];
        assert_eq!(fields.into_iter().collect::<Vec<_>>(), expected, "{key}");
    }
    assert!(connection.run("LOCK.ACQUIRE d owner").token() > token);
}

#[test]
fn macquire_grants_all_or_none() {
    let server = Server::start();
    let mut connection = server.raw();
    for taken in ["a", "b", "c"] {
        connection.run(&format!("LOCK.ACQUIRE {taken} other")).token();
        assert!(connection.run("LOCK.MACQUIRE 3 a b c owner").is_null(), "{taken} is taken");
        assert_eq!(connection.run("DBSIZE"), Value::Int(1));
        assert_eq!(connection.run(&format!("LOCK.RELEASE {taken} other")), Value::Int(1));
    }
    connection.run("LOCK.MACQUIRE 3 a b c owner").token();
}

#[test]
fn key_of_other_type_leaves_other_keys_unchanged() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("SET text value");
    for line in ["LOCK.MACQUIRE 2 text a owner", "LOCK.MACQUIRE 2 a text owner WAIT 0"] {
        assert!(connection.run(line).error().starts_with("WRONGTYPE "));
        assert_eq!(connection.run("EXISTS a"), Value::Int(0));
    }
    connection.run("LOCK.ACQUIRE a owner").token();
    for line in ["LOCK.MRELEASE 2 a text owner", "LOCK.MRENEW 2 a text owner LEASE 5"] {
        let before = (fields(&mut connection, b"a"), deadline(&mut connection, "a"));
        assert!(connection.run(line).error().starts_with("WRONGTYPE "), "{line}");
        assert_eq!((fields(&mut connection, b"a"), deadline(&mut connection, "a")), before, "{line}");
    }
}

#[test]
fn key_with_other_limit_leaves_other_keys_unchanged() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE shared owner SHARED").token();
    for line in ["LOCK.MACQUIRE 2 shared a owner", "LOCK.MACQUIRE 2 a shared owner WAIT 0"] {
        assert!(connection.run(line).error().starts_with("ERR "), "{line}");
        assert_eq!(connection.run("EXISTS a"), Value::Int(0));
        assert_eq!(holders(&mut connection, "shared")["owner"].field("holds").int(), 1);
    }
    assert!(connection.run("LOCK.MACQUIRE 2 shared a other").is_null());
}

#[test]
fn invalid_requests_are_refused_and_change_nothing() {
    let server = Server::start();
    let mut connection = server.raw();
    let wrong = [
        "LOCK.MACQUIRE 2 a a owner",
        "LOCK.MACQUIRE 3 a b a owner WAIT 0",
        "LOCK.MACQUIRE 0 owner",
        "LOCK.MACQUIRE 0 a owner",
        "LOCK.MACQUIRE -1 a owner",
        "LOCK.MACQUIRE x a owner",
        "LOCK.MACQUIRE 1.5 a owner",
        "LOCK.MACQUIRE 2 a owner",
        "LOCK.MACQUIRE 9223372036854775807 a owner",
        "LOCK.MACQUIRE 18446744073709551617 a owner",
        "LOCK.MACQUIRE 3 a owner",
        "LOCK.MACQUIRE 1 a owner LIMIT 2",
        "LOCK.MACQUIRE 1 a owner SHARED",
        "LOCK.MACQUIRE 1 a owner LEASE 0",
        "LOCK.MACQUIRE 1 a owner LEASE",
        "LOCK.MACQUIRE 1 a owner HOLDS 0",
        "LOCK.MACQUIRE 1 a owner NONSENSE",
        "LOCK.MACQUIRE 1 a #owner",
        "LOCK.MACQUIRE",
        "LOCK.MACQUIRE 1",
        "LOCK.MACQUIRE 1 a",
        "LOCK.MRELEASE 2 a a owner",
        "LOCK.MRELEASE 2 a owner",
        "LOCK.MRELEASE 1 a owner HOLDS 0",
        "LOCK.MRELEASE 1 a owner TOKEN",
        "LOCK.MRENEW 2 a a owner",
        "LOCK.MRENEW 1 a owner LEASE 0",
        "LOCK.MRENEW 1 a owner WAIT 5",
    ];
    for line in wrong {
        let error = connection.run(line).error();
        assert!(error.starts_with("ERR "), "{line}: {error}");
        assert!(error.len() > "ERR syntax".len(), "{line}: {error}");
    }
    assert_eq!(connection.run("DBSIZE"), Value::Int(0));
    let twice = connection.run("LOCK.MACQUIRE 2 a a owner").error();
    assert!(twice.contains("twice") || twice.contains("once"), "{twice}");
}

#[test]
fn keys_and_owners_are_arbitrary_bytes() {
    let server = Server::start();
    let mut connection = server.raw();
    let (first, second, owner): (&[u8], &[u8], &[u8]) = (b"\0\r\n{", b"\xff\xfe ", b"\0own\xffer\r\n");
    connection.call(&[b"LOCK.MACQUIRE", b"2", first, second, owner]).token();
    for key in [first, second] {
        assert_eq!(fields(&mut connection, key).get(owner).map(Vec::as_slice), Some(&b"1"[..]));
    }
    let left = connection.call(&[b"LOCK.MRELEASE", b"2", second, first, owner]);
    assert_eq!(left.items(), [Value::Int(1), Value::Int(1)]);
}

#[test]
fn key_may_have_name_of_option() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.MACQUIRE 2 WAIT LEASE ALL LEASE 60000").token();
    assert_eq!(owners(&mut connection, "WAIT"), ["ALL"]);
    assert_eq!(owners(&mut connection, "LEASE"), ["ALL"]);
    assert_eq!(connection.run("LOCK.MRELEASE 2 LEASE WAIT ALL ALL").items(), [Value::Int(1), Value::Int(1)]);
}

#[test]
fn macquire_reenters_all_keys() {
    let server = Server::start();
    let mut connection = server.raw();
    let first = connection.run("LOCK.MACQUIRE 2 a b owner LEASE 600000").token();
    let end = deadline(&mut connection, "a");
    assert_eq!(connection.run("LOCK.MACQUIRE 2 b a owner LEASE 1000").token(), first, "a re-entry keeps the token");
    assert_eq!(deadline(&mut connection, "a"), end, "a re-entry does not shorten the lease");
    assert_eq!(connection.run("LOCK.MACQUIRE 1 b owner").token(), first, "those that are named");
    assert_eq!(connection.run("LOCK.MACQUIRE 2 a b owner HOLDS 3").token(), first);
    for key in ["a", "b"] {
        let holder = holders(&mut connection, key).remove("owner").unwrap();
        assert_eq!((holder.field("holds").int(), holder.field("token").int()), (3, first), "{key}");
    }
    connection.run("HSET c owner 1");
    connection.run("HSET d owner 1");
    let adopted = connection.run("LOCK.MACQUIRE 2 c d owner").token();
    assert!(adopted > first, "a lock that another client wrote gets a token of this server");
    assert_eq!(connection.run("LOCK.MACQUIRE 2 d c owner").token(), adopted);
}

/// Also if it holds all of them under several tokens.
#[test]
fn macquire_is_refused_when_owner_holds_some_keys() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE a owner LEASE 600000").token();
    connection.run("LOCK.ACQUIRE b owner LEASE 600000").token();
    connection.run("LOCK.ACQUIRE taken other LEASE 600000").token();
    connection.run("HSET foreign owner 1");
    let before = Contents::read(&mut connection);
    for keys in ["2 a free", "2 free a", "3 a b free", "2 a b", "2 b a", "2 a taken", "2 taken a", "2 a foreign"] {
        for terms in ["", " WAIT 0", " HOLDS 1", " HOLDS 1 WAIT 0 LEASE 3600000"] {
            let error = connection.run(&format!("LOCK.MACQUIRE {keys} owner{terms}")).error();
            assert!(error.starts_with("ERR the owner holds some of these locks"), "{keys}{terms}: {error}");
        }
    }
    assert_eq!(Contents::read(&mut connection), before);
    assert!(connection.run("LOCK.TOP").items().is_empty(), "nobody waits");
}

/// In every way that the owner can acquire it.
#[test]
fn wait_ends_when_its_owner_is_granted_one_of_the_locks() {
    let server = Server::start();
    let (mut first, mut several, mut behind, mut viewer) = (server.raw(), server.raw(), server.raw(), server.raw());
    let ways: [&[&str]; 2] = [&["DEL b", "HSET b owner 1"], &["RENAME mine b"]];
    for way in ways {
        viewer.run("FLUSHALL");
        viewer.run("LOCK.ACQUIRE a other LEASE 600000").token();
        viewer.run("LOCK.ACQUIRE b other LEASE 600000").token();
        viewer.run("LOCK.ACQUIRE mine owner LEASE 600000").token();
        assert_eq!(several.begin("LOCK.MACQUIRE 3 c a b owner LEASE 600000 WAIT 0"), None);
        assert!(first.run("LOCK.ACQUIRE a owner LEASE 600000 WAIT 0").error().contains("together with other keys"));
        assert_eq!(behind.begin("LOCK.ACQUIRE c behind LEASE 600000 WAIT 0"), None);
        way.iter().for_each(|line| drop(viewer.run(line)));
        let error = arrives(&mut several).error();
        assert!(error.starts_with("ERR the owner holds some of these locks"), "{way:?}: {error}");
        arrives(&mut behind).token();
    }
}

/// The owner comes to hold all of them in one step, so its next request is a re-entry.
#[test]
fn wait_becomes_reentry_when_its_owner_is_granted_all() {
    let server = Server::start();
    let (mut one, mut other, mut viewer) = (server.raw(), server.raw(), server.raw());
    viewer.run("LOCK.ACQUIRE b other LEASE 600000").token();
    assert_eq!(one.begin("LOCK.MACQUIRE 2 a b owner LEASE 600000 WAIT 0"), None);
    assert_eq!(other.begin("LOCK.MACQUIRE 2 b a owner LEASE 600000 WAIT 0"), None);
    assert!(arrives(&mut one).error().starts_with("SUPERSEDED "));
    assert_eq!(viewer.run("LOCK.RELEASE b other"), Value::Int(1));
    let token = arrives(&mut other).token();
    assert_eq!(other.run("LOCK.MACQUIRE 2 b a owner LEASE 600000 WAIT 0"), Value::Int(token));
    for key in ["a", "b"] {
        assert_eq!(holders(&mut viewer, key)["owner"].field("holds").int(), 2, "{key}");
    }

    // Another client writes the holds by hand while the request waits.
    viewer.run("LOCK.FORCE a");
    viewer.run("LOCK.FORCE b");
    viewer.run("LOCK.ACQUIRE b other LEASE 600000").token();
    assert_eq!(one.begin("LOCK.MACQUIRE 2 a b owner LEASE 600000 WAIT 0"), None);
    let mut lines = vec!["MULTI".to_owned(), "DEL b".to_owned()];
    lines.extend(["a", "b"].map(|key| format!("HSET {key} owner 1 #fence {token}")));
    lines.extend(["a", "b"].map(|key| format!("PEXPIRE {key} 600000")));
    lines.push("EXEC".to_owned());
    viewer.run_all(&lines);
    assert_eq!(arrives(&mut one).token(), token);
    for key in ["a", "b"] {
        assert_eq!(holders(&mut viewer, key)["owner"].field("holds").int(), 2, "{key}");
    }
}

#[test]
fn release_replies_for_each_key() {
    let server = Server::start();
    let mut connection = server.raw();
    let token = connection.run("LOCK.MACQUIRE 2 a b owner").token();
    connection.run("LOCK.ACQUIRE b owner").token();
    connection.run("LOCK.ACQUIRE d other").token();
    let left = connection.run("LOCK.MRELEASE 4 a b c d owner");
    assert_eq!(left.items(), [Value::Int(1), Value::Int(0), Value::Nil, Value::Nil]);
    let left = connection.run(&format!("LOCK.MRELEASE 2 a b owner TOKEN {}", token - 1));
    assert_eq!(left.items(), [Value::Nil, Value::Nil]);
    connection.run("LOCK.ACQUIRE b owner HOLDS 5").token();
    let left = connection.run(&format!("LOCK.MRELEASE 1 b owner TOKEN {token} ALL"));
    assert_eq!(left.items(), [Value::Int(1)]);
    assert_eq!(owners(&mut connection, "d"), ["other"]);
}

#[test]
fn renew_replies_for_each_key() {
    let server = Server::start();
    let mut connection = server.raw();
    let token = connection.run("LOCK.MACQUIRE 2 a b owner LEASE 1000").token();
    let other = connection.run("LOCK.ACQUIRE d owner LEASE 1000").token();
    let begin = now();
    let renewed = connection.run("LOCK.MRENEW 4 a c b d owner LEASE 60000");
    assert_eq!(renewed.items(), [Value::Int(token), Value::Nil, Value::Int(token), Value::Int(other)]);
    for key in ["a", "b", "d"] {
        let end = deadline(&mut connection, key);
        assert!((begin + 60_000..=now() + 60_000).contains(&end), "{key}: {end}");
    }
    let renewed = connection.run(&format!("LOCK.MRENEW 2 a d owner LEASE 5000 TOKEN {token}"));
    assert_eq!(renewed.items(), [Value::Int(token), Value::Nil]);
    assert!(deadline(&mut connection, "a") <= now() + 5000);
    assert!(deadline(&mut connection, "d") > now() + 5000);
}

#[test]
fn waiter_holds_nothing_and_keeps_position_in_each_queue() {
    let server = Server::start();
    let (mut both, mut behind, mut viewer) = (server.raw(), server.raw(), server.raw());
    let first = viewer.run("LOCK.ACQUIRE b other").token();
    assert_eq!(both.begin("LOCK.MACQUIRE 2 a b owner WAIT 0"), None);
    assert_eq!(viewer.run("EXISTS a"), Value::Int(0), "a waiter holds nothing");
    assert_eq!((waiters(&mut viewer, "a"), waiters(&mut viewer, "b")), (vec!["owner".into()], vec!["owner".into()]));
    let info = viewer.run("LOCK.INFO a");
    assert_eq!((info.field("waiters").int(), info.field("holders").items().len()), (1, 0));
    // Its place is kept: `a` is free, but no later request is granted it.
    assert!(viewer.run("LOCK.ACQUIRE a third").is_null());
    assert_eq!(behind.begin("LOCK.ACQUIRE a third WAIT 0"), None);
    assert_eq!(viewer.run("LOCK.RELEASE b other"), Value::Int(1));
    let second = arrives(&mut both).token();
    assert!(second > first);
    assert_eq!((owners(&mut viewer, "a"), owners(&mut viewer, "b")), (vec!["owner".into()], vec!["owner".into()]));
    assert!(behind.pending());
    viewer.run("LOCK.MRELEASE 2 a b owner");
    assert!(arrives(&mut behind).token() > second);
}

#[test]
fn each_queue_has_order_of_arrival() {
    let server = Server::start();
    let mut viewer = server.raw();
    viewer.run("LOCK.MACQUIRE 3 a b c holder").token();
    let requests = ["2 a b one", "2 b c two", "2 c a three", "1 b four", "3 c b a five"];
    let mut clients: Vec<Raw> = requests.iter().map(|_| server.raw()).collect();
    for (client, request) in clients.iter_mut().zip(requests) {
        assert_eq!(client.begin(&format!("LOCK.MACQUIRE {request} WAIT 0")), None);
    }
    assert_eq!(waiters(&mut viewer, "a"), ["one", "three", "five"]);
    assert_eq!(waiters(&mut viewer, "b"), ["one", "two", "four", "five"]);
    assert_eq!(waiters(&mut viewer, "c"), ["two", "three", "five"]);
    viewer.run("LOCK.MRELEASE 3 a b c holder");
    // Two requests without a common key may be granted in any order. For each key, the order is fixed.
    let mut last = BTreeMap::new();
    for (client, request) in clients.iter_mut().zip(requests) {
        let token = arrives(client).token();
        let words: Vec<&str> = request.split(' ').collect();
        let (keys, owner) = (&words[1..words.len() - 1], words[words.len() - 1]);
        for key in keys {
            assert!(last.insert(*key, token).is_none_or(|before| token > before), "{request} was served out of order");
        }
        viewer.run(&format!("LOCK.MRELEASE {} {} {owner}", words[0], keys.join(" ")));
    }
    assert_eq!(viewer.run("DBSIZE"), Value::Int(0));
}

#[test]
fn opposite_key_orders_do_not_deadlock() {
    let server = Server::start();
    let (mut first, mut second, mut viewer) = (server.raw(), server.raw(), server.raw());
    viewer.run("LOCK.MACQUIRE 2 a b holder").token();
    assert_eq!(first.begin("LOCK.MACQUIRE 2 a b one WAIT 0"), None);
    assert_eq!(second.begin("LOCK.MACQUIRE 2 b a two WAIT 0"), None);
    viewer.run("LOCK.MRELEASE 2 a b holder");
    arrives(&mut first).token();
    viewer.run("LOCK.MRELEASE 2 a b one");
    arrives(&mut second).token();
}

/// How a waiter leaves the queue.
type Leave = fn(Raw, &mut Raw);

#[test]
fn waiters_are_served_when_request_for_several_leaves() {
    let server = Server::start();
    let mut viewer = server.raw();
    let leaves: [Leave; 4] = [
        |client, _| client.reset(),
        |mut client, viewer| {
            let ids = viewer.run("LOCK.WAITERS a COUNT 1");
            let id = ids.items()[0].field("client").int();
            viewer.run(&format!("CLIENT UNBLOCK {id}"));
            assert!(arrives(&mut client).is_null());
        },
        |mut client, viewer| {
            let ids = viewer.run("LOCK.WAITERS a COUNT 1");
            let id = ids.items()[0].field("client").int();
            viewer.run(&format!("CLIENT UNBLOCK {id} ERROR"));
            assert!(arrives(&mut client).error().starts_with("UNBLOCKED "));
        },
        // The owner's next request takes over the place, and times out.
        |mut client, viewer| {
            assert!(viewer.run("LOCK.MACQUIRE 3 a b c owner WAIT 1").is_null());
            assert!(arrives(&mut client).error().starts_with("SUPERSEDED "));
        },
    ];
    for leave in leaves {
        viewer.run("FLUSHALL");
        let (mut both, mut on_a, mut on_c) = (server.raw(), server.raw(), server.raw());
        viewer.run("LOCK.ACQUIRE b other").token();
        assert_eq!(both.begin("LOCK.MACQUIRE 3 a b c owner WAIT 0"), None);
        assert_eq!(on_a.begin("LOCK.ACQUIRE a third WAIT 0"), None);
        assert_eq!(on_c.begin("LOCK.ACQUIRE c fourth WAIT 0"), None);
        leave(both, &mut viewer);
        arrives(&mut on_a).token();
        arrives(&mut on_c).token();
        assert_eq!(waiters(&mut viewer, "b"), Vec::<String>::new());
    }
}

#[test]
fn every_command_that_frees_last_key_serves_waiter() {
    let server = Server::start();
    let mut viewer = server.raw();
    let frees: [(&str, &str); 5] = [
        ("LOCK.ACQUIRE b other", "LOCK.FORCE b"),
        ("LOCK.ACQUIRE b other", "DEL b"),
        ("LOCK.ACQUIRE b other", "RENAME b elsewhere"),
        ("LOCK.ACQUIRE b other LEASE 1500", "PING"),
        ("LOCK.ACQUIRE b other", "PEXPIRE b 5"),
    ];
    for (take, free) in frees {
        viewer.run("FLUSHALL");
        let mut waiter = server.raw();
        viewer.run(take).token();
        assert_eq!(waiter.begin("LOCK.MACQUIRE 2 a b owner LEASE 60000 WAIT 0"), None);
        viewer.run(free);
        let token = arrives(&mut waiter).token();
        for key in ["a", "b"] {
            assert_eq!(holders(&mut viewer, key)["owner"].field("token").int(), token, "{free}");
        }
    }
}

#[test]
fn macquire_binds_all_keys() {
    let server = Server::start();
    let (first, mut second, mut viewer) = (server.raw(), server.raw(), server.raw());
    let mut first = Watched::over(first, &server);
    second.run("LOCK.SESSION");
    first.run("LOCK.MACQUIRE 2 a b first LEASE 3000 WATCHDOG EPHEMERAL").token();
    assert_eq!(second.begin("LOCK.MACQUIRE 2 b a second LEASE 3000 WAIT 0 WATCHDOG EPHEMERAL"), None);
    let end = now() + 4500;
    until(SOON, "both leases have been renewed", || deadline(&mut viewer, "a").min(deadline(&mut viewer, "b")) > end);
    first.reset();
    arrives(&mut second).token();
    let id = second.client_id();
    for key in ["a", "b"] {
        assert_eq!(holders(&mut viewer, key)["second"].field("client"), Value::Int(id));
    }
    let mut third = server.raw();
    let token = holders(&mut viewer, "a")["second"].field("token").int();
    let renewed = third.run("LOCK.MRENEW 2 a b second LEASE 60000 EPHEMERAL");
    assert_eq!(renewed.items(), [Value::Int(token), Value::Int(token)]);
    second.close();
    until_gone(&mut viewer, id);
    assert_eq!(viewer.run("EXISTS a b"), Value::Int(2), "the session of the second request has the binding");
    third.close();
    until(SOON, "both are free", || viewer.run("DBSIZE") == Value::Int(0));
}

#[test]
fn wait_is_ignored_where_nothing_blocks() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE b other").token();
    connection.run("MULTI");
    connection.run("LOCK.MACQUIRE 2 a b owner WAIT 0");
    connection.run("LOCK.MACQUIRE 2 a c owner WAIT 0");
    let replies = connection.run("EXEC");
    assert!(replies.items()[0].is_null());
    replies.items()[1].token();
    let script = b"return redis.call('LOCK.MACQUIRE', '2', 'b', 'd', 'owner', 'WAIT', '0')";
    assert!(connection.call(&[b"EVAL", script, b"2", b"b", b"d"]).is_null());
    assert_eq!(connection.run("EXISTS d"), Value::Int(0));
}

#[test]
fn macquire_is_one_transaction_on_replica() {
    let primary = Server::start();
    let replica = Server::builder().without_module().start();
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let (mut connection, mut monitor) = (primary.raw(), replica.raw());
    assert_eq!(monitor.run("MONITOR"), Value::Okay);
    connection.run("LOCK.MACQUIRE 2 a b owner").token();
    let mut names: Vec<String> = Vec::new();
    until(SOON, "the transaction has reached the replica", || {
        let line = monitor.read().unwrap().text();
        let name = line.split('"').nth(1).unwrap_or_default().to_ascii_lowercase();
        // Other commands are not part of the transaction.
        if !["ping", "replconf", "select"].contains(&name.as_str()) {
            names.push(name);
        }
        names.last().is_some_and(|name| name == "exec")
    });
    assert_eq!(names, ["multi", "restore", "restore", "exec"]);
}

#[test]
fn keys_must_share_a_slot_in_cluster() {
    let cluster = Cluster::start(1);
    let mut connection = cluster.node(0).raw();
    let error = connection.run("LOCK.MACQUIRE 2 a b owner").error();
    assert!(error.starts_with("CROSSSLOT "), "{error}");
    connection.run("LOCK.MACQUIRE 2 {tag}a {tag}b owner").token();
    assert_eq!(connection.run("LOCK.MRELEASE 2 {tag}a {tag}b owner").items(), [Value::Int(1), Value::Int(1)]);
}
