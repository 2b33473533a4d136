//! At the server's memory limit, no new lock is granted, and everything else works.

use std::time::Duration;

use redis::{Connection, RedisResult, Value};
use support::{Raw, Server};

use crate::report::Row;

use super::lines::{command, reading_session, send};

const ROUNDS: u64 = 4;
/// Timeout for what is due immediately, on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(5);
const NAME: &str = "memory limit reached";

/// Runs the scenario.
pub fn run() -> Row {
    let server = Server::start();
    let mut bench = Bench { server: &server, connection: server.connect(), requests: 0, wrong: Vec::new() };
    let outcome = (0..ROUNDS).try_for_each(|_| bench.limit_reached().and_then(|()| bench.evicted()));
    if let Err(error) = outcome {
        bench.wrong.push(error.to_string());
    }
    for wrong in &bench.wrong {
        eprintln!("{NAME}: {wrong}");
    }
    Row {
        scenario: NAME.into(),
        runs: 1,
        faults: 2 * ROUNDS,
        requests: bench.requests,
        violations: bench.wrong.len() as u64,
        note: "new locks refused with -OOM; release, renewal, hand-off, watchdog and expiry work".into(),
    }
}

struct Bench<'a> {
    server: &'a Server,
    connection: Connection,
    requests: u64,
    wrong: Vec<String>,
}

impl Bench<'_> {
    fn limit_reached(&mut self) -> RedisResult<()> {
        let token: u64 = self.ask("LOCK.ACQUIRE held a LEASE 60000")?;
        self.ask::<u64>("LOCK.ACQUIRE waited-for a LEASE 60000")?;
        self.ask::<u64>("LOCK.ACQUIRE ends-soon a LEASE 2000")?;
        let session = reading_session(self.server.raw())?;
        self.ask::<u64>(&format!("LOCK.ACQUIRE watched a LEASE 1500 WATCHDOG SESSION {session}"))?;
        let mut after_release = self.waits("LOCK.ACQUIRE waited-for b WAIT 0")?;
        let mut after_expiry = self.waits("LOCK.ACQUIRE ends-soon b WAIT 0")?;

        self.ask::<()>("CONFIG SET maxmemory 1")?;
        self.refused("LOCK.ACQUIRE new a");
        self.refused("LOCK.ACQUIRE new a WAIT 1000");
        self.refused("LOCK.ACQUIRE held a");
        self.refused("LOCK.MACQUIRE 2 new newer a");
        self.expect("EXISTS new newer", Value::Int(0))?;
        self.expect("HGET held a", Value::BulkString(b"1".into()))?;
        self.expect(&format!("LOCK.RENEW held a LEASE 60000 TOKEN {token}"), Value::Int(token as i64))?;
        self.expect("LOCK.RELEASE held a", Value::Int(1))?;
        self.expect("LOCK.RELEASE waited-for a", Value::Int(1))?;
        self.granted(&mut after_release, "a lock that was released");
        self.granted(&mut after_expiry, "a lock that expired");
        // Longer than its lease by now, because the wait before took 2000 ms.
        self.expect("HGET watched a", Value::BulkString(b"1".into()))?;

        self.ask::<()>("CONFIG SET maxmemory 0")?;
        self.ask::<u64>("LOCK.ACQUIRE new a")?;
        self.ask::<()>("FLUSHALL")
    }

    /// With a policy that evicts locks, an evicted lock is granted to its waiter.
    fn evicted(&mut self) -> RedisResult<()> {
        let token: u64 = self.ask("LOCK.ACQUIRE evicted a LEASE 60000")?;
        let mut waiter = self.waits("LOCK.ACQUIRE evicted b WAIT 0")?;
        self.ask::<()>("CONFIG SET maxmemory-policy allkeys-lru maxmemory 1")?;
        // Eviction happens before a command runs.
        let _: RedisResult<Value> = self.ask("SET something else");
        if let Some(newer) = self.granted(&mut waiter, "an evicted lock")
            && newer <= token as i64
        {
            self.wrong.push(format!("after an eviction token {newer} follows {token}"));
        }
        self.ask::<()>("CONFIG SET maxmemory-policy noeviction maxmemory 0")?;
        self.ask::<()>("FLUSHALL")
    }

    fn ask<T: redis::FromRedisValue>(&mut self, line: &str) -> RedisResult<T> {
        self.requests += 1;
        command(line).query(&mut self.connection)
    }

    fn waits(&mut self, line: &str) -> RedisResult<Raw> {
        self.requests += 1;
        let waiter = send(self.server, line)?;
        let key = line.split(' ').nth(1).unwrap_or_default();
        support::until(AT_ONCE, "the waiter is in the queue", || {
            let waiters: RedisResult<Vec<Value>> = redis::cmd("LOCK.WAITERS").arg(key).query(&mut self.connection);
            waiters.is_ok_and(|waiters| !waiters.is_empty())
        });
        Ok(waiter)
    }

    fn granted(&mut self, waiter: &mut Raw, what: &str) -> Option<i64> {
        match waiter.read_timeout(AT_ONCE) {
            Ok(Some(Value::Int(token))) => Some(token),
            other => {
                self.wrong.push(format!("the waiter of {what} got {other:?}"));
                None
            }
        }
    }

    fn refused(&mut self, line: &str) {
        let reply: RedisResult<Value> = self.ask(line);
        if !matches!(&reply, Err(error) if error.code() == Some("OOM")) {
            self.wrong.push(format!("{line}: {reply:?}, expected -OOM"));
        }
    }

    fn expect(&mut self, line: &str, expected: Value) -> RedisResult<()> {
        let found: Value = self.ask(line)?;
        if found != expected {
            self.wrong.push(format!("{line}: {found:?}, expected {expected:?}"));
        }
        Ok(())
    }
}
