//! A pipelined connection that sends any bytes and looks at replies no closer than it must.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A request: the command's name and its arguments.
pub type Words = Vec<Vec<u8>>;

/// What kind of reply came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// An integer.
    Integer(i64),
    /// RESP2's or RESP3's null.
    Null,
    /// Bytes, of whichever kind.
    Text,
    /// An array, a set, a map or a push message.
    Collection,
    /// An error.
    Error,
}

/// A reply: its kind, and every error in it, at whatever depth.
#[derive(Debug)]
pub struct Reply {
    /// The reply's own kind.
    pub shape: Shape,
    /// Texts of the errors that it is or holds.
    pub errors: Vec<String>,
    /// Its last line, for what has to be told of it.
    pub last_line: String,
}

/// How long a reply may take, a thousand times what the longest wait in a batch is.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection with an output buffer of its own.
pub struct Pipe {
    input: BufReader<TcpStream>,
    output: Vec<u8>,
    last_line: Vec<u8>,
}

impl Pipe {
    /// Connects.
    pub fn connect(address: SocketAddr) -> io::Result<Pipe> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Pipe {
            input: BufReader::with_capacity(64 * 1024, stream),
            output: Vec::with_capacity(64 * 1024),
            last_line: Vec::new(),
        })
    }

    /// Adds a request to those that [`send`](Self::send) sends.
    pub fn push(&mut self, words: &[Vec<u8>]) {
        encode(words, &mut self.output);
    }

    /// Adds bytes as they stand.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        self.output.extend_from_slice(bytes);
    }

    /// Sends what was pushed.
    pub fn send(&mut self) -> io::Result<()> {
        let mut stream = self.input.get_ref();
        let result = stream.write_all(&self.output);
        self.output.clear();
        result
    }

    /// The next reply. Push messages are passed over.
    pub fn read(&mut self) -> io::Result<Reply> {
        let mut errors = Vec::new();
        let shape = self.shape(&mut errors)?;
        let last_line = self.last_line.escape_ascii().to_string();
        Ok(Reply { shape, errors, last_line })
    }

    /// The next reply if it begins within `patience`, else none.
    pub fn read_within(&mut self, patience: Duration) -> io::Result<Option<Reply>> {
        self.input.get_ref().set_read_timeout(Some(patience))?;
        let begun = self.input.fill_buf().map(<[u8]>::len);
        self.input.get_ref().set_read_timeout(Some(PATIENCE))?;
        match begun {
            Ok(_) => self.read().map(Some),
            Err(error) if is_timeout(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn shape(&mut self, errors: &mut Vec<String>) -> io::Result<Shape> {
        let line = self.line()?;
        self.last_line.clone_from(&line);
        let (kind, rest) = line.split_first().ok_or(ErrorKind::InvalidData)?;
        let number = || {
            let text = std::str::from_utf8(rest).map_err(|_| ErrorKind::InvalidData)?;
            text.parse::<i64>().map_err(|_| ErrorKind::InvalidData)
        };
        match kind {
            b':' => Ok(Shape::Integer(number()?)),
            b'_' => Ok(Shape::Null),
            b'-' => {
                errors.push(String::from_utf8_lossy(rest).into_owned());
                Ok(Shape::Error)
            }
            b'$' | b'=' | b'!' => match u64::try_from(number()?) {
                Ok(length) => {
                    let mut bytes = vec![0; length as usize + 2];
                    self.input.read_exact(&mut bytes)?;
                    Ok(Shape::Text)
                }
                Err(_) => Ok(Shape::Null),
            },
            b'*' | b'~' => self.elements(number()?, errors),
            b'%' => self.elements(2 * number()?, errors),
            b'>' => {
                self.elements(number()?, errors)?;
                self.shape(errors)
            }
            b'|' => {
                self.elements(2 * number()?, errors)?;
                self.shape(errors)
            }
            b'+' | b',' | b'#' | b'(' => Ok(Shape::Text),
            _ => Err(io::Error::new(
                ErrorKind::InvalidData,
                format!("no reply begins with {:?}", String::from_utf8_lossy(&line)),
            )),
        }
    }

    fn elements(&mut self, count: i64, errors: &mut Vec<String>) -> io::Result<Shape> {
        for _ in 0..count {
            self.shape(errors)?;
        }
        Ok(if count < 0 { Shape::Null } else { Shape::Collection })
    }

    fn line(&mut self) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        self.input.read_until(b'\n', &mut line)?;
        match line.strip_suffix(b"\r\n") {
            Some(line) => Ok(line.to_vec()),
            None => Err(ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Whether `error` says that nothing came in time, rather than that the connection is gone.
pub fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// A request as it is on the wire.
pub fn encode(words: &[Vec<u8>], output: &mut Vec<u8>) {
    output.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        output.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        output.extend_from_slice(word);
        output.extend_from_slice(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn replies(bytes: &[u8]) -> Vec<(Shape, Vec<String>)> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut pipe = Pipe::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        peer.write_all(bytes).unwrap();
        drop(peer);
        std::iter::from_fn(|| pipe.read().ok()).map(|reply| (reply.shape, reply.errors)).collect()
    }

    #[test]
    fn every_kind_of_reply_is_read_to_its_end() {
        let seen = replies(
            b"+OK\r\n:-7\r\n$3\r\na\r\n\r\n$-1\r\n*-1\r\n_\r\n*2\r\n-WRONGTYPE x\r\n*1\r\n-ERR y\r\n%1\r\n+a\r\n,1.5\r\n>1\r\n+push\r\n#t\r\n",
        );
        let shapes: Vec<Shape> = seen.iter().map(|(shape, _)| *shape).collect();
        use Shape::*;
        assert_eq!(shapes, [Text, Integer(-7), Text, Null, Null, Null, Collection, Collection, Text]);
        assert_eq!(seen[6].1, ["WRONGTYPE x", "ERR y"]);
    }
}
