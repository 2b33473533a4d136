//! Replies to clients.

use super::ctx::Ctx;
use crate::lock::Token;
use libc::{c_int, c_long};
use std::ffi::{CStr, CString};

pub(super) const OK: c_int = redis_module::raw::REDISMODULE_OK as c_int;

/// Proof that a command replied or will reply later. Every path through a command returns one.
#[derive(Debug)]
#[must_use]
pub struct Replied(());

impl Replied {
    /// The client is blocked, and receives its reply later.
    pub(super) fn later() -> Self {
        Self(())
    }
}

/// Replies of the commands.
impl Ctx<'_> {
    /// An integer.
    pub fn reply_integer(self, number: u64) -> Replied {
        // SAFETY: the context is valid and accepts replies; the same holds in all functions below.
        unsafe { api!(RedisModule_ReplyWithLongLong)(self.raw(), i64::try_from(number).unwrap_or(i64::MAX)) };
        Replied(())
    }

    /// An integer that may be negative.
    pub fn reply_signed(self, number: i64) -> Replied {
        // SAFETY: see `reply_integer`.
        unsafe { api!(RedisModule_ReplyWithLongLong)(self.raw(), number) };
        Replied(())
    }

    /// A fencing token, or null.
    pub fn reply_token(self, token: Option<Token>) -> Replied {
        match token {
            Some(token) => self.reply_integer(token),
            None => self.reply_null(),
        }
    }

    /// Null.
    pub fn reply_null(self) -> Replied {
        // SAFETY: see `reply_integer`.
        unsafe { api!(RedisModule_ReplyWithNull)(self.raw()) };
        Replied(())
    }

    /// A bulk string.
    pub fn reply_bytes(self, bytes: &[u8]) -> Replied {
        // SAFETY: see `reply_integer`; the server copies the bytes.
        unsafe { api!(RedisModule_ReplyWithStringBuffer)(self.raw(), bytes.as_ptr().cast(), bytes.len()) };
        Replied(())
    }

    /// Begins an array of `len` elements. The caller replies with the elements next.
    pub fn reply_array(self, len: usize) -> Replied {
        // SAFETY: see `reply_integer`.
        unsafe { api!(RedisModule_ReplyWithArray)(self.raw(), c_long::try_from(len).unwrap_or(c_long::MAX)) };
        Replied(())
    }

    /// Begins a map of `len` pairs (in RESP2, a flat array). The caller replies with keys and values next.
    pub fn reply_map(self, len: usize) -> Replied {
        // SAFETY: see `reply_integer`.
        unsafe { api!(RedisModule_ReplyWithMap)(self.raw(), c_long::try_from(len).unwrap_or(c_long::MAX)) };
        Replied(())
    }

    /// A simple string, such as a line of `LOCK.HELP`.
    pub fn reply_line(self, line: &CStr) -> Replied {
        // SAFETY: see `reply_integer`.
        unsafe { api!(RedisModule_ReplyWithSimpleString)(self.raw(), line.as_ptr()) };
        Replied(())
    }

    /// A simple string composed at run time. Empty if `line` contains a NUL byte.
    pub fn reply_text_line(self, line: &str) -> Replied {
        self.reply_line(&CString::new(line).unwrap_or_default())
    }

    /// The outcome of a command: the reply it has given, or its error.
    pub fn reply_outcome(self, outcome: Result<Replied, String>) -> Replied {
        outcome.unwrap_or_else(|error| self.reply_error(&error))
    }

    /// An error. `message` begins with the error code. Control characters in it are replaced by spaces.
    pub fn reply_error(self, message: &str) -> Replied {
        let message: Vec<u8> = message.bytes().map(|byte| if byte < b' ' { b' ' } else { byte }).collect();
        let message = CString::new(message).unwrap_or_default();
        // SAFETY: see `reply_integer`; the server copies the message, and does not interpret it as a format.
        unsafe { api!(RedisModule_ReplyWithError)(self.raw(), message.as_ptr()) };
        Replied(())
    }
}
