//! The context in which the server calls the module.

use super::calls;
use super::text::{AsText, Text};
pub use crate::node::{Place, Role};
use crate::node::{node, slot_of};
use std::ffi::CStr;
use std::marker::PhantomData;

/// What the server passes to each callback; valid only while the callback runs.
#[derive(Clone, Copy, Debug)]
pub struct Ctx<'a> {
    pub(crate) client: u64,
    pub(crate) db: i32,
    pub(crate) place: Place,
    pub(crate) lifetime: PhantomData<&'a ()>,
}

/// Properties of the context in which a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags {
    place: Place,
    role: Role,
    cluster: bool,
}

impl Flags {
    /// Whether the client may be blocked: not in `MULTI`, in a script, or where it asked not to be.
    pub fn may_block(self) -> bool {
        self.place == Place::Alone
    }

    /// Whether a script runs.
    pub fn in_script(self) -> bool {
        matches!(self.place, Place::Script(_))
    }

    /// Whether the append-only file is on.
    pub fn aof(self) -> bool {
        true
    }

    /// Whether the server is part of a cluster.
    pub fn cluster(self) -> bool {
        self.cluster
    }

    /// Whether the server is a primary or a replica.
    pub fn role(self) -> Role {
        self.role
    }

    /// Whether a data set is being loaded.
    pub fn loading(self) -> bool {
        false
    }
}

impl Ctx<'_> {
    /// The properties of this context.
    pub fn flags(self) -> Flags {
        node(|node| Flags { place: self.place, role: node.role, cluster: node.slots.is_some() })
    }

    /// The selected database.
    pub fn db(self) -> i32 {
        self.db
    }

    /// Runs `work` with another database selected.
    pub fn in_db<R>(self, db: i32, work: impl FnOnce(Self) -> R) -> R {
        work(Self { db, ..self })
    }

    /// The id of the calling connection.
    pub fn client_id(self) -> u64 {
        self.client
    }

    /// The connection whose user runs this: in a script, the one that called it.
    pub(super) fn caller(self) -> u64 {
        match self.place {
            Place::Script(caller) => caller,
            _ => self.client,
        }
    }

    /// Replicates and logs a command, in one unit with everything else that this callback replicates.
    pub fn replicate(self, command: &CStr, args: &[&dyn AsText]) {
        let mut words = vec![command.to_bytes().to_vec()];
        words.extend(args.iter().map(|arg| arg.as_text().bytes().to_vec()));
        node(|node| {
            node.work(1);
            node.stream.note(self.db, words);
        });
    }

    /// Replicates a command, but keeps it out of the append-only file because it says nothing about the data.
    pub fn replicate_only(self, command: &CStr, args: &[&dyn AsText; 2]) {
        self.replicate(command, args);
    }

    /// Counts a change for the snapshot rules.
    pub fn count_change(self) {}

    /// Sends a keyspace notification.
    pub fn notify(self, class: Class, event: &CStr, key: &dyn AsText) {
        if class == Class::Module {
            let channel = format!("__keyevent@{}__:{}", self.db, event.to_string_lossy());
            node(|node| node.publish(channel.as_bytes(), key.as_text().bytes()));
        } else {
            calls::notify(self.db, key.as_text().bytes(), super::callbacks::Touch::Changed);
        }
    }

    /// Writes a line to the server's log, which does not exist here.
    pub fn warn(self, _: &str) {}

    /// Informs clients that watch or cache a key that it has changed.
    pub fn signal_modified(self, _: &dyn AsText) {}

    /// Publishes on a channel of this server.
    pub fn publish(self, channel: &Text, message: &Text, _: bool) {
        node(|node| node.publish(channel.bytes(), message.bytes()));
    }

    /// Whether this node of a cluster serves a key: not if another node has its slot, nor if the key does not exist
    /// while its slot migrates.
    pub fn serves(self, key: &Text) -> bool {
        super::open_keys::check_none_open();
        let exists = calls::exists(self.db, key.bytes());
        node(|node| node.slots.as_ref().is_none_or(|slots| slots.refusal(slot_of(key.bytes()), exists).is_none()))
    }

    /// How many modules other than this one are loaded.
    pub fn other_modules(self, _: &[u8]) -> usize {
        0
    }

    /// Fields of a section of `INFO`, as text; empty where a field is missing.
    pub fn server_info<const N: usize>(self, _: &CStr, fields: [&CStr; N]) -> [String; N] {
        fields.map(|field| match field.to_bytes() {
            b"connected_slaves" => node(|node| node.replicas.len().to_string()),
            b"repl_backlog_active" => "1".into(),
            _ => String::new(),
        })
    }
}

/// The classes of keyspace notifications that the module sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// `g`: `del`, `expire`.
    Generic,
    /// `h`: `hset`, `hdel`.
    Hash,
    /// `d`: the module's own.
    Module,
}

impl Class {
    /// Whether the server currently passes this class on to clients.
    pub fn is_enabled(self) -> bool {
        let letter = match self {
            Self::Generic => 'g',
            Self::Hash => 'h',
            Self::Module => 'd',
        };
        node(|node| node.notifies.contains(['K', 'E']) && node.notifies.contains(['A', letter]))
    }
}

/// The id of this server process: 40 hexadecimal digits.
pub fn run_id() -> String {
    "5eed".repeat(10)
}

/// Whether the data set must not change: clients are paused, or a failover is in progress.
pub fn is_paused() -> bool {
    node(|node| node.is_paused())
}

/// Whether `id` is an open connection: clients of scripts are not.
pub fn is_connected(id: u64) -> bool {
    node(|node| node.clients.contains_key(&id))
}
