//! Judges a [`History`]: which promises were broken, and what was seen at failovers that is no broken promise.
//!
//! Pure: no clock, no server. What it relies on are the clients' own records, so a hold counts from the moment its
//! client knew of it to the moment it began to release it, or to the end of the lease if it never did.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use crate::history::{Assurance, Epoch, Fault, Grant, History, Hold, Limit, Micros, Outcome, Request, Span};

mod losses;

/// How much later than allowed an answer may come on a busy machine before it counts as lost.
pub const PATIENCE: Micros = 2_000_000;

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// One living server let more hold than the limit allows.
    TooManyHolders {
        /// The lock.
        key: String,
        /// One who held already, and the one who came beside, each with what became of its hold.
        owners: [String; 2],
        /// Since when.
        at: Micros,
        /// For how long at least.
        lasting: Micros,
        /// The server's epoch, if it is known.
        epoch: Epoch,
    },
    /// A failover lost a grant that `REPLICAS` had confirmed.
    ConfirmedGrantLost {
        /// The lock.
        key: String,
        /// When two held it.
        at: Micros,
    },
    /// A later grant has a token that is not above that of an earlier one.
    TokenWentBack {
        /// The lock that was granted later.
        key: String,
        /// Its token.
        token: u64,
        /// The token given before.
        before: u64,
    },
    /// Two grants have the same token.
    TokenRepeated {
        /// The token.
        token: u64,
        /// To whom: the lock, its holder and the server, of the one and of the other.
        given: [String; 2],
    },
    /// The fenced store took a write of an earlier holder after one of a later holder.
    StaleWriteTaken {
        /// The lock.
        key: String,
        /// When.
        at: Micros,
    },
    /// A request got no answer in time although no fault was on.
    LostWaiter {
        /// When it was sent.
        sent: Micros,
        /// When the answer came, or the client gave up.
        ended: Micros,
        /// By when the answer was due.
        due: Micros,
    },
    /// A request never came to an end.
    NeverEnded {
        /// When it was sent.
        sent: Micros,
    },
    /// A bound hold was broken or ran out, and its client, whose session lived, was not told in time.
    LossNotTold {
        /// The lock.
        key: String,
        /// Who held it.
        owner: String,
        /// When it was lost.
        at: Micros,
        /// When its client was told, if it was.
        told: Option<Micros>,
    },
    /// A client was told that its lock had been broken, and nobody had broken it.
    ToldOfNothing {
        /// The lock.
        key: String,
        /// Who holds it.
        owner: String,
        /// When.
        at: Micros,
    },
    /// A client wrote under a hold of which it had been told that it is lost.
    WroteAfterTold {
        /// The lock.
        key: String,
        /// Who wrote.
        owner: String,
        /// When it had been told.
        told: Micros,
        /// When it wrote.
        at: Micros,
    },
    /// A lock whose holder vanished could not be had again in time.
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
                write!(f, "{key} got token {token} after {before} had been given")
            }
            Violation::TokenRepeated { token, given: [first, second] } => {
                write!(f, "token {token} was given twice: {first}, and {second}")
            }
            Violation::StaleWriteTaken { key, at } => {
                write!(f, "the store of {key} took a stale write at {at} µs")
            }
            Violation::LostWaiter { sent, ended, due } => {
                write!(f, "a request sent at {sent} µs, due at {due} µs, had no answer or a late one at {ended} µs")
            }
            Violation::NeverEnded { sent } => {
                write!(f, "a request sent at {sent} µs never came to an end")
            }
            Violation::LossNotTold { key, owner, at, told: Some(told) } => {
                write!(f, "{owner} lost {key} at {at} µs, and was told as late as {told} µs")
            }
            Violation::LossNotTold { key, owner, at, told: None } => {
                write!(f, "{owner} lost {key} at {at} µs, and was never told")
            }
            Violation::ToldOfNothing { key, owner, at } => {
                write!(f, "{owner} was told at {at} µs that {key} had been broken, and nobody had")
            }
            Violation::WroteAfterTold { key, owner, told, at } => {
                write!(f, "{owner} wrote under {key} at {at} µs, told at {told} µs that it was lost")
            }
            Violation::NotHadAgain { key } => {
                write!(f, "{key} could not be had again after healing")
            }
        }
    }
}

/// What the checker found.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Broken promises.
    pub violations: Vec<Violation>,
    /// Grants, by how sure they were.
    pub grants: BTreeMap<Assurance, u64>,
    /// Double holds over a failover, by how sure the hold was that the failover lost.
    pub doubles: BTreeMap<Assurance, u64>,
    /// When each of these began.
    pub doubled_at: Vec<Micros>,
    /// Late writes that the fenced store refused.
    pub writes_refused: u64,
    /// Writes that it took.
    pub writes_taken: u64,
    /// Holds that were bound to a session.
    pub bound: u64,
    /// Losses of which their clients were told.
    pub told: u64,
    /// Of these, those of a lock that somebody had broken: the longest time from the break until its client knew.
    pub told_within: Option<Micros>,
}

impl Verdict {
    /// How many double holds over a failover had that assurance.
    pub fn doubles(&self, assurance: Assurance) -> u64 {
        self.doubles.get(&assurance).copied().unwrap_or(0)
    }

    /// How many grants had that assurance.
    pub fn grants(&self, assurance: Assurance) -> u64 {
        self.grants.get(&assurance).copied().unwrap_or(0)
    }
}

/// Judges a history.
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

/// A span of a hold, as the sweep over time meets it.
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
            told: HashSet::new(),
            verdict,
        };
        for piece in pieces {
            sweep.meet(piece);
        }
    }
}

/// When each epoch first granted something: the order in which they began.
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
    told: HashSet<(usize, usize)>,
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

    /// Whether both were granted by one living server. Where the epochs are unknown, a fault during either makes it two.
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
            if self.told.insert(pair(other.hold, new.hold)) {
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
            if self.told.insert(pair(other.hold, new.hold)) {
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

    /// The one of the server that went: its epoch began earlier.
    fn older(&self, a: Piece<'a>, b: Piece<'a>) -> Piece<'a> {
        let began = |piece: Piece| match piece.span.epoch.as_deref() {
            Some(epoch) => self.first_seen.get(epoch).copied(),
            None => Some(piece.span.from),
        };
        if began(a) <= began(b) { a } else { b }
    }
}

/// Whether `new` beside `others` is more than the smallest limit among those that it exceeds allows.
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

/// A hold as its client knew it.
fn account(hold: &Hold) -> String {
    let Grant { owner, token, sent, replied, .. } = &hold.grant;
    let until = hold.spans.last().map_or(0, |span| span.until);
    let told = hold.told.map_or_else(String::new, |(at, why)| format!(", told {why:?} at {at}"));
    let ended = hold.ended.map_or_else(String::new, |at| format!(", released at {at}"));
    format!("{owner} (token {token}, asked at {sent}, granted by {replied}, held until {until} µs{told}{ended})")
}

fn pair(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

/// Tokens grow in real time (a grant that was asked for after another was known has the higher one), and none comes twice.
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
    check_turns(&by_reply, verdict);
    check_repeats(history, verdict);
}

/// Who waited in a queue asked early, so for mutexes the turns count: each holder on a server has a higher token than the last.
fn check_turns(by_reply: &[&Hold], verdict: &mut Verdict) {
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

/// One token may stand for several locks only if one request took them together. Two servers of a cluster may give the
/// same one, but not on the same lock; and two masters at once, of which one is not told yet that it is none, on the same
/// lock too, if they grant in the same microsecond.
fn check_repeats(history: &History, verdict: &mut Verdict) {
    let mut given: BTreeMap<u64, Vec<&Hold>> = BTreeMap::new();
    for hold in &history.holds {
        given.entry(hold.grant.token).or_default().push(hold);
    }
    for (token, holds) in given {
        let pairs =
            holds.iter().enumerate().flat_map(|(late, second)| holds[..late].iter().map(move |it| (it, second)));
        if let Some((first, second)) = pairs.into_iter().find(|(first, second)| is_repeat(first, second)) {
            verdict.violations.push(Violation::TokenRepeated { token, given: [told(first), told(second)] });
        }
    }
}

fn told(hold: &Hold) -> String {
    let Grant { key, owner, sent, replied, epoch, .. } = &hold.grant;
    let server = epoch.as_deref().unwrap_or("unknown");
    format!("{key} to {owner} ({server}, asked at {sent} µs, granted by {replied} µs)")
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

/// What a store of one lock has taken so far.
#[derive(Default)]
struct Store {
    token: u64,
    latest_asked: Micros,
    latest_owner: String,
}

/// Plays the writes to a store that takes a token only if it is at least as high as the last one.
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
