//! A bare TCP client: sees every byte, blocks only on request, and can close or reset its connection.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use redis::Value;

use crate::resp::{Replies, encode};
use crate::socket::Socket;
use crate::until::until;

/// The timeout of [`Raw::read`]: longer than every wait in a test.
const PATIENCE: Duration = Duration::from_secs(60);

/// One TCP connection to a server, binary-safe, RESP2 unless [`hello3`](Self::hello3) was called.
#[derive(Debug)]
pub struct Raw {
    stream: TcpStream,
    replies: Replies,
    /// The read timeout that was set last.
    read_timeout: Option<Duration>,
}

impl Raw {
    /// Connects to `address`.
    pub fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { stream, replies: Replies::default(), read_timeout: None })
    }

    /// Sends one command without reading the reply.
    pub fn send(&mut self, command: &[&[u8]]) -> io::Result<()> {
        self.send_bytes(&encode([command]))
    }

    /// Sends bytes as they are: several commands, half a command, or invalid data.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// The next reply. An error reply is a [`Value::ServerError`].
    ///
    /// # Errors
    ///
    /// `UnexpectedEof` or `ConnectionReset` when the server has closed the connection, `TimedOut` after a minute.
    pub fn read(&mut self) -> io::Result<Value> {
        self.read_timeout(PATIENCE)?.ok_or_else(|| io::Error::new(ErrorKind::TimedOut, "no reply within a minute"))
    }

    /// The next reply, or `None` after `patience`. The reply can still be read later.
    pub fn read_timeout(&mut self, patience: Duration) -> io::Result<Option<Value>> {
        let begin = Instant::now();
        let mut left = patience;
        loop {
            if let Some(value) = self.replies.next()? {
                return Ok(Some(value));
            }
            if !self.receive(left)? {
                return Ok(None);
            }
            left = patience.saturating_sub(begin.elapsed());
        }
    }

    /// Sends a command and reads the next reply.
    ///
    /// # Panics
    ///
    /// If the connection fails. An error reply is a value.
    #[track_caller]
    pub fn call(&mut self, command: &[&[u8]]) -> Value {
        self.send(command).expect("command sent");
        self.read().expect("reply read")
    }

    /// Sends several commands at once and reads all replies.
    ///
    /// # Panics
    ///
    /// If the connection fails. An error reply is a value.
    #[track_caller]
    pub fn call_all<C: AsRef<[A]>, A: AsRef<[u8]>>(&mut self, commands: &[C]) -> Vec<Value> {
        self.send_bytes(&encode(commands)).expect("commands sent");
        commands.iter().map(|_| self.read().expect("reply read")).collect()
    }

    /// Sends a command and returns the bytes of the next reply.
    ///
    /// # Panics
    ///
    /// If the connection fails.
    #[track_caller]
    pub fn call_for_bytes(&mut self, command: &[&[u8]]) -> Vec<u8> {
        self.send(command).expect("command sent");
        loop {
            if let Some(bytes) = self.replies.next_bytes().expect("a reply") {
                return bytes;
            }
            assert!(self.receive(PATIENCE).expect("reply read"), "no reply within a minute");
        }
    }

    /// Whether no complete reply has arrived. Never blocks.
    ///
    /// # Panics
    ///
    /// If the server has closed the connection.
    #[track_caller]
    pub fn pending(&mut self) -> bool {
        if !self.replies.has_next() {
            self.receive(Duration::ZERO).expect("connection open");
        }
        !self.replies.has_next()
    }

    /// Waits for at most `patience`, which may be a few microseconds, until data has arrived, complete or not.
    pub fn arrives_within(&mut self, patience: Duration) -> io::Result<bool> {
        if self.replies.has_next() {
            return Ok(true);
        }
        let mut poll = libc::pollfd { fd: self.stream.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let time = libc::timespec {
            tv_sec: patience.as_secs() as libc::time_t,
            tv_nsec: patience.subsec_nanos() as libc::c_long,
        };
        // SAFETY: one descriptor, which is open for as long as `self`, and a time; both outlive the call. No signal mask.
        match unsafe { libc::ppoll(&raw mut poll, 1, &raw const time, std::ptr::null()) } {
            -1 => Err(io::Error::last_os_error()).or_else(|error| match error.kind() {
                ErrorKind::Interrupted => Ok(false),
                _ => Err(error),
            }),
            ready => Ok(ready > 0),
        }
    }

    /// Whether the server has closed the connection (earlier replies can still be read). Never blocks.
    pub fn closed(&mut self) -> bool {
        loop {
            match self.receive(Duration::ZERO) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(_) => return true,
            }
        }
    }

    /// Switches to RESP3.
    #[track_caller]
    pub fn hello3(&mut self) {
        let reply = self.call(&[b"HELLO", b"3"]);
        assert!(matches!(reply, Value::Map(_)), "HELLO 3: {reply:?}");
    }

    /// The client id of this connection.
    #[track_caller]
    pub fn client_id(&mut self) -> i64 {
        match self.call(&[b"CLIENT", b"ID"]) {
            Value::Int(id) => id,
            other => panic!("CLIENT ID: {other:?}"),
        }
    }

    /// The local address, as in the server's `CLIENT LIST`.
    pub fn local_addr(&self) -> SocketAddr {
        self.stream.local_addr().expect("connection has an address")
    }

    /// Closes the connection in order: FIN.
    pub fn close(self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Resets the connection, like a crashed host: RST. Unsent and unread data is lost.
    pub fn reset(self) {
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        // SAFETY: the descriptor is open for as long as `self`; option and length describe `linger`, which outlives the call.
        let result = unsafe {
            libc::setsockopt(
                self.stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                size_of::<libc::linger>() as libc::socklen_t,
            )
        };
        assert_eq!(result, 0, "SO_LINGER: {}", io::Error::last_os_error());
    }

    /// The same, and waits until the reset has arrived at the other side, which may take a moment on a busy machine.
    #[track_caller]
    pub fn reset_and_arrive(self) {
        let (own, other) = (self.local_addr(), self.stream.peer_addr().expect("the connection is open"));
        self.reset();
        until(Duration::from_secs(30), "the reset has arrived", || !is_established(other, own));
    }

    /// Reads once, waiting for at most `patience`. Returns false if nothing came.
    fn receive(&mut self, patience: Duration) -> io::Result<bool> {
        if patience.is_zero() {
            self.stream.set_nonblocking(true)?;
        } else if self.read_timeout != Some(patience) {
            self.stream.set_read_timeout(Some(patience))?;
            self.read_timeout = Some(patience);
        }
        let mut buffer = [0; 16 * 1024];
        let result = self.stream.read(&mut buffer);
        if patience.is_zero() {
            self.stream.set_nonblocking(false)?;
        }
        match result {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(length) => {
                self.replies.feed(&buffer[..length]);
                Ok(true)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// Whether the kernel considers the connection open at the side with the address `own`.
fn is_established(own: SocketAddr, other: SocketAddr) -> bool {
    let (SocketAddr::V4(own), SocketAddr::V4(other)) = (own, other) else { return false };
    Socket::find(own, other).is_ok_and(|socket| socket.is_some_and(Socket::is_established))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn reset_arrives() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let raw = Raw::connect(listener.local_addr().unwrap()).unwrap();
        let (mut there, own) = listener.accept().unwrap();
        let other = there.local_addr().unwrap();
        assert!(is_established(other, own));
        raw.reset_and_arrive();
        assert!(!is_established(other, own));
        assert_eq!(there.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}
