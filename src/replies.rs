//! Deferred replies: how waiters get theirs, and what happens if their client is gone.
//!
//! A blocked client is answered at the end of a turn of the event loop ([`send_answers`]). A session's answer goes into its
//! event queue, and a reader blocked in `LOCK.EVENTS` is answered in the same way. From the moment of a grant until its reply, or
//! the reply that carries its event, has been composed, it is undelivered ([`state::Undelivered`]), and can be revoked.

use crate::config;
use crate::holds;
use crate::lock::{LockKey, Millis, Owner, Token, Waiter};
use crate::server::Ctx;
use crate::server::blocked::Blocked;
use crate::server::clock::{Now, Slice};
use crate::server::reply::Replied;
use crate::state::pending::{OnBehalf, Ticket};
use crate::state::sessions::Unheard;
use crate::state::{self, Answer, Asker, Event, Kind, Outcome, Reading, SignsOfLife, Stage, State};
use crate::stats::{add, count, time};

/// This many clients are answered in one turn. Counted, not timed: unblocking one takes less than a microsecond here,
/// but the reply that the server then makes and writes takes ten times as long.
const AT_ONCE: usize = 32;

/// A session that was promised a heartbeat and does not ask for it is silent after a default lease, and not before so many
/// ms.
const PATIENCE: Millis = 1_000;

/// One read returns events until they name this many keys.
const KEYS_AT_ONCE: usize = 2_000;

/// Records how a request ended, so that its recipient gets the outcome. `now` is when it ended.
pub fn end_request(state: &mut State, request: Box<Waiter<Asker>>, outcome: Outcome, now: Now) {
    if state.end(request, outcome, now).is_some() {
        count(|it| &mut it.grants_undelivered);
    }
}

/// Ends a wait without a grant: the request leaves the queue.
pub fn end_wait(state: &mut State, waiter: Box<Waiter<Asker>>, outcome: Outcome, now: Now) {
    state.gave_up(&waiter);
    match outcome {
        Outcome::TimedOut => time_out(state, waiter, now),
        outcome => end_request(state, waiter, outcome, now),
    }
}

/// Answers a request that has left the queue without a grant and without an error. (That a blocked client was answered
/// so is counted when it is.)
pub fn time_out(state: &mut State, waiter: Box<Waiter<Asker>>, now: Now) {
    if waiter.asker.on_behalf == OnBehalf::Session {
        count(|it| &mut it.timeouts);
    }
    end_request(state, waiter, Outcome::TimedOut, now);
}

/// Answers the clients whose answers are ready, or as many of them as one turn has room for. The state is not lent meanwhile: the
/// server calls [`answer`] for each.
pub fn send_answers(ctx: Ctx) {
    for _ in 0..AT_ONCE {
        let Some((ticket, block)) = state::with(|state| state.pending.next_ending()) else { break };
        if block.may_end_otherwise(ctx) {
            state::with(|state| state.pending.put_off(ticket, block));
        } else {
            block.answer();
        }
    }
}

/// Answers the clients whose wait the server might have ended itself but has not: its cron has just checked them.
pub fn send_put_off(slice: &Slice) {
    while !slice.is_over() {
        let Some(block) = state::with(|state| state.pending.next_put_off()) else { break };
        block.answer();
    }
}

/// Answers one client. The server calls this when the module unblocks the client, or `CLIENT UNBLOCK` does.
pub fn answer(state: &mut State, ctx: Ctx, ticket: Ticket, now: Now) {
    let is_ready = matches!(state.pending.get(ticket), Some(Stage::Ending(_) | Stage::Reading(_)));
    let stage = if is_ready { state.pending.take(ticket) } else { None };
    let Replied { .. } = match stage {
        Some(Stage::Ending(end)) => {
            end.block.into_iter().for_each(Blocked::has_ended);
            reply_outcome(state, ctx, end.outcome, (end.at, now))
        }
        Some(Stage::Reading(reader)) => {
            reader.block.into_iter().for_each(Blocked::has_ended);
            state.reads_no_more(reader.client, ticket, reader.reading.until);
            reply_events(state, ctx, reader.client, reader.reading)
        }
        _ => {
            gone(state, ticket);
            ctx.reply_null()
        }
    };
}

/// Writes the outcome of a request that ended then as a reply.
fn reply_outcome(state: &mut State, ctx: Ctx, outcome: Outcome, (at, now): (Now, Now)) -> Replied {
    match outcome {
        Outcome::Granted(answer, grant) => {
            state.undelivered.delivered(grant);
            time(|stats| &mut stats.hand_offs, now.micros.saturating_sub(at.micros));
            reply(ctx, &answer)
        }
        Outcome::TimedOut => {
            count(|it| &mut it.timeouts);
            ctx.reply_null()
        }
        Outcome::Withdrawn => ctx.reply_null(),
        Outcome::Refused(message) => ctx.reply_error(&message),
    }
}

/// A blocked client is gone, and its request with it. Writes nothing, because another command may be in progress.
pub fn gone(state: &mut State, ticket: Ticket) {
    let Some(it) = state.withdraw(ticket) else { return };
    add(|counts| &mut counts.grants_undelivered, u64::from(it.was_granted));
    it.block.into_iter().for_each(Blocked::has_ended);
}

/// A connection has ended, and what is bound to it, and its session. Writes nothing.
pub fn connection_ended(state: &mut State, client: u64) {
    state.bindings.client_gone(client);
    state.sessions.client_gone(client);
}

/// Writes an answer as a reply.
pub fn reply(ctx: Ctx, answer: &Answer) -> Replied {
    match answer {
        Answer::Token(token) => ctx.reply_integer(*token),
        Answer::TokenAndWait(token, waited) => {
            let _ = ctx.reply_array(2);
            let _ = ctx.reply_integer(*token);
            ctx.reply_integer(*waited)
        }
        Answer::Tokens(tokens) => {
            let array = ctx.reply_array(tokens.len());
            tokens.iter().fold(array, |_, token| ctx.reply_token(*token))
        }
    }
}

/// Replies with a session's next unread events, and a heartbeat at their end if it is wanted; else with null if there
/// are none.
pub fn reply_events(state: &mut State, ctx: Ctx, session: u64, reading: Reading) -> Replied {
    let events = read_events(state, session, reading.most);
    let signs = usize::from(reading.signs == SignsOfLife::Wanted);
    let count = events.len().saturating_add(signs);
    if count == 0 {
        return ctx.reply_null();
    }
    let array = ctx.reply_array(count);
    let replied = events.iter().fold(array, |_, event| reply_event(ctx, event, reading.asked));
    if signs == 0 { replied } else { reply_alive(state, ctx, session, reading.asked) }
}

/// Writes the heartbeat, which is no event of the queue: the session is alive. It says within how many ms the next
/// question will be answered, the default lease, how many thousandths of their leases all holds have left that are renewed for
/// it, counted from when it asked, and whether the server takes writes.
fn reply_alive(state: &mut State, ctx: Ctx, session: u64, asked: Millis) -> Replied {
    let lease = config::default_lease();
    let pace = state.pace(session, lease);
    state.sessions.promise_pace(session, pace);
    let silent_after = pace.saturating_add(lease.max(PATIENCE));
    state.sessions.expect_within(session, silent_after, Now::read().millis());
    let sure = state.bindings.sure(session, asked);
    let writes = u8::from(holds::takes_writes(ctx));
    write_event(ctx, "heartbeat", (&[], None, None), Some(&format!("{pace} {lease} {sure} {writes}")))
}

fn read_events(state: &mut State, session: u64, most: usize) -> Vec<Event> {
    let mut events = Vec::new();
    let mut keys = 0_usize;
    while events.len() < most
        && (events.is_empty() || keys.saturating_add(state.sessions.next_size(session)) <= KEYS_AT_ONCE)
    {
        let Some((mut event, unheard)) = state.sessions.read(session) else { break };
        if let Some(Unheard { grant, since }) = unheard {
            // Its owner may have shortened the lease since.
            if let Some(grant) = state.undelivered.delivered(grant)
                && let Kind::Granted(_, until) = &mut event.kind
            {
                *until = (*until).min(grant.deadline());
            }
            time(|stats| &mut stats.hand_offs, Now::read().micros.saturating_sub(since.micros));
        }
        keys = keys.saturating_add(event.keys.len());
        events.push(event);
    }
    events
}

fn reply_event(ctx: Ctx, event: &Event, asked: Millis) -> Replied {
    let Event { kind, keys, owner } = event;
    let lasts = match kind {
        // One without an end lasts longer than any lease.
        Kind::Granted(_, deadline) => deadline.remaining(asked).unwrap_or(config::MAX_LEASE.get()).to_string(),
        _ => String::new(),
    };
    let (name, token, detail) = match kind {
        Kind::Granted(token, _) => ("granted", Some(*token), Some(lasts.as_str())),
        Kind::TimedOut => ("timeout", None, None),
        Kind::Refused(error) => ("refused", None, Some(error.as_str())),
        Kind::Lost(token, why) => ("lost", Some(*token), Some(why.name())),
        Kind::Unbound(token, why) => ("unbound", Some(*token), Some(why.name())),
        Kind::Contended(token) => ("contended", Some(*token), None),
    };
    write_event(ctx, name, (keys, Some(owner), token), detail)
}

/// Writes an event: its six elements.
fn write_event(
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
