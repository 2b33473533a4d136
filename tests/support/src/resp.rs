//! RESP2 and RESP3: encodes commands and parses replies, for tests, benchmarks and lab.

use std::io;

use redis::ServerError;
pub use redis::Value;

/// An encoded command.
#[derive(Clone, Debug)]
pub struct Request(Vec<u8>);

impl Request {
    /// A command from its name and arguments.
    pub fn new<A: AsRef<[u8]>>(words: &[A]) -> Self {
        Self(encode([words]))
    }

    /// A command from a line, split at spaces.
    pub fn typed(line: &str) -> Self {
        Self::new(&line.split_ascii_whitespace().collect::<Vec<_>>())
    }

    /// The bytes to send.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Encodes commands.
pub fn encode<C: AsRef<[A]>, A: AsRef<[u8]>>(commands: impl IntoIterator<Item = C>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for command in commands {
        let command = command.as_ref();
        bytes.reserve(16 + command.iter().map(|word| word.as_ref().len() + 8).sum::<usize>());
        bytes.extend_from_slice(format!("*{}\r\n", command.len()).as_bytes());
        for word in command.iter().map(AsRef::as_ref) {
            bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            bytes.extend_from_slice(word);
            bytes.extend_from_slice(b"\r\n");
        }
    }
    bytes
}

/// Parses replies that arrive in pieces of any size. Each byte is read once.
#[derive(Debug, Default)]
pub struct Replies {
    arrived: Vec<u8>,
    /// Where the current reply begins. Earlier bytes were returned.
    begin: usize,
    /// How far the current reply is parsed.
    at: usize,
    /// The open collections, innermost last.
    open: Vec<Open>,
    /// The reply, once it is complete.
    whole: Option<Value>,
}

impl Replies {
    /// Adds data from the connection.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.arrived.drain(..self.begin);
        self.at -= self.begin;
        self.begin = 0;
        self.arrived.extend_from_slice(bytes);
    }

    /// The next reply, if it is complete.
    ///
    /// # Errors
    ///
    /// `InvalidData`, if the data is not a reply.
    #[expect(clippy::should_implement_trait, reason = "`None` means that more data is needed")]
    pub fn next(&mut self) -> io::Result<Option<Value>> {
        self.read()?;
        let reply = self.whole.take();
        if reply.is_some() {
            self.begin = self.at;
        }
        Ok(reply)
    }

    /// The bytes of the next reply, if it is complete.
    ///
    /// # Errors
    ///
    /// `InvalidData`, if the data is not a reply.
    pub fn next_bytes(&mut self) -> io::Result<Option<Vec<u8>>> {
        let begin = self.begin;
        Ok(self.next()?.map(|_| self.arrived[begin..self.at].to_vec()))
    }

    /// Whether [`next`](Self::next) would return a reply or an error.
    pub fn has_next(&mut self) -> bool {
        self.read().is_err() || self.whole.is_some()
    }

    /// Parses until the reply is complete or the data is used up.
    fn read(&mut self) -> io::Result<()> {
        while self.whole.is_none() {
            let from = self.at - self.begin;
            match self.item()? {
                None => return Ok(()),
                Some(Item::Value(value)) => self.whole = self.put(value)?,
                Some(Item::Opens { left: 0, kind }) => {
                    let empty = Open { kind, from, left: 0, elements: Vec::new() };
                    let value = self.close(empty)?;
                    self.whole = self.put(value)?;
                }
                Some(Item::Opens { left, kind }) => self.open.push(Open { kind, from, left, elements: Vec::new() }),
            }
        }
        Ok(())
    }

    /// Adds a value to the innermost collection, which may be complete with it, or makes it the reply.
    fn put(&mut self, mut value: Value) -> Parsed<Value> {
        while let Some(mut innermost) = self.open.pop() {
            innermost.elements.push(value);
            innermost.left -= 1;
            if innermost.left > 0 {
                self.open.push(innermost);
                return Ok(None);
            }
            value = self.close(innermost)?;
        }
        Ok(Some(value))
    }

    fn close(&self, complete: Open) -> io::Result<Value> {
        let Open { kind, from, mut elements, .. } = complete;
        match kind {
            b'*' => Ok(Value::Array(elements)),
            b'~' => Ok(Value::Set(elements)),
            b'%' => Ok(Value::Map(pairs(elements))),
            // Attributes precede their reply.
            b'|' => {
                let data = Box::new(elements.pop().unwrap_or(Value::Nil));
                Ok(Value::Attribute { data, attributes: pairs(elements) })
            }
            _ => client_parses(&self.arrived[self.begin + from..self.at]),
        }
    }

    /// The next scalar value, or the head of a collection. Consumes nothing if it is incomplete.
    fn item(&mut self) -> Parsed<Item> {
        let Some(line) = line(&self.arrived[self.at..])? else { return Ok(None) };
        let (&kind, rest) = line.split_first().ok_or_else(|| invalid(line))?;
        let mut end = self.at + line.len() + 2;
        let item = match kind {
            b'+' if rest == b"OK" => Item::Value(Value::Okay),
            b'+' => Item::Value(Value::SimpleString(String::from_utf8_lossy(rest).into_owned())),
            b':' => Item::Value(Value::Int(number(rest)?)),
            b'_' => Item::Value(Value::Nil),
            b'-' => Item::Value(server_error(rest)?),
            b'$' | b'=' | b'!' => match usize::try_from(number(rest)?) {
                Err(_) => Item::Value(Value::Nil),
                Ok(length) => {
                    let Some(string) = string(&self.arrived[end..], length)? else { return Ok(None) };
                    end += length + 2;
                    Item::Value(match kind {
                        b'$' => Value::BulkString(string.to_vec()),
                        _ => client_parses(&self.arrived[self.at..end])?,
                    })
                }
            },
            b'*' | b'~' | b'%' | b'|' | b'>' => match usize::try_from(number(rest)?) {
                Err(_) => Item::Value(Value::Nil),
                Ok(count) => Item::Opens { kind, left: elements_of(kind, count) },
            },
            b',' | b'#' | b'(' => Item::Value(client_parses(&self.arrived[self.at..end])?),
            _ => return Err(invalid(line)),
        };
        self.at = end;
        Ok(Some(item))
    }
}

/// A collection with missing elements.
#[derive(Debug)]
struct Open {
    kind: u8,
    /// Where it begins, relative to the reply.
    from: usize,
    left: usize,
    elements: Vec<Value>,
}

enum Item {
    Value(Value),
    Opens { kind: u8, left: usize },
}

/// `None` if more data is needed.
type Parsed<T> = io::Result<Option<T>>;

fn elements_of(kind: u8, count: usize) -> usize {
    match kind {
        b'%' => 2 * count,
        b'|' => 2 * count + 1,
        _ => count,
    }
}

fn pairs(elements: Vec<Value>) -> Vec<(Value, Value)> {
    let mut elements = elements.into_iter();
    std::iter::from_fn(|| Some((elements.next()?, elements.next()?))).collect()
}

/// The first line, without its end.
fn line(bytes: &[u8]) -> Parsed<&[u8]> {
    let Some(end) = bytes.iter().position(|&byte| byte == b'\r') else { return Ok(None) };
    match bytes.get(end + 1) {
        None => Ok(None),
        Some(b'\n') => Ok(Some(&bytes[..end])),
        Some(_) => Err(invalid(&bytes[..end])),
    }
}

/// A string of this length, without its end.
fn string(bytes: &[u8], length: usize) -> Parsed<&[u8]> {
    match bytes.get(length..length + 2) {
        None => Ok(None),
        Some(b"\r\n") => Ok(Some(&bytes[..length])),
        Some(end) => Err(invalid(end)),
    }
}

fn number(digits: &[u8]) -> io::Result<i64> {
    std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()).ok_or_else(|| invalid(digits))
}

/// An error value. Only the client library's own parser can create one. A name in the text need not be UTF-8.
fn server_error(text: &[u8]) -> io::Result<Value> {
    client_parses(format!("-{}\r\n", String::from_utf8_lossy(text)).as_bytes())
}

fn client_parses(reply: &[u8]) -> io::Result<Value> {
    redis::parse_redis_value(reply).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn invalid(found: &[u8]) -> io::Error {
    let message = format!("no reply of a server holds \"{}\"", found.escape_ascii());
    io::Error::new(io::ErrorKind::InvalidData, message)
}

/// The integer of a reply.
///
/// # Errors
///
/// If it is another type.
pub fn int(reply: &Value) -> io::Result<i64> {
    match reply {
        Value::Int(number) => Ok(*number),
        other => Err(io::Error::other(format!("expected an integer, got {other:?}"))),
    }
}

/// The text of a reply, whatever bytes it holds.
///
/// # Errors
///
/// If it is another type.
pub fn text(reply: &Value) -> io::Result<String> {
    match reply {
        Value::BulkString(bytes) => Ok(String::from_utf8_lossy(bytes).into_owned()),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Ok(text.clone()),
        Value::Okay => Ok("OK".into()),
        other => Err(io::Error::other(format!("expected a string, got {other:?}"))),
    }
}

/// The session id in the reply to `LOCK.SESSION`.
///
/// # Errors
///
/// If it is another reply.
pub fn session_id(reply: &Value) -> io::Result<String> {
    let id = match reply {
        Value::Map(pairs) => pairs.iter().find(|(name, _)| text(name).is_ok_and(|it| it == "id")).map(|(_, id)| id),
        // RESP2 returns the pairs as a flat list.
        Value::Array(all) => {
            all.chunks(2).find(|pair| text(&pair[0]).is_ok_and(|it| it == "id")).and_then(|pair| pair.get(1))
        }
        _ => None,
    };
    id.map_or_else(|| Err(io::Error::other(format!("expected a session, got {reply:?}"))), text)
}

/// The text of an error without the dash, or `None` if the reply is not an error.
pub fn error(reply: &Value) -> Option<String> {
    match reply {
        Value::ServerError(error) => Some(text_of(error)),
        _ => None,
    }
}

/// The texts of all errors in a reply, at any depth.
pub fn errors(reply: &Value) -> Vec<String> {
    match reply {
        Value::ServerError(error) => vec![text_of(error)],
        Value::Array(elements) | Value::Set(elements) | Value::Push { data: elements, .. } => {
            elements.iter().flat_map(errors).collect()
        }
        Value::Map(pairs) => pairs.iter().flat_map(|(key, value)| [errors(key), errors(value)].concat()).collect(),
        Value::Attribute { data, .. } => errors(data),
        _ => Vec::new(),
    }
}

fn text_of(error: &ServerError) -> String {
    match error.details() {
        Some(details) => format!("{} {details}", error.code()),
        None => error.code().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPLIES: [&[u8]; 18] = [
        b"+OK\r\n",
        b"+PONG\r\n",
        b":-42\r\n",
        b"$5\r\na\r\nbc\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n",
        b"%1\r\n+key\r\n~2\r\n:1\r\n:2\r\n",
        b"_\r\n",
        b"#t\r\n",
        b",1.5\r\n",
        b"(12345678901234567890\r\n",
        b"=7\r\ntxt:abc\r\n",
        b"|1\r\n+a\r\n+b\r\n:1\r\n",
        b">2\r\n+message\r\n:1\r\n",
        b"-ERR no\r\n",
        b"*0\r\n",
        b"*2\r\n*0\r\n%0\r\n",
    ];

    fn read(bytes: &[u8]) -> io::Result<Option<Value>> {
        let mut replies = Replies::default();
        replies.feed(bytes);
        replies.next()
    }

    #[test]
    fn reply_is_complete_with_its_last_byte() {
        for reply in REPLIES {
            for cut in 0..reply.len() {
                let seen = read(&reply[..cut]).unwrap();
                assert_eq!(seen, None, "\"{}\" cut at {cut}", reply.escape_ascii());
            }
            let mut replies = Replies::default();
            replies.feed(&[reply, b"+NEXT\r\n"].concat());
            assert_eq!(replies.next_bytes().unwrap().as_deref(), Some(reply));
            assert_eq!(replies.next().unwrap(), Some(Value::SimpleString("NEXT".into())));
            assert!(!replies.has_next());
        }
    }

    #[test]
    fn replies_are_parsed_as_by_the_client() {
        for reply in REPLIES {
            assert_eq!(read(reply).unwrap(), Some(redis::parse_redis_value(reply).unwrap()));
        }
    }

    #[test]
    fn invalid_reply_is_refused() {
        for nonsense in [&b"GET key\r\n"[..], b"\r\n", b":1x\r\n", b"$1\r\nabc\r\n", b"*x\r\n", b"+a\rb\r\n", b"#x\r\n"]
        {
            assert!(read(nonsense).is_err(), "\"{}\"", nonsense.escape_ascii());
        }
    }

    #[test]
    fn reply_is_assembled_from_pieces() {
        let mut replies = Replies::default();
        replies.feed(b"*2\r\n$3\r\nab");
        assert_eq!(replies.next().unwrap(), None);
        replies.feed(b"c\r\n:7\r\n$-1\r\n");
        assert_eq!(
            replies.next().unwrap(),
            Some(Value::Array(vec![Value::BulkString(b"abc".to_vec()), Value::Int(7)]))
        );
        assert_eq!(replies.next().unwrap(), Some(Value::Nil));
        assert_eq!(replies.next().unwrap(), None);
    }

    #[test]
    fn errors_are_found_at_every_depth() {
        let reply = read(b"*3\r\n-WRONGTYPE x\r\n%1\r\n+a\r\n*1\r\n-ERR \xff\r\n-BUSY\r\n").unwrap().unwrap();
        assert_eq!(errors(&reply), ["WRONGTYPE x", "ERR \u{fffd}", "BUSY"]);
        assert_eq!(error(&reply), None);
    }

    #[test]
    fn lengths_count_bytes() {
        assert_eq!(Request::typed("SET kä v").bytes(), "*3\r\n$3\r\nSET\r\n$3\r\nkä\r\n$1\r\nv\r\n".as_bytes());
    }
}
