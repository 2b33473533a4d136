//! Who is owed an answer, and how it gets it: a client that is blocked, by a reply; a session, by an event.

use super::{ConfirmationId, Tying, Undo};
use crate::lock::{LockKey, Millis, Owner, Request, Token, WaiterId};
use crate::server::clock::Now;
use foldhash::HashMap;
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

pub use crate::server::callbacks::Ticket;

/// What a request asks for.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Of the rule.
    pub request: Request,
    /// How the hold is tied to the connection.
    pub tying: Tying,
    /// How many replicas must have the grant before it counts.
    pub replicas: u32,
}

/// Who asks, and on what terms.
#[derive(Clone, Copy, Debug)]
pub struct Asker {
    /// Names what the asker is owed.
    pub ticket: Ticket,
    /// The connection on whose behalf it asks: its own, or a session's.
    pub client: u64,
    /// Whether that is a session.
    pub on_behalf: OnBehalf,
    /// On what terms.
    pub terms: Terms,
    /// When it came.
    pub arrived: Now,
}

/// On whose behalf a request is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBehalf {
    /// The connection that it came over.
    Itself,
    /// A session.
    Session,
}

/// Who is owed an answer.
#[derive(Debug)]
pub enum Recipient<B> {
    /// A client that is blocked: by a reply.
    Blocked {
        /// Its connection.
        client: u64,
        /// What ends the block; taken when that is done.
        block: Option<B>,
    },
    /// A session: by an event.
    Session {
        /// Its connection.
        client: u64,
        /// What the event is about.
        about: About,
    },
}

/// What a session's request was about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// Its keys.
    pub keys: Rc<[LockKey]>,
    /// Its owner.
    pub owner: Owner,
}

/// How a request ends that was not answered at once.
#[derive(Debug)]
pub enum Outcome {
    /// Granted or renewed; and the way back if nobody is there to take it.
    Granted(Answer, Undo),
    /// Null.
    TimedOut,
    /// An error.
    Refused(String),
}

/// The reply to a grant or renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Of a lock, or of several that share a token.
    Token(Token),
    /// Of several, each with its own; null for those that were not held.
    Tokens(Vec<Option<Token>>),
}

/// How far it is with an answer.
#[derive(Debug)]
pub enum State {
    /// Neither of these yet.
    Beginning,
    /// The request stands in the queue.
    Waiting(WaiterId),
    /// Replicas have yet to confirm the grant.
    Confirming(ConfirmationId),
    /// To be told at the end of this turn of the event loop; and when that came about.
    Ending(Outcome, Now),
    /// A session waits for its next events: at most so many, and until then.
    Reading {
        /// How many events it reads at once.
        most: usize,
        /// When it gives up.
        until: Option<Millis>,
    },
}

/// An answer that is owed.
#[derive(Debug)]
pub struct Pending<B> {
    /// To whom.
    pub to: Recipient<B>,
    /// How far it is.
    pub state: State,
}

/// What came of an end.
#[derive(Debug)]
pub enum Ended {
    /// A blocked client will be told.
    Reply,
    /// A session is to be told.
    Event(u64, About, Outcome),
    /// Nobody is owed it any more.
    Nobody(Outcome),
}

/// All answers that are owed.
#[derive(Debug)]
pub struct Owed<B> {
    tickets: u64,
    pending: HashMap<Ticket, Pending<B>>,
    /// Blocked clients that are to be answered, in order.
    ending: VecDeque<Ticket>,
    /// Grants whose reply is written but not yet on the network, by connection.
    sending: Vec<(u64, Undo)>,
    /// Grants that nobody will hear of.
    pub undelivered: VecDeque<Undo>,
    /// When waits are over.
    pub timeouts: BTreeSet<(Millis, Ticket)>,
}

impl<B> Default for Owed<B> {
    fn default() -> Self {
        Self {
            tickets: 0,
            pending: HashMap::default(),
            ending: VecDeque::new(),
            sending: Vec::new(),
            undelivered: VecDeque::new(),
            timeouts: BTreeSet::new(),
        }
    }
}

impl<B> Owed<B> {
    /// A new name for an answer.
    pub fn ticket(&mut self) -> Ticket {
        self.tickets = self.tickets.wrapping_add(1);
        Ticket(self.tickets)
    }

    /// Notes that an answer is owed.
    pub fn owe(&mut self, ticket: Ticket, to: Recipient<B>, state: State) {
        self.pending.insert(ticket, Pending { to, state });
    }

    /// An answer that is owed.
    pub fn get(&self, ticket: Ticket) -> Option<&Pending<B>> {
        self.pending.get(&ticket)
    }

    /// Says how far it is with an answer.
    pub fn set(&mut self, ticket: Ticket, state: State) {
        if let Some(pending) = self.pending.get_mut(&ticket) {
            pending.state = state;
        }
    }

    /// Takes an answer out: it is being given, or nobody wants it any more.
    pub fn take(&mut self, ticket: Ticket) -> Option<Pending<B>> {
        self.pending.remove(&ticket)
    }

    /// Says how an answer came out.
    pub fn end(&mut self, ticket: Ticket, outcome: Outcome, now: Now) -> Ended {
        match self.pending.get_mut(&ticket) {
            None => Ended::Nobody(outcome),
            Some(Pending { to: Recipient::Blocked { .. }, state }) => {
                *state = State::Ending(outcome, now);
                self.ending.push_back(ticket);
                Ended::Reply
            }
            Some(Pending { to: Recipient::Session { .. }, .. }) => match self.pending.remove(&ticket) {
                Some(Pending { to: Recipient::Session { client, about }, .. }) => Ended::Event(client, about, outcome),
                _ => Ended::Nobody(outcome),
            },
        }
    }

    /// Lets a blocked client be answered although its answer is not there yet: the reader of a mailbox.
    pub fn call(&mut self, ticket: Ticket) {
        self.ending.push_back(ticket);
    }

    /// The next blocked client that is to be answered now.
    pub fn next_ending(&mut self) -> Option<B> {
        while let Some(ticket) = self.ending.pop_front() {
            if let Some(Pending { to: Recipient::Blocked { block, .. }, .. }) = self.pending.get_mut(&ticket)
                && let Some(block) = block.take()
            {
                return Some(block);
            }
        }
        None
    }

    /// Whether some blocked client is to be answered.
    pub fn is_ending(&self) -> bool {
        !self.ending.is_empty()
    }

    /// A grant's reply has been written; it is on the network when the event loop has gone round.
    pub fn sending(&mut self, client: u64, undo: Undo) {
        self.sending.push((client, undo));
    }

    /// What was written has been handed to the network.
    pub fn sent(&mut self) {
        self.sending.clear();
    }

    /// A connection has ended: what was written for it never arrived. How many grants that were.
    pub fn undeliver(&mut self, client: u64) -> usize {
        let before = self.undelivered.len();
        self.undelivered.extend(self.sending.extract_if(.., |(to, _)| *to == client).map(|(_, undo)| undo));
        self.undelivered.len().saturating_sub(before)
    }
}
