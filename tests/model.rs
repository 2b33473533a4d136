//! What locks are, written once more and as plainly as can be, to compare a server with. No time passes in it.

use std::collections::BTreeMap;

/// No limit: `SHARED`.
pub const SHARED: u64 = u64::MAX;

/// What an owner has of one lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// How many times it must be released.
    pub holds: u64,
    /// The token that the server gave; 0 until [`Model::tell`].
    pub token: i64,
    /// Whether it ends with the connection.
    pub ephemeral: bool,
    /// Whether it is bound to the connection on whose behalf it was granted: its loss is told there.
    pub bound: bool,
}

/// One lock.
#[derive(Clone, Debug, Default)]
pub struct Lock {
    /// The smallest limit that a holder named since it was last free.
    pub limit: u64,
    /// Who holds it.
    pub holders: BTreeMap<usize, Hold>,
}

/// One request. Owners and keys are numbers here.
#[derive(Clone, Debug)]
pub struct Request {
    /// For whom.
    pub owner: usize,
    /// For what; for several keys the limit is 1.
    pub keys: Vec<usize>,
    /// How many may hold at once.
    pub limit: u64,
    /// The hold count to reach, where one more is not what is asked for.
    pub holds: Option<u64>,
    /// Whether the hold is to end with the connection.
    pub ephemeral: bool,
    /// Whether it is made on behalf of a session, to which every hold is bound.
    pub of_session: bool,
}

/// The token that a grant is expected to carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// That of the hold.
    Same(i64),
    /// One greater than all before.
    New,
}

/// What is expected of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Granted at once.
    Granted(Token),
    /// Not granted, and not waiting.
    Refused,
    /// Waiting.
    Waits,
    /// Waiting would close a cycle.
    Deadlock,
    /// A re-entry under another limit than the lock's.
    OtherLimit,
    /// Of several locks, the owner holds some, or not all under one token.
    HoldsSome,
}

/// All locks, and all who wait in order of arrival: an owner at most once.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// Locks that are held.
    pub locks: BTreeMap<usize, Lock>,
    /// Requests that wait.
    pub queue: Vec<Request>,
}

impl Model {
    /// A request, that waits if need be and `may_wait`.
    pub fn ask(&mut self, request: &Request, may_wait: bool) -> Answer {
        if request.keys.iter().any(|key| self.contradicts(*key, request)) {
            return Answer::OtherLimit;
        }
        let mut tokens: Vec<Option<i64>> =
            request.keys.iter().map(|key| self.hold(request.owner, *key).map(|hold| hold.token)).collect();
        tokens.dedup();
        if tokens.len() > 1 {
            return Answer::HoldsSome;
        }
        if self.admits(request, self.queue.len()) {
            return Answer::Granted(self.grant(request));
        }
        if !may_wait {
            return Answer::Refused;
        }
        if self.closes_a_cycle(request) {
            return Answer::Deadlock;
        }
        self.wait(request);
        Answer::Waits
    }

    /// A request waits.
    pub fn wait(&mut self, request: &Request) {
        self.queue.push(request.clone());
    }

    /// Gives holds back until `left` are left, or one; what is left, none if it is not held.
    pub fn release(&mut self, owner: usize, key: usize, left: Option<u64>) -> Option<u64> {
        let hold = self.locks.get_mut(&key)?.holders.get_mut(&owner)?;
        hold.holds = left.map_or(hold.holds - 1, |left| left.min(hold.holds));
        let holds = hold.holds;
        if holds == 0 {
            self.end(owner, key);
        }
        Some(holds)
    }

    /// Ends a hold, whatever its count.
    pub fn end(&mut self, owner: usize, key: usize) {
        if let Some(lock) = self.locks.get_mut(&key) {
            lock.holders.remove(&owner);
            if lock.holders.is_empty() {
                self.locks.remove(&key);
            }
        }
    }

    /// Breaks a lock; how many held it.
    pub fn force(&mut self, key: usize) -> usize {
        self.locks.remove(&key).map_or(0, |lock| lock.holders.len())
    }

    /// An owner waits no longer.
    pub fn leave(&mut self, owner: usize) {
        self.queue.retain(|request| request.owner != owner);
    }

    /// An owner's connection ends.
    pub fn crash(&mut self, owner: usize) {
        self.leave(owner);
        for key in self.held_by(owner) {
            if self.locks[&key].holders[&owner].ephemeral {
                self.end(owner, key);
            } else if let Some(hold) = self.locks.get_mut(&key).and_then(|lock| lock.holders.get_mut(&owner)) {
                hold.bound = false;
            }
        }
    }

    /// Every connection ends at once, and with it the queue and the bindings.
    pub fn restart(&mut self) {
        self.queue.clear();
        for hold in self.locks.values_mut().flat_map(|lock| lock.holders.values_mut()) {
            hold.ephemeral = false;
            hold.bound = false;
        }
    }

    /// Grants all that can be granted, first come, first served.
    pub fn serve(&mut self) -> Vec<(Request, Token)> {
        let mut served = Vec::new();
        while let Some(place) = (0..self.queue.len()).find(|&place| self.admits(&self.queue[place], place)) {
            let request = self.queue.remove(place);
            let token = self.grant(&request);
            served.push((request, token));
        }
        served
    }

    /// Notes the token that the server gave.
    pub fn tell(&mut self, request: &Request, token: i64) {
        for key in &request.keys {
            if let Some(hold) = self.locks.get_mut(key).and_then(|lock| lock.holders.get_mut(&request.owner)) {
                hold.token = token;
            }
        }
    }

    /// The locks that an owner holds.
    pub fn held_by(&self, owner: usize) -> Vec<usize> {
        self.locks.iter().filter(|(_, lock)| lock.holders.contains_key(&owner)).map(|(key, _)| *key).collect()
    }

    /// Whether an owner waits.
    pub fn waits(&self, owner: usize) -> bool {
        self.queue.iter().any(|request| request.owner == owner)
    }

    /// Who waits for a key, in order.
    pub fn waiters(&self, key: usize) -> Vec<usize> {
        self.queue.iter().filter(|request| request.keys.contains(&key)).map(|request| request.owner).collect()
    }

    fn hold(&self, owner: usize, key: usize) -> Option<&Hold> {
        self.locks.get(&key)?.holders.get(&owner)
    }

    fn contradicts(&self, key: usize, request: &Request) -> bool {
        let Some(hold) = self.hold(request.owner, key) else { return false };
        let limit = self.locks[&key].limit;
        // A count that is there already may be named again under a larger limit.
        let is_repeated = request.holds.is_some_and(|holds| hold.holds >= holds) && limit <= request.limit;
        limit != request.limit && !is_repeated
    }

    /// The rule. `place`: how many of the queue came before.
    fn admits(&self, request: &Request, place: usize) -> bool {
        request.keys.iter().all(|key| {
            let somebody_ahead = self.queue[..place].iter().any(|other| other.keys.contains(key));
            let (holders, limit) = self.locks.get(key).map_or((0, SHARED), |it| (it.holders.len() as u64, it.limit));
            self.hold(request.owner, *key).is_some() || (!somebody_ahead && holders < request.limit.min(limit))
        })
    }

    fn grant(&mut self, request: &Request) -> Token {
        let token = self.hold(request.owner, request.keys[0]).map(|hold| hold.token);
        for key in &request.keys {
            let lock = self.locks.entry(*key).or_insert(Lock { limit: SHARED, holders: BTreeMap::new() });
            lock.limit = lock.limit.min(request.limit);
            let none = Hold { holds: 0, token: 0, ephemeral: false, bound: false };
            let hold = lock.holders.entry(request.owner).or_insert(none);
            hold.holds = request.holds.map_or(hold.holds + 1, |holds| holds.max(hold.holds));
            hold.ephemeral |= request.ephemeral;
            hold.bound |= request.ephemeral || request.of_session;
        }
        token.map_or(Token::New, Token::Same)
    }

    /// Whether an owner would wait for itself in the end.
    fn closes_a_cycle(&self, request: &Request) -> bool {
        let mut reached = self.in_the_way(request, self.queue.len());
        let mut place = 0;
        while let Some(other) = reached.get(place).copied() {
            place += 1;
            let next = self.queue.iter().enumerate().filter(|(_, waiting)| waiting.owner == other);
            for owner in next.flat_map(|(place, waiting)| self.in_the_way(waiting, place)) {
                if !reached.contains(&owner) {
                    reached.push(owner);
                }
            }
        }
        reached.contains(&request.owner)
    }

    /// The owners for whom a request has to wait: the holder of a lock that is held with limit 1, and who waits for several
    /// keys ahead of it. Where more than one may hold, another place would do as well.
    fn in_the_way(&self, request: &Request, place: usize) -> Vec<usize> {
        let mut owners = Vec::new();
        for key in request.keys.iter().filter(|key| self.hold(request.owner, **key).is_none()) {
            let lock = self.locks.get(key);
            if lock.is_none_or(|lock| lock.limit == 1) {
                owners.extend(lock.into_iter().flat_map(|lock| lock.holders.keys().copied()));
                let ahead = self.queue[..place].iter().filter(|it| it.keys.len() > 1 && it.keys.contains(key));
                owners.extend(ahead.map(|it| it.owner));
            }
        }
        owners
    }
}
