//! The format of histories: one operation a line of JSON. verification/histories/README.md specifies it for programs in
//! other languages.

use std::io::{self, BufRead, Write};

use serde::{Deserialize, Serialize};

/// A time: microseconds of one monotonic clock, or the step numbers of a simulator.
pub type Time = u64;

/// An operation of a client, or of the server itself, on one lock, with its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Operation {
    /// The client; for readers only, the checker does not need it.
    pub process: String,
    /// The lock.
    pub key: String,
    /// The request.
    #[serde(flatten)]
    pub request: Request,
    /// The operation took effect no earlier than this: when the request was sent.
    pub from: Time,
    /// The operation took effect no later than this: when the reply arrived. `None`: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<Time>,
    /// What the client received.
    pub outcome: Outcome,
}

/// The requests of clients, and actions of the server. Leases are in the unit of [`Time`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "lowercase")]
pub enum Request {
    /// `LOCK.ACQUIRE`, or one key's part of `LOCK.MACQUIRE`.
    Acquire(Acquire),
    /// `LOCK.RELEASE`, or one key's part of `LOCK.MRELEASE`.
    Release {
        /// The owner.
        owner: String,
        /// Only if the hold has this token.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<u64>,
        /// The remaining count (`ALL` is 0); none: one less.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        holds: Option<u64>,
        /// A new lease for the remaining holds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lease: Option<Time>,
    },
    /// `LOCK.RENEW`, or one key's part of `LOCK.MRENEW`.
    Renew {
        /// The owner.
        owner: String,
        /// Only if the hold has this token.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<u64>,
        /// The new lease; none: the hold does not end by itself in this history.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lease: Option<Time>,
        /// The token to which the hold's is raised.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fence: Option<u64>,
    },
    /// None: a client reported, without a request, that this owner holds the lock.
    Check {
        /// The owner.
        owner: String,
    },
    /// `LOCK.FORCE`, `DEL`, or any other command that ends all holds.
    Force,
    /// The server ended a hold because its lease was over.
    Expire {
        /// The owner.
        owner: String,
        /// The token; none: no client received it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<u64>,
    },
    /// The server ended an owner's hold, if there was one, for another reason: its connection closed, or the request
    /// was cancelled.
    End {
        /// The owner.
        owner: String,
    },
    /// The server revoked a grant that too few replicas confirmed in time. The checker adds these itself: they are not
    /// part of the format.
    #[serde(skip)]
    Revoke {
        /// The owner.
        owner: String,
        /// The number of holds that a re-entry had added.
        added: u64,
    },
}

/// The options of an acquisition.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Acquire {
    /// The owner.
    pub owner: String,
    /// The limit of holders; 0: `SHARED`.
    #[serde(default = "one")]
    pub limit: u64,
    /// The least duration of the hold; none: it does not end by itself in this history.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<Time>,
    /// `HOLDS n`: the count to reach; none: one more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holds: Option<u64>,
    /// `NEW`: no re-entry.
    #[serde(default, skip_serializing_if = "is_not")]
    pub new: bool,
    /// It may have been queued.
    #[serde(default, skip_serializing_if = "is_not")]
    pub wait: bool,
    /// When its client knew that it was queued (`WAITING` was read).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queued: Option<Time>,
    /// It requested other keys in the same command.
    #[serde(default, skip_serializing_if = "is_not")]
    pub several: bool,
}

/// The outcome that a client received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Granted, or renewed.
    Token(u64),
    /// Released: 1 if the owner still has holds, otherwise 0. (`LOCK.RELEASE` replies the opposite: 1 means that it
    /// holds no longer.)
    Left(u64),
    /// Forced: the number of holders that lost it.
    Count(u64),
    /// Not granted, or not held.
    Null,
    /// It took effect; no more is known. An acquisition: granted, to a client that receives no token.
    Done,
    /// An error: the request had no effect.
    Error,
    /// It took effect, was not confirmed by replicas in time, and was revoked.
    Unconfirmed,
    /// It may or may not have taken effect between `from` and `to`.
    Unknown,
}

impl Operation {
    /// An operation with the times of its request and its reply.
    pub fn new(process: &str, key: &str, request: Request, (from, to): (Time, Time), outcome: Outcome) -> Self {
        Self { process: process.into(), key: key.into(), request, from, to: Some(to), outcome }
    }

    /// The latest time at which it can have taken effect.
    pub fn latest(&self) -> Time {
        self.to.unwrap_or(Time::MAX)
    }
}

impl Request {
    /// An acquisition that does not wait.
    pub fn acquire(owner: &str, limit: u64, lease: Option<Time>) -> Self {
        Self::Acquire(Acquire { owner: owner.into(), limit, lease, ..Acquire::default() })
    }

    /// An acquisition that may wait.
    pub fn wait(owner: &str, limit: u64, lease: Option<Time>) -> Self {
        Self::Acquire(Acquire { owner: owner.into(), limit, lease, wait: true, ..Acquire::default() })
    }

    /// A release of one hold.
    pub fn release(owner: &str) -> Self {
        Self::Release { owner: owner.into(), token: None, holds: None, lease: None }
    }

    /// Whether it also withdraws its owner's queued requests (`ALL` without `TOKEN`).
    pub fn withdraws(&self) -> bool {
        matches!(self, Self::Release { token: None, holds: Some(0), .. })
    }

    /// A renewal.
    pub fn renew(owner: &str, lease: Option<Time>) -> Self {
        Self::Renew { owner: owner.into(), token: None, lease, fence: None }
    }

    /// The end of a lease.
    pub fn expire(owner: &str, token: u64) -> Self {
        Self::Expire { owner: owner.into(), token: Some(token) }
    }
}

/// Reads a history. Empty lines and lines that begin with `#` are ignored.
///
/// # Errors
///
/// If a line is not an operation; the error names its number.
pub fn read(from: impl BufRead) -> io::Result<Vec<Operation>> {
    let mut operations = Vec::new();
    for (number, line) in from.lines().enumerate() {
        let line = line?;
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let operation = serde_json::from_str(&line)
            .map_err(|why| io::Error::new(io::ErrorKind::InvalidData, format!("line {}: {why}: {line}", number + 1)))?;
        operations.push(operation);
    }
    Ok(operations)
}

/// Writes a history.
///
/// # Errors
///
/// Those of the writer.
pub fn write(operations: &[Operation], mut to: impl Write) -> io::Result<()> {
    for operation in operations {
        writeln!(to, "{}", serde_json::to_string(operation)?)?;
    }
    to.flush()
}

fn one() -> u64 {
    1
}

fn is_not(flag: &bool) -> bool {
    !flag
}
