//! The server's wall clock steps by a minute or a day, forward and back: leases, waits and tokens afterwards.

use std::fmt::Debug;
use std::io;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use support::resp;

use redis::{Connection, RedisResult, Value};
use support::{Raw, Server, eventually};

use crate::report::Row;

use super::lines::{command, reading_session, send};
use super::stepped::{SteppedClock, TempDir};

const MINUTE: i64 = 60;
const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;
/// Longer than any step, in milliseconds.
const TEN_DAYS: i64 = 10 * DAY * 1000;
/// Shorter than any step, in milliseconds.
const TEN_SECONDS: i64 = 10_000;
/// Timeout for what is due immediately, on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Runs the scenario: a row for each step.
pub fn run() -> Vec<Row> {
    let steps =
        [("clock +1 minute", MINUTE), ("clock -1 minute", -MINUTE), ("clock +1 day", DAY), ("clock -1 day", -DAY)];
    let mut rows: Vec<Row> =
        steps.into_iter().map(|(name, seconds)| super::guarded(name, || step(name, seconds))).collect();
    let mut once = |name, scenario: fn(&mut Bench) -> RedisResult<()>| {
        rows.push(super::guarded(name, || run_on_new_server(name, scenario)));
    };
    once("clock -1 hour in a hand-off", Bench::step_back_during_hand_off);
    once("clock +1 hour, idle server", Bench::forward_in_silence);
    rows
}

fn step(name: &str, seconds: i64) -> Row {
    run_on_new_server(name, |bench| {
        let before = bench.before()?;
        bench.set_clock(seconds)?;
        if seconds > 0 { bench.after_forward(before, seconds) } else { bench.after_backward(before, seconds) }
    })
}

fn run_on_new_server(name: &str, scenario: impl FnOnce(&mut Bench) -> RedisResult<()>) -> Row {
    let mut bench = match Bench::start() {
        Ok(bench) => bench,
        Err(error) => return Row::not_run(name, error),
    };
    let outcome = scenario(&mut bench);
    if let Err(error) = outcome {
        bench.wrong.push(error.to_string());
    }
    for wrong in &bench.wrong {
        eprintln!("{name}: {wrong}");
    }
    Row {
        scenario: name.into(),
        runs: 1,
        faults: bench.steps,
        requests: bench.requests,
        violations: bench.wrong.len() as u64,
        note: bench.seen.join("; "),
    }
}

struct Bench {
    server: Server,
    connection: Connection,
    clock: SteppedClock,
    requests: u64,
    steps: u64,
    wrong: Vec<String>,
    seen: Vec<String>,
    _dir: TempDir,
}

/// The state before the step.
struct StateBefore {
    /// The greatest token.
    token: i64,
    /// Waits for `short` without a timeout.
    waits: Raw,
    /// Waits for a permit, one of which expires with the step.
    waits_for_a_permit: Raw,
    /// Waits for `long`, for a second.
    waits_a_second: Raw,
    waits_a_second_id: i64,
    /// BLPOP with the same timeout.
    pops: Raw,
    /// A session: `bound` is bound to it, and a request waits for `awaited` on its behalf.
    session: Raw,
    begun: Instant,
}

impl Bench {
    fn start() -> io::Result<Bench> {
        let dir = TempDir::new()?;
        let (builder, clock) = SteppedClock::server(&dir.0, 0)?;
        let server = builder.start();
        Ok(Bench {
            connection: server.connect(),
            server,
            clock,
            requests: 0,
            steps: 0,
            wrong: Vec::new(),
            seen: Vec::new(),
            _dir: dir,
        })
    }

    /// Sets the server's clock this many seconds ahead of the machine's. Returns when the server has noticed it.
    fn set_clock(&mut self, seconds: i64) -> io::Result<()> {
        self.clock.set(seconds)?;
        self.steps += 1;
        let seen = eventually(AT_ONCE, || {
            let time: RedisResult<(i64, i64)> = redis::cmd("TIME").query(&mut self.connection);
            let ours = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
            time.is_ok_and(|(theirs, _)| (theirs - ours - seconds).abs() <= 1)
        });
        if seen { Ok(()) } else { Err(io::Error::other("the server does not see the stepped clock")) }
    }

    fn before(&mut self) -> RedisResult<StateBefore> {
        self.ask::<()>(&format!("SET control x PX {TEN_SECONDS}"))?;
        self.ask::<i64>(&format!("LOCK.ACQUIRE short a LEASE {TEN_SECONDS}"))?;
        self.ask::<i64>(&format!("LOCK.ACQUIRE long a LEASE {TEN_DAYS}"))?;
        self.ask::<i64>(&format!("LOCK.ACQUIRE permits a LEASE {TEN_SECONDS} LIMIT 2"))?;
        self.ask::<i64>(&format!("LOCK.ACQUIRE permits b LEASE {TEN_DAYS} LIMIT 2"))?;
        self.ask::<i64>("LOCK.ACQUIRE forever a")?;
        self.ask::<()>("PERSIST forever")?;
        let watches = reading_session(self.server.raw())?;
        let mut holder = self.send(&format!("LOCK.ACQUIRE watched a LEASE 3000 WATCHDOG SESSION {watches}"))?;
        let token = match holder.read()? {
            Value::Int(token) => token,
            other => {
                self.wrong.push(format!("watched: {other:?}"));
                0
            }
        };
        let mut session = self.send("LOCK.SESSION")?;
        let id = match resp::session_id(&session.read()?) {
            Ok(id) => id,
            Err(error) => {
                self.wrong.push(format!("the id of a session: {error}"));
                String::new()
            }
        };
        self.ask::<i64>(&format!("LOCK.ACQUIRE awaited a LEASE {TEN_SECONDS}"))?;
        self.ask::<i64>(&format!("LOCK.ACQUIRE bound s LEASE {TEN_SECONDS} EPHEMERAL SESSION {id}"))?;
        self.same(&format!("LOCK.ACQUIRE awaited s WAIT 0 SESSION {id}"), Value::SimpleString("WAITING".into()))?;
        let waits = self.send("LOCK.ACQUIRE short b WAIT 0")?;
        let waits_for_a_permit = self.send("LOCK.ACQUIRE permits c WAIT 0 LIMIT 2")?;
        let mut waits_a_second = self.send("PING")?;
        waits_a_second.read()?;
        let waits_a_second_id = waits_a_second.client_id();
        waits_a_second.send(&[b"LOCK.ACQUIRE", b"long", b"b", b"WAIT", b"1000"])?;
        let pops = self.send("BLPOP nothing 1")?;
        let begun = Instant::now();
        // The fifth is the session that reads its events, without which the server would not renew `watched`.
        support::until(AT_ONCE, "four clients wait, and a session for its events", || {
            self.server.info("clients", "blocked_clients").as_deref() == Some("5")
        });
        Ok(StateBefore { token, waits, waits_for_a_permit, waits_a_second, waits_a_second_id, pops, session, begun })
    }

    /// The clock goes back between the release of a lock and the grant to the next waiter, which a timer of the server makes:
    /// timers use that clock.
    fn step_back_during_hand_off(&mut self) -> RedisResult<()> {
        let first: i64 = self.ask("LOCK.ACQUIRE turn a")?;
        let mut waits = self.send("LOCK.ACQUIRE turn b WAIT 0")?;
        support::until(AT_ONCE, "a client waits", || {
            self.server.info("clients", "blocked_clients").as_deref() == Some("1")
        });
        let mut busy = self.send("PING")?;
        busy.read()?;
        busy.send_bytes(b"LOCK.RELEASE turn a\r\nDEBUG SLEEP 1\r\n")?;
        // The release is executed when it arrives, long before the second is over.
        std::thread::sleep(Duration::from_millis(300));
        self.set_clock(-HOUR)?;
        let token = self.granted(&mut waits, "the next in the queue");
        self.after(token, first);
        self.is_running()
    }

    /// The clock steps past the only timer, which would be due in minutes.
    fn forward_in_silence(&mut self) -> RedisResult<()> {
        let first: i64 = self.ask("LOCK.ACQUIRE long a LEASE 600000")?;
        let mut waits = self.send("LOCK.ACQUIRE long b WAIT 0")?;
        support::until(AT_ONCE, "a client waits", || {
            self.server.info("clients", "blocked_clients").as_deref() == Some("1")
        });
        self.set_clock(HOUR)?;
        let token = self.granted(&mut waits, "the waiter of a lock whose lease the step ended");
        self.after(token, first);
        self.is_running()
    }

    /// The clock went forward: what ends before the new time has ended, everything else stays.
    fn after_forward(&mut self, mut before: StateBefore, seconds: i64) -> RedisResult<()> {
        let token = self.granted(&mut before.waits, "the waiter of a lock whose lease the step ended");
        self.after(token, before.token);
        self.notified(&mut before.session, &[("granted", "awaited")])?;
        self.same("HEXISTS bound s", Value::Int(1))?;
        self.same("EXISTS control", Value::Int(0))?;
        self.same("LOCK.ACQUIRE long c", Value::Nil)?;
        self.same("LOCK.ACQUIRE forever c", Value::Nil)?;
        let left: i64 = self.ask("PTTL long")?;
        self.near("the rest of a lease longer than the step", left, TEN_DAYS - seconds * 1000);
        // One of two permits has expired.
        let token = self.granted(&mut before.waits_for_a_permit, "the waiter of a permit whose lease the step ended");
        self.after(token, before.token);
        self.same("LOCK.ACQUIRE permits d LIMIT 2", Value::Nil)?;
        self.ask::<i64>(&format!("LOCK.RENEW long a LEASE {TEN_SECONDS}"))?;
        let left: i64 = self.ask("PTTL long")?;
        self.near("the rest of a renewed lease", left, TEN_SECONDS);
        self.same("HEXISTS watched a", Value::Int(1))?;
        self.ends("a wait begun before", &mut before.waits_a_second, before.begun, "null")?;
        let _ = before.pops.read_timeout(AT_ONCE)?;
        self.is_running()?;

        // The clock is corrected: tokens of the future have been issued.
        let future: i64 = self.ask("LOCK.ACQUIRE future a LEASE 3600000")?;
        self.set_clock(0)?;
        let token = self.ask("LOCK.ACQUIRE afterwards a")?;
        self.after(token, future);
        let left: i64 = self.ask("PTTL future")?;
        self.near("the rest of a lease from before the clock was put right", left, 3_600_000 + seconds * 1000);
        self.restart_with_tokens_ahead("future", future)?;
        Ok(())
    }

    /// The clock went back: nothing ends early, and deadlines are further away by the step.
    fn after_backward(&mut self, mut before: StateBefore, seconds: i64) -> RedisResult<()> {
        let control: i64 = self.ask("PTTL control")?;
        let left: i64 = self.ask("PTTL short")?;
        self.near("the rest of a key", control, TEN_SECONDS - seconds * 1000);
        self.near("the rest of a lease", left, TEN_SECONDS - seconds * 1000);
        self.same("LOCK.ACQUIRE short c", Value::Nil)?;
        self.same("LOCK.ACQUIRE forever c", Value::Nil)?;
        self.same("LOCK.ACQUIRE permits d LIMIT 2", Value::Nil)?;
        before.session.send(&[b"LOCK.EVENTS"])?;
        let events = before.session.read()?;
        self.equal("events of a session that lost nothing", events, Value::Nil);
        self.same("LOCK.RELEASE awaited a", Value::Int(1))?;
        self.notified(&mut before.session, &[("granted", "awaited")])?;
        if before.waits.pending() && before.waits_for_a_permit.pending() {
            self.same("LOCK.RELEASE short a", Value::Int(1))?;
        } else {
            self.wrong.push("a waiter got a lock that is held".into());
        }
        let token = self.granted(&mut before.waits, "the waiter of a released lock");
        self.after(token, before.token);
        self.same("LOCK.RELEASE permits b", Value::Int(1))?;
        let token = self.granted(&mut before.waits_for_a_permit, "the waiter of a released permit");
        self.after(token, before.token);
        // A renewal counts from the current clock.
        self.ask::<i64>(&format!("LOCK.RENEW long a LEASE {TEN_SECONDS}"))?;
        let left: i64 = self.ask("PTTL long")?;
        self.near("the rest of a renewed lease", left, TEN_SECONDS);
        self.same("HEXISTS watched a", Value::Int(1))?;
        self.waits_from_before(&mut before)?;
        self.is_running()?;

        let last: i64 = self.ask("LOCK.ACQUIRE last a LEASE 3600000")?;
        self.restart_with_tokens_ahead("last", last)?;
        Ok(())
    }

    /// A wait that began before the clock went back may last longer, like BLPOP's. It can be unblocked.
    fn waits_from_before(&mut self, before: &mut StateBefore) -> RedisResult<()> {
        let patience = Duration::from_millis(2500);
        let ours = before.waits_a_second.read_timeout(patience.saturating_sub(before.begun.elapsed()))?;
        let theirs = before.pops.read_timeout(Duration::from_millis(100))?;
        let said = |reply: &Option<Value>| {
            if reply.is_some() { "ended in time" } else { "lasts longer" }
        };
        self.seen.push(format!("a wait begun before {}, BLPOP's {}", said(&ours), said(&theirs)));
        if ours.is_none() {
            self.same(&format!("CLIENT UNBLOCK {}", before.waits_a_second_id), Value::Int(1))?;
            self.ends("after CLIENT UNBLOCK it", &mut before.waits_a_second, Instant::now(), "null")?;
        }
        Ok(())
    }

    /// Waits and leases that begin after the step have their normal length.
    fn is_running(&mut self) -> RedisResult<()> {
        self.ask::<i64>("LOCK.ACQUIRE new a LEASE 700")?;
        let begun = Instant::now();
        let mut refused = self.send("LOCK.ACQUIRE new b WAIT 200")?;
        self.ends("a wait begun after", &mut refused, begun, "null")?;
        let mut granted = self.send("LOCK.ACQUIRE new c WAIT 0")?;
        let token = self.granted(&mut granted, "a lock whose lease was begun after the step");
        if token.is_some() && begun.elapsed() < Duration::from_millis(690) {
            self.wrong.push(format!("a lease of 700 ms ended after {:?}", begun.elapsed()));
        }
        Ok(())
    }

    /// After a restart, a server knows only the tokens of locks that are still held.
    fn restart_with_tokens_ahead(&mut self, held: &str, ahead: i64) -> RedisResult<()> {
        let _: RedisResult<()> = self.ask("SHUTDOWN SAVE");
        self.server.wait_until_ended();
        self.server.restart();
        self.connection = self.server.connect();
        let elsewhere: i64 = self.ask("LOCK.ACQUIRE elsewhere a")?;
        self.seen.push(format!(
            "after a restart tokens elsewhere were {}",
            if elsewhere > ahead { "higher still" } else { "lower" }
        ));
        // The lock itself has its newest token.
        self.same(&format!("LOCK.RELEASE {held} a TOKEN {ahead}"), Value::Int(1))?;
        let token = self.ask(&format!("LOCK.ACQUIRE {held} b"))?;
        // It counts unless it is implausibly far ahead.
        let counts = ahead - elsewhere < HOUR * 1_000_000;
        self.after(token, if counts { ahead } else { elsewhere });
        Ok(())
    }

    fn ask<T: redis::FromRedisValue>(&mut self, line: &str) -> RedisResult<T> {
        self.requests += 1;
        command(line).query(&mut self.connection)
    }

    fn send(&mut self, line: &str) -> RedisResult<Raw> {
        self.requests += 1;
        Ok(send(&self.server, line)?)
    }

    fn same(&mut self, line: &str, expected: Value) -> RedisResult<()> {
        let found: Value = self.ask(line)?;
        self.equal(line, found, expected);
        Ok(())
    }

    fn equal<T: PartialEq + Debug>(&mut self, what: &str, found: T, expected: T) {
        if found != expected {
            self.wrong.push(format!("{what}: {found:?}, expected {expected:?}"));
        }
    }

    /// Within three seconds, because the machine may be busy.
    fn near(&mut self, what: &str, found: i64, expected: i64) {
        if !(expected - 3000..=expected).contains(&found) {
            self.wrong.push(format!("{what}: {found} ms, expected about {expected} ms"));
        }
    }

    fn granted(&mut self, waiter: &mut Raw, what: &str) -> Option<i64> {
        match waiter.read_timeout(AT_ONCE) {
            Ok(Some(Value::Int(token))) => Some(token),
            other => {
                self.wrong.push(format!("{what} got {other:?}"));
                None
            }
        }
    }

    /// A session reads exactly these events, each a kind and a key, in any order.
    fn notified(&mut self, session: &mut Raw, expected: &[(&str, &str)]) -> RedisResult<()> {
        let mut seen = Vec::new();
        while seen.len() < expected.len() {
            session.send(&[b"LOCK.EVENTS", b"WAIT", AT_ONCE.as_millis().to_string().as_bytes()])?;
            let Some(Value::Array(events)) = session.read_timeout(2 * AT_ONCE)? else { break };
            seen.extend(events.iter().map(kind_and_key));
        }
        seen.sort();
        let expected: Vec<_> = expected.iter().map(|(kind, key)| format!("{kind} {key}")).collect();
        self.equal("the events of a session", seen, expected);
        Ok(())
    }

    /// Tokens increase, whatever the clock does.
    fn after(&mut self, token: Option<i64>, before: i64) {
        if token.is_none_or(|token| token <= before) {
            self.wrong.push(format!("token {token:?} after {before}"));
        }
    }

    fn ends(&mut self, what: &str, waiter: &mut Raw, begun: Instant, how: &str) -> RedisResult<()> {
        match waiter.read_timeout(AT_ONCE + Duration::from_secs(1))? {
            Some(Value::Nil) => {
                self.seen.push(format!("{what} ended with {how} after {} ms", begun.elapsed().as_millis()))
            }
            other => self.wrong.push(format!("{what}: {other:?}, expected {how}")),
        }
        Ok(())
    }
}

/// `granted key` for an event of one key.
fn kind_and_key(event: &Value) -> String {
    let text = |value: &Value| match value {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::SimpleString(text) => text.clone(),
        other => format!("{other:?}"),
    };
    match event {
        Value::Array(fields) => match fields.as_slice() {
            [kind, _, Value::Array(keys), ..] => {
                format!("{} {}", text(kind), keys.iter().map(text).collect::<Vec<_>>().join(" "))
            }
            other => format!("{other:?}"),
        },
        other => format!("{other:?}"),
    }
}
