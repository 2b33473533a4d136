//! The queue, and the desk beside it: who waits, whose reply is outstanding, what is to be looked at and when.

use super::LOOK_AGAIN;
use crate::confirming::ConfirmationId;
use crate::holding::Terms;
use crate::lock::serve::Change;
use crate::lock::{KeyMap, LockKey, Millis, Queue, Token, Waiter, WaiterId};
use crate::server::blocked::Blocked;
use crate::server::clock::Now;
use crate::server::reply::Replied;
use crate::server::upcalls::Ticket;
use crate::server::{Ctx, MainThread};
use crate::undo::Undo;
use std::collections::{BTreeMap, BTreeSet};

/// A deadline that passed more than so many ms ago was passed over: the server did not get to it.
const LATE: Millis = 2;

/// What a waiter needs to be answered.
#[derive(Debug)]
pub struct Ask {
    pub(super) ticket: Ticket,
    pub(super) client: u64,
    pub(super) terms: Terms,
    pub(super) arrived: Now,
}

/// The end of a wait, as the client sees it.
#[derive(Debug)]
pub enum Outcome {
    /// Granted or renewed; and how to undo it if the client is not there to take it.
    Granted(Answer, Undo),
    /// Null.
    TimedOut,
    /// An error.
    Refused(String),
}

/// The reply to a grant or renewal.
#[derive(Clone, Debug)]
pub enum Answer {
    /// Of a lock, or of several that share a token.
    Token(Token),
    /// Of several, each with its own; null for those that were not held.
    Tokens(Vec<Option<Token>>),
}

impl Answer {
    /// Gives it.
    pub fn reply(&self, ctx: Ctx) -> Replied {
        match self {
            Self::Token(token) => ctx.reply_integer(*token),
            Self::Tokens(tokens) => {
                let array = ctx.reply_array(tokens.len());
                tokens.iter().fold(array, |_, token| ctx.reply_token(*token))
            }
        }
    }
}

/// A client whose reply is outstanding.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) blocked: Option<Blocked>,
    pub(super) client: u64,
    pub(super) state: State,
}

#[derive(Debug)]
pub(super) enum State {
    Waiting(WaiterId),
    Confirming(ConfirmationId),
    /// To be told at the end of this turn of the event loop; and when the place became free.
    Ending(Outcome, Now),
}

#[derive(Debug, Default)]
pub(super) struct Desk {
    pub(super) tickets: u64,
    pub(super) pending: BTreeMap<Ticket, Pending>,
    /// Whose end is to be told.
    pub(super) ending: Vec<Ticket>,
    /// Grants whose reply is written but not yet on the network, by connection.
    pub(super) sending: BTreeMap<u64, Undo>,
    /// Grants that nobody will hear of.
    pub(super) undelivered: Vec<Undo>,
    pub(super) timeouts: BTreeSet<(Millis, Ticket)>,
    /// When to look at a contended lock although nobody touches it, and the same by key.
    pub(super) looks: BTreeSet<(Millis, LockKey)>,
    pub(super) look_at: KeyMap<Millis>,
    pub(super) changed: BTreeMap<LockKey, Change>,
    pub(super) expired: Vec<LockKey>,
    /// How often the event loop has gone round.
    pub(super) turn: u64,
    /// The turn, and the moment, in which work was left to the next one.
    pub(super) held_back: Option<(u64, Millis)>,
}

pub(super) static QUEUE: MainThread<Queue<Ask>> = MainThread::new();
pub(super) static DESK: MainThread<Desk> = MainThread::new();

impl Desk {
    pub(super) fn schedule(&mut self, key: &LockKey, at: Option<Millis>) {
        if self.look_at.get(key.db, &key.name).copied() == at {
            return;
        }
        if let Some(before) = self.look_at.remove(key.db, &key.name) {
            self.looks.remove(&(before, key.clone()));
        }
        if let Some(at) = at {
            self.look_at.insert(key.clone(), at);
            self.looks.insert((at, key.clone()));
        }
    }

    /// Notes that a lock wants looking at.
    pub(super) fn note(&mut self, key: LockKey, change: Change) {
        let noted = self.changed.entry(key).or_insert(change);
        if change == Change::Foreign {
            *noted = change;
        }
    }

    /// Notes that the waiter's keys want looking at, as it has left the queue.
    pub(super) fn left(&mut self, waiter: &Waiter<Ask>) {
        for key in &waiter.keys {
            self.note(key.clone(), Change::Freed);
        }
        if let Some(until) = waiter.until {
            self.timeouts.remove(&(until, waiter.ask.ticket));
        }
    }

    /// This server decides nothing any more, or began to: what was to be done is another's business.
    pub(super) fn forget_work(&mut self) {
        self.undelivered.clear();
        self.changed.clear();
        self.expired.clear();
        self.looks.clear();
        self.look_at.clear();
    }

    /// Whether to leave everything to the next turn of the event loop.
    ///
    /// If a lease ran out a while ago, the server was at something else meanwhile (a long script, a stopped process),
    /// and has not read yet what its connections have to say: who waits may be long gone.
    pub(super) fn holds_back(&mut self, now: Millis) -> bool {
        let overdue = |at: Millis| at.saturating_add(LATE) < now;
        let late = self.looks.first().is_some_and(|(at, _)| overdue(*at));
        let given =
            self.held_back.is_some_and(|(turn, at)| turn < self.turn && !overdue(at.saturating_add(LOOK_AGAIN)));
        self.held_back = (late && !given).then_some((self.turn, now));
        self.held_back.is_some()
    }

    /// Nobody waits any more for the locks that would be looked at next: without a reason no timer stays behind.
    pub(super) fn forget_idle_looks(&mut self) {
        while let Some((_, key)) = self.looks.first()
            && !is_contended(key.db, &key.name)
        {
            let key = key.clone();
            self.schedule(&key, None);
        }
    }

    pub(super) fn has_work(&self) -> bool {
        !(self.undelivered.is_empty() && self.changed.is_empty() && self.expired.is_empty())
    }
}

/// Whether anybody waits for a lock. For callbacks: when in doubt, yes.
pub fn is_contended(db: i32, name: &[u8]) -> bool {
    QUEUE.try_with(|queue| queue.waiting(db, name) > 0).unwrap_or(true)
}

/// Whether anybody waits for anything.
pub fn is_idle() -> bool {
    QUEUE.with(|queue| queue.is_empty())
}

/// Lends the queue, to be looked at; see [`MainThread::with`].
pub fn with_queue<R>(work: impl FnOnce(&Queue<Ask>) -> R) -> R {
    QUEUE.with(|queue| work(queue))
}

/// How many wait, and for how many locks.
pub fn sizes() -> (u64, u64) {
    QUEUE.with(|queue| (queue.len() as u64, queue.contended() as u64))
}

/// The connection that waits.
pub fn client_of(waiter: &Waiter<Ask>) -> u64 {
    waiter.ask.client
}

/// A name for a client that is being blocked.
pub(super) fn new_ticket() -> Ticket {
    DESK.with(|desk| {
        desk.tickets = desk.tickets.wrapping_add(1);
        Ticket(desk.tickets)
    })
}
