//! Deferred replies: how waiters get theirs, and what happens if their client is gone.
//!
//! A blocked client is answered at the end of an event-loop iteration ([`send_answers`]). The answer to a session's
//! request goes into the session's event queue. A reader that is blocked in `LOCK.EVENTS` is answered as other blocked
//! clients are. A grant is undelivered ([`state::Undelivered`]), and can be revoked, until its reply has been composed,
//! or the reply that carries its event.

use crate::config;
use crate::holds;
use crate::lock::{LockKey, Millis, Owner, Token, Waiter};
use crate::server::Ctx;
use crate::server::blocked::Blocked;
use crate::server::clock::{Now, Slice};
use crate::server::reply::Replied;
use crate::state::pending::{OnBehalf, Ticket};
use crate::state::sessions::UnreadGrant;
use crate::state::{self, Answer, Event, HeartbeatMode, Kind, Outcome, Reading, Requester, Stage, State};
use crate::stats::{add, count, time};

/// The most blocked clients that are answered in one event-loop iteration. A count, not a time limit: unblocking a
/// client takes less than a microsecond here, but the server then takes ten times as long to compose and write the
/// reply.
const REPLIES_PER_ITERATION: usize = 32;

/// The least time, in ms, that a session has to ask for a promised heartbeat once that is due. Normally it has a
/// default lease.
const MIN_PATIENCE: Millis = 1_000;

/// The most keys that the events of one read name in all, unless the first event alone names more.
const KEYS_PER_READ: usize = 2_000;

/// Records how a request ended, so that its recipient gets the outcome. `now` is when it ended.
pub fn end_request(state: &mut State, request: Box<Waiter<Requester>>, outcome: Outcome, now: Now) {
    if state.end(request, outcome, now).is_some() {
        count(|it| &mut it.grants_undelivered);
    }
}

/// Ends the wait of a request that has left the queue without a grant. Requests that waited behind it may be served.
pub fn end_wait(state: &mut State, waiter: Box<Waiter<Requester>>, outcome: Outcome, now: Now) {
    state.left_without_grant(&waiter);
    match outcome {
        Outcome::TimedOut => time_out(state, waiter, now),
        outcome => end_request(state, waiter, outcome, now),
    }
}

/// Answers a request that has left the queue without a grant and without an error. (A blocked client's timeout is
/// counted when the server has unblocked it.)
pub fn time_out(state: &mut State, waiter: Box<Waiter<Requester>>, now: Now) {
    if waiter.requester.on_behalf == OnBehalf::Session {
        count(|it| &mut it.timeouts);
    }
    end_request(state, waiter, Outcome::TimedOut, now);
}

/// Answers the clients whose answers are ready, up to `REPLIES_PER_ITERATION` of them. The state is not borrowed
/// meanwhile: the server calls [`answer`] for each.
pub fn send_answers(ctx: Ctx) {
    for _ in 0..REPLIES_PER_ITERATION {
        let Some((ticket, block)) = state::with(|state| state.pending.next_ending()) else { break };
        if block.may_be_ended_by_server(ctx) {
            state::with(|state| state.pending.postpone(ticket, block));
        } else {
            block.answer();
        }
    }
}

/// Answers the next client, if it is blocked in `LOCK.EVENTS`: the server composes its reply at the end of this
/// event-loop iteration. No other blocked client may be answered while the state is borrowed. Each call of the module
/// answers at most one client, so that an iteration has no more of these replies than calls.
pub fn answer_reader(state: &mut State, ctx: Ctx) {
    let Some((ticket, block)) = state.pending.next_reader() else { return };
    if block.may_be_ended_by_server(ctx) {
        state.pending.postpone(ticket, block);
    } else {
        block.answer();
    }
}

/// Answers the clients whose answers were postponed. The server might have ended their waits itself, but its cron has
/// just checked them and has not.
pub fn send_postponed(slice: &Slice) {
    while !slice.is_over() {
        let Some(block) = state::with(|state| state.pending.next_postponed()) else { break };
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
            state.end_reading(reader.client, ticket, reader.reading.until);
            reply_events(state, ctx, reader.client, reader.reading)
        }
        _ => {
            gone(state, ticket);
            ctx.reply_null()
        }
    };
}

/// Replies with the outcome of a request that ended at `at`.
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

/// Withdraws the request of a blocked client that is gone. Writes nothing to the keyspace, because another command may
/// be in progress.
pub fn gone(state: &mut State, ticket: Ticket) {
    let Some(it) = state.withdraw(ticket) else { return };
    add(|counts| &mut counts.grants_undelivered, u64::from(it.was_granted));
    it.block.into_iter().for_each(Blocked::has_ended);
}

/// Ends the session of a closed connection, and its bindings. Writes nothing to the keyspace.
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

/// Replies with a session's next undelivered events, and with a heartbeat at their end if the session asked for one.
/// Replies with null if there is neither.
pub fn reply_events(state: &mut State, ctx: Ctx, session: u64, reading: Reading) -> Replied {
    let events = read_events(state, session, reading.most);
    let signs = usize::from(reading.signs == HeartbeatMode::Wanted);
    let count = events.len().saturating_add(signs);
    if count == 0 {
        return ctx.reply_null();
    }
    let array = ctx.reply_array(count);
    let replied = events.iter().fold(array, |_, event| reply_event(ctx, event, reading.asked));
    if signs == 0 { replied } else { reply_heartbeat(state, ctx, session, reading.asked) }
}

/// Writes the heartbeat, which is not an event of the queue: the session is alive. Its detail says within how many ms
/// the next `LOCK.EVENTS` will be answered, and the default lease. It also says how many thousandths of its lease every
/// renewed hold of the session has left at least, counted from when the session asked. Last, it says whether the server
/// takes writes.
fn reply_heartbeat(state: &mut State, ctx: Ctx, session: u64, asked: Millis) -> Replied {
    let lease = config::default_lease();
    let pace = state.pace(session, lease);
    state.sessions.promise_pace(session, pace);
    let silent_after = pace.saturating_add(lease.max(MIN_PATIENCE));
    state.sessions.expect_within(session, silent_after, Now::read().millis());
    let sure = state.bindings.sure(session, asked);
    let writes = u8::from(holds::takes_writes(ctx));
    write_event(ctx, "heartbeat", (&[], None, None), Some(&format!("{pace} {lease} {sure} {writes}")))
}

fn read_events(state: &mut State, session: u64, most: usize) -> Vec<Event> {
    let mut events = Vec::with_capacity(most.min(state.sessions.unread(session)).min(KEYS_PER_READ));
    let mut keys = 0_usize;
    while events.len() < most
        && (events.is_empty() || keys.saturating_add(state.sessions.next_size(session)) <= KEYS_PER_READ)
    {
        let Some((mut event, unread_grant)) = state.sessions.read(session) else { break };
        if let Some(UnreadGrant { grant, since }) = unread_grant {
            // The owner may have shortened the lease since.
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
        // A hold without a deadline lasts longer than any lease.
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
