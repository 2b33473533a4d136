//! The core, with the plain model beside it that checks each step.

use super::broken::{Fault, broken_serve};
use super::plain::{Ending, Plain, PlainHold, PlainLock, PlainWaiter};
use super::table::{Stored, Table};
use super::{ELSEWHERE, Locks, key, keys, number_of, number_of_key, owner, serve};
use crate::lock::serve::{Change, Sight, View, WaitEnd};
use crate::lock::{
    Ahead, Deadline, Decision, Demand, Hold, Holders, Limit, LockKey, Millis, Owner, Queue, Raise, Waiter, WaiterId,
    all_or_none, decide,
};

/// The locks, as the core has them and in the plain model.
#[derive(Clone, Debug, Default)]
pub struct CheckedLocks {
    pub table: Table,
    pub plain: Plain,
    /// The core's first mistake.
    pub wrong: Option<String>,
}

impl CheckedLocks {
    fn record_mistake(&mut self, what: impl FnOnce() -> String) {
        self.wrong.get_or_insert_with(what);
    }

    fn check(&mut self, right: bool, what: impl FnOnce() -> String) {
        if !right {
            self.record_mistake(what);
        }
    }

    fn compare(&mut self, key: &LockKey, asked: &Owner, seen: Sight) {
        let lock = self.plain.lock(number_of_key(key));
        let Sight::Lock(seen) = seen else {
            let right = lock.not_a_lock;
            self.check(right, || "a lock is read as something else".into());
            return;
        };
        let own = lock.hold(number_of(asked));
        let same = !lock.not_a_lock
            && seen.holders == lock.holders.len()
            && (lock.holders.is_empty() || seen.limit.number() == lock.limit)
            && seen.own.map(|own| (own.holds, own.deadline)) == own.map(|own| (own.holds, deadline(own)));
        if !same {
            let wrong = format!("the lock is {lock:?}, and the core reads {seen:?}");
            self.record_mistake(|| wrong);
        }
    }
}

fn deadline(hold: &PlainHold) -> Deadline {
    hold.until.map_or(Deadline::Never, Deadline::At)
}

impl View for CheckedLocks {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight {
        let seen = self.table.look(key, owner);
        self.compare(key, owner, seen);
        seen
    }
}

impl Locks for CheckedLocks {
    fn holders(&mut self, key: &LockKey) -> Vec<Owner> {
        self.table.holders(key)
    }

    fn settle(&mut self, waiter: &Waiter<()>, end: WaitEnd) {
        let Some(place) = self.plain.place(waiter.id) else {
            return self.record_mistake(|| format!("{:?} is served without a wait", waiter.id));
        };
        let right = self.plain.ending(place);
        let ending = match &end {
            WaitEnd::Granted(_) => Ending::Granted,
            WaitEnd::NotALock | WaitEnd::TooLarge(_) => Ending::NotALock,
            WaitEnd::Refused(refusal) => ending_of(*refusal),
        };
        self.check(right == Some(ending), || format!("{:?} gets {end:?} instead of {right:?}", waiter.id));
        self.plain.end(place, ending, self.table.now);
        self.table.settle(waiter, end);
    }
}

/// A queue and its locks.
#[derive(Debug, Default)]
pub struct World {
    pub queue: Queue<()>,
    pub locks: CheckedLocks,
    /// The injected fault.
    pub fault: Option<Fault>,
}

impl World {
    /// The world that the plain model describes, with new waiter ids.
    pub fn from_plain(plain: &Plain, fault: Option<Fault>) -> Self {
        let mut world = Self { fault, ..Self::default() };
        for (&number, lock) in &plain.locks {
            world.store(number, lock.clone());
        }
        world.locks.plain.grants = plain.grants;
        world.locks.table.fence.observe(plain.grants, 0);
        for waiter in &plain.waiters {
            world.join(waiter.clone(), None);
        }
        world
    }

    /// Writes a key without the core.
    pub fn store(&mut self, number: u32, lock: PlainLock) {
        let stored = if lock.not_a_lock {
            Stored::SomethingElse
        } else {
            let mut holders = Holders::new(Limit::from_number(lock.limit));
            for hold in &lock.holders {
                let it = Hold { holds: hold.holds, token: hold.grant, deadline: deadline(hold) };
                holders.insert(owner(hold.owner), it);
            }
            Stored::Lock(holders)
        };
        self.locks.table.stored.insert(key(number), stored);
        self.locks.plain.locks.insert(number, lock);
    }

    /// Deletes a key, whatever it holds.
    pub fn delete(&mut self, number: u32) {
        self.locks.table.stored.remove(&key(number));
        self.locks.plain.locks.remove(&number);
    }

    /// A request arrives. Returns how it ends immediately, or `None` if it waits.
    pub fn arrive(&mut self, waiter: PlainWaiter, until: Option<Millis>) -> Option<Ending> {
        let right = self.locks.plain.ending_at_once(&waiter);
        let ending = self.decide_at_once(&waiter);
        self.locks.check(ending == right, || format!("{waiter:?} gets {ending:?} immediately instead of {right:?}"));
        match ending {
            None => {
                let (arrived, keys) = (waiter.id.arrived, waiter.keys.clone());
                self.join(waiter, until);
                // Ahead of others, it may be granted.
                let is_first = |number: &u32| {
                    let key = key(*number);
                    let head = self.queue.head(key.db, &key.name);
                    head.is_some_and(|id| id.arrived == arrived && self.queue.has_behind(&key, id))
                };
                self.serve(keys.into_iter().filter(is_first).map(|key| (key, Change::Freed)).collect());
            }
            Some(Ending::Granted) => self.locks.plain.grant(&waiter, self.locks.table.now),
            Some(_) => {}
        }
        ending
    }

    /// Decides like a command: all keys or none.
    fn decide_at_once(&mut self, waiter: &PlainWaiter) -> Option<Ending> {
        let mut decisions = Vec::new();
        let keys = keys(&waiter.keys);
        let owner = owner(waiter.owner);
        for key in &keys {
            let Sight::Lock(standing) = self.locks.look(key, &owner) else { return Some(Ending::NotALock) };
            let barge = self.fault == Some(Fault::GrantsNewRequestFirst);
            let ahead =
                if self.queue.head(key.db, &key.name).is_none() || barge { Ahead::NoRequest } else { Ahead::Requests };
            let decision = decide(&standing, &demand_of(waiter), ahead, self.locks.table.now);
            if decision.is_refusal() {
                return Some(ending_of(decision));
            }
            decisions.push(decision);
        }
        match all_or_none(&decisions) {
            Ok(()) => {
                self.locks.table.write(&keys, &owner, &decisions);
                Some(Ending::Granted)
            }
            Err(Decision::Wait) => None,
            Err(refusal) => Some(ending_of(refusal)),
        }
    }

    fn join(&mut self, waiter: PlainWaiter, until: Option<Millis>) {
        let demand = demand_of(&waiter);
        let arrived = if self.fault == Some(Fault::IgnoresWaited) { Millis::MAX } else { waiter.id.arrived };
        let WaiterId { ticket, .. } =
            self.queue.join(owner(waiter.owner), keys(&waiter.keys), demand, arrived, until, ());
        let id = WaiterId { arrived: waiter.id.arrived, ticket };
        self.locks.plain.join(PlainWaiter { id, ..waiter });
    }

    /// A wait ends because its client disconnected or its timeout passed.
    pub fn leave(&mut self, id: WaiterId) {
        let Some(place) = self.locks.plain.place(id) else { return };
        let gone = self.locks.plain.waiters.remove(place);
        if self.fault != Some(Fault::KeepsCancelled) {
            self.queue.leave(id);
        }
        if self.fault != Some(Fault::IgnoresCancellation) {
            self.serve(gone.keys.iter().map(|&key| (key, Change::Freed)).collect());
        }
    }

    /// Serves all requests that can be granted after the `changed` locks have changed.
    pub fn serve(&mut self, changed: Vec<(u32, Change)>) {
        let now = self.locks.table.now;
        let changed = changed.into_iter().map(|(number, change)| (key(number), change));
        match self.fault {
            None => serve(&mut self.queue, &mut self.locks, changed, now),
            Some(fault) => broken_serve(fault, &mut self.queue, &mut self.locks, changed, now),
        }
    }

    /// Checks everything: no step was wrong, no request that could be granted waits, and the queue equals the plain model's.
    pub fn check(&self) -> Result<(), String> {
        if let Some(wrong) = &self.locks.wrong {
            return Err(wrong.clone());
        }
        let plain = &self.locks.plain;
        if let Some((place, ending)) = plain.first_to_end() {
            return Err(format!("{:?} still waits instead of {ending:?}", plain.waiters[place]));
        }
        for (&key, lock) in &plain.locks {
            if lock.limit != 0 && lock.holders.len() > lock.limit as usize && !lock.not_a_lock {
                return Err(format!("too many holders of {key}: {lock:?}"));
            }
        }
        self.check_queue()
    }

    fn check_queue(&self) -> Result<(), String> {
        let plain = &self.locks.plain;
        let order: Vec<WaiterId> = self.queue.iter().map(|waiter| waiter.id).collect();
        let right: Vec<WaiterId> = plain.waiters.iter().map(|waiter| waiter.id).collect();
        let mut contended = 0;
        let mut same = order == right && self.queue.len() == right.len() && self.queue.is_empty() == right.is_empty();
        for number in (0..4).chain(ELSEWHERE..ELSEWHERE + 2) {
            let (key, right) = (key(number), plain.lane(number));
            let lane: Vec<WaiterId> = self.queue.lane(key.db, &key.name).map(|waiter| waiter.id).collect();
            same &= lane == right && self.queue.waiting(key.db, &key.name) == right.len();
            same &= self.queue.head(key.db, &key.name) == right.first().copied();
            contended += usize::from(!right.is_empty());
            let is_crowd = self.queue.longest_queues(key.db).any(|(it, n)| it == key && n == right.len());
            same &= is_crowd == (right.len() > 1);
        }
        same &= self.queue.contended() == contended;
        for number in 0..6 {
            let right = plain.waiters.iter().filter(|waiter| waiter.owner == number).map(|waiter| waiter.id);
            same &= self.queue.of_actor(&owner(number), 100).map(|waiter| waiter.id).eq(right.clone());
            same &= self.queue.waits(&owner(number)) != (right.count() == 0);
        }
        if same { Ok(()) } else { Err(format!("the queue has {order:?} instead of {right:?}")) }
    }
}

fn ending_of(refusal: Decision) -> Ending {
    match refusal {
        Decision::NotNew => Ending::NotNew,
        Decision::HoldsSome => Ending::HoldsSome,
        _ => Ending::OtherLimit,
    }
}

fn demand_of(waiter: &PlainWaiter) -> Demand {
    let raise = match waiter.to {
        None => Raise::ByOne,
        Some(0) => Raise::New,
        Some(holds) => Raise::To(holds),
    };
    Demand { limit: Limit::from_number(waiter.limit), raise, lease: waiter.lease }
}
