//! The grant and the end of its receiver's connection in the same instant: the lock goes on to the next.

use std::time::Duration;

use redis::Value;
use support::{Raw, Server, until};

use crate::common::{deadline, unix_micros};
use crate::waiter::{SOON, Speak, Tell, Waiter, assert_held, figure, until_nobody_waits};

const ROUNDS: usize = 80;
/// The lease of who may have heard of its grant before it went, in ms.
const SHORT: i64 = 100;

/// What the frozen server finds when it goes on, in this order.
#[derive(Clone, Copy, Debug)]
enum Order {
    ReleaseThenEnd,
    EndThenRelease,
}

fn end(round: usize, connection: Raw) {
    if round.is_multiple_of(2) { connection.reset() } else { connection.close() }
}

/// The same, and the server's side of the connection has heard of it, even of a frozen server.
fn end_for_sure(server: &Server, round: usize, connection: Raw) {
    let address = connection.local_addr();
    end(round, connection);
    until(SOON, "the server's side hears of the end", || server.has_lost(address));
}

/// The server is frozen while both happen, so that it finds both in one turn of its event loop: the reply is written
/// when the end is seen, and was not sent. All of this with leases of an hour: what sticks is seen.
#[test]
fn grant_and_reset_in_one_iteration_pass_lock_on() {
    let server = Server::start();
    let mut client = server.raw();
    let mut next = server.raw();
    for round in 0..ROUNDS {
        let order = if round / 2 % 2 == 0 { Order::ReleaseThenEnd } else { Order::EndThenRelease };
        client.take("LOCK.ACQUIRE key holder LEASE 3600000");
        let dying = Waiter::sending(&server, "LOCK.ACQUIRE key dying LEASE 3600000 WAIT 0");
        let mut waiting = Waiter::on(next, &server, "LOCK.ACQUIRE key next LEASE 3600000 WAIT 0");
        server.stop();
        match order {
            Order::ReleaseThenEnd => {
                client.tell(&["LOCK.RELEASE key holder"]);
                end_for_sure(&server, round, dying.raw);
            }
            Order::EndThenRelease => {
                end_for_sure(&server, round, dying.raw);
                client.tell(&["LOCK.RELEASE key holder"]);
            }
        }
        server.cont();
        assert_eq!(client.read().unwrap(), Value::Int(1), "round {round}, {order:?}");
        until(SOON, &format!("round {round}, {order:?}: the next one is served"), || !waiting.waits());
        waiting.token();
        assert_held(&mut client, "key", "next");
        client.order("LOCK.RELEASE key next");
        next = waiting.raw;
    }
    until_nobody_waits(&server);
    assert_eq!(client.say("DBSIZE"), Value::Int(0));
}

/// The same with nothing frozen: the reply may be on the network already, and then the hold is one for its lease, as
/// of any client that crashes.
#[test]
fn concurrent_grant_and_reset_pass_lock_on() {
    let server = Server::start();
    let mut client = server.raw();
    let mut next = server.raw();
    let mut passed_on = 0;
    for round in 0..ROUNDS {
        client.take("LOCK.ACQUIRE key holder LEASE 3600000");
        let dying = Waiter::sending(&server, &format!("LOCK.ACQUIRE key dying LEASE {SHORT} WAIT 0"));
        let mut waiting = Waiter::on(next, &server, "LOCK.ACQUIRE key next LEASE 3600000 WAIT 0");
        std::thread::scope(|threads| {
            threads.spawn(|| client.tell(&["LOCK.RELEASE key holder"]));
            threads.spawn(|| end(round, dying.raw));
        });
        assert_eq!(client.read().unwrap(), Value::Int(1), "round {round}");
        let at_once = waiting.raw.read_timeout(Duration::from_millis(SHORT as u64 / 2)).unwrap();
        passed_on += usize::from(at_once.is_some());
        let token = at_once.unwrap_or_else(|| waiting.end());
        assert!(matches!(token, Value::Int(1..)), "round {round}: {token:?}");
        assert_held(&mut client, "key", "next");
        client.order("LOCK.RELEASE key next");
        next = waiting.raw;
    }
    figure(format_args!(
        "grant and reset at the same time: passed on at once in {passed_on} rounds of {ROUNDS}, after its lease in the others"
    ));
    until_nobody_waits(&server);
    assert_eq!(client.say("DBSIZE"), Value::Int(0));
}

/// The lock expires while the server is at something else, and the head's connection ends meanwhile. A server that
/// runs again may do what was to be done at a time first, and write to a connection that was closed in good order as to
/// any other: then the hold is one for its lease. One that was reset takes nothing.
#[test]
fn expiry_and_reset_during_server_pause_pass_lock_on() {
    let server = Server::start();
    let mut client = server.raw();
    let (mut seen, mut at_once) = (0, 0);
    for round in 0..ROUNDS / 10 {
        let reset = round.is_multiple_of(2);
        client.take("LOCK.ACQUIRE key holder LEASE 60000");
        let lease = if reset { 3_600_000 } else { SHORT };
        let dying = Waiter::sending(&server, &format!("LOCK.ACQUIRE key dying LEASE {lease} WAIT 0"));
        let mut waiting = Waiter::start(&server, "key", "next");
        client.order("PEXPIRE key 400");
        let deadline = 1000 * deadline(&mut client, b"key");
        server.stop();
        // On a busy machine the freeze may come too late, and then there is nothing to be seen in this round.
        let in_time = unix_micros() < deadline;
        end_for_sure(&server, round, dying.raw);
        until(SOON, "the deadline is over", || unix_micros() > deadline + 5000);
        server.cont();
        let begin = unix_micros();
        if in_time {
            seen += 1;
            waiting.token();
            at_once += usize::from(unix_micros() - begin < SHORT * 1000 / 2);
            assert_held(&mut client, "key", "next");
        }
        waiting.raw.close();
        until_nobody_waits(&server);
        client.order("LOCK.FORCE key");
    }
    assert!(seen > 0, "the freeze was always too late");
    figure(format_args!("expiry and end of the head's connection: passed on at once in {at_once} rounds of {seen}"));
}
