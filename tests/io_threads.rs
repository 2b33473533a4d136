//! A server with I/O threads, one of which may hand a reply to the network before the event-loop iteration in which it was written has
//! ended: a client that has read its grant may use it at once, over any connection.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use redis::Value;
use support::{Over, Raw, Server, resp};

use crate::speak::{Reply, SOON, Speak, arrives};

/// Clients at the same time, each with a lock of its own.
const CLIENTS: usize = 6;
/// Grants that each of them reads.
const ROUNDS: usize = 100;
/// Connections of others that keep the server busy, so that an iteration does not end as soon as a reply has been sent.
const BUSY: usize = 2;

/// A session that always reads its events, and the connections that ask for it and use what it was granted.
struct Client {
    session: Raw,
    asking: Raw,
    id: String,
    key: String,
}

impl Client {
    fn new(server: &Server, number: usize) -> Self {
        let (mut session, asking) = (server.raw(), server.raw());
        let id = resp::session_id(&session.say("LOCK.SESSION")).expect("a session");
        Self { session, asking, id, key: format!("key:{number}") }
    }

    /// Waits for the lock, and returns the token as soon as the event with it has been read.
    fn is_granted(&mut self) -> i64 {
        let Self { session, asking, id, key } = self;
        asking.say(&format!("LOCK.ACQUIRE {key} holder LEASE 600000")).token();
        let waits = asking.say(&format!("LOCK.ACQUIRE {key} owner LEASE 600000 WAIT 0 SESSION {id}"));
        assert_eq!(waits, Value::SimpleString("WAITING".into()));
        session.post(&format!("LOCK.EVENTS WAIT {}", SOON.as_millis()));
        asking.post(&format!("LOCK.RELEASE {key} holder"));
        let told = arrives(session);
        let [granted] = told.items() else { panic!("{told:?}") };
        assert_eq!(granted.items()[0].text(), "granted");
        granted.items()[4].token()
    }
}

/// Lets each client use each of its grants by a request over its other connection, and returns how many of these were refused.
fn refusals(server: &Server, request: &str) -> usize {
    let (refused, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let pings = vec!["PING".to_owned(); 100];
    thread::scope(|scope| {
        for _ in 0..BUSY {
            let (mut busy, pings, over) = (server.raw(), &pings, &over);
            scope.spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    busy.say_all(pings);
                }
            });
        }
        let _over = Over(&over);
        let clients = (0..CLIENTS).map(|number| {
            let (mut client, refused) = (Client::new(server, number), &refused);
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    let token = client.is_granted();
                    client.asking.post(&request.replace("KEY", &client.key).replace('#', &token.to_string()));
                    let released = arrives(&mut client.asking);
                    assert!(!matches!(released, Value::ServerError(_)), "{released:?}");
                    let is_refused = matches!(arrives(&mut client.asking), Value::ServerError(_));
                    refused.fetch_add(usize::from(is_refused), Ordering::SeqCst);
                    client.asking.say(&format!("LOCK.RELEASE {} owner ALL", client.key));
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
    assert_eq!(refusals(&server, "LOCK.RELEASE KEY owner TOKEN #"), 0, "of {}", CLIENTS * ROUNDS);
}

#[test]
fn grant_that_was_read_can_be_renewed_over_another_connection() {
    let server = Server::builder().arg("io-threads", "4").start();
    assert_eq!(refusals(&server, "LOCK.RENEW KEY owner TOKEN # LEASE 600000"), 0, "of {}", CLIENTS * ROUNDS);
}
