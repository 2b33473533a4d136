//! One acquisition, from the request to the end of the hold.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use holdfast_core::{Id, Input, Limit, LossReason, Millis, Outcome};

use crate::client::{Acquisition, Answer, Client, LockRequest, PATIENT, failed, forget};
use crate::clock;
use crate::error::Error;
use crate::line::Kept;
use crate::names::{Keys, Owner};
use crate::seen::Seen;
use crate::shared::Becomes;
use crate::turn::Turn;

/// What is known of a hold without asking the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Held(Millis),
    /// Its lease may be over, unless the server has renewed it.
    Uncertain,
    Lost(LossReason),
}

/// One acquisition, and the hold that it became. Dropping it releases it in the background, at any stage.
pub(crate) struct Hold {
    pub(crate) client: Arc<Client>,
    id: Id,
    pub(crate) keys: Keys,
    pub(crate) owner: Owner,
    pub(crate) limit: Limit,
    is_watched: bool,
    seen: Arc<Seen>,
    /// Held by the task that renews it; others wait.
    renewing: tokio::sync::Mutex<()>,
    /// The place at the head of the local queue, if it is a cached lock. When this use ends, the next one begins, or the lock stays cached.
    turn: Option<Turn>,
}

impl Hold {
    /// Requests it. The outcome says whether it is held.
    pub(crate) async fn acquire(
        client: &Arc<Client>,
        wish: LockRequest,
        seen: Arc<Seen>,
    ) -> Result<(Self, Answer), Error> {
        let (keys, limit, is_watched) = (wish.keys.clone(), wish.terms.limit, wish.terms.watchdog);
        let becomes = Becomes { seen: seen.clone(), line: wish.line.clone() };
        let Acquisition { id, owner, answer } = client.acquire(wish, becomes).await?;
        let client = client.clone();
        let renewing = tokio::sync::Mutex::default();
        Ok((Self { client, id, keys, owner, limit, is_watched, seen, renewing, turn: None }, answer))
    }

    /// Another use of a cached hold. An error if there is none: the task at the head has to request one.
    pub(crate) fn again(client: &Arc<Client>, turn: Turn) -> Result<Self, Turn> {
        let Some(Kept { id, owner, seen }) = turn.kept.clone() else { return Err(turn) };
        let (client, keys, terms) = (client.clone(), turn.line.keys.clone(), &turn.line.terms);
        let (limit, is_watched) = (terms.limit, terms.watchdog);
        let renewing = tokio::sync::Mutex::default();
        Ok(Self { client, id, keys, owner, limit, is_watched, seen, renewing, turn: Some(turn) })
    }

    /// It is granted, and stays cached when this use of it ends.
    pub(crate) fn keep(&mut self, mut turn: Turn) {
        turn.kept = Some(Kept { id: self.id, owner: self.owner.clone(), seen: self.seen.clone() });
        self.turn = Some(turn);
    }

    /// The token of the hold.
    pub(crate) fn token(&self) -> u64 {
        self.seen.token.load(Ordering::Relaxed)
    }

    /// Why it was lost, if that is known.
    pub(crate) fn why_lost(&self) -> Option<LossReason> {
        self.seen.lost.get().copied()
    }

    pub(crate) fn standing(&self) -> Standing {
        match self.look() {
            // The server does not renew it: no reply is needed to know that.
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
                    self.seen.changes.wait(Some(clock::instant(until)), || self.why_lost().is_some()).await;
                }
                Standing::Uncertain => self.ask().await,
            }
        }
    }

    /// Asks the server whether it is still held. No reply within a moment is a loss.
    async fn ask(&self) {
        let lease = self.certain().map_or(Duration::ZERO, |(_, lease)| lease);
        let within = clock::millis(lease / 4).min(PATIENT);
        let mut answer = self.client.ask(self.id, |call| Input::Check { call, hold: self.id, within });
        if answer.outcome().await.outcome != Outcome::Held {
            // It was released, or its client is closed, and no event will come.
            self.seen.lose(LossReason::Disconnected);
        }
    }

    /// The error that says so.
    pub(crate) fn loss(&self, why: LossReason) -> Error {
        Error::Lost { keys: self.keys.clone(), owner: self.owner.clone(), why }
    }

    /// Whether it is known to be lost.
    pub(crate) fn check_loss(&self) -> Result<(), Error> {
        match self.standing() {
            Standing::Lost(why) => Err(self.loss(why)),
            Standing::Held(_) | Standing::Uncertain => Ok(()),
        }
    }

    /// Restarts the lease, with this length or the present one, and with a token that is at least `fence`.
    pub(crate) async fn renew(&self, lease: Option<Millis>, fence: Option<u64>, within: Millis) -> Result<(), Error> {
        let hold = self.id;
        let _turn = self.renewing.lock().await;
        let mut answer = self.client.ask(hold, |call| Input::Renew { call, hold, lease, fence, within });
        let ended = answer.outcome().await;
        match ended.outcome {
            Outcome::Renewed(token) => {
                self.seen.token.store(token, Ordering::Relaxed);
                self.seen.changes.tell();
                Ok(())
            }
            Outcome::NotHeld => Err(self.not_held()),
            _ => Err(failed(&self.keys, Some(&self.owner), ended)),
        }
    }

    /// Releases it and waits for the reply; at once, if it is cached and was certainly held to the end.
    pub(crate) async fn release(&self, within: Millis) -> Result<(), Error> {
        let hold = self.id;
        if let Some(turn) = &self.turn {
            if matches!(self.standing(), Standing::Held(_)) {
                return Ok(());
            }
            turn.leave();
        }
        let mut answer = self.client.ask(hold, |call| Input::Release { call, hold, within });
        let ended = answer.outcome().await;
        match ended.outcome {
            Outcome::Released => Ok(()),
            Outcome::NotHeld => Err(self.not_held()),
            Outcome::Lost(why) => {
                self.seen.lose(why);
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
    pub(crate) fn give_back(&self) {
        forget(self.client.shared(), self.id);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A cached hold goes to the next task, or stays cached.
        if self.turn.is_none() {
            self.give_back();
        }
    }
}
