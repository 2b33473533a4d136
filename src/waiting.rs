//! How a wait begins: of a client, which is blocked, or on behalf of a session, which is told by an event.
//!
//! It ends in one of these ways, each of which leaves the queue and, if the request was in others' way, serves them:
//! granted ([`crate::serving`]); its time over, or `CLIENT UNBLOCK`; the key no lock any more, or a contradiction; its
//! rights taken away; a cycle of waits found; given up (`LOCK.CANCEL`); or its client gone: disconnected, killed,
//! unblocked with an error, redirected to another node, told that this server is a replica now.

use crate::answering;
use crate::books::confirmations::What;
use crate::books::owed::{About, OnBehalf, Ticket};
use crate::books::sessions::Claimed;
use crate::books::{self, Answer, Asker, Outcome, Recipient, State, Terms, Undo};
use crate::config;
use crate::confirming;
use crate::holding;
use crate::keyspace::Lock;
use crate::lock::serve::Change;
use crate::lock::{LockKey, Millis, Owner, WaiterId};
use crate::server::blocked::{block, block_for_events};
use crate::server::clock::{Now, Slice};
use crate::server::reply::Replied;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text, TextRef, events};
use crate::serving::{schedule_earlier, serve};
use crate::undo::roll_back;
use std::rc::Rc;

/// How long a request may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// So many milliseconds.
    For(Millis),
    /// As long as it takes.
    Forever,
}

impl Wait {
    fn until(self, now: Now) -> Option<Millis> {
        match self {
            Self::No => Some(now.millis()),
            Self::For(ms) => Some(now.millis().saturating_add(ms)),
            Self::Forever => None,
        }
    }
}

/// Who asks for an answer that may come later: on whose behalf, and about what.
#[derive(Clone, Debug)]
pub struct Request {
    /// The connection on whose behalf it is.
    pub client: u64,
    /// Whether that is a session.
    pub on_behalf: OnBehalf,
    /// For what.
    pub keys: Rc<[LockKey]>,
    /// For whom.
    pub owner: Owner,
}

impl Request {
    fn about(&self) -> About {
        About { keys: self.keys.clone(), owner: self.owner.clone() }
    }

    /// Blocks the client, or tells the session that the answer comes later; notes who is owed it.
    fn owe(&self, ctx: Ctx, names: &[TextRef]) -> Option<(Ticket, Replied)> {
        events::watch_keys(ctx);
        let ticket = books::with(|books| books.owed.ticket());
        let (to, replied) = match self.on_behalf {
            OnBehalf::Itself => {
                let (block, replied) = block(ctx, names.iter().copied(), ticket)?;
                (Recipient::Blocked { client: self.client, block: Some(block) }, replied)
            }
            OnBehalf::Session => {
                let about = self.about();
                books::with(|books| books.sessions.waits(self.client, &about, ticket));
                (Recipient::Session { client: self.client, about }, ctx.reply_line(c"WAITING"))
            }
        };
        // What it waits for is noted by whoever calls.
        books::with(|books| books.owed.owe(ticket, to, State::Beginning));
        Some((ticket, replied))
    }
}

/// Lets a request wait at the end of the queue for the locks of these names. Those that were read are scheduled to be
/// looked at again; whoever waits ahead has seen to that for the others.
pub fn wait(
    ctx: Ctx,
    request: Request,
    (names, locks): (&[TextRef], &[Lock]),
    terms: &Terms,
    wait: Wait,
    now: Now,
) -> Result<(WaiterId, Replied), String> {
    let Some((ticket, replied)) = request.owe(ctx, names) else {
        return Err("ERR this client can't be blocked".into());
    };
    let until = wait.until(now);
    let Request { client, on_behalf, keys, owner } = request;
    let ask = Asker { ticket, client, on_behalf, terms: *terms, arrived: now };
    let id = books::with(|books| {
        let id = books.queue.join(owner, keys.clone(), terms.request, now.millis(), until, ask);
        books.owed.set(ticket, State::Waiting(id));
        books.owed.timeouts.extend(until.map(|until| (until, ticket)));
        id
    });
    for (lock, key) in locks.iter().zip(keys.iter()) {
        schedule_earlier(lock, key, now.millis());
    }
    if let Some(until) = until {
        timer::wake(ctx, Timer::Work, until);
    }
    Ok((id, replied))
}

/// Lets the answer to a grant or renewal wait for its replicas.
pub fn confirm(
    ctx: Ctx,
    request: &Request,
    names: &[TextRef],
    answer: Answer,
    undo: Undo,
    replicas: u32,
    now: Now,
) -> Result<Replied, String> {
    let Some((ticket, replied)) = request.owe(ctx, names) else {
        roll_back(ctx, &undo, now);
        return Err("ERR this client can't be blocked".into());
    };
    let id = confirming::begin(ctx, What::Reply(ticket, answer), undo, replicas, Millis::MAX, now);
    books::with(|books| books.owed.set(ticket, State::Confirming(id)));
    Ok(replied)
}

/// What there is already of a session's request: `None`, or the answer.
///
/// # Errors
///
/// That its owner was cancelled, or asks for other keys as well.
pub fn repeated(ctx: Ctx, request: &Request, terms: &Terms, wait: Wait, now: Now) -> Result<Option<Replied>, String> {
    let Request { client, keys, owner, .. } = request;
    let ticket = match books::with(|books| books.sessions.claimed(*client, owner, keys)) {
        Claimed::Nothing => return Ok(None),
        Claimed::Cancelled => return Err("CANCELLED this owner was cancelled for this key and session".into()),
        Claimed::Waits(ticket) => ticket,
    };
    let waiting = books::with(|books| match books.owed.get(ticket) {
        Some(pending) => match (&pending.to, &pending.state) {
            (Recipient::Session { about, .. }, _) if about.keys != *keys => Err(()),
            (_, State::Waiting(id)) => Ok(Some(*id)),
            _ => Ok(None),
        },
        None => Ok(None),
    });
    let id = waiting.map_err(|()| {
        "ERR this owner waits for one of these keys already, with other keys, on behalf of this session".to_string()
    })?;
    let Some(id) = id else { return Ok(Some(ctx.reply_line(c"WAITING"))) };
    let until = wait.until(now);
    books::with(|books| {
        let Some(waiter) = books.queue.get_mut(id) else { return };
        let before = std::mem::replace(&mut waiter.until, until);
        waiter.request = terms.request;
        waiter.ask.terms = *terms;
        books.owed.timeouts.extend(until.map(|until| (until, ticket)));
        if let Some(before) = before.filter(|before| Some(*before) != until) {
            books.owed.timeouts.remove(&(before, ticket));
        }
        keys.iter().for_each(|key| books.agenda.note(key.clone(), Change::Freed));
    });
    serve(ctx, now, Slice::of_command());
    if let Some(until) = until {
        timer::wake(ctx, Timer::Work, until);
    }
    Ok(Some(ctx.reply_line(c"WAITING")))
}

/// Gives an owner's acquisition up on behalf of a session, whatever became of it; whether there was anything to take
/// back.
pub fn cancel(ctx: Ctx, session: u64, owner: TextRef, key: LockKey, now: Now) -> bool {
    let name: Owner = owner.bytes().into();
    let (ticket, undo, keys) = books::with(|books| {
        let (ticket, undo, keys) = books.sessions.cancel(session, &name, &key);
        let pending = ticket.and_then(|ticket| books.owed.take(ticket));
        let Some(pending) = pending else { return (None, undo, keys) };
        let mut keys = keys;
        if let Recipient::Session { about, .. } = &pending.to {
            books.sessions.waits_no_more(session, about);
            keys = about.keys.clone();
        }
        match pending.state {
            State::Waiting(id) => {
                if let Some(waiter) = books.queue.leave(id) {
                    books.gave_up(&waiter);
                }
                (ticket, undo, keys)
            }
            State::Confirming(id) => (ticket, books.confirmations.abandon(id), keys),
            _ => (ticket, undo, keys),
        }
    });
    let mut any = ticket.is_some() || undo.is_some();
    if let Some(undo) = undo {
        roll_back(ctx, &undo, now);
    }
    for key in keys.iter() {
        any |= ctx.in_db(key.db, |ctx| {
            let key_name = Text::new(&key.name);
            let Ok(mut lock) = Lock::look(ctx, key_name.as_text(), owner, now.millis()) else { return false };
            if lock.own().is_none() {
                return false;
            }
            holding::end(&mut lock, owner);
            books::with(|books| books.agenda.note(key.clone(), Change::Freed));
            true
        });
    }
    serve(ctx, now, Slice::of_command());
    any
}

/// Lets a session wait for its next events.
pub fn read_next(ctx: Ctx, session: u64, most: usize, wait: Wait, now: Now) -> Result<Replied, String> {
    events::watch_keys(ctx);
    let ticket = books::with(|books| {
        books.sessions.open(session);
        books.owed.ticket()
    });
    if wait == Wait::No || books::with(|books| books.sessions.unread(session) > 0) || !ctx.flags().may_block() {
        return Ok(answering::reply_events(ctx, session, most));
    }
    let Some((block, replied)) = block_for_events(ctx, ticket) else {
        return Err("ERR this client can't be blocked".into());
    };
    let until = wait.until(now);
    books::with(|books| {
        let to = Recipient::Blocked { client: session, block: Some(block) };
        books.owed.owe(ticket, to, State::Reading { most, until });
        books.sessions.set_reader(session, Some(ticket));
        books.owed.timeouts.extend(until.map(|until| (until, ticket)));
    });
    if let Some(until) = until {
        timer::wake(ctx, Timer::Work, until);
    }
    Ok(replied)
}

/// Whether there is room for one more request: among those who wait for each of its keys, and those of its session.
///
/// # Errors
///
/// Which setting forbids it.
pub fn has_room(request: &Request) -> Result<(), String> {
    let (most, of_session) = (config::MAX_WAITERS.get(), config::MAX_SESSION_WAITS.get());
    books::with(|books| {
        if request.on_behalf == OnBehalf::Session && books.sessions.load(request.client) as u64 >= of_session {
            return Err(format!("ERR too many waits for this session: holdfast.max-session-waits is {of_session}"));
        }
        let full = |key: &LockKey| most > 0 && books.queue.waiting(key.db, &key.name) as u64 >= most;
        match request.keys.iter().find(|key| full(key)) {
            Some(key) => {
                let name = config::show_start(&key.name);
                Err(format!("ERR too many waiters for '{name}': holdfast.max-waiters is {most}"))
            }
            None => Ok(()),
        }
    })
}

/// Ends the waits whose time is over.
pub fn time_out(ctx: Ctx, now: Now, slice: Slice) {
    while !slice.is_over() {
        let due = books::with(|books| {
            let (_, ticket) = books.owed.timeouts.first().copied().filter(|(until, _)| *until <= now.millis())?;
            books.owed.timeouts.pop_first();
            let state = books.owed.get(ticket).map(|pending| &pending.state);
            Some(match state {
                Some(State::Waiting(id)) => {
                    let id = *id;
                    books.queue.leave(id)
                }
                Some(State::Reading { .. }) => {
                    books.owed.call(ticket);
                    None
                }
                _ => None,
            })
        });
        match due {
            Some(Some(waiter)) => answering::end_wait(ctx, &waiter, Outcome::TimedOut, now),
            Some(None) => timer::wake_for_replies(ctx),
            None => break,
        }
    }
}

/// Takes out what sessions that have ended leave: requests that wait, grants that they did not hear of.
pub fn leave_ended(slice: Slice) {
    while !slice.is_over() {
        let any = books::with(|books| {
            let remains = books.sessions.next_remains()?;
            match remains {
                books::sessions::Remains::Grant(undo) => books.owed.undelivered.push_back(undo),
                books::sessions::Remains::Wait(ticket) => match books.owed.take(ticket).map(|it| it.state) {
                    Some(State::Waiting(id)) => {
                        if let Some(waiter) = books.queue.leave(id) {
                            books.gave_up(&waiter);
                        }
                    }
                    Some(State::Confirming(id)) => {
                        let undo = books.confirmations.abandon(id);
                        books.owed.undelivered.extend(undo);
                    }
                    _ => {}
                },
            }
            Some(())
        });
        if any.is_none() {
            break;
        }
    }
}

/// Refuses what sessions wait for, because this server is a replica now. (Clients that are blocked are told by the
/// server itself.)
pub fn refuse_undecided(ctx: Ctx, now: Now, slice: Slice) {
    const UNBLOCKED: &str = "UNBLOCKED this server is a replica now and grants no locks";
    let refused = || Outcome::Refused(UNBLOCKED.into());
    while !slice.is_over() {
        let waiter = books::with(|books| {
            let (from, end) = books.undecided.waiters?;
            let next = books.queue.from(from).next().filter(|waiter| waiter.id < end);
            let next = next.map(|waiter| (waiter.id, waiter.ask.on_behalf));
            books.undecided.waiters = next.map(|(id, _)| (WaiterId(id.0.saturating_add(1)), end));
            next.map(|(id, on_behalf)| if on_behalf == OnBehalf::Session { books.queue.leave(id) } else { None })
        });
        let Some(waiter) = waiter else { break };
        if let Some(waiter) = waiter {
            answering::end_wait(ctx, &waiter, refused(), now);
        }
    }
    while !slice.is_over() {
        let Some(it) = books::with(|books| books.undecided.confirmations.take_any()) else { break };
        let What::Reply(ticket, _) = it.what else { continue };
        let to_session = books::with(|books| {
            books.owed.get(ticket).is_some_and(|pending| matches!(pending.to, Recipient::Session { .. }))
        });
        if to_session {
            answering::end(ctx, ticket, refused(), now);
        }
    }
}
