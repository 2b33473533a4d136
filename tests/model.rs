//! A plain model of locks, without time, to compare a server with.

use std::collections::BTreeMap;

/// No limit: `SHARED`.
pub const SHARED: u64 = u64::MAX;

/// An owner's hold of one lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// How many releases end it.
    pub holds: u64,
    /// The token that the server returned; 0 until [`Model::record_token`].
    pub token: i64,
    /// Whether it ends with the connection.
    pub ephemeral: bool,
    /// Whether it is bound to a session, which is notified of its loss.
    pub bound: bool,
}

/// One lock.
#[derive(Clone, Debug, Default)]
pub struct Lock {
    /// The smallest limit that a holder named since the lock was last free.
    pub limit: u64,
    /// The holders.
    pub holders: BTreeMap<usize, Hold>,
}

/// One request. Owners and keys are numbers here.
#[derive(Clone, Debug)]
pub struct Request {
    /// The owner.
    pub owner: usize,
    /// The keys; for several keys the limit is 1.
    pub keys: Vec<usize>,
    /// The limit: how many owners may hold the lock at once.
    pub limit: u64,
    /// The hold count to set, if the request names one.
    pub holds: Option<u64>,
    /// Whether the hold ends with the connection.
    pub ephemeral: bool,
    /// Whether it is made on behalf of a session, to which the hold is then bound.
    pub of_session: bool,
}

/// The token that a grant is expected to carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The hold's token.
    Same(i64),
    /// Greater than all before.
    New,
}

/// The expected reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Granted immediately.
    Granted(Token),
    /// Not granted, and not queued.
    Refused,
    /// Queued.
    Waits,
    /// Waiting would close a cycle.
    Deadlock,
    /// A re-entry with a limit other than the lock's.
    OtherLimit,
    /// The owner holds some of several locks, or all of them under several tokens.
    HoldsSome,
}

/// All locks, and the queue in order of arrival, with at most one request for each owner.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// Locks that are held.
    pub locks: BTreeMap<usize, Lock>,
    /// Requests that wait.
    pub queue: Vec<Request>,
}

impl Model {
    /// Makes a request, which is queued if necessary and `may_wait`.
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

    /// Queues a request.
    pub fn wait(&mut self, request: &Request) {
        self.queue.push(request.clone());
    }

    /// Releases holds until `left` are left, or one hold. Returns how many are left, or none if the owner holds nothing.
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

    /// Forces the lock free. Returns how many owners held it.
    pub fn force(&mut self, key: usize) -> usize {
        self.locks.remove(&key).map_or(0, |lock| lock.holders.len())
    }

    /// Removes the owner's request from the queue.
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

    /// All connections end, and with them the queue and the bindings.
    pub fn restart(&mut self) {
        self.queue.clear();
        for hold in self.locks.values_mut().flat_map(|lock| lock.holders.values_mut()) {
            hold.ephemeral = false;
            hold.bound = false;
        }
    }

    /// Grants requests as far as possible, in order of arrival.
    pub fn serve(&mut self) -> Vec<(Request, Token)> {
        let mut served = Vec::new();
        while let Some(place) = (0..self.queue.len()).find(|&place| self.admits(&self.queue[place], place)) {
            let request = self.queue.remove(place);
            let token = self.grant(&request);
            served.push((request, token));
        }
        served
    }

    /// Records the token that the server returned.
    pub fn record_token(&mut self, request: &Request, token: i64) {
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

    /// Whether the owner has a queued request.
    pub fn waits(&self, owner: usize) -> bool {
        self.queue.iter().any(|request| request.owner == owner)
    }

    /// The owners that wait for a key, in order.
    pub fn waiters(&self, key: usize) -> Vec<usize> {
        self.queue.iter().filter(|request| request.keys.contains(&key)).map(|request| request.owner).collect()
    }

    fn hold(&self, owner: usize, key: usize) -> Option<&Hold> {
        self.locks.get(&key)?.holders.get(&owner)
    }

    fn contradicts(&self, key: usize, request: &Request) -> bool {
        let Some(hold) = self.hold(request.owner, key) else { return false };
        let limit = self.locks[&key].limit;
        // A count that the owner has already may be repeated with a larger limit.
        let is_repeated = request.holds.is_some_and(|holds| hold.holds >= holds) && limit <= request.limit;
        limit != request.limit && !is_repeated
    }

    /// The admission rule. `place`: how many requests of the queue precede this one.
    fn admits(&self, request: &Request, place: usize) -> bool {
        request.keys.iter().all(|key| {
            let has_earlier = self.queue[..place].iter().any(|other| other.keys.contains(key));
            let (holders, limit) = self.locks.get(key).map_or((0, SHARED), |it| (it.holders.len() as u64, it.limit));
            self.hold(request.owner, *key).is_some() || (!has_earlier && holders < request.limit.min(limit))
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

    /// Whether the owner would wait for itself.
    fn closes_a_cycle(&self, request: &Request) -> bool {
        let mut reached = self.blockers(request, self.queue.len());
        let mut place = 0;
        while let Some(other) = reached.get(place).copied() {
            place += 1;
            let next = self.queue.iter().enumerate().filter(|(_, waiting)| waiting.owner == other);
            for owner in next.flat_map(|(place, waiting)| self.blockers(waiting, place)) {
                if !reached.contains(&owner) {
                    reached.push(owner);
                }
            }
        }
        reached.contains(&request.owner)
    }

    /// The owners that a request waits for: the holder of a lock with limit 1, and owners that wait for several keys ahead of it.
    /// If more than one owner may hold the lock, another place may become free.
    fn blockers(&self, request: &Request, place: usize) -> Vec<usize> {
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
