//! Clients that wait, and everything that ends their wait.
//!
//! What a callback may not do on the spot (write, while some other command is at work) it notes here, and [`tick`]
//! does it: from a timer that runs before the event loop sends replies and reads on. Where the server allows it, what
//! follows from other commands' changes is done in the step of that command ([`after_touch`]).
//!
//! A wait ends in one of these ways, each of which leaves the queue and, if the waiter was in others' way, serves
//! them: granted ([`Outcome::Granted`]), its time over or `CLIENT UNBLOCK` ([`Outcome::TimedOut`]), the key no lock
//! any more or a contradiction ([`Outcome::Refused`]), or its client gone: disconnected, killed, unblocked with an
//! error, redirected to another node, told that this server is a replica now ([`gone`]).

mod desk;
mod serving;
mod turns;

pub use desk::{Answer, Ask, Outcome, client_of, is_contended, is_idle, sizes, with_queue};
pub use serving::{Keyspace, deadline_moved, refusal, serve, serve_lock, too_many_holders};
pub use turns::{after_touch, ask, event, key_touched, stop, tick, wake};

use crate::confirming;
use crate::holding::Terms;
use crate::keyspace::Lock;
use crate::lock::{LockKey, Millis, Owner};
use crate::server::blocked::block;
use crate::server::clock::Now;
use crate::server::reply::Replied;
use crate::server::timer::Timer;
use crate::server::upcalls::Ticket;
use crate::server::{Ctx, TextRef, events, timer};
use crate::stats::{count, time};
use crate::undo::{Undo, take_back};
use desk::{DESK, Pending, QUEUE, State, new_ticket};
use serving::look_in_time;

/// While clients are paused, and while a slot is on its way elsewhere, the queue is looked at again after so many ms.
const LOOK_AGAIN: Millis = 10;

/// The error for a key that holds something else.
pub const WRONGTYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

/// A request that is to wait.
#[derive(Debug)]
pub struct Wish<'a> {
    /// For what, as it was read.
    pub locks: &'a [Lock<'a>],
    /// The same by name.
    pub keys: Box<[LockKey]>,
    /// For whom.
    pub owner: Owner,
    /// The connection that asks.
    pub client: u64,
    /// On what terms.
    pub terms: &'a Terms,
    /// For how long, in ms; `None`: as long as it takes.
    pub wait: Option<Millis>,
}

/// Lets the calling client wait at the end of the queue.
pub fn wait(ctx: Ctx, wish: Wish, now: Now) -> Replied {
    events::watch_keys(ctx);
    let ticket = new_ticket();
    let Wish { locks, keys, owner, client, terms, wait } = wish;
    let Some((blocked, replied)) = block(ctx, locks.iter().map(Lock::name), ticket) else {
        return ctx.reply_error("ERR this client can't be blocked");
    };
    for (lock, key) in locks.iter().zip(&keys) {
        look_in_time(lock, key, now.millis());
    }
    let until = wait.map(|wait| now.millis().saturating_add(wait));
    let ask = Ask { ticket, client, terms: *terms, arrived: now };
    let id = QUEUE.with(|queue| queue.join(owner, keys, terms.request, now.millis(), until, ask));
    DESK.with(|desk| {
        desk.pending.insert(ticket, Pending { blocked: Some(blocked), client, state: State::Waiting(id) });
        desk.timeouts.extend(until.map(|until| (until, ticket)));
    });
    wake(ctx, now);
    replied
}

/// A grant or renewal that was made, but counts only once replicas have it.
#[derive(Debug)]
pub struct Unconfirmed {
    /// The connection that asked.
    pub client: u64,
    /// The reply it is to get then.
    pub answer: Answer,
    /// The way back.
    pub undo: Undo,
    /// How many replicas it needs.
    pub replicas: u32,
}

/// Lets the reply to a grant or renewal of `names` wait for its replicas.
pub fn confirm(ctx: Ctx, names: &[TextRef], it: Unconfirmed, now: Now) -> Replied {
    events::watch_keys(ctx);
    let ticket = new_ticket();
    let Some((blocked, replied)) = block(ctx, names.iter().copied(), ticket) else {
        take_back(ctx, &it.undo, now);
        return ctx.reply_error("ERR this client can't be blocked");
    };
    let client = it.client;
    let id = confirming::begin_reply(ctx, ticket, it.answer, it.undo, it.replicas, now);
    let pending = Pending { blocked: Some(blocked), client, state: State::Confirming(id) };
    DESK.with(|desk| desk.pending.insert(ticket, pending));
    replied
}

/// Lets a client be told, at the end of this turn of the event loop, how its wait ended. `now` is when that came about.
pub fn end(ctx: Ctx, ticket: Ticket, outcome: Outcome, now: Now) {
    let undelivered = DESK.with(|desk| match desk.pending.get_mut(&ticket) {
        Some(pending) => {
            pending.state = State::Ending(outcome, now);
            desk.ending.push(ticket);
            false
        }
        None => {
            if let Outcome::Granted(_, undo) = outcome {
                desk.undelivered.push(undo);
            }
            true
        }
    });
    if undelivered {
        count(|it| &mut it.grants_undelivered);
    }
    if undelivered || !events::turn_end_is_last() {
        timer::wake(ctx, Timer::Work, timer::NOW);
    } else {
        events::go_round_again();
    }
}

/// Answers a client: called by the server, when this module ends the block or `CLIENT UNBLOCK` does.
pub fn answer(ctx: Ctx, ticket: Ticket) {
    let Some(pending) = DESK.with(|desk| desk.pending.remove(&ticket)) else {
        let Replied { .. } = ctx.reply_null();
        return;
    };
    let Replied { .. } = match pending.state {
        State::Ending(Outcome::Granted(answer, undo), freed) => {
            DESK.with(|desk| desk.sending.insert(pending.client, undo));
            time(|stats| &mut stats.hand_offs, Now::read().micros.saturating_sub(freed.micros));
            answer.reply(ctx)
        }
        State::Ending(Outcome::TimedOut, _) => {
            count(|it| &mut it.timeouts);
            ctx.reply_null()
        }
        State::Ending(Outcome::Refused(message), _) => ctx.reply_error(&message),
        unfinished => {
            leave(ctx, unfinished);
            ctx.reply_null()
        }
    };
}

/// A client that waited is gone. Writes nothing: it may be in the middle of another command.
pub fn gone(ctx: Ctx, ticket: Ticket) {
    if let Some(pending) = DESK.with(|desk| desk.pending.remove(&ticket)) {
        leave(ctx, pending.state);
    }
}

/// Takes a client whose wait nobody ended out of everything.
fn leave(ctx: Ctx, state: State) {
    match state {
        State::Waiting(id) => {
            if let Some(waiter) = QUEUE.with(|queue| queue.leave(id)) {
                DESK.with(|desk| desk.left(&waiter));
            }
        }
        State::Confirming(id) => {
            count(|it| &mut it.grants_undelivered);
            let undo = confirming::abandon(id);
            DESK.with(|desk| desk.undelivered.extend(undo));
        }
        State::Ending(Outcome::Granted(_, undo), _) => {
            count(|it| &mut it.grants_undelivered);
            DESK.with(|desk| desk.undelivered.push(undo));
        }
        State::Ending(..) => {}
    }
    timer::wake(ctx, Timer::Work, timer::NOW);
}
