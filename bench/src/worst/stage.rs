//! The environment of a state: a server of its own, and its connections.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use support::resp::{self, Request, Value};
use support::{Raw, eventually};

use crate::server::Running;

/// Timeout for building a state, and for the effects of a step.
const PATIENCE: Duration = Duration::from_secs(120);
/// The time after a step for its effects in later event-loop iterations.
const AFTERMATH: Duration = Duration::from_millis(200);
/// Connections that are opened at once: the server's backlog.
const AT_ONCE: usize = 500;

/// The size of the states.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Waiting connections.
    pub clients: usize,
    /// Requests for many keys each.
    pub requests: usize,
    /// Holders of one lock if the server has no limit, or locks with one holder.
    pub many: usize,
    /// The time for building what expires.
    pub build: Duration,
}

impl Size {
    /// What 10,000 connections can build.
    pub const FULL: Self = Self { clients: 9_900, requests: 1_000, many: 100_000, build: Duration::from_secs(8) };
    /// Enough to check that every state can be built.
    pub const QUICK: Self = Self { clients: 500, requests: 20, many: 3_000, build: Duration::from_secs(1) };
}

/// A state during construction and measurement.
pub struct Stage {
    /// The server.
    pub server: Running,
    /// Its size.
    pub size: Size,
    /// How late the effects of the step were complete, if the step measures that.
    pub delay: Option<Duration>,
    /// The waiting connections.
    clients: Vec<Raw>,
    /// The other connections.
    guests: Vec<Raw>,
    /// When the state expires.
    due: Option<Instant>,
}

impl Drop for Stage {
    /// Resets the connections. A closed connection stays in the kernel's tables for two minutes, and in the connection tracking if containers
    /// use it. Ten thousand for each state would fill these tables, and new connections would then take seconds.
    fn drop(&mut self) {
        self.clients.drain(..).chain(self.guests.drain(..)).for_each(Raw::reset);
    }
}

impl Stage {
    /// Without any connections yet.
    pub fn new(server: Running, size: Size) -> Self {
        Self { server, size, delay: None, clients: Vec::new(), guests: Vec::new(), due: None }
    }

    /// Sends a line, which must succeed.
    pub fn run_ok(&mut self, line: &str) -> Result<Value> {
        self.server.control.call(&line.split(' ').collect::<Vec<_>>())
    }

    /// Sends many lines, each of which must succeed.
    pub fn run_all(&mut self, lines: impl Iterator<Item = String>) -> Result<()> {
        let requests = lines.map(|line| Request::typed(&line));
        self.server.control.pipeline(requests, 100, |reply| match resp::error(&reply) {
            Some(error) => bail!(error),
            None => Ok(()),
        })
    }

    /// Runs a script over the key `key`, with one argument.
    pub fn script(&mut self, script: &str, key: &str, argument: usize) -> Result<Value> {
        self.server.control.call(&["EVAL", script, "1", key, &argument.to_string()])
    }

    /// Sends the line that is measured, whatever its reply. Returns the beginning of the reply, for the table.
    pub fn step(&mut self, line: &str) -> Result<String> {
        let reply = self.server.control.ask(&Request::typed(line))?;
        Ok(beginning_of(&reply))
    }

    /// One of the module's settings, or `default` if it does not exist or is not set.
    pub fn limit(&mut self, name: &str, default: usize) -> Result<usize> {
        let reply = self.run_ok(&format!("CONFIG GET {name}"))?;
        let value = match &reply {
            Value::Array(pair) => pair.get(1).map(resp::text).transpose()?,
            _ => None,
        };
        let limit: usize = value.unwrap_or_default().parse().unwrap_or(0);
        Ok(if limit == 0 { default } else { limit.min(default) })
    }

    /// Connects a client for each request, sends the request, and waits until all clients are blocked.
    ///
    /// The module searches for cycles for each of them. Another state measures that cost.
    pub fn connect_all(&mut self, requests: impl Iterator<Item = String>) -> Result<()> {
        let has_module = self.server.control.knows("LOCK.ACQUIRE")?;
        if has_module {
            self.run_ok("CONFIG SET holdfast.detect-deadlocks no")?;
        }
        let mut requests = requests.peekable();
        while requests.peek().is_some() {
            for request in requests.by_ref().take(AT_ONCE) {
                let mut raw = Raw::connect(([127, 0, 0, 1], self.server.port()).into())?;
                request.lines().try_for_each(|line| raw.send_bytes(Request::typed(line).bytes()))?;
                self.clients.push(raw);
            }
            self.all_are_blocked()?;
        }
        if has_module {
            self.run_ok("CONFIG SET holdfast.detect-deadlocks yes")?;
        }
        Ok(())
    }

    fn all_are_blocked(&mut self) -> Result<()> {
        let wanted = self.clients.len().to_string();
        let over = self.due;
        let is_over = || over.is_some_and(|due| due < Instant::now());
        let blocked = eventually(PATIENCE, || {
            is_over() || self.server.control.info("clients", "blocked_clients").is_ok_and(|blocked| blocked == wanted)
        });
        if is_over() {
            bail!("the first waits timed out before all {wanted} had begun");
        }
        if !blocked {
            let reply = self.clients.iter_mut().find_map(|raw| raw.read_timeout(Duration::ZERO).ok().flatten());
            bail!("not all {wanted} clients wait; one got {:?}", reply.as_ref().map(beginning_of));
        }
        Ok(())
    }

    /// Reads the reply of each waiting client. Returns the first one.
    pub fn read_all_replies(&mut self) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        let mut first = None;
        for raw in &mut self.clients {
            let reply = raw.read_timeout(end.saturating_duration_since(Instant::now()))?;
            let reply = reply.context("a waiting client got no reply")?;
            first.get_or_insert_with(|| beginning_of(&reply));
        }
        Ok(first.unwrap_or_default())
    }

    /// Sets the time when the state expires.
    pub fn set_due(&mut self, at: Instant) {
        self.due = Some(at);
    }

    /// Waits until the state has expired.
    pub fn wait_until_due(&mut self) -> Result<String> {
        let due = self.due.context("the state does not expire")?;
        if due < Instant::now() {
            bail!("the state expired before it was complete");
        }
        thread::sleep(due - Instant::now());
        Ok(String::new())
    }

    /// Waits for a while, so that effects in timers and later iterations are measured as well.
    pub fn wait_for_aftermath(&self) {
        thread::sleep(AFTERMATH);
    }

    /// Waits for this long.
    pub fn wait_for(&self, time: Duration) -> String {
        thread::sleep(time);
        String::new()
    }

    /// Closes all other connections.
    pub fn close_guests(&mut self) {
        self.guests.drain(..).for_each(Raw::close);
    }

    /// Opens a session that blocks on events. Returns its id.
    pub fn session(&mut self) -> Result<String> {
        let id = self.session_that_reads_nothing()?;
        let events = Request::typed("LOCK.EVENTS WAIT 0");
        self.guests.last_mut().context("it was opened")?.send_bytes(events.bytes())?;
        Ok(id)
    }

    /// Opens a session that never asks for its events. Returns its id.
    pub fn session_that_reads_nothing(&mut self) -> Result<String> {
        let mut raw = Raw::connect(([127, 0, 0, 1], self.server.port()).into())?;
        raw.send_bytes(Request::typed("LOCK.SESSION").bytes())?;
        let id = resp::session_id(&raw.read()?)?;
        self.guests.push(raw);
        Ok(id)
    }

    /// Waits until there are this many keys.
    pub fn wait_for_keys(&mut self, count: usize) -> Result<()> {
        let wanted = Value::Int(count.try_into()?);
        if !eventually(PATIENCE, || self.run_ok("DBSIZE").is_ok_and(|found| found == wanted)) {
            bail!("there are not {count} keys, but {:?}", self.run_ok("DBSIZE")?);
        }
        Ok(())
    }

    /// Connects a client that does not wait, and sends lines, each of which must succeed.
    pub fn join(&mut self, lines: impl Iterator<Item = String>) -> Result<()> {
        let mut raw = Raw::connect(([127, 0, 0, 1], self.server.port()).into())?;
        let lines: Vec<Request> = lines.map(|line| Request::typed(&line)).collect();
        for some in lines.chunks(100) {
            raw.send_bytes(&some.iter().flat_map(Request::bytes).copied().collect::<Vec<u8>>())?;
            for _ in some {
                if let Some(error) = resp::error(&raw.read()?) {
                    bail!(error);
                }
            }
        }
        self.guests.push(raw);
        Ok(())
    }
}

/// The beginning of a reply.
fn beginning_of(reply: &Value) -> String {
    const LENGTH: usize = 80;
    match reply {
        Value::ServerError(_) => format!("-{}", resp::error(reply).unwrap_or_default()).chars().take(LENGTH).collect(),
        Value::Int(number) => number.to_string(),
        Value::Nil => "null".into(),
        Value::Array(elements) => format!("{} elements", elements.len()),
        other => format!("{other:?}").chars().take(LENGTH).collect(),
    }
}
