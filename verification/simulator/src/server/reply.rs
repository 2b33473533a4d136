//! Replies to clients, as RESP 2.

use super::ctx::Ctx;
use crate::lock::Token;
use crate::node::node;
use std::ffi::CStr;

/// Proof that a reply was written: every path through a command ends with one.
#[derive(Debug)]
#[must_use]
pub struct Replied(());

impl Replied {
    /// The client gets its reply later.
    pub(super) fn later() -> Self {
        Self(())
    }
}

/// The replies of the commands.
impl Ctx<'_> {
    fn write(self, text: &[u8]) -> Replied {
        node(|node| node.reply(self.caller(), text));
        Replied(())
    }

    /// An integer.
    pub fn reply_integer(self, number: u64) -> Replied {
        self.reply_signed(i64::try_from(number).unwrap_or(i64::MAX))
    }

    /// An integer, negative ones included.
    pub fn reply_signed(self, number: i64) -> Replied {
        self.write(format!(":{number}\r\n").as_bytes())
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
        self.write(b"$-1\r\n")
    }

    /// Bytes.
    pub fn reply_bytes(self, bytes: &[u8]) -> Replied {
        let _ = self.write(format!("${}\r\n", bytes.len()).as_bytes());
        let _ = self.write(bytes);
        self.write(b"\r\n")
    }

    /// Begins an array of this many elements, which follow.
    pub fn reply_array(self, len: usize) -> Replied {
        self.write(format!("*{len}\r\n").as_bytes())
    }

    /// Begins a map of this many pairs, which follow: in RESP 2, a flat array.
    pub fn reply_map(self, len: usize) -> Replied {
        self.reply_array(len.saturating_mul(2))
    }

    /// A simple string, as in the lines of `HELP`.
    pub fn reply_line(self, line: &CStr) -> Replied {
        self.reply_text_line(&line.to_string_lossy())
    }

    /// A simple string composed at run time.
    pub fn reply_text_line(self, line: &str) -> Replied {
        self.write(format!("+{line}\r\n").as_bytes())
    }

    /// The outcome of a command: its reply, or the error that it ended with.
    pub fn reply_outcome(self, outcome: Result<Replied, String>) -> Replied {
        outcome.unwrap_or_else(|error| self.reply_error(&error))
    }

    /// An error; `message` begins with its code.
    pub fn reply_error(self, message: &str) -> Replied {
        let message: String = message.chars().map(|it| if it < ' ' { ' ' } else { it }).collect();
        self.write(format!("-{message}\r\n").as_bytes())
    }
}
