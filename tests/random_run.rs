//! Random requests on a real server. Each reply, and the state after it, is compared with the [model](crate::model).
//!
//! An owner has a connection of its own that blocks, or requests through a session. All leases are longer than any wait,
//! except those that a step ends and waits for.

mod event_queue;

use std::collections::{BTreeMap, VecDeque};

use redis::Value;
use support::{Random, Raw, Server};

use crate::lines::{Commands, Reply, SOON, arrives};
use crate::model::{Answer, Model, Request, SHARED, Token};
use event_queue::EventQueue;

const LEASE: &str = "LEASE 3600000";

/// Percentages of the kinds of steps. The rest are requests.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Connections, each with its own owner.
    pub owners: usize,
    /// Locks.
    pub keys: usize,
    /// Releases of a hold.
    pub release: u64,
    /// Rare steps: renewals, releases without a hold, forcing, expiry, waits that time out.
    pub rare: u64,
    /// Connections that break.
    pub crash: u64,
    /// Waits that another client ends.
    pub unblock: u64,
    /// Requests for several keys, among all requests.
    pub several: u64,
    /// Requests that may wait, among all requests.
    pub wait: u64,
    /// Sessions. With some, every second owner requests through one of them, and does not block.
    pub sessions: usize,
}

/// Counts what happened, to show that a run covered enough.
#[derive(Clone, Debug, Default)]
pub struct Coverage(BTreeMap<&'static str, u64>);

impl Coverage {
    /// The number of times that it happened.
    pub fn count(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }

    fn note(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }
}

/// A server and its model.
pub struct Run {
    /// The server.
    pub server: Server,
    /// What happened.
    pub coverage: Coverage,
    mix: Mix,
    random: Random,
    model: Model,
    clients: Vec<Raw>,
    event_queues: Vec<EventQueue>,
    /// The owners' names. An owner that was cancelled gets a new one.
    names: Vec<String>,
    /// The last request of each owner, for repetitions.
    lines: Vec<String>,
    ids: Vec<i64>,
    control: Raw,
    newest: i64,
    /// The last steps, printed if server and model differ.
    story: VecDeque<String>,
}

impl Drop for Run {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let story: Vec<&str> = self.story.iter().map(String::as_str).collect();
            eprintln!(
                "the last steps:
{}",
                story.join("\n")
            );
        }
    }
}

impl Run {
    fn log(&mut self, what: String) {
        const LINES: usize = 60;
        if self.story.len() == LINES {
            self.story.pop_front();
        }
        self.story.push_back(what);
    }

    /// A run without any holds.
    pub fn new(server: Server, mix: Mix, random: Random) -> Self {
        let control = server.raw();
        let mut run = Self {
            server,
            coverage: Coverage::default(),
            mix,
            random,
            model: Model::default(),
            clients: Vec::new(),
            event_queues: Vec::new(),
            names: (0..mix.owners).map(|owner| format!("o{owner}")).collect(),
            lines: vec![String::new(); mix.owners],
            ids: Vec::new(),
            control,
            newest: 0,
            story: VecDeque::new(),
        };
        run.connect();
        run
    }

    /// Runs one random step.
    pub fn step(&mut self) {
        let mut owner = self.random.index(self.mix.owners);
        while self.model.waits(owner) {
            if self.random.chance(self.mix.unblock) {
                return match self.session_of(owner) {
                    None => self.unblock(owner),
                    Some(session) => self.cancel_or_repeat(owner, session),
                };
            }
            if self.random.chance(self.mix.crash) {
                return self.crash(owner);
            }
            owner = self.random.index(self.mix.owners);
        }
        let dice = self.random.below(100);
        let Mix { release, rare, crash, .. } = self.mix;
        let held = self.model.held_by(owner);
        if dice < release && !held.is_empty() {
            let key = *self.random.pick(&held);
            self.release(owner, key);
        } else if (release..release + rare).contains(&dice) {
            self.do_something_rare(owner);
        } else if (release + rare..release + rare + crash).contains(&dice) {
            self.crash(owner);
        } else {
            self.acquire(owner);
        }
    }

    /// Kills the server and restarts it from its append-only file.
    pub fn restart(&mut self) {
        self.server.kill9();
        self.server.restart();
        self.model.restart();
        self.control = self.server.raw();
        self.connect();
        self.compare_all();
        self.coverage.note("restart");
    }

    /// Compares every lock, and checks that waiting clients have no reply.
    #[track_caller]
    pub fn compare_all(&mut self) {
        for key in 0..self.mix.keys {
            assert_eq!(self.actual(key), self.expected(key), "lock {key} of {:#?}", self.model);
        }
        for request in &self.model.queue {
            assert!(self.clients[request.owner].pending(), "owner {} waits in {:#?}", request.owner, self.model);
        }
        self.event_queues.iter_mut().for_each(EventQueue::assert_empty);
    }

    fn connect(&mut self) {
        self.clients = (0..self.mix.owners).map(|_| self.server.raw()).collect();
        self.ids = self.clients.iter_mut().map(Raw::client_id).collect();
        self.event_queues = (0..self.mix.sessions).map(|_| EventQueue::new(&self.server)).collect();
    }

    /// The session through which an owner requests, if any.
    fn session_of(&self, owner: usize) -> Option<usize> {
        (self.mix.sessions > 0 && owner % 2 == 1).then(|| owner / 2 % self.mix.sessions)
    }

    /// The reply to a request, or `None` if it waits: a client is blocked, or a session will get an event.
    fn begin(&mut self, owner: usize, line: &str) -> Option<Value> {
        self.lines[owner] = line.to_owned();
        match self.session_of(owner) {
            None => self.clients[owner].begin(line),
            Some(_) => Some(self.clients[owner].run(line)).filter(|reply| !is_waiting(reply)),
        }
    }

    fn acquire(&mut self, owner: usize) {
        let request = self.any_request(owner);
        let may_wait = self.random.chance(self.mix.wait);
        let mut line = self.line_of(&request);
        if may_wait {
            line += " WAIT 1800000";
        }
        let reply = self.begin(owner, &line);
        self.log(format!("{line}: {reply:?}"));
        let expected = self.model.ask(&request, may_wait);
        match (expected, &reply) {
            (Answer::Waits, None) => self.coverage.note("waits"),
            (Answer::Refused, Some(Value::Nil)) => self.coverage.note("refused"),
            (Answer::Deadlock, Some(Value::ServerError(error))) if error.code() == "DEADLOCK" => {
                self.coverage.note("deadlock");
            }
            (Answer::OtherLimit, Some(Value::ServerError(error))) if error.code() == "ERR" => {
                self.coverage.note("other limit");
            }
            (Answer::HoldsSome, Some(Value::ServerError(error)))
                if error.details().is_some_and(|it| it.starts_with("the owner holds some of these locks")) =>
            {
                self.coverage.note("holds some");
            }
            (Answer::Granted(token), Some(Value::Int(got))) => {
                self.check_token(&request, token, *got);
                self.coverage.note("granted");
            }
            _ => panic!("{line}: expected {expected:?}, got {reply:?} in {:#?}", self.model),
        }
        self.settle(&request.keys);
    }

    fn line_of(&self, request: &Request) -> String {
        let owner = &self.names[request.owner];
        let mut line = match request.keys[..] {
            [key] => format!("LOCK.ACQUIRE k{key} {owner} {LEASE}"),
            _ => {
                let keys: Vec<String> = request.keys.iter().map(|key| format!("k{key}")).collect();
                format!("LOCK.MACQUIRE {} {} {owner} {LEASE}", keys.len(), keys.join(" "))
            }
        };
        match (request.keys.len(), request.limit) {
            (1, SHARED) => line += " SHARED",
            (1, 1) => {}
            (1, limit) => line += &format!(" LIMIT {limit}"),
            _ => {}
        }
        if let Some(holds) = request.holds {
            line += &format!(" HOLDS {holds}");
        }
        if request.ephemeral {
            line += " EPHEMERAL";
        }
        if let Some(session) = self.session_of(request.owner) {
            line += &format!(" SESSION {}", self.event_queues[session].id);
        }
        line
    }

    fn any_request(&mut self, owner: usize) -> Request {
        let mut all: Vec<usize> = (0..self.mix.keys).collect();
        let several = self.random.chance(self.mix.several);
        let count = if several { 2 + self.random.index(2) } else { 1 };
        // A holder of some of several locks gets an error, except for re-entries.
        let held = self.model.held_by(owner);
        if several && held.len() + count <= all.len() && self.random.chance(80) {
            all.retain(|key| !held.contains(key));
        }
        let keys = self.random.some(&all, count);
        let mut limit = if several { 1 } else { *self.random.pick(&[1, 2, 3, SHARED]) };
        // Most repeated requests name the lock's limit.
        if let [key] = keys[..]
            && let Some(lock) = self.model.locks.get(&key)
            && self.random.chance(60)
        {
            limit = lock.limit;
        }
        let holds = self.random.chance(10).then(|| 1 + self.random.index(3) as u64);
        let ephemeral = self.random.chance(30);
        Request { owner, keys, limit, holds, ephemeral, of_session: self.session_of(owner).is_some() }
    }

    fn release(&mut self, owner: usize, key: usize) {
        let mut line = format!("LOCK.RELEASE k{key} {}", self.names[owner]);
        let mut left = None;
        match self.random.index(5) {
            0 => {
                line += " ALL";
                left = Some(0);
            }
            1 => {
                let holds = self.random.index(3) as u64;
                line += &format!(" HOLDS {holds}");
                left = Some(holds);
            }
            2 => line += &format!(" TOKEN {}", self.model.locks[&key].holders[&owner].token),
            _ => {}
        }
        let reply = self.clients[owner].run(&line);
        let expected = self.model.release(owner, key, left);
        let expected = expected.map_or(Value::Nil, |left| Value::Int(i64::from(left == 0)));
        self.log(format!("{line}: {reply:?}"));
        assert_eq!(reply, expected, "{line} in {:#?}", self.model);
        self.coverage.note("released");
        self.settle(&[key]);
    }

    fn do_something_rare(&mut self, owner: usize) {
        let key = self.random.index(self.mix.keys);
        let token = self.model.locks.get(&key).and_then(|lock| lock.holders.get(&owner)).map(|hold| hold.token);
        let name = self.names[owner].clone();
        match self.random.index(10) {
            0..3 => {
                let reply = self.clients[owner].run(&format!("LOCK.RENEW k{key} {name} {LEASE}"));
                assert_eq!(reply, token.map_or(Value::Nil, Value::Int), "renewal in {:#?}", self.model);
                self.log(format!("renewal of k{key} by {name}"));
                self.coverage.note("renewal");
            }
            3..6 => {
                let wrong = token.map_or(1, |token| token - 1);
                let reply = self.clients[owner].run(&format!("LOCK.RELEASE k{key} {name} TOKEN {wrong}"));
                assert!(reply.is_null(), "release with another token: {reply:?} in {:#?}", self.model);
                self.coverage.note("not held");
            }
            6 => {
                let reply = self.clients[owner].run(&format!("LOCK.FORCE k{key}"));
                let losers =
                    self.model.locks.get(&key).map_or(Vec::new(), |lock| lock.holders.keys().copied().collect());
                for loser in losers {
                    self.expect_lost_event(key, loser, "forced");
                }
                assert_eq!(reply, Value::Int(self.model.force(key) as i64));
                self.log(format!("k{key} forced"));
                self.coverage.note("forced");
            }
            7 => self.time_out(owner),
            _ => self.expire(key),
        }
        self.settle(&[key]);
    }

    /// A wait that times out before any other step.
    fn time_out(&mut self, owner: usize) {
        let request = self.any_request(owner);
        if self.model.clone().ask(&request, true) == Answer::Waits {
            let line = self.line_of(&request) + " WAIT 1";
            let reply = self.clients[owner].run(&line);
            match self.session_of(owner) {
                None => assert!(reply.is_null(), "{reply:?}"),
                Some(session) => {
                    assert!(is_waiting(&reply), "{reply:?}");
                    self.event_queues[session].timeout(&request.keys, &self.names[owner]);
                    self.coverage.note("read a timeout");
                }
            }
            self.coverage.note("timed out");
        }
    }

    /// Ends one lease, and waits for its end.
    fn expire(&mut self, key: usize) {
        let Some(lock) = self.model.locks.get(&key) else { return };
        let holders: Vec<usize> = lock.holders.keys().copied().collect();
        let holder = *self.random.pick(&holders);
        let reply = self.control.run(&format!("LOCK.RENEW k{key} {} LEASE 1", self.names[holder]));
        reply.token();
        self.log(format!("the lease of {} on k{key} ends", self.names[holder]));
        self.expect_lost_event(key, holder, "expired");
        self.model.end(holder, key);
        self.settle_later();
        self.coverage.note("expired");
    }

    /// If the hold is bound to a session, waits for its event: each such loss is notified once.
    fn expect_lost_event(&mut self, key: usize, owner: usize, why: &str) {
        let hold = &self.model.locks[&key].holders[&owner];
        if let (Some(session), true) = (self.session_of(owner), hold.bound) {
            self.event_queues[session].lost(key, &self.names[owner], hold.token, why);
            self.coverage.note("read a loss");
        }
    }

    fn crash(&mut self, owner: usize) {
        match self.session_of(owner) {
            None => self.crash_connection(owner),
            Some(session) => self.crash_session(session),
        }
        self.settle_later();
    }

    /// All owners that request through the session are affected.
    fn crash_session(&mut self, session: usize) {
        let fresh = EventQueue::new(&self.server);
        std::mem::replace(&mut self.event_queues[session], fresh).reset();
        self.log(format!("session {session} breaks its connection"));
        for owner in 0..self.mix.owners {
            if self.session_of(owner) == Some(session) {
                self.model.crash(owner);
            }
        }
        self.coverage.note("session crash");
    }

    fn crash_connection(&mut self, owner: usize) {
        let fresh = self.server.raw();
        std::mem::replace(&mut self.clients[owner], fresh).reset();
        self.ids[owner] = self.clients[owner].client_id();
        self.log(format!("o{owner} breaks its connection"));
        self.model.crash(owner);
        self.coverage.note("crash");
    }

    fn unblock(&mut self, owner: usize) {
        let line = format!("CLIENT UNBLOCK {}", self.ids[owner]);
        assert_eq!(self.control.run(&line), Value::Int(1), "owner {owner} waits in {:#?}", self.model);
        assert!(arrives(&mut self.clients[owner]).is_null());
        let keys = self.model.queue.iter().find(|request| request.owner == owner).map(|request| request.keys.clone());
        self.log(format!("o{owner} unblocked"));
        self.model.leave(owner);
        self.coverage.note("unblocked");
        self.settle(&keys.unwrap_or_default());
    }

    /// A session cancels a request, or repeats it and keeps its place.
    fn cancel_or_repeat(&mut self, owner: usize, session: usize) {
        // An owner with holds keeps its name.
        if self.model.held_by(owner).is_empty() && self.random.chance(50) {
            return self.cancel(owner, session);
        }
        let line = self.lines[owner].clone();
        let reply = self.clients[owner].run(&line);
        self.log(format!("repeated {line}: {reply:?}"));
        assert!(is_waiting(&reply), "{reply:?} in {:#?}", self.model);
        self.coverage.note("repeated");
    }

    fn cancel(&mut self, owner: usize, session: usize) {
        let request = self.model.queue.iter().find(|request| request.owner == owner);
        let keys = request.map(|request| request.keys.clone()).unwrap_or_default();
        let key = *self.random.pick(&keys);
        let line = format!("LOCK.RELEASE k{key} {} ALL", self.names[owner]);
        assert_eq!(self.clients[owner].run(&line), Value::Int(1), "{line} in {:#?}", self.model);
        self.event_queues[session].expect_withdrawal(&keys, &self.names[owner]);
        self.names[owner] = format!("o{owner}'{}", self.coverage.count("cancelled"));
        self.log(line);
        self.model.leave(owner);
        self.coverage.note("cancelled");
        self.settle(&keys);
    }

    /// Reads the replies of all clients that were granted a lock, and compares a part of the state.
    fn settle(&mut self, keys: &[usize]) {
        self.take_replies();
        for &key in keys {
            if self.random.chance(10) {
                assert_eq!(self.actual(key), self.expected(key), "lock {key} of {:#?}", self.model);
            }
        }
        if self.random.chance(1) {
            self.compare_all();
        }
    }

    /// The same after a change that the server notices later.
    fn settle_later(&mut self) {
        self.take_replies();
        for key in 0..self.mix.keys {
            let expected = self.expected(key);
            let mut actual = None;
            let same = support::eventually(SOON, || {
                actual = self.actual(key);
                actual == expected
            });
            assert!(same, "lock {key} is {actual:#?}, expected {expected:#?}");
        }
    }

    fn take_replies(&mut self) {
        let mut last: BTreeMap<usize, i64> = BTreeMap::new();
        let before = self.newest;
        for (request, token) in self.model.serve() {
            let got = self.expect_granted_event(&request);
            match token {
                Token::Same(token) => assert_eq!(got, token, "{request:?}"),
                Token::New => assert!(got > before, "{request:?}: {got} is not greater than {before}"),
            }
            for &key in &request.keys {
                let previous = last.insert(key, got).unwrap_or(0);
                assert!(got >= previous, "{request:?} was served out of order");
            }
            self.newest = self.newest.max(got);
            self.model.record_token(&request, got);
            self.log(format!("served: {request:?}"));
            self.coverage.note("served");
        }
    }

    /// Waits for the token of a queued request.
    fn expect_granted_event(&mut self, request: &Request) -> i64 {
        if let Some(session) = self.session_of(request.owner) {
            self.coverage.note("served by an event");
            return self.event_queues[session].granted(&request.keys, &self.names[request.owner]);
        }
        let got = arrives(&mut self.clients[request.owner]);
        assert!(matches!(got, Value::Int(_)), "{request:?}: {got:?}");
        got.token()
    }

    #[track_caller]
    fn check_token(&mut self, request: &Request, expected: Token, got: i64) {
        match expected {
            Token::Same(token) => assert_eq!(got, token, "{request:?} in {:#?}", self.model),
            Token::New => assert!(got > self.newest, "{request:?}: {got} is not greater than {}", self.newest),
        }
        self.newest = self.newest.max(got);
        self.model.record_token(request, got);
    }

    /// A lock as the server reports it.
    fn actual(&mut self, key: usize) -> Option<Picture> {
        let info = self.control.run(&format!("LOCK.INFO k{key}"));
        if info.is_null() {
            return None;
        }
        let holders = info.field("holders");
        let holders = holders.items();
        let limit = if holders.is_empty() { 1 } else { info.field("limit").int() };
        let holders = holders.iter().map(|holder| {
            assert!(holder.field("ttl").int() >= 0, "{holder:?}");
            let hold = (holder.field("holds").int(), holder.field("token").int(), holder.field("ephemeral").truth());
            (holder.field("owner").text(), hold)
        });
        Some(Picture { limit, holders: holders.collect(), waiters: info.field("waiters").int() })
    }

    /// A lock as the model has it.
    fn expected(&self, key: usize) -> Option<Picture> {
        let waiters = self.model.waiters(key).len() as i64;
        let Some(lock) = self.model.locks.get(&key) else {
            return (waiters > 0).then(|| Picture { limit: 1, holders: BTreeMap::new(), waiters });
        };
        let limit = if lock.limit == SHARED { 0 } else { lock.limit as i64 };
        let holders = lock.holders.iter();
        let holders =
            holders.map(|(owner, hold)| (self.names[*owner].clone(), (hold.holds as i64, hold.token, hold.ephemeral)));
        Some(Picture { limit, holders: holders.collect(), waiters })
    }
}

/// The compared properties of a lock. Without holders, the limit means nothing.
#[derive(Debug, PartialEq, Eq)]
struct Picture {
    limit: i64,
    holders: BTreeMap<String, (i64, i64, bool)>,
    waiters: i64,
}

fn is_waiting(reply: &Value) -> bool {
    *reply == Value::SimpleString("WAITING".into())
}
