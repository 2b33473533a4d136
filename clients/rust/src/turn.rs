//! The head of the local queue of a cached lock: how a task gets there, and what it leaves to the next one.

use std::sync::Arc;

use holdfast_core::{Id, Millis};
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use crate::client::{Client, driven, forget};
use crate::driver::drive;
use crate::line::{Head, Kept, Next, Same, Waiting};
use crate::terms::Deadline;

/// How a lock is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keep {
    /// How long it stays cached while unused.
    pub(crate) idle: Millis,
    /// How many uses in a row, once another client waits for it.
    pub(crate) most: u32,
}

/// The task at the head of a queue. Dropping it lets the next one in.
pub(crate) struct Turn {
    client: Arc<Client>,
    pub(crate) line: Arc<Same>,
    /// The number of the hold, or of the one that is to be requested.
    pub(crate) id: Id,
    idle: Millis,
    /// The hold that may be used.
    pub(crate) kept: Option<Kept>,
}

/// A place behind others.
struct Behind<'a> {
    client: &'a Arc<Client>,
    line: &'a Arc<Same>,
    number: Id,
    idle: Millis,
    turn: oneshot::Receiver<Next>,
}

impl Client {
    /// Waits until this task is at the head. None: its time is over before.
    pub(crate) async fn turn(self: &Arc<Self>, line: Arc<Same>, keep: Keep, deadline: Deadline) -> Option<Turn> {
        let next = match self.join(&line, keep, deadline != Deadline::Past) {
            Ok(next) => next,
            Err(None) => return None,
            Err(Some(mut behind)) => {
                let turn = driven(self.shared(), &mut behind.turn);
                match deadline {
                    Deadline::At(end) => timeout_at(end.into(), turn).await.ok()?.ok()?,
                    Deadline::Past | Deadline::Never => turn.await.ok()?,
                }
            }
        };
        let Next { id, kept } = next;
        Some(Turn { client: self.clone(), line, id, idle: keep.idle, kept })
    }

    /// What to do, if the queue is empty; else a place behind the others, if the task waits.
    fn join<'a>(
        self: &'a Arc<Self>,
        line: &'a Arc<Same>,
        Keep { idle, most }: Keep,
        waits: bool,
    ) -> Result<Next, Option<Behind<'a>>> {
        let shared = self.shared();
        let mut state = shared.state();
        let kept = match state.lines.head(line) {
            None => None,
            Some(Head::Idle(kept)) => Some(kept.clone()),
            Some(_) if !waits => return Err(None),
            Some(_) => {
                let (number, (sender, turn)) = (state.number(), oneshot::channel());
                state.lines.wait(line, Waiting { number, most, turn: sender });
                return Err(Some(Behind { client: self, line, number, idle, turn }));
            }
        };
        let next = shared.comes_to_head(&mut state, line, kept, most);
        drop(state);
        drive(shared);
        Ok(next)
    }
}

impl Turn {
    /// Those behind do not wait until this hold is released.
    pub(crate) fn leave(&self) {
        let shared = self.client.shared();
        shared.leaves_line(&mut shared.state(), &self.line, self.id);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let shared = self.client.shared();
        let mut state = shared.state();
        if state.lines.is_at_head(&self.line, self.id) {
            shared.is_done(&mut state, &self.line, self.kept.take(), self.idle);
            drop(state);
            drive(shared);
        } else {
            // It was lost, or is being released, and the queue went on without it.
            drop(state);
            forget(shared, self.id);
        }
    }
}

impl Drop for Behind<'_> {
    fn drop(&mut self) {
        let shared = self.client.shared();
        let mut state = shared.state();
        state.lines.go(self.line, self.number);
        // It reached the head at the moment at which it was dropped.
        if let Ok(Next { id, kept }) = self.turn.try_recv()
            && state.lines.is_at_head(self.line, id)
        {
            shared.is_done(&mut state, self.line, kept, self.idle);
        }
        drop(state);
        drive(shared);
    }
}
