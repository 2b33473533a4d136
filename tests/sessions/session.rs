//! A session and its events.

use std::time::{Duration, Instant};

use redis::Value;
use support::{Raw, Server, until};

use crate::common::{array, int, text, token};
use crate::lines::Reply;
use crate::waiter::{Commands, SOON, is_blocked};

/// Long enough to notice an unexpected reply.
pub(crate) const A_WHILE: Duration = Duration::from_millis(200);

/// A connection that represents a process.
pub(crate) struct Session {
    /// The connection, which reads the events.
    pub(crate) raw: Raw,
    /// The connection's client id.
    pub(crate) client: i64,
    /// The session's id.
    pub(crate) id: String,
}

impl Session {
    #[track_caller]
    pub(crate) fn open(server: &Server) -> Self {
        Self::on(server.raw())
    }

    /// Makes an existing connection a session.
    #[track_caller]
    pub(crate) fn on(mut raw: Raw) -> Self {
        let client = raw.client_id();
        let id = raw.run_ok("LOCK.SESSION").field("id").text();
        Self { raw, client, id }
    }

    /// Sends a request on behalf of the session over another connection, and returns the reply.
    #[track_caller]
    pub(crate) fn request(&self, client: &mut Raw, line: &str) -> Value {
        client.run(&self.with_session(line))
    }

    /// The line of a request on behalf of the session.
    pub(crate) fn with_session(&self, line: &str) -> String {
        format!("{line} SESSION {}", self.id)
    }

    /// The token of a request that must be granted immediately.
    #[track_caller]
    pub(crate) fn get_token(&self, client: &mut Raw, line: &str) -> i64 {
        token(&self.request(client, line))
    }

    /// Sends a request that must wait.
    #[track_caller]
    pub(crate) fn wait(&self, client: &mut Raw, line: &str) {
        assert_eq!(self.request(client, line), waiting(), "{line}");
    }

    /// `LOCK.RELEASE … ALL` of an owner: whether anything was released or withdrawn.
    #[track_caller]
    pub(super) fn withdraw(&self, client: &mut Raw, key: &str, owner: &str) -> bool {
        let owner = if owner == "*" { &self.id } else { owner };
        match client.run(&format!("LOCK.RELEASE {key} {owner} ALL")) {
            Value::Int(1) => true,
            Value::Nil => false,
            other => panic!("LOCK.RELEASE was answered {other:?}"),
        }
    }

    /// The next events, at least one.
    #[track_caller]
    pub(crate) fn next(&mut self) -> Vec<Event> {
        let end = Instant::now() + SOON;
        loop {
            // Nil comes early if the session has to read again, so that its holds are renewed.
            let reply = self.raw.run(&format!("LOCK.EVENTS WAIT {}", SOON.as_millis()));
            if reply != Value::Nil {
                return events(&reply);
            }
            assert!(Instant::now() < end, "no event");
        }
    }

    /// The next event, which must be the only one.
    #[track_caller]
    pub(crate) fn event(&mut self) -> Event {
        let mut events = self.next();
        assert_eq!(events.len(), 1, "{events:?}");
        events.remove(0)
    }

    /// The next events, which must be this many.
    #[track_caller]
    pub(crate) fn events(&mut self, count: usize) -> Vec<Event> {
        let mut all = Vec::new();
        while all.len() < count {
            all.extend(self.next());
        }
        assert_eq!(all.len(), count, "{all:?}");
        all
    }

    /// Asserts that no event is pending, and none follows from earlier commands: the event of a marker, which is lost now, comes
    /// first and alone.
    #[track_caller]
    pub(crate) fn assert_no_event(&mut self, client: &mut Raw) {
        let line = format!("LOCK.ACQUIRE no-more-than-this marker WATCHDOG SESSION {}", self.id);
        let marker = token(&client.run(&line));
        client.run_ok("DEL no-more-than-this");
        assert_eq!(self.next(), [Event::lost("no-more-than-this", "marker", marker, "changed")]);
    }

    /// Sends `LOCK.EVENTS`, and waits until the server has blocked the session.
    #[track_caller]
    pub(crate) fn listen(&mut self, server: &Server) {
        self.raw.send_lines(&["LOCK.EVENTS WAIT 0"]);
        let mut observer = server.raw();
        until(SOON, "the session waits for events", || {
            // A session with a short lease is soon answered nil, because it has to read again.
            if !self.raw.pending() {
                assert_eq!(self.raw.read().expect("the connection is open"), Value::Nil);
                self.raw.send_lines(&["LOCK.EVENTS WAIT 0"]);
            }
            is_blocked(&mut observer, self.client)
        });
    }

    /// The events of a blocked session that is unblocked with `CLIENT UNBLOCK` and `how`, if they came first.
    #[track_caller]
    pub(crate) fn read_unblocked(&mut self, how: &str) -> Vec<Event> {
        match self.raw.read().expect("a reply") {
            Value::Nil => Vec::new(),
            Value::ServerError(error) => {
                assert_eq!((error.code(), how), ("UNBLOCKED", " ERROR"));
                Vec::new()
            }
            reply => events(&reply),
        }
    }

    /// The events that a blocked session gets.
    #[track_caller]
    pub(crate) fn read_events(&mut self) -> Vec<Event> {
        events(&self.raw.read_timeout(SOON).expect("the connection is open").expect("an event"))
    }
}

/// The reply to a queued request.
pub(crate) fn waiting() -> Value {
    Value::SimpleString("WAITING".into())
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) kind: String,
    pub(crate) db: i64,
    pub(crate) keys: Vec<String>,
    pub(crate) owner: String,
    pub(crate) token: Option<i64>,
    pub(crate) detail: Option<String>,
}

impl Event {
    fn new(kind: &str, keys: &[&str], owner: &str, token: Option<i64>, detail: Option<&str>) -> Self {
        let keys = keys.iter().map(|&key| key.to_owned()).collect();
        Self { kind: kind.into(), db: 0, keys, owner: owner.into(), token, detail: detail.map(str::to_owned) }
    }

    pub(crate) fn granted(keys: &[&str], owner: &str, token: i64) -> Self {
        Self::new("granted", keys, owner, Some(token), None)
    }

    pub(crate) fn timeout(keys: &[&str], owner: &str) -> Self {
        Self::new("timeout", keys, owner, None, None)
    }

    pub(crate) fn refused(keys: &[&str], owner: &str, detail: &str) -> Self {
        Self::new("refused", keys, owner, None, Some(detail))
    }

    pub(crate) fn lost(key: &str, owner: &str, token: i64, why: &str) -> Self {
        Self::new("lost", &[key], owner, Some(token), Some(why))
    }

    pub(crate) fn unbound(key: &str, owner: &str, token: i64, why: &str) -> Self {
        Self::new("unbound", &[key], owner, Some(token), Some(why))
    }

    pub(crate) fn contended(key: &str, owner: &str, token: i64) -> Self {
        Self::new("contended", &[key], owner, Some(token), None)
    }

    pub(crate) fn in_db(self, db: i64) -> Self {
        Self { db, ..self }
    }

    /// The token of a grant; every other element must match.
    #[track_caller]
    pub(crate) fn token_of(&self, keys: &[&str], owner: &str) -> i64 {
        let token = self.token.unwrap_or(0);
        assert_eq!(*self, Self::granted(keys, owner, token).in_db(self.db));
        assert!(token > 0, "{self:?}");
        token
    }

    /// The error of a refused request; every other element must match.
    #[track_caller]
    pub(crate) fn error_of(&self, keys: &[&str], owner: &str) -> String {
        let detail = self.detail.clone().unwrap_or_default();
        assert_eq!(*self, Self::refused(keys, owner, &detail).in_db(self.db));
        detail
    }
}

/// The events in a reply.
#[track_caller]
pub(crate) fn events(reply: &Value) -> Vec<Event> {
    array(reply).iter().map(event).collect()
}

#[track_caller]
fn event(value: &Value) -> Event {
    let [kind, db, keys, owner, token, detail] = array(value) else { panic!("not an event: {value:?}") };
    // The minimum remaining lease.
    let lasts = |detail: &Value| text(detail).parse::<u64>().is_ok();
    let detail = if text(kind) == "granted" && lasts(detail) { &Value::Nil } else { detail };
    let or_null = |value: &Value| (*value != Value::Nil).then(|| value.clone());
    Event {
        kind: text(kind),
        db: int(db),
        keys: array(keys).iter().map(text).collect(),
        owner: text(owner),
        token: or_null(token).map(|token| int(&token)),
        detail: or_null(detail).map(|detail| text(&detail)),
    }
}

/// Waits until the server has noticed that a session's connection has ended.
#[track_caller]
pub(crate) fn until_ended(client: &mut Raw, session: &str) {
    until(SOON, "the session has ended", || {
        matches!(client.run(&format!("LOCK.RENEW none none SESSION {session}")), Value::ServerError(error)
            if error.code() == "NOSESSION")
    });
}
