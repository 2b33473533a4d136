//! A small Redis: the behaviour of a server that the module can see. [`event_loop`] says in which order it calls the
//! module.
//!
//! A thread has one server at a time; [`start`] begins another run.

pub mod client;
pub mod commands;
pub mod event_loop;
pub mod keyspace;
pub mod stream;
pub mod timers;

pub use client::{Block, Client, User};
pub use keyspace::{Entry, Hash, Value};
pub use stream::{Replica, Stream};
pub use timers::{Clock, TimerId, Timers};

use crate::lock::Millis;
use crate::server::callbacks::{Callbacks, Event, Touch};
use crate::server::commands::{Call, Keys};
use crate::server::ctx::Place;
use crate::server::{Ctx, Role, TextRef, events, main_thread};
use crc::{CRC_16_XMODEM, Crc};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::marker::PhantomData;

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

/// A command of the module.
#[derive(Clone, Copy)]
pub struct Registered {
    /// Runs it, and replies.
    pub run: fn(Call),
    /// Whether the server refuses it when writes are refused.
    pub writes: bool,
    /// The positions of its keys.
    pub keys: Keys,
    /// The number of arguments, the name included; negative: at least this many.
    pub arity: i32,
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
    unblocked: VecDeque<(u64, Block)>,
    /// Clients that may continue with their pending requests.
    resumed: VecDeque<u64>,
    /// Closed connections that were noticed behind requests in the last poll.
    unseen_ends: Vec<u64>,
    next_client: u64,
    /// How many requests of each connection have begun.
    pub started_requests: BTreeMap<u64, usize>,
    /// How often the module has looked up a key and written one since the last reset.
    pub look_ups: usize,
    pub writes: usize,
    /// The last bytes to connections that the server has closed.
    pub final_output: BTreeMap<u64, Bytes>,
    /// Everything that the checkers need to know, in order.
    pub log: Vec<LogEntry>,
    cron_due: u64,
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
    /// A key got another expiry, or none, by something other than the module.
    ExpiryChanged { db: i32, key: Bytes },
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

/// Starts another server of this generation with the module loaded; in a cluster if there are slots.
pub fn start(generation: Generation, slots: Option<Slots>) {
    main_thread::forget_all();
    crate::lock::internal_errors::forget();
    node(|node| {
        *node = Node::new(generation);
        node.slots = slots;
    });
    crate::server::callbacks::set(Callbacks {
        answer: crate::event_loop::answer,
        gone: crate::event_loop::gone,
        tick: crate::event_loop::tick,
        ask_replicas: crate::event_loop::ask_replicas,
        key_touched: crate::event_loop::key_touched,
        after_touch: crate::event_loop::after_touch,
        event: crate::event_loop::event,
        info: crate::info::fill,
    });
    let ctx = context(0, 0);
    let registered = crate::commands::ALL.iter().all(|command| (command.register)(ctx, "lock"));
    assert!(registered && crate::config::start(ctx, &[] as &[TextRef]).is_ok());
    crate::keyspace::listeners::start(ctx, b"holdfast");
}

/// The context of a callback.
pub fn context<'a>(client: u64, db: i32) -> Ctx<'a> {
    Ctx { client, db, place: Place::Alone, lifetime: PhantomData }
}

/// Reports an event to the module.
pub fn report(event: Event) {
    if let Some(callbacks) = events::callbacks() {
        (callbacks.event)(context(0, 0), event);
    }
}

/// Reports a keyspace notification to the module.
pub fn notify(db: i32, key: &[u8], touch: Touch) {
    if node(|node| node.is_watched)
        && let Some(callbacks) = events::callbacks()
    {
        (callbacks.key_touched)(context(0, db), touch, key);
    }
}

/// What the server does after a command or a callback: it runs the jobs that notifications requested, then propagates
/// the writes.
pub fn end_of_step() {
    while node(|node| std::mem::take(&mut node.jobs)) > 0 {
        if let Some(callbacks) = events::callbacks() {
            (callbacks.after_touch)(context(0, 0));
        }
    }
    node(|node| node.stream.end_step());
}

/// Removes an expired key if this server may: a replica and a paused primary only hide it.
pub fn expire_if_needed(db: i32, key: &[u8]) {
    let removed = node(|node| {
        let expired = node.stored(db, key).is_some_and(|entry| entry.has_expired(node.clock.millis()));
        if !expired || node.role == Role::Replica || node.is_paused() {
            return false;
        }
        node.remove(db, key);
        node.log.push(LogEntry::Written { db, key: key.to_vec(), expired: true });
        true
    });
    if removed {
        notify(db, key, Touch::Expired);
        node(|node| node.stream.note(db, vec![b"DEL".to_vec(), key.to_vec()]));
    }
}

/// Whether a key exists.
pub fn exists(db: i32, key: &[u8]) -> bool {
    expire_if_needed(db, key);
    node(|node| node.get(db, key).is_some())
}

/// The module unblocks a client. One that is blocked on keys gets its reply immediately.
pub fn unblock(client: u64, ticket: crate::server::callbacks::Ticket) {
    let at_once = node(|node| {
        let block = node.clients.get_mut(&client).and_then(Client::blocked).filter(|block| block.ticket == ticket);
        let Some(block) = block else { return false };
        block.is_answered = true;
        let block = block.clone();
        let at_once = block.keys.is_some();
        node.unblocked.push_back((client, block));
        at_once
    });
    if at_once {
        answer(client, ticket);
    }
}

/// Lets the module write the reply of a blocked client.
fn answer(client: u64, ticket: crate::server::callbacks::Ticket) {
    let db = node(|node| node.clients.get(&client).map_or(0, |client| client.db));
    if let Some(callbacks) = events::callbacks() {
        (callbacks.answer)(context(client, db), ticket);
    }
}

/// A client was unblocked without the module.
fn notify_end(client: u64, ticket: crate::server::callbacks::Ticket) {
    if let Some(callbacks) = events::callbacks() {
        (callbacks.gone)(context(client, 0), ticket);
    }
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
    fn new(generation: Generation) -> Self {
        Self {
            generation,
            clock: Clock::default(),
            timers: Timers::default(),
            dbs: vec![BTreeMap::new(); DATABASES],
            clients: BTreeMap::new(),
            users: BTreeMap::from([("default".into(), User::default())]),
            role: Role::Master,
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
}
