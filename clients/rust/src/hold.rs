//! One acquisition, from the request to the end of the hold.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use holdfast_core::{Id, Input, Limit, LossReason, Millis, Outcome};

use crate::client::{Acquisition, Answer, Client, LockRequest, PATIENT, failed, forget};
use crate::clock;
use crate::error::Error;
use crate::line::CachedHold;
use crate::names::{Keys, Owner};
use crate::seen::HoldStatus;
use crate::shared::HoldRecord;
use crate::turn::QueueHead;

/// The state of a hold, as far as this process knows it without asking the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Held(Millis),
    /// Its lease may be over, unless the server has renewed it.
    Uncertain,
    Lost(LossReason),
}

/// One acquisition and its hold. Dropping it withdraws or releases it in the background, at any stage.
pub(crate) struct Hold {
    pub(crate) client: Arc<Client>,
    id: Id,
    pub(crate) keys: Keys,
    pub(crate) owner: Owner,
    pub(crate) limit: Limit,
    is_watched: bool,
    status: Arc<HoldStatus>,
    /// Held by the task that renews it; others wait.
    renewing: tokio::sync::Mutex<()>,
    /// The place at the head of the local queue, if it is a cached lock. When this use ends, the next one begins, or the lock stays cached.
    head: Option<QueueHead>,
}

impl Hold {
    /// Requests the lock. The answer says whether it was granted.
    pub(crate) async fn acquire(
        client: &Arc<Client>,
        request: LockRequest,
        status: Arc<HoldStatus>,
    ) -> Result<(Self, Answer), Error> {
        let (keys, limit, is_watched) = (request.keys.clone(), request.terms.limit, request.terms.watchdog);
        let (asked, line) = (Instant::now(), request.line.clone());
        let record = HoldRecord { keys: keys.clone(), asked, status: status.clone(), line };
        let Acquisition { id, owner, answer } = client.acquire(request, record).await?;
        let client = client.clone();
        let renewing = tokio::sync::Mutex::default();
        Ok((Self { client, id, keys, owner, limit, is_watched, status, renewing, head: None }, answer))
    }

    /// Another use of a cached hold. An error if there is none: the task at the head has to request one.
    pub(crate) fn again(client: &Arc<Client>, head: QueueHead) -> Result<Self, QueueHead> {
        let Some(CachedHold { id, owner, status }) = head.kept.clone() else { return Err(head) };
        let (client, keys, terms) = (client.clone(), head.line.keys.clone(), &head.line.terms);
        let (limit, is_watched) = (terms.limit, terms.watchdog);
        let renewing = tokio::sync::Mutex::default();
        Ok(Self { client, id, keys, owner, limit, is_watched, status, renewing, head: Some(head) })
    }

    /// Lets a hold that was granted stay cached when this use ends.
    pub(crate) fn keep(&mut self, mut head: QueueHead) {
        head.kept = Some(CachedHold { id: self.id, owner: self.owner.clone(), status: self.status.clone() });
        self.head = Some(head);
    }

    /// The token of the hold.
    pub(crate) fn token(&self) -> u64 {
        self.status.token.load(Ordering::Relaxed)
    }

    /// Why it was lost, if that is known.
    pub(crate) fn why_lost(&self) -> Option<LossReason> {
        self.status.lost.get().copied()
    }

    pub(crate) fn standing(&self) -> Standing {
        match self.look() {
            // The server does not renew the hold, so the core decides this check without a reply.
            Standing::Uncertain if !self.is_watched => {
                drop(self.client.ask(self.id, |call| Input::Check { call, hold: self.id, within: PATIENT }));
                self.look()
            }
            standing => standing,
        }
    }

    fn look(&self) -> Standing {
        let state = self.client.shared().state();
        if let Some(why) = self.why_lost() {
            return Standing::Lost(why);
        }
        let held = state.holds.get(&self.id).and_then(|it| state.nodes.get(it.node)?.core.held_until(self.id));
        match held.filter(|until| clock::now() < *until) {
            Some(until) => Standing::Held(until),
            None => Standing::Uncertain,
        }
    }

    /// Until when it is certainly held, and the lease that counts.
    pub(crate) fn certain(&self) -> Option<(Instant, Duration)> {
        let state = self.client.shared().state();
        let core = &state.nodes.get(state.holds.get(&self.id)?.node)?.core;
        let (until, lease) = (core.held_until(self.id)?, core.lease(self.id)?);
        Some((clock::instant(until), Duration::from_millis(lease)))
    }

    /// Waits until it is lost.
    pub(crate) async fn lost(&self) -> LossReason {
        loop {
            match self.standing() {
                Standing::Lost(why) => return why,
                Standing::Held(until) => {
                    self.status.changes.wait(Some(clock::instant(until)), || self.why_lost().is_some()).await;
                }
                Standing::Uncertain => self.ask().await,
            }
        }
    }

    /// Asks the server whether it is still held. No reply within a quarter of the lease is a loss.
    async fn ask(&self) {
        let lease = self.certain().map_or(Duration::ZERO, |(_, lease)| lease);
        let within = clock::millis(lease / 4).min(PATIENT);
        let mut answer = self.client.ask(self.id, |call| Input::Check { call, hold: self.id, within });
        match answer.outcome().await.outcome {
            Outcome::Held => {}
            Outcome::Lost(why) => self.status.lose(why),
            // It was released, or its client is closed, and no event will come.
            _ => self.status.lose(LossReason::Disconnected),
        }
    }

    /// Fails if it is lost. Asks the server if that is uncertain.
    pub(crate) async fn check(&self) -> Result<(), Error> {
        if self.standing() == Standing::Uncertain {
            self.ask().await;
        }
        self.check_loss()
    }

    /// For how long it is certainly held; 0: it is not.
    pub(crate) fn remaining(&self) -> Duration {
        match self.standing() {
            Standing::Held(until) => Duration::from_millis(until.saturating_sub(clock::now())),
            Standing::Uncertain | Standing::Lost(_) => Duration::ZERO,
        }
    }

    /// The error of a loss.
    pub(crate) fn loss(&self, why: LossReason) -> Error {
        Error::Lost { keys: self.keys.clone(), owner: self.owner.clone(), why }
    }

    /// Fails if the hold is known to be lost.
    pub(crate) fn check_loss(&self) -> Result<(), Error> {
        match self.standing() {
            Standing::Lost(why) => Err(self.loss(why)),
            Standing::Held(_) | Standing::Uncertain => Ok(()),
        }
    }

    /// Restarts the lease, with this length or the current one, and with a token that is at least `fence`.
    pub(crate) async fn renew(&self, lease: Option<Millis>, fence: Option<u64>, within: Millis) -> Result<(), Error> {
        let hold = self.id;
        let _guard = self.renewing.lock().await;
        let mut answer = self.client.ask(hold, |call| Input::Renew { call, hold, lease, fence, within });
        let ended = answer.outcome().await;
        match ended.outcome {
            Outcome::Renewed(token) => {
                self.status.token.store(token, Ordering::Relaxed);
                self.status.changes.notify();
                Ok(())
            }
            Outcome::NotHeld => Err(self.not_held()),
            _ => Err(failed(&self.keys, Some(&self.owner), ended)),
        }
    }

    /// Releases it and waits for the reply. Returns immediately if it is a cached lock whose hold is certain.
    pub(crate) async fn release(&self, within: Millis) -> Result<(), Error> {
        let hold = self.id;
        if let Some(head) = &self.head {
            if matches!(self.standing(), Standing::Held(_)) {
                return Ok(());
            }
            head.leave();
        }
        let mut answer = self.client.ask(hold, |call| Input::Release { call, hold, within });
        let ended = answer.outcome().await;
        match ended.outcome {
            Outcome::Released => Ok(()),
            Outcome::NotHeld => Err(self.not_held()),
            Outcome::Lost(why) => {
                self.status.lose(why);
                Err(self.loss(why))
            }
            _ => Err(failed(&self.keys, Some(&self.owner), ended)),
        }
    }

    fn not_held(&self) -> Error {
        match self.why_lost() {
            Some(why) => self.loss(why),
            None => Error::NotHeld { keys: self.keys.clone(), owner: self.owner.clone() },
        }
    }

    /// Releases it in the background. Never waits, and needs no runtime.
    pub(crate) fn release_in_background(&self) {
        forget(self.client.shared(), self.id);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A cached hold goes to the next task, or stays cached.
        if self.head.is_none() {
            self.release_in_background();
        }
    }
}
