//! A held lock.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::client::PATIENT;
use crate::clock;
use crate::error::{Error, LossReason};
use crate::hold::{Hold, Standing};
use crate::names::{Keys, Owner};

/// A held lock, until this is dropped or the lock is lost.
///
/// Dropping it releases the lock in the background, without waiting. [`release`](Self::release) waits for the reply, and returns an
/// error if the lock was lost before.
#[must_use = "a lock is released when its guard is dropped"]
pub struct Guard {
    pub(crate) hold: Arc<Hold>,
    /// Holds of the same actor that enclose this one.
    pub(crate) around: Vec<Arc<Hold>>,
}

impl Guard {
    pub(crate) fn new(hold: Hold) -> Self {
        Self { hold: Arc::new(hold), around: Vec::new() }
    }

    /// The fencing token: greater than every one that this server gave before, on any key. Storage that refuses a token lower
    /// than the last it saw is safe from a client that works on after it lost the lock.
    pub fn fence(&self) -> u64 {
        self.hold.token()
    }

    /// The keys that are held.
    pub fn keys(&self) -> &Keys {
        &self.hold.keys
    }

    /// The owner: new for each acquisition.
    pub fn owner(&self) -> &Owner {
        &self.hold.owner
    }

    /// Whether no other client can hold the lock, by this process's clock. Sends nothing.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// For how long the lock is certainly held, if it is not renewed again. Zero: it is not.
    pub fn remaining(&self) -> Duration {
        self.hold.remaining()
    }

    /// Whether the lock is still held. The server reports each loss at once, so it is asked only if the lease may have
    /// expired by this process's clock, after a pause for example.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], also if there is no reply within a quarter of the lease.
    pub async fn check(&self) -> Result<(), Error> {
        self.hold.check().await
    }

    /// Waits until the lock is lost.
    pub async fn lost(&self) -> LossReason {
        self.hold.lost().await
    }

    pub(crate) fn is_uncertain(&self) -> bool {
        self.hold.standing() == Standing::Uncertain
    }

    /// Runs this future while the lock is held. The future is dropped at its next await when the lock is lost, and suspended
    /// while the outcome is unknown.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the future did not run to its end.
    pub async fn while_held<F: Future>(&self, future: F) -> Result<F::Output, Error> {
        tokio::select! {
            // A lock that is lost already does not start the future.
            biased;
            why = self.lost() => Err(self.hold.loss(why)),
            output = unless(|| self.is_uncertain(), future) => Ok(output),
        }
    }

    /// Restarts the lease, with this length. A hold that the server renews is renewed with this length from now on.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] or [`Error::NotHeld`]; [`Error::NoReplicas`] if replicas do not confirm. After any failure, the hold
    /// counts until the earlier of the old deadline and the new one.
    pub async fn renew(&self, lease: Duration) -> Result<(), Error> {
        self.hold.check_loss()?;
        if lease.is_zero() {
            return Err(Error::Invalid { message: format!("{}: a lease must be longer than 0", self.keys()) });
        }
        self.hold.renew(Some(clock::millis(lease)), None, PATIENT).await
    }

    /// Asks the server whether the lock is still held, and restarts its lease with the same length.
    pub(crate) async fn restart_lease(&self) -> Result<(), Error> {
        self.hold.check_loss()?;
        self.hold.renew(None, None, PATIENT).await
    }

    /// Releases the lock.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if it was lost before; [`Error::NotHeld`] if the server has no such hold and does not say why;
    /// [`Error::Connection`] if there was no reply: then it is released in the background.
    pub async fn release(self) -> Result<(), Error> {
        // Dropping the guard of a lost lock still releases it: other keys may be held, and a hold that is lost by this
        // process's clock may exist at the server.
        self.hold.check_loss()?;
        self.hold.release(PATIENT).await
    }
}

/// Runs this future, and suspends it while `is_uncertain` returns true. The caller polls it again when that ends.
pub(crate) async fn unless<F: Future>(is_uncertain: impl Fn() -> bool, future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|context| if is_uncertain() { Poll::Pending } else { future.as_mut().poll(context) }).await
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} held by {} under {}", self.keys(), self.owner(), self.fence())
    }
}
