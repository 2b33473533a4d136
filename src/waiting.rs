//! How a wait begins: the module blocks a client, or promises a session an event.
//!
//! A wait ends in one of these ways. The request leaves the queue, and the module serves any requests that waited
//! behind it.
//!
//! * Granted: [`crate::serving`].
//! * Timed out, or ended by `CLIENT UNBLOCK`.
//! * Refused: the key is no longer a lock, the lock has too many holders, the request contradicts what its owner holds,
//!   or the user lost the right to it.
//! * Withdrawn (`LOCK.RELEASE … ALL`), or superseded by another request of the same owner.
//! * Its client is gone: disconnected, killed, unblocked with an error, redirected to another node, or refused because
//!   this server is now a replica.

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
use crate::state::confirmations::ConfirmedItem;
use crate::state::event_bytes::{event_bytes, hold_bytes};
use crate::state::pending::{self, OnBehalf};
use crate::state::sessions::Remains;
use crate::state::{
    Answer, Basis, GrantId, GrantedHold, HeartbeatMode, Outcome, Reading, Renewal, Requester, Stage, State, Terms,
    TokenForm, WithdrawnGrant,
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

    /// The same wait, limited to `most` ms.
    fn at_most(self, most: Millis) -> Self {
        match self {
            Self::No => Self::No,
            Self::For(ms) => Self::For(ms.min(most)),
            Self::Forever => Self::For(most),
        }
    }
}

/// A request that may be answered later: on whose behalf it is made, and what it asks for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The connection on whose behalf the request is made.
    pub client: u64,
    /// Whether that connection acts as a session.
    pub on_behalf: OnBehalf,
    /// What the request asks for.
    pub terms: Terms,
    /// The renewal, if the request is for a longer lease.
    pub renewal: Option<Renewal>,
    /// The keys.
    pub keys: Rc<[LockKey]>,
    /// The owner.
    pub owner: Owner,
    /// The form in which a grant is answered.
    pub form: TokenForm,
    /// The bytes to reserve for its events while it is pending: see [`Requester::reserved`].
    pub reserved: usize,
}

impl Request {
    /// Blocks the client, or replies `WAITING` to the session. The caller records what the reply is pending for.
    fn defer(&self, state: &mut State, ctx: Ctx, names: &[TextRef], now: Now) -> Result<(Requester, Replied), String> {
        events::watch_keys(ctx);
        let ticket = state.pending.ticket();
        let (block, replied) = match self.on_behalf {
            OnBehalf::Itself => {
                let (block, replied) = block(ctx, names, ticket).ok_or(NOT_BLOCKED)?;
                (Some(block), replied)
            }
            OnBehalf::Session => {
                state.sessions.expect_again(self.client, now.millis());
                (None, ctx.reply_line(c"WAITING"))
            }
        };
        let Self { client, on_behalf, terms: Terms { flags, replicas, .. }, form, reserved, .. } = *self;
        let (renewal, arrived) = (self.renewal.map(Box::new), steady_micros());
        let requester =
            Requester { ticket, client, on_behalf, block, flags, replicas, renewal, form, arrived, reserved };
        state.sessions.add_wait(&requester);
        Ok((requester, replied))
    }

    /// Reserves the bytes of the events that the request may cause when it waits: that of its outcome, and those of its
    /// holds once they are bound. A request that it replaces needs none any more.
    fn reserve(&mut self, state: &State, replaced: Option<WaiterId>) -> Result<(), String> {
        if !state.sessions.is_open(self.client) {
            return Ok(());
        }
        let names = || self.keys.iter().map(|key| &*key.name);
        let outcome = if self.on_behalf == OnBehalf::Session { event_bytes(&self.owner, names()) } else { 0 };
        let bytes = names().map(|name| hold_bytes(&self.owner, name)).fold(outcome, usize::saturating_add);
        let replaced = replaced.and_then(|id| state.queue.get(id)).map(|waiter| &waiter.requester);
        let freed = replaced.filter(|it| it.client == self.client).map_or(0, |it| it.reserved);
        if bytes > freed {
            has_room_for(state, self.client, bytes.saturating_sub(freed))?;
        }
        self.reserved = bytes;
        Ok(())
    }
}

/// The error for a client that the server can't block.
const NOT_BLOCKED: &str = "ERR this client can't be blocked";

/// Queues a request for the locks of these names, at the position of its arrival (by `steady_millis`), unless its wait
/// would close a cycle. Schedules the next look at the locks that were read. For the other locks, requests that wait
/// already have scheduled it. A request that becomes the head of a queue with others is judged in this event-loop
/// iteration.
///
/// # Errors
///
/// The reply that says why the request can't wait.
pub fn wait(
    state: &mut State,
    ctx: Ctx,
    mut request: Request,
    (names, locks): (&[TextRef], &mut [Lock]),
    (arrived, wait): (Millis, Wait),
    now: Now,
) -> Result<Replied, String> {
    let until = wait.until(now);
    let id = state.queue.next_id(arrived);
    let asking = deadlock::Request { id, owner: request.owner.clone(), keys: request.keys.clone() };
    deadlocks::refuse_cycle(state, ctx, &asking, request.client, now)?;
    request.reserve(state, None)?;
    // If the clock were set back, an expired hold that is left would exist again, perhaps that of this owner.
    for lock in locks.iter_mut() {
        holds::end_expired(state, lock, now);
    }
    let (requester, replied) = request.defer(state, ctx, names, now)?;
    let ticket = requester.ticket;
    let Request { keys, owner, terms, .. } = request;
    let id = state.queue.join(owner, keys.clone(), terms.demand, arrived, until, requester);
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

/// The queue position of this owner's request for the same keys under the same limit, if there is one.
///
/// # Errors
///
/// The reply for an owner that waits for one of these keys under another limit, or for other keys together with it.
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

/// Gives a request the queue position of an earlier request of the same owner. The earlier one ends with `-SUPERSEDED`,
/// unless both belong to one session, for which they are the same request.
///
/// # Errors
///
/// The reply that says why the request can't wait.
pub fn take_over(
    state: &mut State,
    ctx: Ctx,
    id: WaiterId,
    mut request: Request,
    names: &[TextRef],
    wait: Wait,
    now: Now,
) -> Result<Replied, String> {
    const SUPERSEDED: &str = "SUPERSEDED this owner has asked for the same lock again";
    request.reserve(state, Some(id))?;
    let (requester, replied) = request.defer(state, ctx, names, now)?;
    let (ticket, until) = (requester.ticket, wait.until(now));
    state.pending.set(ticket, Stage::Waiting(id));
    state.pending.timeouts.extend(until.map(|until| (until, ticket)));
    let request = Waiter::new(request.owner, request.keys, request.terms.demand, until, requester);
    let (client, on_behalf) = (request.requester.client, request.requester.on_behalf);
    let earlier = state.queue.replace(id, request);
    if let Some(earlier) = internal_errors::expect(earlier, "a request to be replaced does not wait") {
        if let Some(until) = earlier.until {
            state.pending.timeouts.remove(&(until, earlier.requester.ticket));
        }
        let are_of_sessions = on_behalf == OnBehalf::Session && earlier.requester.on_behalf == OnBehalf::Session;
        if are_of_sessions && earlier.requester.client == client {
            state.pending.take(earlier.requester.ticket);
            state.sessions.remove_wait(&earlier);
        } else {
            replies::end_request(state, earlier, Outcome::Refused(SUPERSEDED.into()), now);
        }
    }
    Ok(replied)
}

/// Withholds the answer to a grant or renewal of these holds until enough replicas have confirmed it.
///
/// # Errors
///
/// The reply that says that the client can't wait for the answer. The grant is then revoked.
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
    let ticket = deferred.as_ref().map_or_else(|_| state.pending.ticket(), |(requester, _)| requester.ticket);
    let grant = holds::note_undelivered(state, ctx.db(), grantee, ticket, granted);
    match deferred {
        Ok((requester, replied)) => {
            let request = Waiter::new(request.owner, request.keys, request.terms.demand, None, requester);
            confirming::begin_reply(state, request, (answer, grant), now);
            Ok(replied)
        }
        Err(error) => {
            state.revoke(grant);
            Err(error)
        }
    }
}

/// Checks that a session has room for what a request causes that is granted or renewed now: the events of the holds
/// that it binds anew, and those of its outcome if replicas have to confirm it. Returns their bytes. A connection that
/// is not a session always has room; so does a request that adds nothing, since the session would lose what it holds.
///
/// # Errors
///
/// The reply that names the setting.
pub fn bytes_to_grant<'a, 'b: 'a>(
    state: &State,
    locks: impl Iterator<Item = &'a Lock<'b>>,
    grantee: Grantee,
    binds: bool,
) -> Result<usize, String> {
    let Grantee { owner, client, on_behalf, terms } = grantee;
    if !state.sessions.is_open(client) {
        return Ok(0);
    }
    let (owner, has_outcome) = (owner.bytes(), terms.replicas > 0 && on_behalf == OnBehalf::Session);
    let bytes = locks.fold(0_usize, |bytes, lock| {
        let name = lock.name().bytes();
        let is_bound = || lock.own().is_some() && state.bindings.client_of(lock.db(), name, owner) == Some(client);
        let of_hold = if binds && !is_bound() { hold_bytes(owner, name) } else { 0 };
        let of_outcome = if has_outcome { event_bytes(owner, [name]) } else { 0 };
        bytes.saturating_add(of_hold).saturating_add(of_outcome)
    });
    // `CONTENTION` can cause one more event of a bound hold each time.
    if bytes > 0 || terms.flags.contention {
        has_room_for(state, client, bytes)?;
    }
    Ok(bytes)
}

fn has_room_for(state: &State, session: u64, bytes: usize) -> Result<(), String> {
    let most = config::MAX_SESSION_BYTES.get();
    if state.has_room_for(session, bytes, most) {
        return Ok(());
    }
    Err(format!(
        "ERR too many waits, bound holds and unread events of this session: with this request, they might take more than \
         holdfast.max-session-bytes, which is {most}"
    ))
}

/// Replies `WAITING` if a session repeats a request that replicas have yet to confirm. Changes nothing. (A request that
/// is queued takes over its own place.)
pub fn repeated(state: &State, ctx: Ctx, request: &Request) -> Option<Replied> {
    let it = state.awaiting_replicas(&request.owner, request.keys.first()?)?;
    let is_same = (it.requester.on_behalf, it.requester.client) == (OnBehalf::Session, request.client)
        && it.keys == request.keys
        && (it.terms(), it.requester.renewal.as_deref()) == (request.terms, request.renewal.as_ref());
    is_same.then(|| ctx.reply_line(c"WAITING"))
}

/// The most keys that the requests withdrawn by one command may name in all. A request must leave the queue of each
/// key.
const MOST_WITHDRAWN: usize = 1_024;

/// Checks that one command may withdraw the requests of an owner that name one of these keys.
///
/// # Errors
///
/// The reply that says that they name too many keys. (A command for one key never gets it.)
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

/// Withdraws an owner's requests for a lock of the selected database: the queued request, and the grants whose answer
/// is undelivered. Of such a grant, the caller releases the hold of this lock; the other holds are revoked. Returns the
/// keys whose waiters the caller must serve.
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
            let outcome = match request.requester.on_behalf {
                OnBehalf::Itself => Outcome::Refused(RELEASED.into()),
                OnBehalf::Session => Outcome::Withdrawn,
            };
            replies::end_request(state, request, outcome, now);
        }
        keys.push(key.clone());
    }
    keys
}

/// Replies with a session's next events. If there are none and the session waits, blocks it until one arrives or a
/// heartbeat is due.
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
    // The server renews holds only for a session that reads, so the session must ask again in time.
    let has_to_ask = reading.signs == HeartbeatMode::Wanted || state.bindings.shortest_lease(session).is_some();
    let pace = state.sessions.promised_pace(session, state.pace(session, config::default_lease()));
    let until = if has_to_ask { wait.at_most(pace) } else { wait }.until(now);
    let blocked = pending::Reader { client: session, reading: Reading { until, ..reading }, block: Some(block) };
    state.pending.set(ticket, Stage::Reading(Box::new(blocked)));
    state.sessions.set_reader(session, Some(ticket));
    state.pending.timeouts.extend(until.map(|until| (until, ticket)));
    Ok(replied)
}

/// Checks that the queue of each key has room for one more request.
///
/// # Errors
///
/// The reply that names the setting.
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

/// Ends the waits that have timed out, and answers the readers whose time is over.
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

/// Closes the sessions that were promised a heartbeat and do not ask for it, if they have a bound hold or a waiting
/// request: their process is considered dead. A session that is blocked in another command of its own can't ask, and
/// stays open.
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

/// Removes what ended sessions leave behind: waiting requests, undelivered grants, and unread events.
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

/// Refuses the pending requests of sessions, because this server is now a replica. Revokes all grants that await
/// replicas. (The server itself answers blocked clients.)
pub fn refuse_undecided(state: &mut State, now: Now, slice: &Slice) {
    const UNBLOCKED: &str = "UNBLOCKED this server is now a replica and grants no locks";
    let refused = || Outcome::Refused(UNBLOCKED.into());
    while !slice.is_over() {
        let Some(ticket) = state.next_undecided() else { break };
        match state.pending.get(ticket) {
            Some(Stage::Waiting(id)) => {
                let of_session = |waiter: &&Waiter<Requester>| waiter.requester.on_behalf == OnBehalf::Session;
                if let Some(id) = state.queue.get(*id).filter(of_session).map(|waiter| waiter.id)
                    && let Some(waiter) = state.queue.leave(id)
                {
                    replies::end_wait(state, waiter, refused(), now);
                }
            }
            Some(Stage::Confirming(id)) => {
                let Some(ConfirmedItem::Reply { request, grant, .. }) =
                    state.confirmations.remove(*id).map(|it| it.what)
                else {
                    continue;
                };
                state.revoke(grant);
                match request.requester.on_behalf {
                    OnBehalf::Itself => state.sessions.remove_wait(&request),
                    OnBehalf::Session => replies::end_request(state, request, refused(), now),
                }
            }
            _ => {}
        }
    }
}
