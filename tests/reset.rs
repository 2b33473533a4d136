//! A grant coincides with the end of its receiver's connection: the next waiter gets the lock.

use std::time::Duration;

use redis::Value;
use support::{Raw, Server, until};

use crate::common::{deadline, unix_micros};
use crate::waiter::{Commands, SOON, Waiter, assert_held, figure, until_no_waiters};

const ROUNDS: usize = 40;
/// The lease of a client that may have read its grant before it disconnected, in ms.
const SHORT: i64 = 100;

/// The order of events that the paused server finds.
#[derive(Clone, Copy, Debug)]
enum Order {
    ReleaseThenEnd,
    EndThenRelease,
}

fn end(round: usize, connection: Raw) {
    if round.is_multiple_of(2) { connection.reset() } else { connection.close() }
}

/// The same; the server's side of the connection has the disconnect, even while the server is paused.
fn end_and_wait(server: &Server, round: usize, connection: Raw) {
    let address = connection.local_addr();
    end(round, connection);
    until(SOON, "the disconnect has reached the server", || server.has_lost(address));
}

/// The server is paused while both happen, and handles both in one event-loop iteration: the reply is written, but not
/// sent, when the disconnect is found. Leases last an hour, so that a hold that stays is noticed.
#[test]
fn grant_and_reset_in_one_iteration_pass_lock_on() {
    let server = Server::start();
    let mut client = server.raw();
    let mut next = server.raw();
    for round in 0..ROUNDS {
        let order = if round / 2 % 2 == 0 { Order::ReleaseThenEnd } else { Order::EndThenRelease };
        client.get_token("LOCK.ACQUIRE key holder LEASE 3600000");
        let dying = Waiter::sending(&server, "LOCK.ACQUIRE key dying LEASE 3600000 WAIT 0");
        let mut waiting = Waiter::on(next, &server, "LOCK.ACQUIRE key next LEASE 3600000 WAIT 0");
        server.stop();
        match order {
            Order::ReleaseThenEnd => {
                client.send_lines(&["LOCK.RELEASE key holder"]);
                end_and_wait(&server, round, dying.raw);
            }
            Order::EndThenRelease => {
                end_and_wait(&server, round, dying.raw);
                client.send_lines(&["LOCK.RELEASE key holder"]);
            }
        }
        server.cont();
        assert_eq!(client.read().unwrap(), Value::Int(1), "round {round}, {order:?}");
        until(SOON, &format!("round {round}, {order:?}: the next waiter is granted"), || !waiting.waits());
        waiting.token();
        assert_held(&mut client, "key", "next");
        client.run_ok("LOCK.RELEASE key next");
        next = waiting.raw;
    }
    until_no_waiters(&server);
    assert_eq!(client.run("DBSIZE"), Value::Int(0));
}

/// The same without a pause. If the reply is already on the network, the hold lasts for its lease, as with any client that
/// crashes.
#[test]
fn concurrent_grant_and_reset_pass_lock_on() {
    let server = Server::start();
    let mut client = server.raw();
    let mut next = server.raw();
    let mut passed_on = 0;
    for round in 0..ROUNDS {
        client.get_token("LOCK.ACQUIRE key holder LEASE 3600000");
        let dying = Waiter::sending(&server, &format!("LOCK.ACQUIRE key dying LEASE {SHORT} WAIT 0"));
        let mut waiting = Waiter::on(next, &server, "LOCK.ACQUIRE key next LEASE 3600000 WAIT 0");
        std::thread::scope(|threads| {
            threads.spawn(|| client.send_lines(&["LOCK.RELEASE key holder"]));
            threads.spawn(|| end(round, dying.raw));
        });
        assert_eq!(client.read().unwrap(), Value::Int(1), "round {round}");
        let at_once = waiting.raw.read_timeout(Duration::from_millis(SHORT as u64 / 2)).unwrap();
        passed_on += usize::from(at_once.is_some());
        let token = at_once.unwrap_or_else(|| waiting.end());
        assert!(matches!(token, Value::Int(1..)), "round {round}: {token:?}");
        assert_held(&mut client, "key", "next");
        client.run_ok("LOCK.RELEASE key next");
        next = waiting.raw;
    }
    figure(format_args!(
        "grant and reset at the same time: next waiter granted immediately in {passed_on} rounds of {ROUNDS}, after its lease in the others"
    ));
    until_no_waiters(&server);
    assert_eq!(client.run("DBSIZE"), Value::Int(0));
}

/// The lock expires while the server is paused, and the connection of the queue's head ends meanwhile. The server may run
/// timers first, and then write to the connection. If that was closed in order, the hold lasts for its lease. If it was
/// reset, the next waiter is granted.
#[test]
fn expiry_and_reset_during_server_pause_pass_lock_on() {
    let server = Server::start();
    let mut client = server.raw();
    let (mut seen, mut at_once) = (0, 0);
    for round in 0..ROUNDS / 10 {
        let reset = round.is_multiple_of(2);
        client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
        let lease = if reset { 3_600_000 } else { SHORT };
        let dying = Waiter::sending(&server, &format!("LOCK.ACQUIRE key dying LEASE {lease} WAIT 0"));
        let mut waiting = Waiter::start(&server, "key", "next");
        client.run_ok("PEXPIRE key 400");
        let deadline = 1000 * deadline(&mut client, b"key");
        server.stop();
        // On a busy machine the pause may start too late. Then this round checks nothing.
        let in_time = unix_micros() < deadline;
        end_and_wait(&server, round, dying.raw);
        until(SOON, "the deadline has passed", || unix_micros() > deadline + 5000);
        server.cont();
        let begin = unix_micros();
        if in_time {
            seen += 1;
            waiting.token();
            at_once += usize::from(unix_micros() - begin < SHORT * 1000 / 2);
            assert_held(&mut client, "key", "next");
        }
        waiting.raw.close();
        until_no_waiters(&server);
        client.run_ok("LOCK.FORCE key");
    }
    assert!(seen > 0, "the pause was always too late");
    figure(format_args!(
        "expiry and end of the head's connection: next waiter granted immediately in {at_once} rounds of {seen}"
    ));
}
