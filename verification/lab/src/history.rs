//! The clients' records: the only input of the checker.
//!
//! All times are microseconds of this machine's monotonic clock, which clients in Rust and Python share.

use std::collections::{BTreeSet, HashMap};

/// Microseconds of the machine's monotonic clock.
pub type Micros = u64;

/// A server rounds its clock down to milliseconds, so a lease may end this much before the client expects it.
pub const LEASE_MARGIN: Micros = 2_000;

/// A request without a reply may be executed until this long after it was sent.
const UNANSWERED: Micros = 10_000_000;

/// How certain a client was, when its hold began, that a failover would not lose the grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Assurance {
    /// Without confirmation.
    Plain,
    /// `WAIT 1` came back with no replica.
    Unconfirmed,
    /// `WAIT 1` came back with at least one replica.
    Confirmed,
    /// Granted with `REPLICAS` and the number of all replicas.
    Replicas,
}

/// The server and its term as primary: a new epoch begins at each promotion. `None` if the client can't know.
pub type Epoch = Option<String>;

/// A request's limit: how many owners may hold the lock at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// At most this many owners.
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

/// The outcome of a request, as its client saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A token, or for a release or renewal: success.
    Granted,
    /// Null: not granted, or not held any more.
    Refused,
    /// The server returned an error, `-UNCONFIRMED` among them, or the connection failed.
    Failed,
    /// The client timed out without a reply.
    Unanswered,
}

/// One line of a client's record.
#[derive(Clone, Debug)]
pub enum Event {
    /// A lock was granted.
    Grant(Grant),
    /// Hold `hold` was renewed.
    Renewed {
        /// The hold's number.
        hold: u64,
        /// When the client requested it (of several attempts, the last).
        sent: Micros,
        /// When the reply came.
        replied: Micros,
        /// The new lease.
        lease: Micros,
        /// The server that renewed it.
        epoch: Epoch,
        /// How certain that is.
        assurance: Assurance,
    },
    /// The client is about to release hold `hold`, and does not use it any more.
    Ended {
        /// The hold's number.
        hold: u64,
        /// When.
        at: Micros,
    },
    /// With hold `hold`, the client wrote to the fenced store.
    Write {
        /// The hold's number.
        hold: u64,
        /// When.
        at: Micros,
    },
    /// Hold `hold` is bound to a session, which is notified of its loss.
    Bound {
        /// The hold's number.
        hold: u64,
    },
    /// The client was notified that hold `hold` is lost.
    LossNotified {
        /// The hold's number.
        hold: u64,
        /// When it was notified.
        at: Micros,
        /// The reason.
        why: Loss,
    },
    /// A lock was forced (`LOCK.FORCE`).
    Forced(ForcedLock),
    /// A request and its outcome.
    Request(Request),
}

/// Why a hold was lost, from a session's event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Its lease expired.
    Expired,
    /// The lock was forced.
    Forced,
    /// Another command changed the key, or the server lost it.
    Changed,
    /// The session's connection ended, or the hold could not be confirmed in time.
    Disconnected,
}

/// A forced lock.
#[derive(Clone, Debug)]
pub struct ForcedLock {
    /// The lock.
    pub key: String,
    /// When the command was sent.
    pub sent: Micros,
    /// When the reply came; `None`: the outcome is unknown.
    pub replied: Option<Micros>,
}

impl ForcedLock {
    /// When it was executed at the latest, if it was.
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
    /// The requested limit.
    pub limit: Limit,
    /// The fencing token.
    pub token: u64,
    /// When the client first requested it.
    pub sent: Micros,
    /// When the lease began at the earliest: the client's last request, or the token's time, whichever is later.
    pub began: Micros,
    /// When the client knew of it.
    pub replied: Micros,
    /// The lease.
    pub lease: Micros,
    /// The server that granted it.
    pub epoch: Epoch,
    /// How certain it is.
    pub assurance: Assurance,
}

/// A request and its outcome.
#[derive(Clone, Debug)]
pub struct Request {
    /// When it was sent.
    pub sent: Micros,
    /// How long the server may take to reply, from the request's own timeouts.
    pub allowed: Micros,
    /// When it ended; `None`: never.
    pub ended: Option<Micros>,
    /// Its outcome.
    pub outcome: Outcome,
}

/// A period in which a hold counted as held, by one server's reply.
#[derive(Clone, Debug)]
pub struct Span {
    /// Its beginning.
    pub from: Micros,
    /// Its end, exclusive.
    pub until: Micros,
    /// The server.
    pub epoch: Epoch,
    /// How certain it is.
    pub assurance: Assurance,
}

/// A hold, from its grant to its end.
#[derive(Clone, Debug)]
pub struct Hold {
    /// The grant.
    pub grant: Grant,
    /// The periods in which it counted as held.
    pub spans: Vec<Span>,
    /// Whether it was bound to a session.
    pub bound: bool,
    /// When its client was notified of its loss, and why.
    pub notified: Option<(Micros, Loss)>,
    /// When its client released it or stopped using it.
    pub ended: Option<Micros>,
    /// When the release request had ended.
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
        Hold { grant, spans, bound: false, notified: None, ended: None, returned: None }
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

/// A period with a fault, including its consequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// When it was injected.
    pub from: Micros,
    /// When all servers were healthy again.
    pub until: Micros,
}

/// A fault of one part of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalFault {
    /// When.
    pub fault: Fault,
    /// The hash tags of the keys that it may affect.
    pub tags: BTreeSet<String>,
}

impl Fault {
    /// Whether the fault overlaps `from..until`.
    pub fn touches(&self, from: Micros, until: Micros) -> bool {
        self.from < until && from < self.until
    }
}

/// The hash tag of a key, which determines its slot in a cluster.
fn tag(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    rest.split_once('}').map(|(tag, _)| tag)
}

/// An attempt to acquire a lock whose holder disappeared during a fault.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The lock.
    pub key: String,
    /// The deadline for it.
    pub due: Micros,
    /// When it succeeded.
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

/// The records of all clients of a run.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// All holds, in no order.
    pub holds: Vec<Hold>,
    /// All requests.
    pub requests: Vec<Request>,
    /// All writes to the fenced store.
    pub writes: Vec<Write>,
    /// Faults that may affect any key.
    pub faults: Vec<Fault>,
    /// Faults that may affect some keys.
    pub local_faults: Vec<LocalFault>,
    /// All attempts to acquire abandoned locks.
    pub probes: Vec<Probe>,
    /// All forced locks.
    pub forced_locks: Vec<ForcedLock>,
}

impl History {
    /// Ends the holds of forced locks, whatever their clients recorded. Call it when all records are added.
    pub fn end_forced_holds(&mut self) {
        for broken in &self.forced_locks {
            for hold in self.holds.iter_mut().filter(|hold| hold.grant.key == broken.key) {
                if hold.grant.began <= broken.done_by() {
                    hold.over_at(broken.sent);
                }
            }
        }
    }

    /// All faults.
    pub fn all_faults(&self) -> impl Iterator<Item = &Fault> {
        let local = self.local_faults.iter().map(|local| &local.fault);
        self.faults.iter().chain(local)
    }

    /// The faults that may affect a key.
    pub fn faults_of(&self, key: &str) -> Vec<Fault> {
        let tag = tag(key);
        let local = self
            .local_faults
            .iter()
            .filter(|local| tag.is_some_and(|tag| local.tags.contains(tag)))
            .map(|local| &local.fault);
        self.faults.iter().chain(local).cloned().collect()
    }

    /// Adds one client's record. A hold's number is unique within its client.
    pub fn add(&mut self, record: impl IntoIterator<Item = Event>) {
        let mut index = HashMap::new();
        // The hold that the client's next request releases, if it is a release.
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
            Event::LossNotified { hold, at, why } => {
                if let Some(&hold) = index.get(&hold) {
                    self.holds[hold].notified = Some((at, why));
                    self.holds[hold].over_at(at);
                }
            }
            Event::Forced(broken) => self.forced_locks.push(broken),
            Event::Request(request) => self.requests.push(request),
        }
    }
}
