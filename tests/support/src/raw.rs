//! A bare TCP client: sees every byte, waits only when told to, and can go as rudely as clients do.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, SocketAddrV4, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use redis::Value;

use crate::resp::{Replies, encode};
use crate::until::until;

/// How long [`Raw::read`] waits: long enough for every wait in a test, short enough to fail one that hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// One TCP connection to a server, binary-safe, RESP2 unless [`hello3`](Self::hello3) was called.
#[derive(Debug)]
pub struct Raw {
    stream: TcpStream,
    replies: Replies,
    /// How long reads of the stream wait, as it was last set.
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

    /// Sends one command and does not wait for its reply.
    pub fn send(&mut self, command: &[&[u8]]) -> io::Result<()> {
        self.send_bytes(&encode([command]))
    }

    /// Sends bytes as they stand: several commands at once, half a command, or nonsense.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// The next reply, in order; one that the server refused is a [`Value::ServerError`].
    ///
    /// # Errors
    ///
    /// `UnexpectedEof` or `ConnectionReset` when the server has closed the connection, `TimedOut` after a minute.
    pub fn read(&mut self) -> io::Result<Value> {
        self.read_timeout(PATIENCE)?.ok_or_else(|| io::Error::new(ErrorKind::TimedOut, "no reply within a minute"))
    }

    /// The next reply if it comes within `patience`, else none; the reply can still be read later.
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
    /// If the connection fails. An error *reply* is a value as any other.
    #[track_caller]
    pub fn call(&mut self, command: &[&[u8]]) -> Value {
        self.send(command).expect("command sent");
        self.read().expect("reply read")
    }

    /// Sends several commands at once and reads all replies.
    ///
    /// # Panics
    ///
    /// If the connection fails. An error *reply* is a value as any other.
    #[track_caller]
    pub fn call_all<C: AsRef<[A]>, A: AsRef<[u8]>>(&mut self, commands: &[C]) -> Vec<Value> {
        self.send_bytes(&encode(commands)).expect("commands sent");
        commands.iter().map(|_| self.read().expect("reply read")).collect()
    }

    /// Sends a command and reads the next reply as the bytes that it is on the wire.
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

    /// Whether no whole reply is there to be read right now. Never waits.
    ///
    /// # Panics
    ///
    /// If the server has closed the connection: nothing is pending on it any more.
    #[track_caller]
    pub fn pending(&mut self) -> bool {
        if !self.replies.has_next() {
            self.receive(Duration::ZERO).expect("connection open");
        }
        !self.replies.has_next()
    }

    /// Waits until something has come, a whole reply or not, for at most `patience`, which may be a few microseconds.
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

    /// Whether the server has ended the connection (replies that came before are still there). Never waits.
    pub fn closed(&mut self) -> bool {
        loop {
            match self.receive(Duration::ZERO) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(_) => return true,
            }
        }
    }

    /// Speaks RESP3 from now on.
    #[track_caller]
    pub fn hello3(&mut self) {
        let reply = self.call(&[b"HELLO", b"3"]);
        assert!(matches!(reply, Value::Map(_)), "HELLO 3: {reply:?}");
    }

    /// The server's id of this connection.
    #[track_caller]
    pub fn client_id(&mut self) -> i64 {
        match self.call(&[b"CLIENT", b"ID"]) {
            Value::Int(id) => id,
            other => panic!("CLIENT ID: {other:?}"),
        }
    }

    /// This end's address, as the server's `CLIENT LIST` shows it.
    pub fn local_addr(&self) -> SocketAddr {
        self.stream.local_addr().expect("connection has an address")
    }

    /// Ends the connection as a client that goes in good order: FIN.
    pub fn close(self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Ends the connection as a crashed host does: RST, and what was not sent or read yet is lost.
    pub fn reset(self) {
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        // SAFETY: the descriptor is open for as long as `self`, and option and length describe `linger`, which outlives the call.
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

    /// The same, and returns when the end of the connection has arrived at the other side: on a busy machine that may take
    /// a moment, also from one process to another.
    #[track_caller]
    pub fn reset_and_arrive(self) {
        let (own, other) = (self.local_addr(), self.stream.peer_addr().expect("it is connected"));
        self.reset();
        until(Duration::from_secs(30), "the end of the connection has arrived", || !is_established(other, own));
    }

    /// Reads once, waiting for at most `patience`; false if nothing came.
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

/// Whether this machine's kernel takes the connection for open, seen from the end with the address `own`.
fn is_established(own: SocketAddr, other: SocketAddr) -> bool {
    const ESTABLISHED: &str = "01";
    let (SocketAddr::V4(own), SocketAddr::V4(other)) = (own, other) else { return false };
    let shown = |of: SocketAddrV4| format!("{:08X}:{:04X}", u32::from_ne_bytes(of.ip().octets()), of.port());
    let line = format!("{} {} {ESTABLISHED} ", shown(own), shown(other));
    std::fs::read_to_string("/proc/net/tcp").is_ok_and(|table| table.contains(&line))
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
