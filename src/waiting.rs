//! How a wait begins: a client is blocked, or a session is promised an event.
//!
//! It ends in one of these ways. Each leaves the queue and, if the request stood in others' way, serves them: granted
//! ([`crate::serving`]); timed out, or `CLIENT UNBLOCK`; the key no longer a lock, or a contradiction; rights taken
//! away; a cycle of waits found; given up (`LOCK.CANCEL`); or its client gone: disconnected, killed, unblocked with
//! an error, redirected to another node, or told that this server is now a replica.

use crate::answering;
use crate::books::confirmations::What;
use crate::books::owed::{About, OnBehalf, Purpose, Ticket};
use crate::books::sessions::{Cancelled, Claimed, Reader, Remains};
use crate::books::{self, Answer, Asker, Books, IfNone, Outcome, Reading, Recipient, State, Terms, Undo};
use crate::config;
use crate::confirming;
use crate::holding;
use crate::keyspace::{Allowance, Lock, NotRead};
use crate::lock::serve::Change;
use crate::lock::{LockKey, Millis, Owner, WaiterId};
use crate::server::blocked::{block, block_for_events};
use crate::server::clock::{Now, Slice};
use crate::server::reply::Replied;
use crate::server::text::show_start;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text, TextRef, events};
use crate::serving::{schedule_earlier, serve};
use crate::stats::add;
use crate::undo::{end_later, roll_back, roll_back_within};
use std::collections::BTreeSet;
use std::rc::Rc;

/// How long a request may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// This many milliseconds.
    For(Millis),
    /// Without a limit.
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

    /// The same, but for `ms` at most.
    fn at_most(self, most: Millis) -> Self {
        match self {
            Self::No => Self::No,
            Self::For(ms) => Self::For(ms.min(most)),
            Self::Forever => Self::For(most),
        }
    }
}

/// What a request that may be answered later needs to say: on whose behalf it is made, and what it is about.
#[derive(Clone, Debug)]
pub struct Request {
    /// The connection on whose behalf it is.
    pub client: u64,
    /// Whether that is a session.
    pub on_behalf: OnBehalf,
    /// Whether it is for locks or for a longer lease.
    pub purpose: Purpose,
    /// The keys.
    pub keys: Rc<[LockKey]>,
    /// The owner.
    pub owner: Owner,
}

impl Request {
    fn about(&self) -> About {
        About { keys: self.keys.clone(), owner: self.owner.clone(), purpose: self.purpose }
    }

    /// Blocks the client, or tells the session that an event will follow, and records who is owed the answer.
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
                books::with(|books| books.sessions.add_wait(self.client, &about, ticket));
                (Recipient::Session { client: self.client, about }, ctx.reply_line(c"WAITING"))
            }
        };
        // The caller notes what it waits for.
        books::with(|books| books.owed.owe(ticket, to, State::Beginning));
        Some((ticket, replied))
    }
}

/// Puts a request at the end of the queue for the locks of these names. The locks that were read are scheduled for
/// another look; for the others, those that wait ahead have seen to that.
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
    let Request { client, on_behalf, keys, owner, .. } = request;
    let Terms { demand, tying, replicas } = *terms;
    let asker = Asker { ticket, client, on_behalf, tying, replicas, arrived: now };
    let id = books::with(|books| {
        let id = books.queue.join(owner, keys.clone(), demand, now.millis(), until, asker);
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

/// Withholds the answer to a grant or renewal until its replicas have confirmed.
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

/// What is already known of a session's request: `None`, or the answer.
///
/// # Errors
///
/// If its owner was cancelled, or has asked for other keys as well.
pub fn repeated(ctx: Ctx, request: &Request, terms: &Terms, wait: Wait, now: Now) -> Result<Option<Replied>, String> {
    let Request { client, keys, owner, .. } = request;
    let ticket = match books::with(|books| books.sessions.claimed(*client, owner, keys)) {
        Claimed::Nothing => return Ok(None),
        Claimed::Cancelled => return Err("CANCELLED LOCK.CANCEL was called for this key, owner and session".into()),
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
        "ERR this owner already waits for one of these keys, together with other keys, on behalf of this session"
            .to_string()
    })?;
    let Some(id) = id else { return Ok(Some(ctx.reply_line(c"WAITING"))) };
    let until = wait.until(now);
    books::with(|books| {
        let Some(waiter) = books.queue.get_mut(id) else { return };
        let before = std::mem::replace(&mut waiter.until, until);
        waiter.demand = terms.demand;
        (waiter.asker.tying, waiter.asker.replicas) = (terms.tying, terms.replicas);
        books.owed.timeouts.extend(until.map(|until| (until, ticket)));
        if let Some(before) = before.filter(|before| Some(*before) != until) {
            books.owed.timeouts.remove(&(before, ticket));
        }
        keys.iter().for_each(|key| books.agenda.note(key.clone(), Change::Freed));
    });
    serve(ctx, now, &Slice::of_command());
    if let Some(until) = until {
        timer::wake(ctx, Timer::Work, until);
    }
    Ok(Some(ctx.reply_line(c"WAITING")))
}

/// Gives up an owner's acquisition on behalf of a session, however far it got. Returns whether there was anything to
/// take back.
pub fn cancel(ctx: Ctx, session: u64, owner: TextRef, key: LockKey, now: Now) -> bool {
    let name: Owner = owner.bytes().into();
    let (mut undos, others, waited) = books::with(|books| {
        let Cancelled { tickets, granted_together } = books.sessions.cancel(session, &name, &key);
        let mut keys: BTreeSet<LockKey> = granted_together.iter().flat_map(|keys| keys.iter().cloned()).collect();
        keys.insert(key.clone());
        let mut undos = Vec::new();
        for ticket in &tickets {
            let (about, undo) = abandon(books, *ticket);
            keys.extend(about.iter().flat_map(|about| about.keys.iter().cloned()));
            undos.extend(undo);
        }
        for key in &keys {
            undos.extend(books.sessions.forget_events(session, &name, key));
        }
        keys.extend(undos.iter().flat_map(Undo::keys));
        keys.remove(&key);
        (undos, keys, !tickets.is_empty())
    });
    let mut any = waited || !undos.is_empty();
    // The key that was named comes first, since the first lock may be read whatever its size.
    undos.sort_by_key(|undo| !undo.keys().any(|of| of == key));
    undos.iter_mut().for_each(|undo| undo.steps.sort_by_key(|step| step.name != key.name));
    let later = undos.iter().position(|undo| !undo.keys().any(|of| of == key)).unwrap_or(undos.len());
    let (of_key, of_others) = undos.split_at(later);
    let mut allowance = Allowance::default();
    of_key.iter().for_each(|undo| roll_back_within(ctx, undo, now, &mut allowance));
    let mut give_back = |key: &LockKey, allowance: &mut Allowance| {
        any |= ctx.in_db(key.db, |ctx| give_back(ctx, session, owner, key, allowance, now));
    };
    if of_key.is_empty() {
        give_back(&key, &mut allowance);
    } else {
        give_back(&key, &mut Allowance::default()); // It has just been read.
    }
    of_others.iter().for_each(|undo| roll_back_within(ctx, undo, now, &mut allowance));
    others.iter().for_each(|key| give_back(key, &mut allowance));
    serve(ctx, now, &Slice::of_command());
    any
}

/// Removes a session's request from every book. Returns its keys, and what has to be rolled back.
fn abandon(books: &mut Books, ticket: Ticket) -> (Option<About>, Option<Undo>) {
    let Some(pending) = books.owed.take(ticket) else { return (None, None) };
    let about = match pending.to {
        Recipient::Session { client, about } => {
            books.sessions.remove_wait(client, &about, ticket);
            Some(about)
        }
        Recipient::Blocked { .. } => None,
    };
    let undo = match pending.state {
        State::Waiting(id) => {
            if let Some(waiter) = books.queue.leave(id) {
                books.gave_up(&waiter);
            }
            None
        }
        State::Confirming(id) => books.confirmations.abandon(id),
        _ => None,
    };
    (about, undo)
}

/// Releases what an owner holds, unless it is tied to a connection other than this session: at once, or later if the
/// lock is too large to be read in this step. Returns whether there was such a hold.
fn give_back(ctx: Ctx, session: u64, owner: TextRef, key: &LockKey, allowance: &mut Allowance, now: Now) -> bool {
    let tied_to = books::with(|books| books.ties.client_of(key.db, &key.name, owner.bytes()));
    if tied_to.is_some_and(|client| client != session) {
        return false;
    }
    // From here on, its end is the session's own doing, even if the lease has just run out.
    books::with(|books| books.ties.untie(key.db, &key.name, owner.bytes()));
    let name = Text::new(&key.name);
    match Lock::look_if_held(ctx, name.as_text(), owner, now.millis(), allowance) {
        Ok(Some(mut lock)) if lock.held().is_some() => {
            holding::end_hold(&mut lock, owner);
            books::with(|books| books.agenda.note(key.clone(), Change::Freed));
            true
        }
        Ok(_) | Err(NotRead::NotALock) => false,
        Err(NotRead::TooMuch) => {
            let held = Lock::peek(ctx, name.as_text(), owner);
            held.into_iter().for_each(|held| end_later(ctx, key, (owner, session), held));
            held.is_some()
        }
    }
}

/// Blocks a session until its next events arrive, or until it is due to hear that it is alive.
pub fn read_next(ctx: Ctx, session: u64, reading: Reading, wait: Wait, now: Now) -> Result<Replied, String> {
    events::watch_keys(ctx);
    let ticket = books::with(|books| {
        books.sessions.open(session);
        books.owed.ticket()
    });
    if wait == Wait::No || books::with(|books| books.sessions.unread(session) > 0) || !ctx.flags().may_block() {
        return Ok(answering::reply_events(ctx, session, reading));
    }
    let Some((block, replied)) = block_for_events(ctx, ticket) else {
        return Err("ERR this client can't be blocked".into());
    };
    let until = books::with(|books| {
        let (until, alive_at) = match reading.if_none {
            IfNone::Null => (wait.until(now), None),
            IfNone::Alive => {
                let pace = books.pace(session, config::default_lease());
                let until = wait.at_most(books.sessions.promised_pace(session, pace)).until(now);
                (until, until)
            }
        };
        let to = Recipient::Blocked { client: session, block: Some(block) };
        books.owed.owe(ticket, to, State::Reading(reading, until));
        books.sessions.set_reader(session, Some(Reader { ticket, alive_at }));
        books.owed.timeouts.extend(until.map(|until| (until, ticket)));
        until
    });
    if let Some(until) = until {
        timer::wake(ctx, Timer::Work, until);
    }
    Ok(replied)
}

/// Whether there is room for one more request: in the queue of each of its keys, and among those of its session.
///
/// # Errors
///
/// Names the setting that forbids it.
pub fn has_room(request: &Request) -> Result<(), String> {
    let (most, of_session) = (config::MAX_WAITERS.get(), config::MAX_SESSION_WAITS.get());
    books::with(|books| {
        if request.on_behalf == OnBehalf::Session && books.sessions.load(request.client) as u64 >= of_session {
            return Err(format!("ERR too many waits for this session: holdfast.max-session-waits is {of_session}"));
        }
        let full = |key: &LockKey| most > 0 && books.queue.waiting(key.db, &key.name) as u64 >= most;
        match request.keys.iter().find(|key| full(key)) {
            Some(key) => {
                let name = show_start(&key.name);
                Err(format!("ERR too many waiters for '{name}': holdfast.max-waiters is {most}"))
            }
            None => Ok(()),
        }
    })
}

/// Ends the waits that have timed out.
pub fn time_out(ctx: Ctx, now: Now, slice: &Slice) {
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
                Some(State::Reading(..)) => {
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

/// Removes what ended sessions leave behind: waiting requests, and grants that they never heard of.
pub fn leave_ended(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(undos) = books::with(next_of_ended) else { break };
        add(|it| &mut it.grants_undelivered, undos.len() as u64);
        let mut allowance = Allowance::default();
        undos.iter().for_each(|undo| roll_back_within(ctx, undo, now, &mut allowance));
    }
}

/// The same on a replica, where nothing is rolled back.
pub fn forget_ended(slice: &Slice) {
    while !slice.is_over() && books::with(next_of_ended).is_some() {}
}

/// Removes one thing that an ended session has left behind. Returns what has to be rolled back.
fn next_of_ended(books: &mut Books) -> Option<Vec<Undo>> {
    Some(match books.sessions.next_remains()? {
        Remains::Grant(undo) => vec![undo],
        Remains::Waits(tickets) => tickets.into_iter().filter_map(|ticket| abandon(books, ticket).1).collect(),
    })
}

/// Refuses everything that sessions wait for, because this server is now a replica. (The server itself answers
/// blocked clients.)
pub fn refuse_undecided(ctx: Ctx, now: Now, slice: &Slice) {
    const UNBLOCKED: &str = "UNBLOCKED this server is now a replica and grants no locks";
    let refused = || Outcome::Refused(UNBLOCKED.into());
    while !slice.is_over() {
        let waiter = books::with(|books| {
            let (from, end) = books.undecided.waiters?;
            let next = books.queue.from(from).next().filter(|waiter| waiter.id < end);
            let next = next.map(|waiter| (waiter.id, waiter.asker.on_behalf));
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
            answering::end_request(ctx, ticket, refused(), now);
        }
    }
}
