//! The head of the local queue of a cached lock: how a task reaches it, and how it passes the hold on.

use std::sync::Arc;

use holdfast_core::{Id, Millis};
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use crate::client::{Client, forget};
use crate::driver::drive;
use crate::line::{CachedHold, Head, Next, QueueKey, Waiting};
use crate::terms::Deadline;

/// The caching options of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheOptions {
    /// How long it stays cached while unused.
    pub(crate) idle: Millis,
    /// The maximum number of uses in a row, once another client waits for the lock.
    pub(crate) most: u32,
}

/// The position at the head of a queue. Dropping it passes the position to the next task.
pub(crate) struct QueueHead {
    client: Arc<Client>,
    pub(crate) line: Arc<QueueKey>,
    /// The number of the hold, or of the one to request.
    pub(crate) id: Id,
    idle: Millis,
    /// The hold to use or to cache, once there is one.
    pub(crate) kept: Option<CachedHold>,
}

/// A position behind the head. Dropping it leaves the queue.
struct QueuedTask<'a> {
    client: &'a Arc<Client>,
    line: &'a Arc<QueueKey>,
    number: Id,
    idle: Millis,
    reached: oneshot::Receiver<Next>,
}

impl Client {
    /// Waits until this task is at the head. None: its deadline passes first.
    pub(crate) async fn wait_for_head(
        self: &Arc<Self>,
        line: Arc<QueueKey>,
        keep: CacheOptions,
        deadline: Deadline,
    ) -> Option<QueueHead> {
        let next = match self.join(&line, keep, deadline != Deadline::Past) {
            Ok(next) => next,
            Err(None) => return None,
            Err(Some(mut queued)) => {
                let reached = &mut queued.reached;
                match deadline {
                    Deadline::At(end) => timeout_at(end.into(), reached).await.ok()?.ok()?,
                    Deadline::Past | Deadline::Never => reached.await.ok()?,
                }
            }
        };
        let Next { id, kept } = next;
        Some(QueueHead { client: self.clone(), line, id, idle: keep.idle, kept })
    }

    /// Returns the next action if no task is at the head. Otherwise, returns a position behind the other tasks, or none
    /// if this task does not wait.
    fn join<'a>(
        self: &'a Arc<Self>,
        line: &'a Arc<QueueKey>,
        CacheOptions { idle, most }: CacheOptions,
        waits: bool,
    ) -> Result<Next, Option<QueuedTask<'a>>> {
        let shared = self.shared();
        let mut state = shared.state();
        let kept = match state.lines.head(line) {
            None => None,
            Some(Head::Idle(kept)) => Some(kept.clone()),
            Some(_) if !waits => return Err(None),
            Some(_) => {
                let (number, (sender, reached)) = (state.number(), oneshot::channel());
                state.lines.wait(line, Waiting { number, most, reached: sender });
                return Err(Some(QueuedTask { client: self, line, number, idle, reached }));
            }
        };
        let next = shared.begin_use(&mut state, line, kept, most);
        drop(state);
        drive(shared);
        Ok(next)
    }
}

impl QueueHead {
    /// Passes the head to the next task, before the hold is released.
    pub(crate) fn leave(&self) {
        let shared = self.client.shared();
        shared.leave_queue(&mut shared.state(), &self.line, self.id);
    }
}

impl Drop for QueueHead {
    fn drop(&mut self) {
        let shared = self.client.shared();
        let mut state = shared.state();
        if state.lines.is_at_head(&self.line, self.id) {
            shared.finish_use(&mut state, &self.line, self.kept.take(), self.idle);
            drop(state);
            drive(shared);
        } else {
            // The hold was lost, or is being released, and another task is at the head, or none.
            drop(state);
            forget(shared, self.id);
        }
    }
}

impl Drop for QueuedTask<'_> {
    fn drop(&mut self) {
        let shared = self.client.shared();
        let mut state = shared.state();
        state.lines.leave(self.line, self.number);
        // The task reached the head while it was being dropped.
        if let Ok(Next { id, kept }) = self.reached.try_recv()
            && state.lines.is_at_head(self.line, id)
        {
            shared.finish_use(&mut state, self.line, kept, self.idle);
        }
        drop(state);
        drive(shared);
    }
}
