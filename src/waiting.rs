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
use crate::lock::{Limit, LockKey, Millis, Owner, Waiter, WaiterId, internal_errors};
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
use crate::state::pending::{self, OnBehalf, wait_bytes};
use crate::state::sessions::Remains;
use crate::state::{
    Answer, Asker, Basis, GrantId, GrantedHold, Outcome, Reading, Renewal, SignsOfLife, Stage, State, Terms, TokenForm,
    WithdrawnGrant,
};
use crate::stats::count;
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
    /// What is asked for.
    pub terms: Terms,
    /// Of a request for a longer lease.
    pub renewal: Option<Renewal>,
    /// The keys.
    pub keys: Rc<[LockKey]>,
    /// The owner.
    pub owner: Owner,
    /// What a grant is answered with.
    pub form: TokenForm,
}

impl Request {
    /// Blocks the client, or replies `WAITING` to the session. The caller records what the reply is pending for.
    fn defer(&self, state: &mut State, ctx: Ctx, names: &[TextRef], now: Now) -> Result<(Asker, Replied), String> {
        events::watch_keys(ctx);
        let ticket = state.pending.ticket();
        let (block, replied) = match self.on_behalf {
            OnBehalf::Itself => {
                let (block, replied) = block(ctx, names, ticket).ok_or(NOT_BLOCKED)?;
                (Some(block), replied)
            }
            OnBehalf::Session => {
                let names = names.iter().map(|name| name.bytes());
                let bytes = wait_bytes(&self.owner, self.renewal.is_some(), names);
                state.sessions.add_wait(self.client, ticket, bytes);
                state.sessions.expect_again(self.client, now.millis());
                (None, ctx.reply_line(c"WAITING"))
            }
        };
        let Self { client, on_behalf, terms: Terms { flags, replicas, .. }, form, .. } = *self;
        let (renewal, arrived) = (self.renewal.map(Box::new), steady_micros());
        Ok((Asker { ticket, client, on_behalf, block, flags, replicas, renewal, form, arrived }, replied))
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
    (arrived, wait): (Millis, Wait),
    now: Now,
) -> Result<Replied, String> {
    let until = wait.until(now);
    let id = state.queue.next_id(arrived);
    let asking = deadlock::Request { id, owner: request.owner.clone(), keys: request.keys.clone() };
    deadlocks::refuse_cycle(state, ctx, &asking, request.client, now)?;
    let (asker, replied) = request.defer(state, ctx, names, now)?;
    let ticket = asker.ticket;
    let Request { keys, owner, terms, .. } = request;
    let id = state.queue.join(owner, keys.clone(), terms.demand, arrived, until, asker);
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
    request: Request,
    names: &[TextRef],
    wait: Wait,
    now: Now,
) -> Result<Replied, String> {
    const SUPERSEDED: &str = "SUPERSEDED this owner has asked for the same lock again";
    let (asker, replied) = request.defer(state, ctx, names, now)?;
    let (ticket, until) = (asker.ticket, wait.until(now));
    state.pending.set(ticket, Stage::Waiting(id));
    state.pending.timeouts.extend(until.map(|until| (until, ticket)));
    let request = Waiter::new(request.owner, request.keys, request.terms.demand, until, asker);
    let (client, on_behalf) = (request.asker.client, request.asker.on_behalf);
    let earlier = state.queue.replace(id, request);
    if let Some(earlier) = internal_errors::expect(earlier, "a request to be replaced does not wait") {
        if let Some(until) = earlier.until {
            state.pending.timeouts.remove(&(until, earlier.asker.ticket));
        }
        let are_of_sessions = on_behalf == OnBehalf::Session && earlier.asker.on_behalf == OnBehalf::Session;
        if are_of_sessions && earlier.asker.client == client {
            state.pending.take(earlier.asker.ticket);
            state.sessions.remove_wait(&earlier);
        } else {
            replies::end_request(state, earlier, Outcome::Refused(SUPERSEDED.into()), now);
        }
    }
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
    request: Request,
    names: &[TextRef],
    answer: Answer,
    (grantee, granted): (Grantee, (Basis, Vec<GrantedHold>)),
    now: Now,
) -> Result<Replied, String> {
    let deferred = request.defer(state, ctx, names, now);
    let ticket = deferred.as_ref().map_or_else(|_| state.pending.ticket(), |(asker, _)| asker.ticket);
    let grant = holds::note_undelivered(state, ctx.db(), grantee, ticket, granted);
    match deferred {
        Ok((asker, replied)) => {
            let request = Waiter::new(request.owner, request.keys, request.terms.demand, None, asker);
            confirming::begin_reply(state, request, (answer, grant), now);
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
    renews: bool,
) -> Result<(), String> {
    if !state.sessions.is_open(client) {
        return Ok(());
    }
    let names = names.iter().map(|name| name.bytes());
    let bytes = match on_behalf {
        OnBehalf::Session => wait_bytes(owner, renews, names),
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
    let is_same = |it: &Waiter<Asker>| {
        (it.asker.on_behalf, it.asker.client) == (OnBehalf::Session, request.client)
            && it.keys == request.keys
            && (it.terms(), it.asker.renewal.as_deref()) == (request.terms, request.renewal.as_ref())
    };
    let mut requests = state.requests_of(&request.owner, request.keys.first()?);
    requests.any(is_same).then(|| ctx.reply_line(c"WAITING"))
}

/// How many keys the requests that one command withdraws may name in all: each has to leave the queue of each of its keys.
const MOST_WITHDRAWN: usize = 2_048;

/// Whether the requests of an owner that name one of these keys may be withdrawn in one step.
///
/// # Errors
///
/// The reply that says that they name too many keys. (Those that name one key never do.)
pub fn may_withdraw(state: &State, ctx: Ctx, names: &[TextRef], owner: TextRef) -> Result<(), String> {
    let (db, of) = (ctx.db(), Owner::from(owner.bytes()));
    let [_, _, ..] = names else { return Ok(()) };
    let queued = |name: &TextRef| state.queue.request_of(&of, &LockKey::new(db, name.bytes()));
    let queued: BTreeSet<WaiterId> = names.iter().filter_map(queued).collect();
    let granted = names.iter().flat_map(|name| state.undelivered.of(db, name.bytes(), &of));
    let granted: BTreeSet<GrantId> = granted.collect();
    let of_queued = queued.into_iter().filter_map(|id| state.queue.get(id)).map(|waiter| waiter.keys.len());
    let of_granted = granted.into_iter().filter_map(|id| state.undelivered.get(id)).map(|grant| grant.holds.len());
    match of_queued.chain(of_granted).fold(0, usize::saturating_add) {
        ..=MOST_WITHDRAWN => Ok(()),
        keys => Err(format!(
            "ERR the requests that are withdrawn may name at most {MOST_WITHDRAWN} keys in all, got {keys}: withdraw fewer at a time"
        )),
    }
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
        replies::end_wait(state, waiter, Outcome::Withdrawn, now);
    }
    for id in granted {
        let Some(withdrawn) = state.withdraw_granted(id, &key) else { continue };
        if let WithdrawnGrant::Unconfirmed(request) = withdrawn {
            let outcome = match request.asker.on_behalf {
                OnBehalf::Itself => Outcome::Refused(RELEASED.into()),
                OnBehalf::Session => Outcome::Withdrawn,
            };
            replies::end_request(state, request, outcome, now);
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
    let blocked = pending::Reader { client: session, reading: Reading { until, ..reading }, block: Some(block) };
    state.pending.set(ticket, Stage::Reading(Box::new(blocked)));
    state.sessions.set_reader(session, Some(ticket));
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
        match state.pending.get(ticket) {
            Some(Stage::Waiting(id)) => {
                if let Some(waiter) = state.queue.leave(*id) {
                    replies::end_wait(state, waiter, Outcome::TimedOut, now);
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
        match state.sessions.next_remains() {
            None => break,
            Some(Remains::Event) => {}
            Some(Remains::Grant(grant)) => {
                state.revoke(grant);
                count(|it| &mut it.grants_undelivered);
            }
            Some(Remains::Wait(ticket)) => drop(state.withdraw(ticket)),
        }
    }
}

/// Refuses everything that sessions wait for, because this server is now a replica. (The server itself answers
/// blocked clients.)
pub fn refuse_undecided(state: &mut State, now: Now, slice: &Slice) {
    const UNBLOCKED: &str = "UNBLOCKED this server is now a replica and grants no locks";
    let refused = || Outcome::Refused(UNBLOCKED.into());
    while !slice.is_over() {
        let Some(ticket) = state.next_undecided() else { break };
        match state.pending.get(ticket) {
            Some(Stage::Waiting(id)) => {
                let of_session = |waiter: &&Waiter<Asker>| waiter.asker.on_behalf == OnBehalf::Session;
                if let Some(id) = state.queue.get(*id).filter(of_session).map(|waiter| waiter.id)
                    && let Some(waiter) = state.queue.leave(id)
                {
                    replies::end_wait(state, waiter, refused(), now);
                }
            }
            Some(Stage::Confirming(id)) => {
                let Some(What::Reply { request, grant, .. }) = state.confirmations.remove(*id).map(|it| it.what) else {
                    continue;
                };
                state.revoke(grant);
                if request.asker.on_behalf == OnBehalf::Session {
                    replies::end_request(state, request, refused(), now);
                }
            }
            _ => {}
        }
    }
}
