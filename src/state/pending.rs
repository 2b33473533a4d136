//! Pending replies, and how they are delivered: to a blocked client by a reply, to a session by an event.

use super::event_bytes::{event_bytes, hold_bytes};
use super::{BindingFlags, ConfirmationId, GrantId};
use crate::lock::{Demand, LockKey, Millis, Owner, Token, WaiterId};
use crate::server::clock::Now;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

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

/// Who asks, and under what terms: the queue itself has what the rule needs to know.
#[derive(Clone, Copy, Debug)]
pub struct Asker {
    /// The ticket of the pending reply.
    pub ticket: Ticket,
    /// The connection on whose behalf it asks: its own, or a session's.
    pub client: u64,
    /// Whether that is a session.
    pub on_behalf: OnBehalf,
    /// How the hold is to be bound to the connection.
    pub flags: BindingFlags,
    /// How many replicas must have the grant before it counts.
    pub replicas: u32,
    /// What a grant is answered with.
    pub form: TokenForm,
    /// When the request arrived, by [`crate::server::clock::steady_micros`].
    pub arrived: u64,
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

/// The recipient of a pending reply.
#[derive(Debug)]
pub enum Recipient<B> {
    /// A blocked client, which gets a reply.
    Blocked {
        /// Its connection.
        client: u64,
        /// What ends the block; `None` once that is done.
        block: Option<B>,
    },
    /// A session, which gets an event.
    Session {
        /// Its connection.
        client: u64,
        /// What the event is about. In a box, since it is large, and blocked clients have none.
        about: Box<About>,
    },
}

/// What a session's request was about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// Its keys.
    pub keys: Rc<[LockKey]>,
    /// Its owner.
    pub owner: Owner,
    /// What it asks for.
    pub purpose: Purpose,
}

impl About {
    /// How many bytes are reserved for it while it waits.
    pub fn bytes(&self) -> usize {
        wait_bytes(&self.owner, &self.purpose, self.keys.iter().map(|key| &*key.name))
    }
}

/// How many bytes are reserved for a request that waits: for the event that says how it ends (of a renewal, one for each
/// key), and for its holds once they are bound.
pub fn wait_bytes<'a>(owner: &[u8], purpose: &Purpose, names: impl Iterator<Item = &'a [u8]> + Clone) -> usize {
    let holds = names.clone().map(|name| hold_bytes(owner, name)).fold(0, usize::saturating_add);
    holds.saturating_add(match purpose {
        Purpose::Acquire(_) => event_bytes(owner, names),
        Purpose::Renew { .. } => holds / 2,
    })
}

/// What a session's request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// One or more locks, on these terms. While it waits, a repetition counts as the same request.
    Acquire(Terms),
    /// A longer lease for locks that are held, on these terms: under this token, if it names one, and raised to that of
    /// `FENCE`.
    Renew {
        /// The terms.
        terms: Terms,
        /// `TOKEN`.
        token: Option<Token>,
        /// `FENCE`.
        fence: Option<Token>,
    },
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

/// The stage of an answer.
#[derive(Debug)]
pub enum Stage {
    /// Just created.
    Beginning,
    /// The request is in the queue.
    Waiting(WaiterId),
    /// The grant awaits confirmation by replicas.
    Confirming(ConfirmationId),
    /// To be delivered at the end of this turn of the event loop. In a box, since it is large, and most answers that are
    /// owed are those of requests that wait.
    Ending(Box<End>),
    /// A session is blocked until its next events. In a box for the same reason.
    Reading(Box<Reading>),
}

/// The end of a request.
#[derive(Debug)]
pub struct End {
    /// What came of it.
    pub outcome: Outcome,
    /// When that was.
    pub at: Now,
}

/// A pending reply.
#[derive(Debug)]
pub struct PendingReply<B> {
    /// To whom.
    pub to: Recipient<B>,
    /// Its stage.
    pub stage: Stage,
}

/// What recording an end led to.
#[derive(Debug)]
pub enum Ended {
    /// A blocked client will be answered.
    Reply,
    /// A session is to be notified.
    Event(u64, About, Outcome),
    /// It is not pending any more.
    Nobody(Outcome),
}

/// All pending replies.
#[derive(Debug)]
pub struct PendingReplies<B> {
    tickets: u64,
    pending: BTreeMap<Ticket, PendingReply<B>>,
    /// Blocked clients to be answered, in order.
    ending: VecDeque<Ticket>,
    /// Those among them that the server may be about to redirect.
    put_off: VecDeque<Ticket>,
    /// When waits time out.
    pub timeouts: BTreeSet<(Millis, Ticket)>,
}

impl<B> Default for PendingReplies<B> {
    fn default() -> Self {
        Self {
            tickets: 0,
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
        self.tickets = self.tickets.wrapping_add(1);
        Ticket(self.tickets)
    }

    /// Records a pending reply.
    pub fn owe(&mut self, ticket: Ticket, to: Recipient<B>, stage: Stage) {
        self.pending.insert(ticket, PendingReply { to, stage });
    }

    /// A pending reply.
    pub fn get(&self, ticket: Ticket) -> Option<&PendingReply<B>> {
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

    /// Sets the stage of an answer.
    pub fn set(&mut self, ticket: Ticket, stage: Stage) {
        if let Some(pending) = self.pending.get_mut(&ticket) {
            pending.stage = stage;
        }
    }

    /// Removes the first time limit that is over, and returns whose it is.
    pub fn take_timeout(&mut self, now: Millis) -> Option<Ticket> {
        self.timeouts.first().filter(|(until, _)| *until <= now)?;
        self.timeouts.pop_first().map(|(_, ticket)| ticket)
    }

    /// Removes an answer: it is being delivered, or its client is gone.
    pub fn take(&mut self, ticket: Ticket) -> Option<PendingReply<B>> {
        self.pending.remove(&ticket)
    }

    /// Records the outcome of a request.
    pub fn end(&mut self, ticket: Ticket, outcome: Outcome, now: Now) -> Ended {
        match self.pending.get_mut(&ticket) {
            None => Ended::Nobody(outcome),
            Some(PendingReply { to: Recipient::Blocked { .. }, stage }) => {
                *stage = Stage::Ending(Box::new(End { outcome, at: now }));
                self.ending.push_back(ticket);
                Ended::Reply
            }
            Some(PendingReply { to: Recipient::Session { .. }, .. }) => match self.pending.remove(&ticket) {
                Some(PendingReply { to: Recipient::Session { client, about }, .. }) => {
                    Ended::Event(client, *about, outcome)
                }
                _ => Ended::Nobody(outcome),
            },
        }
    }

    /// Lets a blocked client be answered although its request has no outcome yet: the reader of an event queue.
    pub fn call(&mut self, ticket: Ticket) {
        self.ending.push_back(ticket);
    }

    /// The next blocked client to be answered now.
    pub fn next_ending(&mut self) -> Option<(Ticket, B)> {
        while let Some(ticket) = self.ending.pop_front() {
            if let Some(block) = self.take_block(ticket) {
                return Some((ticket, block));
            }
        }
        None
    }

    /// Postpones an answer until [`PendingReplies::next_put_off`] returns it, if the client is still there by then.
    pub fn put_off(&mut self, ticket: Ticket, back: B) {
        if let Some(PendingReply { to: Recipient::Blocked { block, .. }, .. }) = self.pending.get_mut(&ticket) {
            *block = Some(back);
            self.put_off.push_back(ticket);
        }
    }

    /// The next client whose answer was postponed.
    pub fn next_put_off(&mut self) -> Option<B> {
        while let Some(ticket) = self.put_off.pop_front() {
            let block = self.take_block(ticket);
            if block.is_some() {
                return block;
            }
        }
        None
    }

    fn take_block(&mut self, ticket: Ticket) -> Option<B> {
        match self.pending.get_mut(&ticket)? {
            PendingReply { to: Recipient::Blocked { block, .. }, .. } => block.take(),
            PendingReply { to: Recipient::Session { .. }, .. } => None,
        }
    }

    /// The server's clock has stepped by so many ms: those who read their events are answered when they would have been.
    pub fn stepped(&mut self, by: i64, readers: impl Iterator<Item = Ticket>) {
        let moved = |at: Millis| at.saturating_add_signed(by);
        // Some are just being answered.
        let all: BTreeSet<Ticket> = readers.chain(self.ending.iter().chain(&self.put_off).copied()).collect();
        for ticket in all {
            let pending = self.pending.get_mut(&ticket);
            let Some(Stage::Reading(reading)) = pending.map(|pending| &mut pending.stage) else { continue };
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
