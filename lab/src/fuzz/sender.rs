//! One connection after the other, what it sends, and what comes back.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use fastrand::Rng;
use support::Raw;
use support::resp::{self, Value, encode};

use super::outcome::Outcome;
use super::replies::{not_in_protocol, unknown_error};
use super::requests::{Requests, Words};

/// Requests sent in one go.
const BATCH: u64 = 100;
/// Garbage strings that a connection sends before it goes.
const GARBAGE: u64 = 20;
/// How long a reply may take, a thousand times what the longest wait in a batch is.
const PATIENCE: Duration = Duration::from_secs(30);

/// Ids of the senders' connections, by the sender's number.
pub type Clients = Mutex<BTreeMap<u64, i64>>;

/// One connection after the other, and what it sends.
pub struct Sender<'a> {
    address: SocketAddr,
    clients: &'a Clients,
    number: u64,
    requests: Requests,
    rng: Rng,
    outcome: Outcome,
    seed: u64,
}

/// Why a batch ended early.
enum End {
    /// The connection is gone, which is allowed: others may kill it.
    Dropped,
    /// A promise was broken.
    Broken(String),
}

impl<'a> Sender<'a> {
    pub fn new(address: SocketAddr, clients: &'a Clients, number: u64, seed: u64) -> Sender<'a> {
        Sender {
            address,
            clients,
            number,
            requests: Requests::new(seed),
            rng: Rng::with_seed(!seed),
            outcome: Outcome::default(),
            seed,
        }
    }

    pub fn send(mut self, wanted: u64) -> Outcome {
        let mut open = None;
        while self.outcome.requests < wanted && self.outcome.violations.is_empty() {
            let raw = match open.take() {
                Some(raw) => raw,
                None => match self.connect() {
                    Ok(raw) => raw,
                    Err(error) => {
                        self.outcome.violations.push(format!("can't connect: {error}"));
                        break;
                    }
                },
            };
            open = self.batch(raw);
        }
        self.outcome
    }

    fn connect(&mut self) -> io::Result<Raw> {
        let mut raw = Raw::connect(self.address)?;
        raw.send(&[b"CLIENT", b"ID"])?;
        let id = resp::int(&raw.read()?)?;
        let mut clients = self.clients.lock().map_err(|_| io::Error::other("a sender panicked"))?;
        clients.insert(self.number, id);
        self.requests.learn_clients(clients.values().copied().collect());
        Ok(raw)
    }

    /// Sends a batch and looks at each reply. The connection, if it is still of use.
    fn batch(&mut self, mut raw: Raw) -> Option<Raw> {
        let mut sent: Vec<Words> = Vec::new();
        while (sent.len() as u64) < BATCH {
            sent.extend(self.requests.next());
        }
        self.outcome.requests += sent.len() as u64;
        match self.exchange(&mut raw, &sent) {
            Ok(()) => {}
            Err(End::Dropped) => {
                self.outcome.dropped += 1;
                return None;
            }
            Err(End::Broken(why)) => {
                let kept = self.keep(&sent);
                self.outcome.violations.push(format!("{why}; requests kept in {}", kept.display()));
                return None;
            }
        }
        match self.rng.u32(..30) {
            0 => self.leave_while_waiting(raw),
            1 => self.leave_with_garbage(raw),
            _ => Some(raw),
        }
    }

    fn exchange(&mut self, raw: &mut Raw, sent: &[Words]) -> Result<(), End> {
        raw.send_bytes(&encode(sent)).map_err(|error| ended(&error, sent.first()))?;
        let mut in_transaction = false;
        for words in sent {
            let reply = reply(raw).map_err(|error| ended(&error, Some(words)))?;
            let name = words.first().map(Vec::as_slice).unwrap_or_default();
            match name {
                b"MULTI" => in_transaction = true,
                b"EXEC" | b"DISCARD" => in_transaction = false,
                _ if in_transaction => {}
                _ => self.look_at(name, &reply).map_err(End::Broken)?,
            }
            unknown_error(&reply).map_err(End::Broken)?;
        }
        Ok(())
    }

    fn look_at(&mut self, name: &[u8], reply: &Value) -> Result<(), String> {
        if let (b"LOCK.ACQUIRE" | b"LOCK.MACQUIRE", Value::Int(token)) = (name, reply) {
            self.requests.learn_token(*token);
        }
        not_in_protocol(name, reply)
    }

    /// Waits for a lock without an end, and goes away in the middle of it.
    fn leave_while_waiting(&mut self, mut raw: Raw) -> Option<Raw> {
        self.outcome.requests += 1;
        self.outcome.dropped += 1;
        if raw.send_bytes(&encode([self.requests.endless()])).is_ok() {
            let _ = raw.read_timeout(Duration::from_millis(self.rng.u64(..4)).max(Duration::from_micros(50)));
        }
        None
    }

    /// Sends what may be no request at all. Whatever comes back is right, but the server must go on.
    fn leave_with_garbage(&mut self, mut raw: Raw) -> Option<Raw> {
        let strings: Vec<Vec<u8>> = (0..GARBAGE).map(|_| self.requests.garbage()).collect();
        self.outcome.garbage += GARBAGE;
        self.outcome.requests += GARBAGE;
        self.outcome.dropped += 1;
        if raw.send_bytes(&strings.concat()).is_ok() {
            let _ = raw.read_timeout(Duration::from_millis(1));
        }
        None
    }

    fn keep(&self, sent: &[Words]) -> PathBuf {
        let path = std::env::temp_dir().join(format!("holdfast-fuzz-{}.resp", self.seed));
        let _ = std::fs::write(&path, encode(sent));
        path
    }
}

/// The next reply. Push messages are passed over.
fn reply(raw: &mut Raw) -> io::Result<Value> {
    loop {
        match raw.read_timeout(PATIENCE)? {
            Some(Value::Push { .. }) => {}
            Some(reply) => return Ok(reply),
            None => return Err(ErrorKind::TimedOut.into()),
        }
    }
}

fn ended(error: &io::Error, at: Option<&Words>) -> End {
    let request =
        || format!("{:?}", at.map(|words| words.iter().map(|word| String::from_utf8_lossy(word)).collect::<Vec<_>>()));
    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) {
        End::Broken(format!("no reply to {}", request()))
    } else if error.kind() == ErrorKind::InvalidData {
        End::Broken(format!("{error}, in reply to {}", request()))
    } else {
        End::Dropped
    }
}
