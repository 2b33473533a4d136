//! A cluster that is down, as one of its primaries sees it. The primary grants and renews nothing, and reports every
//! bound hold as lost at its deadline. Its heartbeat says that it takes no writes.

use std::time::Instant;

use redis::Value;
use support::{Cluster, Family, Raw, Server, skip, until};

use crate::common::{array, int, text, unix_millis};
use crate::lines::{Commands, Reply, SOON, arrives};

/// `cluster-node-timeout`, in ms.
const NODE_TIMEOUT: &str = "1500";
const LEASE: i64 = 2_000;

fn start() -> Cluster {
    Cluster::start_with(3, |builder| builder.arg("cluster-node-timeout", NODE_TIMEOUT))
}

/// A key in a slot of this node.
fn key_of(cluster: &Cluster, node: usize) -> String {
    (0..).map(|number| format!("key:{number}")).find(|key| cluster.owns_key(node, key.as_bytes())).expect("some key")
}

/// A session with a watched hold of this key.
fn session_with_hold(node: &Server, key: &str) -> Raw {
    let mut session = node.raw();
    session.run("LOCK.SESSION");
    session.run(&format!("LOCK.ACQUIRE {key} owner LEASE {LEASE} WATCHDOG SESSION *")).token();
    session
}

fn state(server: &Server) -> String {
    let info = server.raw().run("CLUSTER INFO").text();
    info.lines().find_map(|line| line.strip_prefix("cluster_state:")).expect("a state").to_owned()
}

fn renewals(server: &Server) -> i64 {
    server.info("holdfast", "holdfast_watchdog_renewals").expect("INFO has it").parse().expect("a number")
}

/// The events that a session received, other than heartbeats, by kind and detail; and the last heartbeat's `writes`.
#[derive(Debug, Default)]
struct Events {
    events: Vec<(String, String)>,
    writes: Option<i64>,
}

/// Reads the events without blocking.
fn read(session: &mut Raw) -> Events {
    parsed(&session.run("LOCK.EVENTS HEARTBEAT"))
}

fn parsed(reply: &Value) -> Events {
    let mut events = Events::default();
    for event in reply.items() {
        let [kind, .., detail] = array(event) else { panic!("no event: {event:?}") };
        let (kind, detail) = (text(kind), text(detail));
        match kind.as_str() {
            "heartbeat" => events.writes = detail.split(' ').nth(3).map(|writes| writes.parse().expect("a number")),
            _ => events.events.push((kind, detail)),
        }
    }
    events
}

/// Reads events while the cluster is down. Until the hold is lost, nothing is renewed and the heartbeat promises no
/// writes. It is lost as `expired`, at its deadline.
fn assert_lost_at_its_deadline(server: &Server, session: &mut Raw, key: &str, end: i64) {
    let before = renewals(server);
    loop {
        let events = read(session);
        assert_eq!(events.writes, Some(0), "the heartbeat says so: {events:?}");
        if !events.events.is_empty() {
            assert_eq!(events.events, [("lost".into(), "expired".into())]);
            break;
        }
        assert!(unix_millis() < end + 10_000, "the hold of {key} is not reported as lost");
    }
    assert!(unix_millis() >= end, "lost before its deadline");
    assert_eq!(renewals(server), before, "renewed while the cluster is down");
}

/// Pauses two of three primaries, and waits until the first one considers the cluster down.
fn take_down(cluster: &Cluster, session: &mut Raw) {
    cluster.node(1).stop();
    cluster.node(2).stop();
    until(SOON, "the cluster is down", || {
        read(session);
        state(cluster.node(0)) == "fail"
    });
}

#[test]
fn holds_expire_when_cluster_is_down() {
    let cluster = start();
    let replicas = cluster.replica_of_each(NODE_TIMEOUT);
    let node = cluster.node(0);
    let (key, other) = (key_of(&cluster, 0), format!("{{{}}}:other", key_of(&cluster, 0)));
    let mut session = session_with_hold(node, &key);
    let [mut client, mut waiter] = std::array::from_fn(|_| node.raw());
    client.run(&format!("LOCK.ACQUIRE {other} plain LEASE 600000")).token();
    assert_eq!(waiter.begin(&format!("LOCK.ACQUIRE {other} waiter WAIT 0")), None);
    until(SOON, "the lease is renewed", || {
        read(&mut session);
        renewals(node) > 2
    });
    take_down(&cluster, &mut session);
    let error = client.run(&format!("SET {key}:x 1")).error();
    assert!(error.starts_with("CLUSTERDOWN"), "{error}");
    // No command can read the key now. Its deadline is at most a lease away.
    assert_lost_at_its_deadline(node, &mut session, &key, unix_millis() - 1);
    assert!(arrives(&mut waiter).error().starts_with("CLUSTERDOWN"), "the server unblocks clients with an error");
    cluster.node(1).cont();
    cluster.node(2).cont();
    until(SOON, "the cluster is up again", || state(node) == "ok");
    until(SOON, "the lock can be had", || matches!(client.run(&format!("LOCK.ACQUIRE {key} next")), Value::Int(_)));
    until(SOON, "the heartbeat says that the server takes writes", || read(&mut session).writes == Some(1));
    drop(replicas);
}

/// Redis 7 and 8 answer a blocked client with an error, which ends no session.
#[test]
fn session_that_blocks_learns_that_cluster_is_down() {
    let cluster = start();
    let node = cluster.node(0);
    let key = key_of(&cluster, 0);
    let mut session = session_with_hold(node, &key);
    cluster.node(1).stop();
    cluster.node(2).stop();
    until(SOON, "the session is notified", || match session.run("LOCK.EVENTS WAIT 0 HEARTBEAT") {
        error @ Value::ServerError(_) => error.error().starts_with("CLUSTERDOWN"),
        events => parsed(&events).writes == Some(0),
    });
    assert_lost_at_its_deadline(node, &mut session, &key, unix_millis() - 1);
}

/// The key has not moved yet, so it is at no other node.
#[test]
fn hold_in_migrating_slot_expires_when_cluster_is_down() {
    let cluster = start();
    let node = cluster.node(0);
    let key = key_of(&cluster, 0);
    let mut session = session_with_hold(node, &key);
    cluster.begin_move(cluster.slot_of(key.as_bytes()), 0, 1);
    take_down(&cluster, &mut session);
    assert_lost_at_its_deadline(node, &mut session, &key, unix_millis() - 1);
}

/// A hold in a slot that no node owns is lost at its deadline. Other holds are not affected.
#[test]
fn hold_expires_when_no_node_owns_slot() {
    let cluster = Cluster::start_with(2, |builder| builder.arg("cluster-require-full-coverage", "no"));
    let node = cluster.node(0);
    let key = key_of(&cluster, 0);
    let mut session = session_with_hold(node, &key);
    let mut client = node.raw();
    client.run(&format!("CLUSTER DELSLOTS {}", cluster.slot_of(key.as_bytes())));
    let error = client.run(&format!("SET {key}:x 1"));
    assert!(!matches!(error, Value::Int(_)));
    let (before, end, mut lost) = (renewals(node), Instant::now() + SOON, Vec::new());
    while lost.is_empty() {
        let events = read(&mut session);
        assert_eq!(events.writes, Some(1), "other slots are served");
        lost = events.events;
        assert!(Instant::now() < end, "not reported as lost");
    }
    assert_eq!(lost, [("lost".into(), "expired".into())], "expired, not unbound: no node has it");
    assert_eq!(renewals(node), before, "renewed where no node has the slot");
}

/// A node that imports a slot serves the holds in it.
#[test]
fn hold_is_renewed_while_slot_is_imported() {
    let cluster = Cluster::start(2);
    let key = key_of(&cluster, 0);
    let slot = cluster.slot_of(key.as_bytes());
    cluster.begin_move(slot, 0, 1);
    let target = cluster.node(1);
    let [mut session, mut client] = std::array::from_fn(|_| target.raw());
    let id = session.run("LOCK.SESSION").field("id").text();
    client.run("ASKING");
    let token = client.run(&format!("LOCK.ACQUIRE {key} owner LEASE {LEASE} WATCHDOG SESSION {id}")).token();
    let before = renewals(target);
    until(SOON, "the lease is renewed", || {
        let events = read(&mut session);
        assert_eq!(events.events, [], "the hold is neither lost nor unbound");
        renewals(target) > before + 3
    });
    cluster.finish_move(slot, 0, 1);
    assert_eq!(int(&client.run(&format!("LOCK.RENEW {key} owner TOKEN {token}"))), token);
}

/// A primary is cut off from the cluster bus while its replica is promoted.
#[test]
fn isolated_primary_lets_holds_expire() {
    let cluster = start();
    let node = cluster.node(0);
    if !node.version().at_least(Family::Valkey, 9, 0) {
        return skip("this server can't be cut off from the cluster bus alone");
    }
    let replicas = cluster.replica_of_each(NODE_TIMEOUT);
    let replica = &replicas[0];
    let key = key_of(&cluster, 0);
    let mut session = session_with_hold(node, &key);
    until(SOON, "the lease is renewed", || {
        read(&mut session);
        renewals(node) > 2
    });
    assert_eq!(node.raw().run("DEBUG DROP-CLUSTER-PACKET-FILTER -2"), Value::Okay);
    // The owner believes that it holds the lock until it reads `lost`.
    let (mut lost_at, mut taken_at, mut at_fail) = (None, None, None);
    let mut there = replica.raw();
    let end = Instant::now() + SOON;
    while lost_at.is_none() || taken_at.is_none() {
        assert!(Instant::now() < end, "lost: {lost_at:?}, taken by another: {taken_at:?}");
        let received = read(&mut session);
        if at_fail.is_some() {
            assert_eq!(received.writes, Some(0), "the heartbeat says so: {received:?}");
        } else if state(node) == "fail" {
            at_fail = Some(renewals(node));
        }
        if !received.events.is_empty() {
            assert_eq!(received.events, [("lost".into(), "expired".into())]);
            lost_at.get_or_insert_with(unix_millis);
        }
        if let Value::Int(_) = there.run(&format!("LOCK.ACQUIRE {key} another LEASE 600000")) {
            taken_at.get_or_insert_with(unix_millis);
        }
    }
    let (lost, taken) = (lost_at.unwrap_or(0), taken_at.unwrap_or(0));
    println!("lost {} ms after another client acquired it", lost - taken);
    assert!(lost <= taken + LEASE, "two hold it, and both leases run: {} ms", lost - taken);
    assert_eq!(at_fail, Some(renewals(node)), "renewed by a primary that is cut off");
}
