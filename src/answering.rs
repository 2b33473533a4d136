//! Deferred answers: how waiters get their reply, and what happens if nobody is left to receive it.
//!
//! A blocked client is answered at the end of a turn of the event loop ([`send_answers`]). A session's answer goes into its
//! mailbox, and a reader blocked on the mailbox is answered in the same way. From the moment of a grant until its
//! answer has been handed to the network, the grant can be rolled back: the way back is kept with the answer, and
//! then with the bytes in flight.

use crate::books::owed::{End, OnBehalf, Ticket};
use crate::books::sessions::Unheard;
use crate::books::{self, Answer, Asker, Books, Event, IfNone, Kind, Outcome, Reading, Recipient, State};
use crate::config;
use crate::lock::{LockKey, Owner, Token, Waiter};
use crate::server::Ctx;
use crate::server::clock::{Now, Slice};
use crate::server::reply::Replied;
use crate::server::timer::{self, Timer};
use crate::stats::{add, count, time};

/// This many clients are answered in one turn. Counted, not timed: unblocking one takes less than a microsecond here,
/// but the reply that the server then makes and writes takes ten times as long.
const AT_ONCE: usize = 32;

/// One read returns events until they name this many keys.
const KEYS_AT_ONCE: usize = 2_000;

/// Records how a request ended, so that whoever is owed the answer gets it. `now` is when it ended.
pub fn end_request(ctx: Ctx, ticket: Ticket, outcome: Outcome, now: Now) {
    match books::with(|books| books.end(ticket, outcome, now)) {
        books::Delivery::Due => timer::wake_for_replies(ctx),
        books::Delivery::Undelivered => {
            count(|it| &mut it.grants_undelivered);
            timer::wake(ctx, Timer::Work, timer::THIS_TURN);
        }
    }
}

/// Ends a wait without a grant: the request leaves the queue.
pub fn end_wait(ctx: Ctx, waiter: &Waiter<Asker>, outcome: Outcome, now: Now) {
    books::with(|books| books.gave_up(waiter));
    if let Outcome::TimedOut = outcome
        && waiter.asker.on_behalf == OnBehalf::Session
    {
        count(|it| &mut it.timeouts);
    }
    end_request(ctx, waiter.asker.ticket, outcome, now);
}

/// Answers the clients whose answers are ready, or as many of them as one turn has room for.
pub fn send_answers(ctx: Ctx) {
    for _ in 0..AT_ONCE {
        let Some((ticket, block)) = books::with(|books| books.owed.next_ending()) else { break };
        if block.may_be_redirected(ctx) {
            books::with(|books| books.owed.put_off(ticket, block));
        } else {
            block.answer();
        }
    }
    if books::with(|books| books.owed.is_ending()) {
        timer::wake_for_replies(ctx);
    }
}

/// Answers the clients that the server might have redirected but has not: its cron has just checked them.
pub fn send_put_off(slice: &Slice) {
    while !slice.is_over() {
        let Some(block) = books::with(|books| books.owed.next_put_off()) else { break };
        block.answer();
    }
}

/// Answers one client. The server calls this when the module unblocks the client, or `CLIENT UNBLOCK` does.
pub fn answer(ctx: Ctx, ticket: Ticket) {
    let Some(pending) = books::with(|books| books.owed.take(ticket)) else {
        let Replied { .. } = ctx.reply_null();
        return;
    };
    let Recipient::Blocked { client, block } = pending.to else { return };
    if let Some(block) = block {
        block.has_ended();
    }
    let Replied { .. } = match pending.state {
        State::Ending(end) => match *end {
            End { outcome: Outcome::Granted(answer, undo), at } => {
                books::with(|books| books.owed.sending(client, undo));
                time(|stats| &mut stats.hand_offs, Now::read().micros.saturating_sub(at.micros));
                reply(ctx, &answer)
            }
            End { outcome: Outcome::TimedOut, .. } => {
                count(|it| &mut it.timeouts);
                ctx.reply_null()
            }
            End { outcome: Outcome::Refused(message), .. } => ctx.reply_error(&message),
        },
        State::Reading(reading, until) => {
            books::with(|books| books.reads_no_more(client, ticket, until));
            reply_events(ctx, client, reading)
        }
        unfinished => {
            forget(ctx, ticket, client, unfinished);
            ctx.reply_null()
        }
    };
}

/// A blocked client is gone. Writes nothing, because another command may be in progress.
pub fn gone(ctx: Ctx, ticket: Ticket) {
    if let Some(pending) = books::with(|books| books.owed.take(ticket))
        && let Recipient::Blocked { client, block } = pending.to
    {
        if let Some(block) = block {
            block.has_ended();
        }
        forget(ctx, ticket, client, pending.state);
    }
}

/// Removes from every book a client whose wait nobody has ended.
fn forget(ctx: Ctx, ticket: Ticket, client: u64, state: State) {
    let undelivered = books::with(|books| match state {
        State::Waiting(id) => {
            if let Some(waiter) = books.queue.leave(id) {
                books.gave_up(&waiter);
            }
            false
        }
        State::Confirming(id) => {
            let undo = books.confirmations.abandon(id);
            books.owed.undelivered.extend(undo);
            true
        }
        State::Ending(end) => {
            let End { outcome: Outcome::Granted(_, undo), .. } = *end else { return false };
            books.owed.undelivered.push_back(undo);
            true
        }
        State::Beginning => false,
        State::Reading(_, until) => {
            books.reads_no_more(client, ticket, until);
            false
        }
    });
    if undelivered {
        count(|it| &mut it.grants_undelivered);
    }
    timer::wake(ctx, Timer::Work, timer::THIS_TURN);
}

/// A connection has ended, so replies in flight to it never arrive. Writes nothing.
pub fn client_gone(ctx: Ctx, client: u64) {
    let (undelivered, any) = books::with(|books| {
        let undelivered = books.owed.undeliver(client);
        let ties = books.ties.client_gone(client);
        let session = books.sessions.client_gone(client);
        (undelivered, undelivered > 0 || ties || session)
    });
    add(|it| &mut it.grants_undelivered, undelivered as u64);
    if any {
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
}

/// Writes an answer as a reply.
pub fn reply(ctx: Ctx, answer: &Answer) -> Replied {
    match answer {
        Answer::Token(token) => ctx.reply_integer(*token),
        Answer::Tokens(tokens) => {
            let array = ctx.reply_array(tokens.len());
            tokens.iter().fold(array, |_, token| ctx.reply_token(*token))
        }
    }
}

/// Replies with a session's next unread events; if there are none, with null or a sign of life.
pub fn reply_events(ctx: Ctx, session: u64, reading: Reading) -> Replied {
    let events = books::with(|books| read_events(books, session, reading.most));
    if !events.is_empty() {
        let array = ctx.reply_array(events.len());
        return events.iter().fold(array, |_, event| reply_event(ctx, event));
    }
    match reading.if_none {
        IfNone::Null => ctx.reply_null(),
        IfNone::Alive => {
            let _ = ctx.reply_array(1);
            reply_alive(ctx, session)
        }
    }
}

/// Writes the sign of life, which is not really an event: the session is alive, its next question will be answered
/// within this many ms, and this is the default lease.
fn reply_alive(ctx: Ctx, session: u64) -> Replied {
    let lease = config::default_lease();
    let pace = books::with(|books| {
        let pace = books.pace(session, lease);
        books.sessions.promise_pace(session, pace);
        pace
    });
    reply_fields(ctx, "alive", (&[], None, None), Some(&format!("{pace} {lease}")))
}

fn read_events(books: &mut Books, session: u64, most: usize) -> Vec<Event> {
    let mut events = Vec::new();
    let mut keys = 0_usize;
    while events.len() < most
        && (events.is_empty() || keys.saturating_add(books.sessions.next_size(session)) <= KEYS_AT_ONCE)
    {
        let Some((event, unheard)) = books.sessions.read(session) else { break };
        if let Some(Unheard { undo, since }) = unheard {
            books.owed.sending(session, undo);
            time(|stats| &mut stats.hand_offs, Now::read().micros.saturating_sub(since.micros));
        }
        keys = keys.saturating_add(event.keys.len());
        events.push(event);
    }
    events
}

fn reply_event(ctx: Ctx, event: &Event) -> Replied {
    let Event { kind, keys, owner } = event;
    let (name, token, detail) = match kind {
        Kind::Granted(token) => ("granted", Some(*token), None),
        Kind::TimedOut => ("timeout", None, None),
        Kind::Refused(error) => ("refused", None, Some(error.as_str())),
        Kind::Lost(token, why) => ("lost", Some(*token), Some(why.name())),
        Kind::Untied(token, why) => ("untied", Some(*token), Some(why.name())),
    };
    reply_fields(ctx, name, (keys, Some(owner), token), detail)
}

/// Writes an event.
fn reply_fields(
    ctx: Ctx,
    name: &str,
    (keys, owner, token): (&[LockKey], Option<&Owner>, Option<Token>),
    detail: Option<&str>,
) -> Replied {
    let _ = ctx.reply_array(6);
    let _ = ctx.reply_bytes(name.as_bytes());
    let _ = ctx.reply_signed(keys.first().map_or(0, |key| i64::from(key.db)));
    let _ = ctx.reply_array(keys.len());
    for key in keys.iter() {
        let _ = ctx.reply_bytes(&key.name);
    }
    let _ = owner.map_or_else(|| ctx.reply_null(), |owner| ctx.reply_bytes(owner));
    let _ = ctx.reply_token(token);
    detail.map_or_else(|| ctx.reply_null(), |detail| ctx.reply_bytes(detail.as_bytes()))
}
