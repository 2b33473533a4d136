//! A session, and what it was told: each event is expected by somebody, and comes once.

use redis::Value;
use support::{Raw, Server};

use crate::lines::{Commands, Reply};

/// How long an event that is due may take, in milliseconds, on a machine that is busy with other tests.
const SOON: u64 = 20_000;

/// A session's connection, with the events that were read while another one was looked for.
pub struct EventQueue {
    /// What requests name it by.
    pub id: String,
    raw: Raw,
    unclaimed: Vec<Told>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
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

    /// Waits for `granted`; the token.
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

    /// Waits for `lost`, of this very hold and for this reason.
    #[track_caller]
    pub fn lost(&mut self, key: usize, owner: &str, token: i64, why: &str) {
        let received = self.claim("lost", &[key], owner);
        assert_eq!((received.token, received.detail.as_deref()), (Some(token), Some(why)), "{received:?}");
    }

    /// Nothing was told that nobody expected, and nothing twice.
    #[track_caller]
    pub fn assert_empty(&mut self) {
        assert_eq!(self.unclaimed, []);
        assert_eq!(self.raw.run("LOCK.EVENTS"), Value::Nil);
    }

    /// Reads that a request was withdrawn.
    #[track_caller]
    pub fn hears_of_withdrawal(&mut self, keys: &[usize], owner: &str) {
        let received = self.claim("refused", keys, owner);
        assert!(received.detail.as_ref().is_some_and(|why| why.starts_with("CANCELLED ")), "{received:?}");
    }

    /// Ends the session as a crash does.
    pub fn reset(self) {
        self.raw.reset();
    }

    #[track_caller]
    fn claim(&mut self, kind: &str, keys: &[usize], owner: &str) -> Told {
        let keys: Vec<String> = keys.iter().map(|key| format!("k{key}")).collect();
        let is_it = |received: &Told| received.kind == kind && received.keys == keys && received.owner == owner;
        loop {
            if let Some(place) = self.unclaimed.iter().position(is_it) {
                return self.unclaimed.remove(place);
            }
            let next = self.raw.run(&format!("LOCK.EVENTS WAIT {SOON}"));
            assert!(!next.is_null(), "no {kind} for {owner} of {keys:?}, but {:?}", self.unclaimed);
            self.unclaimed.extend(next.items().iter().map(Told::read));
        }
    }
}

impl Told {
    fn read(event: &Value) -> Self {
        let [kind, _, keys, owner, token, detail] = event.items() else { panic!("no event: {event:?}") };
        Self {
            kind: kind.text(),
            keys: keys.items().iter().map(Reply::text).collect(),
            owner: owner.text(),
            token: (!token.is_null()).then(|| token.token()),
            detail: (!detail.is_null()).then(|| detail.text()),
        }
    }
}
