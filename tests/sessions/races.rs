//! Races: two things happen in the same event-loop iteration, in both orders, many times. Events are delivered exactly once.

use redis::Value;
use support::{Raw, Server, until};

use super::session::{Event, Session};
use crate::common::info_number;
use crate::waiter::{Commands, SOON, assert_held, figure};

const ROUNDS: usize = 50;

/// The order in which the paused server finds both, in one event-loop iteration.
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

/// The session has left no wait, no event, no hold.
#[track_caller]
fn assert_nothing_left(server: &Server, client: &mut Raw) {
    until(SOON, "no wait, event or hold is left", || {
        ["waiters", "session_waits", "undelivered_events", "bound_holds"]
            .iter()
            .all(|name| info_number(server, "holdfast", &format!("holdfast_{name}")) == 0)
    });
    assert_eq!(client.run("DBSIZE"), Value::Int(0));
}

/// The session's connection is killed at the grant, blocked on events or not: the next waiter is granted. Leases last an
/// hour, so that a hold that stays is noticed.
#[test]
fn session_killed_at_grant_passes_lock_on() {
    let server = Server::start();
    let mut client = server.raw();
    let mut next = Session::open(&server);
    for round in 0..ROUNDS {
        let mut dying = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder LEASE 3600000");
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
            client.send_lines(&lines);
            client.read().unwrap();
            client.read().unwrap();
        } else {
            client.send_lines(&["MULTI", lines[0], lines[1], "EXEC"]);
            (0..4).for_each(|_| drop(client.read().unwrap()));
        }
        let owner = format!("next-{round}");
        next.event().token_of(&["key"], &owner);
        assert_held(&mut client, "key", &owner);
        client.run_ok(&format!("LOCK.RELEASE key {owner}"));
    }
    assert_nothing_left(&server, &mut client);
}

/// The connection breaks in the event-loop iteration in which its event is written.
#[test]
fn session_broken_at_grant_passes_lock_on() {
    let server = Server::start();
    let mut client = server.raw();
    let mut next = Session::open(&server);
    let mut received = 0;
    for round in 0..ROUNDS {
        let mut dying = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder LEASE 3600000");
        // A client that may have read the event holds the lock until its lease ends.
        dying.wait(&mut client, "LOCK.ACQUIRE key dying WAIT 0 LEASE 100");
        let owner = format!("next-{round}");
        next.wait(&mut client, &format!("LOCK.ACQUIRE key {owner} WAIT 0 LEASE 3600000"));
        dying.listen(&server);
        let address = dying.raw.local_addr();
        server.stop();
        match First::of(round) {
            First::Grant => {
                client.send_lines(&["LOCK.RELEASE key holder"]);
                dying.raw.reset();
                until(SOON, "the disconnect has reached the server", || server.has_lost(address));
            }
            First::Other => {
                dying.raw.reset();
                until(SOON, "the disconnect has reached the server", || server.has_lost(address));
                client.send_lines(&["LOCK.RELEASE key holder"]);
            }
        }
        server.cont();
        assert_eq!(client.read().unwrap(), Value::Int(1));
        let before = info_number(&server, "holdfast", "holdfast_grants_undelivered");
        next.event().token_of(&["key"], &owner);
        received += before;
        assert_held(&mut client, "key", &owner);
        client.run_ok(&format!("LOCK.RELEASE key {owner}"));
    }
    figure(format!("sessions disconnected at their grant: {ROUNDS} rounds ({received})"));
    assert_nothing_left(&server, &mut client);
}

/// `CLIENT UNBLOCK` while events arrive: each event is delivered once, in order.
#[test]
fn client_unblock_loses_no_event() {
    let server = Server::start();
    let (mut client, mut other) = (server.raw(), server.raw());
    let mut session = Session::open(&server);
    let (mut interrupted, mut heard) = (0, 0);
    for round in 0..ROUNDS {
        let mut expected = Vec::new();
        for owner in ["one", "two"] {
            let token = session.get_token(&mut client, &format!("LOCK.ACQUIRE {owner} {owner} WATCHDOG"));
            expected.push(Event::lost(owner, owner, token, "forced"));
        }
        session.listen(&server);
        let how = ["", " ERROR", " TIMEOUT"][round % 3];
        let unblock = format!("CLIENT UNBLOCK {}{how}", session.client);
        let (forces, replies) = (["LOCK.FORCE one", "LOCK.FORCE two"], 3);
        if round / 4 % 2 == 0 {
            match First::of(round) {
                First::Grant => client.send_lines(&[forces[0], &unblock, forces[1]]),
                First::Other => client.send_lines(&[&unblock, forces[0], forces[1]]),
            }
            (0..replies).for_each(|_| drop(client.read().unwrap()));
        } else {
            client.send_lines(&forces);
            other.send_lines(&[&unblock]);
            (0..2).for_each(|_| drop(client.read().unwrap()));
            other.read().unwrap();
        }
        let mut received = session.read_unblocked(how);
        if received.is_empty() {
            interrupted += 1
        } else {
            heard += 1
        }
        while received.len() < 2 {
            received.extend(session.next());
        }
        assert_eq!(received, expected, "round {round}");
        assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil, "round {round}");
    }
    figure(format!("LOCK.EVENTS unblocked: {interrupted} times before its events, {heard} times after"));
    assert_nothing_left(&server, &mut client);
}
