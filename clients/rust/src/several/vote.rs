//! One acquisition at one server: the request, the grant, the confirmation of the fence, the release.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use holdfast_core::{Bytes, Id, Millis, Outcome, Terms};

use crate::changes::Changes;
use crate::client::{Answer, Client, LockRequest, failed};
use crate::clock;
use crate::error::{Error, LossReason};
use crate::hold::Hold;
use crate::names::{Keys, Owner};
use crate::place::late;
use crate::seen::HoldStatus;
use crate::shared::CallResult;
use crate::terms::Deadline;

/// A vote is certain for this much less than its hold, because of rounding. The core has already subtracted 1 % for
/// clocks of different speeds.
pub(crate) const DRIFT: Duration = Duration::from_millis(2);

/// The data that all votes of an acquisition share.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) keys: Keys,
    /// The owner is `by` and this number, at all servers.
    pub(crate) by: Bytes,
    pub(crate) number: Id,
    pub(crate) owner: Owner,
    pub(crate) terms: Terms,
    pub(crate) server_timeout: Duration,
    pub(crate) changes: Changes,
    /// The greatest token of the majority, once there is one.
    pub(crate) fence: OnceLock<u64>,
}

/// One acquisition at one server.
pub(crate) struct Vote {
    client: Arc<Client>,
    common: Arc<Common>,
    deadline: Deadline,
    hold: OnceLock<Hold>,
    stage: Mutex<Stage>,
}

/// The state of a vote.
#[derive(Clone, Debug)]
enum Stage {
    Asking,
    Granted,
    /// Not granted in time.
    NotGranted,
    /// Granted, and the server has confirmed the fence.
    Confirmed,
    Failed(Error),
}

impl Vote {
    pub(crate) fn new(client: Arc<Client>, common: Arc<Common>, deadline: Deadline) -> Self {
        Self { client, common, deadline, hold: OnceLock::new(), stage: Mutex::new(Stage::Asking) }
    }

    /// Requests the lock, waits for the grant, and sends the fence when there is one. Stores the outcome in the vote,
    /// and notifies the tasks that wait for a change.
    pub(crate) async fn cast(&self) {
        if let Err(error) = self.try_cast().await {
            let error = self.mark_suspect(error);
            self.end(Stage::Failed(error));
            // A failed vote does not count any more.
            self.release_in_background();
        }
    }

    async fn try_cast(&self) -> Result<(), Error> {
        let Common { keys, by, number, terms, changes, server_timeout, fence, .. } = &*self.common;
        let wait = self.deadline.left(Instant::now());
        let (by, keys, terms) = (by.clone(), keys.clone(), terms.clone());
        let request = LockRequest { number: Some(*number), by, keys, terms, wait, line: None };
        let status = Arc::new(HoldStatus { changes: changes.clone(), ..HoldStatus::default() });
        let asked = tokio::time::timeout(*server_timeout, Hold::acquire(&self.client, request, status)).await;
        let (hold, answer) = asked.unwrap_or_else(|_late| Err(self.silent()))?;
        let hold = self.hold.get_or_init(|| hold);
        let ended = self.settled(answer).await?;
        match ended.outcome {
            Outcome::Granted(_) => self.end(Stage::Granted),
            Outcome::NotGranted => {
                self.end(Stage::NotGranted);
                return Ok(());
            }
            _ => return Err(failed(&self.common.keys, Some(&hold.owner), ended)),
        }
        changes.wait(None, || fence.get().is_some()).await;
        hold.renew(None, fence.get().copied(), clock::millis(*server_timeout)).await?;
        self.end(Stage::Confirmed);
        Ok(())
    }

    /// Waits until the server has granted it or not. A server that does not answer is an error.
    async fn settled(&self, mut answer: Answer) -> Result<CallResult, Error> {
        let timeout = self.common.server_timeout;
        let mut outcome = std::pin::pin!(answer.outcome());
        // The first pauses are short, so that a server that refuses connections is left early.
        let mut pause = timeout / 16;
        loop {
            if let Ok(ended) = tokio::time::timeout(pause, &mut outcome).await {
                return Ok(ended);
            }
            pause = (pause * 2).min(timeout / 2);
            // The wait has ended at the server, and the reply that says so is lost.
            if matches!(self.deadline, Deadline::At(end) if end + timeout <= Instant::now()) {
                return Err(self.silent());
            }
            // A server is silent only if it does not answer another request either: this process may have been paused.
            if !self.client.answers(&self.common.keys, timeout / 2).await {
                return Err(self.silent());
            }
        }
    }

    /// Restarts the lease; false: the server does not have the hold.
    pub(crate) async fn renew(&self, lease: Millis) -> Result<bool, Error> {
        let Some(hold) = self.hold.get() else { return Ok(false) };
        self.was_held(hold.renew(Some(lease), None, clock::millis(self.common.server_timeout)).await)
    }

    /// Releases it; false: the server did not have the hold.
    pub(crate) async fn release(&self) -> Result<bool, Error> {
        let Some(hold) = self.hold.get() else { return Ok(false) };
        self.was_held(hold.release(clock::millis(self.common.server_timeout)).await)
    }

    fn was_held(&self, answer: Result<(), Error>) -> Result<bool, Error> {
        match answer {
            Ok(()) => Ok(true),
            Err(Error::NotHeld { .. } | Error::Lost { .. }) => Ok(false),
            Err(error) => Err(self.mark_suspect(error)),
        }
    }

    /// Releases it in the background, at any stage.
    pub(crate) fn release_in_background(&self) {
        self.hold.get().into_iter().for_each(Hold::release_in_background);
    }

    /// The token, if the server has granted it and no loss is known.
    pub(crate) fn granted(&self) -> Option<u64> {
        let is_held = matches!(self.stage(), Stage::Granted | Stage::Confirmed) && self.why_lost().is_none();
        self.hold.get().filter(|_| is_held).map(Hold::token)
    }

    /// Whether it failed, was not granted in time, or was lost.
    pub(crate) fn failed(&self) -> bool {
        matches!(self.stage(), Stage::Failed(_) | Stage::NotGranted) || self.why_lost().is_some()
    }

    /// Why it failed, if not because other clients have the lock.
    pub(crate) fn error(&self) -> Option<Error> {
        match self.stage() {
            Stage::Failed(error) => Some(error),
            _ => None,
        }
    }

    /// Whether the server has not granted it.
    pub(crate) fn is_ungranted(&self) -> bool {
        matches!(self.stage(), Stage::Asking | Stage::NotGranted)
    }

    /// Whether the time to wait was over in the server's queue.
    pub(crate) fn has_timed_out(&self) -> bool {
        matches!(self.stage(), Stage::NotGranted)
    }

    /// Whether it counts for the beginning of the hold: a server that granted after the fence was chosen has a greater
    /// token, and other clients may have held the lock between the two.
    pub(crate) fn counts_at_first(&self) -> bool {
        self.hold.get().map(Hold::token) == self.common.fence.get().copied()
    }

    /// Until when it counts, if it does.
    pub(crate) fn counts_until(&self) -> Option<Instant> {
        if !matches!(self.stage(), Stage::Confirmed) {
            return None;
        }
        self.hold.get()?.certain()?.0.checked_sub(DRIFT)
    }

    /// Why it was lost, if the server reported that.
    pub(crate) fn why_lost(&self) -> Option<LossReason> {
        self.hold.get()?.why_lost()
    }

    /// The server does not answer.
    fn silent(&self) -> Error {
        let server = self.client.shared().name.position(self.common.keys.first()).map(|place| place.server);
        Error::Connection { server: server.unwrap_or_default(), keys: self.common.keys.clone(), source: late() }
    }

    /// Marks a server that gave no reply as suspect. That of a closed client would stay suspect for ever.
    fn mark_suspect(&self, error: Error) -> Error {
        if matches!(error, Error::Connection { .. }) && !self.client.shared().is_closed() {
            self.client.suspect(&self.common.keys, error.clone(), self.common.server_timeout);
        }
        error
    }

    fn end(&self, stage: Stage) {
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner) = stage;
        self.common.changes.notify();
    }

    fn stage(&self) -> Stage {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
