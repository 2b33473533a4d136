//! Clients that wait for a lock, as the tests see them.

use std::fmt::Display;
use std::io::{self, Write};

use redis::Value;
use support::{Raw, Server, until};

use crate::common::{array, ask_token, error, fields, info_number, int, map, text, token};
use crate::speak::encode;
pub(crate) use crate::speak::{Reply, SOON, Speak, Watched};

/// More ways to send a line.
pub(crate) trait Tell {
    /// Sends a command that must not be refused, and reads its reply.
    fn order(&mut self, line: &str) -> Value;
    /// Sends a command that takes a lock, and gets its token.
    fn take(&mut self, line: &str) -> i64;
    /// Sends several commands in one packet and does not wait for their replies.
    fn tell(&mut self, lines: &[&str]);
}

impl Tell for Raw {
    #[track_caller]
    fn order(&mut self, line: &str) -> Value {
        let reply = self.say(line);
        assert!(!matches!(reply, Value::ServerError(_)), "{line}: {reply:?}");
        reply
    }

    #[track_caller]
    fn take(&mut self, line: &str) -> i64 {
        ask_token(self, line)
    }

    #[track_caller]
    fn tell(&mut self, lines: &[&str]) {
        let packet: Vec<u8> = lines.iter().flat_map(|line| encode(line)).collect();
        self.send_bytes(&packet).expect("sent");
    }
}

impl Tell for Watched {
    #[track_caller]
    fn order(&mut self, line: &str) -> Value {
        let reply = self.say(line);
        assert!(!matches!(reply, Value::ServerError(_)), "{line}: {reply:?}");
        reply
    }

    #[track_caller]
    fn take(&mut self, line: &str) -> i64 {
        let reply = self.say(line);
        if reply == Value::SimpleString("WAITING".into()) { self.granted().token() } else { reply.token() }
    }

    #[track_caller]
    fn tell(&mut self, lines: &[&str]) {
        lines.iter().for_each(|line| self.post(line));
    }
}

/// A connection that stands in a queue.
pub(crate) struct Waiter {
    /// The connection; the reply that it waits for comes next on it.
    pub(crate) raw: Raw,
    /// The server's id of it.
    pub(crate) id: i64,
}

impl Waiter {
    /// A new connection that waits for `key` without an end.
    #[track_caller]
    pub(crate) fn start(server: &Server, key: &str, owner: &str) -> Self {
        Self::sending(server, &format!("LOCK.ACQUIRE {key} {owner} WAIT 0"))
    }

    /// A new connection that sends `line`, once the server has blocked it.
    #[track_caller]
    pub(crate) fn sending(server: &Server, line: &str) -> Self {
        Self::on(server.raw(), server, line)
    }

    /// The same on a connection that is there.
    #[track_caller]
    pub(crate) fn on(mut raw: Raw, server: &Server, line: &str) -> Self {
        let id = raw.client_id();
        raw.tell(&[line]);
        let mut waiter = Self { raw, id };
        let mut observer = server.raw();
        until(SOON, "the client waits", || {
            assert!(waiter.raw.pending(), "{line}: not blocked, but {:?}", waiter.raw.read());
            is_blocked(&mut observer, id)
        });
        waiter
    }

    /// Whether there is no reply yet, and the connection stands.
    #[track_caller]
    pub(crate) fn waits(&mut self) -> bool {
        self.raw.pending()
    }

    /// The reply that ends the wait.
    #[track_caller]
    pub(crate) fn end(&mut self) -> Value {
        let reply = self.raw.read_timeout(SOON).expect("the connection stands");
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

/// Whether the server has blocked the client of this id.
pub(crate) fn is_blocked(observer: &mut Raw, id: i64) -> bool {
    let list = text(&observer.say(&format!("CLIENT LIST ID {id}")));
    let flags = list.split(' ').find_map(|field| field.strip_prefix("flags="));
    flags.is_some_and(|flags| flags.contains('b'))
}

/// How many clients the server has blocked.
pub(crate) fn blocked_clients(server: &Server) -> i64 {
    info_number(server, "clients", "blocked_clients")
}

/// How many wait for `key`, as `LOCK.INFO` says.
#[track_caller]
pub(crate) fn count_waiters(client: &mut Raw, key: &str) -> i64 {
    int(&map(&client.say(&format!("LOCK.INFO {key}")))[b"waiters".as_slice()])
}

/// The names and hold counts of those who hold `key`, as the hash says.
#[track_caller]
pub(crate) fn holders_in_hash(client: &mut Raw, key: &str) -> Vec<(String, String)> {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("a name in letters");
    let fields = fields(client, key.as_bytes()).into_iter().map(|(name, value)| (text(name), text(value)));
    fields.filter(|(name, _)| !name.starts_with('#')).collect()
}

/// Whether `owner` holds `key` once, and nobody else does.
#[track_caller]
pub(crate) fn assert_held(client: &mut Raw, key: &str, owner: &str) {
    assert_eq!(holders_in_hash(client, key), [(owner.to_owned(), "1".to_owned())]);
}

/// Waits until nobody waits for anything on this server, by its own account and by the module's.
#[track_caller]
pub(crate) fn until_nobody_waits(server: &Server) {
    until(SOON, "nobody waits", || blocked_clients(server) == 0 && array(&server.raw().say("LOCK.TOP")).is_empty());
}

/// Prints a measured figure past the test harness' capturing; nothing judges it.
pub(crate) fn figure(text: impl Display) {
    let _ = writeln!(io::stderr(), "figure: {text}");
}
