//! The way back from a grant or a renewal that does not come about after all: nobody was there to take it, or too few
//! replicas have it.

use crate::books::undo::promised_before;
use crate::books::{self, Step, Undo};
use crate::holding::{self, Grantee};
use crate::keyspace::Lock;
use crate::lock::serve::Change;
use crate::lock::{Deadline, Decision, Hold, Raise};
use crate::server::clock::Now;
use crate::server::{AsText, Ctx, Text, TextRef, ctx};

/// The way back from what `decisions` are about to do to `locks`.
pub fn before_grant(locks: &[Lock], decisions: &[Decision], grantee: Grantee) -> Undo {
    let given = decisions.iter().map(|decision| match decision {
        Decision::Grant(hold, _) | Decision::Reenter(hold) => Some(*hold),
        _ => None,
    });
    let promised = promised(grantee);
    before(locks, given.map(|given| given.map(|given| (given, promised))), (grantee.owner, grantee.client))
}

/// The way back from a renewal that is about to set this deadline for those of `locks` that are held by this owner, on
/// behalf of this connection.
pub fn before_renewal(locks: &[Lock], of: (TextRef, u64), deadline: Deadline) -> Undo {
    let given = locks.iter().map(|lock| lock.own().map(|own| (Hold { deadline, ..own }, own.holds)));
    before(locks, given, of)
}

/// So many holds the answer to a request promises: of what was there, it does not speak.
fn promised(grantee: Grantee) -> u64 {
    match grantee.terms.request.raise {
        Raise::ByOne => 1,
        Raise::To(holds) => holds,
    }
}

/// `given`: what each of the locks' holds will be, and how many holds the answer promises.
fn before(locks: &[Lock], given: impl Iterator<Item = Option<(Hold, u64)>>, (owner, client): (TextRef, u64)) -> Undo {
    let owner = owner.bytes();
    let steps = locks.iter().zip(given).filter_map(|(lock, given)| {
        let (name, before) = (lock.name().bytes(), lock.own());
        let token = before.and_then(|before| before.token);
        let tie_before = books::with(|books| books.ties.of(lock.db(), name, owner, token).cloned());
        let (given, promised) = given?;
        Some(Step { name: name.into(), before, tie_before, given, promised, told: 0 })
    });
    let steps = steps.collect();
    let db = locks.first().map_or(0, Lock::db);
    let (serial, home) = books::with(|books| (books.next_undo(), books.ties.home(db)));
    Undo { serial, home, owner: owner.into(), client, steps }
}

/// Takes back what was granted or renewed, exactly: the count goes down by what was added, the deadline to what it
/// was. A hold that is no longer the one that was granted stays as it is, and so does what its owner was told in another
/// way. Those who wait for the locks are still to be served.
pub fn roll_back(ctx: Ctx, undo: &Undo, now: Now) {
    let owner = Text::new(&undo.owner);
    ctx.in_db(undo.db(), |ctx| {
        for step in &undo.steps {
            let taken = roll_back_step(ctx, undo, step, owner.as_text(), now);
            let hold = (undo.db(), &*step.name, &*undo.owner);
            books::with(|books| books.rebase(hold, undo.serial, step, taken));
        }
    });
    books::with(|books| undo.keys().for_each(|key| books.agenda.note(key, Change::Foreign)));
}

/// An example: `given` is a re-entry that made 1 hold until 100 (`before`) into 2 until 200. If the key still says so,
/// it is 1 until 100 again. If the owner has re-entered once more since, 3 until 300, it is 2 until 300: whoever was
/// promised the longest lease keeps it. If the owner has released one, 1 until 200, nothing of this grant is left but
/// the hold from before, and the whole hold ends.
///
/// How many holds were taken back: less than were added, if what came later promises them.
fn roll_back_step(ctx: Ctx, undo: &Undo, step: &Step, owner: TextRef, now: Now) -> u64 {
    let Step { name, before, given, tie_before, told, .. } = step;
    let hold = (undo.db(), &**name, owner.bytes());
    let name = Text::new(name);
    let Ok(mut lock) = Lock::look(ctx, name.as_text(), owner, now.millis()) else { return 0 };
    let Some(own) = lock.own().filter(|own| own.token == given.token) else { return 0 };
    let promised = books::with(|books| books.promised(hold, undo.serial)).min(own.holds);
    let holds = own.holds.saturating_sub(step.added()).max(promised);
    let taken = own.holds.saturating_sub(holds);
    if holds == 0 {
        holding::end(&mut lock, owner);
        return taken;
    }
    if *told > 0 || taken < step.added() {
        // Its owner knows this token, or is about to, and has this lease and what ties it.
        lock.update(owner, &own, &Hold { holds, ..own });
        return taken;
    }
    let deadline = match before {
        Some(before) if (own.holds, own.deadline) == (given.holds, given.deadline) => before.deadline,
        _ => own.deadline,
    };
    // The token was told to nobody. (One that another client's hold got here stays: it had none before.)
    let token = before.and_then(|before| before.token).or(own.token);
    lock.update(owner, &own, &Hold { holds, deadline, token });
    books::with(|books| {
        if books.ties.client_of(hold.0, hold.1, hold.2).is_some_and(|client| client != undo.client) {
            return; // It was tied anew meanwhile.
        }
        books.ties.untie(hold.0, hold.1, hold.2);
        if let Some(tie) = tie_before.as_ref().filter(|tie| ctx::is_connected(tie.client)) {
            books.ties.put_back(tie.clone(), deadline, now.millis());
        }
    });
    holding::wake_for_ties(ctx);
    taken
}

/// An owner is being told that it holds a lock: so many holds at least. Nothing that is taken back from now on takes them
/// along.
pub fn acknowledge(lock: &Lock, owner: TextRef, holds: u64) {
    if holds == 0 {
        return;
    }
    books::with(|books| books.acknowledge((lock.db(), lock.name().bytes(), owner.bytes()), holds));
}

/// The same where an owner is about to re-enter a lock, and to be told so.
pub fn acknowledge_re_entry(lock: &Lock, decision: &Decision, grantee: Grantee) {
    if let (Decision::Reenter(given), Some(before)) = (decision, lock.own()) {
        let holds = promised_before(promised(grantee), before.holds, given.holds);
        acknowledge(lock, grantee.owner, holds);
    }
}
