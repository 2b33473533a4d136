//! Where a state is built: a server of its own, and the connections that make it what it is.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use support::resp::{self, Request, Value};
use support::{Raw, eventually};

use crate::server::Running;

/// Until all that a state needs is there, and until all that a step causes has come.
const PATIENCE: Duration = Duration::from_secs(120);
/// After a step, for what it leaves to later turns of the server's loop.
const AFTERMATH: Duration = Duration::from_millis(200);
/// Connections that ask at the same time; as many as the server's backlog takes.
const AT_ONCE: usize = 500;

/// How large the states are.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Connections that wait.
    pub crowd: usize,
    /// Requests for many keys each.
    pub requests: usize,
    /// Holders of one lock where the server has no limit of its own, or locks of one holder.
    pub many: usize,
    /// In this time whatever runs out by itself must have been built.
    pub build: Duration,
}

impl Size {
    /// What 10,000 connections can build.
    pub const FULL: Self = Self { crowd: 9_900, requests: 1_000, many: 100_000, build: Duration::from_secs(8) };
    /// Enough to see that every state can be built.
    pub const QUICK: Self = Self { crowd: 500, requests: 20, many: 3_000, build: Duration::from_secs(1) };
}

/// A state under construction, and while it is measured.
pub struct Stage {
    /// The server.
    pub server: Running,
    /// How large it is to be.
    pub size: Size,
    /// They wait.
    crowd: Vec<Raw>,
    /// They don't.
    guests: Vec<Raw>,
    /// When what was built runs out.
    due: Option<Instant>,
}

impl Drop for Stage {
    /// By RST. What ends in good order stays in the kernel's tables for two minutes, also in the one of tracked connections where
    /// containers have it kept; ten thousand for each state fill that after half of the states, and the next connection then waits
    /// for seconds.
    fn drop(&mut self) {
        self.crowd.drain(..).chain(self.guests.drain(..)).for_each(Raw::reset);
    }
}

impl Stage {
    /// Nothing yet.
    pub fn new(server: Running, size: Size) -> Self {
        Self { server, size, crowd: Vec::new(), guests: Vec::new(), due: None }
    }

    /// Sends a line, which has to succeed.
    pub fn order(&mut self, line: &str) -> Result<Value> {
        self.server.control.call(&line.split(' ').collect::<Vec<_>>())
    }

    /// Sends many lines, each of which has to succeed.
    pub fn order_all(&mut self, lines: impl Iterator<Item = String>) -> Result<()> {
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

    /// Sends a line whatever the reply is: the step that is measured. Its beginning, for those who read the results.
    pub fn step(&mut self, line: &str) -> Result<String> {
        let reply = self.server.control.ask(&Request::typed(line))?;
        Ok(told(&reply))
    }

    /// One of the module's settings, or `usual` where it has none of this name or none is set.
    pub fn limit(&mut self, name: &str, usual: usize) -> Result<usize> {
        let reply = self.order(&format!("CONFIG GET {name}"))?;
        let value = match &reply {
            Value::Array(pair) => pair.get(1).map(resp::text).transpose()?,
            _ => None,
        };
        let limit: usize = value.unwrap_or_default().parse().unwrap_or(0);
        Ok(if limit == 0 { usual } else { limit.min(usual) })
    }

    /// Connects as many clients as there are requests, sends each its own, and waits until all of them are blocked.
    ///
    /// The module looks for cycles at each of them; what that costs is another state's matter.
    pub fn gather(&mut self, requests: impl Iterator<Item = String>) -> Result<()> {
        let has_module = self.server.control.knows("LOCK.ACQUIRE")?;
        if has_module {
            self.order("CONFIG SET holdfast.detect-deadlocks no")?;
        }
        let mut requests = requests.peekable();
        while requests.peek().is_some() {
            for request in requests.by_ref().take(AT_ONCE) {
                let mut raw = Raw::connect(([127, 0, 0, 1], self.server.port()).into())?;
                request.lines().try_for_each(|line| raw.send_bytes(Request::typed(line).bytes()))?;
                self.crowd.push(raw);
            }
            self.all_are_blocked()?;
        }
        if has_module {
            self.order("CONFIG SET holdfast.detect-deadlocks yes")?;
        }
        Ok(())
    }

    fn all_are_blocked(&mut self) -> Result<()> {
        let wanted = self.crowd.len().to_string();
        let over = self.due;
        let is_over = || over.is_some_and(|due| due < Instant::now());
        let blocked = eventually(PATIENCE, || {
            is_over() || self.server.control.info("clients", "blocked_clients").is_ok_and(|blocked| blocked == wanted)
        });
        if is_over() {
            bail!("the time of those who wait was over before all {wanted} had come");
        }
        if !blocked {
            let reply = self.crowd.iter_mut().find_map(|raw| raw.read_timeout(Duration::ZERO).ok().flatten());
            bail!("not all {wanted} clients wait; one was told {:?}", reply.as_ref().map(told));
        }
        Ok(())
    }

    /// Reads what each of the crowd is told. The first one's reply.
    pub fn all_are_told(&mut self) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        let mut first = None;
        for raw in &mut self.crowd {
            let reply = raw.read_timeout(end.saturating_duration_since(Instant::now()))?;
            let reply = reply.context("one of the crowd was told nothing")?;
            first.get_or_insert_with(|| told(&reply));
        }
        Ok(first.unwrap_or_default())
    }

    /// What is built runs out then.
    pub fn is_due(&mut self, at: Instant) {
        self.due = Some(at);
    }

    /// Waits until it has run out.
    pub fn runs_out(&mut self) -> Result<String> {
        let due = self.due.context("nothing was to run out")?;
        if due < Instant::now() {
            bail!("it ran out before it was built");
        }
        thread::sleep(due - Instant::now());
        Ok(String::new())
    }

    /// Goes on for a while, so that what is left to timers and later turns is measured as well.
    pub fn aftermath(&self) {
        thread::sleep(AFTERMATH);
    }

    /// Goes on for so long.
    pub fn lasts(&self, time: Duration) -> String {
        thread::sleep(time);
        String::new()
    }

    /// The connections of all guests end.
    pub fn guests_leave(&mut self) {
        self.guests.drain(..).for_each(Raw::close);
    }

    /// Connects a guest that is a session and waits for its events; its id.
    pub fn session(&mut self) -> Result<String> {
        let mut raw = Raw::connect(([127, 0, 0, 1], self.server.port()).into())?;
        raw.send_bytes(Request::typed("LOCK.SESSION").bytes())?;
        let id = resp::session_id(&raw.read()?)?;
        raw.send_bytes(Request::typed("LOCK.EVENTS WAIT 0").bytes())?;
        self.guests.push(raw);
        Ok(id)
    }

    /// Waits until so many keys are there.
    pub fn has_keys(&mut self, count: usize) -> Result<()> {
        let wanted = Value::Int(count.try_into()?);
        if !eventually(PATIENCE, || self.order("DBSIZE").is_ok_and(|found| found == wanted)) {
            bail!("there are not {count} keys, but {:?}", self.order("DBSIZE")?);
        }
        Ok(())
    }

    /// Connects a guest, a client that waits for nothing, and has it send lines, each of which has to succeed.
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
fn told(reply: &Value) -> String {
    const LENGTH: usize = 80;
    match reply {
        Value::ServerError(_) => format!("-{}", resp::error(reply).unwrap_or_default()).chars().take(LENGTH).collect(),
        Value::Int(number) => number.to_string(),
        Value::Nil => "null".into(),
        Value::Array(elements) => format!("{} elements", elements.len()),
        other => format!("{other:?}").chars().take(LENGTH).collect(),
    }
}
