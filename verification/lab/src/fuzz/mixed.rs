//! Mixed queues: sessions and blocking clients wait for the same locks, in their own database. The outcome of each request is
//! compared with the allowed outcomes.
//!
//! The random senders can check invariants only. Here one player sends everything, over many connections, so it knows who may
//! hold a lock and which events are due.

mod ledger;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fastrand::Rng;
use support::Raw;
use support::resp::{self, Value, encode};

use super::requests::DATABASES;
use ledger::{Ledger, LockRequest, LockState, Step, text};

/// The database of the locks, which no other request uses.
pub const DATABASE: u32 = DATABASES;

/// Locks with one holder, or any number of readers.
const LOCKS: [&str; 3] = ["mixed:0", "mixed:1", "mixed:2"];
/// A semaphore.
const PLACES: &str = "mixed:places";
/// Its limit.
const LIMIT: &str = "3";
/// A lease in ms that is longer than each hold, as long as any setting of the random senders allows.
const LEASE: &str = "40000";

/// Another user than that of the senders, with the same rights.
const USER: &str = "blue";
const SESSIONS: usize = 4;
const BLOCKERS: usize = 5;
const CALLERS: usize = 4;
/// From this number of holds on, locks are released before new ones are requested.
const HOLDS: usize = 8;
/// Requests that may still be cancelled, or repeated.
const RECENT: usize = 16;
/// Requests and replies that are printed with a violation.
const SAID: usize = 300;
/// The timeout for a reply, or an event that is due.
const PATIENCE: Duration = Duration::from_secs(30);

/// What happened in the mixed queues.
#[derive(Clone, Copy, Default)]
pub struct PlayerCounts {
    /// Requests for locks.
    pub asked: u64,
    /// Events that were read.
    pub notified: u64,
    /// Requests that were cancelled.
    pub cancelled: u64,
    /// Sessions that ended.
    pub ended: u64,
}

impl PlayerCounts {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: PlayerCounts) {
        self.asked += other.asked;
        self.notified += other.notified;
        self.cancelled += other.cancelled;
        self.ended += other.ended;
    }
}

/// Plays until `stop`, and then waits for all events that are due. The error is a violation.
pub fn play(address: SocketAddr, seed: u64, stop: &AtomicBool) -> (PlayerCounts, Result<(), String>) {
    let mut player = match Player::new(address, seed) {
        Ok(player) => player,
        Err(error) => return (PlayerCounts::default(), Err(format!("mixed queues: {error}"))),
    };
    let verdict = player.play(stop);
    player.player_counts.notified = player.ledger.notified;
    if verdict.is_err() {
        player.said.iter().for_each(|said| eprintln!("mixed queues, step {said}"));
    }
    let why = |Failure(why)| format!("mixed queues, step {}: {why}", player.step);
    (player.player_counts, verdict.map_err(why))
}

/// A violation.
struct Failure(String);

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self(why)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

struct Session {
    raw: Raw,
    name: u64,
    id: String,
    client: i64,
    is_of_user: bool,
    /// When its pending `LOCK.EVENTS` was sent, if there is one.
    asked: Option<Step>,
}

struct Blocker {
    raw: Raw,
    name: u64,
    client: i64,
    waits: Option<usize>,
}

struct Caller {
    raw: Raw,
    is_of_user: bool,
}

/// A caller's pending request.
enum PendingCall {
    LockRequest(usize),
    Cancel(usize),
    Return(usize),
    /// The reply must be an error with this code.
    Refused(&'static str),
    Any,
}

struct Player {
    address: SocketAddr,
    rng: Rng,
    ledger: Ledger,
    step: Step,
    names: u64,
    callers: Vec<Caller>,
    sessions: Vec<Session>,
    blockers: Vec<Blocker>,
    /// The newest requests of sessions, with the time of sending.
    recent: VecDeque<(usize, u64, Step)>,
    /// An ended session.
    former: Option<String>,
    /// Locks that other clients are disturbing.
    disturbed: Vec<&'static str>,
    /// The last requests and replies.
    said: VecDeque<String>,
    player_counts: PlayerCounts,
}

impl Player {
    fn new(address: SocketAddr, seed: u64) -> io::Result<Player> {
        let mut raw = connect(address, false)?;
        let make = ["ACL", "SETUSER", USER, "reset", "on", ">blue", "~*", "&*", "+@all"];
        raw.send_bytes(&encode([make]))?;
        reply(&mut raw)?;
        // Leftovers of an earlier player.
        ask(&mut raw, &format!("DEL {} {PLACES}", LOCKS.join(" ")))?;
        let callers = (0..CALLERS).map(|number| {
            let is_of_user = number == CALLERS - 1;
            Ok(Caller { raw: connect(address, is_of_user)?, is_of_user })
        });
        let mut player = Player {
            address,
            rng: Rng::with_seed(seed),
            ledger: Ledger::default(),
            step: 0,
            names: 0,
            callers: callers.collect::<io::Result<_>>()?,
            sessions: Vec::new(),
            blockers: Vec::new(),
            recent: VecDeque::new(),
            former: None,
            disturbed: Vec::new(),
            said: VecDeque::new(),
            player_counts: PlayerCounts::default(),
        };
        for number in 0..SESSIONS {
            let session = player.session(number == SESSIONS - 1)?;
            player.sessions.push(session);
        }
        for _ in 0..BLOCKERS {
            let blocker = player.blocker()?;
            player.blockers.push(blocker);
        }
        Ok(player)
    }

    fn session(&mut self, is_of_user: bool) -> io::Result<Session> {
        let mut raw = connect(self.address, is_of_user)?;
        let id = resp::session_id(&ask(&mut raw, "LOCK.SESSION")?)?;
        let client = resp::int(&ask(&mut raw, "CLIENT ID")?)?;
        Ok(Session { raw, name: self.name(), id, client, is_of_user, asked: None })
    }

    /// A session that blocks in its own requests, which may have `WATCHDOG`, and reads no events.
    fn blocker(&mut self) -> io::Result<Blocker> {
        let mut raw = connect(self.address, false)?;
        ask(&mut raw, "LOCK.SESSION")?;
        let client = resp::int(&ask(&mut raw, "CLIENT ID")?)?;
        Ok(Blocker { raw, name: self.name(), client, waits: None })
    }

    fn name(&mut self) -> u64 {
        self.names += 1;
        self.names
    }

    fn note(&mut self, who: &str, number: impl std::fmt::Display, what: impl std::fmt::Display) {
        if self.said.len() == SAID {
            self.said.pop_front();
        }
        self.said.push_back(format!("{}: {who} {number}: {what}", self.step));
    }

    fn play(&mut self, stop: &AtomicBool) -> Result<(), Failure> {
        while !stop.load(Ordering::Relaxed) {
            self.play_step()?;
            if self.rng.u32(..4) == 0 {
                self.look()?;
            }
            match self.rng.u32(..120) {
                0 => self.end_session()?,
                1 => self.end_blocker()?,
                _ => {}
            }
        }
        self.finish()
    }

    /// All connections send something, and then the replies are read: so the requests of a step meet on the server.
    fn play_step(&mut self) -> Result<(), Failure> {
        self.step += 1;
        let mut sent = Vec::new();
        for caller in 0..self.callers.len() {
            for (line, what) in self.call(caller) {
                self.note("caller", caller, &line);
                self.callers[caller].raw.send_bytes(&request(&line))?;
                sent.push((caller, what));
            }
        }
        self.sessions_ask()?;
        self.blockers_ask()?;
        for key in std::mem::take(&mut self.disturbed) {
            self.ledger.allow_loss(|ask| ask.keys.contains(&key));
        }
        for (caller, what) in sent {
            let reply = reply(&mut self.callers[caller].raw)?;
            self.note("caller", caller, format_args!("{reply:?}"));
            self.answered(what, &reply)?;
        }
        self.read_arrivals()
    }

    /// A caller's next requests, mostly one.
    fn call(&mut self, caller: usize) -> Vec<(String, PendingCall)> {
        let is_of_user = self.callers[caller].is_of_user;
        let held = self.held();
        if held.len() > HOLDS || !held.is_empty() && self.rng.u32(..3) == 0 {
            return vec![self.give_back(&held)];
        }
        match self.rng.u32(..100) {
            0..50 => self.ask_for_session(is_of_user),
            50..80 => self.cancel(is_of_user).into_iter().collect(),
            80..83 => {
                let other = self.sessions.iter().find(|session| session.is_of_user != is_of_user);
                let line = other.map(|other| format!("LOCK.ACQUIRE {PLACES} stranger WAIT 0 SESSION {}", other.id));
                line.into_iter().map(|line| (line, PendingCall::Refused("NOPERM"))).collect()
            }
            83..86 => {
                let line = self.former.take().map(|id| format!("LOCK.ACQUIRE {PLACES} stranger SESSION {id}"));
                line.into_iter().map(|line| (line, PendingCall::Refused("NOSESSION"))).collect()
            }
            86..90 => vec![self.disturb()],
            _ => vec![],
        }
    }

    /// Granted requests whose owners have not begun to release.
    fn held(&mut self) -> Vec<usize> {
        let live: Vec<usize> = self.ledger.live.iter().copied().collect();
        live.into_iter()
            .filter(|number| {
                let ask = self.ledger.get(*number);
                ask.token.is_some() && !ask.returned && !ask.cancelled
            })
            .collect()
    }

    fn give_back(&mut self, held: &[usize]) -> (String, PendingCall) {
        let number = if self.rng.bool() { held[0] } else { held[self.rng.usize(..held.len())] };
        let with_token = self.rng.bool();
        let ask = self.ledger.get(number);
        ask.returned = true;
        let token = ask.token.filter(|_| with_token).map_or(String::new(), |token| format!(" TOKEN {token}"));
        let line = match &ask.keys[..] {
            [key] => format!("LOCK.RELEASE {key} w{number}{token}"),
            keys => format!("LOCK.MRELEASE {} {} w{number}{token}", keys.len(), keys.join(" ")),
        };
        (line, PendingCall::Return(number))
    }

    fn alive(&self, session: u64, is_of_user: bool) -> Option<&Session> {
        self.sessions.iter().find(|it| it.name == session && it.is_of_user == is_of_user)
    }

    fn ask_for_session(&mut self, is_of_user: bool) -> Vec<(String, PendingCall)> {
        let of_user: Vec<usize> =
            (0..self.sessions.len()).filter(|it| self.sessions[*it].is_of_user == is_of_user).collect();
        let session = of_user[self.rng.usize(..of_user.len())];
        let (line, number) = self.ask_on_behalf(session);
        let mut requests = vec![(line, PendingCall::LockRequest(number))];
        // Cancelled immediately, over the same connection.
        if self.rng.u32(..5) == 0 {
            requests.push(self.cancel_one(number));
        }
        requests
    }

    fn ask_on_behalf(&mut self, session: usize) -> (String, usize) {
        let (name, id) = (self.sessions[session].name, self.sessions[session].id.clone());
        let (line, ask) = self.any_request();
        let number = self.ledger.ask(LockRequest { session: Some(name), ..ask });
        let line = format!("{} SESSION {id}", line.replace('#', &format!("w{number}")));
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((number, name, self.step));
        (line, number)
    }

    /// A request for the owner `#`.
    fn any_request(&mut self) -> (String, LockRequest) {
        self.player_counts.asked += 1;
        let lock = LOCKS[self.rng.usize(..LOCKS.len())];
        let (mut line, keys) = match self.rng.u32(..10) {
            0..4 => (format!("LOCK.ACQUIRE {lock} #"), vec![lock]),
            4..6 => (format!("LOCK.ACQUIRE {lock} # SHARED"), vec![lock]),
            6..8 => (format!("LOCK.ACQUIRE {PLACES} # LIMIT {LIMIT}"), vec![PLACES]),
            _ => {
                let count = self.rng.usize(2..=LOCKS.len());
                let mut keys = self.rng.choose_multiple(LOCKS, count);
                self.rng.shuffle(&mut keys);
                (format!("LOCK.MACQUIRE {count} {} #", keys.join(" ")), keys)
            }
        };
        let may_be_lost = self.rng.u32(..4) == 0;
        let lease = if may_be_lost { self.rng.u32(5..40).to_string() } else { LEASE.into() };
        line += &format!(" LEASE {lease}");
        for option in [" WATCHDOG", " EPHEMERAL"] {
            if self.rng.u32(..4) == 0 {
                line += option;
            }
        }
        if self.rng.u32(..12) == 0 {
            line += " REPLICAS 1";
        }
        let endless = self.rng.u32(..5) == 0;
        if endless {
            line += " WAIT 0";
        } else if self.rng.u32(..8) > 0 {
            line += &format!(" WAIT {}", self.rng.u32(1..60));
        }
        (line, LockRequest { keys, endless, may_be_lost, ..LockRequest::default() })
    }

    fn cancel(&mut self, is_of_user: bool) -> Option<(String, PendingCall)> {
        // A request of this step, sent over another connection, may arrive later.
        let may = |(number, session, sent): &&(usize, u64, Step)| {
            *sent < self.step && self.ledger.live.contains(number) && self.alive(*session, is_of_user).is_some()
        };
        let numbers: Vec<usize> = self.recent.iter().filter(may).map(|(number, ..)| *number).collect();
        let number = self.rng.choice(numbers)?;
        Some(self.cancel_one(number))
    }

    fn cancel_one(&mut self, number: usize) -> (String, PendingCall) {
        self.player_counts.cancelled += 1;
        let ask = self.ledger.get(number);
        ask.cancelled = true;
        // All of its keys: a grant that was read is released key by key.
        let line = match &ask.keys[..] {
            [key] => format!("LOCK.RELEASE {key} w{number} ALL"),
            keys => format!("LOCK.MRELEASE {} {} w{number} ALL", keys.len(), keys.join(" ")),
        };
        (line, PendingCall::Cancel(number))
    }

    /// Commands of other clients.
    fn disturb(&mut self) -> (String, PendingCall) {
        let lock = [LOCKS[0], LOCKS[1], LOCKS[2], PLACES][self.rng.usize(..4)];
        let line = match self.rng.u32(..12) {
            0 => {
                self.disturbed.extend([&LOCKS[..], &[PLACES]].concat());
                return ("FLUSHALL ASYNC".into(), PendingCall::Any);
            }
            1..5 => format!("LOCK.FORCE {lock}"),
            5..8 => format!("DEL {lock}"),
            _ => format!("PEXPIRE {lock} {}", self.rng.u32(1..30)),
        };
        self.disturbed.push(lock);
        (line, PendingCall::Any)
    }

    fn sessions_ask(&mut self) -> Result<(), Failure> {
        for index in 0..self.sessions.len() {
            if self.sessions[index].asked.is_some() {
                continue;
            }
            let count = if self.rng.u32(..4) == 0 { format!(" COUNT {}", self.rng.u32(1..4)) } else { String::new() };
            let line = match self.rng.u32(..12) {
                0..3 => format!("LOCK.EVENTS{count}"),
                3..5 => format!("LOCK.EVENTS WAIT {}{count}", self.rng.u32(1..20)),
                5 => format!("LOCK.EVENTS WAIT 0{count}"),
                6 => {
                    // Over the session's own connection.
                    let (line, number) = self.ask_on_behalf(index);
                    let reply = ask(&mut self.sessions[index].raw, &line)?;
                    self.note("session", self.sessions[index].name, format_args!("{line} {reply:?}"));
                    self.ledger.answered(number, &reply, self.step)?;
                    continue;
                }
                _ => continue,
            };
            self.note("session", self.sessions[index].name, &line);
            self.sessions[index].raw.send_bytes(&request(&line))?;
            self.sessions[index].asked = Some(self.step);
        }
        Ok(())
    }

    fn blockers_ask(&mut self) -> Result<(), Failure> {
        for index in 0..self.blockers.len() {
            if self.blockers[index].waits.is_none() && self.rng.u32(..4) == 0 {
                let (line, ask) = self.any_request();
                let number = self.ledger.ask(LockRequest { blocker: Some(self.blockers[index].name), ..ask });
                let line = line.replace('#', &format!("w{number}"));
                self.note("blocker", self.blockers[index].name, &line);
                self.blockers[index].raw.send_bytes(&request(&line))?;
                self.blockers[index].waits = Some(number);
            }
        }
        Ok(())
    }

    fn answered(&mut self, what: PendingCall, reply: &Value) -> Result<(), Failure> {
        let error = resp::error(reply).unwrap_or_default();
        match (what, reply) {
            (PendingCall::LockRequest(number), _) => self.ledger.answered(number, reply, self.step)?,
            (PendingCall::Return(number), Value::Array(left)) => self.ledger.released(number, left, self.step)?,
            (PendingCall::Return(number), left) => {
                self.ledger.released(number, std::slice::from_ref(left), self.step)?
            }
            (PendingCall::Cancel(number), _) if is_over(reply) => self.ledger.over(number, self.step),
            (PendingCall::Refused(code), _) if error.starts_with(code) => {}
            (PendingCall::Any, _) if error.is_empty() => {}
            (PendingCall::Cancel(number), _) => {
                return Err(format!("the cancel of w{number} returned {reply:?}").into());
            }
            (PendingCall::Refused(code), _) => return Err(format!("expected {code}, got {reply:?}").into()),
            _ => return Err(format!("unexpected reply {reply:?}").into()),
        }
        Ok(())
    }

    /// Reads replies and events that have arrived.
    fn read_arrivals(&mut self) -> Result<(), Failure> {
        for index in 0..self.sessions.len() {
            let session = &mut self.sessions[index];
            let Some(asked) = session.asked else { continue };
            let Some(reply) = session.raw.read_timeout(Duration::ZERO)? else { continue };
            (session.asked, self.step) = (None, self.step + 1);
            let name = session.name;
            self.note("session", name, format_args!("{reply:?}"));
            self.read_events(name, asked, &reply)?;
        }
        for index in 0..self.blockers.len() {
            let Some(number) = self.blockers[index].waits else { continue };
            let Some(reply) = self.blockers[index].raw.read_timeout(Duration::ZERO)? else { continue };
            self.blockers[index].waits = None;
            self.note("blocker", self.blockers[index].name, format_args!("w{number} {reply:?}"));
            self.ledger.answered(number, &reply, self.step)?;
        }
        Ok(())
    }

    fn read_events(&mut self, session: u64, asked: Step, reply: &Value) -> Result<(), Failure> {
        match reply {
            Value::Nil => Ok(()),
            Value::Array(events) => {
                Ok(events.iter().try_for_each(|event| self.ledger.event(session, event, (asked, self.step)))?)
            }
            other => Err(format!("LOCK.EVENTS was answered {other:?}").into()),
        }
    }

    /// Reads holders and waiters from the server, in one transaction.
    fn look(&mut self) -> Result<(), Failure> {
        let locks = [&LOCKS[..], &[PLACES]].concat();
        let raw = &mut self.callers[0].raw;
        let questions = locks.iter().flat_map(|lock| [format!("LOCK.INFO {lock}"), format!("LOCK.WAITERS {lock}")]);
        let lines: Vec<String> = ["MULTI".into()].into_iter().chain(questions).chain(["EXEC".into()]).collect();
        raw.send_bytes(&lines.iter().flat_map(|line| request(line)).collect::<Vec<u8>>())?;
        for _ in 1..lines.len() {
            reply(raw)?;
        }
        let Value::Array(seen) = reply(raw)? else { return Err("EXEC has no reply".to_owned().into()) };
        for (lock, seen) in locks.iter().zip(seen.chunks(2)) {
            let [info, waiters] = seen else { continue };
            self.ledger.check(lock, &LockState::read(info, waiters))?;
        }
        Ok(())
    }

    /// Ends a session's connection: it is killed, or closed.
    fn end_session(&mut self) -> Result<(), Failure> {
        let index = self.rng.usize(..self.sessions.len());
        let fresh = self.session(self.sessions[index].is_of_user)?;
        let old = std::mem::replace(&mut self.sessions[index], fresh);
        self.note("session", old.name, "ends");
        self.player_counts.ended += 1;
        self.ledger.session_ended(old.name);
        self.former = None;
        if self.rng.bool() {
            ask(&mut self.callers[0].raw, &format!("CLIENT KILL ID {}", old.client))?;
            self.former = Some(old.id);
        } else {
            old.raw.reset();
        }
        Ok(())
    }

    /// Unblocks a blocking client, or ends its connection.
    fn end_blocker(&mut self) -> Result<(), Failure> {
        let index = self.rng.usize(..self.blockers.len());
        if self.rng.bool() {
            if let Some(number) = self.blockers[index].waits {
                self.ledger.get(number).unblocked = true;
            }
            let how = ["TIMEOUT", "ERROR"][self.rng.usize(..2)];
            self.note("blocker", self.blockers[index].name, how);
            ask(&mut self.callers[0].raw, &format!("CLIENT UNBLOCK {} {how}", self.blockers[index].client))?;
            return Ok(());
        }
        let fresh = self.blocker()?;
        let old = std::mem::replace(&mut self.blockers[index], fresh);
        self.note("blocker", old.name, "ends");
        self.ledger.allow_loss(|ask| ask.blocker == Some(old.name));
        old.raw.reset();
        Ok(())
    }

    /// Cancels waits without a timeout. Every other wait must have ended with a reply.
    fn finish(&mut self) -> Result<(), Failure> {
        let end = Instant::now() + PATIENCE;
        for index in 0..self.sessions.len() {
            let (name, is_of_user) = (self.sessions[index].name, self.sessions[index].is_of_user);
            let caller = self.callers.iter().position(|caller| caller.is_of_user == is_of_user).unwrap_or_default();
            let live: Vec<usize> = self.ledger.live.iter().copied().collect();
            for number in live {
                let ask = self.ledger.get(number);
                if ask.session == Some(name) && ask.waits && ask.endless {
                    let (line, what) = self.cancel_one(number);
                    let reply = self::ask(&mut self.callers[caller].raw, &line)?;
                    self.answered(what, &reply)?;
                }
            }
            while let Some(number) = self.ledger.without_outcome(name) {
                if Instant::now() > end {
                    return Err(format!("no event for the wait of w{number}").into());
                }
                self.step += 1;
                let session = &mut self.sessions[index];
                let asked = match session.asked.take() {
                    Some(asked) => asked,
                    None => {
                        session.raw.send_bytes(&request("LOCK.EVENTS WAIT 100"))?;
                        self.step
                    }
                };
                let reply = reply(&mut session.raw)?;
                self.read_events(name, asked, &reply)?;
            }
        }
        self.look()
    }
}

impl LockState {
    fn read(info: &Value, waiters: &Value) -> LockState {
        let owners = |list: &Value| match list {
            Value::Array(list) => list.iter().map(|of| text(&field(of, "owner"))).collect(),
            _ => Vec::new(),
        };
        let holders = match field(info, "holders") {
            Value::Array(holders) => holders,
            _ => Vec::new(),
        };
        let token = |holder: &Value| resp::int(&field(holder, "token")).unwrap_or_default();
        LockState {
            limit: if holders.is_empty() { 0 } else { resp::int(&field(info, "limit")).unwrap_or_default() },
            holders: holders.iter().map(|holder| (text(&field(holder, "owner")), token(holder))).collect(),
            waiters: owners(waiters),
        }
    }
}

/// Whether a `RELEASE … ALL` leaves nothing of any key: it has ended something, or there was nothing.
fn is_over(reply: &Value) -> bool {
    match reply {
        Value::Array(keys) => keys.iter().all(is_over),
        reply => matches!(reply, Value::Int(1) | Value::Nil),
    }
}

/// A field of a map, which is a flat array of names and values here.
fn field(map: &Value, name: &str) -> Value {
    let Value::Array(parts) = map else { return Value::Nil };
    let found = parts.chunks(2).find(|pair| text(&pair[0]) == name).and_then(|pair| pair.get(1));
    found.cloned().unwrap_or(Value::Nil)
}

fn connect(address: SocketAddr, is_of_user: bool) -> io::Result<Raw> {
    let mut raw = Raw::connect(address)?;
    if is_of_user {
        ask(&mut raw, &format!("AUTH {USER} {USER}"))?;
    }
    ask(&mut raw, &format!("SELECT {DATABASE}"))?;
    Ok(raw)
}

fn request(line: &str) -> Vec<u8> {
    resp::Request::typed(line).bytes().to_vec()
}

fn ask(raw: &mut Raw, line: &str) -> io::Result<Value> {
    raw.send_bytes(&request(line))?;
    reply(raw)
}

fn reply(raw: &mut Raw) -> io::Result<Value> {
    raw.read_timeout(PATIENCE)?.ok_or_else(|| io::ErrorKind::TimedOut.into())
}
