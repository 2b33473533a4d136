//! In a cluster: a slot that goes takes the waits and the holds of sessions along.

use redis::Value;
use support::{eventually, until};

use super::session::{A_WHILE, Event, Session};
use crate::common::error;
use crate::moving_slot::MovingSlot;
use crate::speak::{Reply, waiters};
use crate::waiter::{SOON, Speak, Tell, Waiter, assert_held, until_nobody_waits};

fn start() -> (MovingSlot, Session) {
    let scene = MovingSlot::start();
    let session = Session::open(scene.source());
    (scene, session)
}

#[test]
fn waits_of_session_end_with_moved() {
    let (mut scene, mut session) = start();
    scene.client.take("LOCK.ACQUIRE key holder LEASE 60000");
    session.wait(&mut scene.client, "LOCK.ACQUIRE key first WAIT 0");
    session.wait(&mut scene.client, "LOCK.MACQUIRE 2 key {key}2 both WAIT 0");
    session.wait(&mut scene.client, "LOCK.ACQUIRE key last WAIT 0");
    scene.cluster.move_slot(scene.slot, scene.from, scene.to);
    let moved = scene.moved();
    assert_eq!(error(&scene.client.say("LOCK.ACQUIRE key first")), moved.split_once(' ').unwrap());
    let mut told = session.events(3);
    told.sort_by_key(|event| event.owner.clone());
    let expected = [
        Event::refused(&["key", "{key}2"], "both", &moved),
        Event::refused(&["key"], "first", &moved),
        Event::refused(&["key"], "last", &moved),
    ];
    assert_eq!(told, expected);
    until_nobody_waits(scene.source());
    let mut client = scene.target().raw();
    assert_held(&mut client, "key", "holder");
    let mut there = Session::open(scene.target());
    there.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0");
    client.order("LOCK.RELEASE key holder");
    there.event().token_of(&["key"], "first");
}

#[test]
fn waits_of_session_and_blocked_clients_share_the_queue() {
    let (mut scene, mut session) = start();
    scene.client.take("LOCK.ACQUIRE key holder LEASE 60000");
    let mut first = Waiter::start(scene.source(), "key", "first");
    session.wait(&mut scene.client, "LOCK.ACQUIRE key second WAIT 0");
    let mut third = Waiter::start(scene.source(), "key", "third");
    session.wait(&mut scene.client, "LOCK.ACQUIRE key fourth WAIT 0");
    scene.cluster.move_slot(scene.slot, scene.from, scene.to);
    assert_eq!((first.error().as_str(), third.error().as_str()), ("MOVED", "MOVED"));
    let moved = scene.moved();
    let expected = ["second", "fourth"].map(|owner| Event::refused(&["key"], owner, &moved));
    assert_eq!(session.events(2), expected);
    until_nobody_waits(scene.source());
}

#[test]
fn holds_of_session_are_unbound_when_slot_moves() {
    let (mut scene, mut session) = start();
    let token = session.take(&mut scene.client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 60000");
    scene.cluster.move_slot(scene.slot, scene.from, scene.to);
    assert_eq!(session.event(), Event::unbound("key", "owner", token, "moved"));
    let mut client = scene.target().raw();
    assert_held(&mut client, "key", "owner");
    // It goes on where its key is now.
    let mut there = Session::open(scene.target());
    assert_eq!(there.take(&mut client, &format!("LOCK.RENEW key owner TOKEN {token} WATCHDOG")), token);
    client.order("LOCK.FORCE key");
    assert_eq!(there.event(), Event::lost("key", "owner", token, "forced"));
}

/// While the slot migrates, the key may be at either node: no request is granted here, and none is redirected.
#[test]
fn waits_stay_while_slot_migrates() {
    let (mut scene, mut session) = start();
    scene.client.take("LOCK.ACQUIRE key holder LEASE 60000");
    session.wait(&mut scene.client, "LOCK.ACQUIRE key owner WAIT 0");
    scene.cluster.begin_move(scene.slot, scene.from, scene.to);
    scene.cluster.migrate_keys(scene.slot, scene.from, scene.to);
    session.raw.tell(&["LOCK.EVENTS WAIT 0"]);
    assert!(!eventually(A_WHILE * 3, || !session.raw.pending()), "neither served nor sent away");
    scene.cluster.finish_move(scene.slot, scene.from, scene.to);
    let moved = scene.moved();
    assert_eq!(session.heard(), [Event::refused(&["key"], "owner", &moved)]);
    assert_held(&mut scene.target().raw(), "key", "holder");
}

#[test]
fn waits_are_served_when_migration_is_cancelled() {
    let (mut scene, mut session) = start();
    scene.client.take("LOCK.ACQUIRE key holder LEASE 60000");
    session.wait(&mut scene.client, "LOCK.ACQUIRE key owner WAIT 0");
    scene.cluster.begin_move(scene.slot, scene.from, scene.to);
    scene.client.order("LOCK.RELEASE key holder");
    assert_eq!(session.raw.say("LOCK.EVENTS WAIT 100"), Value::Nil);
    let line = format!("CLUSTER SETSLOT {} STABLE", scene.slot);
    for mut node in [scene.target().raw(), scene.source().raw()] {
        node.order(&line);
    }
    session.event().token_of(&["key"], "owner");
    assert_held(&mut scene.client, "key", "owner");
}

#[test]
fn waits_and_holds_of_other_slots_stay() {
    let (mut scene, mut session) = start();
    let other = (0..)
        .map(|number| format!("other-{number}"))
        .find(|key| {
            let slot = scene.cluster.slot_of(key.as_bytes());
            slot != scene.slot && scene.cluster.owner_of(slot) == scene.from
        })
        .expect("a node has many slots");
    scene.client.take("LOCK.ACQUIRE key holder LEASE 60000");
    let held = session.take(&mut scene.client, &format!("LOCK.ACQUIRE {other} owner WATCHDOG"));
    session.wait(&mut scene.client, &format!("LOCK.ACQUIRE {other} waits WAIT 0"));
    session.wait(&mut scene.client, "LOCK.ACQUIRE key moved WAIT 0");
    scene.cluster.move_slot(scene.slot, scene.from, scene.to);
    let moved = scene.moved();
    assert_eq!(session.event(), Event::refused(&["key"], "moved", &moved));
    assert_eq!(waiters(&mut scene.client, &other), ["waits"]);
    scene.client.order(&format!("LOCK.FORCE {other}"));
    let told = session.events(2);
    assert_eq!(told[0], Event::lost(&other, "owner", held, "forced"));
    told[1].token_of(&[&other], "waits");
}

/// There is no node to redirect to, so the waits stay until the slot returns.
#[test]
fn waits_stay_while_no_node_serves_slot() {
    let (mut scene, mut session) = start();
    scene.client.take("LOCK.ACQUIRE key holder LEASE 1500");
    session.wait(&mut scene.client, "LOCK.ACQUIRE key owner WAIT 0");
    scene.client.order(&format!("CLUSTER DELSLOTS {}", scene.slot));
    // Until the lease is over, too.
    assert!(!eventually(A_WHILE * 9, || session.raw.say("LOCK.EVENTS") != Value::Nil));
    scene.client.order(&format!("CLUSTER ADDSLOTS {}", scene.slot));
    until(SOON, "the cluster is whole", || scene.client.say("CLUSTER INFO").text().contains("cluster_state:ok"));
    session.event().token_of(&["key"], "owner");
}

/// An unread grant moves with its key: it can still be read, and renewed at the new node.
#[test]
fn unread_grant_moves_with_its_key() {
    let (mut scene, mut session) = start();
    scene.client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut scene.client, "LOCK.ACQUIRE key owner WAIT 0 LEASE 60000 WATCHDOG");
    scene.client.order("LOCK.RELEASE key holder");
    scene.cluster.move_slot(scene.slot, scene.from, scene.to);
    let told = session.events(2);
    let token = told[0].token_of(&["key"], "owner");
    assert_eq!(told[1], Event::unbound("key", "owner", token, "moved"));
    assert_eq!(scene.target().raw().say(&format!("LOCK.RENEW key owner TOKEN {token}")), Value::Int(token));
}
