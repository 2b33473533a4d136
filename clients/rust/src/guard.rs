//! A lock that is held.

use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::claim::{Claim, Standing};
use crate::error::{Error, Why, refused, refused_in_words};
use crate::names::{Keys, Owner};
use crate::requests::SILENT;
use crate::shared::{Said, Shared, Unsaid};
use crate::state::{Renewal, Stage};
use crate::terms::{Lease, Terms};
use crate::wire::{self, Reply};

/// A loss is told on another connection than the reply that shows it: so long it is waited for.
const TOLD_WITHIN: Duration = Duration::from_secs(1);
/// Who is later than this stood still meanwhile.
const ON_TIME: Duration = Duration::from_millis(20);

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

    /// Whether it is held still, as far as this process can know without asking: ok and lost are certain.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], or [`Error::InDoubt`] if its lease could have run out by now and nobody has said yet whether it has:
    /// the server may have renewed it while this process stood still.
    pub fn check(&self) -> Result<(), Error> {
        match self.claim.standing(Instant::now()) {
            Standing::Held => Ok(()),
            Standing::InDoubt => Err(Error::InDoubt { keys: self.claim.keys.clone(), owner: self.claim.owner.clone() }),
            Standing::Lost(why) => Err(self.claim.loss(why)),
        }
    }

    /// Waits until it is lost.
    pub async fn lost(&self) -> Why {
        loop {
            match self.claim.standing(Instant::now()) {
                Standing::Lost(why) => return why,
                Standing::InDoubt => self.ask().await,
                Standing::Held => self.watch().await,
            }
        }
    }

    /// Returns when something changes, or when its lease could have run out. Then it is lost, if this process can say so: if
    /// it was awake all the time, and the server owed it a sign of life.
    async fn watch(&self) {
        let claim = &self.claim;
        let end = claim.sure_until();
        let mut awake = true;
        // The first is a moment before the end, so that what came while the process stood still has been read.
        for moment in [end.and_then(|end| end.checked_sub(ON_TIME * 5)), end] {
            claim.change(moment, || matches!(claim.stage(), Stage::Lost(_))).await;
            let now = Instant::now();
            let Some(late) = moment.and_then(|moment| now.checked_duration_since(moment)) else { return };
            awake &= late < ON_TIME;
        }
        let now = Instant::now();
        if awake && claim.session().is_none_or(|session| session.due() <= now) {
            claim.lapse(now);
        }
    }

    /// Asks the server whether it is held still. No answer in a moment is a loss.
    async fn ask(&self) {
        let within = (self.claim.asked() / 4).min(SILENT);
        if tokio::time::timeout(within, self.shared.ask_whether_held(&self.claim)).await.is_err() {
            self.claim.lapse(Instant::now());
        }
    }

    pub(crate) fn in_doubt(&self) -> bool {
        self.claim.standing(Instant::now()) == Standing::InDoubt
    }

    /// Whether it is known to be lost.
    fn check_loss(&self) -> Result<(), Error> {
        match self.claim.standing(Instant::now()) {
            Standing::Lost(why) => Err(self.claim.loss(why)),
            Standing::Held | Standing::InDoubt => Ok(()),
        }
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
            why = self.lost() => Err(self.claim.loss(why)),
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
        self.check_loss()?;
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
        self.check_loss()?;
        self.renew_with(&self.claim.terms()).await
    }

    async fn renew_with(&self, terms: &Terms) -> Result<(), Error> {
        let began = Instant::now();
        let renewed = self.try_renewing(terms).await;
        if renewed.is_err() {
            // The server may have begun the new lease.
            self.claim.perhaps_leased(began, terms.lease);
        }
        renewed
    }

    async fn try_renewing(&self, terms: &Terms) -> Result<(), Error> {
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
        self.check_loss()?;
        let claim = self.claim.clone();
        let release = wire::release(&claim.keys, &claim.owner, claim.token());
        let said = self.shared.say(&claim.keys, None, |_| Some(release.clone())).await;
        let Said { session, value, .. } = match said {
            Ok(said) => said,
            Err(Unsaid::Failed(failure)) => {
                // Whether it was held to the end nobody can say any more.
                claim.lapse(Instant::now());
                self.check_loss()?;
                return Err(refused(&failure.server, &claim.keys, failure.error));
            }
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
            if let Stage::Lost(why) = claim.stage() {
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

/// Runs this, and lets it stand still while that is so. Whoever polls it is woken when it is not any more.
pub(crate) async fn unless<F: Future>(doubt: impl Fn() -> bool, future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|context| if doubt() { Poll::Pending } else { future.as_mut().poll(context) }).await
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
