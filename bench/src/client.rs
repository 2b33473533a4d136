//! A client that waits for each reply: for setting up, for looking, and where one client at a time is what is measured.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::resp::{Replies, Reply, Request};

/// No answer within this time means that the server hangs, and the run ends.
const PATIENCE: Duration = Duration::from_secs(60);

/// A blocking connection.
pub struct Client {
    stream: TcpStream,
    replies: Replies,
    chunk: Vec<u8>,
}

impl Client {
    /// Connects to a server on this machine.
    pub fn connect(port: u16) -> Result<Self> {
        let stream =
            TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).context("connecting to the server")?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { stream, replies: Replies::default(), chunk: vec![0; 1 << 16] })
    }

    /// Sends without waiting.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).context("writing to the server")
    }

    /// The next reply, errors of the server included.
    pub fn read(&mut self) -> Result<Reply> {
        loop {
            if let Some(reply) = self.replies.next()? {
                return Ok(reply);
            }
            let length = self.stream.read(&mut self.chunk).context("reading from the server")?;
            if length == 0 {
                bail!("the server closed the connection");
            }
            self.replies.feed(&self.chunk[..length]);
        }
    }

    /// Sends one request and waits for its reply, errors of the server included.
    pub fn ask(&mut self, request: &Request) -> Result<Reply> {
        self.send(request.bytes())?;
        self.read()
    }

    /// Sends one request; an error reply is an error.
    pub fn call<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> Result<Reply> {
        match self.ask(&Request::new(arguments))? {
            Reply::Error(error) => {
                let words: Vec<_> = arguments.iter().map(|a| String::from_utf8_lossy(a.as_ref())).collect();
                bail!("{}: {error}", words.join(" "))
            }
            reply => Ok(reply),
        }
    }

    /// Sends requests in batches of at most `batch`, each after the replies to the one before, and checks every reply.
    pub fn pipeline(
        &mut self,
        requests: impl Iterator<Item = Request>,
        batch: usize,
        mut check: impl FnMut(Reply) -> Result<()>,
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

    /// A line of `INFO section`.
    pub fn info(&mut self, section: &str, field: &str) -> Result<String> {
        let text = self.call(&["INFO", section])?.text()?;
        let prefix = format!("{field}:");
        let line = text.lines().find_map(|line| line.strip_prefix(&prefix));
        Ok(line.with_context(|| format!("INFO {section} has no {field}"))?.trim().to_owned())
    }

    /// Seconds of CPU that the server's main thread has used so far.
    pub fn server_cpu(&mut self) -> Result<f64> {
        let text = self.call(&["INFO", "cpu"])?.text()?;
        let seconds = |field: &str| -> Result<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(field));
            Ok(line.with_context(|| format!("INFO cpu has no {field}"))?.trim().parse()?)
        };
        Ok(seconds("used_cpu_sys_main_thread:")? + seconds("used_cpu_user_main_thread:")?)
    }

    /// Loads a script; its SHA.
    pub fn load_script(&mut self, script: &str) -> Result<String> {
        self.call(&["SCRIPT", "LOAD", script])?.text()
    }

    /// Whether the server knows a command.
    pub fn knows(&mut self, command: &str) -> Result<bool> {
        Ok(match self.call(&["COMMAND", "INFO", command])? {
            Reply::Array(found) => found.first().is_some_and(|entry| *entry != Reply::Null),
            _ => false,
        })
    }
}
