//! Holds that are bound to a connection: `WATCHDOG` and `EPHEMERAL`.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use redis::Value;
use support::{Raw, Server, until};

use crate::lines::{
    Commands, Reply, SOON, Watched, arrives, deadline, encode, holders, now, owners, until_gone, waiters,
};

/// A holder's connection and its two flags, as `LOCK.INFO` shows them.
#[track_caller]
fn binding(connection: &mut Raw, key: &str, owner: &str) -> (Option<i64>, bool, bool) {
    let holders = holders(connection, key);
    let holder = holders.get(owner).unwrap_or_else(|| panic!("{owner} does not hold {key}: {holders:?}"));
    let client = match holder.field("client") {
        Value::Nil => None,
        client => Some(client.int()),
    };
    (client, holder.field("watchdog").truth(), holder.field("ephemeral").truth())
}

/// Waits until a key's lease has been renewed.
#[track_caller]
fn until_renewed(connection: &mut Raw, key: &str) {
    let before = deadline(connection, key);
    until(SOON, "the lease is renewed", || deadline(connection, key) > before);
}

/// Waits until a key is gone. Its deadline must not change, and it must not go before it.
#[track_caller]
fn runs_out(connection: &mut Raw, key: &str) {
    let end = deadline(connection, key);
    runs_out_by(connection, key, end);
}

/// The same, with the deadline `end`.
#[track_caller]
fn runs_out_by(connection: &mut Raw, key: &str, end: i64) {
    assert!(end > 0, "{key} has a lease: {end}");
    until(SOON, "the lease expires", || match deadline(connection, key) {
        -2 => true,
        same => {
            assert_eq!(same, end, "the lease of {key} was renewed");
            false
        }
    });
    assert!(now() >= end, "{key} was deleted before its deadline");
}

#[track_caller]
fn until_free(connection: &mut Raw, key: &str) {
    until(SOON, "the lock is free", || connection.run(&format!("EXISTS {key}")) == Value::Int(0));
}

#[test]
fn watched_lease_is_renewed_after_a_third() {
    const LEASE: i64 = 6000;
    let server = Server::start();
    let (holder, mut viewer) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    let token = holder.run(&format!("LOCK.ACQUIRE key owner LEASE {LEASE} WATCHDOG")).token();
    let begin = now();
    let mut deadlines = BTreeSet::new();
    until(SOON, "the lease has been renewed four times", || {
        deadlines.insert(deadline(&mut viewer, "key"));
        deadlines.len() > 4
    });
    let deadlines: Vec<i64> = deadlines.into_iter().collect();
    let every: Vec<i64> = deadlines.windows(2).map(|pair| pair[1] - pair[0]).collect();
    println!("a lease of {LEASE} ms was renewed every {every:?} ms");
    // A busy machine delays renewals, and never makes one early.
    assert!(every.iter().all(|every| (LEASE / 3..LEASE * 2 / 3).contains(every)), "{every:?}");
    assert!(every.iter().any(|&every| every < LEASE * 5 / 12), "{every:?}");
    assert!(deadlines[4] > begin + LEASE * 2);
    assert_eq!(holders(&mut viewer, "key")["owner"].field("token").int(), token);
    assert!(viewer.run("LOCK.ACQUIRE key other").is_null());
}

/// A hold whose key has lost its expiry never ends. Its own deadline has passed, and must not keep the watchdog busy.
#[test]
fn endless_hold_does_not_delay_other_renewals() {
    let server = Server::start();
    let (holder, mut viewer) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    assert!(holder.run("LOCK.ACQUIRE watched w WATCHDOG LEASE 3000").int() > 0);
    assert!(holder.run("LOCK.ACQUIRE endless e SHARED EPHEMERAL LEASE 300").int() > 0);
    assert_eq!(viewer.run("PERSIST endless"), Value::Int(1));
    let end = now() + 300;
    until(SOON, "its own deadline has passed", || now() > end);
    until_renewed(&mut viewer, "watched");
    until_renewed(&mut viewer, "watched");
    until_renewed(&mut viewer, "watched");
    assert_eq!(owners(&mut viewer, "endless"), ["e"]);
}

#[test]
fn watchdog_never_shortens_longer_lease() {
    let server = Server::start();
    let mut holder = Watched::over(server.raw(), &server);
    holder.run("LOCK.ACQUIRE key owner LEASE 3000 WATCHDOG").token();
    holder.run("LOCK.ACQUIRE other owner LEASE 3000 WATCHDOG").token();
    holder.run("LOCK.RENEW key owner LEASE 60000").token();
    let end = deadline(&mut holder, "key");
    // The renewal of the other lock shows that the watchdog has run.
    until_renewed(&mut holder, "other");
    until_renewed(&mut holder, "other");
    assert!(deadline(&mut holder, "key") >= end);
}

#[test]
fn partly_released_watched_hold_is_renewed() {
    let server = Server::start();
    let mut holder = Watched::over(server.raw(), &server);
    holder.run("LOCK.ACQUIRE key owner LEASE 3000 HOLDS 3 WATCHDOG").token();
    assert_eq!(holder.run("LOCK.RELEASE key owner"), Value::Int(0));
    until_renewed(&mut holder, "key");
    until_renewed(&mut holder, "key");
    assert_eq!(holder.run("LOCK.RELEASE key owner ALL"), Value::Int(1));
}

#[test]
fn watched_lease_expires_after_its_connection_closed() {
    let server = Server::start();
    let mut viewer = server.raw();
    let holders: Vec<Raw> = endings()
        .iter()
        .map(|(key, _)| {
            let mut holder = server.raw();
            holder.run("LOCK.SESSION");
            holder.run(&format!("LOCK.ACQUIRE {key} owner LEASE 3000 WATCHDOG")).token();
            holder.run("LOCK.EVENTS");
            holder
        })
        .collect();
    until_renewed(&mut viewer, "killed-in-a-transaction");
    for ((key, end), mut holder) in endings().into_iter().zip(holders) {
        let client = holder.client_id();
        end(holder, &mut viewer);
        until_gone(&mut viewer, client);
        assert_eq!(binding(&mut viewer, key, "owner"), (None, false, false), "{key}");
    }
    let ends = endings().map(|(key, _)| (key, deadline(&mut viewer, key)));
    for (key, end) in ends {
        runs_out_by(&mut viewer, key, end);
    }
}

#[test]
fn ephemeral_hold_ends_with_every_kind_of_disconnect() {
    let server = Server::start();
    let mut viewer = server.raw();
    for (key, end) in endings() {
        let (mut holder, mut next) = (server.raw(), server.raw());
        let token = holder.run(&format!("LOCK.ACQUIRE {key} first HOLDS 3 EPHEMERAL")).token();
        holder.run(&format!("LOCK.ACQUIRE {key}:unbound first")).token();
        assert_eq!(next.begin(&format!("LOCK.ACQUIRE {key} second WAIT 0")), None);
        let client = holder.client_id();
        end(holder, &mut viewer);
        assert!(arrives(&mut next).token() > token, "{key}");
        assert_eq!(owners(&mut viewer, key), ["second"]);
        until_gone(&mut viewer, client);
        let unbound = holders(&mut viewer, &format!("{key}:unbound"));
        assert_eq!(unbound.into_keys().collect::<Vec<_>>(), ["first"], "a hold without the flag stays");
    }
}

type End = fn(Raw, &mut Raw);

/// The ways in which a connection ends.
fn endings() -> [(&'static str, End); 7] {
    [
        ("closed", |holder, _| holder.close()),
        ("reset", |holder, _| holder.reset()),
        ("half-a-command", |mut holder, _| {
            holder.send_bytes(b"*2\r\n$3\r\nGET\r\n$5\r\nab").unwrap();
            holder.close();
        }),
        ("quit", |mut holder, _| assert_eq!(holder.run("QUIT"), Value::Okay)),
        ("killed", |mut holder, viewer| {
            let client = holder.client_id();
            assert_eq!(viewer.run(&format!("CLIENT KILL ID {client}")), Value::Int(1));
        }),
        ("protocol-error", |mut holder, _| {
            holder.send_bytes(b"*1\r\nnonsense\r\n").unwrap();
            until(SOON, "the server closes the connection", || holder.closed());
        }),
        ("killed-in-a-transaction", |mut holder, viewer| {
            let client = holder.client_id();
            viewer.run("MULTI");
            viewer.run("PING");
            viewer.run(&format!("CLIENT KILL ID {client}"));
            viewer.run("PING");
            assert_eq!(viewer.run("EXEC").items()[1], Value::Int(1));
        }),
    ]
}

#[test]
fn ephemeral_hold_ends_when_server_closes_connection() {
    let server = Server::builder().arg("timeout", "1").start();
    let (mut holder, mut next) = (server.raw(), server.raw());
    holder.run("LOCK.ACQUIRE idle first EPHEMERAL").token();
    assert_eq!(next.begin("LOCK.ACQUIRE idle second WAIT 0"), None);
    // The connection sends nothing more. A blocked connection is not idle.
    assert!(arrives(&mut next).token() > 0);

    let mut holder = server.raw();
    holder.run("ACL SETUSER worker on nopass ~* &* +@all");
    holder.run("AUTH worker any");
    holder.run("LOCK.ACQUIRE user first EPHEMERAL").token();
    assert_eq!(next.begin("LOCK.ACQUIRE user second WAIT 0"), None);
    assert_eq!(server.raw().run("ACL DELUSER worker"), Value::Int(1));
    assert!(arrives(&mut next).token() > 0);
}

#[test]
fn many_ephemeral_holds_of_one_connection_all_end() {
    let server = Server::start();
    let (mut holder, mut viewer) = (server.raw(), server.raw());
    let lines: Vec<String> = (0..2000).map(|index| format!("LOCK.ACQUIRE key:{index} owner EPHEMERAL")).collect();
    for reply in holder.run_all(&lines) {
        reply.token();
    }
    assert_eq!(viewer.run("DBSIZE"), Value::Int(2000));
    holder.reset();
    until(SOON, "all locks are free", || viewer.run("DBSIZE") == Value::Int(0));
}

/// The server handles the disconnect and the next request in one event-loop iteration.
#[test]
fn ephemeral_hold_has_ended_for_next_command() {
    let server = Server::start();
    let mut other = server.raw();
    let mut raced = 0;
    for round in 0..20 {
        for request in [
            "LOCK.ACQUIRE key owner HOLDS 1",
            "LOCK.RENEW key owner",
            "LOCK.RENEW key owner EPHEMERAL",
            "LOCK.MRENEW 1 key owner",
            "LOCK.RELEASE key owner",
            "LOCK.MACQUIRE 2 key more owner",
        ] {
            let (mut holder, mut waiter) = (server.raw(), server.raw());
            holder.run("LOCK.ACQUIRE key owner LEASE 600000 EPHEMERAL").token();
            assert_eq!(waiter.begin("LOCK.ACQUIRE key next LEASE 600000 WAIT 0"), None);
            let kill = format!("CLIENT KILL ID {}", holder.client_id());
            other.send_bytes(&[kill.as_str(), request].map(encode).concat()).unwrap();
            assert_eq!(other.read().unwrap(), Value::Int(1));
            let reply = other.read().unwrap();
            let refused = reply.is_null() || matches!(&reply, Value::Array(all) if all == &[Value::Nil]);
            assert!(refused, "round {round}, {request}: {reply:?}");
            arrives(&mut waiter).token();
            assert_eq!(owners(&mut other, "key"), ["next"]);
            other.run("LOCK.FORCE key");
            raced += 1;
        }
    }
    assert_eq!(server.info("holdfast", "holdfast_released_by_disconnect"), Some(raced.to_string()));
}

#[test]
fn reentry_binds_whole_hold() {
    let server = Server::start();
    let (mut holder, mut viewer) = (server.raw(), server.raw());
    holder.run("LOCK.ACQUIRE key owner").token();
    assert_eq!(binding(&mut viewer, "key", "owner"), (None, false, false));
    holder.run("LOCK.ACQUIRE key owner EPHEMERAL").token();
    assert_eq!(binding(&mut viewer, "key", "owner"), (Some(holder.client_id()), false, true));
    holder.close();
    until_free(&mut viewer, "key");
}

#[test]
fn info_shows_binding() {
    let server = Server::start();
    let (holder, mut viewer) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    let client = holder.client_id();
    let flags = [
        ("", false, false),
        (" WATCHDOG", true, false),
        (" EPHEMERAL", false, true),
        (" WATCHDOG EPHEMERAL", true, true),
    ];
    for (words, watchdog, ephemeral) in flags {
        holder.run(&format!("LOCK.ACQUIRE key owner{words}")).token();
        let connection = (watchdog || ephemeral).then_some(client);
        assert_eq!(binding(&mut viewer, "key", "owner"), (connection, watchdog, ephemeral), "{words}");
        assert_eq!(holder.run("LOCK.RELEASE key owner"), Value::Int(1));
    }
}

#[test]
fn both_flags_at_once_renew_and_release() {
    let server = Server::start();
    let (holder, mut viewer) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    holder.run("LOCK.ACQUIRE key * LEASE 3000 WATCHDOG EPHEMERAL").token();
    let owner = holder.id().to_owned();
    assert_eq!(binding(&mut viewer, "key", &owner), (Some(holder.client_id()), true, true));
    until_renewed(&mut viewer, "key");
    until_renewed(&mut viewer, "key");
    // A long lease, to show that the disconnect ends the hold.
    viewer.run(&format!("LOCK.RENEW key {owner} LEASE 600000")).token();
    holder.close();
    until_free(&mut viewer, "key");
}

#[test]
fn bindings_follow_the_selected_database() {
    let server = Server::start();
    let (holder, mut viewer) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    holder.run("LOCK.ACQUIRE key owner LEASE 3000 WATCHDOG").token();
    holder.run("SELECT 3");
    holder.run("LOCK.ACQUIRE key owner LEASE 3000 WATCHDOG EPHEMERAL").token();
    holder.run("LOCK.ACQUIRE plain owner").token();
    holder.run("SELECT 7");
    let client = holder.client_id();
    for (database, ephemeral) in [(0, false), (3, true)] {
        viewer.run(&format!("SELECT {database}"));
        until_renewed(&mut viewer, "key");
        until_renewed(&mut viewer, "key");
        assert_eq!(binding(&mut viewer, "key", "owner"), (Some(client), true, ephemeral), "database {database}");
    }
    holder.close();
    until_free(&mut viewer, "key");
    assert_eq!(viewer.run("EXISTS plain"), Value::Int(1));
    viewer.run("SELECT 0");
    runs_out(&mut viewer, "key");
}

#[test]
fn renamed_or_moved_key_loses_its_binding() {
    let server = Server::start();
    for (command, database, key) in
        [("RENAME key new", 0, "new"), ("RENAMENX key new", 0, "new"), ("MOVE key 5", 5, "key")]
    {
        let (holder, mut viewer) = (server.raw(), server.raw());
        let mut holder = Watched::over(holder, &server);
        viewer.run("FLUSHALL");
        holder.run("LOCK.ACQUIRE key owner LEASE 3000 WATCHDOG EPHEMERAL").token();
        let reply = viewer.run(command);
        assert!(matches!(reply, Value::Okay | Value::Int(1)), "{command}: {reply:?}");
        viewer.run(&format!("SELECT {database}"));
        assert_eq!(binding(&mut viewer, key, "owner"), (None, false, false), "{command}");
        // The old name is free. Its next holder has nothing to do with the binding.
        let mut other = server.raw();
        other.run("LOCK.ACQUIRE key owner LEASE 60000").token();
        let client = holder.client_id();
        holder.close();
        until_gone(&mut viewer, client);
        assert_eq!(viewer.run(&format!("EXISTS {key}")), Value::Int(1), "{command}: released with the connection");
        runs_out(&mut viewer, key);
        assert_eq!(other.run("EXISTS key"), Value::Int(1), "{command}: released the next hold");
    }
}

#[test]
fn copy_is_not_bound() {
    let server = Server::start();
    let (holder, mut viewer) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    holder.run("LOCK.ACQUIRE key owner LEASE 3000 WATCHDOG EPHEMERAL").token();
    assert_eq!(viewer.run("COPY key copy"), Value::Int(1));
    assert_eq!(binding(&mut viewer, "copy", "owner"), (None, false, false));
    assert_eq!(binding(&mut viewer, "key", "owner"), (Some(holder.client_id()), true, true));
    holder.close();
    until_free(&mut viewer, "key");
    runs_out(&mut viewer, "copy");
}

/// `SWAPDB` may move the binding or end it. `LOCK.INFO` shows which, and no other hold is affected.
#[test]
fn binding_follows_swapdb_as_info_shows() {
    let server = Server::start();
    let (holder, mut other, mut viewer) = (server.raw(), server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    holder.run("LOCK.ACQUIRE key owner LEASE 3000 WATCHDOG EPHEMERAL").token();
    other.run("SELECT 1");
    other.run("LOCK.ACQUIRE key owner LEASE 6000").token();
    let unbound_end = deadline(&mut other, "key");
    assert_eq!(viewer.run("SWAPDB 0 1"), Value::Okay);
    // The hold without a binding is in database 0 now, the bound one in 1.
    assert_eq!(binding(&mut viewer, "key", "owner"), (None, false, false));
    viewer.run("SELECT 1");
    let (client, watchdog, ephemeral) = binding(&mut viewer, "key", "owner");
    assert_eq!((watchdog, ephemeral), (client.is_some(), client.is_some()));
    println!("the binding {} the swapped lock", if client.is_some() { "follows" } else { "leaves" });
    let id = holder.client_id();
    if client.is_some() {
        assert_eq!(client, Some(id));
        until_renewed(&mut viewer, "key");
        holder.close();
        until_free(&mut viewer, "key");
    } else {
        holder.close();
        until_gone(&mut viewer, id);
        runs_out(&mut viewer, "key");
    }
    viewer.run("SELECT 0");
    assert_eq!(deadline(&mut viewer, "key"), unbound_end);
    runs_out(&mut viewer, "key");
}

#[test]
fn renew_moves_a_binding_to_the_calling_connection() {
    let server = Server::start();
    let (first, second, mut viewer) = (server.raw(), server.raw(), server.raw());
    let mut first = Watched::over(first, &server);
    let mut second = Watched::over(second, &server);
    let token = first.run("LOCK.ACQUIRE key owner LEASE 3000 WATCHDOG EPHEMERAL").token();
    assert_eq!(second.run("LOCK.RENEW key owner LEASE 3000 WATCHDOG EPHEMERAL"), Value::Int(token));
    assert_eq!(binding(&mut viewer, "key", "owner"), (Some(second.client_id()), true, true));
    let id = first.client_id();
    first.close();
    until_gone(&mut viewer, id);
    until_renewed(&mut viewer, "key");
    until_renewed(&mut viewer, "key");
    assert_eq!(binding(&mut viewer, "key", "owner"), (Some(second.client_id()), true, true));
    second.close();
    until_free(&mut viewer, "key");
}

#[test]
fn renew_binds_a_hold_that_was_not_bound() {
    let server = Server::start();
    let (mut holder, other) = (server.raw(), server.raw());
    let mut other = Watched::over(other, &server);
    holder.run("LOCK.ACQUIRE watched owner LEASE 60000").token();
    holder.run("LOCK.ACQUIRE ephemeral owner LEASE 60000").token();
    other.run("LOCK.RENEW watched owner LEASE 3000 WATCHDOG").token();
    other.run("LOCK.RENEW ephemeral owner LEASE 60000 EPHEMERAL").token();
    until_renewed(&mut holder, "watched");
    until_renewed(&mut holder, "watched");
    other.reset();
    until_free(&mut holder, "ephemeral");
    runs_out(&mut holder, "watched");
}

#[test]
fn renew_without_flags_keeps_binding() {
    let server = Server::start();
    let (holder, mut other) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    let id = holder.client_id();
    holder.run("LOCK.ACQUIRE key owner WATCHDOG EPHEMERAL").token();
    other.run("LOCK.RENEW key owner LEASE 60000").token();
    assert_eq!(binding(&mut other, "key", "owner"), (Some(id), true, true));
    holder.close();
    until_free(&mut other, "key");
}

#[test]
fn refused_renewal_binds_nothing() {
    let server = Server::start();
    let (mut holder, mut other) = (server.raw(), server.raw());
    let token = holder.run("LOCK.ACQUIRE key owner LEASE 60000").token();
    assert!(other.run("LOCK.RENEW key stranger EPHEMERAL").is_null());
    assert!(other.run(&format!("LOCK.RENEW key owner TOKEN {} EPHEMERAL", token - 1)).is_null());
    assert_eq!(binding(&mut holder, "key", "owner"), (None, false, false));
    let id = other.client_id();
    other.close();
    until_gone(&mut holder, id);
    assert_eq!(holder.run("EXISTS key"), Value::Int(1));
}

#[test]
fn queued_grant_is_bound_as_immediate_one() {
    let server = Server::start();
    let (mut first, mut second, mut third, mut viewer) = (server.raw(), server.raw(), server.raw(), server.raw());
    first.run("LOCK.ACQUIRE key first").token();
    let id = second.client_id();
    for session in [&mut second, &mut third] {
        session.run("LOCK.SESSION");
    }
    assert_eq!(second.begin("LOCK.ACQUIRE key second LEASE 3000 WAIT 0 WATCHDOG EPHEMERAL"), None);
    assert_eq!(third.begin("LOCK.ACQUIRE key third LEASE 3000 WAIT 0 WATCHDOG"), None);
    first.run("LOCK.RELEASE key first");
    arrives(&mut second).token();
    assert_eq!(binding(&mut viewer, "key", "second"), (Some(id), true, true));
    second.run("LOCK.EVENTS");
    until_renewed(&mut viewer, "key");
    second.reset();
    arrives(&mut third).token();
    assert_eq!(binding(&mut viewer, "key", "third"), (Some(third.client_id()), true, false));
    third.run("LOCK.EVENTS");
    until_renewed(&mut viewer, "key");
    third.reset();
    until(SOON, "the hold is unbound", || binding(&mut viewer, "key", "third").0.is_none());
    runs_out(&mut viewer, "key");
}

#[test]
fn withdrawn_waiter_binds_nothing() {
    let server = Server::start();
    let (mut holder, mut waiter) = (server.raw(), server.raw());
    holder.run("LOCK.ACQUIRE key first").token();
    assert_eq!(waiter.begin("LOCK.ACQUIRE key second WAIT 0 EPHEMERAL"), None);
    waiter.reset();
    until(SOON, "the waiter has left the queue", || waiters(&mut holder, "key").is_empty());
    assert_eq!(binding(&mut holder, "key", "first"), (None, false, false));
}

#[test]
fn promoted_replica_has_no_bindings() {
    let (primary, replica) = (Server::start(), Server::start());
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let mut holder = Watched::over(primary.raw(), &primary);
    let token = holder.run("LOCK.ACQUIRE key owner LEASE 2000 WATCHDOG EPHEMERAL").token();
    primary.wait_for_replica(&replica);
    let mut viewer = replica.raw();
    replica.replica_of_no_one();
    assert_eq!(binding(&mut viewer, "key", "owner"), (None, false, false));
    assert_eq!(holders(&mut viewer, "key")["owner"].field("token").int(), token);
    let id = holder.client_id();
    holder.close();
    until_gone(&mut primary.raw(), id);
    runs_out(&mut viewer, "key");
}

#[test]
fn bindings_end_when_primary_becomes_replica() {
    let (first, second) = (Server::start(), Server::start());
    let (holder, mut viewer) = (first.raw(), first.raw());
    let mut holder = Watched::over(holder, &first);
    holder.run("LOCK.ACQUIRE key owner LEASE 60000 WATCHDOG EPHEMERAL").token();
    second.replica_of(&first);
    second.replica_of_no_one();
    first.replica_of(&second);
    first.replica_of_no_one();
    assert_eq!(binding(&mut viewer, "key", "owner"), (None, false, false));
    let id = holder.client_id();
    holder.close();
    until_gone(&mut viewer, id);
    assert_eq!(viewer.run("EXISTS key"), Value::Int(1));
}

/// Ends the hold of `owner` on `key`.
type EndHold = fn(&mut Raw, &str);

const HOLD_ENDINGS: [(&str, EndHold); 9] = [
    ("released", |any, key| assert_eq!(any.run(&format!("LOCK.RELEASE {key} owner")), Value::Int(1))),
    ("released-all", |any, key| assert_eq!(any.run(&format!("LOCK.RELEASE {key} owner ALL")), Value::Int(1))),
    ("several-released", |any, key| {
        assert_eq!(any.run(&format!("LOCK.MRELEASE 1 {key} owner")).items(), [Value::Int(1)]);
    }),
    ("forced", |any, key| assert_eq!(any.run(&format!("LOCK.FORCE {key}")), Value::Int(1))),
    ("deleted", |any, key| assert_eq!(any.run(&format!("DEL {key}")), Value::Int(1))),
    ("unlinked", |any, key| assert_eq!(any.run(&format!("UNLINK {key}")), Value::Int(1))),
    ("expired", |any, key| {
        assert_eq!(any.run(&format!("PEXPIRE {key} 2")), Value::Int(1));
        until_free(any, key);
    }),
    ("field-deleted", |any, key| assert_eq!(any.run(&format!("HDEL {key} owner #fence")), Value::Int(2))),
    ("taken-over", |any, key| {
        // By a client that does not use the module's commands.
        assert_eq!(any.run(&format!("DEL {key}")), Value::Int(1));
        assert_eq!(any.run(&format!("HSET {key} owner 1")), Value::Int(1));
        assert_eq!(any.run(&format!("PEXPIRE {key} 5")), Value::Int(1));
        until_free(any, key);
    }),
];

#[test]
fn ended_hold_and_its_successor_are_not_renewed() {
    let server = Server::start();
    let (holder, mut other) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    let mut ends = Vec::new();
    for (name, end) in HOLD_ENDINGS {
        for next in ["owner", "other"] {
            let key = format!("{name}:{next}");
            holder.run(&format!("LOCK.ACQUIRE {key} owner LEASE 3000 WATCHDOG EPHEMERAL")).token();
            end(&mut other, &key);
            other.run(&format!("LOCK.ACQUIRE {key} {next} LEASE 6000")).token();
            assert_eq!(binding(&mut other, &key, next), (None, false, false), "{key}");
            ends.push((deadline(&mut other, &key), key));
        }
    }
    // Shows that the watchdog runs.
    holder.run("LOCK.ACQUIRE witness owner LEASE 3000 WATCHDOG").token();
    for _ in 0..3 {
        until_renewed(&mut other, "witness");
    }
    let id = holder.client_id();
    holder.close();
    until_gone(&mut other, id);
    for (end, key) in ends {
        let at = deadline(&mut other, &key);
        if now() < end {
            assert_eq!(at, end, "{key}: the next hold was renewed or released");
        }
        runs_out_by(&mut other, &key, end);
    }
}

#[test]
fn new_hold_has_no_flags_of_earlier_hold() {
    let server = Server::start();
    let (mut holder, mut viewer) = (server.raw(), server.raw());
    let client = holder.client_id();
    holder.run("LOCK.SESSION");
    holder.run("LOCK.ACQUIRE key owner EPHEMERAL").token();
    // In one packet, so that the watchdog does not run between the commands.
    let lines = ["DEL key", "LOCK.ACQUIRE key owner WATCHDOG"].map(String::from);
    holder.run_all(&lines)[1].token();
    assert_eq!(binding(&mut viewer, "key", "owner"), (Some(client), true, false));
    // A request on behalf of a session binds its hold, with or without flags.
    let lines = ["DEL key", "LOCK.ACQUIRE key owner"].map(String::from);
    holder.run_all(&lines)[1].token();
    assert_eq!(binding(&mut viewer, "key", "owner"), (Some(client), false, false));
    holder.close();
    until_gone(&mut viewer, client);
    assert_eq!(viewer.run("EXISTS key"), Value::Int(1));
}

#[test]
fn hold_rewritten_by_other_client_is_not_renewed() {
    let server = Server::start();
    let (holder, mut other) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    let client = holder.client_id();
    holder.run("LOCK.ACQUIRE key owner LEASE 3000 WATCHDOG EPHEMERAL").token();
    holder.run("LOCK.ACQUIRE witness owner LEASE 3000 WATCHDOG").token();
    for line in ["MULTI", "DEL key", "HSET key owner 1", "PEXPIRE key 6000"] {
        other.run(line);
    }
    assert_eq!(other.run("EXEC").items(), [1, 1, 1].map(Value::Int));
    let end = deadline(&mut other, "key");
    until_renewed(&mut other, "witness");
    until_renewed(&mut other, "witness");
    assert_eq!(binding(&mut other, "key", "owner"), (None, false, false));
    assert_eq!(deadline(&mut other, "key"), end, "the other client's hold was renewed");
    holder.close();
    until_gone(&mut other, client);
    runs_out_by(&mut other, "key", end);
}

#[test]
fn flushed_hold_and_its_successor_are_not_renewed() {
    let server = Server::start();
    let (holder, mut other) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    holder.run("LOCK.ACQUIRE key owner LEASE 3000 WATCHDOG EPHEMERAL").token();
    other.run("FLUSHALL");
    other.run("LOCK.ACQUIRE key owner LEASE 1000").token();
    let id = holder.client_id();
    holder.close();
    until_gone(&mut other, id);
    runs_out(&mut other, "key");
}

#[test]
fn expired_queued_grant_is_not_bound() {
    let server = Server::start();
    let (holder, mut next) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    holder.run("LOCK.ACQUIRE key owner LEASE 3000 WATCHDOG EPHEMERAL").token();
    // The same owner acquires from another connection, after a release: granted from the queue, and unbound.
    next.run("LOCK.ACQUIRE gate other").token();
    assert_eq!(holder.run("LOCK.RELEASE key owner"), Value::Int(1));
    holder.run("LOCK.ACQUIRE key third LEASE 60000").token();
    assert_eq!(next.begin("LOCK.ACQUIRE key owner LEASE 2500 WAIT 0"), None);
    holder.run("LOCK.RELEASE key third");
    arrives(&mut next).token();
    assert_eq!(binding(&mut next, "key", "owner"), (None, false, false));
    let id = holder.client_id();
    holder.close();
    until_gone(&mut next, id);
    runs_out(&mut next, "key");
}

#[test]
fn renewals_replicate_as_absolute_deadlines() {
    let primary = Server::start();
    let replica = Server::builder().without_module().start();
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let (holder, mut monitor) = (primary.raw(), replica.raw());
    let mut holder = Watched::over(holder, &primary);
    holder.run("LOCK.ACQUIRE key owner LEASE 3000 WATCHDOG").token();
    holder.run("LOCK.ACQUIRE permit owner LEASE 3000 LIMIT 3 WATCHDOG").token();
    primary.wait_for_replica(&replica);
    assert_eq!(monitor.run("MONITOR"), Value::Okay);
    let mut renewed = [0, 0];
    let (begin, end) = (now(), Instant::now() + SOON);
    while renewed.iter().any(|&times| times < 3) {
        assert!(Instant::now() < end, "renewed {renewed:?} times only");
        let Some(line) = monitor.read_timeout(Duration::from_secs(5)).unwrap() else { continue };
        let line = line.text();
        let words: Vec<&str> = line.split('"').skip(1).step_by(2).collect();
        match words.iter().map(|word| word.to_ascii_uppercase()).collect::<Vec<_>>().first().map(String::as_str) {
            Some("PEXPIREAT") => {
                let at: i64 = words[2].parse().unwrap();
                assert!(at > begin && at <= now() + 3000, "{line}");
                renewed[usize::from(words[1] == "permit")] += 1;
            }
            Some("HSET") => assert_eq!(words[1], "permit", "{line}"),
            Some("PING" | "REPLCONF" | "SELECT" | "MULTI" | "EXEC") => {}
            _ => panic!("unexpected in the stream: {line}"),
        }
    }
    let mut copy = replica.raw();
    until(SOON, "primary and replica have the same deadline", || {
        deadline(&mut holder, "key") == deadline(&mut copy, "key")
    });
}

#[test]
fn script_cannot_bind() {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE held owner LEASE 60000").token();
    let commands = [
        "'LOCK.ACQUIRE', 'key', 'owner', 'WATCHDOG'",
        "'LOCK.ACQUIRE', 'key', 'owner', 'EPHEMERAL'",
        "'LOCK.ACQUIRE', 'key', '*'",
        "'LOCK.MACQUIRE', '1', 'key', 'owner', 'WATCHDOG'",
        "'LOCK.MACQUIRE', '1', 'key', 'owner', 'EPHEMERAL'",
        "'LOCK.MACQUIRE', '1', 'key', '*'",
        "'LOCK.RENEW', 'held', 'owner', 'WATCHDOG'",
        "'LOCK.RENEW', 'held', 'owner', 'EPHEMERAL'",
        "'LOCK.RENEW', 'held', '*'",
        "'LOCK.MRENEW', '1', 'held', 'owner', 'WATCHDOG'",
        "'LOCK.RELEASE', 'held', '*'",
    ];
    for command in commands {
        let script = format!("return redis.pcall({command})");
        let reply = connection.call(&[b"EVAL", script.as_bytes(), b"2", b"key", b"held"]);
        let error = reply.error();
        assert!(error.starts_with("ERR ") && error.contains("script"), "{command}: {error}");
    }
    assert_eq!(connection.run("EXISTS key"), Value::Int(0));
    assert_eq!(binding(&mut connection, "held", "owner"), (None, false, false));
    let script = b"return redis.call('LOCK.ACQUIRE', 'key', 'owner')";
    connection.call(&[b"EVAL", script, b"1", b"key"]).token();
}

#[test]
fn transaction_binds_to_its_connection() {
    let server = Server::start();
    let (mut holder, mut viewer) = (server.raw(), server.raw());
    let client = holder.client_id();
    let session = holder.run("LOCK.SESSION").field("id").text();
    holder.run("MULTI");
    holder.run("LOCK.ACQUIRE key * LEASE 3000 WATCHDOG EPHEMERAL");
    holder.run("EXEC").items()[0].token();
    assert_eq!(binding(&mut viewer, "key", &session), (Some(client), true, true));
    for _ in 0..2 {
        let end = deadline(&mut viewer, "key");
        until(SOON, "the lease is renewed while its session reads", || {
            holder.run("LOCK.EVENTS");
            deadline(&mut viewer, "key") > end
        });
    }
    holder.close();
    until_free(&mut viewer, "key");
}

#[test]
fn foreign_lock_is_bound_by_reentry() {
    let server = Server::start();
    let (holder, mut viewer) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    viewer.run("HSET key owner 1");
    viewer.run("PEXPIRE key 500");
    holder.run("LOCK.ACQUIRE key owner LEASE 3000 WATCHDOG EPHEMERAL").token();
    until_renewed(&mut viewer, "key");
    until_renewed(&mut viewer, "key");
    holder.close();
    until_free(&mut viewer, "key");
}
