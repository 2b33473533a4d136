//! Fields of a lock with an expiry of their own: only one that ends a hold is told as the end of one.

use redis::Value;
use support::{Feature, Raw, Server, skip};

use crate::common::array;
use crate::speak::{Reply, Speak, arrives, owners};

/// Locks that others wait for, so that the module looks at them: a mutex, and one that two share.
fn locks(server: &Server, connection: &mut Raw, name: &str) -> [Raw; 2] {
    connection.say(&format!("LOCK.ACQUIRE {name}:mutex me LEASE 600000")).token();
    for owner in ["me", "you"] {
        connection.say(&format!("LOCK.ACQUIRE {name}:shared {owner} SHARED LEASE 600000")).token();
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
        return skip("this server has no fields that expire");
    }
    let mut connection = server.raw();
    assert_eq!(connection.say("CONFIG SET notify-keyspace-events KEAd"), Value::Okay);
    let mut listener = server.raw();
    listener.say("SUBSCRIBE __keyevent@0__:lock.expired");
    let mut told = || text_of(&arrives(&mut listener));

    let [mut of_mutex, mut of_shared] = locks(&server, &mut connection, "kept");
    let [mut after_me, mut after_all] = locks(&server, &mut connection, "ended");
    // In this order: the events of the last ones come after those that the others would cause.
    for line in [
        "HPEXPIRE kept:mutex 1 FIELDS 1 #fence",
        "HPEXPIRE kept:shared 1 FIELDS 2 #fence #@you",
        "HPEXPIRE ended:mutex 400 FIELDS 1 me",
    ] {
        assert!(connection.say(line).items().iter().all(|reply| *reply == Value::Int(1)), "{line}");
    }
    assert_eq!(told(), "ended:mutex");
    arrives(&mut after_me).token();
    assert!(connection.say("HGET kept:mutex #fence").is_null() && connection.say("HGET kept:shared #fence").is_null());
    assert_eq!(owners(&mut connection, "kept:mutex"), ["me"]);
    assert_eq!(owners(&mut connection, "kept:shared"), ["me", "you"]);
    assert!(of_mutex.pending() && of_shared.pending());

    // Each hold that ends is told once, alone or with others.
    connection.say("HPEXPIRE ended:shared 1 FIELDS 1 you");
    assert_eq!(told(), "ended:shared");
    assert_eq!(owners(&mut connection, "ended:shared"), ["me"]);
    assert!(after_all.pending());
    connection.say("HPEXPIRE ended:shared 1 FIELDS 1 me");
    assert_eq!(told(), "ended:shared");
    arrives(&mut after_all).token();
    connection.say("HPEXPIRE kept:shared 1 FIELDS 2 me you");
    assert_eq!([told(), told()], ["kept:shared", "kept:shared"]);
    arrives(&mut of_shared).token();
    assert!(of_mutex.pending());
}

/// What a message is about.
fn text_of(message: &Value) -> String {
    array(message)[2].text()
}
