//! The wire: requests out, RESP2 replies in.

use anyhow::{Result, bail};

/// A reply of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A null string or array.
    Null,
    /// `+OK` and the like.
    Status(String),
    /// An error, with its prefix.
    Error(String),
    /// An integer.
    Int(i64),
    /// A string.
    Bulk(Vec<u8>),
    /// An array.
    Array(Vec<Reply>),
}

impl Reply {
    /// The integer, or an error that shows what came instead.
    pub fn int(&self) -> Result<i64> {
        match self {
            Reply::Int(n) => Ok(*n),
            other => bail!("expected an integer, got {other:?}"),
        }
    }

    /// The string as text, or an error that shows what came instead.
    pub fn text(&self) -> Result<String> {
        match self {
            Reply::Bulk(bytes) => Ok(String::from_utf8_lossy(bytes).into_owned()),
            Reply::Status(text) => Ok(text.clone()),
            other => bail!("expected a string, got {other:?}"),
        }
    }
}

/// One request as it goes over the wire.
#[derive(Clone, Debug)]
pub struct Request(Vec<u8>);

impl Request {
    /// A request of these arguments.
    pub fn new<A: AsRef<[u8]>>(arguments: &[A]) -> Self {
        let mut bytes = Vec::with_capacity(16 + arguments.iter().map(|a| a.as_ref().len() + 8).sum::<usize>());
        bytes.extend_from_slice(format!("*{}\r\n", arguments.len()).as_bytes());
        for argument in arguments {
            let argument = argument.as_ref();
            bytes.extend_from_slice(format!("${}\r\n", argument.len()).as_bytes());
            bytes.extend_from_slice(argument);
            bytes.extend_from_slice(b"\r\n");
        }
        Self(bytes)
    }

    /// A request written as one would type it; arguments are separated by spaces.
    pub fn typed(line: &str) -> Self {
        Self::new(&line.split_ascii_whitespace().collect::<Vec<_>>())
    }

    /// The bytes to send.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Replies as they arrive, in pieces of any size.
#[derive(Default)]
pub struct Replies {
    buffer: Vec<u8>,
    at: usize,
}

impl Replies {
    /// Adds what was read from the connection.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.at == self.buffer.len() {
            self.buffer.clear();
            self.at = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next reply that is there as a whole.
    pub fn next(&mut self) -> Result<Option<Reply>> {
        let mut at = self.at;
        let reply = parse(&self.buffer, &mut at)?;
        if reply.is_some() {
            self.at = at;
        }
        Ok(reply)
    }
}

fn parse(buffer: &[u8], at: &mut usize) -> Result<Option<Reply>> {
    let Some(line) = line(buffer, at) else { return Ok(None) };
    let Some((&kind, rest)) = line.split_first() else { bail!("an empty line instead of a reply") };
    Ok(match kind {
        b'+' => Some(Reply::Status(String::from_utf8_lossy(rest).into_owned())),
        b'-' => Some(Reply::Error(String::from_utf8_lossy(rest).into_owned())),
        b':' => Some(Reply::Int(number(rest)?)),
        b'$' => string(buffer, at, number(rest)?),
        b'*' => array(buffer, at, number(rest)?)?,
        other => bail!("a reply of unknown type {:?}", char::from(other)),
    })
}

fn line<'a>(buffer: &'a [u8], at: &mut usize) -> Option<&'a [u8]> {
    let rest = &buffer[*at..];
    let end = rest.iter().position(|&byte| byte == b'\r').filter(|end| end + 1 < rest.len())?;
    *at += end + 2;
    Some(&rest[..end])
}

fn string(buffer: &[u8], at: &mut usize, length: i64) -> Option<Reply> {
    let Ok(length) = usize::try_from(length) else { return Some(Reply::Null) };
    let bytes = buffer.get(*at..*at + length + 2)?;
    *at += length + 2;
    Some(Reply::Bulk(bytes[..length].to_vec()))
}

fn array(buffer: &[u8], at: &mut usize, length: i64) -> Result<Option<Reply>> {
    let Ok(length) = usize::try_from(length) else { return Ok(Some(Reply::Null)) };
    let mut elements = Vec::with_capacity(length);
    for _ in 0..length {
        let Some(element) = parse(buffer, at)? else { return Ok(None) };
        elements.push(element);
    }
    Ok(Some(Reply::Array(elements)))
}

fn number(digits: &[u8]) -> Result<i64> {
    Ok(std::str::from_utf8(digits)?.parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_in_two_pieces_is_one_reply() {
        let mut replies = Replies::default();
        replies.feed(b"*2\r\n$3\r\nab");
        assert_eq!(replies.next().unwrap(), None);
        replies.feed(b"c\r\n:7\r\n$-1\r\n");
        assert_eq!(replies.next().unwrap(), Some(Reply::Array(vec![Reply::Bulk(b"abc".to_vec()), Reply::Int(7)])));
        assert_eq!(replies.next().unwrap(), Some(Reply::Null));
        assert_eq!(replies.next().unwrap(), None);
    }

    #[test]
    fn a_request_carries_lengths_in_bytes() {
        assert_eq!(Request::typed("SET kä v").bytes(), "*3\r\n$3\r\nSET\r\n$3\r\nkä\r\n$1\r\nv\r\n".as_bytes());
    }
}
