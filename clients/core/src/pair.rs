//! A pair of connections: the session that reads events, and the one that carries requests.

use crate::Reply;
use crate::claim::Kind;
use crate::terms::{Bytes, Id, Millis, Words};
use std::collections::VecDeque;

/// A pair of connections.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) number: u64,
    pub(crate) stage: Stage,
    /// The reply of `LOCK.SESSION`.
    pub(crate) id: Option<Bytes>,
    /// The pending requests, oldest first.
    pub(crate) unanswered: VecDeque<Sent>,
    /// When the server last sent something on the request connection, or the first pending request was sent.
    pub(crate) heard: Millis,
    /// When the last `LOCK.EVENTS` was sent, and by when a reply is due.
    pub(crate) asked: Millis,
    pub(crate) promised: Millis,
    /// How many ms after its arrival the server answers it at the latest, as the last heartbeat says.
    pub(crate) pace: Millis,
    /// When the next one is sent, if not immediately.
    pub(crate) asks_at: Option<Millis>,
    pub(crate) default_lease: Millis,
    /// The newest heartbeat.
    pub(crate) heartbeat: Option<Heartbeat>,
    /// Whether the server takes writes, by its last heartbeat.
    pub(crate) takes_writes: bool,
    /// Whether any of its requests got a reply that is not an error.
    pub(crate) has_served: bool,
}

/// The server's reply for a new session.
#[derive(Debug)]
pub(crate) struct Greeted {
    pub(crate) id: Bytes,
    /// The lowest and the highest version of the protocol that it speaks.
    pub(crate) protocol: [u64; 2],
}

impl Greeted {
    /// Parses the reply of `LOCK.SESSION`; fields that later versions append are ignored. `None`: malformed.
    pub(crate) fn read(reply: &Reply) -> Option<Self> {
        let field = |name: &str| {
            let mut pairs = reply.elements()?.chunks_exact(2);
            pairs.find(|pair| pair[0].text().is_some_and(|it| it == name)).map(|pair| &pair[1])
        };
        let Reply::Bulk(id) = field("id")? else { return None };
        let protocol = field("protocol")?.elements()?;
        Some(Self { id: id.clone(), protocol: [protocol.first()?.number()?, protocol.get(1)?.number()?] })
    }
}

/// The state of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Opening,
    /// The connections are open, and `LOCK.SESSION` is sent, with the sessions that it replaces.
    Greeting,
    Standing,
}

/// A pending request.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) id: Id,
    /// `None`: a plain request.
    pub(crate) kind: Option<Kind>,
    pub(crate) at: Millis,
}

/// A heartbeat. Each hold that the server renews for the session had at least `sure` thousandths of its lease left at
/// `asked`. It covers the holds that were known before the `LOCK.EVENTS` with the number `next` was sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heartbeat {
    pub(crate) asked: Millis,
    pub(crate) next: u64,
    pub(crate) sure: u64,
}

impl Pair {
    pub(crate) fn new(number: u64, now: Millis) -> Self {
        Self {
            number,
            stage: Stage::Opening,
            id: None,
            unanswered: VecDeque::new(),
            heard: now,
            asked: now,
            promised: now,
            pace: 0,
            asks_at: None,
            default_lease: 0,
            heartbeat: None,
            takes_writes: true,
            has_served: false,
        }
    }

    /// The first request of a session.
    pub(crate) fn greeting(replaced: &[Bytes]) -> Vec<Bytes> {
        let mut words = Words(Vec::new());
        words.word("LOCK.SESSION");
        if !replaced.is_empty() {
            words.word("REPLACES").0.extend(replaced.iter().cloned());
        }
        words.0
    }

    /// The request for events. The first one of a session does not wait, so that its heartbeat reports the default
    /// lease immediately.
    pub(crate) fn events_request(waits: bool) -> Vec<Bytes> {
        let mut words = Words(Vec::new());
        words.word("LOCK.EVENTS");
        if waits {
            words.option("WAIT", 0);
        }
        words.word("HEARTBEAT");
        words.0
    }

    /// When the core ends the session if nothing more arrives from the server.
    pub(crate) fn deadline(&self, limit: Millis) -> Millis {
        let session = self.promised.saturating_add(limit);
        if self.unanswered.is_empty() || !self.takes_writes {
            return session;
        }
        session.min(self.heard.saturating_add(limit))
    }

    /// Parses a heartbeat. `None`: malformed.
    pub(crate) fn read_heartbeat(&mut self, detail: &str, next: u64, now: Millis) -> Option<()> {
        // Later versions append elements.
        let mut numbers = detail.split(' ').map_while(|number| number.parse::<u64>().ok());
        let (pace, lease, sure, writes) = (numbers.next()?, numbers.next()?, numbers.next()?, numbers.next()?);
        self.default_lease = lease;
        self.heartbeat = Some(Heartbeat { asked: self.asked, next, sure });
        if !self.takes_writes && writes != 0 {
            self.heard = now;
        }
        self.takes_writes = writes != 0;
        (self.pace, self.promised) = (pace, now.saturating_add(pace));
        Some(())
    }
}

/// An event of a session.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) kind: String,
    /// How many keys it names.
    pub(crate) keys: usize,
    pub(crate) owner: Bytes,
    pub(crate) token: Option<u64>,
    pub(crate) detail: String,
}

impl Event {
    /// Parses an event; elements that later versions append are ignored. `None`: malformed.
    pub(crate) fn read(reply: &Reply) -> Option<Self> {
        let [kind, _, keys, owner, token, detail, ..] = reply.elements()? else { return None };
        let owner = if let Reply::Bulk(owner) = owner { owner.clone() } else { Vec::new() };
        let (keys, detail) = (keys.elements()?.len(), detail.text().unwrap_or_default());
        Some(Self { kind: kind.text()?, keys, owner, token: token.number(), detail })
    }
}

/// How the core reacts to an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advice {
    /// It sends the request again after a pause.
    Retry,
    /// It ends the session.
    End,
    /// It returns the error to the caller.
    Final,
}

/// Whether this error is temporary: an acquisition that waits is then requested again.
pub(crate) fn is_passing(error: &str) -> bool {
    let code = error.split(' ').next().unwrap_or_default();
    let texts = ["too many waiters", "being confirmed", "max number of clients"];
    Advice::of(error) == Advice::Retry
        || matches!(code, "MISCONF" | "NOREPLICAS" | "OOM" | "UNCONFIRMED" | "SUPERSEDED")
        || (code == "ERR" && texts.iter().any(|text| error.contains(text)))
}

impl Advice {
    pub(crate) fn of(error: &str) -> Self {
        match error.split(' ').next().unwrap_or_default() {
            "LOADING" | "BUSY" | "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN" => Self::Retry,
            "READONLY" | "NOSESSION" | "UNBLOCKED" => Self::End,
            _ => Self::Final,
        }
    }
}
