//! What is to be undone if a grant or a renewal does not come about after all.

use super::Tie;
use crate::lock::{Deadline, Hold, LockKey, Millis, Owner, Token};
use std::rc::Rc;

/// The way back from a grant or a renewal: what it changed, lock by lock.
#[derive(Clone, Debug)]
pub struct Undo {
    /// Of the locks, when it was made.
    pub db: i32,
    /// Whose hold it is.
    pub owner: Owner,
    /// One for each lock.
    pub steps: Vec<Step>,
}

/// What was done to one lock.
#[derive(Clone, Debug)]
pub struct Step {
    /// The lock's key.
    pub name: Rc<[u8]>,
    /// What the owner had.
    pub before: Option<Hold>,
    /// How that was tied.
    pub tie_before: Option<Tie>,
    /// What the owner has now.
    pub given: Hold,
}

impl Undo {
    /// It came about, under this token.
    pub fn under(mut self, token: Token) -> Self {
        for step in &mut self.steps {
            step.given.token = Some(token);
        }
        self
    }

    /// It came about for those locks that have a token here, each under its own.
    pub fn under_each<'a>(mut self, tokens: impl Fn(&[u8]) -> Option<Token> + 'a) -> Self {
        self.steps.retain_mut(|step| {
            step.given.token = tokens(&step.name);
            step.given.token.is_some()
        });
        self
    }

    /// `earlier`, on which this was built, has been taken back.
    ///
    /// An example: a hold of 1 until 100; a re-entry (`earlier`: 2 until 200) and another one (`self`: 3 until 300),
    /// neither of them confirmed. When `earlier` is taken back the hold is 2 until 300, and taking `self` back must
    /// then lead to 1 until 100: so `before` becomes 1 until 100 and `given` 2 until 300.
    pub fn rebase(&mut self, earlier: &Self) {
        if (self.db, &self.owner) != (earlier.db, &earlier.owner) {
            return;
        }
        for step in &mut self.steps {
            let Some(gone) = earlier.steps.iter().find(|gone| gone.name == step.name) else { continue };
            let (Some(before), Some(first)) = (&mut step.before, &gone.before) else { continue };
            if before.deadline == gone.given.deadline {
                before.deadline = first.deadline;
            }
            let added = gone.given.holds.saturating_sub(first.holds);
            before.holds = before.holds.saturating_sub(added);
            step.given.holds = step.given.holds.saturating_sub(added);
        }
    }

    /// The earliest deadline from before, if there was one: the one that replicas know for certain.
    pub fn earlier_deadline(&self) -> Option<Millis> {
        let before = self.steps.iter().filter_map(|step| step.before.map(|before| before.deadline));
        before.filter_map(|deadline| if let Deadline::At(at) = deadline { Some(at) } else { None }).min()
    }

    /// The locks.
    pub fn keys(&self) -> impl Iterator<Item = LockKey> {
        self.steps.iter().map(|step| LockKey { db: self.db, name: step.name.clone() })
    }
}
