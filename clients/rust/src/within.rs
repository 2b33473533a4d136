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
/// The other one's guard is borrowed until then. So nobody gives that lock back while its holder waits for this one, nor waits
/// twice in its name: what the server finds to be a cycle of waits is one.
#[must_use = "a lock is given back when its guard is dropped"]
#[derive(Debug)]
pub struct Inner<'g> {
    guard: Guard,
    is_reentry: bool,
    outer: PhantomData<&'g mut Guard>,
}

impl Guard {
    /// Asks for another lock while this one is held: none if it was not granted at once, or in the time that [`Lock::wait`]
    /// allows. The server knows that one actor has this one and waits for the other, so those who take two locks in opposite
    /// order don't wait for ever.
    ///
    /// **Re-entry**: a lock that this guard holds already, or one around it, is had at once, under the same fence, and given back
    /// with the guard that it was taken by. (One permit of a semaphore is not another one.)
    ///
    /// # Errors
    ///
    /// As for [`Lock::acquire`]; [`Error::Deadlock`] says who waits for whom.
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
    /// As there.
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

    /// Gives it back; nothing is to be given back of one that was held before.
    ///
    /// # Errors
    ///
    /// As for [`Guard::release`].
    pub async fn release(self) -> Result<(), Error> {
        if self.is_reentry { self.guard.hold.check_loss() } else { self.guard.release().await }
    }

    async fn acquire_within(outer: &Guard, lock: &Lock, wait: Wait) -> Result<Option<Inner<'g>>, Error> {
        let around: Vec<_> = outer.around.iter().chain([&outer.hold]).cloned().collect();
        let has_it = around.iter().find(|hold| lock.is_had_by(hold)).map(Arc::clone);
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
