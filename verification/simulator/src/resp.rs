//! Replies, as a client reads them.

use crate::redis::Bytes;
use std::collections::BTreeSet;
use std::fmt;

/// Tokens are as large as no other number.
const TOKENS: u64 = 1_000_000_000_000_000;

/// A reply in RESP 2.
#[derive(Clone, PartialEq, Eq)]
pub enum Reply {
    /// An integer.
    Integer(i64),
    /// Bytes.
    Bulk(Bytes),
    /// Null.
    Null,
    /// A simple string.
    Line(String),
    /// An error.
    Error(String),
    /// An array.
    Array(Vec<Reply>),
}

impl Reply {
    /// Takes the first reply out of what has arrived, if it is complete.
    pub fn take(bytes: &mut Bytes) -> Option<Self> {
        let mut rest = bytes.as_slice();
        let reply = Self::parse(&mut rest)?;
        let taken = bytes.len() - rest.len();
        bytes.drain(..taken);
        Some(reply)
    }

    fn parse(rest: &mut &[u8]) -> Option<Self> {
        let end = rest.windows(2).position(|pair| pair == b"\r\n")?;
        let line = String::from_utf8_lossy(rest.get(1..end)?).into_owned();
        let kind = *rest.first()?;
        *rest = &rest[end + 2..];
        let number = || line.parse::<i64>().unwrap_or(-1);
        Some(match kind {
            b':' => Self::Integer(number()),
            b'+' => Self::Line(line),
            b'-' => Self::Error(line),
            b'$' if number() < 0 => Self::Null,
            b'$' => {
                let len = number() as usize;
                let bytes = rest.get(..len)?.to_vec();
                *rest = rest.get(len + 2..)?;
                Self::Bulk(bytes)
            }
            _ if number() < 0 => Self::Null,
            _ => Self::Array((0..number()).map(|_| Self::parse(rest)).collect::<Option<_>>()?),
        })
    }

    /// Its elements, if it is an array.
    pub fn elements(&self) -> &[Reply] {
        match self {
            Self::Array(elements) => elements,
            _ => &[],
        }
    }

    /// Its bytes, if it has any.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Bulk(bytes) => bytes,
            _ => &[],
        }
    }

    /// The last token in it, if there is one: they are as large as no other number.
    pub fn last_token(&self) -> Option<u64> {
        match self {
            Self::Array(elements) => elements.iter().rev().find_map(Self::last_token),
            _ => self.number().filter(|number| *number >= TOKENS),
        }
    }

    /// All tokens in it.
    pub fn tokens(&self, found: &mut BTreeSet<u64>) {
        self.elements().iter().for_each(|element| element.tokens(found));
        found.extend(self.number().filter(|number| *number >= TOKENS));
    }

    /// The number, if it is one that is not negative.
    pub fn number(&self) -> Option<u64> {
        match self {
            Self::Integer(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(number) => write!(out, "{number}"),
            Self::Bulk(bytes) => write!(out, "\"{}\"", bytes.escape_ascii()),
            Self::Null => write!(out, "null"),
            Self::Line(line) => write!(out, "{line}"),
            Self::Error(error) => write!(out, "-{error}"),
            Self::Array(elements) => out.debug_list().entries(elements).finish(),
        }
    }
}
