//! Rules that are checked on histories of millions of operations, in O(n log n), without a search. Each rule compares
//! only times that the history fixes: a history that violates a rule is wrong, and a history that violates none may be
//! wrong in another way.
//!
//! * **Limits.** Certain holds of a lock never overlap beyond the smallest of their limits. A hold is certain from the
//!   reply that granted it to the first moment at which it can have ended. It can end when its owner sends a release,
//!   its lease is over, or a loss or force is possible. A later reply about the same hold makes it certain until that
//!   request was sent.
//! * **Tokens.** A token belongs to one owner. It is greater than those of all grants whose reply came before its
//!   request was sent.
//! * **Order.** A request that was sent when another one was known to be queued (`queued`) is granted later than that one.

use std::collections::{BTreeSet, HashMap};

use crate::history::{Acquire, Operation, Outcome, Request, Time};
use crate::tokens;
use crate::violation::Violation;

/// Checks a history of one server; operations may come in any order.
///
/// # Errors
///
/// The first violation of the first lock that has one.
pub fn check(history: &[Operation]) -> Result<(), Violation> {
    tokens::check(history)?;
    tokens::check_owners(history)?;
    let mut locks: HashMap<&str, Vec<&Operation>> = HashMap::new();
    for operation in history {
        locks.entry(&operation.key).or_default().push(operation);
    }
    let mut locks: Vec<(&str, Vec<&Operation>)> = locks.into_iter().collect();
    locks.sort_unstable_by_key(|(key, _)| *key);
    locks.into_iter().try_for_each(|(_, operations)| check_lock(operations))
}

fn check_lock(mut operations: Vec<&Operation>) -> Result<(), Violation> {
    operations.sort_by_key(|it| it.from);
    let forces = operations.iter().filter(|it| matches!(it.request, Request::Force) && changed(it.outcome));
    let forces = Bounds::of(forces.map(|it| Bound { from: it.from, latest: it.latest(), end: it.from }));
    let mut owners: HashMap<&str, Vec<&Operation>> = HashMap::new();
    for operation in operations {
        if let Some(owner) = owner(&operation.request) {
            owners.entry(owner).or_default().push(operation);
        }
    }
    let (mut holds, mut grants) = (Vec::new(), Vec::new());
    for operations in owners.values() {
        let claims = Claims::of(operations);
        holds.extend(holds_of(operations, &claims, &forces));
        grants.extend(claims.grants_alone());
    }
    check_limits(&holds)?;
    check_order(grants)
}

/// The owner in a request; none in a force.
fn owner(request: &Request) -> Option<&str> {
    match request {
        Request::Acquire(Acquire { owner, .. })
        | Request::Release { owner, .. }
        | Request::Renew { owner, .. }
        | Request::Check { owner }
        | Request::Expire { owner, .. }
        | Request::End { owner }
        | Request::Revoke { owner, .. } => Some(owner),
        Request::Force => None,
    }
}

/// Whether a request with this outcome may have changed something.
fn changed(outcome: Outcome) -> bool {
    !matches!(outcome, Outcome::Null | Outcome::Error | Outcome::Count(0))
}

/// A hold, for as long as it is certain.
struct Hold<'a> {
    granted: &'a Operation,
    limit: u64,
    begin: Time,
    end: Time,
}

/// An event between `from` and `latest`, if it happened at all, because of which a hold may have ended at `end` or
/// later.
struct Bound {
    from: Time,
    latest: Time,
    end: Time,
}

/// Bounds, sorted by their `from`.
struct Bounds {
    from: Vec<Time>,
    /// The greatest `latest` and the smallest `end` of each bound and all earlier ones.
    latest_before: Vec<Time>,
    end_before: Vec<Time>,
    /// The smallest `end` of each bound and all later ones.
    end_after: Vec<Time>,
}

impl Bounds {
    /// `bounds` must be sorted by their `from`.
    fn of(bounds: impl Iterator<Item = Bound>) -> Self {
        let (mut from, mut latest_before, mut end_before, mut ends) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut latest, mut end) = (0, Time::MAX);
        for bound in bounds {
            (latest, end) = (latest.max(bound.latest), end.min(bound.end));
            from.push(bound.from);
            latest_before.push(latest);
            end_before.push(end);
            ends.push(bound.end);
        }
        let mut end = Time::MAX;
        for each in ends.iter_mut().rev() {
            end = end.min(*each);
            *each = end;
        }
        Self { from, latest_before, end_before, end_after: ends }
    }

    /// The earliest time at which a hold that existed at this moment may have ended.
    fn after(&self, moment: Time) -> Time {
        let before = self.from.partition_point(|from| *from < moment);
        let later = self.end_after.get(before).copied().unwrap_or(Time::MAX);
        // One of the earlier bounds may take effect only now. Which one is not determined: the smallest `end` of all
        // counts.
        let may_come = before.checked_sub(1).filter(|last| self.latest_before[*last] >= moment);
        later.min(may_come.map_or(Time::MAX, |last| self.end_before[last])).max(moment)
    }
}

/// What distinguishes the holds of an owner: the token, or the time of the request if its client received none.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Identity {
    Token(u64),
    Requested(Time),
}

impl Identity {
    /// The hold that an acquisition began or re-entered.
    fn granted_by(operation: &Operation) -> Option<Self> {
        match (&operation.request, operation.outcome) {
            (Request::Acquire(_), Outcome::Token(token)) => Some(Self::Token(token)),
            (Request::Acquire(_), Outcome::Done) => Some(Self::Requested(operation.from)),
            _ => None,
        }
    }
}

/// An acquisition that was or may have been granted, or a renewal that may have raised the token.
struct Claim<'a> {
    operation: &'a Operation,
    hold: Option<Identity>,
    /// Whether no other request of its owner can have had the same position in the queue.
    is_alone: bool,
    /// The index of the first claim of this hold.
    first: usize,
    /// The latest time of this claim and all earlier ones.
    latest: Time,
}

/// The claims of an owner, in the order in which their requests were sent.
struct Claims<'a>(Vec<Claim<'a>>);

impl<'a> Claims<'a> {
    fn of(operations: &[&'a Operation]) -> Self {
        let mut claims: Vec<Claim> = Vec::new();
        let (mut asked, mut latest) = (None, 0);
        for &operation in operations {
            let (is_raised, several) = match &operation.request {
                Request::Acquire(ask) => (false, ask.several),
                Request::Renew { fence: Some(_), .. } => (true, false),
                _ => continue,
            };
            // A repeated request takes over the position of its owner's earlier one, and may be the first to return
            // that one's token.
            let is_known = claims.last().is_none_or(|before| before.hold.is_some());
            let is_alone = !is_raised && !several && is_known && asked.is_none_or(|before| before < operation.from);
            asked = asked.max(Some(operation.latest()));
            if !changed(operation.outcome) {
                continue;
            }
            let hold = Identity::granted_by(operation);
            let same = claims.last().filter(|before| hold.is_some() && before.hold == hold);
            let first = same.map_or(claims.len(), |before| before.first);
            latest = latest.max(operation.latest());
            claims.push(Claim { operation, hold, is_alone, first, latest });
        }
        Self(claims)
    }

    /// The hold that existed when an operation took effect, if only one is possible.
    fn met_by(&self, operation: &Operation) -> Option<Identity> {
        let last = self.0.partition_point(|claim| claim.operation.from <= operation.latest()).checked_sub(1)?;
        let first = self.0[last].first;
        // The hold must have been granted before, and every earlier hold must have been granted before this one was
        // requested.
        let is_there = self.0[first..=last].iter().any(|claim| claim.operation.latest() <= operation.from);
        let is_alone = first.checked_sub(1).is_none_or(|before| self.0[before].latest < self.0[first].operation.from);
        self.0[last].hold.filter(|_| is_there && is_alone)
    }

    /// Grants that were no re-entries, with their tokens.
    fn grants_alone(&self) -> impl Iterator<Item = (u64, &'a Operation)> {
        self.0.iter().enumerate().filter_map(|(index, claim)| {
            let is_entered_again = self.0.get(index + 1).is_some_and(|next| next.first == index);
            let hold = claim.hold.filter(|_| claim.is_alone && claim.first == index && !is_entered_again)?;
            let Identity::Token(token) = hold else { return None };
            Some((token, claim.operation))
        })
    }
}

/// The certain holds of an owner.
fn holds_of<'a>(operations: &[&'a Operation], claims: &Claims, forces: &Bounds) -> Vec<Hold<'a>> {
    let bounds = Bounds::of(operations.iter().filter_map(|it| bound(it)));
    let mut holds: HashMap<Identity, Hold<'a>> = HashMap::new();
    let mut last = None;
    for &operation in operations {
        let (from, until) =
            (operation.from, |lease: Option<Time>| lease.map_or(Time::MAX, |it| operation.from.saturating_add(it)));
        // The hold that the reply is about, and how long it lasts according to this operation.
        let (identity, lasts) = match (&operation.request, operation.outcome) {
            (Request::Acquire(ask), Outcome::Token(_) | Outcome::Done) => {
                (Identity::granted_by(operation), until(ask.lease))
            }
            (Request::Renew { lease, .. }, Outcome::Token(token)) => (Some(Identity::Token(token)), until(*lease)),
            (Request::Release { token: Some(token), .. }, Outcome::Left(_)) => (Some(Identity::Token(*token)), from),
            (Request::Release { .. }, Outcome::Left(_)) if !operation.request.withdraws() => {
                (claims.met_by(operation), from)
            }
            (Request::Check { .. }, Outcome::Done) => (claims.met_by(operation), from),
            _ => continue,
        };
        let Some(identity) = identity else { continue };
        if matches!(operation.request, Request::Acquire(_)) {
            // Without a token, it may be a re-entry: then the owner's previous hold is not certain any more.
            if matches!((identity, last), (Identity::Requested(_), _) | (_, Some(Identity::Requested(_))))
                && let Some(before) = last.and_then(|it| holds.get_mut(&it))
            {
                before.end = before.end.min(from);
            }
            last = Some(identity);
        }
        let end = lasts.min(bounds.after(from)).min(forces.after(from)).max(from);
        let limit = match &operation.request {
            Request::Acquire(ask) if ask.limit > 0 => ask.limit,
            Request::Acquire(_) => u64::MAX,
            _ => 0,
        };
        let hold = holds.entry(identity).or_insert(Hold { granted: operation, limit, begin: operation.latest(), end });
        hold.limit = hold.limit.max(limit);
        hold.begin = hold.begin.min(operation.latest());
        hold.end = hold.end.max(end);
    }
    // The limit of a hold that no acquisition granted under this token is unknown.
    holds.into_values().filter(|it| it.begin <= it.end && it.limit > 0).collect()
}

/// The earliest time at which an operation may end its owner's hold.
fn bound(operation: &Operation) -> Option<Bound> {
    let from = operation.from;
    let end = match &operation.request {
        _ if !changed(operation.outcome) => return None,
        Request::Renew { fence: None, lease, .. } => from.saturating_add((*lease)?),
        Request::Release { lease, .. } if operation.outcome == Outcome::Left(1) => from.saturating_add((*lease)?),
        // A hold whose token was raised counts as another hold here.
        Request::Renew { .. } | Request::Release { .. } | Request::Expire { .. } | Request::End { .. } => from,
        Request::Acquire(_) | Request::Check { .. } | Request::Force | Request::Revoke { .. } => return None,
    };
    Some(Bound { from, latest: operation.latest(), end })
}

fn check_limits(holds: &[Hold]) -> Result<(), Violation> {
    // At one moment, holds end first; then come holds that are certain for that moment only; then holds begin.
    let (ends, passes, begins) = (0, 1, 2);
    let mut moments: Vec<(Time, i32, usize)> = Vec::new();
    for (index, hold) in holds.iter().enumerate() {
        if hold.begin == hold.end {
            moments.push((hold.begin, passes, index));
        } else {
            moments.extend([(hold.begin, begins, index), (hold.end, ends, index)]);
        }
    }
    moments.sort_unstable();
    let mut certain: BTreeSet<(u64, usize)> = BTreeSet::new();
    for (at, what, index) in moments {
        let hold = (holds[index].limit, index);
        if what == ends {
            certain.remove(&hold);
            continue;
        }
        certain.insert(hold);
        if certain.first().is_some_and(|(limit, _)| certain.len() as u64 > *limit) {
            let others = certain.iter().filter(|(_, other)| *other != index);
            return Err(Violation {
                rule: "more certain holds than the limit",
                key: holds[index].granted.key.as_str().into(),
                between: (at, at),
                explained: others.map(|(_, other)| holds[*other].granted.clone()).collect(),
                stuck: vec![holds[index].granted.clone()],
                before: Vec::new(),
            });
        }
        if what == passes {
            certain.remove(&hold);
        }
    }
    Ok(())
}

/// Checks the order of grants to requests that certainly had their own position in the queue.
fn check_order(grants: Vec<(u64, &Operation)>) -> Result<(), Violation> {
    let mut queued: Vec<(Time, u64, &Operation)> = Vec::new();
    for (token, operation) in &grants {
        if let Request::Acquire(Acquire { queued: Some(at), .. }) = operation.request {
            queued.push((at, *token, operation));
        }
    }
    queued.sort_unstable_by_key(|(at, ..)| *at);
    let mut sent = grants;
    sent.sort_unstable_by_key(|(_, operation)| operation.from);
    let mut queued = queued.into_iter().peekable();
    let mut newest: Option<(u64, &Operation)> = None;
    for (token, operation) in sent {
        while let Some((_, token, earlier)) = queued.next_if(|(at, ..)| *at < operation.from) {
            newest = newest.filter(|(newest, _)| *newest > token).or(Some((token, earlier)));
        }
        if let Some((_, earlier)) = newest.filter(|(newest, _)| *newest > token) {
            return Err(Violation {
                rule: "a request was granted before one that was queued when it was sent",
                key: operation.key.as_str().into(),
                between: (earlier.from, operation.latest()),
                explained: vec![earlier.clone()],
                stuck: vec![operation.clone()],
                before: Vec::new(),
            });
        }
    }
    Ok(())
}
