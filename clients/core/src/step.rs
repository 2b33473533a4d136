//! Inputs from the I/O driver to the core, and outputs of the core.
#![allow(missing_docs, reason = "the fields of steps say by their names what they are")]

use crate::claim::Moved;
use crate::{Bytes, Id, Limit, Millis, Reply, Terms, Wait};
use std::fmt;

/// Settings of a core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How long the server may be silent while a reply is pending, before the core ends the session. After the first
    /// heartbeat, it is an eighth of the shortest lease, at most a second. An acquisition without a wait ends after
    /// this time, too.
    pub limit: Millis,
    /// How much later than its deadline a wait ends here, since the server's reply takes a round trip.
    pub grace: Millis,
    /// How many requests may be pending at once.
    pub unanswered: usize,
    /// Makes the pauses random.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { limit: 10_000, grace: 100, unanswered: 256, seed: 1 }
    }
}

/// An input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// The program requests a lock, or several at once. The owner is `by` and the number of the call.
    Acquire { call: Id, by: Bytes, keys: Vec<Bytes>, terms: Terms, wait: Wait },
    /// The program releases a hold, and asks whether the hold still existed.
    Release { call: Id, hold: Id, within: Millis },
    /// The program renews a hold: with this lease, or the current one; with a token that is at least `fence`.
    Renew { call: Id, hold: Id, lease: Option<Millis>, fence: Option<u64>, within: Millis },
    /// The program asks whether a hold is certain.
    Check { call: Id, hold: Id, within: Millis },
    /// The use of a hold ends, and no local task is next: the hold stays cached for this long, unless another client
    /// waits for it.
    Keep { hold: Id, idle: Millis },
    /// A local task uses a cached hold, or one whose use has just ended: at most `most` times in a row once another
    /// client waits for it. The core answers in this step: [`Outcome::Held`], or [`Outcome::NotHeld`], and then it
    /// releases the hold.
    Use { call: Id, hold: Id, most: u32 },
    /// Any other request. After a redirection its first word is `ASKING`, which the core sends as a request of its own.
    /// `LOCK.INFO` only reads, so it is sent once more if its session ends before the reply.
    Request { call: Id, words: Vec<Bytes>, within: Millis },
    /// The caller of this call, or the user of this hold, is gone.
    Drop { call: Id },
    /// The program closes the client: the core releases everything, and ends the session.
    Close { call: Id, within: Millis },
    /// Both connections of a pair are open, with user and database set.
    Opened { pair: u64 },
    /// A reply has arrived. Before `Opened`: the error of the login.
    Replied { pair: u64, channel: Channel, reply: Reply },
    /// One connection of a pair has ended, or could not be opened.
    Ended { pair: u64 },
    /// In a cluster: another server serves the key of this acquisition or hold.
    Leave { id: Id },
    /// A claim from another core continues here.
    Take { moved: Box<Moved> },
    /// The time of [`Output::Wake`] has come; *all that can be read has been read and given to the core*.
    Wake,
}

/// One of the two connections of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Channel {
    /// Reads the events; it is the session.
    Session,
    /// Carries the requests.
    Requests,
}

/// An output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Open both connections of a new pair.
    Open { pair: u64 },
    /// Close both; give the core nothing more of them.
    End { pair: u64 },
    /// Send one request: these words, as an array of bulk strings.
    Send { pair: u64, channel: Channel, words: Vec<Bytes> },
    /// A call has ended.
    Ended { call: Id, outcome: Outcome },
    /// A hold is lost.
    Lost { hold: Id, why: LossReason },
    /// Another server serves this claim: the one that the error names, or else the one in the slot map. The driver
    /// gives it to that server's core, as [`Input::Take`].
    Moved { moved: Box<Moved>, error: String },
    /// Give [`Input::Wake`] at this time, which replaces the previous one.
    Wake { at: Millis },
}

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Granted, with this token.
    Granted(u64),
    /// Not granted in time.
    NotGranted,
    /// The server's error.
    Refused(String),
    /// The server was unreachable, or did not reply, in time.
    Unanswered,
    /// The client is closed.
    Closed,
    /// The hold existed, and is released.
    Released,
    /// The hold did not exist any more.
    NotHeld,
    /// The hold was lost before the call ended.
    Lost(LossReason),
    /// Renewed, with this token.
    Renewed(u64),
    /// The hold is certain.
    Held,
    /// The reply of a plain request.
    Answer(Reply),
}

/// What ended a hold before it was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossReason {
    /// Its lease expired.
    Expired,
    /// Another client forced the lock free (`LOCK.FORCE`).
    Forced,
    /// Another command deleted or overwrote the key.
    Changed,
    /// The connection that it was bound to ended, and the hold with it; or no server confirmed in time that it still exists.
    Disconnected,
}

impl fmt::Display for LossReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Expired => "expired",
            Self::Forced => "forced",
            Self::Changed => "changed",
            Self::Disconnected => "disconnected",
        })
    }
}

impl Limit {
    /// As a number: 0 for readers.
    pub fn number(self) -> u32 {
        match self {
            Self::One => 1,
            Self::Of(limit) => limit,
            Self::Shared => 0,
        }
    }
}
