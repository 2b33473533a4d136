//! Whether any order of the operations explains what the clients of one server observed.
//!
//! Locks are independent, so each is checked by itself; only tokens increase across locks (`tokens.rs`). The history of
//! a lock is cut into windows, because the search takes exponential time in the worst case. A cut may fall where
//! operations are open: the possible states of the lock are carried over it, each with the operations that have already
//! taken effect.

use std::collections::{BTreeMap, HashSet};

use crate::history::{Acquire, Operation, Outcome, Request, Time};
use crate::search::{Candidate, End, explore};
use crate::spec::{Lock, Step};
use crate::tokens;
use crate::violation::Violation;

/// The number of replies in a window. The search copies the window at each step, so short ones are faster.
const WINDOW: usize = 4;

/// Checks a history of one server; operations may come in any order.
///
/// # Errors
///
/// The first violation of the first lock that has one.
pub fn check(history: &[Operation]) -> Result<(), Violation> {
    tokens::check(history)?;
    let mut locks: BTreeMap<&str, Vec<&Operation>> = BTreeMap::new();
    for operation in history {
        locks.entry(&operation.key).or_default().push(operation);
    }
    locks.into_values().try_for_each(|operations| check_lock(&operations))
}

fn check_lock(all: &[&Operation]) -> Result<(), Violation> {
    let waits = Waits::of(all);
    let done = all.iter().filter(|operation| operation.outcome != Outcome::Error);
    let mut operations: Vec<Operation> =
        done.flat_map(|operation| [Some((*operation).clone()), revocation(operation)]).flatten().collect();
    operations.sort_by_key(|operation| (operation.from, operation.latest()));
    let steps: Vec<Step> = operations.iter().map(|operation| step(operation, &waits)).collect();
    let mut ends: HashSet<End> = HashSet::from([(Lock::default(), Vec::new())]);
    let mut open: Vec<usize> = Vec::new();
    let (mut next, mut begin) = (0, 0);
    while next < steps.len() || open.iter().any(|place| must_happen(&steps[*place])) {
        let cut = next_cut(&steps, next, &open);
        let last = next + steps[next..].partition_point(|step| step.from <= cut);
        open.extend(next..last);
        ends = over_window(&operations, &steps, &open, ends, (begin, cut))?;
        open.retain(|place| steps[*place].to > cut);
        (next, begin) = (last, cut);
    }
    Ok(())
}

/// The revocation of an unconfirmed grant, which takes effect before the reply to the request.
fn revocation(operation: &Operation) -> Option<Operation> {
    let (Request::Acquire(ask), Outcome::Unconfirmed) = (&operation.request, operation.outcome) else { return None };
    let request = Request::Revoke { owner: ask.owner.clone(), added: u64::from(ask.holds.is_none()) };
    Some(Operation { request, outcome: Outcome::Done, ..operation.clone() })
}

/// When requests may have been queued: spans in order of their start, each with the latest end so far.
struct Waits(Vec<(Time, Time, Time)>);

impl Waits {
    fn of(operations: &[&Operation]) -> Self {
        let waits = operations.iter().filter(|operation| match &operation.request {
            Request::Acquire(ask) => ask.wait || ask.several,
            _ => false,
        });
        let mut spans: Vec<_> = waits.map(|operation| (operation.from, operation.latest(), 0)).collect();
        spans.sort_unstable();
        let mut latest = 0;
        for (_, end, latest_end) in &mut spans {
            latest = latest.max(*end);
            *latest_end = latest;
        }
        Self(spans)
    }

    /// Whether more than `most` waits overlap with a span.
    fn exceed(&self, most: usize, (from, to): (Time, Time)) -> bool {
        let begun = self.0.partition_point(|(begin, ..)| *begin <= to);
        let near = self.0[..begun].iter().rev().take_while(|(_, _, latest_end)| *latest_end >= from);
        near.filter(|(_, end, _)| *end >= from).nth(most).is_some()
    }
}

fn step(operation: &Operation, waits: &Waits) -> Step {
    let Operation { request, from, outcome, .. } = operation;
    let (from, to) = (*from, operation.latest());
    let may_be_refused = match request {
        Request::Acquire(Acquire { several: true, .. }) => true,
        // It is one of the waiting requests itself.
        Request::Acquire(Acquire { wait, .. }) => waits.exceed(usize::from(*wait), (from, to)),
        _ => false,
    };
    Step { request: request.clone(), from, to, outcome: *outcome, may_be_refused }
}

/// Whether the operation has certainly taken effect: its outcome is known.
fn must_happen(step: &Step) -> bool {
    step.outcome != Outcome::Unknown
}

/// The time at which [`WINDOW`] more replies have come.
fn next_cut(steps: &[Step], next: usize, open: &[usize]) -> Time {
    let mut answers: Vec<Time> =
        open.iter().map(|place| &steps[*place]).filter(|step| must_happen(step)).map(|step| step.to).collect();
    answers.sort_unstable();
    for step in &steps[next..] {
        if answers.get(WINDOW - 1).is_some_and(|enough| *enough < step.from) {
            break;
        }
        if must_happen(step) {
            answers.insert(answers.partition_point(|answer| *answer <= step.to), step.to);
        }
    }
    answers.get(WINDOW - 1).or(answers.last()).copied().unwrap_or(Time::MAX)
}

/// The states after a window, from all possible states before it.
fn over_window(
    operations: &[Operation],
    steps: &[Step],
    places: &[usize],
    begins: HashSet<End>,
    (begin, cut): (Time, Time),
) -> Result<HashSet<End>, Violation> {
    let mut ends = HashSet::new();
    let mut furthest: Vec<usize> = Vec::new();
    for (lock, early) in &begins {
        let left = places.iter().copied().filter(|place| !early.contains(place));
        let mut candidates: Vec<Candidate> =
            left.map(|place| Candidate { place: Some(place), step: steps[place].clone() }).collect();
        candidates.extend(leases_that_may_end(lock, &candidates, cut));
        let explored = explore(lock, candidates, cut);
        let still_open = early.iter().copied().filter(|place| steps[*place].to > cut);
        let still_open: Vec<usize> = still_open.collect();
        ends.extend(explored.ends.into_iter().map(|(lock, mut early)| {
            early.extend(&still_open);
            early.sort_unstable();
            (lock, early)
        }));
        if explored.furthest.len() + early.len() >= furthest.len() {
            furthest = [&explored.furthest[..], early].concat();
        }
    }
    if !ends.is_empty() {
        return Ok(ends);
    }
    let (explained, rest): (Vec<usize>, Vec<usize>) = places.iter().partition(|place| furthest.contains(place));
    let stuck = rest.into_iter().filter(|place| steps[*place].to <= cut && must_happen(&steps[*place]));
    let operations_at = |places: Vec<usize>| places.into_iter().map(|place| operations[place].clone()).collect();
    Err(Violation {
        rule: "no order of operations explains what was seen",
        key: operations[0].key.as_str().into(),
        between: (begin, cut),
        explained: operations_at(explained),
        stuck: operations_at(stuck.collect()),
        before: begins.into_iter().map(|(lock, _)| lock).collect(),
    })
}

/// Ends of leases that no client reported: for each hold that may exist in this window, if a lease of its owner may be
/// over. (The specification decides which.)
fn leases_that_may_end(lock: &Lock, candidates: &[Candidate], cut: Time) -> Vec<Candidate> {
    let mut may_end: HashSet<&str> = HashSet::new();
    let mut holds: HashSet<(&str, Option<u64>)> = HashSet::new();
    for (owner, hold) in &lock.holders {
        holds.insert((owner, hold.token));
        may_end.extend(hold.lasts.filter(|lasts| *lasts <= cut).map(|_| &**owner));
    }
    for Candidate { step, .. } in candidates {
        let (owner, lease) = match &step.request {
            Request::Acquire(ask) => (&ask.owner, ask.lease),
            Request::Renew { owner, lease, .. } | Request::Release { owner, lease, .. } => (owner, *lease),
            _ => continue,
        };
        may_end.extend(lease.filter(|lease| step.from.saturating_add(*lease) <= cut).map(|_| &**owner));
        match step.outcome {
            Outcome::Token(token) => holds.insert((owner, Some(token))),
            Outcome::Unknown | Outcome::Unconfirmed | Outcome::Done => holds.insert((owner, None)),
            _ => continue,
        };
    }
    let ending = holds.into_iter().filter(|(owner, _)| may_end.contains(owner));
    let steps = ending.map(|(owner, token)| Step {
        request: Request::Expire { owner: owner.to_owned(), token },
        from: 0,
        to: Time::MAX,
        outcome: Outcome::Unknown,
        may_be_refused: false,
    });
    steps.map(|step| Candidate { place: None, step }).collect()
}
