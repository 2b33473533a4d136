//! A server with I/O threads may send a reply before the event-loop iteration that wrote it has ended. A client that has
//! read its grant may use it immediately, over any connection.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use redis::Value;
use support::{Over, Raw, Server, resp};

use crate::lines::{Commands, Reply, SOON, arrives};

/// Concurrent clients, each with its own lock.
const CLIENTS: usize = 6;
/// Grants that each client reads. Before version 8, a server's I/O threads send only while its main thread waits for them.
const ROUNDS: usize = 100;
const ROUNDS_BEFORE_8: usize = 10;
/// Connections that keep the server busy, so that an iteration does not end as soon as a reply has been sent.
const BUSY: usize = 2;

/// A session that reads its events all the time, and the connections that send its requests and use the grants.
struct Client {
    session: Raw,
    asking: Raw,
    id: String,
    key: String,
}

impl Client {
    fn new(server: &Server, number: usize) -> Self {
        let (mut session, asking) = (server.raw(), server.raw());
        let id = resp::session_id(&session.run("LOCK.SESSION")).expect("a session");
        Self { session, asking, id, key: format!("key:{number}") }
    }

    /// Waits for the lock. Returns the token as soon as the event has been read.
    fn wait_for_grant(&mut self) -> i64 {
        let Self { session, asking, id, key } = self;
        asking.run(&format!("LOCK.ACQUIRE {key} holder LEASE 600000")).token();
        let waits = asking.run(&format!("LOCK.ACQUIRE {key} owner LEASE 600000 WAIT 0 SESSION {id}"));
        assert_eq!(waits, Value::SimpleString("WAITING".into()));
        session.send_line(&format!("LOCK.EVENTS WAIT {}", SOON.as_millis()));
        asking.send_line(&format!("LOCK.RELEASE {key} holder"));
        let received = arrives(session);
        let [granted] = received.items() else { panic!("{received:?}") };
        assert_eq!(granted.items()[0].text(), "granted");
        granted.items()[4].token()
    }
}

/// Each client uses each of its grants by a request over its other connection. Returns the number of refusals.
fn refusals(server: &Server, request: &str) -> usize {
    let (refused, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let rounds = if server.version().major < 8 { ROUNDS_BEFORE_8 } else { ROUNDS };
    let pings = vec!["PING".to_owned(); 100];
    thread::scope(|scope| {
        for _ in 0..BUSY {
            let (mut busy, pings, over) = (server.raw(), &pings, &over);
            scope.spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    busy.run_all(pings);
                }
            });
        }
        let _over = Over(&over);
        let clients = (0..CLIENTS).map(|number| {
            let (mut client, refused) = (Client::new(server, number), &refused);
            scope.spawn(move || {
                for _ in 0..rounds {
                    let token = client.wait_for_grant();
                    client.asking.send_line(&request.replace("KEY", &client.key).replace('#', &token.to_string()));
                    let released = arrives(&mut client.asking);
                    assert!(!matches!(released, Value::ServerError(_)), "{released:?}");
                    let is_refused = matches!(arrives(&mut client.asking), Value::ServerError(_));
                    refused.fetch_add(usize::from(is_refused), Ordering::SeqCst);
                    client.asking.run(&format!("LOCK.RELEASE {} owner ALL", client.key));
                }
            })
        });
        for client in clients.collect::<Vec<_>>() {
            client.join().expect("a client");
        }
    });
    refused.into_inner()
}

#[test]
fn grant_that_was_read_can_be_released_over_another_connection() {
    let server = Server::builder().arg("io-threads", "4").start();
    assert_eq!(refusals(&server, "LOCK.RELEASE KEY owner TOKEN #"), 0);
}

#[test]
fn grant_that_was_read_can_be_renewed_over_another_connection() {
    let server = Server::builder().arg("io-threads", "4").start();
    assert_eq!(refusals(&server, "LOCK.RENEW KEY owner TOKEN # LEASE 600000"), 0);
}
