//! What the checker records of a run: holds as their owners know them, bindings, requests, waits.

use super::Position;
use crate::redis::{Bytes, slot_of};
use crate::request::Request;
use std::collections::BTreeMap;
use std::collections::VecDeque;

/// A hold, as its owner knows it from replies.
#[derive(Clone, Debug)]
pub(super) struct Belief {
    pub(super) token: u64,
    /// When the request of the last reply to its owner began. Only later events can have ended the hold.
    pub(super) since: Position,
    /// When the hold was last seen in the keyspace, or `since`. Only later commands can have ended it immediately.
    pub(super) seen: Position,
    /// The lease ends no earlier than this time, in Unix milliseconds.
    pub(super) promised: u64,
    /// The deadline that was last seen in the keyspace.
    pub(super) deadline: Option<u64>,
    /// When its binding was last set or renewed, as far as the keyspace showed, in Unix milliseconds.
    pub(super) renewed: u64,
    pub(super) limit: u32,
    /// The grants that its owner received: where each request began, and the count that `HOLDS` named; `None` adds one.
    pub(super) raises: Vec<(Position, Option<u64>)>,
    pub(super) binding: Option<Binding>,
    /// With `REPLICAS`: the latest deadline that the replicas can have confirmed; `None`: the deadline at the end of
    /// this iteration.
    pub(super) known: Option<u64>,
    /// The deadline that the hold must have after the last clock step, until the keyspace has shown it. Set for holds
    /// that were bound at the step.
    pub(super) follows: Option<u64>,
    pub(super) has_stepped: bool,
    /// It was bound, and expired while its key could not be removed, by what its replicas have confirmed or before a
    /// clock step: it ends as soon as writes are possible, whatever its key says.
    pub(super) had_expired: bool,
    /// It was over while its connection was no session: no event reports that.
    pub(super) ended_unreported: bool,
    /// Another client changed the key in the iteration before the last clock step: the key need not follow the step.
    pub(super) is_left: bool,
    pub(super) possible_moves: PossibleMoves,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Binding {
    pub(super) client: u64,
    /// When the request began that made it.
    pub(super) at: Position,
    /// When the reply was received. An earlier `LOCK.EVENTS` of the session may have been sent before the binding was
    /// made.
    pub(super) received: Position,
    /// With `REPLICAS`: the earliest deadline that the replicas can have confirmed.
    pub(super) confirmed: Option<u64>,
    /// The duration of a renewal: the shortest and the longest, if it is unknown which of several like requests counts.
    pub(super) lease: u64,
    pub(super) longest: u64,
    /// It belongs to a session, which must read events to keep it.
    pub(super) of_session: bool,
    pub(super) watchdog: bool,
    pub(super) ephemeral: bool,
    /// The same request was also made with other options, and either may have set the binding.
    pub(super) is_unsure: bool,
}

impl Binding {
    /// The binding that this request makes if it succeeds. The pair is where the request began and where its reply was
    /// received.
    pub(super) fn of(request: &Request, (at, received): (Position, Position), ends: u64) -> Self {
        Self {
            client: request.client,
            at,
            received,
            confirmed: (request.replicas > 0).then_some(ends),
            lease: request.lease.unwrap_or(30_000),
            longest: request.longest.unwrap_or(30_000),
            of_session: request.is_of_session(),
            watchdog: request.watchdog,
            ephemeral: request.ephemeral,
            is_unsure: false,
        }
    }

    /// Whether the slot of its key has moved away since it was requested, which has unbound the hold.
    pub(super) fn has_moved(&self, moves: &BTreeMap<u16, Position>, key: &[u8]) -> bool {
        moves.get(&slot_of(key)).is_some_and(|at| *at >= self.at)
    }
}

/// Requests that may have moved a binding to another connection, and whose replies have not been received yet.
pub(super) type PossibleMoves = BTreeMap<Position, PossibleMove>;

/// A request that may have moved a binding.
#[derive(Clone, Copy, Debug)]
pub(super) struct PossibleMove {
    /// The connection that the hold may be bound to.
    pub(super) client: u64,
    /// With `REPLICAS`: the earliest deadline that the replicas can have confirmed.
    pub(super) confirmed: Option<u64>,
}

impl PossibleMove {
    pub(super) fn of(request: &Request, at: u64) -> Self {
        let confirmed = (request.replicas > 0).then(|| at + request.lease.unwrap_or(30_000));
        Self { client: request.client, confirmed }
    }
}

impl Belief {
    /// The binding. It is unsure while a request that may have moved it has no reply.
    pub(super) fn binding(&self) -> Option<Binding> {
        self.binding
            .map(|binding| Binding { is_unsure: binding.is_unsure || !self.possible_moves.is_empty(), ..binding })
    }

    /// Records that an earlier request may have bound the hold. A binding of the same connection has the flags of both.
    pub(super) fn note_possible_binding(&mut self, earlier: Binding) {
        let same = self.binding.filter(|it| it.client == earlier.client);
        let is_later = self.binding.is_some_and(|it| it.at > earlier.at);
        if let Some(newest) = if is_later { same } else { Some(earlier) } {
            let has = |flag: fn(&Binding) -> bool| flag(&earlier) || same.is_some_and(|it| flag(&it));
            let (watchdog, ephemeral) = (has(|it| it.watchdog), has(|it| it.ephemeral));
            self.binding = Some(Binding { watchdog, ephemeral, is_unsure: true, ..newest });
        }
    }
}

/// An event that may end a hold.
#[derive(Clone, Debug)]
pub(super) enum Cause {
    /// A request of the owner, with the database and the Unix time in milliseconds when it began.
    Own(Box<Request>, i32, u64),
    /// `LOCK.FORCE`.
    Forced(i32, Bytes),
    /// Another command wrote the key, or (`true`) the key expired.
    Written(i32, Bytes, bool),
    /// Another command changed the key's expiry to this Unix time in milliseconds, or removed it.
    ExpiryChanged(i32, Bytes, Option<u64>),
    /// A database, or every database, was flushed.
    Flushed(Option<i32>),
    /// Two databases were swapped.
    Swapped(i32, i32),
    /// A connection closed.
    Disconnected(u64),
    /// The server's role changed.
    Role,
}

impl Cause {
    /// Whether it releases something that this owner holds of this lock.
    pub(super) fn releases(&self, key: &[u8], owner: &[u8]) -> bool {
        matches!(self, Self::Own(request, ..) if request.command.ends_with("release") && request.concerns(key, owner))
    }
}

/// A request that has no reply yet.
#[derive(Clone, Debug)]
pub(super) struct OpenRequest {
    /// The connection that sent it.
    pub(super) client: u64,
    /// When it began, in the sequence of all events; `None` if the server has not started it yet.
    pub(super) began: Option<Position>,
    pub(super) db: i32,
    /// When it began, in Unix milliseconds.
    pub(super) at: u64,
    /// The same, by the monotonic clock.
    pub(super) steady: u64,
    /// The commands that it runs: one, or those of a transaction.
    pub(super) runs: Vec<Request>,
    pub(super) is_exec: bool,
}

/// When a request arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) position: Position,
    /// With `WAITED`: the arrival time that it claims, in ms of the monotonic clock.
    pub(super) claimed: Option<u64>,
    pub(super) steady: u64,
}

impl Arrival {
    pub(super) fn of(position: Position, open: &OpenRequest, request: &Request) -> Self {
        let claimed = (request.waited > 0).then(|| (open.steady + DAY).saturating_sub(request.waited));
        Self { position, claimed, steady: open.steady + DAY }
    }

    /// Whether it certainly arrived before another request that was granted in the iteration that began at `iteration`.
    /// It must have arrived before that grant; claims by `WAITED` are compared in ms.
    pub(super) fn is_before(&self, other: Self, iteration: Position) -> bool {
        match (self.claimed, other.claimed) {
            (None, None) => self.position < other.position,
            _ => {
                let came_before = self.position <= iteration || self.position < other.position;
                came_before && self.claimed.unwrap_or(self.steady) + 2 < other.claimed.unwrap_or(other.steady)
            }
        }
    }
}

/// An offset of the monotonic clock, so that a request with `WAITED` can have arrived before the run began.
pub(super) const DAY: u64 = 24 * 60 * 60 * 1000;

impl Request {
    /// Clears the options: one of several similar requests was granted, and which one is unknown.
    pub(super) fn forget_terms(&mut self) {
        (self.is_unsure, self.new) = (true, false);
        (self.lease, self.limit, self.waited) = (Some(0), u32::MAX, DAY);
    }
}

/// A queued request of a session.
#[derive(Clone, Debug)]
pub(super) struct Wait {
    pub(super) open: OpenRequest,
    pub(super) request: Request,
    /// Its keys without an outcome. A renewal of several keys gets an outcome for each key, and so may each repetition of it.
    pub(super) left: Vec<Bytes>,
    /// How many more similar requests may still get an outcome of their own.
    pub(super) repeats: usize,
    /// When the last similar request began.
    pub(super) latest: Position,
    /// It needs no outcome: it may have been the same request as one that already has an outcome.
    pub(super) is_optional: bool,
}

impl Wait {
    /// The wait of this request. `began` is later than the start of `open` inside a transaction.
    pub(super) fn of(began: Position, open: &OpenRequest, request: &Request) -> Self {
        let (open, left) = (OpenRequest { began: Some(began), ..open.clone() }, request.keys.clone());
        Self { open, request: request.clone(), left, repeats: 0, latest: began, is_optional: false }
    }
}

/// A connection, as the checker knows it.
#[derive(Clone, Debug, Default)]
pub(super) struct Connection {
    pub(super) open: VecDeque<OpenRequest>,
    pub(super) is_session: bool,
    /// It was already a session at the last check of the holds.
    pub(super) was_session: bool,
    /// When its last `LOCK.EVENTS` began: in Unix milliseconds, and in the sequence of events.
    pub(super) read_at: u64,
    pub(super) read_place: Position,
    /// The interval in ms that the last heartbeat promised until the next reply.
    pub(super) promised: Option<u64>,
    /// Its client has disconnected.
    pub(super) has_vanished: bool,
}

/// The token that an owner of a lock received last, and when its request began.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReceivedToken {
    pub(super) token: u64,
    pub(super) at: Position,
}

/// The earliest deadline that a request of the owner may have given a hold since then. It counts until replicas confirm
/// a later one.
pub(super) fn earliest_requested<'a>(
    causes: impl Iterator<Item = &'a (Position, Cause)>,
    (key, owner): (&[u8], &[u8]),
    since: Position,
) -> Option<u64> {
    let deadline = |(position, cause): &(Position, Cause)| match cause {
        Cause::Own(by, _, at) if *position > since && by.concerns(key, owner) => {
            Some(at + by.lease.or_else(|| by.command.contains("renew").then_some(30_000))?)
        }
        _ => None,
    };
    causes.filter_map(deadline).min()
}

/// The least hold count that an owner can have: the grants that it received, less the releases that it sent, in this
/// order.
///
/// The count may be higher: a queued request is granted later than it was sent, and a release may have been refused.
pub(super) fn holds_at_least<'a>(
    raises: &[(Position, Option<u64>)],
    releases: impl Iterator<Item = &'a (Position, Cause)>,
) -> u64 {
    let Some((first, _)) = raises.first() else { return 0 };
    let releases = releases.filter(|(position, _)| position > first).filter_map(|(position, cause)| match cause {
        Cause::Own(request, ..) => Some((*position, Err(request.holds))),
        _ => None,
    });
    let mut changes: Vec<_> = raises.iter().map(|(position, to)| (*position, Ok(*to))).chain(releases).collect();
    changes.sort_by_key(|(position, _)| *position);
    changes.into_iter().fold(0, |holds: u64, (_, change)| match change {
        Ok(to) => to.map_or(holds + 1, |to| to.max(holds)),
        Err(to) => to.unwrap_or(holds.saturating_sub(1)).min(holds),
    })
}
