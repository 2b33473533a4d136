//! What dies with its connection, as plain tables: who waits, who is owed an answer, which holds are tied to whom,
//! what is being confirmed, and what the next turn of the event loop has to do about all this.
//!
//! A book knows no server and calls nobody, so it can be tested alone. All books are in one place, [`with`], which
//! lends them only for as long as reading or noting something takes: never while the server is called, which may call
//! back.

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
pub use owed::{Answer, Asker, IfNone, Outcome, Owed, Reading, Recipient, State, Terms};
pub use sessions::{Event, Kind, Sessions, Why};
pub use sweep::Sweep;
pub use ties::{NewTie, Tie, TieId, Ties, Tying};
pub use undo::{Step, Undo};

use crate::lock::cycle::Search;
use crate::lock::serve::{Agenda, Change};
use crate::lock::{Deadline, LockKey, Millis, Queue, Token, Waiter, WaiterId};
use crate::server::MainThread;
use crate::server::blocked::Blocked;
use crate::server::clock::Now;
use std::collections::VecDeque;

/// All books.
#[derive(Debug, Default)]
pub struct Books {
    /// Who waits for which lock, in order.
    pub queue: Queue<Asker>,
    /// Which locks have changed and must be looked at.
    pub agenda: Agenda,
    /// When to look at locks that nobody touches.
    pub looks: Looks,
    /// Who is owed an answer.
    pub owed: Owed<Blocked>,
    /// The mailboxes of sessions.
    pub sessions: Sessions,
    /// Holds that are tied to connections.
    pub ties: Ties,
    /// What the replicas have yet to confirm.
    pub confirmations: Confirmations,
    /// Locks of which something has expired. If that ended a hold, it is reported.
    pub expired: VecDeque<(LockKey, Expiry)>,
    /// Unfinished searches for cycles of waits, and the request that each is for.
    pub searches: VecDeque<(WaiterId, Search)>,
    /// Finished searches whose memory is still to be freed.
    pub searched: VecDeque<Search>,
    /// What must be looked at anew because a data set was replaced.
    pub sweep: Sweep,
    /// What this server left undecided when its role changed.
    pub undecided: Undecided,
    undos: u64,
}

/// The part of a lock that has expired.
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

/// What is to be refused because this server no longer decides anything.
#[derive(Debug, Default)]
pub struct Undecided {
    /// Waiting requests: the next one to look at, and where to stop.
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
    /// It will be sent at the end of this turn of the event loop.
    Due,
    /// Nobody is left to receive it. What was granted has to be rolled back.
    Undelivered,
}

/// Like [`with`], for callbacks that may arrive while the books are lent: `None` in that case.
pub fn try_with<R>(work: impl FnOnce(&mut Books) -> R) -> Option<R> {
    BOOKS.try_with(work)
}

impl Books {
    /// Records how the request of `ticket` ended, for whoever is owed its answer; `now` is when it ended. The one
    /// place that asks who that is.
    pub fn end(&mut self, ticket: owed::Ticket, outcome: Outcome, now: Now) -> Delivery {
        let outcome = match self.owed.end(ticket, outcome, now) {
            owed::Ended::Reply => return Delivery::Due,
            owed::Ended::Event(session, about, outcome) => {
                match self.sessions.tell(session, ticket, about, outcome, now) {
                    Ok(()) => {
                        self.call_reader(session);
                        return Delivery::Due;
                    }
                    Err(outcome) => outcome,
                }
            }
            owed::Ended::Nobody(outcome) => outcome,
        };
        if let Outcome::Granted(_, undo) = outcome {
            self.owed.undelivered.push_back(undo);
        }
        Delivery::Undelivered
    }

    /// A tied hold is lost: notifies its session, if it has one.
    pub fn lost(&mut self, tie: &Tie, why: Why) {
        self.sessions.lost(tie, why);
        self.call_reader(tie.client);
    }

    /// A tied hold is no longer watched by this server: notifies its session, if it has one.
    pub fn untied(&mut self, tie: &Tie, why: Why) {
        self.sessions.untied(tie, why);
        self.call_reader(tie.client);
    }

    /// Ties a hold, as [`Ties::tie`] does.
    pub fn tie(&mut self, new: NewTie, now: Millis) -> Option<Tie> {
        let client = new.client;
        let other = self.ties.tie(new, now);
        self.hurry_reader(client, now);
        other
    }

    /// Restores a tie, as [`Ties::put_back`] does.
    pub fn put_back(&mut self, tie: Tie, deadline: Deadline, now: Millis) {
        let client = tie.client;
        self.ties.put_back(tie, deadline, now);
        self.hurry_reader(client, now);
    }

    /// A session has been given a shorter lease to keep alive: lets it be answered, if it would otherwise hear too late
    /// that it is alive.
    fn hurry_reader(&mut self, session: u64, now: Millis) {
        let ties = &self.ties;
        let latest = || ties.shortest_lease(session).map(|lease| now.saturating_add(sessions::pace(lease)));
        if let Some(reader) = self.sessions.take_late_reader(session, latest) {
            self.owed.call(reader);
        }
    }

    /// How many ms apart the signs of life of a session are now. `default_lease` counts while the session keeps no hold
    /// alive.
    pub fn pace(&self, session: u64, default_lease: Millis) -> Millis {
        sessions::pace(self.ties.shortest_lease(session).unwrap_or(default_lease))
    }

    /// Lends the roll-backs of everything that an owner was given of a lock and has not been told of yet.
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

    /// An owner is being told that it holds a lock, with at least this many holds. No roll-back takes them away.
    pub fn acknowledge(&mut self, hold: (i32, &[u8], &[u8]), holds: u64) {
        self.outstanding(hold, |undo| undo.acknowledge(hold.1, holds));
    }

    /// A hold has another token now. What was given before and may yet be rolled back follows it.
    pub fn retoken(&mut self, hold: (i32, &[u8], &[u8]), tokens: (Option<Token>, Option<Token>)) {
        self.outstanding(hold, |undo| undo.retoken(hold.1, tokens));
    }

    /// Answers that came after `serial` promise this many holds of a lock to its owner.
    pub fn promised(&mut self, hold: (i32, &[u8], &[u8]), serial: u64) -> u64 {
        let mut most = 0;
        self.outstanding(hold, |undo| {
            if undo.serial > serial {
                most = most.max(undo.promised(hold.1));
            }
        });
        most
    }

    /// This many holds of a step that was given under `serial` were rolled back: adjusts what came after it.
    pub fn rebase(&mut self, hold: (i32, &[u8], &[u8]), serial: u64, gone: &Step, taken: u64) {
        self.outstanding(hold, |undo| {
            if undo.serial > serial {
                undo.rebase(gone, taken);
            }
        });
    }

    /// What was written in the previous turn of the event loop has been handed to the network.
    pub fn sent(&mut self) {
        for undo in self.owed.sent() {
            for step in &undo.steps {
                self.acknowledge((undo.db(), &step.name, &undo.owner), step.promised_before());
            }
        }
    }

    /// A name for the roll-back of a grant or renewal; later names are greater.
    pub fn next_undo(&mut self) -> u64 {
        self.undos = self.undos.wrapping_add(1);
        self.undos
    }

    /// Lets the reader of a mailbox be answered with what has arrived.
    fn call_reader(&mut self, session: u64) {
        if let Some(reader) = self.sessions.take_reader(session) {
            self.owed.call(reader);
        }
    }

    /// The client of `ticket`, which was blocked until a session's next events, at most until `until`, is blocked no
    /// longer.
    pub fn reads_no_more(&mut self, session: u64, ticket: owed::Ticket, until: Option<Millis>) {
        self.sessions.set_reader(session, None);
        if let Some(until) = until {
            self.owed.timeouts.remove(&(until, ticket));
        }
    }

    /// Whether anybody waits for a lock.
    pub fn is_contended(&self, db: i32, name: &[u8]) -> bool {
        self.queue.waiting(db, name) > 0
    }

    /// A waiter has left the queue, for whatever reason.
    pub fn left(&mut self, waiter: &Waiter<Asker>) {
        if let Some(until) = waiter.until {
            self.owed.timeouts.remove(&(until, waiter.asker.ticket));
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

    /// Whether there is work to do at once.
    pub fn has_work(&self) -> bool {
        !(self.owed.undelivered.is_empty()
            && self.agenda.is_empty()
            && self.expired.is_empty()
            && self.searches.is_empty()
            && self.searched.is_empty()
            && self.sweep.is_over()
            && !self.ties.has_work())
            || self.has_news_to_tell()
    }

    /// Whether there is work to do at once that writes nothing.
    pub fn has_news_to_tell(&self) -> bool {
        let undecided = self.undecided.waiters.is_some() || !self.undecided.confirmations.is_empty();
        undecided || self.ties.has_retired() || self.sessions.has_departed()
    }

    /// Takes out the next search to advance. A search must not run ahead of changes that have not been looked at yet, nor
    /// of leases that have run out.
    pub fn next_search(&mut self, now: Millis) -> Option<(WaiterId, Search)> {
        let has_passed = |at: Millis| at <= now;
        let is_settled = self.agenda.is_empty()
            && self.expired.is_empty()
            && self.sweep.is_over()
            && !self.looks.first().is_some_and(has_passed);
        if is_settled { self.searches.pop_front() } else { None }
    }

    /// Frees a part of the memory of finished searches. Returns whether there was any.
    pub fn free_searched(&mut self) -> bool {
        let Some(search) = self.searched.front_mut() else { return false };
        if !search.free_part() {
            self.searched.pop_front();
        }
        true
    }

    /// Drops the work that only a master does, on a replica.
    pub fn forget_changes(&mut self) {
        self.owed.undelivered.clear();
        self.expired.clear();
        self.agenda = Agenda::default();
    }

    /// Whether anything would be lost with the module: somebody waits or is owed an answer, or a hold is tied.
    pub fn are_in_use(&self) -> bool {
        let (_, _, unread) = self.sessions.sizes();
        !(self.queue.is_empty() && self.confirmations.is_empty() && self.ties.is_empty()) || unread > 0
    }

    /// This server's role has changed, so pending work belongs to another server.
    pub fn forget_work(&mut self) {
        self.forget_changes();
        self.looks = Looks::default();
        self.sweep = Sweep::default();
        self.searched.extend(self.searches.drain(..).map(|(_, search)| search));
        let waiters = (!self.queue.is_empty()).then(|| (WaiterId(0), self.queue.next_id()));
        self.undecided = Undecided { waiters, confirmations: self.confirmations.retire() };
        self.ties.retire_all();
    }
}
