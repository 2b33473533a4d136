//! Clusters: the waits and holds of sessions when a slot moves.

use redis::Value;
use support::{eventually, until};

use super::session::{A_WHILE, Event, Session};
use crate::common::{ask_ok, error, text};
use crate::lines::{Reply, waiters};
use crate::moving_slot::MovingSlot;
use crate::waiter::{Commands, SOON, Waiter, assert_held, until_no_waiters};

fn start() -> (MovingSlot, Session) {
    let fixture = MovingSlot::start();
    let session = Session::open(fixture.source());
    (fixture, session)
}

#[test]
fn waits_of_session_end_with_moved() {
    let (mut fixture, mut session) = start();
    fixture.client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    session.wait(&mut fixture.client, "LOCK.ACQUIRE key first WAIT 0");
    session.wait(&mut fixture.client, "LOCK.MACQUIRE 2 key {key}2 both WAIT 0");
    session.wait(&mut fixture.client, "LOCK.ACQUIRE key last WAIT 0");
    fixture.cluster.move_slot(fixture.slot, fixture.from, fixture.to);
    let moved = fixture.moved();
    assert_eq!(error(&fixture.client.run("LOCK.ACQUIRE key first")), moved.split_once(' ').unwrap());
    let mut received = session.events(3);
    received.sort_by_key(|event| event.owner.clone());
    let expected = [
        Event::refused(&["key", "{key}2"], "both", &moved),
        Event::refused(&["key"], "first", &moved),
        Event::refused(&["key"], "last", &moved),
    ];
    assert_eq!(received, expected);
    until_no_waiters(fixture.source());
    let mut client = fixture.target().raw();
    assert_held(&mut client, "key", "holder");
    let mut there = Session::open(fixture.target());
    there.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0");
    client.run_ok("LOCK.RELEASE key holder");
    there.event().token_of(&["key"], "first");
}

/// Clients may be unable to reach a node by its IP address, or to verify its certificate.
#[test]
fn moved_names_preferred_endpoint() {
    for endpoint in ["hostname", "unknown-endpoint"] {
        let (mut fixture, mut session) = start();
        ask_ok(&mut fixture.client, &format!("CONFIG SET cluster-preferred-endpoint-type {endpoint}"));
        ask_ok(&mut fixture.target().raw(), "CONFIG SET cluster-announce-hostname node.example.com");
        until(SOON, "the node knows the host name", || {
            text(&fixture.client.run("CLUSTER NODES")).contains("node.example.com")
        });
        fixture.client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
        session.wait(&mut fixture.client, "LOCK.ACQUIRE key first WAIT 0");
        fixture.cluster.move_slot(fixture.slot, fixture.from, fixture.to);
        let received = session.event();
        let reply = fixture.client.run("LOCK.ACQUIRE key first");
        let (code, place) = error(&reply);
        assert_eq!(received, Event::refused(&["key"], "first", &format!("{code} {place}")), "{endpoint}");
        assert!(!place.contains("127.0.0.1"), "{place}");
    }
}

#[test]
fn waits_of_session_and_blocked_clients_share_the_queue() {
    let (mut fixture, mut session) = start();
    fixture.client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut first = Waiter::start(fixture.source(), "key", "first");
    session.wait(&mut fixture.client, "LOCK.ACQUIRE key second WAIT 0");
    let mut third = Waiter::start(fixture.source(), "key", "third");
    session.wait(&mut fixture.client, "LOCK.ACQUIRE key fourth WAIT 0");
    fixture.cluster.move_slot(fixture.slot, fixture.from, fixture.to);
    assert_eq!((first.error().as_str(), third.error().as_str()), ("MOVED", "MOVED"));
    let moved = fixture.moved();
    let expected = ["second", "fourth"].map(|owner| Event::refused(&["key"], owner, &moved));
    assert_eq!(session.events(2), expected);
    until_no_waiters(fixture.source());
}

#[test]
fn holds_of_session_are_unbound_when_slot_moves() {
    let (mut fixture, mut session) = start();
    let token = session.get_token(&mut fixture.client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 60000");
    fixture.cluster.move_slot(fixture.slot, fixture.from, fixture.to);
    assert_eq!(session.event(), Event::unbound("key", "owner", token, "moved"));
    let mut client = fixture.target().raw();
    assert_held(&mut client, "key", "owner");
    // The session requests again at the new node.
    let mut there = Session::open(fixture.target());
    assert_eq!(there.get_token(&mut client, &format!("LOCK.RENEW key owner TOKEN {token} WATCHDOG")), token);
    client.run_ok("LOCK.FORCE key");
    assert_eq!(there.event(), Event::lost("key", "owner", token, "forced"));
}

/// While the slot migrates, the key may be at either node: requests are neither granted nor redirected.
#[test]
fn waits_stay_while_slot_migrates() {
    let (mut fixture, mut session) = start();
    fixture.client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    session.wait(&mut fixture.client, "LOCK.ACQUIRE key owner WAIT 0");
    fixture.cluster.begin_move(fixture.slot, fixture.from, fixture.to);
    fixture.cluster.migrate_keys(fixture.slot, fixture.from, fixture.to);
    session.raw.send_lines(&["LOCK.EVENTS WAIT 0"]);
    assert!(!eventually(A_WHILE * 3, || !session.raw.pending()), "neither granted nor redirected");
    fixture.cluster.finish_move(fixture.slot, fixture.from, fixture.to);
    let moved = fixture.moved();
    assert_eq!(session.read_events(), [Event::refused(&["key"], "owner", &moved)]);
    assert_held(&mut fixture.target().raw(), "key", "holder");
}

#[test]
fn waits_are_served_when_migration_is_cancelled() {
    let (mut fixture, mut session) = start();
    fixture.client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    session.wait(&mut fixture.client, "LOCK.ACQUIRE key owner WAIT 0");
    fixture.cluster.begin_move(fixture.slot, fixture.from, fixture.to);
    fixture.client.run_ok("LOCK.RELEASE key holder");
    assert_eq!(session.raw.run("LOCK.EVENTS WAIT 100"), Value::Nil);
    let line = format!("CLUSTER SETSLOT {} STABLE", fixture.slot);
    for mut node in [fixture.target().raw(), fixture.source().raw()] {
        node.run_ok(&line);
    }
    session.event().token_of(&["key"], "owner");
    assert_held(&mut fixture.client, "key", "owner");
}

#[test]
fn waits_and_holds_of_other_slots_stay() {
    let (mut fixture, mut session) = start();
    let other = fixture.key_of_other_slot();
    fixture.client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let held = session.get_token(&mut fixture.client, &format!("LOCK.ACQUIRE {other} owner WATCHDOG"));
    session.wait(&mut fixture.client, &format!("LOCK.ACQUIRE {other} waits WAIT 0"));
    session.wait(&mut fixture.client, "LOCK.ACQUIRE key moved WAIT 0");
    fixture.cluster.move_slot(fixture.slot, fixture.from, fixture.to);
    let moved = fixture.moved();
    assert_eq!(session.event(), Event::refused(&["key"], "moved", &moved));
    assert_eq!(waiters(&mut fixture.client, &other), ["waits"]);
    fixture.client.run_ok(&format!("LOCK.FORCE {other}"));
    let received = session.events(2);
    assert_eq!(received[0], Event::lost(&other, "owner", held, "forced"));
    received[1].token_of(&[&other], "waits");
}

/// There is no node to redirect to, so the waits stay until the slot returns.
#[test]
fn waits_stay_while_no_node_serves_slot() {
    let (mut fixture, mut session) = start();
    fixture.client.get_token("LOCK.ACQUIRE key holder LEASE 1500");
    session.wait(&mut fixture.client, "LOCK.ACQUIRE key owner WAIT 0");
    fixture.client.run_ok(&format!("CLUSTER DELSLOTS {}", fixture.slot));
    // Also when the lease has expired.
    assert!(!eventually(A_WHILE * 9, || session.raw.run("LOCK.EVENTS") != Value::Nil));
    fixture.client.run_ok(&format!("CLUSTER ADDSLOTS {}", fixture.slot));
    until(SOON, "the cluster is whole", || fixture.client.run("CLUSTER INFO").text().contains("cluster_state:ok"));
    session.event().token_of(&["key"], "owner");
}

/// An unread grant moves with its key: it can still be read, and renewed at the new node.
#[test]
fn unread_grant_moves_with_its_key() {
    let (mut fixture, mut session) = start();
    fixture.client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut fixture.client, "LOCK.ACQUIRE key owner WAIT 0 LEASE 60000 WATCHDOG");
    fixture.client.run_ok("LOCK.RELEASE key holder");
    fixture.cluster.move_slot(fixture.slot, fixture.from, fixture.to);
    let received = session.events(2);
    let token = received[0].token_of(&["key"], "owner");
    assert_eq!(received[1], Event::unbound("key", "owner", token, "moved"));
    assert_eq!(fixture.target().raw().run(&format!("LOCK.RENEW key owner TOKEN {token}")), Value::Int(token));
}
