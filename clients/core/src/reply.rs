//! Replies of the server.

use crate::Bytes;

/// A reply, in the types of RESP 2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// An integer.
    Integer(i64),
    /// Bytes.
    Bulk(Bytes),
    /// Null.
    Null,
    /// A simple string.
    Line(String),
    /// An error: code and message.
    Error(String),
    /// An array.
    Array(Vec<Reply>),
}

impl Reply {
    /// The text of bytes or of a simple string.
    pub fn text(&self) -> Option<String> {
        match self {
            Self::Bulk(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            Self::Line(line) => Some(line.clone()),
            _ => None,
        }
    }

    /// A number that is not negative.
    pub fn number(&self) -> Option<u64> {
        match self {
            Self::Integer(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    /// The elements, if it is an array.
    pub fn elements(&self) -> Option<&[Reply]> {
        match self {
            Self::Array(elements) => Some(elements),
            _ => None,
        }
    }
}
