//! A lock that is taken while another one is held.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use holdfast_core::Wait;

use crate::error::Error;
use crate::guard::Guard;
use crate::locks::Lock;

/// A lock that was taken while another one was held ([`Guard::acquire`]), until this is dropped or the lock is lost.
///
/// The other lock's guard is borrowed until then. So that lock can't be released while its holder waits for this one,
/// and its actor can't wait twice: every cycle of waits that the server finds is a real one.
#[must_use = "a lock is released when its guard is dropped"]
#[derive(Debug)]
pub struct Inner<'g> {
    guard: Guard,
    is_reentry: bool,
    outer: PhantomData<&'g mut Guard>,
}

impl Guard {
    /// Acquires another lock while this one is held: none if it was not granted at once, or in the time that [`Lock::wait`]
    /// allows. The server knows that one actor holds this one and waits for the other, so two tasks that take two locks in opposite
    /// order don't wait forever.
    ///
    /// **Re-entry**: a lock that this guard holds already, or an enclosing one, is granted at once with the same fence, and released
    /// by the guard that took it first. (A permit of a semaphore that is held does not count as another permit.)
    ///
    /// # Errors
    ///
    /// As for [`Lock::acquire`]; [`Error::Deadlock`] names the cycle.
    pub async fn acquire(&mut self, lock: &Lock) -> Result<Option<Inner<'_>>, Error> {
        Inner::acquire_within(self, lock, lock.waits_for()).await
    }

    /// The same without waiting.
    ///
    /// # Errors
    ///
    /// As for [`acquire`](Self::acquire).
    pub async fn try_acquire(&mut self, lock: &Lock) -> Result<Option<Inner<'_>>, Error> {
        Inner::acquire_within(self, lock, Wait::No).await
    }
}

impl<'g> Inner<'g> {
    /// As [`Guard::acquire`], while this one is held as well.
    ///
    /// # Errors
    ///
    /// As for [`Guard::acquire`].
    pub async fn acquire(&mut self, lock: &Lock) -> Result<Option<Inner<'_>>, Error> {
        Inner::acquire_within(&self.guard, lock, lock.waits_for()).await
    }

    /// The same without waiting.
    ///
    /// # Errors
    ///
    /// As for [`Guard::acquire`].
    pub async fn try_acquire(&mut self, lock: &Lock) -> Result<Option<Inner<'_>>, Error> {
        Inner::acquire_within(&self.guard, lock, Wait::No).await
    }

    /// Releases it; a re-entry releases nothing.
    ///
    /// # Errors
    ///
    /// As for [`Guard::release`].
    pub async fn release(self) -> Result<(), Error> {
        if self.is_reentry { self.guard.hold.check_loss() } else { self.guard.release().await }
    }

    async fn acquire_within(outer: &Guard, lock: &Lock, wait: Wait) -> Result<Option<Inner<'g>>, Error> {
        lock.check()?;
        let around: Vec<_> = outer.around.iter().chain([&outer.hold]).cloned().collect();
        let has_it = around.iter().find(|hold| lock.is_satisfied_by(hold)).map(Arc::clone);
        let is_reentry = has_it.is_some();
        let hold = match has_it {
            Some(hold) => {
                hold.check_loss()?;
                hold
            }
            None => match lock.acquire_within(&outer.hold, wait).await? {
                Some(guard) => guard.hold,
                None => return Ok(None),
            },
        };
        Ok(Some(Inner { guard: Guard { hold, around }, is_reentry, outer: PhantomData }))
    }
}

impl Deref for Inner<'_> {
    type Target = Guard;

    fn deref(&self) -> &Guard {
        &self.guard
    }
}
