//! Sends requests over one connection after the other, and checks the replies.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use fastrand::Rng;
use support::Raw;
use support::resp::{self, Request, Value, encode, errors};

use super::outcome::Outcome;
use super::replies::{not_in_protocol, other_database, unknown_error};
use super::requests::Requests;
use super::rights::{reveals_secret, user_of};
use super::words::Words;

/// Requests of a batch.
const BATCH: u64 = 100;
/// How many of them are pending at a time: a long event-loop iteration is then due to one request.
const AT_ONCE: usize = 10;
/// How often in a row other clients may close a connection before its first request.
const FAILURES: u32 = 20;
/// Random strings that a connection sends before it closes.
const GARBAGE: u64 = 20;
/// The timeout for a reply, a thousand times the longest wait in a batch.
const PATIENCE: Duration = Duration::from_secs(30);

/// Client ids of the senders' connections, by the sender's number.
pub type Clients = Mutex<BTreeMap<u64, i64>>;

/// Sends over one connection after the other.
pub struct Sender<'a> {
    address: SocketAddr,
    clients: &'a Clients,
    number: u64,
    requests: Requests,
    rng: Rng,
    outcome: Outcome,
    seed: u64,
    /// Whether the connection's user has limited rights.
    restricted: bool,
    /// The connection's database.
    database: u32,
}

/// Why a batch ended early.
enum End {
    /// The connection was closed, which is allowed: other clients may kill it.
    Dropped,
    /// A guarantee was violated.
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
            restricted: false,
            database: 0,
        }
    }

    pub fn send(mut self, wanted: u64) -> Outcome {
        let mut open = None;
        let mut failures = 0;
        while self.outcome.requests < wanted && self.outcome.violations.is_empty() {
            let raw = match open.take() {
                Some(raw) => raw,
                None => match self.connect() {
                    Ok(raw) => raw,
                    Err(error) => {
                        failures += 1;
                        if failures > FAILURES {
                            self.outcome.violations.push(format!("can't connect: {error}"));
                            break;
                        }
                        continue;
                    }
                },
            };
            failures = 0;
            open = self.batch(raw);
        }
        self.outcome
    }

    fn connect(&mut self) -> io::Result<Raw> {
        let mut raw = Raw::connect(self.address)?;
        self.restricted = match user_of(self.number) {
            // Another sender may have deleted the user.
            Some(user) => answer(&mut raw, &["AUTH", user, user])? == Value::Okay,
            None => false,
        };
        let id = resp::int(&answer(&mut raw, &["CLIENT", "ID"])?)?;
        self.requests.learn_session(&resp::session_id(&answer(&mut raw, &["LOCK.SESSION"])?)?);
        self.database = self.requests.starts_in();
        answer(&mut raw, &["SELECT", &self.database.to_string()])?;
        let mut clients = self.clients.lock().map_err(|_| io::Error::other("a sender panicked"))?;
        clients.insert(self.number, id);
        self.requests.learn_clients(clients.values().copied().collect());
        Ok(raw)
    }

    /// Sends a batch and checks each reply. Returns the connection if it is still open.
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
        // Where the request's transaction begins.
        let mut multi = None;
        for part in 0..sent.len().div_ceil(AT_ONCE) {
            let part = part * AT_ONCE..((part + 1) * AT_ONCE).min(sent.len());
            raw.send_bytes(&encode(&sent[part.clone()])).map_err(|error| ended(&error, sent.get(part.start)))?;
            for index in part {
                let words = &sent[index];
                let reply = reply(raw).map_err(|error| ended(&error, Some(words)))?;
                let name = words.first().map(Vec::as_slice).unwrap_or_default();
                let mut asked = index..index + 1;
                match name {
                    b"MULTI" => multi = Some(index),
                    b"EXEC" | b"DISCARD" => asked.start = multi.take().unwrap_or(index),
                    _ if multi.is_some() => {}
                    _ => self.look_at(words, &reply).map_err(End::Broken)?,
                }
                self.look_at_errors(&sent[asked], &reply).map_err(End::Broken)?;
            }
        }
        Ok(())
    }

    fn look_at(&mut self, words: &Words, reply: &Value) -> Result<(), String> {
        let name = words.first().map(Vec::as_slice).unwrap_or_default();
        match (name, reply) {
            (b"LOCK.ACQUIRE" | b"LOCK.MACQUIRE", Value::Int(token)) => self.requests.learn_token(*token),
            (b"SELECT", Value::Okay) => self.database = number(words.get(1)),
            _ => {}
        }
        not_in_protocol(name, reply)
    }

    /// The checks for every reply; `asked` is the request.
    fn look_at_errors(&mut self, asked: &[Words], reply: &Value) -> Result<(), String> {
        unknown_error(reply)?;
        other_database(self.database, reply)?;
        self.outcome.forbidden += errors(reply).iter().filter(|error| error.starts_with("NOPERM")).count() as u64;
        if self.restricted && reveals_secret(asked, reply) {
            return Err(format!("{} showed a key that its user may not read: {reply:?}", shown(asked.last())));
        }
        Ok(())
    }

    /// Waits for a lock without a timeout, and closes the connection meanwhile.
    fn leave_while_waiting(&mut self, mut raw: Raw) -> Option<Raw> {
        self.outcome.requests += 1;
        self.outcome.dropped += 1;
        if raw.send_bytes(&encode([self.requests.endless()])).is_ok() {
            let _ = raw.read_timeout(Duration::from_millis(self.rng.u64(..4)).max(Duration::from_micros(50)));
        }
        None
    }

    /// Sends random bytes. Any reply is allowed, but the server must continue.
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

/// The next reply. Push messages are skipped.
fn reply(raw: &mut Raw) -> io::Result<Value> {
    loop {
        match raw.read_timeout(PATIENCE)? {
            Some(Value::Push { .. }) => {}
            Some(reply) => return Ok(reply),
            None => return Err(ErrorKind::TimedOut.into()),
        }
    }
}

fn answer(raw: &mut Raw, words: &[&str]) -> io::Result<Value> {
    raw.send_bytes(Request::new(words).bytes())?;
    reply(raw)
}

fn number(word: Option<&Vec<u8>>) -> u32 {
    word.and_then(|word| std::str::from_utf8(word).ok()?.parse().ok()).unwrap_or_default()
}

fn shown(request: Option<&Words>) -> String {
    format!("{:?}", request.map(|words| words.iter().map(|word| String::from_utf8_lossy(word)).collect::<Vec<_>>()))
}

fn ended(error: &io::Error, at: Option<&Words>) -> End {
    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) {
        End::Broken(format!("no reply to {}", shown(at)))
    } else if error.kind() == ErrorKind::InvalidData {
        End::Broken(format!("{error}, in reply to {}", shown(at)))
    } else {
        End::Dropped
    }
}
