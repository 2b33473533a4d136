//! A replica that records the stream, and confirms it or not.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The last command of a test's stream contains a word with this prefix.
pub const END: &[u8] = b"the-end";

/// A replica of a real server.
pub struct Replica {
    stream: JoinHandle<Vec<Vec<Vec<u8>>>>,
    is_good: Arc<AtomicBool>,
}

/// The period of heartbeats.
const PULSE: Duration = Duration::from_millis(200);

impl Replica {
    /// Follows a server. Confirms after this many ms when asked, or never.
    pub fn follow(primary: SocketAddr, delay: Option<u64>) -> Self {
        let mut socket = TcpStream::connect(primary).expect("connects");
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a valid time");
        socket.write_all(b"PSYNC ? -1\r\n").expect("sent");
        let mut from = BufReader::new(socket.try_clone().expect("a second handle"));
        let offset = line_with(&mut from, "+FULLRESYNC ");
        let offset = offset.trim_end().rsplit(' ').next().and_then(|it| it.parse().ok()).expect("an offset");
        let length = line_with(&mut from, "$").trim_end().parse().expect("a length");
        std::io::copy(&mut from.by_ref().take(length), &mut std::io::sink()).expect("the copy arrives");
        // As replicas do when they have received the copy.
        socket.write_all(&acknowledgement(offset)).expect("sent");
        let is_good = Arc::new(AtomicBool::new(false));
        // This confirms nothing new.
        let (mut pulse, sends) = (socket.try_clone().expect("a second handle"), is_good.clone());
        thread::spawn(move || {
            while Arc::strong_count(&sends) > 1 {
                if sends.load(Relaxed) && pulse.write_all(&acknowledgement(offset)).is_err() {
                    break;
                }
                thread::sleep(PULSE);
            }
        });
        Self { stream: thread::spawn(move || record(from, socket, offset, delay)), is_good }
    }

    /// Whether it sends heartbeats.
    pub fn set_good(&self, state: bool) {
        self.is_good.store(state, Relaxed);
    }

    /// The recorded stream, once it has ended.
    pub fn stream(self) -> Vec<Vec<Vec<u8>>> {
        self.stream.join().expect("the replica's thread ends without a panic")
    }
}

/// The rest of the next line with this prefix.
fn line_with(from: &mut impl BufRead, begin: &str) -> String {
    loop {
        let mut line = String::new();
        assert!(from.read_line(&mut line).expect("the copy arrives") > 0, "the server closed the connection");
        // Until the copy arrives, the server sends empty lines as heartbeats.
        if let Some(rest) = line.strip_prefix(begin) {
            return rest.to_owned();
        }
        assert_eq!(line.trim_end(), "");
    }
}

fn record(mut from: BufReader<TcpStream>, mut to: TcpStream, mut offset: u64, delay: Option<u64>) -> Vec<Vec<Vec<u8>>> {
    let mut sent = Vec::new();
    // Each request for confirmation gets its own reply.
    let (requests, received) = mpsc::channel::<(Instant, u64)>();
    thread::spawn(move || {
        for (at, offset) in received {
            thread::sleep(at.saturating_duration_since(Instant::now()));
            if to.write_all(&acknowledgement(offset)).is_err() {
                break;
            }
        }
    });
    while let Some((command, length)) = command(&mut from) {
        if command.iter().any(|word| word.starts_with(END)) {
            break;
        }
        if command[0].eq_ignore_ascii_case(b"REPLCONF")
            && let Some(delay) = delay
        {
            // (The server may have closed the connection.)
            let _ = requests.send((Instant::now() + Duration::from_millis(delay), offset));
        }
        offset += length;
        sent.push(command);
    }
    sent
}

fn acknowledgement(offset: u64) -> Vec<u8> {
    support::encode([["REPLCONF", "ACK", &offset.to_string()]])
}

/// The next command and its length in bytes; `None` once the connection is closed.
fn command(from: &mut impl BufRead) -> Option<(Vec<Vec<u8>>, u64)> {
    let mut taken = 0;
    let mut number = |from: &mut dyn BufRead| {
        let mut line = String::new();
        taken += from.read_line(&mut line).ok()? as u64;
        line.trim_end().get(1..)?.parse::<usize>().ok()
    };
    let count = number(from)?;
    let mut words = Vec::new();
    let mut bytes = 0;
    for _ in 0..count {
        let mut word = vec![0; number(from)? + 2];
        from.read_exact(&mut word).ok()?;
        bytes += word.len() as u64;
        word.truncate(word.len() - 2);
        words.push(word);
    }
    Some((words, taken + bytes))
}
