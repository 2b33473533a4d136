//! Failures: the message, advice on what to do, and the exit code.

use std::fmt;
use std::io;

use holdfast_client::Error;
use holdfast_client::redis::RedisError;

/// sysexits.h: internal software error. Here: the wait would never end.
const NEVER: u8 = 70;
/// sysexits.h: a service is unavailable.
pub const UNAVAILABLE: u8 = 69;
/// sysexits.h: temporary failure; a retry may succeed.
pub const TEMPORARY: u8 = 75;
/// sysexits.h: usage error.
const USAGE: u8 = 64;

/// Why a task failed.
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

    /// An error of this machine.
    pub fn here(error: &io::Error) -> Self {
        Self { message: error.to_string(), next: String::new(), code: UNAVAILABLE }
    }

    /// An error of a file, a socket or the like, with advice.
    pub fn of(what: &str, error: &io::Error, next: &str) -> Self {
        Self { message: format!("{what}: {error}"), next: next.to_owned(), code: UNAVAILABLE }
    }

    /// Arguments that do not go together.
    pub fn usage(message: &str) -> Self {
        Self { message: message.to_owned(), next: String::new(), code: USAGE }
    }

    /// An outer run holds this key until this run ends.
    pub fn waits_for_itself(key: &str) -> Self {
        let message = format!("{key:?}: waiting would never end: an outer run holds it");
        let next = "run the command without this lock; if it outlives the outer run: env -u HOLDFAST_OWNERS holdfast …";
        Self { message, next: next.to_owned(), code: NEVER }
    }

    /// An error of a server. `asked`: the server, and the key of the request.
    pub fn server(asked: &str, error: &RedisError) -> Self {
        let words = words(error);
        let next = advice(&words, error.code().is_none());
        Self { message: format!("{asked}: {words}"), next, code: UNAVAILABLE }
    }
}

/// The server's error message, if there is one.
pub fn words(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        (Some(code), None) => code.to_owned(),
        (None, _) => error.to_string(),
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let mut message = error.to_string();
        let (next, code) = match &error {
            Error::Connection { .. } => (advice(&message, true), UNAVAILABLE),
            Error::Lost { .. } | Error::NotHeld { .. } => (
                "the command may have run while another client held the lock: check what it wrote".to_owned(),
                TEMPORARY,
            ),
            Error::Deadlock { .. } => {
                ("acquire the locks in one order, or all at once: holdfast run KEY KEY".to_owned(), NEVER)
            }
            // The module and the server use the same code. This message is the server's, for a primary that refuses all writes.
            Error::NoReplicas { keys, message: words } if words.contains(TOO_FEW_REPLICAS) => {
                message = format!("{keys}: the server refuses writes: {words}");
                (advice(words, false), UNAVAILABLE)
            }
            Error::NoReplicas { .. } => {
                ("see INFO replication on the server, or ask for fewer replicas".to_owned(), TEMPORARY)
            }
            Error::WrongType { .. } => ("choose another key: this one is not a lock".to_owned(), UNAVAILABLE),
            Error::Invalid { .. } => (String::new(), USAGE),
            // The message says what to do.
            Error::ModuleNotLoaded { .. } | Error::ServerTooOld { .. } | Error::ClientTooOld { .. } => {
                (String::new(), UNAVAILABLE)
            }
            _ => (advice(&message, false), UNAVAILABLE),
        };
        Self { message, next, code }
    }
}

/// The error of a primary with fewer replicas than `min-replicas-to-write`.
const TOO_FEW_REPLICAS: &str = "Not enough good replicas";

/// Advice for an error.
fn advice(message: &str, no_answer: bool) -> String {
    let known = [
        ("unknown command", "load the Holdfast module into this server: loadmodule libholdfast.so"),
        ("NOAUTH", "name user and password in --url or REDIS_URL, or set HOLDFAST_PASSWORD"),
        ("WRONGPASS", "check user and password in --url or REDIS_URL, or HOLDFAST_PASSWORD"),
        ("AuthenticationFailed", "check user and password in --url or REDIS_URL, or HOLDFAST_PASSWORD"),
        ("to access", "give this user the right to the key: ACL SETUSER"),
        ("NOPERM", "give this user the right: ACL SETUSER"),
        ("CROSSSLOT", "in a cluster the keys of one run share a slot: {name}a {name}b"),
        ("MOVED", "this server is a node of a cluster: use redis+cluster:// in --url or REDIS_URL"),
        ("READONLY", "this server is a replica: use the address of the primary, or of Sentinel"),
        ("too many wait", "raise that setting, or use fewer clients"),
        (
            TOO_FEW_REPLICAS,
            "its replicas are gone, or it is cut off from them: see INFO replication, min-replicas-to-write",
        ),
        ("MISCONF", "the server could not write to its disk: see its log, and INFO persistence"),
        ("OOM", "the server's memory is full: see INFO memory, maxmemory"),
        ("not found in sentinel", "Sentinel has no such master, or it is down: see SENTINEL MASTERS"),
        ("LOADING", "the server is loading its data, and will reply soon"),
        ("CertificateRequired", "the server requires a certificate: --tls-cert and --tls-key"),
        ("UnknownIssuer", "name the authority that signed the server's certificate: --tls-ca"),
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
