//! A lock that is held.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::claim::Claim;
use crate::error::{Error, Why, refused, refused_in_words};
use crate::names::{Keys, Owner};
use crate::shared::{Said, Shared, Unsaid};
use crate::state::{Renewal, Stage};
use crate::terms::{Lease, Terms};
use crate::wire::{self, Reply};

/// A loss is told on another connection than the reply that shows it: so long it is waited for.
const TOLD_WITHIN: Duration = Duration::from_secs(1);

/// A lock that is held, until this is dropped or the lock is lost.
///
/// Dropping it gives the lock back in the background, without waiting; [`release`](Self::release) waits, and tells
/// whether it was held to the end.
#[must_use = "a lock is given back when its guard is dropped"]
pub struct Guard {
    shared: Arc<Shared>,
    claim: Arc<Claim>,
    given_back: bool,
}

impl Guard {
    pub(crate) fn new(shared: Arc<Shared>, claim: Arc<Claim>) -> Self {
        Self { shared, claim, given_back: false }
    }

    pub(crate) fn claim(&self) -> &Arc<Claim> {
        &self.claim
    }

    /// The fencing token: greater than every one that this server gave before, on any key. Storage that refuses a lower
    /// one than the last it saw is safe from whoever believes to hold a lock still.
    pub fn fence(&self) -> u64 {
        // A guard is made of a grant.
        self.claim.token().unwrap_or_default()
    }

    /// What is held.
    pub fn keys(&self) -> &Keys {
        &self.claim.keys
    }

    /// In whose name: fresh for each acquisition.
    pub fn owner(&self) -> &Owner {
        &self.claim.owner
    }

    /// Whether it is held still, as far as this process can know without asking: false is certain.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`].
    pub fn check(&self) -> Result<(), Error> {
        match self.claim.why_lost(Instant::now()) {
            Some(why) => Err(self.claim.loss(why)),
            None => Ok(()),
        }
    }

    /// Waits until it is lost.
    pub async fn lost(&self) -> Why {
        loop {
            if let Some(why) = self.claim.why_lost(Instant::now()) {
                return why;
            }
            let lost = || matches!(self.claim.stage(), Stage::Lost(_));
            self.claim.change(self.claim.sure_until(), lost).await;
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
            why = self.lost() => Err(self.claim.loss(why)),
            output = future => Ok(output),
        }
    }

    /// Begins the lease anew, with this length. One that the server keeps alive is kept alive with it from now on.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] or [`Error::NotHeld`]; [`Error::NoReplicas`] if replicas are to confirm and don't, then the old
    /// lease runs on.
    pub async fn renew(&self, lease: Duration) -> Result<(), Error> {
        self.check()?;
        let mut terms = self.claim.terms();
        terms.lease = match terms.lease {
            Lease::Watched(_) => Lease::Watched(Some(lease)),
            Lease::Fixed(_) => Lease::Fixed(lease),
        };
        if lease.is_zero() {
            return Err(Error::Invalid { message: format!("{}: a lease is longer than nothing", self.claim.keys) });
        }
        self.renew_with(&terms).await
    }

    /// Asks the server whether it is still held, and begins its lease anew, as it is.
    pub(crate) async fn begin_anew(&self) -> Result<(), Error> {
        self.check()?;
        self.renew_with(&self.claim.terms()).await
    }

    async fn renew_with(&self, terms: &Terms) -> Result<(), Error> {
        let claim = &self.claim;
        let token = self.fence();
        let said = self.shared.say(&claim.keys, None, |session| {
            if terms.replicas.is_some() {
                claim.renewal_out();
            }
            Some(wire::renew(&claim.keys, &claim.owner, Some(token), terms, session.id()))
        });
        let Said { session, sent, value } = match said.await {
            Ok(said) => said,
            Err(Unsaid::Failed(failure)) => return Err(refused(&failure.server, &claim.keys, failure.error)),
            Err(Unsaid::Pointless) => return self.check(),
        };
        match wire::renewed(value).map_err(|error| refused(session.server(), &claim.keys, error))? {
            Reply::Granted(_) => {}
            Reply::Waiting => self.confirmed(session.server()).await?,
            Reply::NotGranted => return Err(self.why_not_held().await),
        }
        claim.leased_anew(&session, sent, terms.lease);
        self.shared.carry_if_adrift(claim);
        Ok(())
    }

    /// Gives it back.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if it was not held to the end; [`Error::NotHeld`] if the server has none and does not say why;
    /// [`Error::Connection`] if there was no answer: then it is given back in the background.
    pub async fn release(mut self) -> Result<(), Error> {
        // Of several keys the others are held still; and what is lost by this process' clock may be held at the server.
        self.check()?;
        let claim = self.claim.clone();
        let release = wire::release(&claim.keys, &claim.owner, claim.token());
        let said = self.shared.say(&claim.keys, None, |_| Some(release.clone())).await;
        let Said { session, value, .. } = match said {
            Ok(said) => said,
            Err(Unsaid::Failed(failure)) => return Err(refused(&failure.server, &claim.keys, failure.error)),
            Err(Unsaid::Pointless) => return Ok(()),
        };
        if !wire::released(value).map_err(|error| refused(session.server(), &claim.keys, error))? {
            return Err(self.why_not_held().await);
        }
        if claim.open().is_empty() {
            claim.give_up();
            self.shared.forget(&claim);
            self.given_back = true;
        }
        Ok(())
    }

    /// The server does not have it. Why, it tells the session.
    async fn why_not_held(&self) -> Error {
        let claim = &self.claim;
        let end = Instant::now() + TOLD_WITHIN;
        loop {
            if let Some(why) = claim.why_lost(Instant::now()) {
                return claim.loss(why);
            }
            if end <= Instant::now() {
                return Error::NotHeld { keys: claim.keys.clone(), owner: claim.owner.clone() };
            }
            claim.change(Some(end), || matches!(claim.stage(), Stage::Lost(_))).await;
        }
    }

    /// Replicas confirm a renewal.
    async fn confirmed(&self, server: &str) -> Result<(), Error> {
        let claim = &self.claim;
        loop {
            self.check()?;
            match claim.renewal() {
                Some(Renewal::Refused(words)) => return Err(refused_in_words(server, &claim.keys, words)),
                Some(Renewal::Out) => {}
                Some(Renewal::Confirmed) | None => return Ok(()),
            }
            claim.change(claim.sure_until(), || !matches!(claim.renewal(), Some(Renewal::Out))).await;
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.given_back {
            self.shared.give_back_soon(self.claim.clone());
        }
    }
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} held by {} under {}", self.keys(), self.owner(), self.fence())
    }
}
