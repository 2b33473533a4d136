//! How a wait begins: a client is blocked, or a session is promised an event.
//!
//! It ends in one of these ways. Each leaves the queue and, if the request stood in others' way, serves them: granted
//! ([`crate::serving`]); timed out, or `CLIENT UNBLOCK`; the key no longer a lock, or a contradiction; rights taken
//! away; a cycle of waits found; withdrawn (`LOCK.RELEASE … ALL`), or superseded by the same owner; or its client gone: disconnected, killed, unblocked with
//! an error, redirected to another node, or refused because this server is now a replica.

use crate::config;
use crate::confirming;
use crate::deadlocks;
use crate::holds::{self, Grantee};
use crate::keyspace::Lock;
use crate::lock::deadlock;
use crate::lock::serve::Change;
use crate::lock::{Limit, LockKey, Millis, Owner, WaiterId};
use crate::replies;
use crate::server::blocked::{block, block_for_events};
use crate::server::clients;
use crate::server::clock::{Now, Slice, steady_micros};
use crate::server::reply::Replied;
use crate::server::text::show_start;

use crate::server::{Ctx, TextRef, events};
use crate::serving::schedule_earlier;
use crate::state::confirmations::What;
use crate::state::event_bytes::hold_bytes;
use crate::state::pending::{About, OnBehalf, Purpose, Ticket, wait_bytes};
use crate::state::sessions::{Reader, Remains};
use crate::state::{
    Answer, Asker, Basis, GrantId, GrantedHold, Outcome, Reading, Recipient, SignsOfLife, Stage, State, Terms,
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
        let Terms { flags, replicas, .. } = *terms;
        let Self { client, on_behalf, form, .. } = *self;
        Asker { ticket, client, on_behalf, flags, replicas, form, arrived: steady_micros() }
    }

    /// Blocks the client, or replies `WAITING` to the session, and records the recipient of the outcome.
    fn owe(&self, state: &mut State, ctx: Ctx, names: &[TextRef], now: Now) -> Result<(Ticket, Replied), String> {
        events::watch_keys(ctx);
        let ticket = state.pending.ticket();
        let (to, replied) = match self.on_behalf {
            OnBehalf::Itself => {
                let (block, replied) = block(ctx, names, ticket).ok_or(NOT_BLOCKED)?;
                (Recipient::Blocked { client: self.client, block: Some(block) }, replied)
            }
            OnBehalf::Session => {
                let about = self.about();
                state.sessions.add_wait(self.client, &about, ticket);
                state.sessions.expect_again(self.client, now.millis());
                (Recipient::Session { client: self.client, about: about.into() }, ctx.reply_line(c"WAITING"))
            }
        };
        // The caller notes what it waits for.
        state.pending.owe(ticket, to, Stage::Beginning);
        Ok((ticket, replied))
    }
}

/// The error where the server can't block the client.
const NOT_BLOCKED: &str = "ERR this client can't be blocked";

/// Puts a request into the queue for the locks of these names, at the place of its arrival (by `steady_millis`), unless
/// its wait would close a cycle. The locks that were read are scheduled for another look; for the others, those that wait
/// already have seen to that. Where it has become the first, it is looked at in this turn of the event loop.
///
/// # Errors
///
/// The reply that says why it can't wait.
pub fn wait(
    state: &mut State,
    ctx: Ctx,
    request: Request,
    (names, locks): (&[TextRef], &[Lock]),
    terms: &Terms,
    (arrived, wait, search): (Millis, Wait, Search),
    now: Now,
) -> Result<Replied, String> {
    let (demand, until) = (terms.demand, wait.until(now));
    if search == Search::ForCycles {
        let id = state.queue.next_id(arrived);
        let asking = deadlock::Request { id, owner: request.owner.clone(), keys: request.keys.clone() };
        deadlocks::refuse_cycle(state, ctx, &asking, request.client, now)?;
    }
    let (ticket, replied) = request.owe(state, ctx, names, now)?;
    let asker = request.asker(ticket, terms);
    let Request { keys, owner, .. } = request;
    let id = state.queue.join(owner, keys.clone(), demand, arrived, until, asker);
    state.pending.set(ticket, Stage::Waiting(id));
    state.pending.timeouts.extend(until.map(|until| (until, ticket)));
    for key in keys.iter() {
        if state.queue.has_behind(key, id) && state.queue.head(key.db, &key.name) == Some(id) {
            state.agenda.note(key.clone(), Change::Freed);
        }
    }
    for (lock, key) in locks.iter().zip(keys.iter()) {
        schedule_earlier(state, lock, key, now.millis());
    }
    Ok(replied)
}

/// The place in the queue of this owner's request for the same keys under the same limit, if there is one.
///
/// # Errors
///
/// If its owner waits for one of these keys in another way.
pub fn place_of(state: &State, request: &Request, limit: Limit) -> Result<Option<WaiterId>, String> {
    let of_key = |key: &LockKey| state.queue.request_of(&request.owner, key);
    let Some(id) = request.keys.iter().find_map(of_key) else { return Ok(None) };
    let waits = state.queue.get(id).map(|waiter| (waiter.keys.len(), waiter.demand.limit));
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
    state: &mut State,
    ctx: Ctx,
    id: WaiterId,
    request: &Request,
    names: &[TextRef],
    (terms, wait): (&Terms, Wait),
    now: Now,
) -> Result<Replied, String> {
    const SUPERSEDED: &str = "SUPERSEDED this owner has asked for the same lock again";
    let Some(waiter) = state.queue.get(id) else { return Err("ERR the request that waited has ended".into()) };
    let (asker, until) = (waiter.asker, waiter.until);
    if let Some(until) = until {
        state.pending.timeouts.remove(&(until, asker.ticket));
    }
    let is_of_session = request.on_behalf == OnBehalf::Session && asker.on_behalf == OnBehalf::Session;
    if is_of_session && asker.client == request.client {
        state.forget_request(asker.ticket);
    } else {
        replies::end_request(state, asker.ticket, Outcome::Refused(SUPERSEDED.into()), now);
    }
    let (ticket, replied) = match request.owe(state, ctx, names, now) {
        Ok(owed) => owed,
        Err(error) => {
            state.leave(id);
            return Err(error);
        }
    };
    let until = wait.until(now);
    if let Some(waiter) = state.queue.get_mut(id) {
        (waiter.demand, waiter.until, waiter.asker) = (terms.demand, until, request.asker(ticket, terms));
    }
    state.pending.set(ticket, Stage::Waiting(id));
    state.pending.timeouts.extend(until.map(|until| (until, ticket)));
    Ok(replied)
}

/// Withholds the answer to a grant or renewal of these holds until its replicas have confirmed it.
///
/// # Errors
///
/// The reply that says that the client can't wait for the answer. What was granted is revoked.
pub fn confirm(
    state: &mut State,
    ctx: Ctx,
    request: &Request,
    names: &[TextRef],
    answer: Answer,
    (grantee, basis, holds): (Grantee, Basis, Vec<GrantedHold>),
    now: Now,
) -> Result<Replied, String> {
    let (owed, terms) = (request.owe(state, ctx, names, now), *grantee.terms);
    let ticket = owed.as_ref().map_or_else(|_| state.pending.ticket(), |(ticket, _)| *ticket);
    let grant = holds::note_undelivered(state, ctx.db(), grantee, ticket, (basis, holds));
    match owed {
        Ok((_, replied)) => {
            let id = confirming::begin(state, What::Reply { ticket, answer, grant, terms }, terms.replicas, now);
            state.pending.set(ticket, Stage::Confirming(id));
            Ok(replied)
        }
        Err(error) => {
            state.revoke(grant);
            Err(error)
        }
    }
}

/// Whether a session has room for the events that a request may cause: the one that says how it ends, and those of its holds
/// once they are bound. Connections that are no sessions always have.
///
/// # Errors
///
/// Names the setting that forbids it.
pub fn has_room_for_events(
    state: &State,
    (client, on_behalf): (u64, OnBehalf),
    owner: &[u8],
    names: &[TextRef],
    purpose: &Purpose,
) -> Result<(), String> {
    if !state.sessions.is_open(client) {
        return Ok(());
    }
    let names = names.iter().map(|name| name.bytes());
    let bytes = match on_behalf {
        OnBehalf::Session => wait_bytes(owner, purpose, names),
        OnBehalf::Itself => names.map(|name| hold_bytes(owner, name)).fold(0, usize::saturating_add),
    };
    let most = config::MAX_SESSION_BYTES.get();
    if state.has_room_for(client, bytes, most) {
        return Ok(());
    }
    Err(format!(
        "ERR too many waits, bound holds and unread events of this session: with this request, they might take more than \
         holdfast.max-session-bytes, which is {most}"
    ))
}

/// The answer to a session's request if the same request waits for its turn, or awaits replicas, already. Changes nothing.
pub fn repeated(state: &State, ctx: Ctx, request: &Request) -> Option<Replied> {
    let key = request.keys.first()?;
    let is_same = |to: &Recipient<_>| match to {
        Recipient::Session { client, about } => {
            *client == request.client && about.keys == request.keys && about.purpose == request.purpose
        }
        Recipient::Blocked { .. } => false,
    };
    let mut tickets = state.tickets_of(&request.owner, key);
    let is_repeated = tickets.any(|ticket| state.pending.get(ticket).is_some_and(|pending| is_same(&pending.to)));
    is_repeated.then(|| ctx.reply_line(c"WAITING"))
}

/// An owner withdraws its requests for a lock of the selected database: the one in the queue, and those that were granted
/// and whose answer is undelivered. Of these, the caller releases this hold, and the others are revoked. Returns the keys of
/// the requests; the caller serves those who wait for them.
pub fn withdraw(state: &mut State, ctx: Ctx, name: TextRef, owner: TextRef, now: Now) -> Vec<LockKey> {
    const RELEASED: &str = "UNCONFIRMED the lock was released before its replicas had confirmed it";
    let key = LockKey::new(ctx.db(), name.bytes());
    let id = if state.queue.is_empty() { None } else { state.queue.request_of(&owner.bytes().into(), &key) };
    let waiter = id.and_then(|id| state.queue.leave(id));
    let granted = state.undelivered.of(key.db, &key.name, owner.bytes());
    let mut keys: Vec<LockKey> = waiter.iter().flat_map(|waiter| waiter.keys.iter().cloned()).collect();
    if let Some(waiter) = waiter {
        replies::end_wait(state, &waiter, Outcome::Withdrawn, now);
    }
    for id in granted {
        match state.withdraw_granted(id, &key) {
            None => continue,
            Some(WithdrawnGrant::Event) => {}
            Some(WithdrawnGrant::Reply(ticket)) => replies::end_request(state, ticket, Outcome::Withdrawn, now),
            Some(WithdrawnGrant::Unconfirmed(ticket)) => {
                replies::end_request(state, ticket, Outcome::Refused(RELEASED.into()), now);
            }
        }
        keys.push(key.clone());
    }
    keys
}

/// Blocks a session until its next events arrive, or until a heartbeat is due.
pub fn read_next(
    state: &mut State,
    ctx: Ctx,
    session: u64,
    reading: Reading,
    wait: Wait,
    now: Now,
) -> Result<Replied, String> {
    events::watch_keys(ctx);
    state.read_by(session);
    if wait == Wait::No || state.sessions.unread(session) > 0 || !ctx.flags().may_block() {
        return Ok(replies::reply_events(state, ctx, session, reading));
    }
    let ticket = state.pending.ticket();
    let (block, replied) = block_for_events(ctx, ticket).ok_or(NOT_BLOCKED)?;
    // What is renewed for the session needs a reader, so it must ask again in time.
    let has_to_ask = reading.signs == SignsOfLife::Wanted || state.bindings.shortest_lease(session).is_some();
    let pace = state.sessions.promised_pace(session, state.pace(session, config::default_lease()));
    let until = if has_to_ask { wait.at_most(pace) } else { wait }.until(now);
    let to = Recipient::Blocked { client: session, block: Some(block) };
    state.pending.owe(ticket, to, Stage::Reading(Box::new(Reading { until, ..reading })));
    state.sessions.set_reader(session, Some(Reader { ticket, until }));
    state.pending.timeouts.extend(until.map(|until| (until, ticket)));
    Ok(replied)
}

/// Whether there is room for one more request in the queue of each of its keys.
///
/// # Errors
///
/// Names the setting that forbids it.
pub fn has_room(state: &State, request: &Request) -> Result<(), String> {
    let most = config::MAX_WAITERS.get();
    let is_full = |key: &&LockKey| most > 0 && state.queue.waiting(key.db, &key.name) as u64 >= most;
    match request.keys.iter().find(is_full) {
        Some(key) => {
            let name = show_start(&key.name);
            Err(format!("ERR too many waiters for '{name}': holdfast.max-waiters is {most}"))
        }
        None => Ok(()),
    }
}

/// Ends the waits that have timed out.
pub fn time_out(state: &mut State, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(ticket) = state.pending.take_timeout(now.millis()) else { break };
        match state.pending.get(ticket).map(|pending| &pending.stage) {
            Some(Stage::Waiting(id)) => {
                let id = *id;
                if let Some(waiter) = state.queue.leave(id) {
                    replies::end_wait(state, &waiter, Outcome::TimedOut, now);
                }
            }
            Some(Stage::Reading(..)) => state.pending.call(ticket),
            _ => {}
        }
    }
}

/// Ends the sessions that were promised a heartbeat and do not ask for it, if they have anything bound or waiting: the
/// process that they stand for is gone. One that is blocked in another command of its own can't ask.
pub fn end_silent(state: &mut State, ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(client) = state.sessions.take_silent(now.millis()) else { break };
        if !state.is_needed(client) {
            state.sessions.expect_nothing(client);
        } else if !state.sessions.excuse_blocked(client, clients::is_blocked(client), now.millis())
            && clients::end(ctx, client)
        {
            ctx.warn("holdfast: closed the connection of a session that has sent no LOCK.EVENTS for a default lease");
        }
    }
}

/// Removes what ended sessions leave behind: waiting requests, and grants that they never heard of.
pub fn leave_ended(state: &mut State, slice: &Slice) {
    while !slice.is_over() {
        let Some(undelivered) = next_of_ended(state) else { break };
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
pub fn refuse_undecided(state: &mut State, now: Now, slice: &Slice) {
    const UNBLOCKED: &str = "UNBLOCKED this server is now a replica and grants no locks";
    let refused = || Outcome::Refused(UNBLOCKED.into());
    while !slice.is_over() {
        let Some((from, end)) = state.undecided.waiters else { break };
        let next = state.queue.from(from).next().filter(|waiter| waiter.id < end);
        let next = next.map(|waiter| (waiter.id, waiter.asker.on_behalf));
        state.undecided.waiters = next.map(|(id, _)| (id.next(), end));
        // Who has come since then, and arrived earlier, waits for what the server is now.
        if let Some((id, OnBehalf::Session)) = next
            && id.ticket < state.undecided.tickets
            && let Some(waiter) = state.queue.leave(id)
        {
            replies::end_wait(state, &waiter, refused(), now);
        }
    }
    while !slice.is_over() {
        let Some(it) = state.undecided.next_confirmation() else { break };
        let What::Reply { ticket, grant, .. } = it.what else { continue };
        state.revoke(grant);
        if state.pending.get(ticket).is_some_and(|pending| matches!(pending.to, Recipient::Session { .. })) {
            replies::end_request(state, ticket, refused(), now);
        }
    }
}
