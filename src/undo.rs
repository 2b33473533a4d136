//! The way back from a grant or a renewal that does not come about after all: nobody was there to take it, or too few
//! replicas have it.

use crate::books::{self, Step, Undo};
use crate::holding;
use crate::keyspace::Lock;
use crate::lock::serve::Change;
use crate::lock::{Deadline, Decision, Hold};
use crate::server::clock::Now;
use crate::server::{AsText, Ctx, Text, TextRef, ctx};

/// The way back from what `decisions` are about to do to `locks`.
pub fn before_grant(locks: &[Lock], decisions: &[Decision], owner: TextRef) -> Undo {
    let given = decisions.iter().map(|decision| match decision {
        Decision::Grant(hold, _) | Decision::Reenter(hold) => Some(*hold),
        _ => None,
    });
    before(locks, given, owner)
}

/// The way back from a renewal that is about to set this deadline for those of `locks` that are held.
pub fn before_renewal(locks: &[Lock], owner: TextRef, deadline: Deadline) -> Undo {
    before(locks, locks.iter().map(|lock| lock.own().map(|own| Hold { deadline, ..own })), owner)
}

fn before(locks: &[Lock], given: impl Iterator<Item = Option<Hold>>, owner: TextRef) -> Undo {
    let steps = locks.iter().zip(given).filter_map(|(lock, given)| {
        let (name, before) = (lock.name().bytes(), lock.own());
        let token = before.and_then(|before| before.token);
        let tie_before = books::with(|books| books.ties.of(lock.db(), name, owner.bytes(), token).cloned());
        Some(Step { name: name.into(), before, tie_before, given: given? })
    });
    let steps = steps.collect();
    Undo { db: locks.first().map_or(0, Lock::db), owner: owner.bytes().into(), steps }
}

/// Takes back what was granted or renewed, exactly: the count goes down by what was added, the deadline to what it
/// was. A hold that is no longer the one that was granted stays as it is. Those who wait for the locks are still to be
/// served.
pub fn roll_back(ctx: Ctx, undo: &Undo, now: Now) {
    let owner = Text::new(&undo.owner);
    ctx.in_db(undo.db, |ctx| undo.steps.iter().for_each(|step| roll_back_step(ctx, step, owner.as_text(), now)));
    books::with(|books| {
        undo.keys().for_each(|key| books.agenda.note(key, Change::Freed));
        books.confirmations.rebase(undo);
    });
}

/// An example: `given` is a re-entry that made 1 hold until 100 (`before`) into 2 until 200. If the key still says so,
/// it is 1 until 100 again. If the owner has re-entered once more since, 3 until 300, it is 2 until 300: whoever was
/// promised the longest lease keeps it. If the owner has released one, 1 until 200, nothing of this grant is left but
/// the hold from before, and the whole hold ends.
fn roll_back_step(ctx: Ctx, step: &Step, owner: TextRef, now: Now) {
    let Step { name, before, given, tie_before } = step;
    let name = Text::new(name);
    let Ok(mut lock) = Lock::look(ctx, name.as_text(), owner, now.millis()) else { return };
    let Some(own) = lock.own().filter(|own| own.token == given.token) else { return };
    let added = given.holds.saturating_sub(before.map_or(0, |before| before.holds));
    let holds = own.holds.saturating_sub(added);
    if holds == 0 {
        holding::end(&mut lock, owner);
        return;
    }
    let deadline = match before {
        Some(before) if (own.holds, own.deadline) == (given.holds, given.deadline) => before.deadline,
        _ => own.deadline,
    };
    // The token was told to nobody. (One that another client's hold got here stays: it had none before.)
    let token = before.and_then(|before| before.token).or(own.token);
    lock.update(owner, &own, &Hold { holds, deadline, token });
    books::with(|books| {
        books.ties.untie(lock.db(), lock.name().bytes(), owner.bytes());
        if let Some(tie) = tie_before.as_ref().filter(|tie| ctx::is_connected(tie.client)) {
            books.ties.put_back(tie.clone(), deadline, now.millis());
        }
    });
    holding::wake_for_ties(ctx);
}
