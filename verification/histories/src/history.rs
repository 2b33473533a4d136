//! The format of histories, one operation a line of JSON. verification/histories/README.md specifies it for programs in other languages.

use std::io::{self, BufRead, Write};

use serde::{Deserialize, Serialize};

/// A moment: microseconds of one monotonic clock, or the numbers of a simulator's steps.
pub type Time = u64;

/// What one client, or the server by itself, did to one lock, and what it was told.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Operation {
    /// Who asked; for people only, the judge does not need it.
    pub process: String,
    /// The lock.
    pub key: String,
    /// What was asked for.
    #[serde(flatten)]
    pub request: Request,
    /// Not before this did it happen: when it was asked for.
    pub from: Time,
    /// Not after this did it happen, if it did: when the answer came. `None`: nobody can say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<Time>,
    /// What the asker was told.
    pub outcome: Outcome,
}

/// What can be asked for, and what a server does unasked. Leases are in the unit of [`Time`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "lowercase")]
pub enum Request {
    /// `LOCK.ACQUIRE`, or one key's part of `LOCK.MACQUIRE`.
    Acquire(Acquire),
    /// `LOCK.RELEASE`, or one key's part of `LOCK.MRELEASE`.
    Release {
        /// Who.
        owner: String,
        /// Only under this token.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<u64>,
        /// The count to go down to (`ALL` is 0); none: one less.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        holds: Option<u64>,
        /// A new lease for what is left.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lease: Option<Time>,
    },
    /// `LOCK.RENEW`, or one key's part of `LOCK.MRENEW`.
    Renew {
        /// Who.
        owner: String,
        /// Only under this token.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<u64>,
        /// The new lease; none: it does not end by itself while this history lasts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lease: Option<Time>,
        /// The token to raise the hold's to.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fence: Option<u64>,
    },
    /// None: a client said, by its own knowledge, that this owner holds the lock.
    Check {
        /// Who.
        owner: String,
    },
    /// `LOCK.FORCE`, `DEL`, or whatever else ends all holds.
    Force,
    /// The server ended a hold because its lease was over.
    Expire {
        /// Whose.
        owner: String,
        /// Under which token; none: nobody was told it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<u64>,
    },
    /// The server ended an owner's hold, if there was one, for another reason: its connection ended, the request was cancelled.
    End {
        /// Whose.
        owner: String,
    },
    /// The server took back what too few replicas confirmed in time. The judge adds these itself: they are no part of the format.
    #[serde(skip)]
    TakeBack {
        /// Whose.
        owner: String,
        /// How many holds a re-entry had added.
        added: u64,
    },
}

/// The terms of an acquisition.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Acquire {
    /// Who.
    pub owner: String,
    /// How many may hold at once; 0: `SHARED`.
    #[serde(default = "one")]
    pub limit: u64,
    /// How long the hold lasts at least; none: it does not end by itself while this history lasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<Time>,
    /// `HOLDS n`: the count to reach; none: one more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holds: Option<u64>,
    /// `NEW`: no re-entry.
    #[serde(default, skip_serializing_if = "is_not")]
    pub new: bool,
    /// Whether it may have stood in the queue.
    #[serde(default, skip_serializing_if = "is_not")]
    pub wait: bool,
    /// When its client knew that it was queued (`WAITING` was read).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queued: Option<Time>,
    /// Whether it asked for other keys in the same step.
    #[serde(default, skip_serializing_if = "is_not")]
    pub several: bool,
}

/// What an asker was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Granted, or renewed.
    Token(u64),
    /// Released: 1 if the owner still has holds, otherwise 0. (`LOCK.RELEASE` replies the opposite: 1, it holds no longer.)
    Left(u64),
    /// Forced: so many lost it.
    Count(u64),
    /// Not granted; not held.
    Null,
    /// It was done, and no more is known.
    Done,
    /// Refused with an error that says that nothing was done.
    Error,
    /// Done, not confirmed by replicas in time, and revoked.
    Unconfirmed,
    /// It may have been done between `from` and `to`, and may not.
    Unknown,
}

impl Operation {
    /// An operation that began and ended at the times given.
    pub fn new(process: &str, key: &str, request: Request, (from, to): (Time, Time), outcome: Outcome) -> Self {
        Self { process: process.into(), key: key.into(), request, from, to: Some(to), outcome }
    }

    /// The last moment at which it can have happened.
    pub fn latest(&self) -> Time {
        self.to.unwrap_or(Time::MAX)
    }
}

impl Request {
    /// An acquisition that does not wait.
    pub fn acquire(owner: &str, limit: u64, lease: Option<Time>) -> Self {
        Self::Acquire(Acquire { owner: owner.into(), limit, lease, ..Acquire::default() })
    }

    /// One that may wait.
    pub fn wait(owner: &str, limit: u64, lease: Option<Time>) -> Self {
        Self::Acquire(Acquire { owner: owner.into(), limit, lease, wait: true, ..Acquire::default() })
    }

    /// One hold less.
    pub fn release(owner: &str) -> Self {
        Self::Release { owner: owner.into(), token: None, holds: None, lease: None }
    }

    /// Whether it also withdraws what its owner waits for (`ALL` without `TOKEN`).
    pub fn withdraws(&self) -> bool {
        matches!(self, Self::Release { token: None, holds: Some(0), .. })
    }

    /// A new lease.
    pub fn renew(owner: &str, lease: Option<Time>) -> Self {
        Self::Renew { owner: owner.into(), token: None, lease, fence: None }
    }

    /// The end of a lease.
    pub fn expire(owner: &str, token: u64) -> Self {
        Self::Expire { owner: owner.into(), token: Some(token) }
    }
}

/// Reads a history; empty lines and lines that begin with `#` say nothing.
///
/// # Errors
///
/// If a line is no operation; the error names its number.
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
