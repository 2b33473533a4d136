//! Requests and holds: one acquisition, from the call to its end.

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
    /// Whether the program still wants it. Once unwanted, it stays so.
    pub(crate) wanted: bool,
    pub(crate) stage: Stage,
    /// The pending request.
    pub(crate) sent: Option<Kind>,
    /// The pair over which a request of it was sent last: only that session can wait for it or renew it.
    pub(crate) pair: Option<u64>,
    /// It was requested in a session that has ended, so it may be held.
    pub(crate) asked_before: bool,
    /// A release that was sent while the hold was certain got no reply, so the next one may find nothing.
    pub(crate) maybe_released: bool,
    /// The last refusal of its release, or of a request that is sent again.
    pub(crate) refusal: Option<String>,
    /// Its keys are released one by one, since one of them holds another type: those that are left.
    pub(crate) is_split: bool,
    /// The last reply was that another server serves it.
    pub(crate) has_moved: bool,
    /// It is being redirected: the next request says so (`ASKING`).
    pub(crate) asking: bool,
    /// Nothing is sent before.
    pub(crate) not_before: Millis,
    /// It must be released by then, or the session ends.
    pub(crate) bound: Option<Millis>,
    /// The program's requests about the hold.
    pub(crate) renewal: Option<Renewal>,
    pub(crate) checks: Vec<Id>,
    pub(crate) release: Option<Id>,
    /// The token of a late grant that is gone: the event of its loss may come when the lock is requested again.
    pub(crate) past: Option<u64>,
    /// Another client waits for it, and how often in a row it was used since that is known.
    pub(crate) called: bool,
    pub(crate) uses: u32,
    /// It is unused, and cached until then.
    pub(crate) idle: Option<Millis>,
}

/// The state of an acquisition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// To be requested in this session.
    New,
    /// Requested in this session.
    Asked,
    Held(Hold),
    /// The server did not have it when it was released. The reason arrives on the other connection.
    Gone,
}

/// A hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) token: u64,
    pub(crate) lease: Millis,
    /// Until when it is certain, heartbeats aside.
    pub(crate) until: Millis,
    /// How many `LOCK.EVENTS` had been sent when its options became known: heartbeats cover it from the next one on.
    pub(crate) known: u64,
    /// Bound to the present session.
    pub(crate) bound: bool,
    /// A renewal waits for its replicas.
    pub(crate) confirming: bool,
    /// Of a renewal of several keys, an event comes for each: how many are missing, and how long the others last.
    pub(crate) left: usize,
    pub(crate) lasts: Millis,
}

/// A renewal that the program has requested, or one that decides whether a late grant counts: then the call is that of the acquisition.
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
    /// All of it, waiting requests included; whether the hold was certain then.
    Release(bool),
}

/// The priority of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    Hold,
    Unwanted,
    AskedBefore,
    New,
}

/// The subject of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum About {
    Acquire,
    Release,
    /// Of a hold, which knows of the call.
    Renew,
    Check(Id),
    /// These words; nothing is sent before. `again`: once more, if its session ends before the reply.
    Request {
        words: Vec<Bytes>,
        not_before: Millis,
        again: bool,
    },
    Close,
}

/// A call whose caller waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) about: About,
    pub(crate) bound: Option<Millis>,
}

/// An acquisition or a hold on its way from one core to another, with its calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Its number, which it keeps.
    pub id: Id,
    pub(crate) claim: Claim,
    pub(crate) calls: Vec<(Id, Call)>,
}

impl Moved {
    /// The key that says which server serves it.
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

    /// Its session has ended, or its server does not serve it any more: no earlier request takes effect.
    pub(crate) fn set_adrift(&mut self, until: Millis) {
        self.maybe_released |= self.sent == Some(Kind::Release(true));
        (self.sent, self.not_before) = (None, 0);
        match &mut self.stage {
            Stage::Asked => (self.stage, self.asked_before) = (Stage::New, true),
            Stage::Held(hold) => (hold.until, hold.bound, hold.confirming) = (until, false, false),
            Stage::New | Stage::Gone => {}
        }
        if let Some(renewal) = &mut self.renewal {
            renewal.is_sent = false;
        }
    }

    /// Whether this acquisition, with this number, was granted so late that a renewal decides if it counts.
    pub(crate) fn is_late(&self, id: Id) -> bool {
        self.renewal.as_ref().is_some_and(|renewal| renewal.call == id)
    }

    pub(crate) fn hold_mut(&mut self) -> Option<&mut Hold> {
        match &mut self.stage {
            Stage::Held(hold) => Some(hold),
            _ => None,
        }
    }

    /// The next request to send. `until`: how long its hold is certain.
    pub(crate) fn next(&self, until: Millis, now: Millis) -> Option<Kind> {
        if self.sent.is_some() || now < self.not_before {
            return None;
        }
        if !self.wanted {
            return if matches!(self.stage, Stage::Gone) { None } else { Some(Kind::Release(until > now)) };
        }
        match &self.stage {
            // `WAIT 0` has no limit: the call ends without a further request.
            Stage::New => self.left(now).is_none_or(|left| left > 0).then_some(Kind::Acquire),
            Stage::Asked | Stage::Gone => None,
            Stage::Held(hold) => {
                // Taken over, because the program says so, or because it is uncertain.
                let may_live = self.terms.watchdog || until > now;
                let is_due = self.renewal.is_some() || (may_live && (!hold.bound || until <= now));
                (is_due && !hold.confirming).then(|| Kind::Renew(self.next_lease(hold, until, now)))
            }
        }
    }

    /// What is left of its wait, if that has a limit.
    fn left(&self, now: Millis) -> Option<Millis> {
        match self.wait {
            Wait::For(time) => Some(self.since.saturating_add(time).saturating_sub(now)),
            Wait::No | Wait::Forever => None,
        }
    }

    /// A lease that the server does not renew is never made longer by taking it over.
    fn next_lease(&self, hold: &Hold, until: Millis, now: Millis) -> Millis {
        match &self.renewal {
            Some(renewal) => renewal.lease.unwrap_or(hold.lease),
            None if self.terms.watchdog => hold.lease,
            None => until.saturating_sub(now).max(1),
        }
    }

    /// Its place among those that have something to send: the least lease first, then by arrival.
    pub(crate) fn rank(&self, until: Millis) -> (Rank, Millis) {
        match self.stage {
            _ if !self.wanted => (Rank::Unwanted, 0),
            Stage::Held(_) => (Rank::Hold, until),
            _ if self.asked_before => (Rank::AskedBefore, self.since),
            _ => (Rank::New, 0),
        }
    }

    /// The words of the request.
    pub(crate) fn words(&self, kind: Kind, lease: Millis, session: &[u8], now: Millis) -> Vec<Bytes> {
        let mut words = match kind {
            Kind::Acquire => Words::of("ACQUIRE", &self.keys, &self.owner),
            Kind::Renew(_) => Words::of("RENEW", &self.keys, &self.owner),
            Kind::Release(_) if self.is_split => Words::of("RELEASE", &self.keys[..1], &self.owner),
            Kind::Release(_) => Words::of("RELEASE", &self.keys, &self.owner),
        };
        match (kind, &self.stage) {
            (Kind::Acquire, _) => {
                if self.wait != Wait::No {
                    words.option("WAIT", self.left(now).unwrap_or(0));
                    let waited = now.saturating_sub(self.since);
                    if self.pair.is_some() && waited > 0 {
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
