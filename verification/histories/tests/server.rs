//! A real server with the module: threads acquire, re-enter, renew, release, wait and force locks, let leases expire,
//! and disconnect. Each records what it observes, and the checker must accept the history.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use histories::history::Acquire;
use histories::{Operation, Outcome, Request, write};
use redis::Value;
use support::{Random, Raw, Server, eventually};

const CLIENTS: usize = 8;
/// Locks, each with the limit that all requests name: 0 is `SHARED`.
const LOCKS: [(&str, u64); 4] = [("mutex:1", 1), ("mutex:2", 1), ("semaphore", 2), ("readers", 0)];
/// A server rounds its clock down to a millisecond, so a lease may end this much before its client expects it.
const MARGIN: u64 = 2_000;
/// Of each client.
const OPERATIONS: usize = 500;

struct Client<'a> {
    server: &'a Server,
    /// Locked by a client that disconnects.
    disconnects: &'a Mutex<()>,
    begin: Instant,
    name: String,
    owners: u64,
    random: Random,
    raw: Raw,
    /// The last token of each lock.
    tokens: BTreeMap<String, u64>,
    seen: Vec<Operation>,
}

impl Client<'_> {
    fn now(&self) -> u64 {
        self.begin.elapsed().as_micros() as u64
    }

    fn work(mut self) -> Vec<Operation> {
        for _ in 0..OPERATIONS {
            let (key, limit) = *self.random.pick(&LOCKS);
            match self.random.below(100) {
                0..45 => self.acquire(key, limit),
                45..75 => self.release(key),
                75..90 => self.renew(key),
                90..96 => self.do_and_note(key, "LOCK.FORCE", Request::Force, &[]),
                // One at a time: the search tries each moment for each request without an outcome, and a busy machine takes long
                // to notice a disconnect.
                _ => {
                    if let Ok(_guard) = self.disconnects.try_lock() {
                        self.vanish(key, limit);
                    }
                }
            }
        }
        self.seen
    }

    fn ask(&mut self) -> (Acquire, Vec<String>) {
        let lease = 1 + self.random.below(60);
        let wait = self.random.chance(60);
        let holds = self.random.chance(30).then(|| 1 + self.random.below(3));
        let mut words = vec!["LEASE".into(), lease.to_string()];
        if wait {
            words.extend(["WAIT".into(), (1 + self.random.below(20)).to_string()]);
        }
        if let Some(holds) = holds {
            words.extend(["HOLDS".into(), holds.to_string()]);
        }
        let lease = Some((lease * 1000).saturating_sub(MARGIN));
        (Acquire { owner: self.name.clone(), lease, wait, holds, ..Acquire::default() }, words)
    }

    fn acquire(&mut self, key: &str, limit: u64) {
        let (ask, words) = self.ask();
        let words = [vec![self.name.clone()], words, limited(limit)].concat();
        self.do_and_note(key, "LOCK.ACQUIRE", Request::Acquire(Acquire { limit, ..ask }), &words);
    }

    fn release(&mut self, key: &str) {
        // A release of all names a token. Without one it may also withdraw a request, and the search would have to try
        // both.
        let token = self.tokens.get(key).copied().filter(|_| self.random.chance(40));
        let mut words = vec![self.name.clone()];
        words.extend(token.into_iter().flat_map(|token| ["TOKEN".to_owned(), token.to_string(), "ALL".to_owned()]));
        let request = Request::Release { owner: self.name.clone(), token, holds: token.map(|_| 0), lease: None };
        self.do_and_note(key, "LOCK.RELEASE", request, &words);
    }

    fn renew(&mut self, key: &str) {
        let lease = 1 + self.random.below(60);
        let words = [self.name.clone(), "LEASE".into(), lease.to_string()];
        let request = Request::renew(&self.name, Some((lease * 1000).saturating_sub(MARGIN)));
        self.do_and_note(key, "LOCK.RENEW", request, &words);
    }

    fn do_and_note(&mut self, key: &str, command: &str, request: Request, words: &[String]) {
        let command: Vec<&[u8]> =
            [command, key].into_iter().chain(words.iter().map(String::as_str)).map(str::as_bytes).collect();
        let from = self.now();
        let reply = self.raw.call(&command);
        let to = self.now();
        let outcome = match (reply, &request) {
            (Value::Int(gone), Request::Release { .. }) => Outcome::Left(1 - gone as u64),
            (Value::Int(count), Request::Force) => Outcome::Count(count as u64),
            (Value::Int(token), _) => Outcome::Token(token as u64),
            (Value::Nil, _) => Outcome::Null,
            (Value::ServerError(error), Request::Acquire(_)) if error.code() == "DEADLOCK" => Outcome::Error,
            (other, _) => panic!("{request:?}: {other:?}"),
        };
        if let Outcome::Token(token) = outcome {
            self.tokens.insert(key.to_owned(), token);
        }
        self.seen.push(Operation::new(&self.name, key, request, (from, to), outcome));
    }

    /// Sends a request with an owner of its own, and disconnects before the reply. A pending grant is revoked.
    fn vanish(&mut self, key: &str, limit: u64) {
        self.owners += 1;
        let owner = format!("{}/{}", self.name, self.owners);
        let (ask, words) = self.ask();
        let mut raw = self.server.raw();
        let id = raw.client_id();
        let words = [vec!["LOCK.ACQUIRE".into(), key.into(), owner.clone()], words, limited(limit)].concat();
        let from = self.now();
        raw.send(&words.iter().map(String::as_bytes).collect::<Vec<_>>()).expect("the server is there");
        raw.close();
        let id = id.to_string();
        let gone =
            eventually(Duration::from_secs(20), || match self.raw.call(&[b"CLIENT", b"LIST", b"ID", id.as_bytes()]) {
                Value::BulkString(list) => list.is_empty(),
                Value::VerbatimString { text, .. } => text.is_empty(),
                other => panic!("CLIENT LIST: {other:?}"),
            });
        assert!(gone, "the server never saw that connection {id} has ended");
        let at = (from, self.now());
        let request = Request::Acquire(Acquire { owner: owner.clone(), limit, ..ask });
        self.seen.push(Operation::new(&self.name, key, request, at, Outcome::Unknown));
        self.seen.push(Operation::new("the server", key, Request::End { owner }, at, Outcome::Done));
    }
}

fn limited(limit: u64) -> Vec<String> {
    if limit == 0 { vec!["SHARED".into()] } else { vec!["LIMIT".into(), limit.to_string()] }
}

#[test]
fn history_of_real_server_is_accepted() {
    let server = Server::start();
    let mut random = Random::new();
    let begin = Instant::now();
    let disconnects = Mutex::new(());
    let seen: Vec<Operation> = thread::scope(|threads| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let (raw, random) = (server.raw(), random.fork());
                let name = format!("client-{number}");
                let client = Client {
                    server: &server,
                    disconnects: &disconnects,
                    begin,
                    name,
                    owners: 0,
                    random,
                    raw,
                    tokens: BTreeMap::new(),
                    seen: Vec::new(),
                };
                threads.spawn(move || client.work())
            })
            .collect();
        clients.into_iter().flat_map(|client| client.join().expect("every request was answered")).collect()
    });
    let granted = seen.iter().filter(|operation| matches!(operation.outcome, Outcome::Token(_))).count();
    let begin = Instant::now();
    let verdict = histories::check(&seen);
    eprintln!("{} operations, {granted} grants and renewals, checked in {:?}", seen.len(), begin.elapsed());
    if let Err(violation) = verdict {
        let file = std::env::temp_dir().join(format!("holdfast-history-{}.jsonl", std::process::id()));
        write(&seen, std::fs::File::create(&file).expect("a file")).expect("it fits");
        panic!("{violation}the whole history is in {}", file.display());
    }
    // With one reply changed, the checker must refuse the history.
    let mut changed = seen;
    let left = changed.iter_mut().rev().find_map(|operation| match &mut operation.outcome {
        Outcome::Left(left) => Some(left),
        _ => None,
    });
    *left.expect("something was released") += 100;
    assert!(histories::check(&changed).is_err(), "accepted with a release that was answered wrongly");
    assert!(granted > 100, "{granted} grants and renewals only: this shows little");
}
