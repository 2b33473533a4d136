//! Rolling back a grant or a renewal that does not take effect after all: nobody was there to take it, or too few
//! replicas have it.

use crate::books::undo::promised_before;
use crate::books::{self, Step, Undo};
use crate::holding::{self, Grantee};
use crate::keyspace::{Allowance, Held, Lock, NotRead};
use crate::lock::serve::Change;
use crate::lock::{Deadline, Decision, Hold, LockKey, Raise};
use crate::server::clock::Now;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text, TextRef, ctx};

/// How to roll back what `decisions` are about to do to `locks`.
pub fn before_grant(locks: &[Lock], decisions: &[Decision], grantee: Grantee) -> Undo {
    let given = decisions.iter().map(|decision| match decision {
        Decision::Grant(hold, _) | Decision::Reenter(hold) => Some(*hold),
        _ => None,
    });
    let promised = promised(grantee);
    before(locks, given.map(|given| given.map(|given| (given, promised))), (grantee.owner, grantee.client))
}

/// How to roll back a renewal that is about to set this deadline on those of `locks` that this owner holds, on behalf
/// of this connection.
pub fn before_renewal(locks: &[Lock], of: (TextRef, u64), deadline: Deadline) -> Undo {
    let given = locks.iter().map(|lock| lock.own().map(|own| (Hold { deadline, ..own }, own.holds)));
    before(locks, given, of)
}

/// How many holds the answer to a request promises; it says nothing about those from before.
fn promised(grantee: Grantee) -> u64 {
    match grantee.terms.demand.raise {
        Raise::ByOne => 1,
        Raise::To(holds) => holds,
    }
}

/// `given`: what each lock's hold will be, and how many holds the answer promises.
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

/// Rolls back exactly what was granted or renewed: the count goes down by what was added, the deadline back to what it
/// was. A hold that is no longer the one that was granted stays as it is, and so does anything that its owner has since
/// been told of in another way. The caller serves those who wait for the locks.
pub fn roll_back(ctx: Ctx, undo: &Undo, now: Now) {
    roll_back_within(ctx, undo, now, &mut Allowance::default());
}

/// The same, as one of several parts of a step.
pub fn roll_back_within(ctx: Ctx, undo: &Undo, now: Now, allowance: &mut Allowance) {
    let owner = Text::new(&undo.owner);
    let done = ctx.in_db(undo.db(), |ctx| {
        let done = undo.steps.iter().take_while(|step| {
            let Ok(taken) = roll_back_step(ctx, undo, step, owner.as_text(), now, allowance) else { return false };
            let hold = (undo.db(), &*step.name, &*undo.owner);
            books::with(|books| books.rebase(hold, undo.serial, step, taken));
            true
        });
        done.count()
    });
    books::with(|books| undo.keys().take(done).for_each(|key| books.agenda.note(key, Change::Foreign)));
    if let Some(left @ [_, ..]) = undo.steps.get(done..) {
        // Other clients have changed the locks, and reading all of them would take too long: the rest follows later.
        roll_back_later(
            ctx,
            Undo { home: undo.home.clone(), owner: undo.owner.clone(), steps: left.to_vec(), ..*undo },
        );
    }
}

fn roll_back_later(ctx: Ctx, undo: Undo) {
    books::with(|books| books.owed.undelivered.push_back(undo));
    timer::wake(ctx, Timer::Work, timer::THIS_TURN);
}

/// Takes a whole hold away in one of the next turns, because its lock can't be read in this step.
pub fn end_later(ctx: Ctx, key: &LockKey, (owner, client): (TextRef, u64), Held { holds, token }: Held) {
    let given = Hold { holds, token, deadline: Deadline::Never };
    let step = Step { name: key.name.clone(), before: None, tie_before: None, given, promised: 0, told: 0 };
    let (serial, home) = books::with(|books| (books.next_undo(), books.ties.home(key.db)));
    roll_back_later(ctx, Undo { serial, home, owner: owner.bytes().into(), client, steps: vec![step] });
}

/// An example: `given` is a re-entry that turned 1 hold until 100 (`before`) into 2 until 200. If the key still says
/// so, it becomes 1 until 100 again. If the owner has since re-entered once more, 3 until 300, it becomes 2 until 300:
/// the longest lease that was promised is kept. If the owner has released one, 1 until 200, all that is left of this
/// grant is the hold from before, and the whole hold ends.
///
/// Returns how many holds were taken back: fewer than were added if later answers promise them.
///
/// # Errors
///
/// If the locks before this one had too many holders for it to be read in the same step.
fn roll_back_step(
    ctx: Ctx,
    undo: &Undo,
    step: &Step,
    owner: TextRef,
    now: Now,
    allowance: &mut Allowance,
) -> Result<u64, NotRead> {
    let Step { name, before, given, tie_before, told, .. } = step;
    let hold = (undo.db(), &**name, owner.bytes());
    let name = Text::new(name);
    let mut lock = match Lock::look_within(ctx, name.as_text(), owner, now.millis(), allowance) {
        Err(NotRead::NotALock) => None,
        lock => Some(lock?),
    };
    let own = lock.as_ref().and_then(Lock::own).filter(|own| own.token == given.token);
    let (Some(lock), Some(own)) = (&mut lock, own) else {
        forget_tie(undo, step);
        return Ok(0);
    };
    let promised = books::with(|books| books.promised(hold, undo.serial)).min(own.holds);
    let holds = own.holds.saturating_sub(step.added()).max(promised);
    let taken = own.holds.saturating_sub(holds);
    if holds == 0 {
        holding::end_hold(lock, owner);
        return Ok(taken);
    }
    if *told > 0 || taken < step.added() {
        // The owner knows this token, or is about to, and has this lease and these ties.
        lock.update(owner, &own, &Hold { holds, ..own });
        return Ok(taken);
    }
    let deadline = match before {
        Some(before) if (own.holds, own.deadline) == (given.holds, given.deadline) => before.deadline,
        _ => own.deadline,
    };
    // Nobody was told the token, unless the owner has re-entered under it. (A token that another client's hold got here
    // stays, since that hold had none before.)
    let before = before.filter(|before| holds <= before.holds);
    let token = before.and_then(|before| before.token).or(own.token);
    lock.update(owner, &own, &Hold { holds, deadline, token });
    books::with(|books| {
        if token != own.token {
            books.retoken(hold, (own.token, token));
        }
        if books.ties.client_of(hold.0, hold.1, hold.2).is_some_and(|client| client != undo.client) {
            // Another connection's tie stays, and follows the token.
            if let Some(token) = token {
                books.ties.changed(hold, own.token, token, deadline, now.millis());
            }
            return;
        }
        books.ties.untie(hold.0, hold.1, hold.2);
        if let Some(mut tie) = tie_before.clone().filter(|tie| ctx::is_connected(tie.client)) {
            tie.token = token.unwrap_or(tie.token);
            books.put_back(tie, deadline, now.millis());
        }
    });
    holding::wake_for_ties(ctx);
    Ok(taken)
}

/// Others have ended a hold that its owner was never told of, and will not be: nor that it is lost.
fn forget_tie(undo: &Undo, step: &Step) {
    let is_new = step.before.is_none_or(|before| before.token != step.given.token);
    if step.told == 0 && is_new {
        books::with(|books| {
            let tie = books.ties.of(undo.db(), &step.name, &undo.owner, step.given.token);
            if tie.is_some_and(|tie| tie.client == undo.client) {
                books.ties.untie(undo.db(), &step.name, &undo.owner);
            }
        });
    }
}

/// An owner is being told that it holds a lock, with at least this many holds. From now on no roll-back takes them
/// away.
pub fn acknowledge(lock: &Lock, owner: TextRef, holds: u64) {
    if holds == 0 {
        return;
    }
    books::with(|books| books.acknowledge((lock.db(), lock.name().bytes(), owner.bytes()), holds));
}

/// The same for an owner that is about to re-enter a lock and to be told so.
pub fn acknowledge_re_entry(lock: &Lock, decision: &Decision, grantee: Grantee) {
    if let (Decision::Reenter(given), Some(before)) = (decision, lock.own()) {
        let holds = promised_before(promised(grantee), before.holds, given.holds);
        acknowledge(lock, grantee.owner, holds);
    }
}
