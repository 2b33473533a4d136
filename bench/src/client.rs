//! A blocking client, for setup, for reading the server's state, and where one client at a time is measured.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail};
use support::Raw;
use support::resp::{self, Request, Value};

/// A connection whose reads time out after a minute.
pub struct Client {
    raw: Raw,
}

impl Client {
    /// Connects to a server on this machine.
    pub fn connect(port: u16) -> Result<Self> {
        let raw = Raw::connect(SocketAddr::from(([127, 0, 0, 1], port))).context("connecting to the server")?;
        Ok(Self { raw })
    }

    /// Sends bytes without waiting.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.raw.send_bytes(bytes).context("writing to the server")
    }

    /// The next reply, which may be an error.
    pub fn read(&mut self) -> Result<Value> {
        self.raw.read().context("reading from the server")
    }

    /// Sends one request and waits for its reply, which may be an error.
    pub fn ask(&mut self, request: &Request) -> Result<Value> {
        self.send(request.bytes())?;
        self.read()
    }

    /// Sends one request; an error reply is an error.
    pub fn call<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> Result<Value> {
        let reply = self.ask(&Request::new(arguments))?;
        if let Some(error) = resp::error(&reply) {
            let words: Vec<_> = arguments.iter().map(|a| String::from_utf8_lossy(a.as_ref())).collect();
            bail!("{}: {error}", words.join(" "))
        }
        Ok(reply)
    }

    /// Sends requests in batches of at most `batch`, each after the replies to the previous one, and checks every reply.
    pub fn pipeline(
        &mut self,
        requests: impl Iterator<Item = Request>,
        batch: usize,
        mut check: impl FnMut(Value) -> Result<()>,
    ) -> Result<()> {
        let mut requests = requests.peekable();
        while requests.peek().is_some() {
            let mut bytes = Vec::new();
            let mut sent = 0;
            for request in requests.by_ref().take(batch) {
                bytes.extend_from_slice(request.bytes());
                sent += 1;
            }
            self.send(&bytes)?;
            for _ in 0..sent {
                check(self.read()?)?;
            }
        }
        Ok(())
    }

    /// A field in a section of `INFO`.
    pub fn info(&mut self, section: &str, field: &str) -> Result<String> {
        let text = resp::text(&self.call(&["INFO", section])?)?;
        let prefix = format!("{field}:");
        let line = text.lines().find_map(|line| line.strip_prefix(&prefix));
        Ok(line.with_context(|| format!("INFO {section} has no {field}"))?.trim().to_owned())
    }

    /// Seconds of CPU that the server's main thread has used.
    pub fn server_cpu(&mut self) -> Result<f64> {
        let text = resp::text(&self.call(&["INFO", "cpu"])?)?;
        let seconds = |field: &str| -> Result<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(field));
            Ok(line.with_context(|| format!("INFO cpu has no {field}"))?.trim().parse()?)
        };
        Ok(seconds("used_cpu_sys_main_thread:")? + seconds("used_cpu_user_main_thread:")?)
    }

    /// Loads a script, and returns its SHA.
    pub fn load_script(&mut self, script: &str) -> Result<String> {
        Ok(resp::text(&self.call(&["SCRIPT", "LOAD", script])?)?)
    }

    /// Whether the server has a command.
    pub fn knows(&mut self, command: &str) -> Result<bool> {
        Ok(match self.call(&["COMMAND", "INFO", command])? {
            Value::Array(found) => found.first().is_some_and(|entry| *entry != Value::Nil),
            _ => false,
        })
    }
}
