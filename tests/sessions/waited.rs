//! `WAITED`, for a session.

use redis::Value;
use support::Server;

use super::session::Session;
use crate::lines::{Commands, Reply, waiters};

#[test]
fn waited_request_of_session_takes_its_position() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.run("LOCK.ACQUIRE key holder LEASE 600000").token();
    session.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0");
    session.wait(&mut client, "LOCK.ACQUIRE key second WAIT 0 WAITED 30000");
    assert_eq!(waiters(&mut client, "key"), ["second", "first"]);
    // In a transaction as well: a session does not block.
    client.run("MULTI");
    client.run(&session.with_session("LOCK.ACQUIRE key third WAIT 0 WAITED 50000"));
    client.run_ok("EXEC");
    assert_eq!(waiters(&mut client, "key"), ["third", "second", "first"]);
    // `WAITED` is not an option to repeat: the position of the first request stays.
    session.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0 WAITED 59000");
    assert_eq!(waiters(&mut client, "key"), ["third", "second", "first"]);
    assert_eq!(client.run("LOCK.RELEASE key holder"), Value::Int(1));
    session.event().token_of(&["key"], "third");
}

/// The head of the queue also waits for another key, so the free lock goes to the request that arrived earlier.
#[test]
fn waited_request_ahead_of_head_is_granted_soon() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.run("LOCK.ACQUIRE taken holder LEASE 600000").token();
    session.wait(&mut client, "LOCK.MACQUIRE 2 free taken several WAIT 0");
    session.wait(&mut client, "LOCK.ACQUIRE free owner LEASE 600000 WAIT 0 WAITED 5000");
    session.event().token_of(&["free"], "owner");
}
