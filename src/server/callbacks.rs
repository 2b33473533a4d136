//! The module's functions that the server's callbacks call. They are set once, when the module is loaded.

use super::Ctx;
use super::info::Section;
use std::sync::OnceLock;

/// The module's side of the server's callbacks.
#[derive(Debug)]
pub struct Callbacks {
    /// Answers a blocked client in this context: the module or `CLIENT UNBLOCK` ended its wait.
    pub answer: fn(Ctx, Ticket),
    /// Handles the end of a wait without a reply: the client was disconnected, unblocked with an error, or redirected.
    /// May not write.
    pub gone: fn(Ctx, Ticket),
    /// Does the work that is due.
    pub tick: fn(Ctx),
    /// Asks the replicas for confirmation. Must replicate nothing else: replicas do not answer inside `MULTI`.
    pub ask_replicas: fn(Ctx),
    /// Notes that another command touched a key, or that it expired.
    pub key_touched: fn(Ctx, Touch, &[u8]),
    /// Writes what `key_touched` had to postpone.
    pub after_touch: fn(Ctx),
    /// Handles an event of the server.
    pub event: fn(Ctx, Event),
    /// Fills the module's section of `INFO`.
    pub info: fn(Section),
}

/// Identifies a request whose reply is pending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

impl Ticket {
    /// The ticket that follows this one.
    pub fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// How a key was touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// The key expired. The module may not write in the same command execution.
    Expired,
    /// Fields with an expiry of their own expired, and with the last of them the key. The module may not write then,
    /// either.
    FieldsExpired,
    /// The key was changed in any other way.
    Changed,
}

/// An event of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The connection with this id was closed. The module may not write here.
    ClientGone(u64),
    /// One database was flushed, or all of them (`None`).
    Flushed(Option<i32>),
    /// Two databases were swapped.
    Swapped(i32, i32),
    /// The server became a primary or a replica.
    RoleChanged,
    /// The server's data set was replaced, or is about to be.
    DataReplaced,
    /// An atomic slot migration has moved slots to or from this node. Or the server drops the keys that an aborted
    /// import or a completed migration left here. The module may not write here.
    SlotsMoved,
    /// A replica or an append-only file may have been added: the server has forked for a snapshot, or a setting
    /// changed.
    ListenersMayHaveChanged,
    /// Another module was loaded.
    ModuleLoaded,
    /// Another module was unloaded.
    ModuleUnloaded,
    /// The event loop is about to write the replies to the sockets, and then to sleep.
    IterationEnds,
    /// The event loop has slept, and begins another iteration.
    IterationBegins,
    /// The server's own cron ran (by default ten times a second).
    Cron,
}

static CALLBACKS: OnceLock<Callbacks> = OnceLock::new();

/// Sets the module's callbacks. Only the first call has an effect.
pub fn set(callbacks: Callbacks) {
    let _ = CALLBACKS.set(callbacks);
}

/// The module's callbacks, once they are set.
pub(super) fn get() -> Option<&'static Callbacks> {
    CALLBACKS.get()
}
