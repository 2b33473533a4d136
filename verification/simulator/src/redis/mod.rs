//! A small Redis: what a server does that the module can see. How it calls the module stands in [`turn`].
//!
//! One server lives in a thread at a time; [`start`] begins another run.

pub mod client;
pub mod commands;
pub mod keyspace;
pub mod stream;
pub mod timers;
pub mod turn;

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

/// Which servers it behaves like.
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

/// How many databases there are.
pub const DATABASES: usize = 4;

/// The other node of the cluster, if this is one.
pub const OTHER: &str = "127.0.0.1:7001";

/// What the server itself says where it takes no writes.
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
    /// Whether the server refuses it where nothing may be written.
    pub writes: bool,
    /// Where its keys are.
    pub keys: Keys,
    /// How many arguments it takes, the name included; negative: at least so many.
    pub arity: i32,
}

/// Where the slots of a cluster are, as this node knows it.
#[derive(Clone, Debug, Default)]
pub struct Slots {
    /// Those that the other node serves.
    pub elsewhere: BTreeSet<u16>,
    /// Those that are being moved there, key by key.
    pub migrating: BTreeSet<u16>,
    /// Those that the other node serves, and that are being moved here, key by key.
    pub importing: BTreeSet<u16>,
    /// Those that no node owns.
    pub unowned: BTreeSet<u16>,
    /// The cluster is down: this node sees too few others.
    pub is_down: bool,
}

impl Slots {
    /// The error with which a request for a key is refused, which `exists` here; `None` if this node serves it.
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
    /// It was a replica once: what it sends is only the rest of another server's stream.
    pub was_replica: bool,
    pub stream: Stream,
    pub replicas: Vec<Replica>,
    pub min_replicas: usize,
    /// A setting has changed since this was last taken.
    pub reconfigured: bool,
    /// A save has failed: writes are refused with `-MISCONF`.
    pub misconf: bool,
    /// Until when (monotonic, µs) writes are paused.
    pub paused_until: u64,
    pub slots: Option<Slots>,
    /// Commands that `rename-command` has taken away, in lower case.
    pub renamed: BTreeSet<Bytes>,
    /// `notify-keyspace-events`.
    pub notifies: String,
    pub commands: BTreeMap<Bytes, Registered>,
    pub published: Vec<(Bytes, Bytes)>,
    pub info: BTreeMap<String, u64>,
    /// The module has asked to be told of touched keys and turns.
    pub is_watched: bool,
    pub turn_is_over: bool,
    pub goes_round_again: bool,
    /// Jobs that the module asked for inside a notification: to be done after the command.
    pub jobs: usize,
    /// The most that it asked for inside one step.
    pub most_jobs: usize,
    /// Blocks of memory that the module has not freed yet.
    pub handles: isize,
    /// Clients whose block the module has ended, and which the server has not dealt with yet.
    unblocked: VecDeque<(u64, Block)>,
    /// Clients that may go on with what they sent meanwhile.
    resumed: VecDeque<u64>,
    /// Ends of connections that arrived behind requests in the last poll.
    unseen_ends: Vec<u64>,
    next_client: u64,
    /// How many requests of each connection have begun.
    pub begun: BTreeMap<u64, usize>,
    /// How often the module has looked a key up and written one since the count was last taken.
    pub look_ups: usize,
    pub writes: usize,
    /// What connections were sent before the server closed them.
    pub farewells: BTreeMap<u64, Bytes>,
    /// Everything that the judges need to know, in order.
    pub log: Vec<Happening>,
    cron_due: u64,
}

/// Something that happened, for the judges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happening {
    /// The next request of a client began: what it runs, which is nothing if it is refused or put into a transaction.
    /// `at` is in Unix milliseconds, `steady` in those of the clock that does not step; whether the connection was a session
    /// by then.
    Begun { client: u64, db: i32, at: Millis, steady: Millis, is_session: bool, commands: Vec<Vec<Bytes>> },
    /// A key was touched by something other than the module.
    Touched { db: i32, key: Bytes, expired: bool },
    /// A key was given another expiry, or none, by something other than the module.
    Prolonged { db: i32, key: Bytes },
    /// All keys of a database, or of all databases, are gone.
    Flushed(Option<i32>),
    /// Two databases were swapped.
    Swapped(i32, i32),
    /// A connection ended, to which this was written and not handed to the network.
    Gone(u64, Bytes),
    /// The server became a master or a replica.
    RoleChanged,
    /// The server ended the block of a client.
    Unblocked(u64),
}

thread_local! {
    static NODE: RefCell<Node> = RefCell::new(Node::new(Generation::Redis70));
}

/// Lends the server. Whatever calls the module does so without holding on to it.
pub fn node<R>(work: impl FnOnce(&mut Node) -> R) -> R {
    NODE.with(|node| work(&mut node.borrow_mut()))
}

/// Begins the run of another server of this generation, with the module loaded; in a cluster if there are slots.
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
    Ctx { client, db, place: Place::Alone, lives: PhantomData }
}

/// Tells the module that something happened.
pub fn tell(event: Event) {
    if let Some(callbacks) = events::callbacks() {
        (callbacks.event)(context(0, 0), event);
    }
}

/// A keyspace notification, as far as it concerns the module.
pub fn notify(db: i32, key: &[u8], touch: Touch) {
    if node(|node| node.is_watched)
        && let Some(callbacks) = events::callbacks()
    {
        (callbacks.key_touched)(context(0, db), touch, key);
    }
}

/// What the server does after a command or a callback: the jobs that notifications asked for, then the stream.
pub fn end_of_step() {
    while node(|node| std::mem::take(&mut node.jobs)) > 0 {
        if let Some(callbacks) = events::callbacks() {
            (callbacks.after_touch)(context(0, 0));
        }
    }
    node(|node| node.stream.end_step());
}

/// Removes a key that has expired, if this server may: a replica and a paused master only stop showing it.
pub fn expire_if_needed(db: i32, key: &[u8]) {
    let removed = node(|node| {
        let expired = node.stored(db, key).is_some_and(|entry| entry.has_expired(node.clock.millis()));
        if !expired || node.role == Role::Replica || node.is_paused() {
            return false;
        }
        node.remove(db, key);
        node.log.push(Happening::Touched { db, key: key.to_vec(), expired: true });
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

/// The module ends the block of a client: one that is blocked on keys is answered at once.
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

/// Lets the module write the reply of a client that was blocked.
fn answer(client: u64, ticket: crate::server::callbacks::Ticket) {
    let db = node(|node| node.clients.get(&client).map_or(0, |client| client.db));
    if let Some(callbacks) = events::callbacks() {
        (callbacks.answer)(context(client, db), ticket);
    }
}

/// The block of a client has ended without the module.
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
            turn_is_over: false,
            goes_round_again: false,
            jobs: 0,
            most_jobs: 0,
            handles: 0,
            unblocked: VecDeque::new(),
            resumed: VecDeque::new(),
            unseen_ends: Vec::new(),
            next_client: 1,
            begun: BTreeMap::new(),
            look_ups: 0,
            writes: 0,
            farewells: BTreeMap::new(),
            log: Vec::new(),
            cron_due: 0,
        }
    }

    /// The server has worked for so many microseconds.
    pub fn work(&mut self, micros: u64) {
        self.clock.advance(micros);
    }

    /// Whether the data set must stand still.
    pub fn is_paused(&self) -> bool {
        self.clock.mono < self.paused_until
    }

    /// How many replicas are near enough for `min-replicas-to-write`.
    pub fn good_replicas(&self) -> usize {
        self.replicas.iter().filter(|replica| replica.is_good).count()
    }

    /// The error with which a command that writes would be refused now, a pause aside.
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
