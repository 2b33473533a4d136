//! Replies to clients.

use super::ctx::Ctx;
use crate::lock::Token;
use libc::{c_int, c_long};
use std::ffi::{CStr, CString};

pub(super) const OK: c_int = redis_module::raw::REDISMODULE_OK as c_int;

/// Proof that a reply was given: every path through a command ends with one.
#[derive(Debug)]
#[must_use]
pub struct Replied(());

impl Replied {
    /// The client will be answered later.
    pub(super) fn later() -> Self {
        Self(())
    }
}

/// The answers of the commands.
impl Ctx<'_> {
    /// An integer.
    pub fn reply_integer(self, number: u64) -> Replied {
        // SAFETY: the context lives and is one to reply in; the same holds in all the functions below.
        unsafe { api!(RedisModule_ReplyWithLongLong)(self.raw(), i64::try_from(number).unwrap_or(i64::MAX)) };
        Replied(())
    }

    /// An integer, negative ones included.
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

    /// Bytes.
    pub fn reply_bytes(self, bytes: &[u8]) -> Replied {
        // SAFETY: see `reply_integer`; the server copies the bytes.
        unsafe { api!(RedisModule_ReplyWithStringBuffer)(self.raw(), bytes.as_ptr().cast(), bytes.len()) };
        Replied(())
    }

    /// Begins an array of this many elements, which follow.
    pub fn reply_array(self, len: usize) -> Replied {
        // SAFETY: see `reply_integer`.
        unsafe { api!(RedisModule_ReplyWithArray)(self.raw(), c_long::try_from(len).unwrap_or(c_long::MAX)) };
        Replied(())
    }

    /// Begins a map of this many pairs, which follow (in RESP2, a flat array).
    pub fn reply_map(self, len: usize) -> Replied {
        // SAFETY: see `reply_integer`.
        unsafe { api!(RedisModule_ReplyWithMap)(self.raw(), c_long::try_from(len).unwrap_or(c_long::MAX)) };
        Replied(())
    }

    /// A simple string, as in the lines of `HELP`.
    pub fn reply_line(self, line: &CStr) -> Replied {
        // SAFETY: see `reply_integer`.
        unsafe { api!(RedisModule_ReplyWithSimpleString)(self.raw(), line.as_ptr()) };
        Replied(())
    }

    /// A simple string composed at run time, without NUL bytes.
    pub fn reply_text_line(self, line: &str) -> Replied {
        self.reply_line(&CString::new(line).unwrap_or_default())
    }

    /// The outcome of a command: its reply, or the error that it ended with.
    pub fn reply_outcome(self, outcome: Result<Replied, String>) -> Replied {
        outcome.unwrap_or_else(|error| self.reply_error(&error))
    }

    /// An error; `message` begins with its code and contains no line break.
    pub fn reply_error(self, message: &str) -> Replied {
        let message: Vec<u8> = message.bytes().map(|byte| if byte < b' ' { b' ' } else { byte }).collect();
        let message = CString::new(message).unwrap_or_default();
        // SAFETY: see `reply_integer`; the server copies the message, and takes it as it is, not as a format.
        unsafe { api!(RedisModule_ReplyWithError)(self.raw(), message.as_ptr()) };
        Replied(())
    }
}
