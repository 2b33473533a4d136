//! Reads the state of locks from a server.

use std::fmt;

use holdfast_client::redis::aio::MultiplexedConnection;
use holdfast_client::redis::{RedisError, RedisResult, Value, cmd};
use serde_json::json;

use crate::failure::Failure;

/// A connection to one server.
pub struct Server {
    /// Its address.
    pub name: String,
    /// The connection.
    pub connection: MultiplexedConnection,
}

/// A lock that is held or waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lock {
    /// The server's address.
    pub server: String,
    /// Its key.
    pub key: Vec<u8>,
    /// The limit; 0: none.
    pub limit: i64,
    /// The time until the last deadline, in ms; -1: none.
    pub ttl: i64,
    /// The holders.
    pub holders: Vec<Holder>,
    /// The number of waiters.
    pub waiters: i64,
}

/// A holder of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The owner.
    pub owner: Vec<u8>,
    /// The fencing token, if it is known.
    pub token: Option<i64>,
    /// The hold count.
    pub holds: i64,
    /// The time until its deadline, in ms; -1: none.
    pub ttl: i64,
    /// The connection that it is bound to.
    pub client: Option<i64>,
    /// Whether the server renews it.
    pub watchdog: bool,
    /// Whether it ends with its connection.
    pub ephemeral: bool,
    /// Whether its client caches it until contention.
    pub cached: bool,
}

/// A waiter of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// The owner.
    pub owner: Vec<u8>,
    /// The connection.
    pub client: Option<i64>,
    /// How long it has waited, in ms.
    pub waited: i64,
    /// The time until its timeout, in ms; -1: none.
    pub remaining: i64,
}

/// One of the locks with the longest queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue {
    /// The server's address.
    pub server: String,
    /// The lock's key.
    pub key: Vec<u8>,
    /// The number of waiters.
    pub waiters: i64,
    /// How long the first waiter has waited, in ms.
    pub oldest: i64,
    /// The holders.
    pub holders: Vec<Vec<u8>>,
    /// How many of these are cached.
    pub cached: i64,
    /// The time until the last deadline, in ms.
    pub ttl: i64,
    /// How long the first holder has held it, in ms, if known.
    pub held: Option<i64>,
}

impl Server {
    /// The lock with this key; `None` if it has no holder and no waiter.
    pub async fn lock(&mut self, key: &[u8]) -> RedisResult<Option<Lock>> {
        let reply: Value = cmd("LOCK.INFO").arg(key).query_async(&mut self.connection).await?;
        Ok(self.read_lock(key, &reply))
    }

    /// The locks with these keys, and the number of keys that this user may not read.
    pub async fn locks(&mut self, keys: &[Vec<u8>]) -> RedisResult<(Vec<Lock>, usize)> {
        if keys.is_empty() {
            return Ok((Vec::new(), 0));
        }
        let mut all = holdfast_client::redis::pipe();
        all.ignore_errors();
        for key in keys {
            all.cmd("LOCK.INFO").arg(key);
        }
        let replies: Vec<RedisResult<Value>> = all.query_async(&mut self.connection).await?;
        let (mut locks, mut hidden) = (Vec::new(), 0);
        for (key, reply) in keys.iter().zip(replies) {
            match reply {
                Ok(reply) => locks.extend(self.read_lock(key, &reply)),
                // A hash that is not a lock.
                Err(error) if error.code() == Some("WRONGTYPE") => {}
                Err(error) if is_about_a_key(&error) => hidden += 1,
                Err(error) => return Err(error),
            }
        }
        Ok((locks, hidden))
    }

    /// The waiters of a lock, in order.
    pub async fn waiters(&mut self, key: &[u8], count: usize) -> RedisResult<Vec<Waiter>> {
        let mut waiters = cmd("LOCK.WAITERS");
        let reply: Vec<Value> = waiters.arg(key).arg("COUNT").arg(count).query_async(&mut self.connection).await?;
        Ok(reply.iter().map(|waiter| read_waiter(&Fields::of(waiter))).collect())
    }

    /// The locks with the longest queues.
    pub async fn top(&mut self, count: usize) -> RedisResult<Vec<Queue>> {
        let reply: Vec<Value> = cmd("LOCK.TOP").arg("COUNT").arg(count).query_async(&mut self.connection).await?;
        let read = |value: &Value| {
            let fields = Fields::of(value);
            Queue {
                server: self.name.clone(),
                key: fields.bytes("key"),
                waiters: fields.number("waiters").unwrap_or(0),
                oldest: fields.number("oldest").unwrap_or(0),
                holders: fields.list("holders").iter().map(bytes).collect(),
                cached: fields.number("cached").unwrap_or(0),
                ttl: fields.number("ttl").unwrap_or(-1),
                held: None,
            }
        };
        Ok(reply.iter().map(read).collect())
    }

    /// Adds to these queues how long their locks have been held. A token is the time of its grant, in microseconds, by the server's
    /// clock. Adds nothing if this user has no right to read it.
    pub async fn add_holds(&mut self, queues: &mut [Queue]) {
        let keys: Vec<_> = queues.iter().map(|queue| queue.key.clone()).collect();
        let now: RedisResult<(i64, i64)> = cmd("TIME").query_async(&mut self.connection).await;
        let (Ok((seconds, micros)), Ok((locks, _))) = (now, self.locks(&keys).await) else { return };
        let now = seconds * 1_000_000 + micros;
        for lock in locks {
            let first = lock.holders.iter().filter_map(|holder| holder.token).min();
            if let Some(queue) = queues.iter_mut().find(|queue| queue.key == lock.key) {
                queue.held = first.map(|token| ((now - token) / 1_000).max(0));
            }
        }
    }

    /// The fields of these sections of `INFO`.
    pub async fn info(&mut self, sections: &[&str]) -> RedisResult<Vec<(String, String)>> {
        let text: String = cmd("INFO").arg(sections).query_async(&mut self.connection).await?;
        let fields = text.lines().filter_map(|line| line.trim_end().split_once(':'));
        Ok(fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }

    /// One slice of the hashes whose keys match, and the cursor of the next; 0: the last slice.
    pub async fn scan(&mut self, cursor: u64, pattern: &[u8]) -> RedisResult<(u64, Vec<Vec<u8>>)> {
        let mut scan = cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(1000).arg("TYPE").arg("hash");
        scan.query_async(&mut self.connection).await
    }

    /// The number of keys in the database.
    pub async fn size(&mut self) -> RedisResult<u64> {
        cmd("DBSIZE").query_async(&mut self.connection).await
    }

    fn read_lock(&self, key: &[u8], reply: &Value) -> Option<Lock> {
        if *reply == Value::Nil {
            return None;
        }
        let fields = Fields::of(reply);
        Some(Lock {
            server: self.name.clone(),
            key: key.to_vec(),
            limit: fields.number("limit").unwrap_or(1),
            ttl: fields.number("ttl").unwrap_or(-1),
            holders: fields.list("holders").iter().map(|holder| read_holder(&Fields::of(holder))).collect(),
            waiters: fields.number("waiters").unwrap_or(0),
        })
    }
}

/// Whether the user lacks the right to the key. (The message is `no permissions to access` for a key, `to run` for a command.)
fn is_about_a_key(error: &RedisError) -> bool {
    error.code() == Some("NOPERM") && error.detail().is_some_and(|words| words.contains("to access"))
}

fn read_holder(fields: &Fields) -> Holder {
    Holder {
        owner: fields.bytes("owner"),
        token: fields.number("token"),
        holds: fields.number("holds").unwrap_or(1),
        ttl: fields.number("ttl").unwrap_or(-1),
        client: fields.number("client"),
        watchdog: fields.is("watchdog"),
        ephemeral: fields.is("ephemeral"),
        cached: fields.is("contention"),
    }
}

fn read_waiter(fields: &Fields) -> Waiter {
    Waiter {
        owner: fields.bytes("owner"),
        client: fields.number("client"),
        waited: fields.number("waited").unwrap_or(0),
        remaining: fields.number("remaining").unwrap_or(-1),
    }
}

/// A map, in either protocol.
struct Fields<'v>(Vec<(&'v Value, &'v Value)>);

impl<'v> Fields<'v> {
    fn of(value: &'v Value) -> Self {
        match value {
            Value::Map(pairs) => Self(pairs.iter().map(|(name, value)| (name, value)).collect()),
            Value::Array(flat) => {
                let (names, values) = (flat.iter().step_by(2), flat.iter().skip(1).step_by(2));
                Self(names.zip(values).collect())
            }
            _ => Self(Vec::new()),
        }
    }

    fn get(&self, name: &str) -> Option<&'v Value> {
        self.0.iter().find(|(key, _)| bytes(key) == name.as_bytes()).map(|(_, value)| *value)
    }

    fn number(&self, name: &str) -> Option<i64> {
        match self.get(name)? {
            Value::Int(number) => Some(*number),
            _ => None,
        }
    }

    fn is(&self, name: &str) -> bool {
        matches!(self.get(name), Some(Value::Boolean(true) | Value::Int(1)))
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        self.get(name).map(bytes).unwrap_or_default()
    }

    fn list(&self, name: &str) -> &'v [Value] {
        match self.get(name) {
            Some(Value::Array(list)) => list,
            _ => &[],
        }
    }
}

fn bytes(value: &Value) -> Vec<u8> {
    match value {
        Value::BulkString(bytes) => bytes.clone(),
        Value::SimpleString(text) => text.clone().into_bytes(),
        _ => Vec::new(),
    }
}

/// Bytes in a printable form.
pub fn shown(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => bytes.escape_ascii().to_string(),
    }
}

/// A time, or null for none.
fn time(ms: i64) -> serde_json::Value {
    if ms < 0 { serde_json::Value::Null } else { ms.into() }
}

/// The JSON line that `show`, `ls` and `top` print for a lock, as in lock.schema.json.
pub struct Line(serde_json::Value);

impl Line {
    /// A lock without holders and waiters.
    pub fn free(server: &str, key: &[u8]) -> Self {
        let key = shown(key);
        Self(json!({ "server": server, "key": key, "limit": null, "ttl_ms": null, "holders": [], "waiters": 0 }))
    }

    /// The same with the waiters, first one first.
    pub fn with_queue(self, waiters: &[Waiter]) -> Self {
        self.with("queue", waiters.iter().map(Waiter::json).collect())
    }

    /// The same with the first waiter's waiting time.
    pub fn with_oldest(self, ms: i64) -> Self {
        self.with("oldest_ms", ms.into())
    }

    fn with(mut self, name: &str, value: serde_json::Value) -> Self {
        if let Some(fields) = self.0.as_object_mut() {
            fields.insert(name.to_owned(), value);
        }
        self
    }
}

impl fmt::Display for Line {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{}", self.0)
    }
}

impl Lock {
    /// As JSON.
    pub fn json(&self) -> Line {
        let holders: Vec<_> = self.holders.iter().map(Holder::json).collect();
        Line(json!({
            "server": self.server,
            "key": shown(&self.key),
            "limit": self.limit,
            "ttl_ms": time(self.ttl),
            "holders": holders,
            "waiters": self.waiters,
        }))
    }

    /// The kind of lock.
    pub fn kind(&self) -> String {
        match self.limit {
            0 => "shared".to_owned(),
            1 => "mutex".to_owned(),
            limit => format!("limit {limit}"),
        }
    }
}

impl Holder {
    fn json(&self) -> serde_json::Value {
        json!({
            "owner": shown(&self.owner),
            "token": self.token,
            "holds": self.holds,
            "ttl_ms": time(self.ttl),
            "client": self.client,
            "watchdog": self.watchdog,
            "ephemeral": self.ephemeral,
            "cached": self.cached,
        })
    }
}

impl Waiter {
    fn json(&self) -> serde_json::Value {
        json!({
            "owner": shown(&self.owner),
            "client": self.client,
            "waited_ms": self.waited,
            "remaining_ms": time(self.remaining),
        })
    }
}

/// The server that serves a key.
pub async fn server_of(locks: &holdfast_client::Locks, key: &[u8]) -> Result<Server, holdfast_client::Error> {
    let (name, connection) = locks.server_of(key).await?;
    Ok(Server { name, connection })
}

/// All servers. Fails if one is unreachable.
pub async fn servers(locks: &holdfast_client::Locks) -> Result<Vec<Server>, holdfast_client::Error> {
    let server = |(name, connection)| Server { name, connection };
    locks.servers().await?.into_iter().map(|reached| reached.map(server)).collect()
}

/// A server's error for a request about a key.
pub fn failed(server: &Server, key: &[u8], error: &RedisError) -> Failure {
    Failure::server(&format!("{}: {:?}", server.name, shown(key)), error)
}

/// A server's error for a request without a key.
pub fn failed_at(server: &Server, error: &RedisError) -> Failure {
    Failure::server(&server.name, error)
}
