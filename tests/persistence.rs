//! Persistence: a killed server, a restart from RDB or AOF, a server or a replica without the module.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use redis::Value;
use support::{Builder, Random, Raw, Server, until};

use crate::common::{
    Bytes, Contents, NAMES, ask, ask_int, ask_ok, ask_token, bytes, deadline, error, fields, int, keys, map, token,
    unix_millis,
};

const SOON: Duration = Duration::from_secs(30);

/// A server that writes every acknowledged change to disk.
fn durable() -> Builder {
    Server::builder().arg("appendonly", "yes").arg("appendfsync", "always")
}

#[test]
fn kill_9_loses_no_acknowledged_grant() {
    const CLIENTS: usize = 4;
    let mut server = durable().start();
    let random = Mutex::new(Random::new());
    let mut records: Vec<Record> = (0..CLIENTS).map(Record::new).collect();
    for _ in 0..4 {
        let acknowledged = AtomicUsize::new(0);
        let enough = 300 + random.lock().unwrap().below(700) as usize;
        thread::scope(|scope| {
            for record in &mut records {
                let raw = server.raw();
                let (acknowledged, random) = (&acknowledged, &random);
                scope.spawn(move || record.work(raw, acknowledged, random));
            }
            until(SOON, "enough requests are acknowledged", || acknowledged.load(Ordering::Relaxed) >= enough);
            // Not `server.kill9()`, which waits: the clients must still be active.
            server.kill9();
        });
        server.restart();
        let mut raw = server.raw();
        for record in &mut records {
            record.compare(&mut raw);
        }
    }
    assert!(records.iter().any(|record| record.granted > 0) && records.iter().any(|record| record.released > 0));
}

/// A client's record of its locks, from the replies.
struct Record {
    owner: Bytes,
    keys: Vec<Bytes>,
    /// Deadline and token of each hold.
    held: BTreeMap<Bytes, (i64, i64)>,
    /// The lock of the request without a reply when the server was killed: its outcome is unknown.
    unknown: Option<Bytes>,
    granted: usize,
    released: usize,
}

impl Record {
    fn new(client: usize) -> Self {
        let own = |name: &[u8]| [name, b" of client ", client.to_string().as_bytes()].concat();
        Self {
            owner: own(NAMES[client]),
            keys: NAMES.map(own).into(),
            held: BTreeMap::new(),
            unknown: None,
            granted: 0,
            released: 0,
        }
    }

    /// Acquires and releases locks at random until the server is gone.
    fn work(&mut self, mut raw: Raw, acknowledged: &AtomicUsize, random: &Mutex<Random>) {
        loop {
            let (key, lease) = {
                let mut random = random.lock().unwrap();
                (random.pick(&self.keys).clone(), 1_000_000 + random.below(1_000_000))
            };
            let lease = lease.to_string();
            let request: [&[u8]; 5] = match self.held.contains_key(&key) {
                true => [b"LOCK.RELEASE", &key, &self.owner, b"HOLDS", b"0"],
                false => [b"LOCK.ACQUIRE", &key, &self.owner, b"LEASE", lease.as_bytes()],
            };
            self.unknown = Some(key.clone());
            let question: [&[u8]; 2] = [b"PEXPIRETIME", &key];
            let Ok((reply, deadline)) =
                raw.send(&request).and_then(|()| raw.send(&question)).and_then(|()| Ok((raw.read()?, raw.read()?)))
            else {
                return;
            };
            self.note(key, int(&reply), int(&deadline));
            acknowledged.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn note(&mut self, key: Bytes, reply: i64, deadline: i64) {
        self.unknown = None;
        if self.held.remove(&key).is_some() {
            assert_eq!((reply, deadline), (1, -2));
            self.released += 1;
        } else {
            self.held.insert(key, (deadline, reply));
            self.granted += 1;
        }
    }

    /// Acknowledged changes are on the server. An unknown outcome may be either, and is read from the server.
    fn compare(&mut self, raw: &mut Raw) {
        if let Some(key) = self.unknown.take() {
            self.held.remove(&key);
            let fields = fields(raw, &key);
            if let Some(token) = fields.get(&b"#fence"[..]) {
                let token = String::from_utf8_lossy(token).parse().expect("a token");
                self.held.insert(key.clone(), (deadline(raw, &key), token));
            }
        }
        for key in &self.keys {
            let found = fields(raw, key);
            match self.held.get(key) {
                None => assert!(found.is_empty(), "{}: released, yet {found:?}", key.escape_ascii()),
                Some((end, token)) => {
                    assert_eq!(deadline(raw, key), *end, "{}", key.escape_ascii());
                    assert_eq!(found[&self.owner], b"1");
                    assert_eq!(found[&b"#fence"[..]], token.to_string().as_bytes());
                    assert_eq!(raw.call(&[b"LOCK.ACQUIRE", key, b"somebody else"]), Value::Nil);
                }
            }
        }
    }
}

/// Locks of every kind, with arbitrary bytes in their names.
fn make_locks(raw: &mut Raw) {
    for (index, key) in NAMES.into_iter().enumerate() {
        let owner = |by: usize| NAMES[(index + by) % NAMES.len()];
        let holds = (index + 1).to_string();
        token(&raw.call(&[b"LOCK.ACQUIRE", key, owner(0), b"LEASE", b"1000000", b"HOLDS", holds.as_bytes()]));
        let shared = [key, b" shared"].concat();
        token(&raw.call(&[b"LOCK.ACQUIRE", &shared, owner(0), b"SHARED", b"LEASE", b"3000000"]));
        token(&raw.call(&[b"LOCK.ACQUIRE", &shared, owner(1), b"SHARED", b"LEASE", b"1000000"]));
        token(&raw.call(&[b"LOCK.ACQUIRE", &shared, owner(2), b"LIMIT", b"3", b"LEASE", b"2000000", b"HOLDS", b"7"]));
        let redisson = [key, b" redisson"].concat();
        raw.call(&[b"HSET", &redisson, owner(1), b"2"]);
        raw.call(&[b"PEXPIRE", &redisson, b"1000000"]);
        let persistent = [key, b" persistent"].concat();
        token(&raw.call(&[b"LOCK.ACQUIRE", &persistent, owner(1)]));
        raw.call(&[b"PERSIST", &persistent]);
        let released = [key, b" released"].concat();
        token(&raw.call(&[b"LOCK.ACQUIRE", &released, owner(0)]));
        assert_eq!(raw.call(&[b"LOCK.RELEASE", &released, owner(0)]), Value::Int(1));
    }
}

/// The replies of `LOCK.INFO`, without the remaining times.
fn infos(raw: &mut Raw) -> Vec<(Bytes, String)> {
    let mut infos = Vec::new();
    for key in keys(raw) {
        let mut info = map(&raw.call(&[b"LOCK.INFO", &key]));
        info.remove(&b"ttl"[..]);
        let holders = info.get_mut(&b"holders"[..]).expect("holders");
        let Value::Array(holders) = holders else { panic!("{holders:?}") };
        let mut shown: Vec<String> = holders
            .iter()
            .map(|holder| {
                let mut holder = map(holder);
                assert!(holder.remove(&b"ttl"[..]).is_some());
                format!("{holder:?}")
            })
            .collect();
        shown.sort();
        info.remove(&b"holders"[..]);
        infos.push((key, format!("{info:?} {shown:?}")));
    }
    infos
}

/// `again` leaves every lock of the server unchanged, and a new token is greater than all before.
fn keeps_locks(mut server: Server, again: impl FnOnce(&mut Server)) {
    let mut raw = server.raw();
    make_locks(&mut raw);
    let newest = ask_token(&mut raw, "LOCK.ACQUIRE newest me LEASE 1000000");
    let (before, received) = (Contents::read(&mut raw), infos(&mut raw));
    again(&mut server);
    let mut raw = server.raw();
    assert_eq!(Contents::read(&mut raw), before);
    assert_eq!(infos(&mut raw), received);
    let mut held = keys(&mut raw);
    held.retain(|key| !key.ends_with(b" shared"));
    for key in held {
        assert_eq!(raw.call(&[b"LOCK.ACQUIRE", &key, b"somebody else"]), Value::Nil, "{}", key.escape_ascii());
    }
    assert!(ask_token(&mut raw, "LOCK.ACQUIRE newer me") > newest);
    assert_eq!(ask_int(&mut raw, &format!("LOCK.RELEASE newest me TOKEN {newest}")), 1);
}

#[test]
fn append_only_file_keeps_every_lock() {
    keeps_locks(durable().start(), |server| {
        server.kill9();
        server.restart();
    });
}

#[test]
fn rewritten_append_only_file_keeps_every_lock() {
    keeps_locks(durable().start(), |server| {
        rewrite(server);
        server.kill9();
        server.restart();
    });
}

#[test]
fn append_only_file_without_rdb_preamble_keeps_every_lock() {
    keeps_locks(durable().arg("aof-use-rdb-preamble", "no").start(), |server| {
        rewrite(server);
        server.kill9();
        server.restart();
    });
}

fn rewrite(server: &Server) {
    ask(&mut server.raw(), "BGREWRITEAOF");
    until(SOON, "the append-only file is rewritten", || {
        let is = |field: &str, value: &str| server.info("persistence", field).as_deref() == Some(value);
        is("aof_rewrite_in_progress", "0") && is("aof_rewrite_scheduled", "0") && is("aof_last_bgrewrite_status", "ok")
    });
}

#[test]
fn rdb_file_keeps_every_lock() {
    keeps_locks(Server::start(), |server| {
        ask_ok(&mut server.raw(), "SAVE");
        server.kill9();
        server.restart();
    });
}

#[test]
fn debug_reload_keeps_every_lock() {
    keeps_locks(Server::start(), |server| {
        ask_ok(&mut server.raw(), "DEBUG RELOAD");
    });
    keeps_locks(durable().start(), |server| {
        ask_ok(&mut server.raw(), "DEBUG LOADAOF");
    });
}

/// The exception to promise 6 in guarantees.md: only the key stores a token that was raised ahead of the clock.
#[test]
fn raised_token_is_unknown_to_other_keys_after_a_restart() {
    const MINUTES_59: i64 = 59 * 60 * 1_000_000;
    let mut server = durable().start();
    let mut raw = server.raw();
    let raised = ask_token(&mut raw, "LOCK.ACQUIRE raised me SHARED LEASE 1000000") + MINUTES_59;
    assert_eq!(ask_int(&mut raw, &format!("LOCK.RENEW raised me FENCE {raised} LEASE 1000000")), raised);
    assert!(ask_token(&mut raw, "LOCK.ACQUIRE other me") > raised, "until then, every later token is greater");
    server.kill9();
    server.restart();
    let mut raw = server.raw();
    assert!(ask_token(&mut raw, "LOCK.ACQUIRE another me") < raised, "the document says that it goes back");
    assert_eq!(ask_int(&mut raw, "LOCK.RENEW raised me LEASE 1000000"), raised);
    assert!(ask_token(&mut raw, "LOCK.ACQUIRE raised you SHARED") > raised, "the key knows");
}

#[test]
fn lease_continues_while_server_is_down() {
    let mut server = durable().start();
    let mut raw = server.raw();
    ask_token(&mut raw, "LOCK.ACQUIRE short me LEASE 150");
    ask_token(&mut raw, "LOCK.ACQUIRE shared short SHARED LEASE 150");
    ask_token(&mut raw, "LOCK.ACQUIRE shared long SHARED LEASE 1000000");
    let end = unix_millis() + 150;
    server.kill9();
    until(SOON, "the leases have expired", || unix_millis() > end);
    server.restart();
    let mut raw = server.raw();
    ask_token(&mut raw, "LOCK.ACQUIRE short you");
    assert_eq!(ask(&mut raw, "LOCK.RELEASE shared short"), Value::Nil);
    assert_eq!(ask(&mut raw, "LOCK.ACQUIRE shared you LIMIT 1"), Value::Nil);
    ask_token(&mut raw, "LOCK.ACQUIRE shared you LIMIT 2");
    assert_eq!(ask_int(&mut raw, "LOCK.FORCE shared"), 2);
}

#[test]
fn server_without_module_loads_its_files() {
    for (writer, again) in [(durable(), "yes"), (Server::builder(), "no")] {
        let mut server = writer.start();
        let mut raw = server.raw();
        make_locks(&mut raw);
        let before = Contents::read(&mut raw);
        if again == "no" {
            ask_ok(&mut raw, "SAVE");
        }
        server.kill9();
        let reader = without_module(server.dir(), again);
        let mut raw = reader.raw();
        assert_eq!(error(&ask(&mut raw, "LOCK.INFO plain")).0, "ERR", "the module is not there");
        assert_eq!(Contents::read(&mut raw), before, "appendonly {again}");
        assert_eq!(bytes(&ask(&mut raw, "HGET plain plain")), b"1");
        drop(reader);
        server.restart();
        assert_eq!(Contents::read(&mut server.raw()), before);
    }
}

fn without_module(dir: &Path, appendonly: &str) -> Server {
    Server::builder().without_module().dir(dir).arg("appendonly", appendonly).start()
}

#[test]
fn replica_without_module_follows() {
    let primary = Server::start();
    let mut raw = primary.raw();
    // Some before the replica connects, and some afterwards.
    make_locks(&mut raw);
    let replica = Server::builder().without_module().start();
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let mut random = Random::new();
    let mut last = Contents::read(&mut raw);
    for _ in 0..20 {
        for _ in 0..100 {
            raw.call(&random_request(&mut random).iter().map(Vec::as_slice).collect::<Vec<_>>());
        }
        primary.wait_for_replica(&replica);
        let now = Contents::read(&mut raw);
        assert_ne!(now, last, "the requests change something");
        assert_eq!(Contents::read(&mut replica.raw()), now);
        last = now;
    }
    assert_eq!(error(&ask(&mut replica.raw(), "LOCK.INFO plain")).0, "ERR", "the module is not there");
}

/// A request without a lease that could end during the test.
fn random_request(random: &mut Random) -> Vec<Bytes> {
    let key = *random.pick(&NAMES);
    let owner = *random.pick(&NAMES[..4]);
    let lease = (1_000_000 + random.below(1_000_000)).to_string();
    let (name, rest) = match random.below(12) {
        0..4 => ("LOCK.ACQUIRE", format!("SHARED LEASE {lease}")),
        4 => ("LOCK.ACQUIRE", format!("LIMIT 3 LEASE {lease}")),
        5..7 => ("LOCK.ACQUIRE", format!("LEASE {lease}")),
        7 => ("LOCK.ACQUIRE", "HOLDS 3".to_owned()),
        8 => ("LOCK.RELEASE", format!("LEASE {lease}")),
        9 => ("LOCK.RELEASE", "ALL".to_owned()),
        10 => ("LOCK.RENEW", format!("LEASE {lease}")),
        _ => return vec![b"LOCK.FORCE".to_vec(), key.to_vec()],
    };
    let rest = rest.split(' ').map(|word| word.as_bytes().to_vec());
    [name.as_bytes().to_vec(), key.to_vec(), owner.to_vec()].into_iter().chain(rest).collect()
}

#[test]
fn promoted_replica_with_module_has_the_locks() {
    let primary = Server::start();
    let replica = Server::start();
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let mut raw = primary.raw();
    make_locks(&mut raw);
    let newest = ask_token(&mut raw, "LOCK.ACQUIRE newest me LEASE 1000000");
    primary.wait_for_replica(&replica);
    let mut follower = replica.raw();
    assert_eq!(Contents::read(&mut follower), Contents::read(&mut raw));
    assert_eq!(infos(&mut follower), infos(&mut raw));
    for line in ["LOCK.ACQUIRE free me", "LOCK.RELEASE newest me", "LOCK.RENEW newest me", "LOCK.FORCE newest"] {
        assert_eq!(error(&ask(&mut follower, line)).0, "READONLY", "{line}");
    }
    replica.replica_of_no_one();
    assert_eq!(ask(&mut follower, "LOCK.ACQUIRE newest you"), Value::Nil);
    assert!(ask_token(&mut follower, "LOCK.ACQUIRE newer me") > newest);
    assert_eq!(ask_int(&mut follower, &format!("LOCK.RELEASE newest me TOKEN {newest}")), 1);
}
