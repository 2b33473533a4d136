//! `NEW`, for a session.

use support::Server;

use super::session::{Event, Session};
use crate::lines::{Commands, Reply, waiters};

/// The owner acquires the lock meanwhile, by a request without `NEW` or by another client's write.
#[test]
fn new_request_times_out_when_owner_holds() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.run("LOCK.ACQUIRE key holder LEASE 600000").token();
    client.run("LOCK.ACQUIRE held owner LEASE 600000").token();
    session.wait(&mut client, "LOCK.ACQUIRE key owner NEW LEASE 600000 WAIT 0");
    client.run("RENAME held key");
    assert_eq!(session.event(), Event::timeout(&["key"], "owner"));
    client.run("LOCK.FORCE key");

    client.run("LOCK.ACQUIRE a holder LEASE 600000").token();
    session.wait(&mut client, "LOCK.MACQUIRE 2 a b owner NEW LEASE 600000 WAIT 0");
    client.run("HSET b owner 1");
    assert_eq!(session.event(), Event::timeout(&["a", "b"], "owner"));
    assert_eq!(waiters(&mut client, "a"), Vec::<String>::new());
    assert_eq!(server.info("holdfast", "holdfast_timeouts").as_deref(), Some("2"));
}

#[test]
fn repetition_without_new_takes_over_position() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    client.run("LOCK.ACQUIRE key holder LEASE 600000").token();
    session.wait(&mut client, "LOCK.ACQUIRE key owner NEW WAIT 0");
    session.wait(&mut client, "LOCK.ACQUIRE key owner NEW WAIT 500");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    assert_eq!(waiters(&mut client, "key"), ["owner"]);
}
