//! The specification of a lock: a fenced, re-entrant lock with owners, of which `limit` may hold it at once. A mutex, a
//! semaphore and a read-write lock differ only in the limit.
//!
//! The queue is not part of it: the order of waiters is not a question of linearizability, and other checks cover it.
//! So a refusal is wrong only if the request would have been granted, and no other request can have been ahead of it
//! ([`Step::may_be_refused`]).
//!
//! Time is part of it as far as leases need it: the end of a lease is an operation of the server, possible once the
//! lease can be over.

use std::collections::BTreeMap;

use stateright::semantics::SequentialSpec;

use crate::history::{Acquire, Outcome, Request, Time};

/// A lock; [`Lock::default`] before its first use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Lock {
    /// The smallest limit that any holder has named since the lock was last free; the greatest number means no limit.
    pub limit: u64,
    /// The greatest token so far.
    pub newest: u64,
    /// The current holders.
    pub holders: BTreeMap<String, Hold>,
    /// The current time is no earlier than this.
    pub clock: Time,
}

/// An owner's hold.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hold {
    /// The hold count.
    pub holds: u64,
    /// Its token; none: no client has received it.
    pub token: Option<u64>,
    /// Its lease ends no earlier than this; none: it does not end by itself.
    pub lasts: Option<Time>,
    /// It will be revoked, because too few replicas confirm it.
    pub unconfirmed: bool,
}

/// A request, and when it can have taken effect.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Step {
    /// The request.
    pub request: Request,
    /// The earliest time.
    pub from: Time,
    /// The latest time.
    pub to: Time,
    /// The outcome that the client received.
    pub outcome: Outcome,
    /// Nil is a valid reply to an acquisition in any state of the lock, because other requests may have waited ahead of
    /// it.
    pub may_be_refused: bool,
}

/// Stands for any token greater than all before: the server chooses.
const NEW: Outcome = Outcome::Token(0);
/// Stands for any token: that of a hold whose grant no client received.
const ANY: Outcome = Outcome::Token(u64::MAX);

impl SequentialSpec for Lock {
    type Op = Step;
    type Ret = Outcome;

    /// The reply of the server, and the lock after it.
    fn invoke(&mut self, step: &Step) -> Outcome {
        self.clock = self.clock.max(step.from);
        let until = |lease: &Option<Time>| lease.map(|lease| step.from.saturating_add(lease));
        match &step.request {
            Request::Acquire(ask) if self.admits(ask) => self.grant(ask, until(&ask.lease), step.outcome),
            Request::Acquire(_) => Outcome::Null,
            Request::Release { owner, token, holds, lease } => self.change(owner, *token, |hold| {
                hold.holds = holds.unwrap_or(hold.holds - 1).min(hold.holds);
                hold.lasts = if lease.is_some() { until(lease) } else { hold.lasts };
                Outcome::Left(hold.holds.min(1))
            }),
            Request::Renew { owner, token, lease, fence } => self.change(owner, *token, |hold| {
                hold.lasts = until(lease);
                hold.token = hold.token.map(|token| token.max(fence.unwrap_or(0)));
                hold.token.map_or(ANY, Outcome::Token)
            }),
            Request::Check { owner } => {
                if self.holders.contains_key(owner) {
                    Outcome::Done
                } else {
                    Outcome::Null
                }
            }
            Request::Force => Outcome::Count(std::mem::take(&mut self.holders).len() as u64),
            Request::Expire { owner, token } => {
                let over = self.holders.get(owner).and_then(|hold| hold.lasts).unwrap_or(0);
                self.clock = self.clock.max(over);
                self.change(owner, *token, |hold| hold.end(hold.holds))
            }
            Request::End { owner } => self.change(owner, None, |hold| hold.end(hold.holds)),
            Request::Revoke { owner, added } => {
                self.change(owner, None, |hold| hold.end(if hold.unconfirmed { hold.holds } else { *added }))
            }
        }
    }

    /// Whether the server may reply like this, and the lock after it.
    fn is_valid_step(&mut self, step: &Step, outcome: &Outcome) -> bool {
        if *outcome == Outcome::Null {
            self.clock = self.clock.max(step.from);
            return self.clock <= step.to && self.may_answer_null(step);
        }
        let answer = self.invoke(step);
        let right = match (answer, *outcome) {
            (NEW, Outcome::Token(token)) => token > self.newest,
            (ANY, Outcome::Token(_)) => true,
            (Outcome::Null, Outcome::Done) => matches!(step.request, Request::End { .. } | Request::Revoke { .. }),
            (Outcome::Null, Outcome::Left(0)) => step.request.withdraws(),
            (Outcome::Null, Outcome::Unconfirmed) => false,
            (_, Outcome::Done | Outcome::Unconfirmed) => true,
            (answer, outcome) => answer == outcome,
        };
        if let Outcome::Token(token) = *outcome {
            self.set_token(&step.request, token);
        }
        right && self.clock <= step.to
    }
}

impl Lock {
    /// The admission rule, without the queue.
    fn admits(&self, ask: &Acquire) -> bool {
        let (named, holders) = (most(ask.limit), self.holders.len() as u64);
        let is_repetition = |hold: &Hold| ask.holds.is_some_and(|asked| hold.holds >= asked) && self.limit <= named;
        match self.holders.get(&ask.owner) {
            Some(hold) => !ask.new && (named == self.limit || is_repetition(hold)),
            None => holders == 0 || holders < named.min(self.limit),
        }
    }

    /// Whether nil is a valid reply; then nothing changes.
    pub fn may_answer_null(&self, step: &Step) -> bool {
        match &step.request {
            Request::Acquire(ask) => step.may_be_refused || !self.admits(ask),
            Request::Release { owner, token, .. } | Request::Renew { owner, token, .. } => {
                self.holders.get(owner).is_none_or(|hold| token.is_some() && *token != hold.token)
            }
            _ => false,
        }
    }

    fn grant(&mut self, ask: &Acquire, until: Option<Time>, outcome: Outcome) -> Outcome {
        if let Some(hold) = self.holders.get_mut(&ask.owner) {
            hold.holds = ask.holds.map_or(hold.holds + 1, |holds| holds.max(hold.holds));
            hold.lasts = hold.lasts.zip(until).map(|(before, now)| before.max(now));
            return hold.token.map_or(ANY, Outcome::Token);
        }
        self.limit = if self.holders.is_empty() { most(ask.limit) } else { self.limit.min(most(ask.limit)) };
        let unconfirmed = outcome == Outcome::Unconfirmed;
        let hold = Hold { holds: ask.holds.unwrap_or(1), token: None, lasts: until, unconfirmed };
        self.holders.insert(ask.owner.clone(), hold);
        NEW
    }

    /// Changes an owner's hold, if it has one and the token matches. A hold with count 0 is removed.
    fn change(&mut self, owner: &str, token: Option<u64>, change: impl FnOnce(&mut Hold) -> Outcome) -> Outcome {
        let Some(hold) = self.holders.get_mut(owner) else { return Outcome::Null };
        if token.is_some() && hold.token.is_some() && token != hold.token {
            return Outcome::Null;
        }
        let answer = change(hold);
        if hold.holds == 0 {
            self.holders.remove(owner);
        }
        answer
    }

    fn set_token(&mut self, request: &Request, token: u64) {
        self.newest = self.newest.max(token);
        if let Request::Acquire(Acquire { owner, .. }) | Request::Renew { owner, .. } = request
            && let Some(hold) = self.holders.get_mut(owner)
        {
            hold.token = Some(token);
            hold.unconfirmed = false;
        }
    }
}

impl Hold {
    fn end(&mut self, holds: u64) -> Outcome {
        self.holds = self.holds.saturating_sub(holds);
        Outcome::Done
    }
}

fn most(limit: u64) -> u64 {
    if limit == 0 { u64::MAX } else { limit }
}
