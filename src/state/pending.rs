//! Requests that are not answered at once, and the replies that are pending for them: a blocked client gets a reply, a session an event.

use super::event_bytes::{event_bytes, hold_bytes};
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
    /// What the rule needs to know.
    pub demand: Demand,
    /// How the hold is bound to the connection.
    pub flags: BindingFlags,
    /// How many replicas must have the grant before it counts.
    pub replicas: u32,
}

/// Who asks, on which terms, and how the answer is delivered. With it, a [`Waiter`] is all that is known of a request. It is in one place:
/// in the queue, or among the confirmations.
#[derive(Debug)]
pub struct Asker {
    /// The ticket of the pending reply.
    pub ticket: Ticket,
    /// The connection on whose behalf it asks: its own, or a session's.
    pub client: u64,
    /// Whether that is a session, which gets an event. Else the client is blocked, and gets a reply.
    pub on_behalf: OnBehalf,
    /// What ends the block.
    pub block: Option<Blocked>,
    /// How the hold is to be bound to the connection.
    pub flags: BindingFlags,
    /// How many replicas must have the grant before it counts.
    pub replicas: u32,
    /// Of a request for a longer lease. In a box, since no such request waits in the queue.
    pub renewal: Option<Box<Renewal>>,
    /// What a grant is answered with.
    pub form: TokenForm,
    /// When the request arrived, by [`crate::server::clock::steady_micros`].
    pub arrived: u64,
}

impl Waiter<Asker> {
    /// What it asks for.
    pub fn terms(&self) -> Terms {
        Terms { demand: self.demand, flags: self.asker.flags, replicas: self.asker.replicas }
    }

    /// How many bytes of its session are reserved for it.
    pub fn bytes(&self) -> usize {
        let names = self.keys.iter().map(|key| &*key.name);
        wait_bytes(&self.owner, self.asker.renewal.is_some(), names)
    }
}

/// What a request for a longer lease of locks that are held names: under which token they are held, and to which they are raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewal {
    /// `TOKEN`.
    pub token: Option<Token>,
    /// `FENCE`.
    pub fence: Option<Token>,
}

/// What the reply to a grant says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenForm {
    /// The token.
    #[default]
    Alone,
    /// The token, and how long the request waited here.
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
    /// The connection that it arrived on.
    Itself,
    /// A session.
    Session,
}

/// How many bytes are reserved for a request that waits: for the event that says how it ends (of a renewal, one for each
/// key), and for its holds once they are bound.
pub fn wait_bytes<'a>(owner: &[u8], renews: bool, names: impl Iterator<Item = &'a [u8]> + Clone) -> usize {
    let holds = names.clone().map(|name| hold_bytes(owner, name)).fold(0, usize::saturating_add);
    holds.saturating_add(if renews { holds / 2 } else { event_bytes(owner, names) })
}

/// How a session reads its events.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// How many at once, at most.
    pub most: usize,
    /// Whether each reply has a heartbeat.
    pub signs: SignsOfLife,
    /// When it asked.
    pub asked: Millis,
    /// When it is answered at the latest.
    pub until: Option<Millis>,
}

/// Whether a session gets a heartbeat with each reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SignsOfLife {
    /// No: without events, the reply is null.
    #[default]
    Unwanted,
    /// Yes, and often enough for the holds that are renewed for it.
    Wanted,
}

/// How a request that was not answered at once ended.
#[derive(Debug)]
pub enum Outcome {
    /// Granted or renewed; undelivered until the answer is composed.
    Granted(Answer, GrantId),
    /// Null.
    TimedOut,
    /// Null; its owner withdrew it.
    Withdrawn,
    /// An error.
    Refused(String),
}

/// The reply to a grant or renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// For one lock, or several that share a token.
    Token(Token),
    /// The same, and how many ms the request waited on this server.
    TokenAndWait(Token, Millis),
    /// For several, each with its own token; null for those that were not held.
    Tokens(Vec<Option<Token>>),
}

/// The stage of a pending reply. The larger ones are in boxes, since most are those of requests that wait.
#[derive(Debug)]
pub enum Stage<B> {
    /// The request is in the queue.
    Waiting(WaiterId),
    /// The grant awaits confirmation by replicas.
    Confirming(ConfirmationId),
    /// A blocked client is to be answered at the end of this turn of the event loop.
    Ending(Box<End<B>>),
    /// A session is blocked until its next events.
    Reading(Box<Reader<B>>),
}

/// The end of a blocked client's request.
#[derive(Debug)]
pub struct End<B> {
    /// What came of it.
    pub outcome: Outcome,
    /// When that was.
    pub at: Now,
    /// What ends the block; `None` once that is done.
    pub block: Option<B>,
}

/// A session that is blocked until its next events.
#[derive(Debug)]
pub struct Reader<B> {
    /// Its connection.
    pub client: u64,
    /// How it reads them.
    pub reading: Reading,
    /// What ends the block; `None` once that is done.
    pub block: Option<B>,
}

/// All pending replies.
#[derive(Debug)]
pub struct PendingReplies<B> {
    /// The last one that was given.
    last: Ticket,
    pending: BTreeMap<Ticket, Stage<B>>,
    /// Blocked clients to be answered, in order.
    ending: VecDeque<Ticket>,
    /// Those among them whose wait the server may be about to end itself.
    put_off: VecDeque<Ticket>,
    /// When waits time out.
    pub timeouts: BTreeSet<(Millis, Ticket)>,
}

impl<B> Default for PendingReplies<B> {
    fn default() -> Self {
        Self {
            last: Ticket::default(),
            pending: BTreeMap::new(),
            ending: VecDeque::new(),
            put_off: VecDeque::new(),
            timeouts: BTreeSet::new(),
        }
    }
}

impl<B> PendingReplies<B> {
    /// A new name for an answer.
    pub fn ticket(&mut self) -> Ticket {
        self.last = self.last.next();
        self.last
    }

    /// All tickets that were given until now.
    pub fn tickets(&self) -> Range<Ticket> {
        Ticket::default()..self.last.next()
    }

    /// The first of these tickets that is pending.
    pub fn first_in(&self, tickets: &Range<Ticket>) -> Option<Ticket> {
        self.pending.range(tickets.clone()).next().map(|(ticket, _)| *ticket)
    }

    /// Records at which stage a reply is.
    pub fn set(&mut self, ticket: Ticket, stage: Stage<B>) {
        self.pending.insert(ticket, stage);
    }

    /// The stage of a reply; `None`: it is not pending.
    pub fn get(&self, ticket: Ticket) -> Option<&Stage<B>> {
        self.pending.get(&ticket)
    }

    /// How many replies are pending.
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Removes the first time limit that is over, and returns whose it is.
    pub fn take_timeout(&mut self, now: Millis) -> Option<Ticket> {
        self.timeouts.first().filter(|(until, _)| *until <= now)?;
        self.timeouts.pop_first().map(|(_, ticket)| ticket)
    }

    /// Removes a reply: it is being delivered, or its client is gone.
    pub fn take(&mut self, ticket: Ticket) -> Option<Stage<B>> {
        self.pending.remove(&ticket)
    }

    /// The request of a blocked client has ended.
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

    /// The request of a blocked client, which is about to be answered, ends in this way instead.
    pub fn end_otherwise(&mut self, ticket: Ticket, outcome: Outcome) {
        if let Some(Stage::Ending(end)) = self.pending.get_mut(&ticket) {
            end.outcome = outcome;
        }
    }

    /// Lets a blocked client be answered although its request has no outcome yet: the reader of an event queue.
    pub fn call(&mut self, ticket: Ticket) {
        self.ending.push_back(ticket);
    }

    /// The next blocked client to be answered now.
    pub fn next_ending(&mut self) -> Option<(Ticket, B)> {
        while let Some(ticket) = self.ending.pop_front() {
            if let Some(block) = self.block(ticket).and_then(Option::take) {
                return Some((ticket, block));
            }
        }
        None
    }

    /// Postpones an answer until [`PendingReplies::next_put_off`] returns it, if the client is still there by then.
    pub fn put_off(&mut self, ticket: Ticket, back: B) {
        if let Some(block) = self.block(ticket) {
            *block = Some(back);
            self.put_off.push_back(ticket);
        }
    }

    /// The next client whose answer was postponed.
    pub fn next_put_off(&mut self) -> Option<B> {
        while let Some(ticket) = self.put_off.pop_front() {
            let block = self.block(ticket).and_then(Option::take);
            if block.is_some() {
                return block;
            }
        }
        None
    }

    /// What ends the block of a client that may be answered.
    fn block(&mut self, ticket: Ticket) -> Option<&mut Option<B>> {
        match self.pending.get_mut(&ticket)? {
            Stage::Ending(end) => Some(&mut end.block),
            Stage::Reading(reader) => Some(&mut reader.block),
            Stage::Waiting(_) | Stage::Confirming(_) => None,
        }
    }

    /// The server's clock has stepped by so many ms: those who read their events are answered when they would have been.
    pub fn stepped(&mut self, by: i64, readers: impl Iterator<Item = Ticket>) {
        let moved = |at: Millis| at.saturating_add_signed(by);
        // Some are just being answered.
        let all: BTreeSet<Ticket> = readers.chain(self.ending.iter().chain(&self.put_off).copied()).collect();
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
