//! Tokens increase across all locks of a server. Otherwise, locks are independent.
//!
//! The nodes of a cluster have their own clocks. Only keys with one hash tag (`{…}`) are certainly at one node.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::history::{Acquire, Operation, Outcome, Request, Time};
use crate::violation::Violation;

/// A grant that was requested after the reply to another one has the greater token, also if their locks differ.
pub fn check(history: &[Operation]) -> Result<(), Violation> {
    let mut by_tag: BTreeMap<&str, Vec<Grant>> = BTreeMap::new();
    for grant in grants(history) {
        by_tag.entry(hash_tag(&grant.operation.key)).or_default().push(grant);
    }
    by_tag.into_values().try_for_each(check_grants)
}

/// The hash tag of a key; empty if it has none.
fn hash_tag(key: &str) -> &str {
    let tag = key.split_once('{').and_then(|(_, behind)| behind.split_once('}'));
    tag.map_or("", |(tag, _)| tag)
}

fn check_grants(mut grants: Vec<Grant>) -> Result<(), Violation> {
    let mut answered = grants.clone();
    grants.sort_by_key(|grant| grant.from);
    answered.sort_by_key(|grant| grant.to);
    let mut answered = answered.into_iter().peekable();
    let mut newest: Option<Grant> = None;
    for grant in grants {
        while let Some(before) = answered.next_if(|before| before.to < grant.from) {
            newest = newest.filter(|newest| newest.token >= before.token).or(Some(before));
        }
        if let Some(before) = newest.as_ref().filter(|before| grant.token <= before.token) {
            return Err(Violation {
                rule: "a token is not greater than one that was granted before",
                key: grant.operation.key.as_str().into(),
                between: (before.from, grant.to),
                explained: vec![before.operation.clone()],
                stuck: vec![grant.operation.clone()],
                before: Vec::new(),
            });
        }
    }
    Ok(())
}

/// Each token belongs to one owner. (Several locks that one command is granted have one token.)
pub fn check_owners(history: &[Operation]) -> Result<(), Violation> {
    let mut grants: Vec<((&str, u64), &Operation, &Acquire)> = Vec::new();
    for operation in history {
        if let (Request::Acquire(ask), Outcome::Token(token)) = (&operation.request, operation.outcome) {
            grants.push(((hash_tag(&operation.key), token), operation, ask));
        }
    }
    grants.sort_by_key(|(token, ..)| *token);
    for ((token, first, ask), (other, next, again)) in grants.iter().zip(grants.iter().skip(1)) {
        if token == other && ask.owner != again.owner {
            return Err(Violation {
                rule: "two owners have one token",
                key: next.key.as_str().into(),
                between: (first.from, next.latest()),
                explained: vec![(*first).clone()],
                stuck: vec![(*next).clone()],
                before: Vec::new(),
            });
        }
    }
    Ok(())
}

/// All operations with one token: a grant, and re-entries, which may get their replies sooner.
#[derive(Clone)]
struct Grant<'a> {
    operation: &'a Operation,
    token: u64,
    from: Time,
    to: Time,
}

fn grants(history: &[Operation]) -> Vec<Grant<'_>> {
    let mut by_token: HashMap<(&str, &str, u64), Grant> = HashMap::new();
    // If a grant or fence of an owner has no reply, a later operation may be the first with its token.
    let mut unanswered: HashMap<(&str, &str), Time> = HashMap::new();
    let mut raised = HashSet::new();
    for operation in history {
        let (Request::Acquire(Acquire { owner, .. }) | Request::Renew { owner, .. }) = &operation.request else {
            continue;
        };
        let (key, from, to) = (&*operation.key, operation.from, operation.latest());
        match operation.outcome {
            Outcome::Token(token) => {
                let grant = by_token.entry((key, owner, token)).or_insert(Grant { operation, token, from, to });
                (grant.from, grant.to) = (grant.from.min(from), grant.to.min(to));
                if matches!(operation.request, Request::Renew { fence: Some(_), .. }) {
                    raised.insert((key, &**owner, token));
                }
            }
            Outcome::Unknown | Outcome::Unconfirmed => {
                let first = unanswered.entry((key, owner)).or_insert(from);
                *first = from.min(*first);
            }
            _ => {}
        }
    }
    let grants = by_token.into_iter().filter(|(hold, _)| !raised.contains(hold)).map(|((key, owner, _), grant)| {
        let from = unanswered.get(&(key, owner)).map_or(grant.from, |first| grant.from.min(*first));
        Grant { from, ..grant }
    });
    grants.collect()
}
