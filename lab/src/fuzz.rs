//! Robustness: random bytes and random requests against a living server with two replicas, one of them without the module.
//!
//! Nothing may crash, no log may hold an error, memory must come back, and the replicas must have what the master has.

pub mod copies;
mod requests;
mod wire;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use redis::Connection;
use support::{Server, eventually, until};

use crate::options::Options;
use crate::report::Row;
use copies::{check_copies, quiet_log};
use requests::{Requests, not_in_protocol};
use wire::{Pipe, Reply, Words, encode, is_timeout};

/// Requests of the short form.
const SHORT: u64 = 1_000_000;
/// Connections that send at the same time.
const CONNECTIONS: u64 = 6;
/// After each round all connections end, and copies and logs are looked at.
const ROUNDS: u64 = 20;
/// Rounds before memory is measured first: buffers, tables and statistics that stay have their size by then.
const WARM_UP: u64 = 4;
/// Requests sent in one go.
const BATCH: u64 = 100;
/// How much `used_memory` may have grown over all the rounds: less than a byte a request.
const GROWTH: i64 = 256 * 1024;
/// Violations of a round that are told in full.
const TOLD: usize = 8;

/// Runs the scenario: a million requests in the short form, as many times a million as fit in the budget otherwise.
pub fn run(options: &Options) -> Vec<Row> {
    let start = Instant::now();
    let mut total = Row { scenario: "robustness: random requests".into(), ..Row::default() };
    let mut seed = options.seed;
    loop {
        let before = Instant::now();
        let outcome = once(seed, requests_wanted());
        total.runs += 1;
        total.requests += outcome.requests;
        total.faults += outcome.dropped;
        total.violations += outcome.violations.len() as u64;
        for violation in outcome.violations.iter().take(TOLD) {
            eprintln!("fuzz, seed {seed}: {violation}");
        }
        let reached: Vec<String> = outcome.reached.iter().map(|(what, times)| format!("{times} {what}")).collect();
        total.note = format!(
            "{} garbage strings; {}; copies compared {} times; memory grew by {} B",
            outcome.garbage,
            reached.join(", "),
            outcome.compared,
            outcome.growth
        );
        seed += 1;
        if options.short || start.elapsed() + before.elapsed() > options.budget {
            return vec![total];
        }
    }
}

/// `LAB_FUZZ_REQUESTS`, for runs under tools that make the server many times slower.
fn requests_wanted() -> u64 {
    std::env::var("LAB_FUZZ_REQUESTS").ok().and_then(|text| text.parse().ok()).unwrap_or(SHORT)
}

/// What was done and seen.
#[derive(Default)]
struct Outcome {
    requests: u64,
    garbage: u64,
    dropped: u64,
    compared: u64,
    growth: i64,
    reached: Vec<(&'static str, i64)>,
    violations: Vec<String>,
}

impl Outcome {
    fn add(&mut self, other: Outcome) {
        self.requests += other.requests;
        self.garbage += other.garbage;
        self.dropped += other.dropped;
        self.compared += other.compared;
        self.violations.extend(other.violations);
    }
}

fn once(seed: u64, requests: u64) -> Outcome {
    let mut outcome = Outcome::default();
    let master = Server::builder()
        .arg("databases", &requests::DATABASES.to_string())
        .arg("repl-diskless-sync-delay", "0")
        .arg("notify-keyspace-events", "KEAd")
        .arg("crash-memcheck-enabled", "no")
        .start();
    let replicas = [Server::start(), Server::builder().without_module().start()];
    for replica in &replicas {
        replica.replica_of(&master);
    }
    master.wait_replicas_online(replicas.len());
    until(Duration::from_secs(20), "the process that made the copies is gone", || {
        master.info("persistence", "rdb_bgsave_in_progress").as_deref() == Some("0")
    });
    // Servers warn about this and that while they start and make the first copies.
    let servers: Vec<(&Server, usize)> =
        [&master].into_iter().chain(&replicas).map(|server| (server, server.log().len())).collect();
    let mut base = None;
    for round in 0..ROUNDS {
        outcome.add(storm(&master, seed.wrapping_mul(1000) + round, requests / ROUNDS));
        let quiet = || servers.iter().try_for_each(|(server, seen)| quiet_log(server, *seen));
        let checked = quiet()
            .and_then(|()| everybody_gone(&master))
            .and_then(|()| check_copies(&master, &replicas))
            .and_then(|()| quiet());
        match checked {
            Ok(()) => outcome.compared += 1,
            Err(why) => {
                outcome.violations.push(format!("round {round}: {why}"));
                break;
            }
        }
        if round + 1 == WARM_UP {
            base = Some(memory_when_empty(&master, i64::MIN));
        }
    }
    if !outcome.violations.is_empty() {
        // The server may be gone.
        return outcome;
    }
    outcome.reached = reached(&master);
    if requests >= SHORT / 10
        && let Some((what, _)) = outcome.reached.iter().find(|(_, times)| *times == 0)
    {
        outcome.violations.push(format!("among the requests none led to {what}: they test too little"));
    }
    if let Some(base) = base {
        outcome.growth = memory_when_empty(&master, base) - base;
        if outcome.growth > GROWTH {
            outcome.violations.push(format!("memory grew by {} bytes", outcome.growth));
        }
    }
    outcome
}

/// What the requests led to, by the module's own count: each must have happened.
fn reached(master: &Server) -> Vec<(&'static str, i64)> {
    const COUNTS: [(&str, &str); 14] = [
        ("grants", "grants_at_once"),
        ("from the queue", "grants_queued"),
        ("refusals", "refusals"),
        ("timeouts", "timeouts"),
        ("releases", "releases"),
        ("renewals", "renewals"),
        ("of lost locks", "renewals_lost"),
        ("expired", "expired"),
        ("forced", "forced"),
        ("by disconnect", "released_by_disconnect"),
        ("by watchdog", "watchdog_renewals"),
        ("deadlocks", "deadlocks_refused"),
        ("confirmed", "confirmed"),
        ("taken back", "taken_back"),
    ];
    let mut connection = master.connect();
    COUNTS.map(|(what, field)| (what, holdfast(&mut connection, field))).to_vec()
}

/// With all connections gone, nobody may wait or be tied.
fn everybody_gone(master: &Server) -> Result<(), String> {
    const NOW: [&str; 4] = ["waiters", "contended_locks", "tied_holds", "confirming"];
    let mut connection = master.client().get_connection().map_err(|error| error.to_string())?;
    match NOW.into_iter().find(|of| !eventually(Duration::from_secs(5), || holdfast(&mut connection, of) == 0)) {
        Some(of) => Err(format!("all connections are closed, yet {of} does not go down to 0")),
        None => Ok(()),
    }
}

fn holdfast(connection: &mut Connection, name: &str) -> i64 {
    field(connection, "holdfast", &format!("holdfast_{name}"))
}

/// One round: several connections send at once, until each has sent its part.
fn storm(master: &Server, seed: u64, requests: u64) -> Outcome {
    let address = master.addr();
    let clients = Mutex::new(BTreeMap::new());
    let mut outcome = Outcome::default();
    thread::scope(|scope| {
        let senders: Vec<_> = (0..CONNECTIONS)
            .map(|number| {
                let clients = &clients;
                scope.spawn(move || {
                    let sender = Sender::new(address, clients, number, seed * 100 + number);
                    sender.send(requests / CONNECTIONS)
                })
            })
            .collect();
        for sender in senders {
            match sender.join() {
                Ok(part) => outcome.add(part),
                Err(_) => outcome.violations.push("a sender panicked".into()),
            }
        }
    });
    outcome
}

/// Ids of the senders' connections, by the sender's number.
type Clients = Mutex<BTreeMap<u64, i64>>;

/// One connection after the other, and what it sends.
struct Sender<'a> {
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
    fn new(address: SocketAddr, clients: &'a Clients, number: u64, seed: u64) -> Sender<'a> {
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

    fn send(mut self, wanted: u64) -> Outcome {
        let mut pipe = None;
        while self.outcome.requests < wanted && self.outcome.violations.is_empty() {
            let connected = match pipe.take() {
                Some(pipe) => pipe,
                None => match self.connect() {
                    Ok(pipe) => pipe,
                    Err(error) => {
                        self.outcome.violations.push(format!("can't connect: {error}"));
                        break;
                    }
                },
            };
            pipe = self.batch(connected);
        }
        self.outcome
    }

    fn connect(&mut self) -> io::Result<Pipe> {
        let mut pipe = Pipe::connect(self.address)?;
        pipe.push(&[b"CLIENT".to_vec(), b"ID".to_vec()]);
        pipe.send()?;
        let id = match pipe.read()?.shape {
            wire::Shape::Integer(id) => id,
            other => return Err(io::Error::other(format!("CLIENT ID: {other:?}"))),
        };
        let mut clients = self.clients.lock().map_err(|_| io::Error::other("a sender panicked"))?;
        clients.insert(self.number, id);
        self.requests.learn_clients(clients.values().copied().collect());
        Ok(pipe)
    }

    /// Sends a batch and looks at each reply. The connection, if it is still of use.
    fn batch(&mut self, mut pipe: Pipe) -> Option<Pipe> {
        let mut sent: Vec<Words> = Vec::new();
        while (sent.len() as u64) < BATCH {
            sent.extend(self.requests.next());
        }
        self.outcome.requests += sent.len() as u64;
        match self.exchange(&mut pipe, &sent) {
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
            0 => self.leave_while_waiting(pipe),
            1 => self.leave_with_garbage(pipe),
            _ => Some(pipe),
        }
    }

    fn exchange(&mut self, pipe: &mut Pipe, sent: &[Words]) -> Result<(), End> {
        for words in sent {
            pipe.push(words);
        }
        pipe.send().map_err(|error| ended(&error, sent.first()))?;
        let mut in_transaction = false;
        for words in sent {
            let reply = pipe.read().map_err(|error| ended(&error, Some(words)))?;
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

    fn look_at(&mut self, name: &[u8], reply: &Reply) -> Result<(), String> {
        if let (b"LOCK.ACQUIRE" | b"LOCK.MACQUIRE", wire::Shape::Integer(token)) = (name, reply.shape) {
            self.requests.learn_token(token);
        }
        not_in_protocol(name, reply.shape).map_or(Ok(()), |why| Err(format!("{why}: {}", reply.last_line)))
    }

    /// Waits for a lock without an end, and goes away in the middle of it.
    fn leave_while_waiting(&mut self, mut pipe: Pipe) -> Option<Pipe> {
        pipe.push(&self.requests.endless());
        self.outcome.requests += 1;
        self.outcome.dropped += 1;
        if pipe.send().is_ok() {
            let _ = pipe.read_within(Duration::from_millis(self.rng.u64(..4)).max(Duration::from_micros(50)));
        }
        None
    }

    /// Sends what may be no request at all. Whatever comes back is right, but the server must go on.
    fn leave_with_garbage(&mut self, mut pipe: Pipe) -> Option<Pipe> {
        for _ in 0..20 {
            pipe.push_bytes(&self.requests.garbage());
            self.outcome.garbage += 1;
            self.outcome.requests += 1;
        }
        self.outcome.dropped += 1;
        if pipe.send().is_ok() {
            let _ = pipe.read_within(Duration::from_millis(1));
        }
        None
    }

    fn keep(&self, sent: &[Words]) -> PathBuf {
        let path = std::env::temp_dir().join(format!("holdfast-fuzz-{}.resp", self.seed));
        let mut bytes = Vec::new();
        for words in sent {
            encode(words, &mut bytes);
        }
        let _ = std::fs::write(&path, bytes);
        path
    }
}

fn ended(error: &io::Error, at: Option<&Words>) -> End {
    let request =
        || format!("{:?}", at.map(|words| words.iter().map(|word| String::from_utf8_lossy(word)).collect::<Vec<_>>()));
    if is_timeout(error) {
        End::Broken(format!("no reply to {}", request()))
    } else if error.kind() == io::ErrorKind::InvalidData {
        End::Broken(format!("{error}, in reply to {}", request()))
    } else {
        End::Dropped
    }
}

/// Errors begin with a code that clients know.
fn unknown_error(reply: &Reply) -> Result<(), String> {
    const CODES: [&str; 9] =
        ["ERR", "WRONGTYPE", "DEADLOCK", "NOREPLICAS", "UNBLOCKED", "EXECABORT", "NOPROTO", "OOM", "NOSCRIPT"];
    let known = |error: &&String| CODES.contains(&error.split(' ').next().unwrap_or_default());
    match reply.errors.iter().find(|error| !known(error)) {
        Some(error) => Err(format!("unknown error {error:?}")),
        None => Ok(()),
    }
}

/// What the server uses once every key is gone, without what connections and the backlog hold for a while. Waits until it
/// is no more than `base` and what is allowed besides, or until it is clear that it stays above.
fn memory_when_empty(master: &Server, base: i64) -> i64 {
    let mut connection = master.connect();
    for command in [&["FLUSHALL"][..], &["SCRIPT", "FLUSH", "SYNC"], &["CONFIG", "RESETSTAT"]] {
        let mut request = redis::cmd(command[0]);
        request.arg(&command[1..]);
        request.exec(&mut connection).expect("the server empties itself");
    }
    until(Duration::from_secs(10), "the senders' connections are gone", || {
        field(&mut connection, "clients", "connected_clients") == 1
    });
    // Tables shrink when the server's own cycle comes by, ten times a second.
    let mut least = i64::MAX;
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end && least > base.saturating_add(GROWTH / 8) {
        least = least.min(used(&mut connection));
        thread::sleep(Duration::from_millis(20));
    }
    least
}

fn used(connection: &mut Connection) -> i64 {
    let mut of = |name| field(connection, "memory", name);
    of("used_memory") - of("mem_clients_normal") - of("mem_total_replication_buffers")
}

fn field(connection: &mut Connection, section: &str, name: &str) -> i64 {
    let info: redis::InfoDict = redis::cmd("INFO").arg(section).query(connection).expect("INFO");
    info.get(name).unwrap_or(0)
}
