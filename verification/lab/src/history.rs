//! What the clients wrote down while they worked: the only thing that the checker believes.
//!
//! All times are microseconds of this machine's monotonic clock, which Rust's and Python's clients read alike.

use std::collections::{BTreeSet, HashMap};

/// Microseconds of the machine's monotonic clock.
pub type Micros = u64;

/// A server rounds its clock down to milliseconds, so a lease may end this much before the client expects it.
pub const LEASE_MARGIN: Micros = 2_000;

/// So long after it was sent a request without an answer may still be carried out.
const UNANSWERED: Micros = 10_000_000;

/// How sure a client could be, when it began to hold, that a failover would not lose the grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Assurance {
    /// Nothing was asked of replicas.
    Plain,
    /// `WAIT 1` came back with no replica.
    Unconfirmed,
    /// `WAIT 1` came back with at least one replica.
    Confirmed,
    /// Granted with `REPLICAS` and the number of all replicas.
    Replicas,
}

/// Which life of which server granted: a new one begins at each promotion. Where a client can't know, it is unknown.
pub type Epoch = Option<String>;

/// How many may hold at once, as a request said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// At most so many.
    Of(usize),
    /// Any number of readers.
    Shared,
}

impl Limit {
    /// The limit as a number.
    pub fn most(self) -> usize {
        match self {
            Limit::Of(n) => n,
            Limit::Shared => usize::MAX,
        }
    }
}

/// A request's fate, as its client saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A token, or for a release or renewal: done.
    Granted,
    /// Null: not granted, or not held any more.
    Refused,
    /// The server or the connection gave an error, `-UNCONFIRMED` among them.
    Failed,
    /// The client gave up: no answer although more than the time allowed had passed.
    Unanswered,
}

/// One line of a client's record.
#[derive(Clone, Debug)]
pub enum Event {
    /// A lock was granted.
    Grant(Grant),
    /// Hold `hold` was renewed.
    Renewed {
        /// Which hold.
        hold: u64,
        /// When the client asked (if it had to ask again: the last time).
        sent: Micros,
        /// When the reply came.
        replied: Micros,
        /// The new lease.
        lease: Micros,
        /// Who renewed it.
        epoch: Epoch,
        /// How sure that is.
        assurance: Assurance,
    },
    /// The client is about to give hold `hold` back, and uses it no more.
    Ended {
        /// Which hold.
        hold: u64,
        /// When.
        at: Micros,
    },
    /// Under hold `hold` the client wrote to the fenced store.
    Write {
        /// Which hold.
        hold: u64,
        /// When.
        at: Micros,
    },
    /// Hold `hold` is bound to a session: its client will be told if it is lost.
    Bound {
        /// Which hold.
        hold: u64,
    },
    /// The client was told that hold `hold` is lost.
    Told {
        /// Which hold.
        hold: u64,
        /// When it had been told.
        at: Micros,
        /// Why, as it was told.
        why: Loss,
    },
    /// A lock was broken (`LOCK.FORCE`).
    Broke(Break),
    /// A request and its end.
    Request(Request),
}

/// Why a hold was lost, as a session is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Its lease ran out.
    Expired,
    /// Somebody broke the lock.
    Forced,
    /// Another command changed the key, or the server has it no more.
    Changed,
    /// The session's connection ended, or nobody could say in time whether the hold lives on.
    Disconnected,
}

/// A lock that somebody broke.
#[derive(Clone, Debug)]
pub struct Break {
    /// The lock.
    pub key: String,
    /// When that was asked for.
    pub sent: Micros,
    /// When the server had done it; `None`: it did not say whether it has.
    pub replied: Option<Micros>,
}

impl Break {
    /// By then it was done, if it was.
    pub fn done_by(&self) -> Micros {
        self.replied.unwrap_or(self.sent + UNANSWERED)
    }
}

/// A grant.
#[derive(Clone, Debug)]
pub struct Grant {
    /// The hold's number, unique within the client.
    pub hold: u64,
    /// The lock.
    pub key: String,
    /// The owner.
    pub owner: String,
    /// The limit asked for.
    pub limit: Limit,
    /// The fencing token.
    pub token: u64,
    /// When the client first asked.
    pub sent: Micros,
    /// Not before this did the lease begin: when the client last asked, or the token's time, whichever is later.
    pub began: Micros,
    /// When the client knew that it holds.
    pub replied: Micros,
    /// The lease.
    pub lease: Micros,
    /// Who granted it.
    pub epoch: Epoch,
    /// How sure that is.
    pub assurance: Assurance,
}

/// A request and what came of it.
#[derive(Clone, Debug)]
pub struct Request {
    /// When it was sent.
    pub sent: Micros,
    /// How long the server may take to answer, by what the client asked.
    pub allowed: Micros,
    /// When it ended; `None`: never.
    pub ended: Option<Micros>,
    /// How it ended.
    pub outcome: Outcome,
}

/// A stretch of time in which a hold counted as held, on one server's word.
#[derive(Clone, Debug)]
pub struct Span {
    /// From here.
    pub from: Micros,
    /// Up to here, exclusively.
    pub until: Micros,
    /// Whose word.
    pub epoch: Epoch,
    /// How sure.
    pub assurance: Assurance,
}

/// A hold, from its grant to its end.
#[derive(Clone, Debug)]
pub struct Hold {
    /// The grant it began with.
    pub grant: Grant,
    /// When it counted as held.
    pub spans: Vec<Span>,
    /// Whether it was bound to a session.
    pub bound: bool,
    /// When its client was told that it is lost, and why.
    pub told: Option<(Micros, Loss)>,
    /// When its client gave it back or gave it up.
    pub ended: Option<Micros>,
    /// When the request had ended by which it gave it back.
    pub returned: Option<Micros>,
}

impl Hold {
    fn new(grant: Grant) -> Hold {
        let span = Span {
            from: grant.replied,
            until: lease_end(grant.began, grant.lease),
            epoch: grant.epoch.clone(),
            assurance: grant.assurance,
        };
        let spans = if span.from < span.until { vec![span] } else { vec![] };
        Hold { grant, spans, bound: false, told: None, ended: None, returned: None }
    }

    fn renewed(&mut self, span: Span) {
        let mut span = span;
        if let Some(last) = self.spans.last_mut() {
            if last.epoch == span.epoch {
                last.until = last.until.min(span.until);
                span.from = span.from.max(last.until);
            } else {
                last.until = last.until.min(span.from);
            }
        }
        if span.from < span.until {
            self.spans.push(span);
        }
    }

    fn ended(&mut self, at: Micros) {
        self.ended = Some(self.ended.map_or(at, |ended| ended.min(at)));
        self.over_at(at);
    }

    fn over_at(&mut self, at: Micros) {
        for span in &mut self.spans {
            span.until = span.until.min(at);
        }
        self.spans.retain(|span| span.from < span.until);
    }
}

fn lease_end(began: Micros, lease: Micros) -> Micros {
    (began + lease).saturating_sub(LEASE_MARGIN)
}

/// A time in which a fault was on, or its consequences not yet over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// When it was injected.
    pub from: Micros,
    /// When all servers were in their places again.
    pub until: Micros,
}

/// A fault of one part of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalFault {
    /// When.
    pub fault: Fault,
    /// The hash tags of the keys that it could concern.
    pub tags: BTreeSet<String>,
}

impl Fault {
    /// True if any moment of the fault lies in `from..until`.
    pub fn touches(&self, from: Micros, until: Micros) -> bool {
        self.from < until && from < self.until
    }
}

/// What stands between the braces of a key, by which a cluster chooses its slot.
fn tag(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    rest.split_once('}').map(|(tag, _)| tag)
}

/// An attempt to have a lock again whose holder vanished during a fault.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The lock.
    pub key: String,
    /// By when it had to be had.
    pub due: Micros,
    /// When it was had.
    pub had: Option<Micros>,
}

/// A write to the fenced store.
#[derive(Clone, Debug)]
pub struct Write {
    /// When.
    pub at: Micros,
    /// Index into [`History::holds`].
    pub hold: usize,
}

/// Everything that all clients of a run wrote down.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// All holds, in no order.
    pub holds: Vec<Hold>,
    /// All requests.
    pub requests: Vec<Request>,
    /// All writes to the fenced store.
    pub writes: Vec<Write>,
    /// Faults that could concern any key.
    pub faults: Vec<Fault>,
    /// Faults that could concern some keys only.
    pub local_faults: Vec<LocalFault>,
    /// All attempts to have an abandoned lock again.
    pub probes: Vec<Probe>,
    /// All locks that were broken.
    pub breaks: Vec<Break>,
}

impl History {
    /// A hold whose lock was broken is none from then on, whatever its client knows: to be called when all is added.
    pub fn end_broken_holds(&mut self) {
        for broken in &self.breaks {
            for hold in self.holds.iter_mut().filter(|hold| hold.grant.key == broken.key) {
                if hold.grant.began <= broken.done_by() {
                    hold.over_at(broken.sent);
                }
            }
        }
    }

    /// All faults, whatever they concern.
    pub fn all_faults(&self) -> impl Iterator<Item = &Fault> {
        let local = self.local_faults.iter().map(|local| &local.fault);
        self.faults.iter().chain(local)
    }

    /// The faults that could concern a key.
    pub fn faults_of(&self, key: &str) -> Vec<Fault> {
        let tag = tag(key);
        let local = self
            .local_faults
            .iter()
            .filter(|local| tag.is_some_and(|tag| local.tags.contains(tag)))
            .map(|local| &local.fault);
        self.faults.iter().chain(local).cloned().collect()
    }

    /// Adds one client's record. Holds are known by their number within that client.
    pub fn add(&mut self, record: impl IntoIterator<Item = Event>) {
        let mut index = HashMap::new();
        // What the client's next request gives back, if that is what it is.
        let mut ended = Vec::new();
        for event in record {
            match &event {
                Event::Ended { hold, .. } => ended.extend(index.get(hold)),
                Event::Request(request) => {
                    ended.drain(..).for_each(|hold: usize| self.holds[hold].returned = request.ended);
                }
                _ => {}
            }
            self.add_event(event, &mut index);
        }
    }

    fn add_event(&mut self, event: Event, index: &mut HashMap<u64, usize>) {
        match event {
            Event::Grant(grant) => {
                index.insert(grant.hold, self.holds.len());
                self.holds.push(Hold::new(grant));
            }
            Event::Renewed { hold, sent, replied, lease, epoch, assurance } => {
                if let Some(&hold) = index.get(&hold) {
                    self.holds[hold].renewed(Span { from: replied, until: lease_end(sent, lease), epoch, assurance });
                }
            }
            Event::Ended { hold, at } => {
                if let Some(&hold) = index.get(&hold) {
                    self.holds[hold].ended(at);
                }
            }
            Event::Write { hold, at } => {
                if let Some(&hold) = index.get(&hold) {
                    self.writes.push(Write { at, hold });
                }
            }
            Event::Bound { hold } => {
                if let Some(&hold) = index.get(&hold) {
                    self.holds[hold].bound = true;
                }
            }
            Event::Told { hold, at, why } => {
                if let Some(&hold) = index.get(&hold) {
                    self.holds[hold].told = Some((at, why));
                    self.holds[hold].over_at(at);
                }
            }
            Event::Broke(broken) => self.breaks.push(broken),
            Event::Request(request) => self.requests.push(request),
        }
    }
}
