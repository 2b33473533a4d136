//! Properties of the admission rule, of the holders and of the tokens.

use super::table::{Stored, Table};
use super::{cases, demand, key, owner};
use crate::lock::fence::{FARTHEST_AHEAD, MAX_TOKEN};
use crate::lock::rule::MAX_HOLDS;
use crate::lock::serve::{Sight, View};
use crate::lock::{
    Ahead, Deadline, Decision, Demand, Fence, Hold, Holders, Limit, Millis, Owner, Raise, Standing, decide,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

const OWNERS: u32 = 5;

#[derive(Clone, Debug)]
enum Step {
    Acquire(u32, Demand),
    Release(u32),
    Pass(Millis),
    /// Removes expired holders.
    Purge,
}

fn limit() -> impl Strategy<Value = Limit> {
    prop::sample::select(vec![1_u32, 1, 2, 3, 0]).prop_map(Limit::from_number)
}

fn raise() -> impl Strategy<Value = Raise> {
    prop_oneof![Just(Raise::ByOne), (1_u64..5).prop_map(Raise::To), Just(Raise::New)]
}

fn any_demand() -> impl Strategy<Value = Demand> {
    (limit(), raise(), 1_u64..100).prop_map(|(limit, raise, lease)| Demand { limit, raise, lease })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        10 => (0..OWNERS, any_demand()).prop_map(|(owner, demand)| Step::Acquire(owner, demand)),
        4 => (0..OWNERS).prop_map(Step::Release),
        5 => (0_u64..60).prop_map(Step::Pass),
        1 => Just(Step::Purge),
    ];
    prop::collection::vec(step, 1..80)
}

/// One lock without waiters.
#[derive(Debug, Default)]
struct OneLock {
    table: Table,
}

impl OneLock {
    fn acquire(&mut self, who: u32, demand: &Demand) -> Decision {
        let (key, owner) = (key(0), owner(who));
        let standing = match self.table.look(&key, &owner) {
            Sight::Lock(standing) => standing,
            _ => Standing::FREE,
        };
        let decision = decide(&standing, demand, Ahead::NoRequest, self.table.now);
        if let Decision::Grant(..) | Decision::Reenter(_) = decision {
            self.table.write(&[key], &owner, &[decision]);
        }
        decision
    }

    /// The holders and their holds.
    fn holds(&self) -> BTreeMap<Owner, Hold> {
        let holders = self.table.holders_of(&key(0));
        let all = holders.into_iter().flat_map(Holders::iter).map(|(owner, hold)| (owner.clone(), *hold));
        all.filter(|(_, hold)| !hold.deadline.has_passed(self.table.now)).collect()
    }
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn holders_never_exceed_smallest_limit(steps in steps()) {
        let mut lock = OneLock::default();
        let mut named: BTreeMap<Owner, Limit> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Acquire(who, demand) => {
                    if let Decision::Grant(..) = lock.acquire(who, &demand) {
                        named.insert(owner(who), demand.limit);
                    }
                }
                Step::Release(who) => drop(lock.table.release(&key(0), &owner(who))),
                Step::Pass(time) => lock.table.now += time,
                Step::Purge => lock.table.purge(),
            }
            let holds = lock.holds();
            for who in holds.keys() {
                prop_assert!(named[who].allows(holds.len()), "{:?} hold the lock, with limits {:?}", holds, named);
            }
        }
    }

    #[test]
    fn new_holder_is_granted_within_the_smallest_limit(
        holders in 0_usize..6, of_lock in limit(), demand in any_demand(), ahead in prop::bool::ANY, now in 0_u64..1000,
    ) {
        let standing = Standing { own: None, holders, limit: of_lock };
        let ahead = if ahead { Ahead::Requests } else { Ahead::NoRequest };
        let smallest = if holders == 0 { demand.limit } else { demand.limit.min(of_lock) };
        let room = smallest == Limit::Shared || holders < smallest.number() as usize;
        let decision = decide(&standing, &demand, ahead, now);
        if room && ahead == Ahead::NoRequest {
            let holds = if let Raise::To(holds) = demand.raise { holds } else { 1 };
            let hold = Hold { holds, token: None, deadline: Deadline::At(now + demand.lease) };
            prop_assert_eq!(decision, Decision::Grant(hold, smallest));
        } else {
            prop_assert_eq!(decision, Decision::Wait);
        }
    }

    #[test]
    fn tokens_increase(steps in prop::collection::vec(
        // The clock may show any time: it goes back, jumps, and exceeds all bounds.
        (
            prop_oneof![50 => 0_u64..1000, 50 => 0..=1_u64 << 51, 1 => any::<u64>()],
            prop_oneof![18 => Just(None), 1 => (0..=1_u64 << 53).prop_map(Some), 1 => (0..=1_u64 << 34).prop_map(Some)],
        ),
        1..200,
    )) {
        let mut fence = Fence::default();
        let mut last = 0;
        for (micros, observed) in steps {
            if let Some(observed) = observed {
                fence.observe(observed, micros / 1000);
                let hour_ahead = (micros / 1000).saturating_add(3_600_000).saturating_mul(1000);
                last = last.max(if observed <= hour_ahead { observed } else { 0 });
            }
            let token = fence.next(micros);
            prop_assert!(token > last || last == MAX_TOKEN, "{} after {}", token, last);
            prop_assert!((1..=MAX_TOKEN).contains(&token));
            last = token;
        }
    }

    #[test]
    fn token_is_time_unless_already_used(times in prop::collection::vec(1_u64..1 << 51, 1..50)) {
        let mut fence = Fence::default();
        let mut last = 0;
        for micros in times {
            let token = fence.next(micros);
            prop_assert_eq!(token, micros.max(last + 1));
            last = token;
        }
    }

    #[test]
    fn later_grant_has_greater_token_and_reentry_keeps_it(steps in steps(), back in prop::collection::vec(0_u64..5, 80)) {
        let mut lock = OneLock::default();
        let mut newest = 0;
        for (step, back) in steps.into_iter().zip(back) {
            match step {
                Step::Acquire(who, demand) => {
                    let before = lock.holds();
                    let decision = lock.acquire(who, &demand);
                    let token = lock.holds().get(&owner(who)).and_then(|hold| hold.token);
                    match decision {
                        Decision::Grant(..) => {
                            prop_assert!(token > Some(newest));
                            newest = token.unwrap_or(newest);
                        }
                        Decision::Reenter(_) => {
                            prop_assert_eq!(token, before[&owner(who)].token);
                            newest = newest.max(lock.table.fence.clone().next(0) - 1);
                        }
                        _ => prop_assert_eq!(lock.holds(), before),
                    }
                }
                Step::Release(who) => drop(lock.table.release(&key(0), &owner(who))),
                // The clock goes back as well.
                Step::Pass(time) => {
                    lock.table.purge();
                    lock.table.now = (lock.table.now + time).saturating_sub(back * 20);
                }
                Step::Purge => lock.table.purge(),
            }
        }
    }

    #[test]
    fn reentry_never_shortens_deadline(
        own in (1_u64..100, prop_oneof![Just(Deadline::Never), (0_u64..2000).prop_map(Deadline::At)]),
        others in 0_usize..5, limit in limit(), demand in any_demand(), now in 0_u64..1000, ahead in prop::bool::ANY,
    ) {
        let own = Hold { holds: own.0, token: Some(7), deadline: own.1 };
        let standing = Standing { own: Some(own), holders: others + 1, limit };
        let ahead = if ahead { Ahead::Requests } else { Ahead::NoRequest };
        match decide(&standing, &demand, ahead, now) {
            Decision::Reenter(hold) => {
                let is_repetition = matches!(demand.raise, Raise::To(to) if own.holds >= to && limit <= demand.limit);
                prop_assert!(demand.limit == limit || is_repetition);
                prop_assert_eq!(hold.deadline, own.deadline.max(Deadline::At(now + demand.lease)));
                prop_assert_eq!(hold.token, own.token);
                match demand.raise {
                    Raise::ByOne => prop_assert_eq!(hold.holds, own.holds + 1),
                    Raise::To(to) => prop_assert_eq!(hold.holds, own.holds.max(to)),
                    Raise::New => prop_assert!(false, "granted although the owner holds the lock"),
                }
            }
            Decision::NotNew => prop_assert_eq!(demand.raise, Raise::New),
            Decision::OtherLimit(named) => prop_assert!(named == limit && demand.limit != limit),
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn release_by_non_holder_changes_nothing(steps in steps(), stranger in OWNERS..OWNERS + 3) {
        let mut lock = OneLock::default();
        for step in steps {
            match step {
                Step::Acquire(who, demand) => drop(lock.acquire(who, &demand)),
                Step::Release(who) => {
                    let before = lock.holds();
                    let had = before.get(&owner(who)).copied();
                    let gone = lock.table.release(&key(0), &owner(who));
                    prop_assert_eq!(gone.filter(|hold| !hold.deadline.has_passed(lock.table.now)), had);
                    prop_assert_eq!(lock.holds().len(), before.len() - usize::from(had.is_some()));
                }
                Step::Pass(time) => lock.table.now += time,
                Step::Purge => lock.table.purge(),
            }
            let before = format!("{:?}", lock.holds());
            prop_assert_eq!(lock.table.release(&key(0), &owner(stranger)), None);
            prop_assert_eq!(format!("{:?}", lock.holds()), before);
        }
    }

    #[test]
    fn request_with_holds_is_repeatable(to in 1_u64..100, limit in limit(), times in 1_usize..5, before in 0_u64..100) {
        let mut lock = OneLock::default();
        for _ in 0..before {
            lock.acquire(0, &Demand { limit, ..demand(1) });
        }
        let repeated = Demand { limit, raise: Raise::To(to), lease: 1000 };
        lock.acquire(0, &repeated);
        let once = lock.holds();
        prop_assert_eq!(once[&owner(0)].holds, to.max(before));
        for _ in 0..times {
            lock.acquire(0, &repeated);
            prop_assert_eq!(lock.holds(), once.clone());
        }
    }

    #[test]
    fn holders_are_found_by_owner_and_by_deadline(writes in prop::collection::vec(
        (0_u32..20, prop_oneof![1 => Just(None), 8 => (0_u64..50).prop_map(|at| Some(Deadline::At(at))), 1 => Just(Some(Deadline::Never))]),
        0..60,
    ), now in 0_u64..50) {
        let mut holders = Holders::new(Limit::Shared);
        let mut plain: BTreeMap<Owner, Deadline> = BTreeMap::new();
        for (who, write) in writes {
            match write {
                Some(deadline) => {
                    holders.insert(owner(who), Hold { holds: 1, token: None, deadline });
                    plain.insert(owner(who), deadline);
                }
                None => prop_assert_eq!(holders.remove(&owner(who)).map(|hold| hold.deadline), plain.remove(&owner(who))),
            }
        }
        let counts: Vec<Deadline> = plain.values().copied().filter(|it| !it.has_passed(now)).collect();
        let mut over: Vec<(Deadline, Owner)> = plain.iter().map(|(owner, at)| (*at, owner.clone())).collect();
        over.sort();
        prop_assert_eq!(holders.first_deadline(), over.first().map(|(at, _)| *at));
        over.retain(|(at, _)| at.has_passed(now));
        prop_assert_eq!(holders.len(), plain.len());
        prop_assert_eq!(holders.is_empty(), plain.is_empty());
        prop_assert_eq!(holders.next_deadline(now), counts.iter().min().copied());
        prop_assert_eq!(holders.last_deadline(), plain.values().max().copied());
        let ends = plain.values().copied().filter(|it| *it != Deadline::Never);
        prop_assert_eq!(holders.last_end(), ends.max());
        prop_assert!(holders.expired(now).eq(over.iter().map(|(_, owner)| owner)));
        for who in 0..20 {
            let standing = holders.standing(&owner(who), now);
            prop_assert_eq!(standing.holders, counts.len());
            let own = plain.get(&owner(who)).copied().filter(|it| !it.has_passed(now));
            prop_assert_eq!(standing.own.map(|hold| hold.deadline), own);
            prop_assert_eq!(holders.get(&owner(who)).map(|hold| hold.deadline), plain.get(&owner(who)).copied());
        }
        let all = Holders::collect(Limit::MUTEX, holders.iter().map(|(owner, hold)| (owner.clone(), *hold)));
        prop_assert_eq!((all.limit(), all.len(), all.last_deadline()), (Limit::MUTEX, plain.len(), holders.last_deadline()));
        prop_assert!(all.iter().all(|(owner, hold)| plain.get(owner) == Some(&hold.deadline)));
    }

    #[test]
    fn limits_are_ordered_by_strictness_and_round_trip(one in any::<u32>(), other in any::<u32>(), holders in any::<u32>()) {
        let (first, second) = (Limit::from_number(one), Limit::from_number(other));
        prop_assert_eq!(first.number(), one);
        let both = first.allows(holders as usize) && second.allows(holders as usize);
        prop_assert_eq!(first.min(second).allows(holders as usize), both);
    }
}

#[test]
fn lease_includes_its_last_millisecond() {
    let hold = Hold { holds: 1, token: None, deadline: Deadline::after(100, 50) };
    let mut holders = Holders::new(Limit::MUTEX);
    holders.insert(owner(0), hold);
    assert_eq!(holders.standing(&owner(1), 150).holders, 1);
    assert_eq!(holders.standing(&owner(1), 151).holders, 0);
    assert_eq!([100, 149, 150, 151].map(|now| hold.deadline.remaining(now)), [Some(50), Some(1), Some(0), Some(0)]);
    assert_eq!(Deadline::Never.remaining(0), None);
    assert_eq!(Deadline::after(Millis::MAX, 1), Deadline::At(Millis::MAX));
    assert!(!Deadline::Never.has_passed(Millis::MAX));
}

#[test]
fn limit_only_becomes_stricter() {
    let mut holders = Holders::new(Limit::Shared);
    let limits = [3, 5, 0, 1, 2].map(|number| {
        holders.tighten(Limit::from_number(number));
        holders.limit().number()
    });
    assert_eq!(limits, [3, 3, 3, 1, 1]);
}

/// A token that no server can have issued is ignored, however it came into the keyspace.
#[test]
fn implausible_tokens_are_rejected() {
    let mut fence = Fence::default();
    let now = 1_000_000;
    let last = (now + FARTHEST_AHEAD) * 1000;
    assert_eq!([last, last + 1].map(|token| fence.is_credible(token, now)), [true, false]);
    fence.observe(last + 1, now);
    assert_eq!(fence.clone().next(0), 1, "the token was ignored");
    fence.observe(last, now);
    assert_eq!(fence.clone().next(0), last + 1);
    // A token that this server issued stays plausible when the clock is set back.
    assert_eq!([last, last + 1].map(|token| fence.is_credible(token, 0)), [true, false]);
    fence.observe(5, now);
    assert_eq!(fence.next(0), last + 1);
    assert_eq!(FARTHEST_AHEAD, 3_600_000, "an hour");
}

#[test]
fn hold_count_is_bounded_and_larger_foreign_count_stays() {
    let standing = |holds| {
        let own = Some(Hold { holds, token: None, deadline: Deadline::Never });
        Standing { own, holders: 1, limit: Limit::MUTEX }
    };
    let ask = |holds, raise| decide(&standing(holds), &Demand { raise, ..demand(1) }, Ahead::NoRequest, 0);
    assert!(matches!(ask(MAX_HOLDS - 1, Raise::ByOne), Decision::Reenter(hold) if hold.holds == MAX_HOLDS));
    assert_eq!(ask(MAX_HOLDS, Raise::ByOne), Decision::TooManyHolds);
    assert_eq!(ask(u64::MAX, Raise::ByOne), Decision::TooManyHolds);
    assert!(matches!(ask(u64::MAX, Raise::To(3)), Decision::Reenter(hold) if hold.holds == u64::MAX));
}

#[test]
fn freed_lock_forgets_its_limit() {
    let mut lock = OneLock::default();
    assert!(matches!(lock.acquire(0, &demand(2)), Decision::Grant(_, limit) if limit.number() == 2));
    assert!(matches!(lock.acquire(1, &demand(3)), Decision::Grant(_, limit) if limit.number() == 2));
    assert_eq!(lock.acquire(2, &demand(3)), Decision::Wait);
    lock.table.now = 2000;
    assert!(matches!(lock.table.stored.get(&key(0)), Some(Stored::Lock(holders)) if holders.len() == 2));
    assert!(matches!(lock.acquire(2, &demand(3)), Decision::Grant(_, limit) if limit.number() == 3));
}
