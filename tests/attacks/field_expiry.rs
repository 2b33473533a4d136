//! Field expiry in locks: only the expiry of an owner's field is notified as the end of a hold.

use redis::Value;
use support::{Feature, Raw, Server, skip};

use crate::common::array;
use crate::lines::{Commands, Reply, arrives, owners};

/// Two locks with waiters, so that the module reads them: a mutex and a semaphore.
fn locks(server: &Server, connection: &mut Raw, name: &str) -> [Raw; 2] {
    connection.run(&format!("LOCK.ACQUIRE {name}:mutex me LEASE 600000")).token();
    for owner in ["me", "you"] {
        connection.run(&format!("LOCK.ACQUIRE {name}:shared {owner} SHARED LEASE 600000")).token();
    }
    ["mutex", "shared"].map(|kind| {
        let mut waiter = server.raw();
        assert_eq!(waiter.begin(&format!("LOCK.ACQUIRE {name}:{kind} waiter WAIT 0")), None);
        waiter
    })
}

#[test]
fn field_expiry_is_reported_only_for_owner_fields() {
    let server = Server::builder().arg("notify-keyspace-events", "KEA").start();
    if !server.can(Feature::HashFieldExpiry) {
        return skip("this server has no field expiry");
    }
    let mut connection = server.raw();
    assert_eq!(connection.run("CONFIG SET notify-keyspace-events KEAd"), Value::Okay);
    let mut listener = server.raw();
    listener.run("SUBSCRIBE __keyevent@0__:lock.expired");
    let mut received = || text_of(&arrives(&mut listener));

    let [mut of_mutex, mut of_shared] = locks(&server, &mut connection, "kept");
    let [mut after_me, mut after_all] = locks(&server, &mut connection, "ended");
    // In this order: the last events come after those that the first expiries would cause.
    for line in [
        "HPEXPIRE kept:mutex 1 FIELDS 1 #fence",
        "HPEXPIRE kept:shared 1 FIELDS 2 #fence #@you",
        "HPEXPIRE ended:mutex 400 FIELDS 1 me",
    ] {
        assert!(connection.run(line).items().iter().all(|reply| *reply == Value::Int(1)), "{line}");
    }
    assert_eq!(received(), "ended:mutex");
    arrives(&mut after_me).token();
    assert!(connection.run("HGET kept:mutex #fence").is_null() && connection.run("HGET kept:shared #fence").is_null());
    assert_eq!(owners(&mut connection, "kept:mutex"), ["me"]);
    assert_eq!(owners(&mut connection, "kept:shared"), ["me", "you"]);
    assert!(of_mutex.pending() && of_shared.pending());

    // Each ended hold is notified once, alone or with others.
    connection.run("HPEXPIRE ended:shared 1 FIELDS 1 you");
    assert_eq!(received(), "ended:shared");
    assert_eq!(owners(&mut connection, "ended:shared"), ["me"]);
    assert!(after_all.pending());
    connection.run("HPEXPIRE ended:shared 1 FIELDS 1 me");
    assert_eq!(received(), "ended:shared");
    arrives(&mut after_all).token();
    connection.run("HPEXPIRE kept:shared 1 FIELDS 2 me you");
    assert_eq!([received(), received()], ["kept:shared", "kept:shared"]);
    arrives(&mut of_shared).token();
    assert!(of_mutex.pending());
}

/// The key that a message names.
fn text_of(message: &Value) -> String {
    array(message)[2].text()
}
