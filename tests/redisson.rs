//! The module beside Redisson's scripts: equal steps give equal replies, hashes and messages. Deadlines differ only in that a
//! re-entry never shortens a lease.

use std::collections::BTreeMap;
use std::time::Instant;

use redis::Value;
use support::{Random, Raw, Server, lua, until};

use crate::common::{Bytes, NAMES, array, ask_ok, bytes, int, map, text};

const STEPS: usize = 40_000;
/// Steps in one batch. Their deadlines may differ by as long as a batch takes.
const BATCH: usize = 250;
const LOCKS: usize = 8;

/// What executes a step on the lock `here`. On its twin `there`, the scripts execute all steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Executor {
    Module,
    Scripts,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Acquire,
    Release,
    Renew,
    Force,
}

/// One step, for both twins.
#[derive(Clone, Copy, Debug)]
struct Step {
    kind: Kind,
    by: Executor,
    lock: usize,
    owner: &'static [u8],
    /// Much longer than the test takes.
    lease: u64,
}

/// The outcome of a step, in terms that both share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Granted,
    Refused,
    Left,
    Free,
    NotHeld,
    Renewed,
}

#[test]
fn module_and_redisson_scripts_agree_in_random_runs() {
    Twins::start().run(|_| Executor::Module);
}

#[test]
fn module_and_redisson_share_locks_in_random_runs() {
    Twins::start().run(|random| *random.pick(&[Executor::Module, Executor::Scripts]));
}

#[test]
fn lock_is_interchangeable_with_redisson_scripts() {
    let server = Server::start();
    let mut raw = server.raw();
    let scripts = Scripts::load(&mut raw);
    for key in NAMES {
        for (first, second) in [(Executor::Module, Executor::Scripts), (Executor::Scripts, Executor::Module)] {
            let mut take = |kind, by, owner, lease| {
                let step = Step { kind, by, lock: 0, owner, lease };
                outcome(kind, by, &raw.call(&slices(&scripts.command(&step, by, key))))
            };
            assert_eq!(take(Kind::Acquire, first, b"me", 60_000), Outcome::Granted);
            assert_eq!(take(Kind::Acquire, second, b"you", 60_000), Outcome::Refused);
            assert_eq!(take(Kind::Release, second, b"you", 60_000), Outcome::NotHeld);
            assert_eq!(take(Kind::Renew, second, b"you", 60_000), Outcome::NotHeld);
            assert_eq!(take(Kind::Acquire, second, b"me", 60_000), Outcome::Granted);
            assert_eq!(take(Kind::Renew, second, b"me", 60_000), Outcome::Renewed);
            assert_eq!(take(Kind::Release, first, b"me", 60_000), Outcome::Left);
            assert_eq!(take(Kind::Release, second, b"me", 60_000), Outcome::Free);
            assert_eq!(take(Kind::Acquire, second, b"you", 60_000), Outcome::Granted);
            assert_eq!(take(Kind::Force, first, b"me", 60_000), Outcome::Free);
            assert_eq!(take(Kind::Acquire, first, b"me", 60_000), Outcome::Granted);
            assert_eq!(take(Kind::Force, second, b"me", 60_000), Outcome::Free);
            assert_eq!(take(Kind::Force, first, b"me", 60_000), Outcome::NotHeld);
        }
    }
}

/// Redisson's scripts, loaded into the server.
struct Scripts {
    acquire: Bytes,
    release: Bytes,
    renew: Bytes,
    force: Bytes,
}

impl Scripts {
    fn load(raw: &mut Raw) -> Self {
        let mut load = |script: &str| bytes(&raw.call(&[b"SCRIPT", b"LOAD", script.as_bytes()])).to_vec();
        Self {
            acquire: load(lua::ACQUIRE),
            release: load(lua::RELEASE),
            renew: load(lua::RENEW),
            force: load(lua::FORCE),
        }
    }

    /// The command that executes a step on the lock `key`.
    fn command(&self, step: &Step, by: Executor, key: &[u8]) -> Vec<Bytes> {
        let lease = step.lease.to_string().into_bytes();
        let (script, name) = match step.kind {
            Kind::Acquire => (&self.acquire, "LOCK.ACQUIRE"),
            Kind::Release => (&self.release, "LOCK.RELEASE"),
            Kind::Renew => (&self.renew, "LOCK.RENEW"),
            Kind::Force => (&self.force, "LOCK.FORCE"),
        };
        let command: Vec<&[u8]> = match (by, step.kind) {
            (Executor::Scripts, _) => {
                let channel = lua::channel(key);
                return [b"EVALSHA", &script[..], b"2", key, &channel, &lease, step.owner].map(<[u8]>::to_vec).into();
            }
            (Executor::Module, Kind::Force) => vec![name.as_bytes(), key],
            (Executor::Module, _) => vec![name.as_bytes(), key, step.owner, b"LEASE", &lease],
        };
        command.into_iter().map(<[u8]>::to_vec).collect()
    }
}

/// The outcome in a reply.
#[track_caller]
fn outcome(kind: Kind, by: Executor, reply: &Value) -> Outcome {
    match (by, kind, reply) {
        (Executor::Scripts, Kind::Acquire, Value::Nil) => Outcome::Granted,
        (Executor::Scripts, Kind::Acquire, Value::Int(_)) => Outcome::Refused,
        (_, Kind::Release, Value::Int(0)) => Outcome::Left,
        (_, Kind::Release, Value::Int(1)) => Outcome::Free,
        (Executor::Scripts, Kind::Renew, Value::Int(1)) => Outcome::Renewed,
        (Executor::Scripts, Kind::Renew, Value::Int(0)) => Outcome::NotHeld,
        (Executor::Module, Kind::Acquire, Value::Int(1..)) => Outcome::Granted,
        (Executor::Module, Kind::Acquire, Value::Nil) => Outcome::Refused,
        (Executor::Module, Kind::Renew, Value::Int(1..)) => Outcome::Renewed,
        (Executor::Module, Kind::Renew, Value::Nil) => Outcome::NotHeld,
        (_, Kind::Release, Value::Nil) => Outcome::NotHeld,
        (_, Kind::Force, Value::Int(1)) => Outcome::Free,
        (_, Kind::Force, Value::Int(0)) => Outcome::NotHeld,
        _ => panic!("{kind:?} by {by:?}: {reply:?}"),
    }
}

/// A lock after a step: hold counts, and its deadline.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    holds: BTreeMap<Bytes, Bytes>,
    token: Option<Bytes>,
    deadline: i64,
}

impl Seen {
    const QUESTIONS: [&'static [u8]; 2] = [b"HGETALL", b"PEXPIRETIME"];

    fn of(replies: &[Value]) -> Self {
        let mut fields = map(&replies[0]);
        let token = fields.remove(&b"#fence"[..]).map(|token| bytes(&token).to_vec());
        let holds = fields.into_iter().map(|(owner, holds)| (owner, bytes(&holds).to_vec())).collect();
        Self { holds, token, deadline: int(&replies[1]) }
    }
}

struct Twins {
    server: Server,
    raw: Raw,
    subscriber: Raw,
    scripts: Scripts,
    /// The two keys of each lock.
    keys: Vec<[Bytes; 2]>,
    /// Each lock here after the last step.
    here: Vec<Seen>,
    newest_token: i64,
    outcomes: BTreeMap<String, u32>,
    random: Random,
}

impl Twins {
    fn start() -> Self {
        let server = Server::start();
        let mut raw = server.raw();
        // Expired keys stay until a command reads them: the module must not consider them held.
        ask_ok(&mut raw, "DEBUG SET-ACTIVE-EXPIRE 0");
        let mut subscriber = server.raw();
        subscriber.call(&[b"PSUBSCRIBE", b"redisson_lock__channel:*"]);
        let names = NAMES.into_iter().take(LOCKS);
        let keys = names.map(|name| [&b" here"[..], b" there"].map(|twin| [name, twin].concat())).collect();
        let free = Seen { holds: BTreeMap::new(), token: None, deadline: -2 };
        Self {
            scripts: Scripts::load(&mut raw),
            server,
            raw,
            subscriber,
            keys,
            here: vec![free; LOCKS],
            newest_token: 0,
            outcomes: BTreeMap::new(),
            random: Random::new(),
        }
    }

    fn run(mut self, by: impl Fn(&mut Random) -> Executor) {
        for batch in 0..STEPS / BATCH {
            let steps: Vec<Step> = (0..BATCH).map(|_| self.step(&by)).collect();
            self.run_steps(&steps);
            if batch % 10 == 9 {
                self.let_one_expire();
            }
        }
        self.assert_equal_messages();
        for outcome in ["Granted", "Refused", "Left", "Free", "NotHeld", "Renewed"] {
            assert!(self.outcomes[outcome] > 500, "too few of some outcome: {:?}", self.outcomes);
        }
    }

    fn step(&mut self, by: &impl Fn(&mut Random) -> Executor) -> Step {
        let random = &mut self.random;
        let kind = match random.below(20) {
            0..9 => Kind::Acquire,
            9..16 => Kind::Release,
            16..19 => Kind::Renew,
            _ => Kind::Force,
        };
        Step {
            kind,
            by: by(random),
            lock: random.below(LOCKS as u64) as usize,
            owner: NAMES[random.below(3) as usize],
            lease: 600_000 + random.below(3_000_000),
        }
    }

    /// Runs steps on both twins, and reads both after each.
    fn run_steps(&mut self, steps: &[Step]) {
        let mut commands = Vec::new();
        for step in steps {
            let [here, there] = &self.keys[step.lock];
            commands.push(self.scripts.command(step, step.by, here));
            commands.push(self.scripts.command(step, Executor::Scripts, there));
            for key in [here, there] {
                commands.extend(Seen::QUESTIONS.map(|question| vec![question.to_vec(), key.clone()]));
            }
        }
        let begin = Instant::now();
        let replies = self.raw.call_all(&commands);
        let slack = begin.elapsed().as_millis() as i64 + 2;
        for (step, replies) in steps.iter().zip(replies.chunks(commands.len() / steps.len())) {
            self.compare(step, replies, slack);
        }
    }

    fn compare(&mut self, step: &Step, replies: &[Value], slack: i64) {
        let (reply, here, there) = (&replies[0], Seen::of(&replies[2..4]), Seen::of(&replies[4..6]));
        let done = outcome(step.kind, step.by, reply);
        assert_eq!(done, outcome(step.kind, Executor::Scripts, &replies[1]), "{step:?}: {replies:?}");
        assert_eq!(here.holds, there.holds, "{step:?}: {replies:?}");
        let before = std::mem::replace(&mut self.here[step.lock], here.clone());
        let reentry = before.holds.contains_key(step.owner);
        let expected = match (done, step.by) {
            (Outcome::Refused | Outcome::NotHeld, _) => {
                assert_eq!(here, before, "{step:?}: a refusal changes nothing");
                before.deadline
            }
            (Outcome::Granted, Executor::Module) if reentry => before.deadline.max(there.deadline),
            _ => there.deadline,
        };
        assert!((here.deadline - expected).abs() <= slack, "{step:?}: {here:?}, not {expected} within {slack} ms");
        if let (Outcome::Granted | Outcome::Renewed, Executor::Module) = (done, step.by) {
            self.check_token(reply, &before, &here);
        }
        *self.outcomes.entry(format!("{done:?}")).or_default() += 1;
    }

    /// A hold keeps its token. A new hold has a greater one than all before.
    fn check_token(&mut self, reply: &Value, before: &Seen, here: &Seen) {
        let token = int(reply);
        assert_eq!(here.token.as_deref(), Some(token.to_string().as_bytes()));
        match &before.token {
            Some(_) => assert_eq!(here.token, before.token),
            None => {
                assert!(token > self.newest_token);
                self.newest_token = token;
            }
        }
    }

    /// Lets one lock's lease expire on both sides, unread.
    fn let_one_expire(&mut self) {
        let lock = self.random.below(LOCKS as u64) as usize;
        for key in &self.keys[lock] {
            self.raw.call(&[b"PEXPIRE", key, b"1"]);
        }
        let now = |raw: &mut Raw| -> i64 {
            let time: Vec<i64> =
                array(&raw.call(&[b"TIME"])).iter().map(|part| text(part).parse().expect("a number")).collect();
            time[0] * 1000 + time[1] / 1000
        };
        let end = now(&mut self.raw) + 2;
        until(std::time::Duration::from_secs(10), "the lease has expired", || now(&mut self.raw) > end);
        self.here[lock] = Seen { holds: BTreeMap::new(), token: None, deadline: -2 };
    }

    /// Both twins' channels have received the same number of messages.
    fn assert_equal_messages(&mut self) {
        const LAST: &[u8] = b"redisson_lock__channel:last";
        self.server.raw().call(&[b"PUBLISH", LAST, b"0"]);
        let mut counts: BTreeMap<Bytes, u32> = BTreeMap::new();
        loop {
            let message = self.subscriber.read().expect("a message");
            let [_, _, channel, message] = array(&message) else { panic!("{message:?}") };
            assert_eq!(bytes(message), b"0");
            if bytes(channel) == LAST {
                break;
            }
            *counts.entry(bytes(channel).to_vec()).or_default() += 1;
        }
        assert_eq!(counts.len(), 2 * LOCKS);
        for keys in &self.keys {
            let [here, there] = [&keys[0], &keys[1]].map(|key| counts[&lua::channel(key)]);
            assert_eq!(here, there, "{}", keys[0].escape_ascii());
        }
    }
}

fn slices(command: &[Bytes]) -> Vec<&[u8]> {
    command.iter().map(Vec::as_slice).collect()
}
