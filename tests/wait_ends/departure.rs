//! The waiter leaves the queue: by itself or because of another client; before, at, and after its grant.

use std::io::ErrorKind;
use std::time::Duration;

use redis::Value;
use support::{Raw, Server, eventually, until};

use crate::common::{array, deadline, error, info_number, int, text};
use crate::lines::now;
use crate::waiter::{
    Commands, SOON, Waiter, assert_held, blocked_clients, count_waiters, holders_in_hash, until_no_waiters,
};

/// How a waiter leaves the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    TimedOut,
    Unblocked,
    UnblockedWithError,
    Killed,
    Closed,
    Reset,
    HalfClosed,
}

impl Leaving {
    /// Makes the waiter of `owner` leave, and checks its reply.
    fn leave(self, mut waiter: Waiter, owner: &str, server: &Server, client: &mut Raw) {
        let id = waiter.id;
        match self {
            // However long it took until here: the owner's next request takes over the place, and soon times out.
            Self::TimedOut => {
                let mut last = Waiter::sending_briefly(server, &format!("LOCK.ACQUIRE key {owner} WAIT 1"));
                assert_eq!(waiter.error(), "SUPERSEDED");
                assert_eq!(last.end(), Value::Nil);
            }
            Self::Unblocked => {
                assert_eq!(client.run(&format!("CLIENT UNBLOCK {id}")), Value::Int(1));
                assert_eq!(waiter.end(), Value::Nil);
                assert_still_serves(&mut waiter);
            }
            Self::UnblockedWithError => {
                assert_eq!(client.run(&format!("CLIENT UNBLOCK {id} ERROR")), Value::Int(1));
                assert_eq!(waiter.error(), "UNBLOCKED");
                assert_still_serves(&mut waiter);
            }
            Self::Killed => {
                assert_eq!(client.run(&format!("CLIENT KILL ID {id}")), Value::Int(1));
                assert!(waiter.raw.read().is_err());
            }
            Self::Closed => waiter.raw.close(),
            Self::Reset => waiter.raw.reset(),
            Self::HalfClosed => drop(waiter),
        }
    }
}

/// A client whose wait ended without a grant can continue to use its connection.
#[track_caller]
fn assert_still_serves(waiter: &mut Waiter) {
    assert_eq!(waiter.raw.run("PING"), Value::SimpleString("PONG".into()));
    assert_eq!(waiter.raw.run("LOCK.ACQUIRE key waiter"), Value::Nil);
}

/// A writer at the head of the queue blocks the readers behind it until it leaves.
fn head_leaves(leaving: Leaving) {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key reader SHARED LEASE 60000");
    let head = Waiter::start(&server, "key", "writer");
    let mut behind = Waiter::sending(&server, "LOCK.ACQUIRE key second-reader SHARED WAIT 0");
    let mut last = Waiter::sending(&server, "LOCK.ACQUIRE key third-reader SHARED WAIT 0");
    assert!(behind.waits() && last.waits());
    leaving.leave(head, "writer", &server, &mut client);
    assert!(behind.token() < last.token());
    let names: Vec<String> = holders_in_hash(&mut client, "key").into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["reader", "second-reader", "third-reader"]);
    until_no_waiters(&server);
}

/// A waiter that left from the middle of the queue is skipped, and holds nothing.
fn middle_leaves(leaving: Leaving) {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut first = Waiter::start(&server, "key", "first");
    let middle = Waiter::start(&server, "key", "middle");
    let mut last = Waiter::start(&server, "key", "last");
    leaving.leave(middle, "middle", &server, &mut client);
    until(SOON, "two waiters are left", || count_waiters(&mut client, "key") == 2);
    client.run_ok("LOCK.RELEASE key holder");
    let token = first.token();
    assert!(last.waits());
    client.run_ok("LOCK.RELEASE key first");
    assert!(last.token() > token);
    until_no_waiters(&server);
}

/// The only waiter leaves: the queue is empty, and the lock is not affected.
fn only_one_leaves(leaving: Leaving) {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let waiter = Waiter::start(&server, "key", "waiter");
    leaving.leave(waiter, "waiter", &server, &mut client);
    until_no_waiters(&server);
    assert!(array(&client.run("LOCK.WAITERS key")).is_empty());
    assert_held(&mut client, "key", "holder");
    client.run_ok("LOCK.RELEASE key holder");
    assert_eq!(client.run("EXISTS key"), Value::Int(0), "no request was granted");
    client.get_token("LOCK.ACQUIRE key newcomer");
}

macro_rules! in_every_place {
    ($($name:ident: $leaving:ident;)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn only_waiter_disconnects() {
                only_one_leaves(Leaving::$leaving);
            }

            #[test]
            fn head_of_queue_disconnects() {
                head_leaves(Leaving::$leaving);
            }

            #[test]
            fn waiter_in_middle_of_queue_disconnects() {
                middle_leaves(Leaving::$leaving);
            }
        }
    )*};
}

in_every_place! {
    own_timeout: TimedOut;
    client_unblock: Unblocked;
    client_unblock_error: UnblockedWithError;
    client_kill: Killed;
    connection_closed: Closed;
    connection_reset: Reset;
    socket_dropped: HalfClosed;
}

#[test]
fn client_unblock_timeout_equals_client_unblock() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder");
    let mut waiter = Waiter::start(&server, "key", "waiter");
    assert_eq!(client.run(&format!("CLIENT UNBLOCK {} TIMEOUT", waiter.id)), Value::Int(1));
    assert_eq!(waiter.end(), Value::Nil);
    assert_eq!(client.run(&format!("CLIENT UNBLOCK {}", waiter.id)), Value::Int(0), "it waits no more");
}

#[test]
fn client_unblock_error_returns_error() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder");
    let mut ours = Waiter::start(&server, "key", "waiter");
    let mut blpop = Waiter::sending(&server, "BLPOP list 0");
    client.run_ok(&format!("CLIENT UNBLOCK {} ERROR", ours.id));
    client.run_ok(&format!("CLIENT UNBLOCK {} ERROR", blpop.id));
    assert_eq!(error(&ours.end()), error(&blpop.end()), "as BLPOP's");
}

#[test]
fn client_unblock_works_in_transaction() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder");
    let mut first = Waiter::start(&server, "key", "first");
    let mut second = Waiter::start(&server, "key", "second");
    client.run_ok("MULTI");
    client.run_ok(&format!("CLIENT UNBLOCK {}", first.id));
    client.run_ok("LOCK.RELEASE key holder");
    assert_eq!(client.run_ok("EXEC"), Value::Array(vec![Value::Int(1), Value::Int(1)]));
    assert_eq!(first.end(), Value::Nil);
    second.token();
    assert_held(&mut client, "key", "second");
}

#[test]
fn client_kill_ends_many_waiters() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let waiters: Vec<Waiter> =
        (0..50).map(|number| Waiter::start(&server, "key", &format!("waiter-{number}"))).collect();
    assert!(int(&client.run("CLIENT KILL TYPE normal SKIPME yes")) >= 50);
    until_no_waiters(&server);
    drop(waiters);
    client.run_ok("LOCK.RELEASE key holder");
    assert_eq!(client.run("EXISTS key"), Value::Int(0));
}

/// How commands reach the server together.
#[derive(Clone, Copy)]
enum Together {
    InAPipeline,
    InATransaction,
}

/// `holder` releases the lock, which is granted to `first`. In the same iteration, `command` affects `first`.
fn grant_and(together: Together, command: impl Fn(i64) -> String) -> (Server, Raw, Waiter, Waiter) {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let first = Waiter::start(&server, "key", "first");
    let second = Waiter::start(&server, "key", "second");
    let then = command(first.id);
    match together {
        Together::InAPipeline => {
            client.send_lines(&["LOCK.RELEASE key holder", &then]);
            assert_eq!(client.read().unwrap(), Value::Int(1));
            client.read().unwrap();
        }
        Together::InATransaction => {
            client.send_lines(&["MULTI", "LOCK.RELEASE key holder", &then, "EXEC"]);
            for _ in 0..3 {
                client.read().unwrap();
            }
            assert_eq!(array(&client.read().unwrap())[0], Value::Int(1));
        }
    }
    (server, client, first, second)
}

/// The waiter that was granted the lock is killed before it could read the reply: the next waiter is granted.
fn killed_while_granted(together: Together) {
    let (server, mut client, mut first, mut second) = grant_and(together, |id| format!("CLIENT KILL ID {id}"));
    let heard = first.raw.read();
    assert_eq!(heard.map_err(|error| error.kind() != ErrorKind::TimedOut), Err(true), "it got no reply");
    second.token();
    assert_held(&mut client, "key", "second");
    until_no_waiters(&server);
}

/// Either `first` holds the lock and has the reply, or it was unblocked and the next waiter is granted.
fn unblocked_while_granted(together: Together, how: &str) {
    let (server, mut client, mut first, mut second) = grant_and(together, |id| format!("CLIENT UNBLOCK {id}{how}"));
    match first.end() {
        Value::Int(_) => {
            assert_held(&mut client, "key", "first");
            assert!(second.waits());
            client.run_ok("LOCK.RELEASE key first");
        }
        Value::Nil => assert_eq!(how, ""),
        refused => assert_eq!((how, error(&refused).0), (" ERROR", "UNBLOCKED")),
    }
    second.token();
    assert_held(&mut client, "key", "second");
    until_no_waiters(&server);
}

#[test]
fn waiter_is_killed_in_granting_pipeline() {
    killed_while_granted(Together::InAPipeline);
}

#[test]
fn waiter_is_killed_in_granting_transaction() {
    killed_while_granted(Together::InATransaction);
}

#[test]
fn waiter_is_unblocked_in_granting_pipeline() {
    unblocked_while_granted(Together::InAPipeline, "");
}

#[test]
fn waiter_is_unblocked_in_granting_transaction() {
    unblocked_while_granted(Together::InATransaction, "");
}

#[test]
fn waiter_is_unblocked_with_error_in_granting_pipeline() {
    unblocked_while_granted(Together::InAPipeline, " ERROR");
}

#[test]
fn waiter_is_unblocked_with_error_in_granting_transaction() {
    unblocked_while_granted(Together::InATransaction, " ERROR");
}

/// A request re-enters a lock that its owner acquired in another way, and its connection is closed. The hold that it
/// added is revoked, the others stay, and no deadline becomes earlier.
#[test]
fn revoked_reentry_shortens_no_other_hold() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let dying = Waiter::sending(&server, "LOCK.ACQUIRE key owner LEASE 30000 WAIT 0");
    let begin = now();
    let kill = format!("CLIENT KILL ID {}", dying.id);
    client.send_lines(&["MULTI", "DEL key", "HSET key owner 2", "PEXPIRE key 10000", "EXEC", &kill]);
    (0..6).for_each(|_| drop(client.read().unwrap()));
    until_no_waiters(&server);
    until(SOON, "the third hold is revoked", || {
        holders_in_hash(&mut client, "key") == [("owner".to_owned(), "2".to_owned())]
    });
    // 30 s if it was granted before its connection ended, which depends on the server.
    let undelivered = info_number(&server, "holdfast", "holdfast_grants_undelivered");
    let left = deadline(&mut client, b"key") - begin;
    assert!(left >= if undelivered > 0 { 30_000 } else { 10_000 }, "{undelivered} undelivered, {left} ms left");
}

/// Three connections of one owner request the lock, and the last one has the place in the queue. It is granted the lock and
/// killed: no hold is left.
#[test]
fn last_of_three_requests_of_owner_is_killed_at_grant() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let request = "LOCK.ACQUIRE key owner LEASE 60000 WAIT 0";
    let mut others = [Waiter::sending(&server, request), Waiter::sending(&server, request)];
    let dying = Waiter::sending(&server, request);
    let mut behind = Waiter::start(&server, "key", "behind");
    client.send_lines(&["LOCK.RELEASE key holder", &format!("CLIENT KILL ID {}", dying.id)]);
    assert_eq!((client.read().unwrap(), client.read().unwrap()), (Value::Int(1), Value::Int(1)));
    others.iter_mut().for_each(|other| assert_eq!(other.error(), "SUPERSEDED"));
    behind.token();
    assert_held(&mut client, "key", "behind");
}

/// The whole queue disconnects at the grant to its head.
#[test]
fn whole_queue_is_killed_at_grant() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let waiters: Vec<Waiter> =
        (0..20).map(|number| Waiter::start(&server, "key", &format!("waiter-{number}"))).collect();
    client.send_lines(&["LOCK.RELEASE key holder", "CLIENT KILL TYPE normal SKIPME yes"]);
    assert_eq!(client.read().unwrap(), Value::Int(1));
    client.read().unwrap();
    until_no_waiters(&server);
    until(SOON, "the lock is free", || client.run("EXISTS key") == Value::Int(0));
    drop(waiters);
}

/// The connection that releases the lock closes with that command.
#[test]
fn releasing_connection_closes_immediately() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut waiter = Waiter::start(&server, "key", "waiter");
    let mut releasing = server.raw();
    releasing.send_lines(&["LOCK.RELEASE key holder", "QUIT"]);
    releasing.close();
    waiter.token();
}

/// A client that has read its grant keeps the lock when it disconnects.
fn disconnect_after_grant(leave: impl Fn(Raw)) {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut first = Waiter::sending(&server, "LOCK.ACQUIRE key first LEASE 500 WAIT 0");
    let mut second = Waiter::start(&server, "key", "second");
    client.run_ok("LOCK.RELEASE key holder");
    let granted = first.token();
    let clients = || server.info("clients", "connected_clients");
    let before = clients();
    leave(first.raw);
    until(SOON, "the server has noticed the disconnect", || clients() != before);
    assert!(second.waits());
    assert_held(&mut client, "key", "first");
    let apart = second.token() - granted;
    assert!(apart >= 499_000, "the lease did not run on: {apart} µs");
}

#[test]
fn connection_closes_after_grant() {
    disconnect_after_grant(Raw::close);
}

#[test]
fn connection_is_reset_after_grant() {
    disconnect_after_grant(Raw::reset);
}

/// The server notices the disconnect only when it writes the reply: the hold lasts until its lease ends, or its owner
/// withdraws it.
#[test]
fn connection_is_closed_when_grant_is_written() {
    let server = Server::start();
    let (mut client, mut observer) = (server.raw(), server.raw());
    client.get_token("LOCK.ACQUIRE key holder LEASE 3600000");
    let waiter = Waiter::sending(&server, "LOCK.ACQUIRE key waiter WAIT 0 LEASE 3600000");
    let mut next = Waiter::start(&server, "key", "next");
    client.send_lines(&["DEBUG SLEEP 1", "LOCK.RELEASE key holder"]);
    until(SOON, "the server sleeps", || {
        observer.send_lines(&["PING"]);
        let sleeps = !observer.arrives_within(Duration::from_millis(100)).expect("the connection stands");
        if !sleeps {
            observer.read().expect("a reply");
        }
        sleeps
    });
    let address = waiter.raw.local_addr();
    waiter.raw.reset();
    until(SOON, "the disconnect has reached the server", || server.has_lost(address));
    let mut owner = server.raw();
    until(SOON, "the lock is free", || {
        owner.run("LOCK.RELEASE key waiter ALL");
        !next.waits()
    });
    next.token();
    assert_held(&mut owner, "key", "next");
}

#[test]
fn queued_ephemeral_hold_ends_with_connection() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut first = Waiter::sending(&server, "LOCK.ACQUIRE key first LEASE 60000 WAIT 0 EPHEMERAL");
    let mut second = Waiter::start(&server, "key", "second");
    client.run_ok("LOCK.RELEASE key holder");
    let granted = first.token();
    assert!(!eventually(Duration::from_millis(50), || !second.waits()));
    first.raw.reset();
    assert!(second.token() > granted);
    assert_held(&mut client, "key", "second");
}

/// Its pipelined commands get replies in order.
#[test]
fn unblocked_waiter_continues_its_pipeline() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder");
    let mut waiter = server.raw();
    let id = waiter.client_id();
    waiter.send_lines(&[
        "LOCK.ACQUIRE key waiter WAIT 0",
        "LOCK.ACQUIRE key waiter WAIT 0",
        "GET key-of-text",
        "CLIENT ID",
    ]);
    for _ in 0..2 {
        until(SOON, "the client is blocked", || blocked_clients(&server) == 1);
        assert_eq!(client.run(&format!("CLIENT UNBLOCK {id}")), Value::Int(1));
        assert_eq!(waiter.read().unwrap(), Value::Nil);
    }
    assert_eq!(waiter.read().unwrap(), Value::Nil);
    assert_eq!(waiter.read().unwrap(), Value::Int(id));
}

/// The client wrote commands while it waited, and then disconnects without reading.
#[test]
fn killed_waiter_runs_no_pipelined_commands() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder");
    let mut waiter = server.raw();
    waiter.send_lines(&["LOCK.ACQUIRE key waiter WAIT 0", "SET witness here"]);
    until(SOON, "the client is blocked", || blocked_clients(&server) == 1);
    waiter.reset();
    until_no_waiters(&server);
    client.run_ok("LOCK.RELEASE key holder");
    assert_eq!(client.run("EXISTS key witness"), Value::Int(0));
    assert!(!text(&client.run("CLIENT LIST")).contains("lock.acquire"));
}
