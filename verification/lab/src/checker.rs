//! Checks a [`History`]: which guarantees were violated, and which anomalies at failovers are allowed.
//!
//! The checker is pure: it reads no clock and no server, only the clients' records. A hold counts from the moment at which its
//! client knew of it until its client began to release it, or until the end of the lease.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use crate::history::{Assurance, Epoch, Fault, Grant, History, Hold, Limit, Micros, Outcome, Request, Span};

mod losses;

/// By how much a busy machine may delay a reply before it counts as lost.
pub const PATIENCE: Micros = 2_000_000;

/// A violated guarantee.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// One server granted the lock to more owners than its limit allows.
    TooManyHolders {
        /// The lock.
        key: String,
        /// The earlier holder and the later one, each with its record.
        owners: [String; 2],
        /// The beginning.
        at: Micros,
        /// The duration, at least.
        lasting: Micros,
        /// The server's epoch, if it is known.
        epoch: Epoch,
    },
    /// A failover lost a grant that `REPLICAS` had confirmed.
    ConfirmedGrantLost {
        /// The lock.
        key: String,
        /// When there were two holders.
        at: Micros,
    },
    /// A later grant does not have a greater token than an earlier one.
    TokenWentBack {
        /// The key of the later grant.
        key: String,
        /// Its token.
        token: u64,
        /// The token of the earlier grant.
        before: u64,
    },
    /// Two grants have the same token.
    TokenRepeated {
        /// The token.
        token: u64,
        /// The two grants: key, owner and server.
        given: [String; 2],
    },
    /// The fenced store accepted a write of an earlier holder after one of a later holder.
    StaleWriteTaken {
        /// The lock.
        key: String,
        /// When.
        at: Micros,
    },
    /// A request got no reply in time although there was no fault.
    LostWaiter {
        /// When it was sent.
        sent: Micros,
        /// When the reply came, or the client timed out.
        ended: Micros,
        /// When the reply was due.
        due: Micros,
    },
    /// A request never ended.
    NeverEnded {
        /// When it was sent.
        sent: Micros,
    },
    /// A bound hold was lost, and its client was not notified in time although its session was open.
    LossNotNotified {
        /// The lock.
        key: String,
        /// The owner.
        owner: String,
        /// When it was lost.
        at: Micros,
        /// When its client was notified, if it was.
        notified: Option<Micros>,
    },
    /// A client was notified that its lock was forced, without a `LOCK.FORCE`.
    SpuriousLossEvent {
        /// The lock.
        key: String,
        /// The owner.
        owner: String,
        /// When.
        at: Micros,
    },
    /// A client wrote after it was notified of the loss of its hold.
    WroteAfterLoss {
        /// The lock.
        key: String,
        /// The owner.
        owner: String,
        /// When it was notified.
        notified: Micros,
        /// When it wrote.
        at: Micros,
    },
    /// A lock whose holder disappeared could not be acquired again in time.
    NotHadAgain {
        /// The lock.
        key: String,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::TooManyHolders { key, owners: [first, second], at, lasting, epoch } => write!(
                f,
                "{key} had too many holders on one server ({}), {first} and {second}, at {at} µs for {lasting} µs",
                epoch.as_deref().unwrap_or("unknown")
            ),
            Violation::ConfirmedGrantLost { key, at } => {
                write!(f, "{key} was granted again at {at} µs although replicas had confirmed the hold")
            }
            Violation::TokenWentBack { key, token, before } => {
                write!(f, "{key} got token {token} after {before}")
            }
            Violation::TokenRepeated { token, given: [first, second] } => {
                write!(f, "token {token} was granted twice: {first}, and {second}")
            }
            Violation::StaleWriteTaken { key, at } => {
                write!(f, "the store of {key} accepted a stale write at {at} µs")
            }
            Violation::LostWaiter { sent, ended, due } => {
                write!(f, "a request sent at {sent} µs, due at {due} µs, had no reply, or a late one, at {ended} µs")
            }
            Violation::NeverEnded { sent } => {
                write!(f, "a request sent at {sent} µs never ended")
            }
            Violation::LossNotNotified { key, owner, at, notified: Some(notified) } => {
                write!(f, "{owner} lost {key} at {at} µs, and was notified only at {notified} µs")
            }
            Violation::LossNotNotified { key, owner, at, notified: None } => {
                write!(f, "{owner} lost {key} at {at} µs, and was never notified")
            }
            Violation::SpuriousLossEvent { key, owner, at } => {
                write!(f, "{owner} was notified at {at} µs that {key} was forced, which it was not")
            }
            Violation::WroteAfterLoss { key, owner, notified, at } => {
                write!(f, "{owner} wrote under {key} at {at} µs, notified at {notified} µs of its loss")
            }
            Violation::NotHadAgain { key } => {
                write!(f, "{key} could not be acquired again after the fault")
            }
        }
    }
}

/// What the checker found.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Violated guarantees.
    pub violations: Vec<Violation>,
    /// The number of grants, by assurance.
    pub grants: BTreeMap<Assurance, u64>,
    /// Double holds across a failover, by the assurance of the lost hold.
    pub doubles: BTreeMap<Assurance, u64>,
    /// When each of them began.
    pub doubled_at: Vec<Micros>,
    /// Late writes that the fenced store refused.
    pub writes_refused: u64,
    /// Writes that the store accepted.
    pub writes_taken: u64,
    /// Holds that were bound to a session.
    pub bound: u64,
    /// Losses that clients were notified of.
    pub notified: u64,
    /// Among them, for forced locks, the longest time until the client was notified.
    pub notified_within: Option<Micros>,
}

impl Verdict {
    /// The number of double holds with this assurance.
    pub fn doubles(&self, assurance: Assurance) -> u64 {
        self.doubles.get(&assurance).copied().unwrap_or(0)
    }

    /// The number of grants with this assurance.
    pub fn grants(&self, assurance: Assurance) -> u64 {
        self.grants.get(&assurance).copied().unwrap_or(0)
    }
}

/// Checks a history.
pub fn check(history: &History) -> Verdict {
    let mut verdict = Verdict::default();
    for hold in &history.holds {
        *verdict.grants.entry(hold.grant.assurance).or_default() += 1;
    }
    check_holders(history, &mut verdict);
    check_tokens(history, &mut verdict);
    check_store(history, &mut verdict);
    check_waits(history, &mut verdict);
    check_probes(history, &mut verdict);
    losses::check(history, &mut verdict);
    verdict
}

/// A span of a hold, in the sweep over time.
#[derive(Clone, Copy)]
struct Piece<'a> {
    hold: usize,
    of: &'a Hold,
    span: &'a Span,
}

fn check_holders(history: &History, verdict: &mut Verdict) {
    let first_seen = first_seen(history);
    let mut by_key: HashMap<&str, Vec<Piece>> = HashMap::new();
    for (hold, of) in history.holds.iter().enumerate() {
        let pieces = by_key.entry(&of.grant.key).or_default();
        pieces.extend(of.spans.iter().map(|span| Piece { hold, of, span }));
    }
    for (key, mut pieces) in by_key {
        pieces.sort_by_key(|piece| piece.span.from);
        let mut sweep = Sweep {
            key,
            faults: history.faults_of(key),
            first_seen: &first_seen,
            active: Vec::new(),
            reported: HashSet::new(),
            verdict,
        };
        for piece in pieces {
            sweep.meet(piece);
        }
    }
}

/// When each epoch granted something first, which orders the epochs.
fn first_seen(history: &History) -> HashMap<&str, Micros> {
    let mut seen: HashMap<&str, Micros> = HashMap::new();
    for span in history.holds.iter().flat_map(|hold| &hold.spans) {
        if let Some(epoch) = span.epoch.as_deref() {
            let at = seen.entry(epoch).or_insert(span.from);
            *at = span.from.min(*at);
        }
    }
    seen
}

struct Sweep<'a, 'v> {
    key: &'a str,
    faults: Vec<Fault>,
    first_seen: &'a HashMap<&'a str, Micros>,
    active: Vec<Piece<'a>>,
    reported: HashSet<(usize, usize)>,
    verdict: &'v mut Verdict,
}

impl<'a> Sweep<'a, '_> {
    fn meet(&mut self, new: Piece<'a>) {
        let now = new.span.from;
        self.active.retain(|piece| piece.span.until > now && piece.hold != new.hold);
        let (here, elsewhere): (Vec<_>, Vec<_>) =
            self.active.iter().copied().partition(|&piece| self.same_server(piece, new));
        if too_many(&here, new) {
            self.violation(&here, new);
        } else if too_many(&self.active, new) {
            self.double(&elsewhere, new);
        }
        self.active.push(new);
    }

    /// Whether one running server granted both. If an epoch is unknown, a fault during either span means two servers.
    fn same_server(&self, a: Piece, b: Piece) -> bool {
        match (&a.span.epoch, &b.span.epoch) {
            (Some(a), Some(b)) => a == b,
            _ => {
                let from = a.of.grant.sent.min(b.of.grant.sent);
                let until = b.span.from + 1;
                !self.faults.iter().any(|fault| fault.touches(from, until))
            }
        }
    }

    fn violation(&mut self, others: &[Piece<'a>], new: Piece<'a>) {
        for other in others.iter().filter(|other| conflict(**other, new)) {
            if self.reported.insert(pair(other.hold, new.hold)) {
                let until = other.span.until.min(new.span.until);
                self.verdict.violations.push(Violation::TooManyHolders {
                    key: self.key.to_owned(),
                    owners: [other, &new].map(|piece| account(piece.of)),
                    at: new.span.from,
                    lasting: until - new.span.from,
                    epoch: new.span.epoch.clone(),
                });
                return;
            }
        }
    }

    fn double(&mut self, others: &[Piece<'a>], new: Piece<'a>) {
        for other in others.iter().filter(|other| conflict(**other, new)) {
            if self.reported.insert(pair(other.hold, new.hold)) {
                let lost = self.older(*other, new);
                *self.verdict.doubles.entry(lost.span.assurance).or_default() += 1;
                self.verdict.doubled_at.push(new.span.from);
                if lost.span.assurance == Assurance::Replicas {
                    self.verdict
                        .violations
                        .push(Violation::ConfirmedGrantLost { key: self.key.to_owned(), at: new.span.from });
                }
                return;
            }
        }
    }

    /// The span of the server that failed: its epoch began earlier.
    fn older(&self, a: Piece<'a>, b: Piece<'a>) -> Piece<'a> {
        let began = |piece: Piece| match piece.span.epoch.as_deref() {
            Some(epoch) => self.first_seen.get(epoch).copied(),
            None => Some(piece.span.from),
        };
        if began(a) <= began(b) { a } else { b }
    }
}

/// Whether `new` exceeds the smallest limit among itself and `others`.
fn too_many(others: &[Piece], new: Piece) -> bool {
    let mut owners: HashSet<&str> = others.iter().map(owner).collect();
    owners.insert(owner(&new));
    let least = others.iter().chain([&new]).map(|piece| piece.of.grant.limit.most()).min();
    others.iter().any(|other| owner(other) != owner(&new)) && least.is_some_and(|least| owners.len() > least)
}

fn conflict(other: Piece, new: Piece) -> bool {
    owner(&other) != owner(&new)
}

fn owner<'a>(piece: &Piece<'a>) -> &'a str {
    &piece.of.grant.owner
}

/// A hold, as its client recorded it.
fn account(hold: &Hold) -> String {
    let Grant { owner, token, sent, replied, .. } = &hold.grant;
    let until = hold.spans.last().map_or(0, |span| span.until);
    let notified = hold.notified.map_or_else(String::new, |(at, why)| format!(", notified: {why:?} at {at}"));
    let ended = hold.ended.map_or_else(String::new, |at| format!(", released at {at}"));
    format!(
        "{owner} (token {token}, requested at {sent}, granted by {replied}, held until {until} µs{notified}{ended})"
    )
}

fn pair(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

/// Tokens increase in real time: a grant that was requested after another was known has the greater token. None is repeated.
fn check_tokens(history: &History, verdict: &mut Verdict) {
    let mut by_reply: Vec<&Hold> = history.holds.iter().collect();
    by_reply.sort_by_key(|hold| hold.grant.replied);
    let mut by_sent = by_reply.clone();
    by_sent.sort_by_key(|hold| hold.grant.sent);
    let mut known = by_reply.iter().peekable();
    let mut highest = 0;
    for hold in by_sent {
        while let Some(earlier) = known.next_if(|earlier| earlier.grant.replied < hold.grant.sent) {
            highest = highest.max(earlier.grant.token);
        }
        if hold.grant.token <= highest {
            verdict.violations.push(went_back(hold, highest));
        }
    }
    check_order_of_holders(&by_reply, verdict);
    check_repeats(history, verdict);
}

/// Checks that the tokens of each mutex increase from holder to holder on each server. `check_tokens` would not find
/// that for a waiter, which sent its request long before its grant.
fn check_order_of_holders(by_reply: &[&Hold], verdict: &mut Verdict) {
    let mut last: HashMap<(&str, &str), u64> = HashMap::new();
    for hold in by_reply.iter().filter(|hold| hold.grant.limit == Limit::Of(1) && !hold.spans.is_empty()) {
        let Some(epoch) = hold.grant.epoch.as_deref() else {
            continue;
        };
        let before = last.entry((&hold.grant.key, epoch)).or_insert(0);
        if hold.grant.token < *before {
            verdict.violations.push(went_back(hold, *before));
        }
        *before = hold.grant.token.max(*before);
    }
}

fn went_back(hold: &Hold, before: u64) -> Violation {
    Violation::TokenWentBack { key: hold.grant.key.clone(), token: hold.grant.token, before }
}

/// One token may stand for several locks only if one request acquired them together. Two servers of a cluster may return the
/// same token for different locks. So may two primaries for the same lock, in the same microsecond, while one of them has not
/// been demoted yet.
fn check_repeats(history: &History, verdict: &mut Verdict) {
    let mut given: BTreeMap<u64, Vec<&Hold>> = BTreeMap::new();
    for hold in &history.holds {
        given.entry(hold.grant.token).or_default().push(hold);
    }
    for (token, holds) in given {
        let pairs =
            holds.iter().enumerate().flat_map(|(late, second)| holds[..late].iter().map(move |it| (it, second)));
        if let Some((first, second)) = pairs.into_iter().find(|(first, second)| is_repeat(first, second)) {
            verdict
                .violations
                .push(Violation::TokenRepeated { token, given: [describe_grant(first), describe_grant(second)] });
        }
    }
}

fn describe_grant(hold: &Hold) -> String {
    let Grant { key, owner, sent, replied, epoch, .. } = &hold.grant;
    let server = epoch.as_deref().unwrap_or("unknown");
    format!("{key} to {owner} ({server}, requested at {sent} µs, granted by {replied} µs)")
}

fn is_repeat(a: &Hold, b: &Hold) -> bool {
    let together = a.grant.owner == b.grant.owner;
    let known = a.grant.epoch.is_some() && b.grant.epoch.is_some();
    let one_server = known && a.grant.epoch == b.grant.epoch;
    if a.grant.key == b.grant.key {
        let at_once = a.grant.sent <= b.grant.replied && b.grant.sent <= a.grant.replied;
        return !(known && !one_server && at_once);
    }
    one_server && !together
}

/// The accepted writes to one lock's store.
#[derive(Default)]
struct Store {
    token: u64,
    latest_asked: Micros,
    latest_owner: String,
}

/// Replays the writes to a store that accepts tokens which are at least as great as the last one.
fn check_store(history: &History, verdict: &mut Verdict) {
    let mut writes: Vec<_> = history.writes.iter().collect();
    writes.sort_by_key(|write| write.at);
    let mut stores: HashMap<&str, Store> = HashMap::new();
    for write in writes {
        let grant = &history.holds[write.hold].grant;
        let store = stores.entry(&grant.key).or_default();
        if grant.token < store.token {
            verdict.writes_refused += 1;
            continue;
        }
        verdict.writes_taken += 1;
        if grant.replied < store.latest_asked && grant.owner != store.latest_owner {
            verdict.violations.push(Violation::StaleWriteTaken { key: grant.key.clone(), at: write.at });
        }
        store.token = grant.token;
        if grant.sent >= store.latest_asked {
            store.latest_asked = grant.sent;
            store.latest_owner.clone_from(&grant.owner);
        }
    }
}

fn check_waits(history: &History, verdict: &mut Verdict) {
    for request in &history.requests {
        match request.ended {
            None => verdict.violations.push(Violation::NeverEnded { sent: request.sent }),
            Some(ended) if is_lost(request, ended, history) => {
                let due = request.sent + request.allowed;
                verdict.violations.push(Violation::LostWaiter { sent: request.sent, ended, due });
            }
            Some(_) => {}
        }
    }
}

fn is_lost(request: &Request, ended: Micros, history: &History) -> bool {
    let late = request.outcome == Outcome::Unanswered || ended > request.sent + request.allowed + PATIENCE;
    late && !history.all_faults().any(|fault| fault.touches(request.sent, ended))
}

fn check_probes(history: &History, verdict: &mut Verdict) {
    for probe in &history.probes {
        if probe.had.is_none_or(|had| had > probe.due) {
            verdict.violations.push(Violation::NotHadAgain { key: probe.key.clone() });
        }
    }
}

#[cfg(test)]
#[path = "checker/losses_tests.rs"]
mod losses_tests;
#[cfg(test)]
#[path = "checker_tests.rs"]
mod tests;
