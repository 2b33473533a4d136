//! One acquisition at one server: asked for, granted, told the fence, given back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::changes::Changes;
use crate::claim::Claim;
use crate::error::{Error, Why, refused};
use crate::names::{Keys, Owner};
use crate::shared::{Said, Shared, Unsaid, late};
use crate::state::Stage;
use crate::terms::{Deadline, Terms};
use crate::wire::{self, Reply};

/// What a clock may gain or lose on another: this part of a lease, and a moment for its rounding.
const DRIFT_PER_LEASE: f64 = 0.01;
const DRIFT: Duration = Duration::from_millis(2);

/// What all votes of an acquisition share.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) keys: Keys,
    pub(crate) owner: Owner,
    pub(crate) terms: Terms,
    pub(crate) server_timeout: Duration,
    pub(crate) changes: Changes,
    /// The greatest token of the majority, once there is one.
    pub(crate) fence: OnceLock<u64>,
}

/// One acquisition at one server.
pub(crate) struct Vote {
    shared: Arc<Shared>,
    common: Arc<Common>,
    claim: Arc<Claim>,
    outcome: Mutex<Outcome>,
    given_back: AtomicBool,
}

/// What came of it.
#[derive(Clone, Debug)]
enum Outcome {
    Pending,
    /// Granted, and it knows the fence. The lease as it was told.
    Confirmed(Duration),
    Failed(Error),
}

/// What its server said when it was to be given back.
pub(crate) enum Returned {
    Held,
    NotHeld,
    Unknown(Error),
}

impl Vote {
    pub(crate) fn new(shared: Arc<Shared>, common: Arc<Common>, deadline: Deadline) -> Self {
        shared.missed_within(common.server_timeout);
        let Common { keys, owner, terms, changes, .. } = &*common;
        let claim = shared.claim(owner.clone(), keys.clone(), terms.clone(), deadline, changes.clone());
        let (outcome, given_back) = (Mutex::new(Outcome::Pending), AtomicBool::new(false));
        Self { shared, common, claim, outcome, given_back }
    }

    /// Asks, waits, and tells the fence when there is one. What came of it is in the vote, and told as a change.
    pub(crate) async fn cast(&self) {
        if let Err(error) = self.try_cast().await {
            self.end(Outcome::Failed(error));
            // Nothing of it is waited for any more.
            self.give_back_soon();
        }
    }

    async fn try_cast(&self) -> Result<(), Error> {
        self.in_time(self.shared.ask(&self.claim)).await?;
        if !matches!(self.settled().await?, Stage::Held) {
            return Ok(());
        }
        loop {
            if let Some(fence) = self.common.fence.get() {
                return self.make_known(*fence).await;
            }
            self.common.changes.wait(None, || self.common.fence.get().is_some()).await;
        }
    }

    /// Waits until the server has granted it or not. One that gives no sign of life is an error.
    async fn settled(&self) -> Result<Stage, Error> {
        let (claim, timeout) = (&self.claim, self.common.server_timeout);
        let settled = || !matches!(claim.stage(), Stage::Asking | Stage::Waiting);
        let mut patient_until = Instant::now() + timeout;
        while !settled() {
            let now = Instant::now();
            // An end that the server has not told is an answer that got lost.
            if claim.adrift() || matches!(claim.deadline, Deadline::At(end) if end + timeout <= now) {
                return Err(self.silent());
            }
            let due = patient_until.max(claim.session().map_or(now, |session| session.due()));
            if due <= now {
                // It is a server's silence only if it does not answer a question either: this process may have slept.
                if !self.shared.answers(&claim.keys, timeout).await {
                    return Err(self.silent());
                }
                patient_until = Instant::now() + timeout;
                continue;
            }
            claim.change(Some(due), || settled() || claim.adrift()).await;
        }
        match claim.stage() {
            Stage::Refused(error) => Err(error),
            Stage::Lost(why) => Err(claim.loss(why)),
            stage => Ok(stage),
        }
    }

    async fn make_known(&self, fence: u64) -> Result<(), Error> {
        let Common { keys, owner, terms, .. } = &*self.common;
        let told = self.shared.say(keys, None, |session| {
            self.claim.raising(fence);
            Some(wire::raise(keys, owner, fence, terms, session.id()))
        });
        let Said { session, sent, value } = self.in_time(told).await?;
        match wire::renewed(value).map_err(|error| refused(session.server(), keys, error))? {
            Reply::Granted(token) => {
                self.claim.raised(token);
                self.claim.leased_anew(&session, sent, terms.lease);
                self.shared.carry_if_adrift(&self.claim);
                self.end(Outcome::Confirmed(session.lease(terms.lease)));
                Ok(())
            }
            Reply::NotGranted | Reply::Waiting => Err(self.claim.loss(Why::Expired)),
        }
    }

    /// Begins the lease anew; false: it is not held there.
    pub(crate) async fn renew(&self, lease: Terms) -> Result<bool, Error> {
        let Common { keys, owner, .. } = &*self.common;
        let said = self.shared.say(keys, None, |session| {
            Some(wire::renew(keys, owner, self.claim.certain_token(), &lease, session.id()))
        });
        let Said { session, sent, value } = self.in_time(said).await?;
        match wire::renewed(value).map_err(|error| refused(session.server(), keys, error))? {
            Reply::Granted(_) => {
                self.claim.leased_anew(&session, sent, lease.lease);
                self.shared.carry_if_adrift(&self.claim);
                self.end(Outcome::Confirmed(session.lease(lease.lease)));
                Ok(true)
            }
            Reply::NotGranted | Reply::Waiting => Ok(false),
        }
    }

    /// Gives it back, and says what the server said.
    pub(crate) async fn release(&self) -> Returned {
        let Common { keys, owner, .. } = &*self.common;
        let release = wire::release(keys, owner, self.claim.certain_token());
        let released = match self.in_time(self.shared.say(keys, None, |_| Some(release.clone()))).await {
            Ok(Said { session, value, .. }) => {
                wire::released(value).map_err(|error| refused(session.server(), keys, error))
            }
            Err(error) => Err(error),
        };
        match released {
            Ok(true) => {
                if self.claim.open().is_empty() {
                    self.claim.give_up();
                    self.shared.forget(&self.claim);
                    self.given_back.store(true, Ordering::Relaxed);
                }
                Returned::Held
            }
            Ok(false) => {
                self.told_of_loss().await;
                Returned::NotHeld
            }
            Err(error) => Returned::Unknown(error),
        }
    }

    /// A loss is told on another connection than the reply that shows it.
    async fn told_of_loss(&self) {
        let end = Instant::now() + self.common.server_timeout;
        while self.why_lost().is_none() && Instant::now() < end {
            self.claim.change(Some(end), || self.why_lost().is_some()).await;
        }
    }

    /// Gives it back in the background, whatever came of it.
    pub(crate) fn give_back_soon(&self) {
        if !self.given_back.swap(true, Ordering::Relaxed) {
            self.shared.give_back_soon(self.claim.clone());
        }
    }

    /// The token, if the server has granted it and nothing to the contrary is known.
    pub(crate) fn granted(&self) -> Option<u64> {
        let held = !matches!(self.outcome(), Outcome::Failed(_)) && matches!(self.claim.stage(), Stage::Held);
        self.claim.token().filter(|_| held)
    }

    /// Whether nothing more will come of it.
    pub(crate) fn failed(&self) -> bool {
        let stage = || matches!(self.claim.stage(), Stage::NotGranted | Stage::Refused(_) | Stage::Lost(_));
        self.error().is_some() || stage()
    }

    /// Why it failed, if not because others have the lock.
    pub(crate) fn error(&self) -> Option<Error> {
        match self.outcome() {
            Outcome::Failed(error) => Some(error),
            Outcome::Pending | Outcome::Confirmed(_) => None,
        }
    }

    /// Whether the server has put it into its queue and not granted it.
    pub(crate) fn in_vain(&self) -> bool {
        self.error().is_none() && matches!(self.claim.stage(), Stage::Waiting | Stage::NotGranted)
    }

    /// Whether its time was over in the server's queue.
    pub(crate) fn not_granted(&self) -> bool {
        matches!(self.claim.stage(), Stage::NotGranted)
    }

    /// Whether it counts for the beginning of the hold: a server that granted after the fence was chosen has a greater
    /// token, and others may have held between the two.
    pub(crate) fn counts_at_first(&self) -> bool {
        self.claim.token() == self.common.fence.get().copied()
    }

    /// Until when it counts, if it does.
    pub(crate) fn counts_until(&self) -> Option<Instant> {
        match (self.outcome(), self.claim.stage()) {
            (Outcome::Confirmed(lease), Stage::Held) => self.claim.sure_until()?.checked_sub(drift(lease)),
            _ => None,
        }
    }

    /// Why it was lost, if that was told.
    pub(crate) fn why_lost(&self) -> Option<Why> {
        match self.claim.stage() {
            Stage::Lost(why) => Some(why),
            _ => None,
        }
    }

    /// Waits for an answer for as long as a server may take, and remembers a server that gave none.
    async fn in_time<T>(&self, answer: impl Future<Output = Result<T, Unsaid>>) -> Result<T, Error> {
        let keys = &self.common.keys;
        match tokio::time::timeout(self.common.server_timeout, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(Unsaid::Failed(failure))) => {
                let error = refused(&failure.server, keys, failure.error);
                if let Error::Connection { .. } = error {
                    self.suspect(error.clone());
                }
                Err(error)
            }
            // Given up meanwhile: nobody looks at it any more.
            Ok(Err(Unsaid::Pointless)) => Err(self.unheard()),
            Err(_late) => Err(self.silent()),
        }
    }

    /// The server does not answer.
    fn silent(&self) -> Error {
        let error = self.unheard();
        self.suspect(error.clone());
        error
    }

    fn unheard(&self) -> Error {
        let server = self.shared.name.position(self.common.keys.first()).map(|place| place.server);
        Error::Connection { server: server.unwrap_or_default(), keys: self.common.keys.clone(), source: late() }
    }

    fn suspect(&self, why: Error) {
        self.shared.suspect(&self.common.keys, why, self.common.server_timeout);
    }

    fn end(&self, outcome: Outcome) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = outcome;
        self.common.changes.tell();
    }

    fn outcome(&self) -> Outcome {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What a lease may seem longer to this process than to its server.
pub(crate) fn drift(lease: Duration) -> Duration {
    lease.mul_f64(DRIFT_PER_LEASE) + DRIFT
}
