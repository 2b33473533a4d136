//! A server with I/O threads may send a reply before the event-loop iteration that wrote it has ended. A client that has
//! read its grant may use it immediately, over any connection.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use redis::Value;
use support::{Over, Raw, Server, resp};

use crate::lines::{Commands, Reply, SOON, arrives, setting};

/// Concurrent clients, each with its own lock.
const CLIENTS: usize = 6;
/// Grants that each client reads, unless `HOLDFAST_ROUNDS` names another number. Before version 8, a server's I/O threads send
/// only while its main thread waits for them.
const ROUNDS: u64 = 100;
const ROUNDS_BEFORE_8: u64 = 10;
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

    /// Sends these over the connection for requests. Returns the reply to the last.
    fn ask(&mut self, lines: &[&str]) -> Value {
        self.asking.send_lines(lines);
        let released = arrives(&mut self.asking);
        assert!(!matches!(released, Value::ServerError(_)), "{released:?}");
        lines.iter().map(|_| arrives(&mut self.asking)).last().expect("a reply")
    }
}

fn rounds(server: &Server) -> u64 {
    if server.version().major < 8 { ROUNDS_BEFORE_8 } else { setting("HOLDFAST_ROUNDS", ROUNDS) }
}

/// Each client uses each of its grants at once; `is_refused` does so over its other connection, and says whether that was
/// refused. Returns the number of refusals.
fn refusals(server: &Server, rounds: u64, is_refused: impl Fn(&mut Client, i64) -> bool + Sync) -> usize {
    let (refused, over) = (AtomicUsize::new(0), AtomicBool::new(false));
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
            let (mut client, refused, is_refused) = (Client::new(server, number), &refused, &is_refused);
            scope.spawn(move || {
                for _ in 0..rounds {
                    let token = client.wait_for_grant();
                    refused.fetch_add(usize::from(is_refused(&mut client, token)), Ordering::SeqCst);
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
    let release = |client: &mut Client, token| {
        let line = format!("LOCK.RELEASE {} owner TOKEN {token}", client.key);
        client.ask(&[&line]) != Value::Int(1)
    };
    assert_eq!(refusals(&server, rounds(&server), release), 0);
}

#[test]
fn grant_that_was_read_can_be_renewed_over_another_connection() {
    let server = Server::builder().arg("io-threads", "4").start();
    let renew = |client: &mut Client, token| {
        let line = format!("LOCK.RENEW {} owner TOKEN {token} LEASE 600000", client.key);
        client.ask(&[&line]) != Value::Int(token)
    };
    assert_eq!(refusals(&server, rounds(&server), renew), 0);
}

/// A session that ends loses only what it has not read.
#[test]
fn grant_that_was_read_outlives_its_replaced_session() {
    let server = Server::builder().arg("io-threads", "4").start();
    let replace = |client: &mut Client, token| {
        let renewal = format!("LOCK.RENEW {} owner TOKEN {token} LEASE 600000 SESSION *", client.key);
        let renewed = client.ask(&[&format!("LOCK.SESSION REPLACES {}", client.id), &renewal]);
        let asking = std::mem::replace(&mut client.asking, server.raw());
        client.session = asking;
        client.id = resp::session_id(&client.session.run("LOCK.SESSION")).expect("a session");
        renewed != Value::Int(token)
    };
    // Each round opens a connection, and closes one.
    assert_eq!(refusals(&server, rounds(&server) / 4, replace), 0);
}
