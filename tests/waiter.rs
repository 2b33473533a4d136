//! Clients that wait for a lock.

use std::fmt::Display;
use std::io::{self, Write};

use redis::Value;
use support::{Raw, Server, until};

use crate::common::{array, error, fields, info_number, int, map, text, token};
pub(crate) use crate::lines::{Commands, SOON};

/// A connection whose request is queued.
pub(crate) struct Waiter {
    /// The connection. Its next reply ends the wait.
    pub(crate) raw: Raw,
    /// The connection's client id.
    pub(crate) id: i64,
}

impl Waiter {
    /// A new connection that waits for `key` without a timeout.
    #[track_caller]
    pub(crate) fn start(server: &Server, key: &str, owner: &str) -> Self {
        Self::sending(server, &format!("LOCK.ACQUIRE {key} {owner} WAIT 0"))
    }

    /// A new connection that sends `line`, once the server has blocked it.
    #[track_caller]
    pub(crate) fn sending(server: &Server, line: &str) -> Self {
        Self::on(server.raw(), server, line)
    }

    /// The same on an existing connection.
    #[track_caller]
    pub(crate) fn on(raw: Raw, server: &Server, line: &str) -> Self {
        let mut waiter = Self::sent(raw, server, line);
        assert!(waiter.raw.pending(), "{line}: not blocked, but {:?}", waiter.raw.read());
        waiter
    }

    /// A new connection that sends `line`, once the server has blocked it. The wait is so short that it may be over by then.
    #[track_caller]
    pub(crate) fn sending_briefly(server: &Server, line: &str) -> Self {
        Self::sent(server.raw(), server, line)
    }

    #[track_caller]
    fn sent(mut raw: Raw, server: &Server, line: &str) -> Self {
        let id = raw.client_id();
        raw.send_lines(&[line]);
        let mut waiter = Self { raw, id };
        let mut observer = server.raw();
        until(SOON, "the client waits", || !waiter.raw.pending() || is_blocked(&mut observer, id));
        waiter
    }

    /// Whether there is no reply yet, and the connection is open.
    #[track_caller]
    pub(crate) fn waits(&mut self) -> bool {
        self.raw.pending()
    }

    /// The reply that ends the wait.
    #[track_caller]
    pub(crate) fn end(&mut self) -> Value {
        let reply = self.raw.read_timeout(SOON).expect("the connection is open");
        reply.expect("the wait ends")
    }

    /// The token that ends the wait.
    #[track_caller]
    pub(crate) fn token(&mut self) -> i64 {
        token(&self.end())
    }

    /// The code of the error that ends the wait.
    #[track_caller]
    pub(crate) fn error(&mut self) -> String {
        error(&self.end()).0.to_owned()
    }
}

/// Whether the client with this id is blocked.
pub(crate) fn is_blocked(observer: &mut Raw, id: i64) -> bool {
    let list = text(&observer.run(&format!("CLIENT LIST ID {id}")));
    let flags = list.split(' ').find_map(|field| field.strip_prefix("flags="));
    flags.is_some_and(|flags| flags.contains('b'))
}

pub(crate) fn blocked_clients(server: &Server) -> i64 {
    info_number(server, "clients", "blocked_clients")
}

/// The number of requests that wait for `key`, from `LOCK.INFO`.
#[track_caller]
pub(crate) fn count_waiters(client: &mut Raw, key: &str) -> i64 {
    int(&map(&client.run(&format!("LOCK.INFO {key}")))[b"waiters".as_slice()])
}

/// The owners and hold counts in the hash at `key`.
#[track_caller]
pub(crate) fn holders_in_hash(client: &mut Raw, key: &str) -> Vec<(String, String)> {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    let fields = fields(client, key.as_bytes()).into_iter().map(|(name, value)| (text(name), text(value)));
    fields.filter(|(name, _)| !name.starts_with('#')).collect()
}

/// Asserts that `owner` holds `key` once, and is the only holder.
#[track_caller]
pub(crate) fn assert_held(client: &mut Raw, key: &str, owner: &str) {
    assert_eq!(holders_in_hash(client, key), [(owner.to_owned(), "1".to_owned())]);
}

/// Waits until no client is blocked and no request is queued on this server.
#[track_caller]
pub(crate) fn until_no_waiters(server: &Server) {
    until(SOON, "nobody waits", || blocked_clients(server) == 0 && array(&server.raw().run("LOCK.TOP")).is_empty());
}

/// Prints a measured figure, which the test harness does not capture. No test checks it.
pub(crate) fn figure(text: impl Display) {
    let _ = writeln!(io::stderr(), "figure: {text}");
}
