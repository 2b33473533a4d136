//! Errors, as types that a caller can match.

use std::fmt;

pub use holdfast_core::LossReason;
use redis::{ErrorKind, RedisError};

use crate::names::{Keys, Owner};

/// Why a request failed, or a hold ended. Every message names the keys.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// Waiting would have closed a cycle of waits. The server's message names it.
    Deadlock {
        /// The keys of the request.
        keys: Keys,
        /// The server's message.
        message: String,
    },
    /// Fewer replicas than requested confirmed in time; the grant was revoked.
    NoReplicas {
        /// The keys of the request.
        keys: Keys,
        /// The server's message.
        message: String,
    },
    /// The key holds something that is not a lock.
    WrongType {
        /// The keys of the request.
        keys: Keys,
        /// The server's message.
        message: String,
    },
    /// The server has no such hold, and did not say why.
    NotHeld {
        /// The keys of the hold.
        keys: Keys,
        /// Its owner.
        owner: Owner,
    },
    /// The hold ended before it was released.
    Lost {
        /// The keys of the hold.
        keys: Keys,
        /// Its owner.
        owner: Owner,
        /// What ended it.
        why: LossReason,
    },
    /// The server does not have the module. The message says how to load it.
    ModuleNotLoaded {
        /// The server's address.
        server: String,
        /// The keys of the request.
        keys: Keys,
        /// The server's message.
        message: String,
    },
    /// The server's module speaks only older versions of the protocol than this client.
    ServerTooOld {
        /// The server's address.
        server: String,
        /// The keys of the request.
        keys: Keys,
        /// The versions that client and server speak.
        message: String,
    },
    /// The server's module speaks only newer versions of the protocol than this client.
    ClientTooOld {
        /// The server's address.
        server: String,
        /// The keys of the request.
        keys: Keys,
        /// The versions that client and server speak.
        message: String,
    },
    /// Another error that the server returned.
    Server {
        /// The server's address.
        server: String,
        /// The keys of the request.
        keys: Keys,
        /// The server's message.
        message: String,
    },
    /// The server can't be reached, or did not answer: whether the request took effect is unknown. The client withdraws it in
    /// the background.
    Connection {
        /// The server's address.
        server: String,
        /// The keys of the request.
        keys: Keys,
        /// The error of the connection.
        source: RedisError,
    },
    /// Too few of the servers of a RedLock answer: fewer than a majority.
    NoMajority {
        /// The keys of the request.
        keys: Keys,
        /// How many servers answer.
        answer: usize,
        /// How many are a majority.
        majority: usize,
        /// The error of one of the others.
        source: Box<Error>,
    },
    /// An argument is not allowed. Nothing was sent.
    Invalid {
        /// What is wrong, and what is allowed.
        message: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadlock { keys, message } => write!(out, "{keys}: waiting would never end: {message}"),
            Self::NoReplicas { keys, message } => write!(out, "{keys}: not confirmed by replicas: {message}"),
            Self::WrongType { keys, message } => write!(out, "{keys}: not a lock: {message}"),
            Self::NotHeld { keys, owner } => write!(out, "{keys}: not held by {owner}"),
            Self::Lost { keys, owner, why } => write!(out, "{keys}: lost by {owner}: {why}"),
            Self::ModuleNotLoaded { server, keys, message } => write!(
                out,
                "{server}: {}the module Holdfast is not loaded in this server, which says: {message}. Load it by MODULE LOAD \
                 /path/to/libholdfast.so, or for good by a line loadmodule /path/to/libholdfast.so in redis.conf",
                KeyPrefix(keys)
            ),
            Self::ServerTooOld { server, keys, message } => {
                write!(out, "{server}: {}the server's module is too old: {message}. Load a newer one", KeyPrefix(keys))
            }
            Self::ClientTooOld { server, keys, message } => {
                write!(out, "{server}: {}this client is too old: {message}. Use a newer one", KeyPrefix(keys))
            }
            Self::Server { server, keys, message } => write!(out, "{server}: {}{message}", KeyPrefix(keys)),
            Self::Connection { server, keys, source } => write!(out, "{server}: {}{source}", KeyPrefix(keys)),
            Self::NoMajority { keys, answer, majority, source } => {
                write!(out, "{keys}: {majority} servers are a majority, and {answer} can be reached: {source}")
            }
            Self::Invalid { message } => out.write_str(message),
        }
    }
}

/// The keys of a request, if it has any, as the beginning of a message.
struct KeyPrefix<'k>(&'k Keys);

impl fmt::Display for KeyPrefix<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(out, "{}: ", self.0) }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Connection { source, .. } => Some(source),
            Self::NoMajority { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// The server's error reply. None: a connection error, which may be temporary.
pub(crate) fn refusal(error: &RedisError) -> Option<String> {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => Some(format!("{code} {detail}")),
        (Some(code), None) => Some(code.to_owned()),
        // The library does not pass on the server's message.
        (None, _) if error.kind() == ErrorKind::AuthenticationFailed => Some(format!("WRONGPASS {error}")),
        (None, _) => None,
    }
}

/// Converts an error of the `redis` crate: the server's error reply, or a connection error.
pub(crate) fn refused(server: &str, keys: &Keys, error: RedisError) -> Error {
    match refusal(&error) {
        Some(message) => refused_in_words(server, keys, message),
        None => Error::Connection { server: server.to_owned(), keys: keys.clone(), source: error },
    }
}

/// Converts the server's error reply, by its code.
pub(crate) fn refused_in_words(server: &str, keys: &Keys, message: String) -> Error {
    let keys = keys.clone();
    match message.split(' ').next() {
        Some("DEADLOCK") => Error::Deadlock { keys, message },
        Some("NOREPLICAS" | "UNCONFIRMED") => Error::NoReplicas { keys, message },
        Some("WRONGTYPE") => Error::WrongType { keys, message },
        // The quote is an apostrophe or a grave accent. If another command is unknown, the module is not the reason.
        Some("ERR") if message.starts_with("ERR unknown command") && message.get(21..26) == Some("LOCK.") => {
            Error::ModuleNotLoaded { server: server.to_owned(), keys, message }
        }
        Some("SERVERTOOOLD") => Error::ServerTooOld { server: server.to_owned(), keys, message: detail(&message) },
        Some("CLIENTTOOOLD") => Error::ClientTooOld { server: server.to_owned(), keys, message: detail(&message) },
        _ => Error::Server { server: server.to_owned(), keys, message },
    }
}

/// The text behind the code.
fn detail(message: &str) -> String {
    message.split_once(' ').map_or(message, |(_, detail)| detail).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_type_follows_code() {
        let keys = Keys::from_iter(["a"]);
        let refused = |words: &str| refused_in_words("here", &keys, words.to_owned());
        assert!(matches!(refused("DEADLOCK a waits for b"), Error::Deadlock { .. }));
        assert!(matches!(refused("UNCONFIRMED 0 of 1"), Error::NoReplicas { .. }));
        assert!(matches!(refused("NOREPLICAS Not enough good replicas to write."), Error::NoReplicas { .. }));
        assert!(matches!(refused("WRONGTYPE no lock"), Error::WrongType { .. }));
        assert!(matches!(refused("ERR unknown command `LOCK.INFO`"), Error::ModuleNotLoaded { .. }));
        assert!(matches!(refused("ERR unknown command 'WAIT'"), Error::Server { .. }));
        assert!(matches!(refused("SERVERTOOOLD 2 to 3"), Error::ServerTooOld { message, .. } if message == "2 to 3"));
        assert!(matches!(refused("CLIENTTOOOLD 5 to 7"), Error::ClientTooOld { message, .. } if message == "5 to 7"));
        assert_eq!(refused("ERR too many waits").to_string(), r#"here: "a": ERR too many waits"#);
    }

    #[test]
    fn loss_names_key_owner_and_reason() {
        let keys = Keys::from_iter(["a", "b\n"]);
        let error = Error::Lost { keys, owner: Owner::from("me".as_bytes().to_vec()), why: LossReason::Forced };
        assert_eq!(error.to_string(), r#""a", "b\n": lost by "me": forced"#);
        assert_eq!(format!("{error:?}"), r#"Lost { keys: "a", "b\n", owner: "me", why: Forced }"#);
    }
}
