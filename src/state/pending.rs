//! Requests that are not answered at once, and their pending replies: a blocked client gets a reply, a session an
//! event.

use super::{BindingFlags, ConfirmationId, GrantId};
use crate::lock::{Demand, Millis, Token, Waiter, WaiterId};
use crate::server::blocked::Blocked;
use crate::server::clock::Now;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

pub use crate::server::callbacks::Ticket;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// What the admission rule needs to know.
    pub demand: Demand,
    /// How the hold is to be bound to the connection.
    pub flags: BindingFlags,
    /// How many replicas must confirm the grant before it counts.
    pub replicas: u32,
}

/// The client that makes a request, with the request's terms and the way in which it is answered. A [`Waiter`] contains
/// it, and is the only record of the request. It is in one place: in the queue, or among the confirmations.
#[derive(Debug)]
pub struct Requester {
    /// The ticket of the pending reply.
    pub ticket: Ticket,
    /// The client id of the connection on whose behalf the request is made: the client's own, or a session's.
    pub client: u64,
    /// Whether that is a session, which gets an event. Otherwise the client is blocked, and gets a reply.
    pub on_behalf: OnBehalf,
    /// The handle that unblocks the client.
    pub block: Option<Blocked>,
    /// How the hold is to be bound to the connection.
    pub flags: BindingFlags,
    /// How many replicas must confirm the grant before it counts.
    pub replicas: u32,
    /// What a renewal names; `None` for a request to acquire. Boxed, since no renewal waits in the queue.
    pub renewal: Option<Box<Renewal>>,
    /// The form of the reply to a grant.
    pub form: TokenForm,
    /// When the request arrived, by [`crate::server::clock::steady_micros`].
    pub arrived: u64,
    /// The bytes that are reserved for the events that it may cause, if the client is a session.
    pub reserved: usize,
}

impl Waiter<Requester> {
    /// What the request asks for.
    pub fn terms(&self) -> Terms {
        Terms { demand: self.demand, flags: self.requester.flags, replicas: self.requester.replicas }
    }
}

/// The tokens that a renewal names: the one that the holds must have, and the one to which it is raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewal {
    /// `TOKEN`.
    pub token: Option<Token>,
    /// `FENCE`.
    pub fence: Option<Token>,
}

/// The form of the reply to a grant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenForm {
    /// The token.
    #[default]
    Alone,
    /// The token, and how long the request waited on this server.
    WithWaited,
}

impl TokenForm {
    /// The answer to a request that was granted after so many µs.
    pub fn answer(self, token: Token, waited_micros: u64) -> Answer {
        match self {
            Self::Alone => Answer::Token(token),
            Self::WithWaited => Answer::TokenAndWait(token, waited_micros / 1000),
        }
    }
}

/// On whose behalf a request is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBehalf {
    /// The connection on which it arrived.
    Itself,
    /// A session.
    Session,
}

/// How a session reads its events: the options of a `LOCK.EVENTS`.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// The most events in one reply.
    pub most: usize,
    /// Whether each reply ends with a heartbeat.
    pub signs: HeartbeatMode,
    /// When the `LOCK.EVENTS` arrived.
    pub asked: Millis,
    /// When it is answered at the latest.
    pub until: Option<Millis>,
}

/// Whether a session gets a heartbeat with each reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeartbeatMode {
    /// No: without events, the reply is null.
    #[default]
    Unwanted,
    /// Yes, and often enough for the holds that the server renews for the session.
    Wanted,
}

/// The outcome of a request that was not answered at once.
#[derive(Debug)]
pub enum Outcome {
    /// Granted or renewed; undelivered until the answer is composed.
    Granted(Answer, GrantId),
    /// The wait is over without a grant: a blocked client gets null.
    TimedOut,
    /// Its owner withdrew it: a blocked client gets null.
    Withdrawn,
    /// It failed with this error.
    Refused(String),
}

/// The reply to a grant or renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// For one lock, or several that share a token.
    Token(Token),
    /// The same, and how many ms the request waited on this server.
    TokenAndWait(Token, Millis),
    /// For several locks, each with its own token; null for those that were not held.
    Tokens(Vec<Option<Token>>),
}

/// The stage of a pending reply. The larger ones are boxed, since most replies are pending for waiting requests.
#[derive(Debug)]
pub enum Stage<B> {
    /// The request is in the queue.
    Waiting(WaiterId),
    /// Replicas have yet to confirm the grant or renewal.
    Confirming(ConfirmationId),
    /// The request has ended, and its blocked client must still be answered.
    Ending(Box<End<B>>),
    /// A session is blocked until its next events.
    Reading(Box<Reader<B>>),
}

/// The end of a blocked client's request.
#[derive(Debug)]
pub struct End<B> {
    /// The outcome.
    pub outcome: Outcome,
    /// When the request ended.
    pub at: Now,
    /// The handle that unblocks the client; `None` once it has been used.
    pub block: Option<B>,
}

/// A session that is blocked until its next events.
#[derive(Debug)]
pub struct Reader<B> {
    /// The client id of its connection.
    pub client: u64,
    /// How it reads them.
    pub reading: Reading,
    /// The handle that unblocks the client; `None` once it has been used.
    pub block: Option<B>,
}

/// All pending replies.
#[derive(Debug)]
pub struct PendingReplies<B> {
    /// The last ticket that was issued.
    last: Ticket,
    pending: BTreeMap<Ticket, Stage<B>>,
    /// Blocked clients to be answered, in order.
    ending: VecDeque<Ticket>,
    /// Blocked clients whose answer is postponed, because the server may be about to end their wait itself.
    postponed: VecDeque<Ticket>,
    /// When waits and blocked `LOCK.EVENTS` time out.
    pub timeouts: BTreeSet<(Millis, Ticket)>,
}

impl<B> Default for PendingReplies<B> {
    fn default() -> Self {
        Self {
            last: Ticket::default(),
            pending: BTreeMap::new(),
            ending: VecDeque::new(),
            postponed: VecDeque::new(),
            timeouts: BTreeSet::new(),
        }
    }
}

impl<B> PendingReplies<B> {
    /// Issues a new ticket.
    pub fn ticket(&mut self) -> Ticket {
        self.last = self.last.next();
        self.last
    }

    /// All tickets that were issued so far.
    pub fn tickets(&self) -> Range<Ticket> {
        Ticket::default()..self.last.next()
    }

    /// The first of these tickets whose reply is pending.
    pub fn first_in(&self, tickets: &Range<Ticket>) -> Option<Ticket> {
        self.pending.range(tickets.clone()).next().map(|(ticket, _)| *ticket)
    }

    /// Records the stage of a reply.
    pub fn set(&mut self, ticket: Ticket, stage: Stage<B>) {
        self.pending.insert(ticket, stage);
    }

    /// The stage of a reply; `None` if it is not pending.
    pub fn get(&self, ticket: Ticket) -> Option<&Stage<B>> {
        self.pending.get(&ticket)
    }

    /// How many replies are pending.
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Whether no reply is pending.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Removes the first timeout that is over, and returns its ticket.
    pub fn take_timeout(&mut self, now: Millis) -> Option<Ticket> {
        self.timeouts.first().filter(|(until, _)| *until <= now)?;
        self.timeouts.pop_first().map(|(_, ticket)| ticket)
    }

    /// Removes a reply: it is being delivered, or its client is gone.
    pub fn take(&mut self, ticket: Ticket) -> Option<Stage<B>> {
        self.pending.remove(&ticket)
    }

    /// Records the outcome of a blocked client's request, and schedules the answer.
    ///
    /// # Errors
    ///
    /// The outcome, if the client is gone.
    pub fn end(&mut self, ticket: Ticket, end: End<B>) -> Result<(), Outcome> {
        let Some(stage) = self.pending.get_mut(&ticket) else { return Err(end.outcome) };
        *stage = Stage::Ending(Box::new(end));
        self.ending.push_back(ticket);
        Ok(())
    }

    /// Replaces the outcome of a blocked client's request that has not been answered yet.
    pub fn end_otherwise(&mut self, ticket: Ticket, outcome: Outcome) {
        if let Some(Stage::Ending(end)) = self.pending.get_mut(&ticket) {
            end.outcome = outcome;
        }
    }

    /// Schedules the answer to a blocked `LOCK.EVENTS`, which has no outcome.
    pub fn call(&mut self, ticket: Ticket) {
        self.ending.push_back(ticket);
    }

    /// Takes the next blocked client to be answered now.
    pub fn next_ending(&mut self) -> Option<(Ticket, B)> {
        while let Some(ticket) = self.ending.pop_front() {
            if let Some(block) = self.block(ticket).and_then(Option::take) {
                return Some((ticket, block));
            }
        }
        None
    }

    /// Takes the client to be answered next, if it is blocked in `LOCK.EVENTS`.
    pub fn next_reader(&mut self) -> Option<(Ticket, B)> {
        let ticket = *self.ending.front()?;
        let Stage::Reading(reader) = self.pending.get_mut(&ticket)? else { return None };
        let block = reader.block.take()?;
        self.ending.pop_front();
        Some((ticket, block))
    }

    /// Postpones an answer until [`PendingReplies::next_postponed`] returns it, if the client is still there by then.
    pub fn postpone(&mut self, ticket: Ticket, back: B) {
        if let Some(block) = self.block(ticket) {
            *block = Some(back);
            self.postponed.push_back(ticket);
        }
    }

    /// Takes the next client whose answer was postponed.
    pub fn next_postponed(&mut self) -> Option<B> {
        while let Some(ticket) = self.postponed.pop_front() {
            let block = self.block(ticket).and_then(Option::take);
            if block.is_some() {
                return block;
            }
        }
        None
    }

    /// The handle that unblocks a client that may be answered.
    fn block(&mut self, ticket: Ticket) -> Option<&mut Option<B>> {
        match self.pending.get_mut(&ticket)? {
            Stage::Ending(end) => Some(&mut end.block),
            Stage::Reading(reader) => Some(&mut reader.block),
            Stage::Waiting(_) | Stage::Confirming(_) => None,
        }
    }

    /// Records that the server's clock has stepped by so many ms. Blocked `LOCK.EVENTS` are answered when they would
    /// have been without the step.
    pub fn stepped(&mut self, by: i64, readers: impl Iterator<Item = Ticket>) {
        let moved = |at: Millis| at.saturating_add_signed(by);
        // Sessions whose answer is already scheduled are no longer among `readers`.
        let all: BTreeSet<Ticket> = readers.chain(self.ending.iter().chain(&self.postponed).copied()).collect();
        for ticket in all {
            let Some(Stage::Reading(reader)) = self.pending.get_mut(&ticket) else { continue };
            let reading = &mut reader.reading;
            reading.asked = moved(reading.asked);
            if let Some(until) = &mut reading.until
                && self.timeouts.remove(&(*until, ticket))
            {
                *until = moved(*until);
                self.timeouts.insert((*until, ticket));
            }
        }
    }

    /// Whether a blocked client is to be answered.
    pub fn is_ending(&self) -> bool {
        !self.ending.is_empty()
    }
}
