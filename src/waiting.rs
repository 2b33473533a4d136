//! How a wait begins: a client is blocked, or a session is promised an event.
//!
//! It ends in one of these ways. Each leaves the queue and, if the request stood in others' way, serves them: granted
//! ([`crate::serving`]); timed out, or `CLIENT UNBLOCK`; the key no longer a lock, or a contradiction; rights taken
//! away; a cycle of waits found; withdrawn (`LOCK.RELEASE … ALL`), or superseded by the same owner; or its client gone: disconnected, killed, unblocked with
//! an error, redirected to another node, or told that this server is now a replica.

use crate::answering;
use crate::config;
use crate::confirming;
use crate::deadlocks;
use crate::holding::{self, Grantee};
use crate::keyspace::Lock;
use crate::lock::deadlock;
use crate::lock::serve::Change;
use crate::lock::{Limit, LockKey, Millis, Owner, WaiterId};
use crate::server::blocked::{block, block_for_events};
use crate::server::clients;
use crate::server::clock::{Now, Slice, steady_micros};
use crate::server::reply::Replied;
use crate::server::text::show_start;
use crate::server::timer::{self, Timer};
use crate::server::{Ctx, TextRef, events};
use crate::serving::schedule_earlier;
use crate::state::confirmations::What;
use crate::state::event_bytes::hold_bytes;
use crate::state::owed::{About, OnBehalf, Purpose, Ticket, wait_bytes};
use crate::state::sessions::{Reader, Remains};
use crate::state::{
    self, Answer, Asker, Basis, GrantId, GrantedHold, Outcome, Reading, Recipient, SignsOfLife, Stage, State, Terms,
    TokenForm, WithdrawnGrant,
};
use crate::stats::add;
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

/// What is searched before a request begins to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// Whether its wait would close a cycle.
    ForCycles,
    /// Nothing: it waits for replicas to confirm another request of its owner, which ends by itself.
    Nothing,
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
    /// What a grant is answered with.
    pub form: TokenForm,
}

impl Request {
    fn about(&self) -> About {
        About { keys: self.keys.clone(), owner: self.owner.clone(), purpose: self.purpose }
    }

    fn asker(&self, ticket: Ticket, terms: &Terms) -> Asker {
        let Terms { tying, replicas, .. } = *terms;
        let Self { client, on_behalf, form, .. } = *self;
        Asker { ticket, client, on_behalf, tying, replicas, form, arrived: steady_micros() }
    }

    /// Blocks the client, or tells the session that an event will follow, and records who is owed the answer.
    fn owe(&self, ctx: Ctx, names: &[TextRef], now: Now) -> Option<(Ticket, Replied)> {
        events::watch_keys(ctx);
        let ticket = state::with(|state| state.owed.ticket());
        let (to, replied) = match self.on_behalf {
            OnBehalf::Itself => {
                let (block, replied) = block(ctx, names, ticket)?;
                (Recipient::Blocked { client: self.client, block: Some(block) }, replied)
            }
            OnBehalf::Session => {
                let about = self.about();
                state::with(|state| {
                    state.sessions.add_wait(self.client, &about, ticket);
                    state.sessions.expect_again(self.client, now.millis());
                });
                (Recipient::Session { client: self.client, about }, ctx.reply_line(c"WAITING"))
            }
        };
        // The caller notes what it waits for.
        state::with(|state| state.owed.owe(ticket, to, Stage::Beginning));
        if self.on_behalf == OnBehalf::Session {
            holding::wake_for_ties(ctx);
        }
        Some((ticket, replied))
    }
}

/// Puts a request into the queue for the locks of these names, at the place of its arrival (by `steady_millis`), unless
/// its wait would close a cycle. The locks that were read are scheduled for another look; for the others, those that wait
/// already have seen to that. Where it has become the first, it is looked at in this turn of the event loop.
///
/// # Errors
///
/// The reply that says why it can't wait.
pub fn wait(
    ctx: Ctx,
    request: Request,
    (names, locks): (&[TextRef], &[Lock]),
    terms: &Terms,
    (arrived, wait, search): (Millis, Wait, Search),
    now: Now,
) -> Result<Replied, String> {
    let (demand, until) = (terms.demand, wait.until(now));
    if search == Search::ForCycles {
        let id = state::with(|state| state.queue.next_id(arrived));
        let asking = deadlock::Request { id, owner: request.owner.clone(), keys: request.keys.clone() };
        deadlocks::refuse_cycle(ctx, &asking, request.client, now)?;
    }
    let Some((ticket, replied)) = request.owe(ctx, names, now) else {
        return Err("ERR this client can't be blocked".into());
    };
    let asker = request.asker(ticket, terms);
    let Request { keys, owner, .. } = request;
    let overtakes = state::with(|state| {
        let id = state.queue.join(owner, keys.clone(), demand, arrived, until, asker);
        state.owed.set(ticket, Stage::Waiting(id));
        state.owed.timeouts.extend(until.map(|until| (until, ticket)));
        let is_new_head =
            |key: &&LockKey| state.queue.head(key.db, &key.name) == Some(id) && state.queue.has_behind(key, id);
        let overtaken: Vec<&LockKey> = keys.iter().filter(is_new_head).collect();
        overtaken.iter().for_each(|key| state.agenda.note((*key).clone(), Change::Freed));
        !overtaken.is_empty()
    });
    if overtakes {
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
    for (lock, key) in locks.iter().zip(keys.iter()) {
        schedule_earlier(lock, key, now.millis());
    }
    if let Some(until) = until {
        timer::wake(ctx, Timer::Work, until);
    }
    Ok(replied)
}

/// The place in the queue of this owner's request for the same keys under the same limit, if there is one.
///
/// # Errors
///
/// If its owner waits for one of these keys in another way.
pub fn place_of(request: &Request, limit: Limit) -> Result<Option<WaiterId>, String> {
    let of_key = |key: &LockKey| state::with(|state| state.queue.of_owner(&request.owner, key));
    let Some(id) = request.keys.iter().find_map(of_key) else { return Ok(None) };
    let waits = state::with(|state| state.queue.get(id).map(|waiter| (waiter.keys.len(), waiter.demand.limit)));
    let is_for_all = || request.keys.iter().all(|key| of_key(key) == Some(id));
    match waits {
        Some((keys, _)) if keys != request.keys.len() || !is_for_all() => {
            Err("ERR this owner already waits for one of these keys, together with other keys".into())
        }
        Some((_, other)) if other != limit => {
            Err(format!("ERR this owner already waits for this lock under another limit: {}", other.number()))
        }
        waits => Ok(waits.map(|_| id)),
    }
}

/// Lets a request take over the place in the queue of an earlier one of the same owner, which ends: `-SUPERSEDED`, unless
/// both are of one session, for which they are one.
///
/// # Errors
///
/// The reply that says why it can't wait.
pub fn take_over(
    ctx: Ctx,
    id: WaiterId,
    request: &Request,
    names: &[TextRef],
    terms: &Terms,
    wait: Wait,
    now: Now,
) -> Result<Replied, String> {
    const SUPERSEDED: &str = "SUPERSEDED this owner has asked for the same lock again";
    let before = state::with(|state| {
        let waiter = state.queue.get(id)?;
        let (ticket, until) = (waiter.asker.ticket, waiter.until);
        let is_same = request.on_behalf == OnBehalf::Session
            && (waiter.asker.on_behalf, waiter.asker.client) == (OnBehalf::Session, request.client);
        if let Some(until) = until {
            state.owed.timeouts.remove(&(until, ticket));
        }
        Some((ticket, is_same))
    });
    let Some((before, is_same)) = before else { return Err("ERR the request that waited has ended".into()) };
    if is_same {
        state::with(|state| state.forget_request(before));
    } else {
        answering::end_request(ctx, before, Outcome::Refused(SUPERSEDED.into()), now);
    }
    let Some((ticket, replied)) = request.owe(ctx, names, now) else {
        state::with(|state| state.leave(id));
        return Err("ERR this client can't be blocked".into());
    };
    let until = wait.until(now);
    state::with(|state| {
        if let Some(waiter) = state.queue.get_mut(id) {
            (waiter.demand, waiter.until, waiter.asker) = (terms.demand, until, request.asker(ticket, terms));
        }
        state.owed.set(ticket, Stage::Waiting(id));
        state.owed.timeouts.extend(until.map(|until| (until, ticket)));
    });
    if let Some(until) = until {
        timer::wake(ctx, Timer::Work, until);
    }
    Ok(replied)
}

/// Withholds the answer to a grant or renewal of these holds until its replicas have confirmed it.
///
/// # Errors
///
/// The reply that says that nobody can wait for the answer. What was granted is revoked.
pub fn confirm(
    ctx: Ctx,
    request: &Request,
    names: &[TextRef],
    answer: Answer,
    (grantee, basis, holds): (Grantee, Basis, Vec<GrantedHold>),
    now: Now,
) -> Result<Replied, String> {
    let (owed, terms) = (request.owe(ctx, names, now), *grantee.terms);
    let ticket = owed.as_ref().map_or_else(|| state::with(|state| state.owed.ticket()), |(ticket, _)| *ticket);
    let grant = holding::note_undelivered(ctx.db(), grantee, ticket, (basis, holds));
    let Some((_, replied)) = owed else {
        state::with(|state| state.revoke(grant));
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
        return Err("ERR this client can't be blocked".into());
    };
    let id = confirming::begin(ctx, What::Reply { ticket, answer, grant, terms }, terms.replicas, now);
    state::with(|state| state.owed.set(ticket, Stage::Confirming(id)));
    Ok(replied)
}

/// Whether a session has room for the events that a request may cause: the one that says how it ends, and those of its holds
/// once they are bound. Connections that are no sessions always have.
///
/// # Errors
///
/// Names the setting that forbids it.
pub fn has_room_for_events(
    (client, on_behalf): (u64, OnBehalf),
    owner: &[u8],
    names: &[TextRef],
    purpose: &Purpose,
) -> Result<(), String> {
    if !state::with(|state| state.sessions.is_open(client)) {
        return Ok(());
    }
    let names = names.iter().map(|name| name.bytes());
    let bytes = match on_behalf {
        OnBehalf::Session => wait_bytes(owner, purpose, names),
        OnBehalf::Itself => names.map(|name| hold_bytes(owner, name)).fold(0, usize::saturating_add),
    };
    let most = config::MAX_SESSION_BYTES.get();
    if state::with(|state| state.has_room_for(client, bytes, most)) {
        return Ok(());
    }
    Err(format!(
        "ERR too many waits, bound holds and unread events of this session: with this request, they might take more than \
         holdfast.max-session-bytes, which is {most}"
    ))
}

/// The answer to a session's request if the same request waits for its turn, or awaits replicas, already. Changes nothing.
pub fn repeated(ctx: Ctx, request: &Request) -> Option<Replied> {
    let key = request.keys.first()?;
    let is_same = |to: &Recipient<_>| match to {
        Recipient::Session { client, about } => {
            *client == request.client && about.keys == request.keys && about.purpose == request.purpose
        }
        Recipient::Blocked { .. } => false,
    };
    let is_repeated = state::with(|state| {
        let mut tickets = state.tickets_of(&request.owner, key);
        tickets.any(|ticket| state.owed.get(ticket).is_some_and(|pending| is_same(&pending.to)))
    });
    is_repeated.then(|| ctx.reply_line(c"WAITING"))
}

/// An owner withdraws its requests for a lock of the selected database: the one in the queue, and those that were granted
/// and whose answer is undelivered. Of these, the caller releases this hold, and the others are revoked. Returns the keys of
/// the requests; the caller serves those who wait for them.
pub fn withdraw(ctx: Ctx, name: TextRef, owner: TextRef, now: Now) -> Vec<LockKey> {
    const RELEASED: &str = "UNCONFIRMED the lock was released before its replicas had confirmed it";
    let key = LockKey::new(ctx.db(), name.bytes());
    let (waiter, pending) = state::with(|state| {
        let waits = state.queue.waits(owner.bytes());
        let id = if waits { state.queue.of_owner(&owner.bytes().into(), &key) } else { None };
        let waiter = id.and_then(|id| state.queue.leave(id));
        let ids = state.undelivered.of(key.db, &key.name, owner.bytes());
        (waiter, ids.into_iter().filter_map(|id| state.withdraw_granted(id, &key)).collect::<Vec<_>>())
    });
    let mut keys: Vec<LockKey> = waiter.iter().flat_map(|waiter| waiter.keys.iter().cloned()).collect();
    if let Some(waiter) = waiter {
        answering::end_wait(ctx, &waiter, Outcome::Withdrawn, now);
    }
    for withdrawn in pending {
        let (ticket, outcome) = match withdrawn {
            WithdrawnGrant::Event => (None, Outcome::Withdrawn),
            WithdrawnGrant::Reply(ticket) => (Some(ticket), Outcome::Withdrawn),
            WithdrawnGrant::Unconfirmed(ticket) => (Some(ticket), Outcome::Refused(RELEASED.into())),
        };
        if let Some(ticket) = ticket {
            answering::end_request(ctx, ticket, outcome, now);
        }
        keys.push(key.clone());
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
    keys
}

/// Blocks a session until its next events arrive, or until it is due to hear that it is alive.
pub fn read_next(ctx: Ctx, session: u64, reading: Reading, wait: Wait, now: Now) -> Result<Replied, String> {
    events::watch_keys(ctx);
    let ticket = state::with(|state| {
        state.read_by(session);
        state.owed.ticket()
    });
    holding::wake_for_ties(ctx);
    if wait == Wait::No || state::with(|state| state.sessions.unread(session) > 0) || !ctx.flags().may_block() {
        return Ok(answering::reply_events(ctx, session, reading));
    }
    let Some((block, replied)) = block_for_events(ctx, ticket) else {
        return Err("ERR this client can't be blocked".into());
    };
    let until = state::with(|state| {
        // What is renewed for the session needs a reader, so it must ask again in time.
        let has_to_ask = reading.signs == SignsOfLife::Wanted || state.ties.shortest_lease(session).is_some();
        let pace = state.sessions.promised_pace(session, state.pace(session, config::default_lease()));
        let until = if has_to_ask { wait.at_most(pace) } else { wait }.until(now);
        let to = Recipient::Blocked { client: session, block: Some(block) };
        state.owed.owe(ticket, to, Stage::Reading(reading, until));
        state.sessions.set_reader(session, Some(Reader { ticket, until }));
        state.owed.timeouts.extend(until.map(|until| (until, ticket)));
        until
    });
    if let Some(until) = until {
        timer::wake(ctx, Timer::Work, until);
    }
    Ok(replied)
}

/// Whether there is room for one more request in the queue of each of its keys.
///
/// # Errors
///
/// Names the setting that forbids it.
pub fn has_room(request: &Request) -> Result<(), String> {
    let most = config::MAX_WAITERS.get();
    state::with(|state| {
        let full = |key: &LockKey| most > 0 && state.queue.waiting(key.db, &key.name) as u64 >= most;
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
        let due = state::with(|state| {
            let (_, ticket) = state.owed.timeouts.first().copied().filter(|(until, _)| *until <= now.millis())?;
            state.owed.timeouts.pop_first();
            let stage = state.owed.get(ticket).map(|pending| &pending.stage);
            Some(match stage {
                Some(Stage::Waiting(id)) => {
                    let id = *id;
                    state.queue.leave(id)
                }
                Some(Stage::Reading(..)) => {
                    state.owed.call(ticket);
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

/// Ends the sessions that were promised a heartbeat and do not ask for it, if they have anything bound or waiting: the
/// process that they stand for is gone. One that is blocked in another command of its own can't ask.
pub fn end_silent(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(client) = state::with(|state| state.sessions.take_silent(now.millis())) else { break };
        let is_blocked = clients::is_blocked(client);
        let may_be_silent = state::with(|state| {
            let is_needed = state.is_needed(client);
            if !is_needed {
                state.sessions.expect_nothing(client);
            }
            !is_needed || state.sessions.excuse_blocked(client, is_blocked, now.millis())
        });
        if !may_be_silent && clients::end(ctx, client) {
            ctx.warn("holdfast: closed the connection of a session that has sent no LOCK.EVENTS for a default lease");
        }
    }
}

/// Removes what ended sessions leave behind: waiting requests, and grants that they never heard of.
pub fn leave_ended(slice: &Slice) {
    while !slice.is_over() {
        let Some(undelivered) = state::with(next_of_ended) else { break };
        add(|it| &mut it.grants_undelivered, u64::from(undelivered.is_some()));
    }
}

/// Removes one thing that an ended session has left behind. Returns the grant, if it was one.
fn next_of_ended(state: &mut State) -> Option<Option<GrantId>> {
    Some(match state.sessions.next_remains()? {
        Remains::Event => None,
        Remains::Grant(grant) => {
            state.revoke(grant);
            Some(grant)
        }
        Remains::Wait(ticket) => {
            state.withdraw(ticket);
            None
        }
    })
}

/// Refuses everything that sessions wait for, because this server is now a replica. (The server itself answers
/// blocked clients.)
pub fn refuse_undecided(ctx: Ctx, now: Now, slice: &Slice) {
    const UNBLOCKED: &str = "UNBLOCKED this server is now a replica and grants no locks";
    let refused = || Outcome::Refused(UNBLOCKED.into());
    while !slice.is_over() {
        let waiter = state::with(|state| {
            let (from, end) = state.undecided.waiters?;
            let next = state.queue.from(from).next().filter(|waiter| waiter.id < end);
            let next = next.map(|waiter| (waiter.id, waiter.asker.on_behalf));
            state.undecided.waiters = next.map(|(id, _)| (id.next(), end));
            // Who has come since then, and arrived earlier, waits for what the server is now.
            let was_here = |id: WaiterId| id.ticket < state.undecided.tickets;
            next.map(|(id, by)| if by == OnBehalf::Session && was_here(id) { state.queue.leave(id) } else { None })
        });
        let Some(waiter) = waiter else { break };
        if let Some(waiter) = waiter {
            answering::end_wait(ctx, &waiter, refused(), now);
        }
    }
    while !slice.is_over() {
        let Some(it) = state::with(|state| state.undecided.next_confirmation()) else { break };
        let What::Reply { ticket, grant, .. } = it.what else { continue };
        state::with(|state| state.revoke(grant));
        let to_session = state::with(|state| {
            state.owed.get(ticket).is_some_and(|pending| matches!(pending.to, Recipient::Session { .. }))
        });
        if to_session {
            answering::end_request(ctx, ticket, refused(), now);
        }
    }
}
