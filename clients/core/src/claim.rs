//! Requests and holds: one acquisition, from the call to its end.

use crate::terms::{Bytes, Id, Limit, Millis, Terms, Wait, Words};

/// An acquisition, from the call to the end of its hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) owner: Bytes,
    pub(crate) keys: Vec<Bytes>,
    pub(crate) terms: Terms,
    pub(crate) wait: Wait,
    /// When the program requested it.
    pub(crate) since: Millis,
    /// Whether the program still wants it. An unwanted claim never becomes wanted again.
    pub(crate) wanted: bool,
    pub(crate) stage: Stage,
    /// The pending request.
    pub(crate) sent: Option<Kind>,
    /// The pair of connections that carried its last acquire or renew request: only that session can queue or renew it.
    /// 0: it was requested by the core of another server.
    pub(crate) pair: Option<u64>,
    /// It was requested before, in an earlier session or at another server, so the server may hold it.
    pub(crate) asked_before: bool,
    /// A release that was sent while the hold was certain got no reply, so the next one may find nothing.
    pub(crate) maybe_released: bool,
    /// The last error reply to its release, or to a request that is sent again.
    pub(crate) refusal: Option<String>,
    /// Its keys are released one by one, because one of them holds another type. `keys` has those that are left.
    pub(crate) is_split: bool,
    /// The last reply redirected it to another server.
    pub(crate) has_moved: bool,
    /// It follows an `ASK` redirection: `ASKING` precedes its next request.
    pub(crate) asking: bool,
    /// No request is sent before this time.
    pub(crate) not_before: Millis,
    /// The deadline of its release. Afterwards the core ends the session that renews the hold.
    pub(crate) bound: Option<Millis>,
    /// The program's calls about the hold.
    pub(crate) renewal: Option<Renewal>,
    pub(crate) checks: Vec<Id>,
    pub(crate) release: Option<Id>,
    /// The token of a late grant that was lost. The event of that loss may arrive after the lock was requested again.
    pub(crate) past: Option<u64>,
    /// Another client waits for the lock, and how many uses in a row have begun since the core knows.
    pub(crate) contended: bool,
    pub(crate) uses: u32,
    /// The hold is unused, and cached until this time.
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
    /// The release found no hold. The reason of the loss is still to arrive on the session's connection.
    Gone,
}

/// A hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) token: u64,
    pub(crate) lease: Millis,
    /// Until when it is certain, without heartbeats.
    pub(crate) until: Millis,
    /// How many `LOCK.EVENTS` had been sent when its grant or renewal was reported: the replies to later ones cover it.
    /// `u64::MAX`: none covers it, because a renewal that shortens the lease is pending.
    pub(crate) known: u64,
    /// It is bound to the current session.
    pub(crate) bound: bool,
    /// A renewal waits until replicas confirm it.
    pub(crate) confirming: bool,
    /// A renewal of several keys causes an event for each: how many keys have none yet, and until when the others are
    /// certain.
    pub(crate) left: usize,
    pub(crate) lasts: Millis,
}

/// A renewal that the program has requested, or one that decides whether a late grant counts. The call of the latter is
/// the acquisition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Renewal {
    pub(crate) call: Id,
    pub(crate) lease: Option<Millis>,
    pub(crate) fence: Option<u64>,
    pub(crate) is_sent: bool,
}

/// A request for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Acquire,
    /// With this lease.
    Renew(Millis),
    /// Releases everything of the owner (`ALL`), waiting requests included. Whether the hold was certain when this was
    /// sent.
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

/// The kind of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallKind {
    Acquire,
    Release,
    /// The hold's [`Renewal`] has the number of the call.
    Renew,
    Check(Id),
    /// Any other request, which is not sent before `not_before`. `again`: it is sent once more if its session ends
    /// before the reply.
    Request {
        words: Vec<Bytes>,
        not_before: Millis,
        again: bool,
    },
    Close,
}

/// A call with a caller that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) kind: CallKind,
    pub(crate) bound: Option<Millis>,
}

/// An acquisition or a hold that moves from one core to another, with its calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Its number, which stays the same.
    pub id: Id,
    pub(crate) claim: Claim,
    pub(crate) calls: Vec<(Id, Call)>,
}

impl Moved {
    /// The key that decides which server serves it.
    pub fn key(&self) -> &[u8] {
        self.claim.keys.first().map_or(&[], |key| key)
    }

    /// The calls that move with it.
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

    /// Detaches it from a session that has ended, or from a server that no longer serves it: no earlier request takes
    /// effect.
    pub(crate) fn detach(&mut self, until: Millis) {
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

    /// Whether the grant of this acquisition, which has this number, is so late that a renewal decides whether it
    /// counts.
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
            // `WAIT 0` would wait without a limit. A call whose time is over ends without a further request.
            Stage::New => self.left(now).is_none_or(|left| left > 0).then_some(Kind::Acquire),
            Stage::Asked | Stage::Gone => None,
            Stage::Held(hold) => {
                // The program requested it, the session has to take the hold over, or the hold is uncertain.
                let may_live = self.terms.watchdog || until > now;
                let is_due = self.renewal.is_some() || (may_live && (!hold.bound || until <= now));
                (is_due && !hold.confirming).then(|| Kind::Renew(self.next_lease(hold, until, now)))
            }
        }
    }

    /// The time left to wait, if the wait has a limit.
    fn left(&self, now: Millis) -> Option<Millis> {
        match self.wait {
            Wait::For(time) => Some(self.since.saturating_add(time).saturating_sub(now)),
            Wait::No | Wait::Forever => None,
        }
    }

    /// The lease of the next renewal. Taking a hold over never extends a lease that the server does not renew.
    fn next_lease(&self, hold: &Hold, until: Millis, now: Millis) -> Millis {
        match &self.renewal {
            Some(renewal) => renewal.lease.unwrap_or(hold.lease),
            None if self.terms.watchdog => hold.lease,
            None => until.saturating_sub(now).max(1),
        }
    }

    /// Its priority among the claims with something to send: holds, the one with the least lease left first; unwanted
    /// claims; then requests, first those sent before, by arrival.
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
