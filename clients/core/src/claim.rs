//! What is asked for or held: one acquisition, from the call to its end.

use crate::terms::Words;
use crate::{Bytes, Id, Limit, Millis, Terms, Wait};

/// One acquisition.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) owner: Bytes,
    pub(crate) keys: Vec<Bytes>,
    pub(crate) terms: Terms,
    pub(crate) wait: Wait,
    /// When the program asked.
    pub(crate) since: Millis,
    /// Whether anybody wants it still. Nothing makes it wanted again.
    pub(crate) wanted: bool,
    pub(crate) stage: Stage,
    /// The request that is on its way; its reply has not come.
    pub(crate) sent: Option<Kind>,
    /// The pair over which anything of it was sent last: only that session can wait for it or keep it alive.
    pub(crate) pair: Option<u64>,
    /// It was asked for in a session that has ended, so it may be held.
    pub(crate) asked_before: bool,
    /// The server refused to give it back.
    pub(crate) is_refused: bool,
    /// Nothing is sent before.
    pub(crate) not_before: Millis,
    /// When it must have been given back, or the session ends.
    pub(crate) bound: Option<Millis>,
    /// What the program has asked of the hold.
    pub(crate) renewal: Option<Renewal>,
    pub(crate) checks: Vec<Id>,
    pub(crate) release: Option<Id>,
}

/// How far it is.
#[derive(Debug)]
pub(crate) enum Stage {
    /// To be asked for in this session.
    New,
    /// Asked for in this session.
    Asked,
    /// Some of several keys are left from another session: they are given back, then it is asked for again.
    Clearing,
    Held(Hold),
}

/// A hold.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) token: u64,
    pub(crate) lease: Millis,
    /// It lasts so long for certain, signs of life aside.
    pub(crate) until: Millis,
    /// How many `LOCK.NEXT` had been sent when its terms became known: signs of life speak of it from the next one on.
    pub(crate) known: u64,
    /// Tied to the session that stands.
    pub(crate) tied: bool,
    /// A renewal waits for its replicas.
    pub(crate) confirming: bool,
    /// Of a renewal of several keys each is told of: how many are not yet, and how long the others last.
    pub(crate) left: usize,
    pub(crate) lasts: Millis,
}

/// A renewal that the program has asked for.
#[derive(Debug)]
pub(crate) struct Renewal {
    pub(crate) call: Id,
    pub(crate) lease: Option<Millis>,
    pub(crate) fence: Option<u64>,
    pub(crate) is_sent: bool,
}

/// What is sent for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Acquire,
    /// With this lease.
    Renew(Millis),
    Release,
    Cancel,
}

/// What goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    Hold,
    Unwanted,
    AskedBefore,
    New,
}

impl Claim {
    pub(crate) fn hold(&self) -> Option<&Hold> {
        match &self.stage {
            Stage::Held(hold) => Some(hold),
            _ => None,
        }
    }

    pub(crate) fn hold_mut(&mut self) -> Option<&mut Hold> {
        match &mut self.stage {
            Stage::Held(hold) => Some(hold),
            _ => None,
        }
    }

    /// The request that is to be sent next over this pair. `until`: how long its hold is certain.
    pub(crate) fn next(&self, pair: u64, until: Millis, now: Millis) -> Option<Kind> {
        if self.sent.is_some() || now < self.not_before {
            return None;
        }
        if !self.wanted {
            let is_here = self.pair == Some(pair);
            // A wait can only be cancelled, and so can what the server does not let go now.
            let cancel = is_here && (self.is_refused || matches!(self.stage, Stage::Asked));
            return Some(if cancel { Kind::Cancel } else { Kind::Release });
        }
        match &self.stage {
            Stage::New => Some(Kind::Acquire),
            Stage::Asked => None,
            Stage::Clearing => Some(Kind::Release),
            Stage::Held(hold) => {
                // Taken along, because the program says so, or because it is in doubt.
                let may_live = self.terms.watchdog || until > now;
                let is_due = self.renewal.is_some() || (may_live && (!hold.tied || until <= now));
                (is_due && !hold.confirming).then(|| Kind::Renew(self.next_lease(hold, until, now)))
            }
        }
    }

    /// A lease that nobody renews is never made longer by taking it along.
    fn next_lease(&self, hold: &Hold, until: Millis, now: Millis) -> Millis {
        match &self.renewal {
            Some(renewal) => renewal.lease.unwrap_or(hold.lease),
            None if self.terms.watchdog => hold.lease,
            None => until.saturating_sub(now).max(1),
        }
    }

    /// Where it stands among those that have something to send: the least lease first, then by arrival.
    pub(crate) fn rank(&self, until: Millis) -> (Rank, Millis) {
        match self.stage {
            _ if !self.wanted => (Rank::Unwanted, 0),
            Stage::Held(_) => (Rank::Hold, until),
            _ if self.asked_before => (Rank::AskedBefore, self.since),
            _ => (Rank::New, 0),
        }
    }

    /// The request in words.
    pub(crate) fn words(&self, kind: Kind, lease: Millis, session: &[u8], now: Millis) -> Vec<Bytes> {
        let mut words = match kind {
            Kind::Acquire => Words::of("ACQUIRE", &self.keys, &self.owner),
            Kind::Renew(_) => Words::of("RENEW", &self.keys, &self.owner),
            Kind::Release => Words::of("RELEASE", &self.keys, &self.owner),
            Kind::Cancel => Words::of("CANCEL", &self.keys[..1], &self.owner),
        };
        match (kind, &self.stage) {
            (Kind::Acquire, _) => {
                // A time that is over is no wait at all: `WAIT 0` is for ever.
                let left = match self.wait {
                    Wait::No => None,
                    Wait::For(time) => {
                        Some(self.since.saturating_add(time).saturating_sub(now)).filter(|left| *left > 0)
                    }
                    Wait::Forever => Some(0),
                };
                if let Some(left) = left {
                    words.option("WAIT", left);
                    let waited = now.saturating_sub(self.since);
                    if self.asked_before && waited > 0 {
                        words.option("WAITED", waited);
                    }
                }
                match self.terms.limit {
                    Limit::One => {}
                    Limit::Of(limit) => drop(words.option("LIMIT", limit.into())),
                    Limit::Shared => drop(words.word("SHARED")),
                }
                words.option("HOLDS", 1);
                words.terms(&self.terms, lease, session);
            }
            (Kind::Renew(lease), Stage::Held(hold)) => {
                words.option("TOKEN", hold.token);
                words.terms(&self.terms, lease, session);
                if let Some(fence) = self.renewal.as_ref().and_then(|renewal| renewal.fence) {
                    words.option("FENCE", fence);
                }
            }
            (Kind::Release, _) => drop(words.word("ALL")),
            _ => words.word("SESSION").0.push(session.to_vec()),
        }
        words.0
    }
}
