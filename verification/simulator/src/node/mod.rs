//! What a server has in memory: the keyspace, connections, users, clocks and timers, the replication stream. Nothing here calls the
//! module.
//!
//! A thread has one server at a time.

pub mod client;
pub mod keyspace;
pub mod stream;
pub mod timers;

pub use client::{Block, Client, User};
pub use keyspace::{Entry, Hash, Value};
pub use stream::{Replica, Stream};
pub use timers::{Clock, TimerId, Timers};

use crate::lock::Millis;
use crc::{CRC_16_XMODEM, Crc};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Any bytes: keys, arguments, replies.
pub type Bytes = Vec<u8>;

/// The servers whose behaviour it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// Redis 7.0 (and 6.2).
    Redis70,
    /// Redis 7.2 to 8.6, Valkey 8.
    Redis72,
    /// Valkey 9.
    Valkey9,
}

impl Generation {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Redis70, Self::Redis72, Self::Valkey9];
}

/// The number of databases.
pub const DATABASES: usize = 4;

/// The other node of the cluster, if this is one.
pub const OTHER: &str = "127.0.0.1:7001";

/// The server's own errors when it takes no writes.
pub const REFUSALS: [&str; 3] = [
    "READONLY You can't write against a read only replica.",
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "NOREPLICAS Not enough good replicas to write.",
];

/// How a command was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// By itself.
    Alone,
    /// In a transaction.
    Transaction,
    /// In a script of this client.
    Script(u64),
}

/// This server's role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Primary.
    Primary,
    /// Replica.
    Replica,
}

/// A command of the module.
#[derive(Clone, Copy)]
pub struct Registered {
    /// Runs it for this client, in this database, and replies.
    pub run: fn(u64, i32, Place, &[Bytes]),
    /// Whether the server refuses it when writes are refused.
    pub writes: bool,
    /// The positions of its keys.
    pub keys: Positions,
    /// The number of arguments, the name included; negative: at least this many.
    pub arity: i32,
}

/// Where a command names keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// Nowhere.
    None,
    /// Its first argument is one.
    First,
    /// Its first argument says how many follow.
    Counted,
}

/// The slots of a cluster, as this node knows them.
#[derive(Clone, Debug, Default)]
pub struct Slots {
    /// Slots that the other node serves.
    pub elsewhere: BTreeSet<u16>,
    /// Slots that are migrating there, key by key.
    pub migrating: BTreeSet<u16>,
    /// Slots that the other node serves, and that this node is importing, key by key.
    pub importing: BTreeSet<u16>,
    /// Slots that no node owns.
    pub unowned: BTreeSet<u16>,
    /// The cluster is down: this node sees too few others.
    pub is_down: bool,
}

impl Slots {
    /// The error for a request for a key that `exists` here or not; `None` if this node serves it.
    pub fn refusal(&self, slot: u16, exists: bool) -> Option<String> {
        if self.unowned.contains(&slot) {
            return Some("-CLUSTERDOWN Hash slot not served\r\n".into());
        }
        if self.is_down {
            return Some("-CLUSTERDOWN The cluster is down\r\n".into());
        }
        if self.elsewhere.contains(&slot) || self.importing.contains(&slot) {
            return Some(format!("-MOVED {slot} {OTHER}\r\n"));
        }
        (self.migrating.contains(&slot) && !exists).then(|| format!("-ASK {slot} {OTHER}\r\n"))
    }
}

/// The server.
pub struct Node {
    pub generation: Generation,
    pub clock: Clock,
    pub timers: Timers,
    pub dbs: Vec<BTreeMap<Bytes, Entry>>,
    pub clients: BTreeMap<u64, Client>,
    pub users: BTreeMap<String, User>,
    pub role: Role,
    /// It was a replica before: what it sends is only the rest of another server's stream.
    pub was_replica: bool,
    pub stream: Stream,
    pub replicas: Vec<Replica>,
    pub min_replicas: usize,
    /// A setting has changed since this flag was last reset.
    pub reconfigured: bool,
    /// A snapshot has failed: writes are refused with `-MISCONF`.
    pub misconf: bool,
    /// Until when (monotonic, µs) writes are paused.
    pub paused_until: u64,
    pub slots: Option<Slots>,
    /// Commands that `rename-command` has removed, in lower case.
    pub renamed: BTreeSet<Bytes>,
    /// `notify-keyspace-events`.
    pub notifies: String,
    pub commands: BTreeMap<Bytes, Registered>,
    pub published: Vec<(Bytes, Bytes)>,
    pub info: BTreeMap<String, u64>,
    /// The module asked for notifications of written keys and iterations.
    pub is_watched: bool,
    pub iteration_is_over: bool,
    pub runs_again: bool,
    /// Jobs that the module requested inside a notification; they run after the command.
    pub jobs: usize,
    /// The most jobs that it requested during one command.
    pub most_jobs: usize,
    /// Blocked-client handles that the module has not freed yet.
    pub handles: isize,
    /// Clients that the module has unblocked, and that the server has not processed yet.
    pub(crate) unblocked: VecDeque<(u64, Block)>,
    /// Clients that may continue with their pending requests.
    pub(crate) resumed: VecDeque<u64>,
    /// Closed connections that were noticed behind requests in the last poll.
    pub(crate) unseen_ends: Vec<u64>,
    pub(crate) next_client: u64,
    /// How many requests of each connection have begun.
    pub started_requests: BTreeMap<u64, usize>,
    /// How often the module has looked up a key and written one since the last reset.
    pub look_ups: usize,
    pub writes: usize,
    /// The last bytes to connections that the server has closed.
    pub final_output: BTreeMap<u64, Bytes>,
    /// Everything that the checkers need to know, in order.
    pub log: Vec<LogEntry>,
    pub(crate) cron_due: u64,
}

/// An entry of the log for the checkers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogEntry {
    /// The next request of a client began. `commands` is what it runs: empty if it is refused or queued in a
    /// transaction. `at` is in Unix milliseconds, `steady` in milliseconds of the monotonic clock. `is_session`: the
    /// connection was a session by then.
    Started { client: u64, db: i32, at: Millis, steady: Millis, is_session: bool, commands: Vec<Vec<Bytes>> },
    /// A key was written by something other than the module.
    Written { db: i32, key: Bytes, expired: bool },
    /// A key got another expiry, or none, by something other than the module: `at` is in Unix milliseconds.
    ExpiryChanged { db: i32, key: Bytes, at: Option<Millis> },
    /// A database, or every database, was flushed.
    Flushed(Option<i32>),
    /// Two databases were swapped.
    Swapped(i32, i32),
    /// A connection closed. These bytes had been written to it, but not sent.
    Disconnected(u64, Bytes),
    /// The server's role changed.
    RoleChanged,
    /// The server unblocked a client.
    Unblocked(u64),
}

thread_local! {
    static NODE: RefCell<Node> = RefCell::new(Node::new(Generation::Redis70));
}

/// Lends the server. Code that calls the module must not hold it.
pub fn node<R>(work: impl FnOnce(&mut Node) -> R) -> R {
    NODE.with(|node| work(&mut node.borrow_mut()))
}

/// The slot of a key.
pub fn slot_of(key: &[u8]) -> u16 {
    const CRC: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        let close = rest.iter().position(|byte| *byte == b'}').filter(|close| *close > 0)?;
        Some(&rest[..close])
    });
    CRC.checksum(tag.unwrap_or(key)) % 16384
}

impl Node {
    pub(crate) fn new(generation: Generation) -> Self {
        Self {
            generation,
            clock: Clock::default(),
            timers: Timers::default(),
            dbs: vec![BTreeMap::new(); DATABASES],
            clients: BTreeMap::new(),
            users: BTreeMap::from([("default".into(), User::default())]),
            role: Role::Primary,
            was_replica: false,
            stream: Stream::default(),
            replicas: Vec::new(),
            min_replicas: 0,
            reconfigured: false,
            misconf: false,
            paused_until: 0,
            slots: None,
            renamed: BTreeSet::new(),
            notifies: "KEA".into(),
            commands: BTreeMap::new(),
            published: Vec::new(),
            info: BTreeMap::new(),
            is_watched: false,
            iteration_is_over: false,
            runs_again: false,
            jobs: 0,
            most_jobs: 0,
            handles: 0,
            unblocked: VecDeque::new(),
            resumed: VecDeque::new(),
            unseen_ends: Vec::new(),
            next_client: 1,
            started_requests: BTreeMap::new(),
            look_ups: 0,
            writes: 0,
            final_output: BTreeMap::new(),
            log: Vec::new(),
            cron_due: 0,
        }
    }

    /// The server has worked for this many microseconds.
    pub fn work(&mut self, micros: u64) {
        self.clock.advance(micros);
    }

    /// Whether the data set must not change.
    pub fn is_paused(&self) -> bool {
        self.clock.mono < self.paused_until
    }

    /// How many replicas count for `min-replicas-to-write`.
    pub fn good_replicas(&self) -> usize {
        self.replicas.iter().filter(|replica| replica.is_good).count()
    }

    /// The error with which a write command would be refused now, apart from a pause.
    pub fn refuses_writes(&self) -> Option<&'static str> {
        if self.role == Role::Replica {
            return Some(REFUSALS[0]);
        }
        if self.misconf {
            return Some(REFUSALS[1]);
        }
        (self.good_replicas() < self.min_replicas).then_some(REFUSALS[2])
    }

    /// The time in Unix milliseconds.
    pub fn millis(&self) -> Millis {
        self.clock.millis()
    }

    /// The keys that a request names.
    pub fn keys_of(&self, argv: &[Bytes]) -> Vec<Bytes> {
        let name = String::from_utf8_lossy(&argv[0]).to_lowercase();
        let first = |count: usize| argv.get(1..=count).map(<[Bytes]>::to_vec).unwrap_or_default();
        let counted = || {
            let count = argv.get(1).and_then(|text| String::from_utf8_lossy(text).parse().ok()).unwrap_or(0_usize);
            argv.get(2..count.saturating_add(2)).map(<[Bytes]>::to_vec).unwrap_or_default()
        };
        match (self.commands.get(name.as_bytes()).map(|it| it.keys), name.as_str()) {
            (Some(Positions::First), _) => first(1),
            (Some(Positions::Counted), _) => counted(),
            (Some(Positions::None), _) => Vec::new(),
            (None, "del" | "exists") => argv.get(1..).map(<[Bytes]>::to_vec).unwrap_or_default(),
            (None, "rename") => first(2),
            (
                None,
                "set" | "get" | "hset" | "hdel" | "hget" | "hgetall" | "pexpire" | "pexpireat" | "persist" | "pttl"
                | "move" | "restore" | "rpush" | "type",
            ) => first(1),
            _ => Vec::new(),
        }
    }
}
