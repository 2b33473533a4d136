//! What a shell tells the core, and what the core tells the shell.
#![allow(missing_docs, reason = "the fields of steps say by their names what they are")]

use crate::claim::Moved;
use crate::{Bytes, Id, Limit, Millis, Reply, Terms, Wait};

/// What a shell may set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Without a sign of the server for so long, while something is owed, the session ends.
    pub limit: Millis,
    /// How much longer than its time a wait is left to the server, whose answer comes a round trip later.
    pub grace: Millis,
    /// How many requests may be unanswered at once.
    pub unanswered: usize,
    /// Makes the pauses random.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { limit: 10_000, grace: 100, unanswered: 256, seed: 1 }
    }
}

/// Something that happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// The program wants a lock, or several at once. The owner is `by` and the number of the call behind it.
    Acquire { call: Id, by: Bytes, keys: Vec<Bytes>, terms: Terms, wait: Wait },
    /// It gives a hold back, and wants to know whether it still had it.
    Release { call: Id, hold: Id, within: Millis },
    /// It renews a hold: for this lease, or as before; with a token that is at least `fence`.
    Renew { call: Id, hold: Id, lease: Option<Millis>, fence: Option<u64>, within: Millis },
    /// It asks whether a hold is certain.
    Check { call: Id, hold: Id, within: Millis },
    /// Whoever used a hold is done, and nobody here is next: it is kept at hand for so long, unless somebody else waits for it.
    Keep { hold: Id, idle: Millis },
    /// Somebody here takes a hold that is at hand, or that somebody else here has just given up: at most so many in a row once another
    /// process waits for it. Answered in this step: [`Outcome::Held`], or [`Outcome::NotHeld`], and what is left of it is given back.
    Use { call: Id, hold: Id, most: u32 },
    /// Any other request. `LOCK.INFO`, which only looks, is asked once more if its session ends before it is answered.
    Request { call: Id, words: Vec<Bytes>, within: Millis },
    /// Nobody wants this call's answer any more, or this hold.
    Drop { call: Id },
    /// All is given back, and the session ends.
    Close { call: Id, within: Millis },
    /// Both connections of a pair are there, with user and database.
    Opened { pair: u64 },
    /// Bytes have arrived.
    Received { pair: u64, channel: Channel, bytes: Bytes },
    /// A reply has arrived, where the shell's own library reads them.
    Replied { pair: u64, channel: Channel, reply: Reply },
    /// One connection of a pair has ended, or could not be opened.
    Ended { pair: u64 },
    /// A pair could not be opened, and what was not sent yet is not to wait until one can be.
    Unreachable { pair: u64 },
    /// In a cluster: another server has what this acquisition or hold is about.
    Leave { id: Id },
    /// What had to leave another core goes on here.
    Take { moved: Box<Moved> },
    /// It is as late as [`Output::Wake`] said; *all that can be read has been read and told*.
    Wake,
}

/// One of the two connections of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Channel {
    /// That which hears the events, and is the session.
    Session,
    /// That which carries the requests.
    Requests,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Open both connections of a new pair.
    Open { pair: u64 },
    /// End both; tell nothing more of them.
    End { pair: u64 },
    /// Send one request: these words, as [`encode`](crate::encode) writes them.
    Send { pair: u64, channel: Channel, words: Vec<Bytes> },
    /// A call has ended.
    Ended { call: Id, outcome: Outcome },
    /// A hold is lost.
    Lost { hold: Id, why: LossReason },
    /// Another server has it: that which the error names, if it does, and else whoever knows. Its core is to take it.
    Moved { moved: Box<Moved>, error: String },
    /// Tell [`Input::Wake`] then; it replaces the one before.
    Wake { at: Millis },
}

/// How a call has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Held, under this token.
    Granted(u64),
    /// Not in the time that it had.
    NotGranted,
    /// The server's error.
    Refused(String),
    /// The server could not be asked, or has not answered, in the time that there was.
    Unanswered,
    /// The client is closed.
    Closed,
    /// It was held, and is given back.
    Released,
    /// It was not held any more.
    NotHeld,
    /// It was lost meanwhile.
    Lost(LossReason),
    /// Renewed, under this token.
    Renewed(u64),
    /// It is held for certain.
    Held,
    /// The reply of a plain request.
    Answer(Reply),
}

/// What ended a hold before it was given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossReason {
    /// Its lease ran out.
    Expired,
    /// Somebody broke the lock (`LOCK.FORCE`).
    Forced,
    /// Another command deleted or overwrote the key.
    Changed,
    /// The connection that it was tied to ended, and the hold with it; or nobody could say in time that it lives on.
    Disconnected,
}

impl Limit {
    /// As a number: 0 for readers.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::One => 1,
            Self::Of(limit) => limit,
            Self::Shared => 0,
        }
    }
}
