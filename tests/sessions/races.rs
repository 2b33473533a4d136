//! Exactly once among the living: things that happen in the same instant, in both orders, many times.

use redis::Value;
use support::{Raw, Server, until};

use super::session::{Event, Session};
use crate::common::info_number;
use crate::waiter::{SOON, Speak, Tell, assert_held, figure};

const ROUNDS: usize = 100;

/// What the frozen server finds when it goes on, in this order, in one turn of its event loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    Grant,
    Other,
}

impl First {
    fn of(round: usize) -> Self {
        if round.is_multiple_of(2) { Self::Grant } else { Self::Other }
    }
}

/// Nothing is left of a run: no wait, no event, no hold.
#[track_caller]
fn nothing_is_left(server: &Server, client: &mut Raw) {
    until(SOON, "nothing is left", || {
        ["waiters", "session_waits", "undelivered_events", "bound_holds"]
            .iter()
            .all(|name| info_number(server, "holdfast", &format!("holdfast_{name}")) == 0)
    });
    assert_eq!(client.say("DBSIZE"), Value::Int(0));
}

/// The session's connection is killed in the instant of the grant: whether it listens or not, the next one has the lock.
/// Leases of an hour, so that what sticks is seen.
#[test]
fn session_killed_at_grant_passes_lock_on() {
    let server = Server::start();
    let mut client = server.raw();
    let mut next = Session::open(&server);
    for round in 0..ROUNDS {
        let mut dying = Session::open(&server);
        client.take("LOCK.ACQUIRE key holder LEASE 3600000");
        let bindings = ["", "WATCHDOG", "EPHEMERAL"][round % 3];
        dying.wait(&mut client, &format!("LOCK.ACQUIRE key dying WAIT 0 LEASE 3600000 {bindings}"));
        next.wait(&mut client, &format!("LOCK.ACQUIRE key next-{round} WAIT 0 LEASE 3600000"));
        if round / 2 % 2 == 0 {
            dying.listen(&server);
        }
        let kill = format!("CLIENT KILL ID {}", dying.client);
        let lines = match First::of(round) {
            First::Grant => ["LOCK.RELEASE key holder", kill.as_str()],
            First::Other => [kill.as_str(), "LOCK.RELEASE key holder"],
        };
        if round / 4 % 2 == 0 {
            client.tell(&lines);
            client.read().unwrap();
            client.read().unwrap();
        } else {
            client.tell(&["MULTI", lines[0], lines[1], "EXEC"]);
            (0..4).for_each(|_| drop(client.read().unwrap()));
        }
        let owner = format!("next-{round}");
        next.event().token_of(&["key"], &owner);
        assert_held(&mut client, "key", &owner);
        client.order(&format!("LOCK.RELEASE key {owner}"));
    }
    nothing_is_left(&server, &mut client);
}

/// The connection breaks in the event-loop iteration in which its event is written.
#[test]
fn session_broken_at_grant_passes_lock_on() {
    let server = Server::start();
    let mut client = server.raw();
    let mut next = Session::open(&server);
    let mut told = 0;
    for round in 0..ROUNDS {
        let mut dying = Session::open(&server);
        client.take("LOCK.ACQUIRE key holder LEASE 3600000");
        // One who may have heard of it before it went has it until its lease ends.
        dying.wait(&mut client, "LOCK.ACQUIRE key dying WAIT 0 LEASE 100");
        let owner = format!("next-{round}");
        next.wait(&mut client, &format!("LOCK.ACQUIRE key {owner} WAIT 0 LEASE 3600000"));
        dying.listen(&server);
        let address = dying.raw.local_addr();
        server.stop();
        match First::of(round) {
            First::Grant => {
                client.tell(&["LOCK.RELEASE key holder"]);
                dying.raw.reset();
                until(SOON, "the server's side hears of the end", || server.has_lost(address));
            }
            First::Other => {
                dying.raw.reset();
                until(SOON, "the server's side hears of the end", || server.has_lost(address));
                client.tell(&["LOCK.RELEASE key holder"]);
            }
        }
        server.cont();
        assert_eq!(client.read().unwrap(), Value::Int(1));
        let before = info_number(&server, "holdfast", "holdfast_grants_undelivered");
        next.event().token_of(&["key"], &owner);
        told += before;
        assert_held(&mut client, "key", &owner);
        client.order(&format!("LOCK.RELEASE key {owner}"));
    }
    figure(format!("sessions broken in the instant of their grant: {ROUNDS} rounds ({told})"));
    nothing_is_left(&server, &mut client);
}

/// `CLIENT UNBLOCK` while events are on their way: each is delivered once, in order.
#[test]
fn client_unblock_loses_no_event() {
    let server = Server::start();
    let (mut client, mut other) = (server.raw(), server.raw());
    let mut session = Session::open(&server);
    let (mut interrupted, mut heard) = (0, 0);
    for round in 0..ROUNDS {
        let mut expected = Vec::new();
        for owner in ["one", "two"] {
            let token = session.take(&mut client, &format!("LOCK.ACQUIRE {owner} {owner} WATCHDOG"));
            expected.push(Event::lost(owner, owner, token, "forced"));
        }
        session.listen(&server);
        let how = ["", " ERROR", " TIMEOUT"][round % 3];
        let unblock = format!("CLIENT UNBLOCK {}{how}", session.client);
        let (forces, replies) = (["LOCK.FORCE one", "LOCK.FORCE two"], 3);
        if round / 4 % 2 == 0 {
            match First::of(round) {
                First::Grant => client.tell(&[forces[0], &unblock, forces[1]]),
                First::Other => client.tell(&[&unblock, forces[0], forces[1]]),
            }
            (0..replies).for_each(|_| drop(client.read().unwrap()));
        } else {
            client.tell(&forces);
            other.tell(&[&unblock]);
            (0..2).for_each(|_| drop(client.read().unwrap()));
            other.read().unwrap();
        }
        let mut told = session.interrupted(how);
        if told.is_empty() {
            interrupted += 1
        } else {
            heard += 1
        }
        while told.len() < 2 {
            told.extend(session.next());
        }
        assert_eq!(told, expected, "round {round}");
        assert_eq!(session.raw.say("LOCK.EVENTS"), Value::Nil, "round {round}");
    }
    figure(format!("next, interrupted: {interrupted} times before it had heard, {heard} times after"));
    nothing_is_left(&server, &mut client);
}
