//! A lock that is held.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::client::PATIENT;
use crate::clock;
use crate::error::{Error, Why};
use crate::hold::{Hold, Standing};
use crate::names::{Keys, Owner};

/// A lock that is held, until this is dropped or the lock is lost.
///
/// Dropping it gives the lock back in the background, without waiting; [`release`](Self::release) waits, and tells
/// whether it was held to the end.
#[must_use = "a lock is given back when its guard is dropped"]
pub struct Guard {
    pub(crate) hold: Arc<Hold>,
    /// What the same actor held already when this was taken.
    pub(crate) around: Vec<Arc<Hold>>,
}

impl Guard {
    pub(crate) fn new(hold: Hold) -> Self {
        Self { hold: Arc::new(hold), around: Vec::new() }
    }

    /// The fencing token: greater than every one that this server gave before, on any key. Storage that refuses a lower
    /// one than the last it saw is safe from whoever believes to hold a lock still.
    pub fn fence(&self) -> u64 {
        self.hold.token()
    }

    /// What is held.
    pub fn keys(&self) -> &Keys {
        &self.hold.keys
    }

    /// In whose name: fresh for each acquisition.
    pub fn owner(&self) -> &Owner {
        &self.hold.owner
    }

    /// Whether it is held still, as far as this process can know without asking: ok and lost are certain.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], or [`Error::InDoubt`] if its lease could have run out by now and nobody has said yet whether it has:
    /// the server may have renewed it while this process stood still.
    pub fn check(&self) -> Result<(), Error> {
        match self.hold.standing() {
            Standing::Held(_) => Ok(()),
            Standing::InDoubt => Err(Error::InDoubt { keys: self.keys().clone(), owner: self.owner().clone() }),
            Standing::Lost(why) => Err(self.hold.loss(why)),
        }
    }

    /// Waits until it is lost.
    pub async fn lost(&self) -> Why {
        self.hold.lost().await
    }

    pub(crate) fn in_doubt(&self) -> bool {
        self.hold.standing() == Standing::InDoubt
    }

    /// Runs this for as long as the lock is held: it is dropped at its next pause when the lock is lost, and stands still
    /// while that is in doubt.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], and then the future did not run to its end.
    pub async fn while_held<F: Future>(&self, future: F) -> Result<F::Output, Error> {
        tokio::select! {
            // One that is lost already does not begin.
            biased;
            why = self.lost() => Err(self.hold.loss(why)),
            output = unless(|| self.in_doubt(), future) => Ok(output),
        }
    }

    /// Begins the lease anew, with this length. One that the server keeps alive is kept alive with it from now on.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] or [`Error::NotHeld`]; [`Error::NoReplicas`] if replicas are to confirm and don't. Whatever
    /// fails, of the old lease and the new one that counts from then on which ends earlier.
    pub async fn renew(&self, lease: Duration) -> Result<(), Error> {
        self.hold.check_loss()?;
        if lease.is_zero() {
            return Err(Error::Invalid { message: format!("{}: a lease is longer than nothing", self.keys()) });
        }
        self.hold.renew(Some(clock::millis(lease)), None, PATIENT).await
    }

    /// Asks the server whether it is still held, and begins its lease anew, as it is.
    pub(crate) async fn begin_anew(&self) -> Result<(), Error> {
        self.hold.check_loss()?;
        self.hold.renew(None, None, PATIENT).await
    }

    /// Gives it back.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if it was not held to the end; [`Error::NotHeld`] if the server has none and does not say why;
    /// [`Error::Connection`] if there was no answer: then it is given back in the background.
    pub async fn release(self) -> Result<(), Error> {
        // Of several keys the others are held still; and what is lost by this process' clock may be held at the server.
        self.hold.check_loss()?;
        self.hold.release(PATIENT).await
    }
}

/// Runs this, and lets it stand still while that is so. Whoever polls it is woken when it is not any more.
pub(crate) async fn unless<F: Future>(doubt: impl Fn() -> bool, future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|context| if doubt() { Poll::Pending } else { future.as_mut().poll(context) }).await
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} held by {} under {}", self.keys(), self.owner(), self.fence())
    }
}
