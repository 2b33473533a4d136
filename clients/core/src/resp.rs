//! RESP 2: requests to bytes, bytes to replies.

use crate::Bytes;

/// The maximum depth of nested arrays.
const DEEPEST: usize = 16;

/// A reply.
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

/// Received bytes are not a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolError;

impl Reply {
    /// Takes the first reply out of what has arrived; `None` if it is incomplete.
    ///
    /// # Errors
    ///
    /// If the bytes are not a reply.
    pub fn take(bytes: &mut Bytes) -> Result<Option<Self>, ProtocolError> {
        let mut rest = bytes.as_slice();
        let reply = Self::parse(&mut rest, DEEPEST)?;
        if reply.is_some() {
            let taken = bytes.len() - rest.len();
            bytes.drain(..taken);
        }
        Ok(reply)
    }

    fn parse(rest: &mut &[u8], deepest: usize) -> Result<Option<Self>, ProtocolError> {
        let Some(end) = rest.windows(2).position(|pair| pair == b"\r\n") else { return Ok(None) };
        let (kind, text) = rest[..end].split_first().ok_or(ProtocolError)?;
        *rest = &rest[end + 2..];
        let text = || String::from_utf8_lossy(text).into_owned();
        let number = || text().parse::<i64>().map_err(|_| ProtocolError);
        Ok(Some(match kind {
            b':' => Self::Integer(number()?),
            b'+' => Self::Line(text()),
            b'-' => Self::Error(text()),
            b'$' | b'*' if number()? == -1 => Self::Null,
            b'$' => {
                let len = usize::try_from(number()?).map_err(|_| ProtocolError)?;
                if rest.len() < len.saturating_add(2) {
                    return Ok(None);
                }
                let bytes = rest[..len].to_vec();
                *rest = rest[len..].strip_prefix(b"\r\n").ok_or(ProtocolError)?;
                Self::Bulk(bytes)
            }
            b'*' if deepest > 0 => {
                let mut elements = Vec::new();
                for _ in 0..usize::try_from(number()?).map_err(|_| ProtocolError)? {
                    let Some(element) = Self::parse(rest, deepest - 1)? else { return Ok(None) };
                    elements.push(element);
                }
                Self::Array(elements)
            }
            _ => return Err(ProtocolError),
        }))
    }

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

/// Encodes a request.
pub fn encode(words: &[Bytes]) -> Bytes {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_is_parsed_from_pieces() {
        let whole = b":7\r\n*3\r\n$2\r\na\n\r\n$-1\r\n+WAITING\r\n-ERR no\r\n";
        for cut in 0..whole.len() {
            let (mut bytes, mut replies) = (Vec::new(), Vec::new());
            for part in [&whole[..cut], &whole[cut..]] {
                bytes.extend_from_slice(part);
                while let Some(reply) = Reply::take(&mut bytes).expect("they are replies") {
                    replies.push(reply);
                }
            }
            let array = vec![Reply::Bulk(b"a\n".to_vec()), Reply::Null, Reply::Line("WAITING".into())];
            assert_eq!(replies, [Reply::Integer(7), Reply::Array(array), Reply::Error("ERR no".into())]);
        }
    }

    #[test]
    fn malformed_reply_is_an_error() {
        for malformed in [&b"HTTP/1.1 400\r\n"[..], b"\r\n", b":x\r\n", b"$-2\r\n", b"$1\r\nabc"] {
            assert_eq!(Reply::take(&mut malformed.to_vec()), Err(ProtocolError), "{}", malformed.escape_ascii());
        }
        assert_eq!(Reply::take(&mut b"*1\r\n".repeat(100_000)), Err(ProtocolError));
    }

    #[test]
    fn request_is_encoded_as_array_of_bytes() {
        let words = [b"LOCK.INFO".to_vec(), b"k\r\n".to_vec()];
        let expected = Reply::Array(words.iter().cloned().map(Reply::Bulk).collect());
        assert_eq!(Reply::take(&mut encode(&words)), Ok(Some(expected)));
    }
}
