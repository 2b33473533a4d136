//! A session whose events are read one by one. Each event is expected by a step, and is delivered once.

use redis::Value;
use support::{Raw, Server};

use crate::lines::{Commands, Reply};

/// How long an event that is due may take, in milliseconds, on a machine that is busy with other tests.
const SOON: u64 = 20_000;

/// A session's connection, and the events that were read while another one was expected.
pub struct EventQueue {
    /// The session's id.
    pub id: String,
    raw: Raw,
    unclaimed: Vec<Event>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Event {
    kind: String,
    keys: Vec<String>,
    owner: String,
    token: Option<i64>,
    detail: Option<String>,
}

impl EventQueue {
    /// A new session.
    pub fn new(server: &Server) -> Self {
        let mut raw = server.raw();
        let id = raw.run("LOCK.SESSION").field("id").text();
        Self { id, raw, unclaimed: Vec::new() }
    }

    /// Waits for `granted`, and returns the token.
    #[track_caller]
    pub fn granted(&mut self, keys: &[usize], owner: &str) -> i64 {
        let received = self.claim("granted", keys, owner);
        received.token.unwrap_or_else(|| panic!("a grant without a token: {received:?}"))
    }

    /// Waits for `timeout`.
    #[track_caller]
    pub fn timeout(&mut self, keys: &[usize], owner: &str) {
        self.claim("timeout", keys, owner);
    }

    /// Waits for `lost`, for this hold and this reason.
    #[track_caller]
    pub fn lost(&mut self, key: usize, owner: &str, token: i64, why: &str) {
        let received = self.claim("lost", &[key], owner);
        assert_eq!((received.token, received.detail.as_deref()), (Some(token), Some(why)), "{received:?}");
    }

    /// All events were expected, and none is left.
    #[track_caller]
    pub fn assert_empty(&mut self) {
        assert_eq!(self.unclaimed, []);
        assert_eq!(self.raw.run("LOCK.EVENTS"), Value::Nil);
    }

    /// Waits for the event of a withdrawn request.
    #[track_caller]
    pub fn expect_withdrawal(&mut self, keys: &[usize], owner: &str) {
        let received = self.claim("refused", keys, owner);
        assert!(received.detail.as_ref().is_some_and(|why| why.starts_with("CANCELLED ")), "{received:?}");
    }

    /// Resets the session's connection.
    pub fn reset(self) {
        self.raw.reset();
    }

    #[track_caller]
    fn claim(&mut self, kind: &str, keys: &[usize], owner: &str) -> Event {
        let keys: Vec<String> = keys.iter().map(|key| format!("k{key}")).collect();
        let is_it = |received: &Event| received.kind == kind && received.keys == keys && received.owner == owner;
        loop {
            if let Some(place) = self.unclaimed.iter().position(is_it) {
                return self.unclaimed.remove(place);
            }
            let next = self.raw.run(&format!("LOCK.EVENTS WAIT {SOON}"));
            assert!(!next.is_null(), "no {kind} for {owner} of {keys:?}, but {:?}", self.unclaimed);
            self.unclaimed.extend(next.items().iter().map(Event::read));
        }
    }
}

impl Event {
    fn read(event: &Value) -> Self {
        let [kind, _, keys, owner, token, detail] = event.items() else { panic!("not an event: {event:?}") };
        Self {
            kind: kind.text(),
            keys: keys.items().iter().map(Reply::text).collect(),
            owner: owner.text(),
            token: (!token.is_null()).then(|| token.token()),
            detail: (!detail.is_null()).then(|| detail.text()),
        }
    }
}
