//! A session and its events, as the tests see them.

use std::time::{Duration, Instant};

use redis::Value;
use support::{Raw, Server, until};

use crate::common::{array, int, text, token};
use crate::speak::Reply;
use crate::waiter::{SOON, Speak, Tell, is_blocked};

/// Long enough to see that nothing happens.
pub(crate) const A_WHILE: Duration = Duration::from_millis(200);

/// A connection that stands for a process.
pub(crate) struct Session {
    /// The connection, which reads the events.
    pub(crate) raw: Raw,
    /// The server's id of it.
    pub(crate) client: i64,
    /// By which it is named.
    pub(crate) id: String,
}

impl Session {
    #[track_caller]
    pub(crate) fn open(server: &Server) -> Self {
        Self::on(server.raw())
    }

    /// On a connection that is there.
    #[track_caller]
    pub(crate) fn on(mut raw: Raw) -> Self {
        let client = raw.client_id();
        let id = raw.order("LOCK.SESSION").field("id").text();
        Self { raw, client, id }
    }

    /// Sends a request on its behalf over another connection; the reply.
    #[track_caller]
    pub(crate) fn ask(&self, client: &mut Raw, line: &str) -> Value {
        client.say(&self.naming(line))
    }

    /// The line of a request on its behalf.
    pub(crate) fn naming(&self, line: &str) -> String {
        format!("{line} SESSION {}", self.id)
    }

    /// The same for a request that must be granted at once; the token.
    #[track_caller]
    pub(crate) fn take(&self, client: &mut Raw, line: &str) -> i64 {
        token(&self.ask(client, line))
    }

    /// The same for a request that must wait.
    #[track_caller]
    pub(crate) fn wait(&self, client: &mut Raw, line: &str) {
        assert_eq!(self.ask(client, line), waiting(), "{line}");
    }

    /// `LOCK.RELEASE … ALL` of one of its owners: whether anything was released or withdrawn.
    #[track_caller]
    pub(super) fn withdraw(&self, client: &mut Raw, key: &str, owner: &str) -> bool {
        let owner = if owner == "*" { &self.id } else { owner };
        match client.say(&format!("LOCK.RELEASE {key} {owner} ALL")) {
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
            // Null comes early for one who has to ask again, so that what it holds is renewed.
            let reply = self.raw.say(&format!("LOCK.EVENTS WAIT {}", SOON.as_millis()));
            if reply != Value::Nil {
                return events(&reply);
            }
            assert!(Instant::now() < end, "no event comes");
        }
    }

    /// The next event, which is the only one so far.
    #[track_caller]
    pub(crate) fn event(&mut self) -> Event {
        let mut events = self.next();
        assert_eq!(events.len(), 1, "{events:?}");
        events.remove(0)
    }

    /// So many events, however they come.
    #[track_caller]
    pub(crate) fn events(&mut self, count: usize) -> Vec<Event> {
        let mut all = Vec::new();
        while all.len() < count {
            all.extend(self.next());
        }
        assert_eq!(all.len(), count, "{all:?}");
        all
    }

    /// There is no event, and none comes that something before this has caused: one that is caused now, in the most
    /// roundabout way there is, comes first and alone.
    #[track_caller]
    pub(crate) fn hears_nothing(&mut self, client: &mut Raw) {
        let line = format!("LOCK.ACQUIRE no-more-than-this marker WATCHDOG SESSION {}", self.id);
        let marker = token(&client.say(&line));
        client.order("DEL no-more-than-this");
        assert_eq!(self.next(), [Event::lost("no-more-than-this", "marker", marker, "changed")]);
    }

    /// Lets it wait for events, until the server has blocked it.
    #[track_caller]
    pub(crate) fn listen(&mut self, server: &Server) {
        self.raw.tell(&["LOCK.EVENTS WAIT 0"]);
        let (mut observer, client) = (server.raw(), self.client);
        until(SOON, "the session waits for events", || is_blocked(&mut observer, client));
    }

    /// What one hears who listens until a `CLIENT UNBLOCK`, which has `how` behind its id: the events, if they came first.
    #[track_caller]
    pub(crate) fn interrupted(&mut self, how: &str) -> Vec<Event> {
        match self.raw.read().expect("a reply") {
            Value::Nil => Vec::new(),
            Value::ServerError(error) => {
                assert_eq!((error.code(), how), ("UNBLOCKED", " ERROR"));
                Vec::new()
            }
            reply => events(&reply),
        }
    }

    /// The events that come to one who listens.
    #[track_caller]
    pub(crate) fn heard(&mut self) -> Vec<Event> {
        events(&self.raw.read_timeout(SOON).expect("the connection stands").expect("an event comes"))
    }
}

/// What is replied to a request whose answer comes as an event.
pub(crate) fn waiting() -> Value {
    Value::SimpleString("WAITING".into())
}

/// What a session reads.
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

    /// The token of a grant of these keys to this owner, and nothing else.
    #[track_caller]
    pub(crate) fn token_of(&self, keys: &[&str], owner: &str) -> i64 {
        let token = self.token.unwrap_or(0);
        assert_eq!(*self, Self::granted(keys, owner, token).in_db(self.db));
        assert!(token > 0, "{self:?}");
        token
    }

    /// The error by which a request of these keys and this owner ended, and nothing else.
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
    let [kind, db, keys, owner, token, detail] = array(value) else { panic!("no event of six: {value:?}") };
    // For how long the hold lasts at least.
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
        matches!(client.say(&format!("LOCK.RENEW none none SESSION {session}")), Value::ServerError(error)
            if error.code() == "NOSESSION")
    });
}
