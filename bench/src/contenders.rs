//! The contenders: the requests by which each acquires and releases a lock, its replies, and how it waits.
//!
//! A contender only makes requests and reads replies. The code that sends them, and its timing and connections, are the same for
//! all contenders.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use support::lua;
use support::resp::{Request, Value};

use crate::client::Client;

/// One owner's lock.
#[derive(Clone, Debug)]
pub struct Lock {
    /// The lock's key.
    pub key: String,
    /// The owner.
    pub owner: String,
    /// The lease.
    pub lease: Duration,
    /// The session on whose behalf it is requested, if the contender has one.
    pub session: Option<Arc<str>>,
}

impl Lock {
    /// The lock `key` of client number `client`, with an owner as long as Redisson's.
    pub fn new(key: impl Into<String>, client: usize, lease: Duration) -> Self {
        let owner = format!("7b1f2f5e-3c55-4f0a-9d57-0d2c1a6be0f1:{client}");
        Self { key: key.into(), owner, lease, session: None }
    }

    /// The number of the client with this owner.
    pub fn client_of(owner: &str) -> Option<usize> {
        owner.rsplit_once(':')?.1.parse().ok()
    }

    fn lease_ms(&self) -> String {
        self.lease.as_millis().to_string()
    }
}

/// The result of a request for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The lock was acquired.
    Granted,
    /// Another client holds it, for this long if the server returned that.
    Busy(Option<Duration>),
}

/// How a client waits for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// In the server's queue: the reply is the grant.
    Queued,
    /// It tries again after this pause.
    Polling(Duration),
    /// It subscribes to the lock's channel, and tries again on each message, or when the holder's lease has expired.
    Listening,
    /// In the server's queue: the grant is an event of the client's session.
    Notified,
}

/// A lock implementation.
pub trait Contender: Send {
    /// Its name in tables.
    fn name(&self) -> &'static str;
    /// Acquires the lock if it is free.
    fn acquire(&self, lock: &Lock) -> Request;
    /// Releases it.
    fn release(&self, lock: &Lock) -> Request;
    /// Reads the reply to [`acquire`](Self::acquire) or [`wait`](Self::wait). Default: the replies of `SET NX`.
    fn answer(&self, reply: &Value) -> Result<Answer> {
        match reply {
            Value::Okay => Ok(Answer::Granted),
            Value::Nil => Ok(Answer::Busy(None)),
            other => unexpected(self.name(), "SET", other),
        }
    }
    /// Checks that the reply confirms a release. Default: 1.
    fn check_released(&self, reply: &Value) -> Result<()> {
        match reply {
            Value::Int(1) => Ok(()),
            other => unexpected(self.name(), "release", other),
        }
    }
    /// How it waits. Default: polling, like redis-py's `Lock`.
    fn waiting(&self) -> Waiting {
        Waiting::Polling(REDIS_PY_SLEEP)
    }
    /// Acquires the lock, and waits for it without a timeout.
    fn wait(&self, lock: &Lock) -> Request {
        self.acquire(lock)
    }
    /// A request that must be sent once before the lock can be acquired.
    fn seed(&self, _lock: &Lock) -> Option<Request> {
        None
    }
}

/// The module, on behalf of a session: a waiter receives its grant by `LOCK.EVENTS`, over another connection.
pub struct Session;

impl Session {
    /// Its name in tables.
    pub const NAME: &'static str = "holdfast, sessions";
    /// The request by which a session reads events.
    pub const NEXT: &'static str = "LOCK.EVENTS WAIT 0";
}

impl Contender for Session {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn acquire(&self, lock: &Lock) -> Request {
        Holdfast::PLAIN.acquire(lock)
    }

    fn wait(&self, lock: &Lock) -> Request {
        let session = lock.session.as_deref().unwrap_or_default();
        Holdfast::PLAIN.request(lock, &["WAIT", "0", "SESSION", session])
    }

    fn release(&self, lock: &Lock) -> Request {
        Holdfast::PLAIN.release(lock)
    }

    fn answer(&self, reply: &Value) -> Result<Answer> {
        match reply {
            Value::SimpleString(waiting) if waiting == "WAITING" => Ok(Answer::Busy(None)),
            Value::Int(_) => Holdfast::PLAIN.answer(reply),
            other => unexpected(self.name(), "LOCK.ACQUIRE", other),
        }
    }

    fn check_released(&self, reply: &Value) -> Result<()> {
        Holdfast::PLAIN.check_released(reply)
    }

    fn waiting(&self) -> Waiting {
        Waiting::Notified
    }
}

fn unexpected<T>(name: &str, request: &str, reply: &Value) -> Result<T> {
    bail!("{name}: unexpected reply to {request}: {reply:?}")
}

/// Whether a request names the lease or uses the server's setting.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lease {
    Named,
    Configured,
}

/// The module, with options.
#[derive(Clone, Copy)]
pub struct Holdfast {
    name: &'static str,
    lease: Lease,
    options: &'static [&'static str],
}

impl Holdfast {
    /// Without options.
    pub const PLAIN: Self = Self { name: "holdfast", lease: Lease::Named, options: &[] };
    /// Without the lease, too: the server's setting is used.
    pub const DEFAULT_LEASE: Self = Self { name: "holdfast, default lease", lease: Lease::Configured, options: &[] };
    /// The hold ends with the connection.
    pub const EPHEMERAL: Self = Self { name: "holdfast, EPHEMERAL", lease: Lease::Named, options: &["EPHEMERAL"] };
    /// The server renews the lease.
    pub const WATCHDOG: Self = Self { name: "holdfast, WATCHDOG", lease: Lease::Named, options: &["WATCHDOG"] };
    /// The reply comes when a replica has confirmed the grant.
    pub const REPLICAS: Self = Self { name: "holdfast, REPLICAS 1", lease: Lease::Named, options: &["REPLICAS", "1"] };

    fn request(&self, lock: &Lock, more: &[&str]) -> Request {
        let lease = lock.lease_ms();
        let given: &[&str] = match self.lease {
            Lease::Named => &["LEASE", &lease],
            Lease::Configured => &[],
        };
        Request::new(&[&["LOCK.ACQUIRE", &lock.key, &lock.owner], given, self.options, more].concat())
    }
}

impl Contender for Holdfast {
    fn name(&self) -> &'static str {
        self.name
    }

    fn acquire(&self, lock: &Lock) -> Request {
        self.request(lock, &[])
    }

    fn wait(&self, lock: &Lock) -> Request {
        self.request(lock, &["WAIT", "0"])
    }

    fn release(&self, lock: &Lock) -> Request {
        Request::new(&["LOCK.RELEASE", &lock.key, &lock.owner])
    }

    fn answer(&self, reply: &Value) -> Result<Answer> {
        match reply {
            Value::Int(token) if *token > 0 => Ok(Answer::Granted),
            Value::Nil => Ok(Answer::Busy(None)),
            other => unexpected(self.name(), "LOCK.ACQUIRE", other),
        }
    }

    fn check_released(&self, reply: &Value) -> Result<()> {
        match reply {
            Value::Int(1) => Ok(()),
            other => unexpected(self.name(), "LOCK.RELEASE", other),
        }
    }

    fn waiting(&self) -> Waiting {
        Waiting::Queued
    }
}

/// Redisson's `RLock`: its steps as scripts, by `EVALSHA`. Its latch for repeated unlocks, which costs two more writes for each
/// release, is left out in its favour.
pub struct Redisson {
    acquire: String,
    release: String,
    renew_many: String,
}

/// Redisson's watchdog renews up to a hundred locks with one script: `ARGV[1]` is the lease, followed by an owner for each key.
const RENEW_MANY: &str = "\
local renewed = 0
for i, key in ipairs(KEYS) do
  if redis.call('hexists', key, ARGV[i + 1]) == 1 then
    redis.call('pexpire', key, ARGV[1])
    renewed = renewed + 1
  end
end
return renewed
";

impl Redisson {
    /// Loads the scripts into the server.
    pub fn load(control: &mut Client) -> Result<Self> {
        Ok(Self {
            acquire: control.load_script(lua::ACQUIRE)?,
            release: control.load_script(lua::RELEASE)?,
            renew_many: control.load_script(RENEW_MANY)?,
        })
    }

    /// The channel to which its clients subscribe.
    pub fn channel(key: &str) -> String {
        String::from_utf8_lossy(&lua::channel(key.as_bytes())).into_owned()
    }

    /// Renews up to a hundred locks like its watchdog. The reply is the number of renewals.
    pub fn renew_many(&self, locks: &[Lock]) -> Result<Request> {
        let lease = locks.first().context("no lock to renew")?.lease_ms();
        let count = locks.len().to_string();
        let mut arguments = vec!["EVALSHA", &self.renew_many, &count];
        arguments.extend(locks.iter().map(|lock| lock.key.as_str()));
        arguments.push(&lease);
        arguments.extend(locks.iter().map(|lock| lock.owner.as_str()));
        Ok(Request::new(&arguments))
    }
}

impl Contender for Redisson {
    fn name(&self) -> &'static str {
        "redisson"
    }

    fn acquire(&self, lock: &Lock) -> Request {
        Request::new(&["EVALSHA", &self.acquire, "1", &lock.key, &lock.lease_ms(), &lock.owner])
    }

    fn release(&self, lock: &Lock) -> Request {
        let channel = Self::channel(&lock.key);
        Request::new(&["EVALSHA", &self.release, "2", &lock.key, &channel, &lock.lease_ms(), &lock.owner])
    }

    fn answer(&self, reply: &Value) -> Result<Answer> {
        match reply {
            Value::Nil => Ok(Answer::Granted),
            Value::Int(left) => Ok(Answer::Busy(u64::try_from(*left).ok().map(Duration::from_millis))),
            other => unexpected(self.name(), "its acquire script", other),
        }
    }

    fn waiting(&self) -> Waiting {
        Waiting::Listening
    }
}

/// redis-py's `Lock` sleeps this long between two attempts, without jitter (its parameter `sleep`).
const REDIS_PY_SLEEP: Duration = Duration::from_millis(100);

fn set_nx(lock: &Lock) -> Request {
    Request::new(&["SET", &lock.key, &lock.owner, "NX", "PX", &lock.lease_ms()])
}

/// `SET NX PX`, and a script that deletes the key if it still contains the owner: the common approach of client libraries.
pub struct SetNx {
    release: String,
}

/// Compare and delete, from the documentation of `SET`.
const COMPARE_AND_DELETE: &str = "\
if redis.call('get', KEYS[1]) == ARGV[1] then
  return redis.call('del', KEYS[1])
end
return 0
";

impl SetNx {
    /// Loads the script into the server.
    pub fn load(control: &mut Client) -> Result<Self> {
        Ok(Self { release: control.load_script(COMPARE_AND_DELETE)? })
    }
}

impl Contender for SetNx {
    fn name(&self) -> &'static str {
        "set-nx"
    }

    fn acquire(&self, lock: &Lock) -> Request {
        set_nx(lock)
    }

    fn release(&self, lock: &Lock) -> Request {
        Request::new(&["EVALSHA", &self.release, "1", &lock.key, &lock.owner])
    }
}

/// `SET NX PX`, and the server's own compare and delete, if it has one.
pub enum Native {
    /// Valkey 9: `DELIFEQ key owner`.
    DelIfEq,
    /// Redis 8.4: `DELEX key IFEQ owner`.
    DelexIfEq,
}

impl Native {
    /// The variant that this server has.
    pub fn of(control: &mut Client) -> Result<Option<Self>> {
        if control.knows("DELIFEQ")? {
            return Ok(Some(Native::DelIfEq));
        }
        Ok(control.knows("DELEX")?.then_some(Native::DelexIfEq))
    }
}

impl Contender for Native {
    fn name(&self) -> &'static str {
        "native"
    }

    fn acquire(&self, lock: &Lock) -> Request {
        set_nx(lock)
    }

    fn release(&self, lock: &Lock) -> Request {
        match self {
            Native::DelIfEq => Request::new(&["DELIFEQ", &lock.key, &lock.owner]),
            Native::DelexIfEq => Request::new(&["DELEX", &lock.key, "IFEQ", &lock.owner]),
        }
    }
}

/// The lower bound: `SET` + `DEL`, which is not a lock.
pub struct SetDel;

impl Contender for SetDel {
    fn name(&self) -> &'static str {
        "SET+DEL"
    }

    fn acquire(&self, lock: &Lock) -> Request {
        Request::new(&["SET", &lock.key, &lock.owner])
    }

    fn release(&self, lock: &Lock) -> Request {
        Request::new(&["DEL", &lock.key])
    }
}

/// The lower bound with a lease: `SET NX PX` + `DEL`, a lock that any client can delete.
pub struct SetNxDel;

impl Contender for SetNxDel {
    fn name(&self) -> &'static str {
        "SET NX PX+DEL"
    }

    fn acquire(&self, lock: &Lock) -> Request {
        set_nx(lock)
    }

    fn release(&self, lock: &Lock) -> Request {
        SetDel.release(lock)
    }
}

/// The lower bound of a round trip: two `PING`.
pub struct Ping;

impl Contender for Ping {
    fn name(&self) -> &'static str {
        "PING+PING"
    }

    fn acquire(&self, _lock: &Lock) -> Request {
        Request::new(&["PING"])
    }

    fn release(&self, lock: &Lock) -> Request {
        self.acquire(lock)
    }

    fn answer(&self, reply: &Value) -> Result<Answer> {
        match reply {
            Value::SimpleString(_) => Ok(Answer::Granted),
            other => unexpected(self.name(), "PING", other),
        }
    }

    fn check_released(&self, reply: &Value) -> Result<()> {
        self.answer(reply).map(|_| ())
    }

    fn waiting(&self) -> Waiting {
        Waiting::Queued
    }
}

/// The lower bound of a hand-off: the client that pops the one element holds the lock, and pushes it back.
pub struct List;

impl List {
    /// Its name in tables.
    pub const NAME: &'static str = "BLPOP+LPUSH";
}

impl Contender for List {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn acquire(&self, lock: &Lock) -> Request {
        Request::new(&["LPOP", &lock.key])
    }

    fn wait(&self, lock: &Lock) -> Request {
        Request::new(&["BLPOP", &lock.key, "0"])
    }

    fn release(&self, lock: &Lock) -> Request {
        Request::new(&["LPUSH", &lock.key, &lock.owner])
    }

    fn answer(&self, reply: &Value) -> Result<Answer> {
        match reply {
            Value::BulkString(_) | Value::Array(_) => Ok(Answer::Granted),
            Value::Nil => Ok(Answer::Busy(None)),
            other => unexpected(self.name(), "BLPOP", other),
        }
    }

    fn waiting(&self) -> Waiting {
        Waiting::Queued
    }

    fn seed(&self, lock: &Lock) -> Option<Request> {
        Some(self.release(lock))
    }
}
