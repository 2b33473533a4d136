//! What dies with its connection, as plain tables: who waits, who is owed an answer, which holds are tied to whom, what
//! is being confirmed, and what the next turn of the event loop has to do about it.
//!
//! A book knows no server and calls nobody, so it can be tested alone. All of them lie in one place, [`with`], and are
//! lent for as long as it takes to read or note something: never while the server is called, which may call back.

pub mod confirmations;
pub mod looks;
pub mod owed;
pub mod sessions;
pub mod sweep;
pub mod ties;
pub mod undo;

#[cfg(test)]
mod tests;

pub use confirmations::{ConfirmationId, Confirmations};
pub use looks::Looks;
pub use owed::{Answer, Asker, Outcome, Owed, Recipient, State, Terms};
pub use sessions::{Event, Kind, Sessions, Why};
pub use sweep::Sweep;
pub use ties::{Tie, TieId, Ties, Tying};
pub use undo::{Step, Undo};

use crate::lock::cycle::Search;
use crate::lock::serve::{Agenda, Change};
use crate::lock::{LockKey, Queue, Waiter, WaiterId};
use crate::server::MainThread;
use crate::server::blocked::Blocked;
use crate::server::clock::Now;
use std::collections::VecDeque;

/// All books.
#[derive(Debug, Default)]
pub struct Books {
    /// Who waits for which lock, in order.
    pub queue: Queue<Asker>,
    /// Which locks are to be looked at because they have changed.
    pub agenda: Agenda,
    /// When locks are to be looked at although nobody touches them.
    pub looks: Looks,
    /// Who is owed an answer.
    pub owed: Owed<Blocked>,
    /// The mailboxes of sessions.
    pub sessions: Sessions,
    /// Holds that are tied to connections.
    pub ties: Ties,
    /// What replicas have yet to confirm.
    pub confirmations: Confirmations,
    /// Locks of which something has expired, which is to be told if it ended a hold.
    pub expired: VecDeque<(LockKey, Expiry)>,
    /// Searches for cycles of waits that are not done, and whose request each is about.
    pub searches: VecDeque<(WaiterId, Search)>,
    /// Everything that a replaced data set leaves to be looked at anew.
    pub sweep: Sweep,
    /// What this server decided nothing about before its role changed.
    pub undecided: Undecided,
    undos: u64,
}

/// What of a lock has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// The key.
    Key,
    /// Some of its fields.
    Fields {
        /// How many held the lock until then.
        holders: usize,
    },
}

/// What is to be refused because this server decides nothing any more.
#[derive(Debug, Default)]
pub struct Undecided {
    /// Requests that wait: the next to look at, and where to end.
    pub waiters: Option<(WaiterId, WaiterId)>,
    /// Grants that were to be confirmed.
    pub confirmations: Confirmations,
}

static BOOKS: MainThread<Books> = MainThread::new();

/// Lends the books; see [`MainThread::with`].
pub fn with<R>(work: impl FnOnce(&mut Books) -> R) -> R {
    BOOKS.with(work)
}

/// What became of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// It will be told when this turn of the event loop ends.
    Due,
    /// Nobody is there to be told. What was granted is to be taken back.
    Undelivered,
}

/// As [`with`], for callbacks that may come while the books are lent: `None` then.
pub fn try_with<R>(work: impl FnOnce(&mut Books) -> R) -> Option<R> {
    BOOKS.try_with(work)
}

impl Books {
    /// Tells whoever is owed the answer of `ticket` how it ended; `now` is when that came about. The one place that
    /// asks who that is.
    pub fn end(&mut self, ticket: owed::Ticket, outcome: Outcome, now: Now) -> Delivery {
        let outcome = match self.owed.end(ticket, outcome, now) {
            owed::Ended::Reply => return Delivery::Due,
            owed::Ended::Event(session, about, outcome) => match self.sessions.tell(session, ticket, about, outcome) {
                Ok(()) => {
                    self.call_reader(session);
                    return Delivery::Due;
                }
                Err(outcome) => outcome,
            },
            owed::Ended::Nobody(outcome) => outcome,
        };
        if let Outcome::Granted(_, undo) = outcome {
            self.owed.undelivered.push_back(undo);
        }
        Delivery::Undelivered
    }

    /// A hold that was tied is lost: its session, if it has one, is told.
    pub fn lost(&mut self, tie: &Tie, why: Why) {
        self.sessions.lost(tie, why);
        self.call_reader(tie.client);
    }

    /// A hold that was tied is no longer this server's business: its session, if it has one, is told.
    pub fn untied(&mut self, tie: &Tie, why: Why) {
        self.sessions.untied(tie, why);
        self.call_reader(tie.client);
    }

    /// Lends the ways back from whatever an owner was given of a lock and has not been told yet.
    fn outstanding(&mut self, hold: (i32, &[u8], &[u8]), mut work: impl FnMut(&mut Undo)) {
        let (db, name, owner) = hold;
        let mut of_hold = |undo: &mut Undo| {
            if undo.db() == db && *undo.owner == *owner {
                work(undo);
            }
        };
        self.sessions.unread_grants(name, owner, &mut of_hold);
        self.owed.undos(&mut of_hold);
        self.confirmations.of_owner(owner, &mut of_hold);
    }

    /// An owner is being told that it holds a lock: so many holds at least. They stay, whatever is taken back.
    pub fn acknowledge(&mut self, hold: (i32, &[u8], &[u8]), holds: u64) {
        self.outstanding(hold, |undo| undo.acknowledge(hold.1, holds));
    }

    /// So many holds of a lock are promised to its owner by what came after `serial`.
    pub fn promised(&mut self, hold: (i32, &[u8], &[u8]), serial: u64) -> u64 {
        let mut most = 0;
        self.outstanding(hold, |undo| {
            if undo.serial > serial {
                most = most.max(undo.promised(hold.1));
            }
        });
        most
    }

    /// So many holds of a step of what was given under `serial` were taken back: what came after it is to know.
    pub fn rebase(&mut self, hold: (i32, &[u8], &[u8]), serial: u64, gone: &Step, taken: u64) {
        self.outstanding(hold, |undo| {
            if undo.serial > serial {
                undo.rebase(gone, taken);
            }
        });
    }

    /// What was written in the turn of the event loop before is on the network.
    pub fn sent(&mut self) {
        for undo in self.owed.sent() {
            for step in &undo.steps {
                self.acknowledge((undo.db(), &step.name, &undo.owner), step.promised_before());
            }
        }
    }

    /// Names the way back from a grant or renewal; later ones are greater.
    pub fn next_undo(&mut self) -> u64 {
        self.undos = self.undos.wrapping_add(1);
        self.undos
    }

    /// Lets the reader of a mailbox have what has come.
    fn call_reader(&mut self, session: u64) {
        if let Some(reader) = self.sessions.take_reader(session) {
            self.owed.call(reader);
        }
    }

    /// Whether anybody waits for a lock.
    pub fn is_contended(&self, db: i32, name: &[u8]) -> bool {
        self.queue.waiting(db, name) > 0
    }

    /// A waiter has left the queue, however that came.
    pub fn left(&mut self, waiter: &Waiter<Asker>) {
        if let Some(until) = waiter.until {
            self.owed.timeouts.remove(&(until, waiter.ask.ticket));
        }
        for key in waiter.keys.iter() {
            if self.queue.waiting(key.db, &key.name) == 0 {
                self.looks.schedule(key, None);
            }
        }
    }

    /// A waiter has left the queue of its own accord: those behind it may have their turn.
    pub fn gave_up(&mut self, waiter: &Waiter<Asker>) {
        self.left(waiter);
        for key in waiter.keys.iter().filter(|key| self.queue.waiting(key.db, &key.name) > 0) {
            self.agenda.note(key.clone(), Change::Freed);
        }
    }

    /// Whether there is something to do at once.
    pub fn has_work(&self) -> bool {
        !(self.owed.undelivered.is_empty()
            && self.agenda.is_empty()
            && self.expired.is_empty()
            && self.searches.is_empty()
            && self.sweep.is_over()
            && !self.ties.has_work())
            || self.has_news_to_tell()
    }

    /// Whether there is something to do at once that writes nothing.
    pub fn has_news_to_tell(&self) -> bool {
        let undecided = self.undecided.waiters.is_some() || !self.undecided.confirmations.is_empty();
        undecided || self.ties.has_retired() || self.sessions.has_departed()
    }

    /// What a replica has to do of what only a master does: nothing.
    pub fn forget_changes(&mut self) {
        self.owed.undelivered.clear();
        self.expired.clear();
        self.agenda = Agenda::default();
    }

    /// Whether anything would be lost with the module: somebody waits or has not been told, or a hold is tied.
    pub fn are_in_use(&self) -> bool {
        let (_, _, unread) = self.sessions.sizes();
        !(self.queue.is_empty() && self.confirmations.is_empty() && self.ties.is_empty()) || unread > 0
    }

    /// This server decides nothing any more, or began to: what was to be done is another's business.
    pub fn forget_work(&mut self) {
        self.forget_changes();
        self.looks = Looks::default();
        self.sweep = Sweep::default();
        let waiters = (!self.queue.is_empty()).then(|| (WaiterId(0), self.queue.next_id()));
        self.undecided = Undecided { waiters, confirmations: self.confirmations.retire() };
        self.ties.retire_all();
    }
}
