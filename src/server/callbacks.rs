//! What the server's callbacks call in the module: set once, when the module is loaded.

use super::Ctx;
use std::sync::OnceLock;

/// The module's side of the server's callbacks.
#[derive(Debug)]
pub struct Callbacks {
    /// A blocked client is to be answered, in this context: its wait has ended, or `CLIENT UNBLOCK` ended it.
    pub answer: fn(Ctx, Ticket),
    /// A blocked client is gone: disconnected, unblocked with an error, redirected. Nothing may be written here.
    pub gone: fn(Ctx, Ticket),
    /// There is work whose time has come.
    pub tick: fn(Ctx),
    /// Replicas are to be asked to confirm: alone in this step.
    pub ask: fn(Ctx),
    /// Some command touched a key.
    pub key_touched: fn(Ctx, Touch, &[u8]),
    /// What was put off in `key_touched` may be written now.
    pub after_touch: fn(Ctx),
    /// Something happened to the server.
    pub event: fn(Ctx, Event),
}

/// Names a blocked client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// How a key was touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Its expiry removed it. Nothing may be done in the step of that.
    Expired,
    /// The expiry of fields of its own removed these, and the key with the last of them. Nor may it be in this step.
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
    /// Two databases changed places.
    Swapped(i32, i32),
    /// The server became a master or a replica.
    RoleChanged,
    /// The server's data were replaced, or are about to be.
    DataReplaced,
    /// Slots of a cluster came or went with all that lies in them, or an import was given up and what had come of it is
    /// dropped. Nothing may be written here.
    SlotsMoved,
    /// Somebody may have begun to listen to what is written: a fork for a snapshot, a changed setting.
    ListenersMayHaveChanged,
    /// Another module came.
    ModuleLoaded,
    /// Another module went.
    ModuleUnloaded,
    /// The event loop is about to hand what was replied to the network, and then to sleep.
    TurnEnds,
    /// What was replied in the turn of the event loop before has been handed to the network.
    RepliesSent,
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
