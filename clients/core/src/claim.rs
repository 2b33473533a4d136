//! What is asked for or held: one acquisition, from the call to its end.

use crate::terms::{Bytes, Id, Limit, Millis, Terms, Wait, Words};

/// One acquisition.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// Why the server refused last to release it.
    pub(crate) refusal: Option<String>,
    /// Its keys are released one by one, since one of them holds something else: those that are left.
    pub(crate) is_split: bool,
    /// The last thing that was said of it is that another server has it.
    pub(crate) has_moved: bool,
    /// It is on its way to the server that is asked: the next request says that this is known.
    pub(crate) asking: bool,
    /// Nothing is sent before.
    pub(crate) not_before: Millis,
    /// When it must have been given back, or the session ends.
    pub(crate) bound: Option<Millis>,
    /// What the program has asked of the hold.
    pub(crate) renewal: Option<Renewal>,
    pub(crate) checks: Vec<Id>,
    pub(crate) release: Option<Id>,
    /// Somebody else waits for it, and how often in a row it was used since that is known.
    pub(crate) called: bool,
    pub(crate) uses: u32,
    /// Nobody uses it, and until then it is kept at hand.
    pub(crate) idle: Option<Millis>,
}

/// How far it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// To be asked for in this session.
    New,
    /// Asked for in this session.
    Asked,
    /// Some of several keys are left from another session: they are given back, then it is asked for again.
    Clearing,
    Held(Hold),
    /// The server did not have it when it was given back. Why, is told on the other connection.
    Gone,
}

/// A hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) token: u64,
    pub(crate) lease: Millis,
    /// It lasts so long for certain, signs of life aside.
    pub(crate) until: Millis,
    /// How many `LOCK.EVENTS` had been sent when its terms became known: signs of life speak of it from the next one on.
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
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// All of it, what waits included.
    Release,
}

/// What goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    Hold,
    Unwanted,
    AskedBefore,
    New,
}

/// What a call is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum About {
    Acquire,
    Release,
    /// Of a hold, which knows of the call.
    Renew,
    Check(Id),
    /// These words; nothing is sent before. `again`: once more, if its session ends before it is answered.
    Request {
        words: Vec<Bytes>,
        not_before: Millis,
        again: bool,
    },
    Close,
}

/// A call that somebody waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) about: About,
    pub(crate) bound: Option<Millis>,
}

/// An acquisition or a hold on its way from one core to another, with the calls that wait for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Its number, which it keeps.
    pub id: Id,
    pub(crate) claim: Claim,
    pub(crate) calls: Vec<(Id, Call)>,
}

impl Moved {
    /// The key that says which server has it.
    pub fn key(&self) -> &[u8] {
        self.claim.keys.first().map_or(&[], |key| key)
    }

    /// The calls that go with it.
    pub fn calls(&self) -> impl Iterator<Item = Id> {
        self.calls.iter().map(|(call, _)| *call)
    }
}

impl Claim {
    pub(crate) fn hold(&self) -> Option<&Hold> {
        match &self.stage {
            Stage::Held(hold) => Some(hold),
            _ => None,
        }
    }

    /// Its session has ended, or its server has it no more: of what was sent nothing comes any more.
    pub(crate) fn set_adrift(&mut self, until: Millis) {
        (self.sent, self.not_before) = (None, 0);
        match &mut self.stage {
            Stage::Asked => (self.stage, self.asked_before) = (Stage::New, true),
            Stage::Held(hold) => (hold.until, hold.tied, hold.confirming) = (until, false, false),
            Stage::New | Stage::Clearing | Stage::Gone => {}
        }
        if let Some(renewal) = &mut self.renewal {
            renewal.is_sent = false;
        }
    }

    pub(crate) fn hold_mut(&mut self) -> Option<&mut Hold> {
        match &mut self.stage {
            Stage::Held(hold) => Some(hold),
            _ => None,
        }
    }

    /// The request that is to be sent next. `until`: how long its hold is certain.
    pub(crate) fn next(&self, until: Millis, now: Millis) -> Option<Kind> {
        if self.sent.is_some() || now < self.not_before {
            return None;
        }
        if !self.wanted {
            return if matches!(self.stage, Stage::Gone) { None } else { Some(Kind::Release) };
        }
        match &self.stage {
            Stage::New => Some(Kind::Acquire),
            Stage::Asked | Stage::Gone => None,
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
            Kind::Release if self.is_split => Words::of("RELEASE", &self.keys[..1], &self.owner),
            Kind::Release => Words::of("RELEASE", &self.keys, &self.owner),
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
            _ => drop(words.word("ALL")),
        }
        words.0
    }
}
