//! The way back from a grant or a renewal that does not come about after all: nobody was there to take it, or too few
//! replicas have it.

use crate::holding::end;
use crate::keyspace::Lock;
use crate::keyspace::effects::Ending;
use crate::lock::{Deadline, Decision, Hold, LockKey, Millis, Owner, Token};
use crate::server::clock::Now;
use crate::server::{AsText, Ctx, Text, TextRef};
use crate::ties::{self, Tie};
use std::rc::Rc;

/// What has to be undone if a grant or a renewal does not come about after all.
#[derive(Clone, Debug)]
pub struct Undo {
    db: i32,
    owner: Owner,
    steps: Vec<Step>,
}

/// What was done to one lock.
#[derive(Clone, Debug)]
struct Step {
    name: Rc<[u8]>,
    before: Option<Hold>,
    tie_before: Option<Tie>,
    given: Hold,
}

impl Undo {
    /// The way back from what `decisions` are about to do to `locks`.
    pub fn before_grant(locks: &[Lock], decisions: &[Decision], owner: TextRef) -> Self {
        let given = decisions.iter().map(|decision| match decision {
            Decision::Grant(hold, _) | Decision::Reenter(hold) => Some(*hold),
            _ => None,
        });
        Self::before(locks, given, owner)
    }

    /// The way back from a renewal that is about to set this deadline for those of `locks` that are held.
    pub fn before_renewal(locks: &[Lock], owner: TextRef, deadline: Deadline) -> Self {
        let given = locks.iter().map(|lock| lock.standing.own.map(|own| Hold { deadline, ..own }));
        Self::before(locks, given, owner)
    }

    fn before(locks: &[Lock], given: impl Iterator<Item = Option<Hold>>, owner: TextRef) -> Self {
        let steps = locks.iter().zip(given).filter_map(|(lock, given)| {
            let (name, before) = (lock.name().bytes(), lock.standing.own);
            let token = before.and_then(|before| before.token);
            let tie_before = ties::of(lock.db(), name, owner.bytes(), token);
            Some(Step { name: name.into(), before, tie_before, given: given? })
        });
        let steps = steps.collect();
        Self { db: locks.first().map_or(0, Lock::db), owner: owner.bytes().into(), steps }
    }

    /// It came about, under this token.
    pub fn under(mut self, token: Token) -> Self {
        for step in &mut self.steps {
            step.given.token = Some(token);
        }
        self
    }

    /// It came about for those of `locks` that have a token here, each under its own.
    pub fn under_each(mut self, locks: &[Lock], tokens: &[Option<Token>]) -> Self {
        self.steps.retain_mut(|step| {
            let mut of_step = locks.iter().zip(tokens).filter(|(lock, _)| lock.name().bytes() == &*step.name);
            step.given.token = of_step.next().and_then(|(_, token)| *token);
            step.given.token.is_some()
        });
        self
    }

    /// `earlier`, on which this was built, has been taken back.
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
}

/// Takes back what was granted or renewed, exactly: the count goes down by what was added, the deadline to what it
/// was. A hold that is no longer the one that was granted stays as it is. Returns the locks that changed.
pub fn take_back(ctx: Ctx, undo: &Undo, now: Now) -> Vec<LockKey> {
    let owner = Text::new(&undo.owner);
    ctx.in_db(undo.db, |ctx| {
        let changed = undo.steps.iter().filter(|step| take_back_step(ctx, step, owner.as_text(), now));
        changed.map(|step| LockKey { db: undo.db, name: step.name.clone() }).collect()
    })
}

fn take_back_step(ctx: Ctx, step: &Step, owner: TextRef, now: Now) -> bool {
    let Step { name, before, given, tie_before } = step;
    let name = Text::new(name);
    let Ok(mut lock) = Lock::look(ctx, name.as_text(), owner, now.millis()) else { return false };
    let Some(own) = lock.standing.own.filter(|own| own.token == given.token) else { return false };
    let added = given.holds.saturating_sub(before.map_or(0, |before| before.holds));
    let holds = own.holds.saturating_sub(added);
    if holds == 0 {
        end(&mut lock, owner, Ending::Released);
        return true;
    }
    // Whoever has re-entered since was promised a lease as well: then the longest stays.
    let deadline = match before {
        Some(before) if (own.holds, own.deadline) == (given.holds, given.deadline) => before.deadline,
        _ => own.deadline,
    };
    // The token was told to nobody. (One that another client's hold got here stays: it had none before.)
    let token = before.and_then(|before| before.token).or(own.token);
    lock.update(owner, &own, &Hold { holds, deadline, token });
    ties::put_back(&lock, owner, tie_before.as_ref(), now);
    true
}
