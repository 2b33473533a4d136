//! A lock that a majority has granted.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::ballot::Ballot;
use super::vote::drift;
use crate::clock;
use crate::error::{Error, Why};
use crate::names::{Keys, Owner};

/// A lock that is held on a majority of servers, until this is dropped or so few of them have it that they are no
/// majority.
///
/// Dropping it gives it back everywhere in the background, without waiting.
#[must_use = "a lock is given back when its guard is dropped"]
pub struct RedGuard {
    ballot: Ballot,
    /// Lost once is lost for ever.
    lost: OnceLock<Why>,
}

impl RedGuard {
    pub(crate) fn new(ballot: Ballot) -> Self {
        Self { ballot, lost: OnceLock::new() }
    }

    /// The fencing token: greater than that of every earlier holder of this lock, on whichever majority.
    pub fn fence(&self) -> u64 {
        self.ballot.fence()
    }

    /// What is held.
    pub fn keys(&self) -> &Keys {
        self.ballot.keys()
    }

    /// In whose name, the same at all servers: fresh for each acquisition.
    pub fn owner(&self) -> &Owner {
        self.ballot.owner()
    }

    /// Until when nobody else can have it, whatever happens to servers and connections that keep what they granted. None:
    /// it is lost. Where the servers renew, it moves on.
    pub fn valid_until(&self) -> Option<Instant> {
        match self.why_lost() {
            Some(_) => None,
            None => self.ballot.valid_until(),
        }
    }

    /// Whether it is held still, as far as this process can know without asking: false is certain.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`].
    pub fn check(&self) -> Result<(), Error> {
        match self.why_lost() {
            Some(why) => Err(self.loss(why)),
            None => Ok(()),
        }
    }

    /// Waits until it is lost.
    pub async fn lost(&self) -> Why {
        loop {
            if let Some(why) = self.why_lost() {
                return why;
            }
            self.ballot.changes().wait(self.ballot.valid_until(), || self.why_lost().is_some()).await;
        }
    }

    /// Runs this for as long as the lock is held: it is dropped at its next pause when the lock is lost.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], and then the future did not run to its end.
    pub async fn while_held<F: Future>(&self, future: F) -> Result<F::Output, Error> {
        tokio::select! {
            // One that is lost already does not begin.
            biased;
            why = self.lost() => Err(self.loss(why)),
            output = future => Ok(output),
        }
    }

    /// Begins the lease anew, with this length, at a majority at least. One that the servers keep alive is kept alive with
    /// it from now on.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], [`Error::NotHeld`] or [`Error::Connection`] if there was no majority for it: then the old lease runs
    /// on.
    pub async fn renew(&self, lease: Duration) -> Result<(), Error> {
        self.check()?;
        if lease <= drift(lease) {
            let message = format!("{}: a lease is longer than what clocks may differ by meanwhile", self.keys());
            return Err(Error::Invalid { message });
        }
        let renewed = self.ballot.renew(clock::millis(lease)).await;
        self.check()?;
        renewed
    }

    /// Gives it back everywhere. Servers that do not answer get it back in the background.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if it was not held to the end; [`Error::NotHeld`] if a majority does not have it and does not say
    /// why; [`Error::Connection`] if too few answered to know.
    pub async fn release(self) -> Result<(), Error> {
        self.check()?;
        self.ballot.release().await
    }

    fn why_lost(&self) -> Option<Why> {
        if let Some(why) = self.lost.get() {
            return Some(*why);
        }
        if self.ballot.valid_until().is_some_and(|end| Instant::now() < end) {
            return None;
        }
        Some(*self.lost.get_or_init(|| self.ballot.why_lost()))
    }

    fn loss(&self, why: Why) -> Error {
        Error::Lost { keys: self.keys().clone(), owner: self.owner().clone(), why }
    }
}

impl std::fmt::Debug for RedGuard {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} held by {} under {}", self.keys(), self.owner(), self.fence())
    }
}
