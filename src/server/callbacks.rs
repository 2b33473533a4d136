//! What the server's callbacks call in the module. Set once, when the module is loaded.

use super::Ctx;
use super::info::Section;
use std::sync::OnceLock;

/// The module's side of the server's callbacks.
#[derive(Debug)]
pub struct Callbacks {
    /// A blocked client is to be answered, in this context: its wait has ended, or `CLIENT UNBLOCK` ended it.
    pub answer: fn(Ctx, Ticket),
    /// A blocked client is gone: disconnected, unblocked with an error, redirected. Nothing may be written here.
    pub gone: fn(Ctx, Ticket),
    /// The time has come for some of the work.
    pub tick: fn(Ctx),
    /// The replicas are to be asked for confirmation, in a step of its own.
    pub ask_replicas: fn(Ctx),
    /// Another command touched a key.
    pub key_touched: fn(Ctx, Touch, &[u8]),
    /// Whatever `key_touched` postponed may be written now.
    pub after_touch: fn(Ctx),
    /// Something happened to the server.
    pub event: fn(Ctx, Event),
    /// The module's section of `INFO` is to be filled.
    pub info: fn(Section),
}

/// The name of a blocked client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

impl Ticket {
    /// The one that is given after this one.
    pub fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// How a key was touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Its expiry removed it. Nothing may be written in the same step.
    Expired,
    /// Fields of it had an expiry of their own, which removed them, and the key with the last of them. Nothing may be
    /// written in this step either.
    FieldsExpired,
    /// It was changed in any other way.
    Changed,
}

/// What happened to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A connection ended; its id. Nothing may be written here.
    ClientGone(u64),
    /// One database was emptied, or all of them.
    Flushed(Option<i32>),
    /// Two databases were swapped.
    Swapped(i32, i32),
    /// The server became a master or a replica.
    RoleChanged,
    /// The server's data set was replaced, or is about to be.
    DataReplaced,
    /// Slots of a cluster arrived or left with everything in them, or an import was abandoned and what had arrived is
    /// dropped. Nothing may be written here.
    SlotsMoved,
    /// A replica or file may have begun to follow the data: a fork for a snapshot, a changed setting.
    ListenersMayHaveChanged,
    /// Another module was loaded.
    ModuleLoaded,
    /// Another module was unloaded.
    ModuleUnloaded,
    /// The event loop is about to hand the replies to the network, and then to sleep.
    TurnEnds,
    /// The event loop has slept, and begins another turn.
    TurnBegins,
    /// The server's own cron ran (by default ten times a second).
    Cron,
}

static CALLBACKS: OnceLock<Callbacks> = OnceLock::new();

/// Sets the module's side; the first call counts.
pub fn set(callbacks: Callbacks) {
    let _ = CALLBACKS.set(callbacks);
}

/// The module's side, once it is set.
pub(super) fn get() -> Option<&'static Callbacks> {
    CALLBACKS.get()
}
