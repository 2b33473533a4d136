//! How other clients see a lock's changes: keyspace notifications, Redisson's channel, replicas, the append-only file.

use std::fs;
use std::time::Duration;

use redis::Value;
use support::{Cluster, Raw, Server, lua, until};

use crate::common::{
    Bytes, Contents, NAMES, array, ask, ask_int, ask_ok, ask_token, bytes, deadline, fields, spelled_out, text, token,
    unix_millis, words,
};

const SOON: Duration = Duration::from_secs(30);

/// A published message: channel and payload.
type Message = (Bytes, Bytes);

/// A subscriber that collects messages.
struct Listener {
    raw: Raw,
    marks: u32,
}

impl Listener {
    /// Subscribes to all channels that match a pattern.
    fn new(server: &Server, pattern: &str) -> Self {
        let mut raw = server.raw();
        for pattern in [pattern.as_bytes(), b"mark"] {
            raw.call(&[b"PSUBSCRIBE", pattern]);
        }
        Self { raw, marks: 0 }
    }

    /// The messages since the last call. `publisher` is a connection to the same server or its primary.
    #[track_caller]
    fn heard(&mut self, publisher: &mut Raw) -> Vec<Message> {
        self.marks += 1;
        let mark = self.marks.to_string().into_bytes();
        publisher.call(&[b"PUBLISH", b"mark", &mark]);
        let mut messages = Vec::new();
        loop {
            let reply = self.raw.read().expect("a message");
            let [_, _, channel, message] = array(&reply) else { panic!("{reply:?}") };
            let message = (bytes(channel).to_vec(), bytes(message).to_vec());
            if message == (b"mark".to_vec(), mark.clone()) {
                return messages;
            }
            messages.push(message);
        }
    }
}

/// A command, and the events of its key `k` in order.
const EVENTS: [(&str, &[&str]); 22] = [
    ("LOCK.ACQUIRE k me LEASE 100000", &["hset", "expire", "lock.acquired"]),
    ("LOCK.ACQUIRE k you", &[]),
    ("LOCK.ACQUIRE k me LEASE 200000", &["hset", "expire"]),
    ("LOCK.ACQUIRE k me LEASE 5", &["hset"]),
    ("LOCK.ACQUIRE k me HOLDS 3 LEASE 5", &[]),
    ("LOCK.RENEW k me LEASE 100000", &["expire"]),
    ("LOCK.RENEW k you", &[]),
    ("LOCK.RELEASE k me", &["hset"]),
    ("LOCK.RELEASE k me LEASE 50000", &["hset", "expire"]),
    ("LOCK.RELEASE k you", &[]),
    ("LOCK.RELEASE k me TOKEN 1", &[]),
    ("LOCK.RELEASE k me", &["del", "lock.released"]),
    ("LOCK.RELEASE k me", &[]),
    ("LOCK.FORCE k", &[]),
    ("LOCK.ACQUIRE k me", &["hset", "expire", "lock.acquired"]),
    ("LOCK.FORCE k", &["del", "lock.forced"]),
    ("LOCK.ACQUIRE k me SHARED LEASE 100000", &["hset", "expire", "lock.acquired"]),
    ("LOCK.ACQUIRE k you SHARED LEASE 50000", &["hset", "lock.acquired"]),
    ("LOCK.RELEASE k you", &["hdel", "lock.released"]),
    ("LOCK.ACQUIRE k you SHARED LEASE 200000", &["hset", "expire", "lock.acquired"]),
    ("LOCK.RELEASE k you", &["hdel", "expire", "lock.released"]),
    ("LOCK.RELEASE k me", &["del", "lock.released"]),
];

/// The notification class of an event.
fn class(event: &str) -> char {
    match event {
        "hset" | "hdel" => 'h',
        "expire" | "del" => 'g',
        _ => 'd',
    }
}

#[test]
fn module_sends_standard_and_own_keyspace_notifications() {
    let server = Server::start();
    let mut raw = server.raw();
    let mut listener = Listener::new(&server, "__keyspace@0__:*");
    for classes in ["hgd", "d", "h", "g", "hd", ""] {
        ask_ok(&mut raw, &format!("CONFIG SET notify-keyspace-events K{classes}"));
        for (line, events) in EVENTS {
            ask(&mut raw, line);
            let heard: Vec<String> = listener
                .heard(&mut raw)
                .into_iter()
                .map(|(_, event)| String::from_utf8(event).expect("text"))
                .collect();
            let expected: Vec<&str> = events.iter().copied().filter(|event| classes.contains(class(event))).collect();
            assert_eq!(heard, expected, "{line} with K{classes}");
        }
    }
}

#[test]
fn notifications_name_keys_of_any_bytes() {
    let server = Server::builder().arg("notify-keyspace-events", "Ed").start();
    let mut raw = server.raw();
    ask_ok(&mut raw, "SELECT 5");
    let mut listener = Listener::new(&server, "__keyevent@5__:*");
    let event = |name: &str, key: &[u8]| (format!("__keyevent@5__:lock.{name}").into_bytes(), key.to_vec());
    for key in NAMES {
        token(&raw.call(&[b"LOCK.ACQUIRE", key, b"me"]));
        raw.call(&[b"LOCK.RELEASE", key, b"me"]);
        token(&raw.call(&[b"LOCK.ACQUIRE", key, b"me"]));
        raw.call(&[b"LOCK.FORCE", key]);
        let expected = ["acquired", "released", "acquired", "forced"].map(|name| event(name, key));
        assert_eq!(listener.heard(&mut raw), expected);
    }
}

#[test]
fn expired_lease_is_notified() {
    let server = Server::builder().arg("notify-keyspace-events", "KEA").start();
    let mut raw = server.raw();
    let mut listener = Listener::new(&server, "__key*@0__:*expired");
    let mut hears = |raw: &mut Raw, key: &str, event: &str| {
        let expected = (format!("__keyevent@0__:{event}").into_bytes(), key.as_bytes().to_vec());
        let mut heard = Vec::new();
        until(SOON, "the expiry is notified", || {
            heard.extend(listener.heard(raw));
            heard.contains(&expected)
        });
    };
    ask_token(&mut raw, "LOCK.ACQUIRE shared me SHARED LEASE 20");
    ask_token(&mut raw, "LOCK.ACQUIRE shared you SHARED LEASE 100000");
    hears(&mut raw, "shared", "lock.expired");
    assert_eq!(ask_int(&mut raw, "LOCK.FORCE shared"), 1);

    ask_token(&mut raw, "LOCK.ACQUIRE awaited me LEASE 20");
    let mut next = server.raw();
    ask_token(&mut next, "LOCK.ACQUIRE awaited you WAIT 0");
    hears(&mut raw, "awaited", "lock.expired");

    ask_token(&mut raw, "LOCK.ACQUIRE alone me LEASE 20");
    hears(&mut raw, "alone", "expired");
}

#[test]
fn freed_lock_is_published_for_redisson() {
    let server = Server::start();
    let mut raw = server.raw();
    let mut listener = Listener::new(&server, "redisson_lock__channel:*");
    let no_name: &[u8] = b"";
    for key in NAMES.into_iter().chain([no_name]) {
        let announced = [(lua::channel(key), b"0".to_vec())];
        let mut hears = |listener: &mut Listener, command: &[&[u8]], expected: &[Message]| {
            assert!(!matches!(raw.call(command), Value::ServerError(_)), "{command:?}");
            assert_eq!(listener.heard(&mut raw), expected, "{command:?}");
        };
        hears(&mut listener, &[b"LOCK.ACQUIRE", key, b"me", b"HOLDS", b"2"], &[]);
        hears(&mut listener, &[b"LOCK.ACQUIRE", key, b"you"], &[]);
        hears(&mut listener, &[b"LOCK.RENEW", key, b"me"], &[]);
        hears(&mut listener, &[b"LOCK.RELEASE", key, b"me"], &[]);
        hears(&mut listener, &[b"LOCK.RELEASE", key, b"you"], &[]);
        hears(&mut listener, &[b"LOCK.RELEASE", key, b"me"], &announced);
        hears(&mut listener, &[b"LOCK.RELEASE", key, b"me"], &[]);
        hears(&mut listener, &[b"LOCK.FORCE", key], &[]);
        hears(&mut listener, &[b"LOCK.ACQUIRE", key, b"me", b"SHARED"], &[]);
        hears(&mut listener, &[b"LOCK.ACQUIRE", key, b"you", b"SHARED"], &[]);
        hears(&mut listener, &[b"LOCK.RELEASE", key, b"you"], &[]);
        hears(&mut listener, &[b"LOCK.FORCE", key], &announced);
    }
    ask_ok(&mut raw, "CONFIG SET holdfast.publish-releases no");
    for end in ["LOCK.RELEASE k me", "LOCK.FORCE k"] {
        ask_token(&mut raw, "LOCK.ACQUIRE k me");
        assert_eq!(ask_int(&mut raw, end), 1, "{end}");
        assert_eq!(listener.heard(&mut raw), []);
    }
}

#[test]
fn handed_off_lock_is_not_published() {
    let server = Server::start();
    let mut raw = server.raw();
    let mut listener = Listener::new(&server, "redisson_lock__channel:*");
    for end in ["LOCK.RELEASE k me", "LOCK.FORCE k"] {
        ask_token(&mut raw, "LOCK.ACQUIRE k me");
        let mut next = server.raw();
        next.send(&words("LOCK.ACQUIRE k you WAIT 0")).expect("sent");
        until(SOON, "a request waits", || ask(&mut raw, "LOCK.WAITERS k") != Value::Array(vec![]));
        ask_int(&mut raw, end);
        token(&next.read().expect("a reply"));
        assert_eq!(listener.heard(&mut raw), [], "{end}");
        assert_eq!(ask_int(&mut next, "LOCK.RELEASE k you"), 1);
        assert_eq!(listener.heard(&mut raw).len(), 1, "no request waits any more");
    }
}

#[test]
fn cluster_publishes_to_shard_channel() {
    let cluster = Cluster::start(1);
    let server = cluster.node(0);
    let mut raw = server.raw();
    for key in ["plain", "{tag}rest"] {
        let mut shard = server.raw();
        let channel = lua::channel(key.as_bytes());
        shard.call(&[b"SSUBSCRIBE", &channel]);
        let mut everywhere = Listener::new(server, "redisson_lock__channel:*");
        ask_token(&mut raw, &format!("LOCK.ACQUIRE {key} me"));
        assert_eq!(ask_int(&mut raw, &format!("LOCK.RELEASE {key} me")), 1);
        let message = shard.read().expect("a message");
        let parts: Vec<&[u8]> = array(&message).iter().map(bytes).collect();
        assert_eq!(parts, [b"smessage", &channel[..], b"0"]);
        assert_eq!(everywhere.heard(&mut raw), [], "not for subscribers of the whole cluster");
    }
}

#[test]
fn subscribers_of_a_replica_receive_replicated_releases() {
    let primary = Server::start();
    let replica = Server::builder().without_module().start();
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let mut raw = primary.raw();
    let mut listener = Listener::new(&replica, "redisson_lock__channel:*");
    // By default, subscribers of `PUBLISH` get it.
    token(&raw.call(&[b"LOCK.ACQUIRE", b"undelivered", b"me"]));
    raw.call(&[b"LOCK.RELEASE", b"undelivered", b"me"]);
    assert_eq!(listener.heard(&mut raw), []);
    ask_ok(&mut raw, "CONFIG SET holdfast.publish-releases replicated");
    for key in NAMES {
        token(&raw.call(&[b"LOCK.ACQUIRE", key, b"me"]));
        raw.call(&[b"LOCK.RELEASE", key, b"me"]);
        assert_eq!(listener.heard(&mut raw), [(lua::channel(key), b"0".to_vec())]);
    }
    let mut here = Listener::new(&primary, "redisson_lock__channel:*");
    token(&raw.call(&[b"LOCK.ACQUIRE", b"k", b"me"]));
    raw.call(&[b"LOCK.RELEASE", b"k", b"me"]);
    assert_eq!(here.heard(&mut raw), [(lua::channel(b"k"), b"0".to_vec())]);
}

/// A logged command.
type Logged = Vec<Bytes>;

/// The append-only file, from a position on.
struct Log<'a> {
    server: &'a Server,
    plain: Server,
    seen: usize,
}

impl<'a> Log<'a> {
    fn new(server: &'a Server) -> Self {
        let mut log = Self { server, plain: Server::builder().without_module().start(), seen: 0 };
        log.steps();
        log
    }

    /// What was logged since the last call, as groups of plain commands that take effect together.
    fn steps(&mut self) -> Vec<Vec<Logged>> {
        let (mut plain, steps) = (self.plain.raw(), self.raw_steps());
        let spell_out = |step: Vec<Logged>| step.into_iter().flat_map(|it| spelled_out(&mut plain, it)).collect();
        steps.into_iter().map(spell_out).collect()
    }

    /// The same without translating the commands.
    fn raw_steps(&mut self) -> Vec<Vec<Logged>> {
        let all = logged(self.server);
        let new = &all[self.seen..];
        self.seen = all.len();
        let (mut steps, mut open) = (Vec::new(), None);
        for command in new {
            match (&command[0].to_ascii_uppercase()[..], &mut open) {
                (b"SELECT", _) => {}
                (b"MULTI", None) => open = Some(Vec::new()),
                (b"EXEC", Some(_)) => steps.extend(open.take()),
                (_, Some(step)) => step.push(command.clone()),
                (_, None) => steps.push(vec![command.clone()]),
            }
        }
        assert!(open.is_none(), "a transaction is incomplete");
        steps
    }
}

/// All commands of the newest append-only file.
fn logged(server: &Server) -> Vec<Logged> {
    let dir = server.dir().join("appendonlydir");
    let mut files: Vec<_> = fs::read_dir(dir).expect("the files").map(|entry| entry.expect("a file").path()).collect();
    files.retain(|path| path.to_string_lossy().ends_with(".incr.aof"));
    let file = fs::read(files.iter().max().expect("a file")).expect("it can be read");
    let mut rest = &file[..];
    let mut commands = Vec::new();
    while !rest.is_empty() {
        let count = header(&mut rest, b'*');
        commands.push((0..count).map(|_| argument(&mut rest)).collect());
    }
    commands
}

fn argument(rest: &mut &[u8]) -> Bytes {
    let length = header(rest, b'$');
    let (argument, behind) = rest.split_at(length);
    *rest = behind.strip_prefix(b"\r\n").expect("the end of a line");
    argument.to_vec()
}

fn header(rest: &mut &[u8], kind: u8) -> usize {
    let end = rest.windows(2).position(|pair| pair == b"\r\n").expect("a whole line");
    assert_eq!(rest[0], kind);
    let number = std::str::from_utf8(&rest[1..end]).expect("digits").parse().expect("a number");
    *rest = &rest[end + 2..];
    number
}

#[test]
fn log_has_standard_commands_with_absolute_times() {
    let server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let mut raw = server.raw();
    let mut log = Log::new(&server);
    for key in NAMES {
        let mut step = |rest: &[&[u8]], name: &str| {
            let command = [&[name.as_bytes(), key], rest].concat();
            let reply = raw.call(&command);
            (reply, deadline(&mut raw, key), log.steps())
        };
        let set =
            |pairs: &[&[u8]]| [&[b"HSET", key], pairs].concat().into_iter().map(<[u8]>::to_vec).collect::<Logged>();
        let expire = |at: i64| vec![b"PEXPIREAT".to_vec(), key.to_vec(), at.to_string().into_bytes()];
        let del = || vec![b"DEL".to_vec(), key.to_vec()];

        let (reply, at, steps) = step(&[b"me", b"LEASE", b"100000"], "LOCK.ACQUIRE");
        let fence = token(&reply).to_string().into_bytes();
        assert!(at > unix_millis());
        assert_eq!(steps, [[set(&[b"me", b"1", b"#fence", &fence]), expire(at)]]);

        let (_, at, steps) = step(&[b"me", b"LEASE", b"200000"], "LOCK.ACQUIRE");
        assert_eq!(steps, [[set(&[b"me", b"2"]), expire(at)]]);
        let (_, _, steps) = step(&[b"me", b"LEASE", b"5"], "LOCK.ACQUIRE");
        assert_eq!(steps, [[set(&[b"me", b"3"])]]);
        let (_, _, steps) = step(&[b"me", b"LEASE", b"5", b"HOLDS", b"3"], "LOCK.ACQUIRE");
        assert!(steps.is_empty(), "what changes nothing is not logged: {steps:?}");
        let (_, _, steps) = step(&[b"you"], "LOCK.ACQUIRE");
        assert!(steps.is_empty(), "{steps:?}");
        let (_, at, steps) = step(&[b"me", b"LEASE", b"50000"], "LOCK.RENEW");
        assert_eq!(steps, [[expire(at)]]);
        let (_, _, steps) = step(&[b"me"], "LOCK.RELEASE");
        assert_eq!(steps, [[set(&[b"me", b"2"])]]);
        let (_, at, steps) = step(&[b"me", b"LEASE", b"70000"], "LOCK.RELEASE");
        assert_eq!(steps, [[set(&[b"me", b"1"]), expire(at)]]);
        let (_, _, steps) = step(&[b"me"], "LOCK.RELEASE");
        assert_eq!(steps, [[del()]]);
        let (_, _, steps) = step(&[b"me"], "LOCK.RELEASE");
        assert!(steps.is_empty(), "{steps:?}");
        step(&[b"me"], "LOCK.ACQUIRE");
        let (_, _, steps) = step(&[], "LOCK.FORCE");
        assert_eq!(steps, [[del()]]);
    }
}

/// Each pair is logged as two commands outside a transaction, for all lengths in a dump. Dumps encode lengths differently from
/// some size on.
#[test]
fn acquire_and_release_are_logged_as_two_commands() {
    let server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let plain = Server::builder().without_module().start();
    let (mut raw, mut plain) = (server.raw(), plain.raw());
    for owner in [1, 62, 63, 64, 125, 126, 127, 128, 512].map(|len| vec![b'o'; len]) {
        for holds in [&b"1"[..], b"127", b"128", b"2147483647"] {
            let before = logged(&server).len();
            let fence = token(&raw.call(&[b"LOCK.ACQUIRE", b"k", &owner, b"HOLDS", holds])).to_string().into_bytes();
            let deadline = deadline(&mut raw, b"k").to_string().into_bytes();
            assert_eq!(raw.call(&[b"LOCK.RELEASE", b"k", &owner, b"ALL"]), Value::Int(1));
            let mut commands = logged(&server).split_off(before);
            commands.retain(|command| command[0] != b"SELECT");
            assert_eq!(commands.len(), 2, "{commands:?}");
            assert_eq!(commands[1], [b"DEL", &b"k"[..]]);
            let spelled_out = spelled_out(&mut plain, commands.remove(0));
            assert_eq!(spelled_out[0], [b"HSET", &b"k"[..], &owner, holds, b"#fence", &fence]);
            assert_eq!(spelled_out[1], [b"PEXPIREAT", &b"k"[..], &deadline]);
        }
    }
}

#[test]
fn each_command_is_logged_as_one_unit_for_every_limit() {
    const ALLOWED: [&[u8]; 4] = [b"HSET", b"HDEL", b"DEL", b"PEXPIREAT"];
    let server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let mut raw = server.raw();
    let mut log = Log::new(&server);
    for (line, steps_expected) in [
        ("LOCK.ACQUIRE k me SHARED LEASE 100000", 1),
        ("LOCK.ACQUIRE k you SHARED LEASE 200000", 1),
        ("LOCK.ACQUIRE k third LIMIT 3 LEASE 300000", 1),
        ("LOCK.ACQUIRE k fourth SHARED", 0),
        ("LOCK.ACQUIRE k third LIMIT 3 LEASE 400000", 1),
        ("LOCK.RENEW k third LEASE 250000", 1),
        ("LOCK.RELEASE k third", 1),
        ("LOCK.RELEASE k third", 1),
        ("LOCK.RELEASE k you", 1),
        ("LOCK.FORCE k", 1),
        ("LOCK.MACQUIRE 3 a b c me LEASE 100000", 1),
        ("LOCK.MACQUIRE 2 c d you", 0),
        ("LOCK.MRENEW 3 a b c me LEASE 200000", 1),
        ("LOCK.MRELEASE 3 a b c me", 1),
    ] {
        ask(&mut raw, line);
        let steps = log.steps();
        assert_eq!(steps.len(), steps_expected, "{line}: {steps:?}");
        for command in steps.iter().flatten() {
            assert!(ALLOWED.contains(&&command[0][..]), "{line}: {steps:?}");
        }
    }
}

#[test]
fn replayed_append_only_file_produces_same_locks() {
    let server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let mut raw = server.raw();
    for line in [
        "LOCK.ACQUIRE a me LEASE 1000000",
        "LOCK.ACQUIRE a me LEASE 2000000",
        "LOCK.ACQUIRE b me SHARED LEASE 1000000",
        "LOCK.ACQUIRE b you LIMIT 4 LEASE 2000000",
        "LOCK.ACQUIRE b third LIMIT 4 LEASE 3000000 HOLDS 5",
        "LOCK.RELEASE b third HOLDS 2",
        "LOCK.RELEASE b you",
        "LOCK.MACQUIRE 2 c d me LEASE 1000000",
        "LOCK.RELEASE d me",
    ] {
        assert!(!matches!(ask(&mut raw, line), Value::ServerError(_) | Value::Nil), "{line}");
    }
    let plain = Server::builder().without_module().start();
    let mut other = plain.raw();
    for command in logged(&server) {
        let reply = other.call(&command.iter().map(Vec::as_slice).collect::<Vec<_>>());
        assert!(!matches!(reply, Value::ServerError(_)), "{reply:?}");
    }
    assert_eq!(Contents::read(&mut other), Contents::read(&mut raw));
    assert_eq!(fields(&mut other, b"b").len(), 6);
}

#[test]
fn watch_sees_every_change_and_nothing_else() {
    let server = Server::start();
    let mut raw = server.raw();
    let mut watcher = server.raw();
    for (line, touched) in [
        ("LOCK.ACQUIRE k me LEASE 100000", true),
        ("LOCK.ACQUIRE k you", false),
        ("LOCK.ACQUIRE k me", true),
        ("LOCK.ACQUIRE k me HOLDS 2", false),
        ("LOCK.RENEW k me LEASE 50000", true),
        ("LOCK.RENEW k you", false),
        ("LOCK.RELEASE k you", false),
        ("LOCK.INFO k", false),
        ("LOCK.RELEASE k me", true),
        ("LOCK.RELEASE k me", true),
        ("LOCK.FORCE k", false),
        ("LOCK.ACQUIRE k me SHARED", true),
        ("LOCK.ACQUIRE k you SHARED", true),
        ("LOCK.RELEASE k you", true),
        ("LOCK.FORCE k", true),
    ] {
        ask_ok(&mut watcher, "WATCH k");
        ask(&mut raw, line);
        ask_ok(&mut watcher, "MULTI");
        assert_eq!(text(&watcher.call(&words("PING"))), "QUEUED");
        assert_eq!(ask(&mut watcher, "EXEC") == Value::Nil, touched, "{line}");
    }
}
