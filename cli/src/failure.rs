//! What went wrong, with what to do next, and the exit code for it.

use std::fmt;
use std::io;

use holdfast_client::Error;
use holdfast_client::redis::RedisError;

/// sysexits.h: a service is unavailable.
pub const UNAVAILABLE: u8 = 69;
/// sysexits.h: temporary failure; trying again may help.
pub const TEMPORARY: u8 = 75;
/// sysexits.h: the command was used wrongly.
const USAGE: u8 = 64;

/// Why a task was not done.
#[derive(Debug)]
pub struct Failure {
    message: String,
    next: String,
    code: u8,
}

impl Failure {
    /// The exit code.
    pub fn code(&self) -> u8 {
        self.code
    }

    /// Something of this machine.
    pub fn here(error: &io::Error) -> Self {
        Self { message: error.to_string(), next: String::new(), code: UNAVAILABLE }
    }

    /// A file, a socket or the like, with what to do about it.
    pub fn of(what: &str, error: &io::Error, next: &str) -> Self {
        Self { message: format!("{what}: {error}"), next: next.to_owned(), code: UNAVAILABLE }
    }

    /// Arguments that don't go together.
    pub fn usage(message: &str) -> Self {
        Self { message: message.to_owned(), next: String::new(), code: USAGE }
    }

    /// A server that was asked something of its own.
    pub fn server(server: &str, key: &str, error: &RedisError) -> Self {
        let next = advice(&error.to_string(), error.code().is_none());
        Self { message: format!("{server}: {key}: {error}"), next, code: UNAVAILABLE }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        let (next, code) = match &error {
            Error::Connection { .. } => (advice(&message, true), UNAVAILABLE),
            Error::Lost { .. } | Error::NotHeld { .. } => {
                ("what ran under it may have run beside somebody else: check what it wrote".to_owned(), TEMPORARY)
            }
            Error::Deadlock { .. } => {
                ("take the locks in one order, or all at once: holdfast run KEY KEY".to_owned(), UNAVAILABLE)
            }
            Error::NoReplicas { .. } => {
                ("see INFO replication on the server, or ask for fewer replicas".to_owned(), TEMPORARY)
            }
            Error::WrongType { .. } => ("choose another key: this one holds something else".to_owned(), UNAVAILABLE),
            Error::Invalid { .. } => (String::new(), USAGE),
            _ => (advice(&message, false), UNAVAILABLE),
        };
        Self { message, next, code }
    }
}

/// What may help.
fn advice(message: &str, no_answer: bool) -> String {
    let known = [
        ("unknown command", "load the Holdfast module into this server: loadmodule libholdfast.so"),
        ("NOAUTH", "name user and password in --url or REDIS_URL: redis://user:password@host"),
        ("WRONGPASS", "check user and password in --url or REDIS_URL"),
        ("NOPERM", "give this user the right: ACL SETUSER"),
        ("CROSSSLOT", "in a cluster the keys of one run share a slot: {name}a {name}b"),
        ("READONLY", "this server is a replica: name the master, or Sentinel"),
        ("too many wait", "raise that setting, or wait with fewer"),
    ];
    let known = known.iter().find(|(word, _)| message.contains(word)).map(|(_, advice)| *advice);
    let last = if no_answer { "check --url or REDIS_URL, and that the server runs" } else { "" };
    known.unwrap_or(last).to_owned()
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.message)?;
        if self.next.is_empty() { Ok(()) } else { write!(out, "\n  {}", self.next) }
    }
}
