//! What has to be rolled back if a grant or a renewal does not take effect after all.

use super::Tie;
use super::ties::Home;
use crate::lock::{Deadline, Hold, LockKey, Millis, Owner, Token};
use std::rc::Rc;

/// How to roll back a grant or a renewal: what it changed, lock by lock.
#[derive(Clone, Debug)]
pub struct Undo {
    /// Later ones have greater numbers.
    pub serial: u64,
    /// The database of the locks, which it follows through `SWAPDB`.
    pub home: Home,
    /// The owner.
    pub owner: Owner,
    /// The connection on whose behalf it was granted or renewed; its tie may go as well.
    pub client: u64,
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
    /// How many holds its answer promises, whatever else is rolled back.
    pub promised: u64,
    /// How many of the holds the owner was told of in another way; these stay.
    pub told: u64,
}

impl Step {
    /// How many of the earlier holds its answer promises as well, besides its own.
    pub fn promised_before(&self) -> u64 {
        promised_before(self.promised, self.before.map_or(0, |before| before.holds), self.given.holds)
    }

    /// How many holds have to be taken back.
    pub fn added(&self) -> u64 {
        self.given.holds.saturating_sub(self.before.map_or(0, |before| before.holds).max(self.told))
    }
}

/// How many of `before` earlier holds are covered by the answer to a request that promises this many and made them
/// `given`.
///
/// Examples: a request for one more hold promises none of the earlier ones; `HOLDS 1` where there was 1 promises that
/// one.
pub fn promised_before(promised: u64, before: u64, given: u64) -> u64 {
    promised.saturating_sub(given.saturating_sub(before))
}

impl Undo {
    /// It took effect, under this token.
    pub fn under(mut self, token: Token) -> Self {
        for step in &mut self.steps {
            step.given.token = Some(token);
        }
        self
    }

    /// It took effect for those locks that have a token here, each under its own.
    pub fn under_each<'a>(mut self, tokens: impl Fn(&[u8]) -> Option<Token> + 'a) -> Self {
        self.steps.retain_mut(|step| {
            step.given.token = tokens(&step.name);
            step.given.token.is_some()
        });
        self
    }

    /// `gone`, on which this may have been built, was rolled back: `taken` of its holds. If that is fewer than it had
    /// added, that is because this one promises the others; so rolling back this one must take those away instead.
    ///
    /// An example: a hold of 1 until 100; a re-entry (`gone`: 2 until 200) and another one (`self`: 3 until 300),
    /// neither of them confirmed. When `gone` is rolled back, the hold is 2 until 300, and rolling back `self` must
    /// then lead to 1 until 100: so `before` becomes 1 until 100 and `given` 2 until 300.
    pub fn rebase(&mut self, gone: &Step, taken: u64) {
        let Some(step) = self.steps.iter_mut().find(|step| step.name == gone.name) else { return };
        let Some(before) = &mut step.before else { return };
        if let Some(first) = gone.before {
            if before.deadline == gone.given.deadline {
                before.deadline = first.deadline;
            }
            if before.token == gone.given.token {
                before.token = first.token;
            }
        }
        before.holds = before.holds.saturating_sub(gone.added());
        step.given.holds = step.given.holds.saturating_sub(taken);
    }

    /// The hold of the lock `name` has another token now: what was given under the first one is found under the second.
    pub fn retoken(&mut self, name: &[u8], (from, to): (Option<Token>, Option<Token>)) {
        for step in self.steps.iter_mut().filter(|step| *step.name == *name && step.given.token == from) {
            step.given.token = to;
        }
    }

    /// Nobody gets an answer to it.
    pub fn without_promise(mut self) -> Self {
        self.steps.iter_mut().for_each(|step| step.promised = 0);
        self
    }

    /// How many holds of the lock `name` its answer promises.
    pub fn promised(&self, name: &[u8]) -> u64 {
        self.steps.iter().find(|step| *step.name == *name).map_or(0, |step| step.promised)
    }

    /// Whether it may have been built on another one.
    pub fn is_re_entry(&self) -> bool {
        self.steps.iter().any(|step| step.before.is_some())
    }

    /// The earliest deadline from before, if there was one: the one that the replicas are sure to have.
    pub fn earlier_deadline(&self) -> Option<Millis> {
        let before = self.steps.iter().filter_map(|step| step.before.map(|before| before.deadline));
        before.filter_map(|deadline| if let Deadline::At(at) = deadline { Some(at) } else { None }).min()
    }

    /// The database of the locks.
    pub fn db(&self) -> i32 {
        self.home.get()
    }

    /// The locks.
    pub fn keys(&self) -> impl Iterator<Item = LockKey> {
        let db = self.db();
        self.steps.iter().map(move |step| LockKey { db, name: step.name.clone() })
    }

    /// The owner has been told in another way that it holds a lock: this many holds stay, or as many as there were.
    ///
    /// An example: a request is granted, its connection breaks before the answer is read, and the same request, sent
    /// over another connection, is found to be a re-entry and answered. Then rolling back the first one takes nothing
    /// away.
    pub fn acknowledge(&mut self, name: &[u8], holds: u64) {
        for step in self.steps.iter_mut().filter(|step| *step.name == *name) {
            step.told = step.told.max(holds).min(step.given.holds);
        }
    }
}
