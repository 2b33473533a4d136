//! Commands as lines of text, and replies converted to the expected type.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use redis::Value;
use support::{Raw, Server};

use crate::common::{self, array, bytes, int, map, text, token, words};

pub use crate::common::{fields, unix_millis as now};

/// Timeout for what happens immediately, on a machine that is busy with other tests.
pub const SOON: Duration = Duration::from_secs(20);

/// Commands as lines: arguments separated by spaces, for commands without binary arguments.
pub trait Commands {
    /// Sends a line and reads the reply.
    fn run(&mut self, line: &str) -> Value;

    /// Sends a line without reading the reply.
    fn send_line(&mut self, line: &str);

    /// Sends several lines without reading the replies: in one packet, if the connection can.
    fn send_lines(&mut self, lines: &[&str]) {
        lines.iter().for_each(|line| self.send_line(line));
    }

    /// Sends a line that may block. Returns once the server has executed it, with the reply if it did not block.
    ///
    /// A `PING` precedes it in the same segment: the server executes both before it replies to either.
    fn begin(&mut self, line: &str) -> Option<Value>;

    /// Sends many lines at once and reads all replies.
    fn run_all(&mut self, lines: &[String]) -> Vec<Value>;

    /// Sends a line and reads the reply, which must not be an error.
    #[track_caller]
    fn run_ok(&mut self, line: &str) -> Value {
        let reply = self.run(line);
        assert!(!matches!(reply, Value::ServerError(_)), "{line}: {reply:?}");
        reply
    }

    /// Sends a line whose reply must be a fencing token.
    #[track_caller]
    fn get_token(&mut self, line: &str) -> i64 {
        token(&self.run(line))
    }
}

impl Commands for Raw {
    #[track_caller]
    fn run(&mut self, line: &str) -> Value {
        self.send_line(line);
        self.read().unwrap_or_else(|error| panic!("{line}: {error}"))
    }

    #[track_caller]
    fn send_line(&mut self, line: &str) {
        self.send_bytes(&encode(line)).expect("line sent");
    }

    #[track_caller]
    fn send_lines(&mut self, lines: &[&str]) {
        let packet: Vec<u8> = lines.iter().flat_map(|line| encode(line)).collect();
        self.send_bytes(&packet).expect("lines sent");
    }

    #[track_caller]
    fn begin(&mut self, line: &str) -> Option<Value> {
        self.send_bytes(&[encode("PING"), encode(line)].concat()).expect("line sent");
        assert_eq!(self.read().expect("PONG"), Value::SimpleString("PONG".into()));
        if self.pending() { None } else { Some(self.read().expect("reply is there")) }
    }

    #[track_caller]
    fn run_all(&mut self, lines: &[String]) -> Vec<Value> {
        // In parts that fit the sockets' buffers, so that neither side blocks on the other.
        let parts = lines.chunks(500);
        parts.flat_map(|part| self.call_all(&part.iter().map(|line| words(line)).collect::<Vec<_>>())).collect()
    }
}

pub fn encode(line: &str) -> Vec<u8> {
    support::encode([words(line)])
}

/// Converts a reply to the expected type. Each method panics with the reply if it has another type.
pub trait Reply {
    /// An integer.
    fn int(&self) -> i64;
    /// A fencing token.
    fn token(&self) -> i64;
    /// Null.
    fn is_null(&self) -> bool;
    /// An error, as it was sent, without the dash.
    fn error(&self) -> String;
    /// The elements of an array.
    fn items(&self) -> &[Value];
    /// A field of a map, in RESP2 as well.
    fn field(&self, name: &str) -> Value;
    /// A string.
    fn text(&self) -> String;
    /// A boolean, in RESP2 as well.
    fn truth(&self) -> bool;
}

impl Reply for Value {
    #[track_caller]
    fn int(&self) -> i64 {
        int(self)
    }

    #[track_caller]
    fn token(&self) -> i64 {
        token(self)
    }

    fn is_null(&self) -> bool {
        *self == Value::Nil
    }

    #[track_caller]
    fn error(&self) -> String {
        let (code, details) = common::error(self);
        format!("{code} {details}")
    }

    #[track_caller]
    fn items(&self) -> &[Value] {
        array(self)
    }

    #[track_caller]
    fn field(&self, name: &str) -> Value {
        let field = map(self).remove(name.as_bytes());
        field.unwrap_or_else(|| panic!("no field {name} in {self:?}"))
    }

    #[track_caller]
    fn text(&self) -> String {
        text(self)
    }

    #[track_caller]
    fn truth(&self) -> bool {
        match self {
            Value::Boolean(truth) => *truth,
            Value::Int(0) => false,
            Value::Int(1) => true,
            other => panic!("not a boolean: {other:?}"),
        }
    }
}

/// The holders that `LOCK.INFO` shows, by name.
#[track_caller]
pub fn holders(connection: &mut Raw, key: &str) -> BTreeMap<String, Value> {
    let info = connection.run(&format!("LOCK.INFO {key}"));
    if info.is_null() {
        return BTreeMap::new();
    }
    let holders = info.field("holders");
    holders.items().iter().map(|holder| (holder.field("owner").text(), holder.clone())).collect()
}

/// The owners that hold a key, sorted.
#[track_caller]
pub fn owners(connection: &mut Raw, key: &str) -> Vec<String> {
    holders(connection, key).into_keys().collect()
}

/// The owners that wait for a key, in order.
#[track_caller]
pub fn waiters(connection: &mut Raw, key: &str) -> Vec<String> {
    let waiters = connection.run(&format!("LOCK.WAITERS {key} COUNT 100000"));
    waiters.items().iter().map(|waiter| waiter.field("owner").text()).collect()
}

/// When a key expires, Unix time in ms; -1: never, -2: the key does not exist.
#[track_caller]
pub fn deadline(connection: &mut Raw, key: &str) -> i64 {
    common::deadline(connection, key.as_bytes())
}

/// The next reply of a connection that was waiting.
#[track_caller]
pub fn arrives(connection: &mut Raw) -> Value {
    connection.read_timeout(SOON).expect("connection open").expect("a reply to the waiting request")
}

/// Waits until the server has noticed that a connection is closed.
#[track_caller]
pub fn until_gone(connection: &mut Raw, client: i64) {
    support::until(SOON, "the server has noticed that the connection is closed", || {
        bytes(&connection.run(&format!("CLIENT LIST ID {client}"))).is_empty()
    });
}

/// A number from the environment, or the default.
pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

/// Asserts the error that a request gets while another one of its owner for this key is being confirmed.
#[track_caller]
pub fn assert_in_the_way(reply: &Value, key: &str) {
    let error = reply.error();
    let expected = format!("ERR another request of this owner for '{key}' is being confirmed");
    assert!(error.starts_with(&expected), "{error}");
}

/// A connection whose holds are bound to a session. A thread reads the session's events until this is dropped.
/// Requests with `WATCHDOG` or `EPHEMERAL` over this connection are made on behalf of that session.
pub struct Watched {
    raw: Raw,
    id: String,
    client: i64,
    admin: Raw,
    reader: Option<JoinHandle<()>>,
    grants: Receiver<Value>,
}

impl Watched {
    /// A new session beside this connection.
    #[track_caller]
    pub fn over(raw: Raw, server: &Server) -> Self {
        let (mut session, admin) = (server.raw(), server.raw());
        let client = session.client_id();
        let id = session.run("LOCK.SESSION").field("id").text();
        let (granted, grants) = channel();
        let reader = std::thread::spawn(move || {
            while session.send(&[b"LOCK.EVENTS", b"WAIT", b"0", b"HEARTBEAT"]).is_ok() {
                let Ok(Value::Array(events)) = session.read() else { break };
                for event in events {
                    let [kind, .., token, _] = event.items() else { panic!("not an event: {event:?}") };
                    if kind.text() == "granted" {
                        // Few tests read them.
                        let _ = granted.send(token.clone());
                    }
                }
            }
        });
        Self { raw, id, client, admin, reader: Some(reader), grants }
    }

    /// The token of the session's next `granted` event.
    #[track_caller]
    pub fn granted(&mut self) -> Value {
        self.grants.recv_timeout(SOON).expect("granted")
    }

    /// The session's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The client id of the session's connection.
    pub fn client_id(&self) -> i64 {
        self.client
    }

    /// Ends the session by closing its connection.
    pub fn reset(self) {}

    /// The same.
    pub fn close(self) {}

    /// The line with the session's id, if its options bind a hold.
    fn with_session(&self, line: &str) -> String {
        let is_bound = |word| ["WATCHDOG", "EPHEMERAL"].contains(&word);
        if line.starts_with("LOCK.") && line.split(' ').any(is_bound) && !line.contains(" SESSION ") {
            format!("{line} SESSION {}", self.id)
        } else {
            line.to_owned()
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // The server may be gone already.
        let kill = format!("CLIENT KILL ID {}", self.client);
        if self.admin.send_bytes(&encode(&kill)).is_ok() {
            let _ = self.admin.read();
        }
        let _ = self.reader.take().map(JoinHandle::join);
    }
}

impl Deref for Watched {
    type Target = Raw;

    fn deref(&self) -> &Raw {
        &self.raw
    }
}

impl DerefMut for Watched {
    fn deref_mut(&mut self) -> &mut Raw {
        &mut self.raw
    }
}

impl Commands for Watched {
    #[track_caller]
    fn run(&mut self, line: &str) -> Value {
        let line = self.with_session(line);
        self.raw.run(&line)
    }

    #[track_caller]
    fn send_line(&mut self, line: &str) {
        let line = self.with_session(line);
        self.raw.send_line(&line);
    }

    #[track_caller]
    fn begin(&mut self, line: &str) -> Option<Value> {
        let line = self.with_session(line);
        self.raw.begin(&line)
    }

    #[track_caller]
    fn run_all(&mut self, lines: &[String]) -> Vec<Value> {
        let lines: Vec<String> = lines.iter().map(|line| self.with_session(line)).collect();
        self.raw.run_all(&lines)
    }

    /// A queued request gets its token from the session's `granted` event.
    #[track_caller]
    fn get_token(&mut self, line: &str) -> i64 {
        let reply = self.run(line);
        if reply == Value::SimpleString("WAITING".into()) { self.granted().token() } else { reply.token() }
    }
}
