//! How a wait begins: a client is blocked, or a session is promised an event.
//!
//! It ends in one of these ways. Each leaves the queue and, if the request stood in others' way, serves them: granted
//! ([`crate::serving`]); timed out, or `CLIENT UNBLOCK`; the key no longer a lock, or a contradiction; rights taken
//! away; a cycle of waits found; given up (`LOCK.CANCEL`); or its client gone: disconnected, killed, unblocked with
//! an error, redirected to another node, or told that this server is now a replica.

use crate::answering;
use crate::config;
use crate::confirming;
use crate::deadlocks;
use crate::holding::{self, Grantee};
use crate::keyspace::Lock;
use crate::lock::deadlock;
use crate::lock::serve::Change;
use crate::lock::{LockKey, Millis, Owner, Token, WaiterId};
use crate::server::blocked::{block, block_for_events};
use crate::server::clients;
use crate::server::clock::{Now, Slice};
use crate::server::reply::Replied;
use crate::server::text::show_start;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, Text, TextRef, events};
use crate::serving::{schedule_earlier, serve};
use crate::state::confirmations::What;
use crate::state::owed::{About, OnBehalf, Purpose, Ticket};
use crate::state::sessions::{Claimed, MOST_UNREAD, Reader, Remains};
use crate::state::ties::Together;
use crate::state::{
    self, Answer, Asker, GrantId, GrantedHold, Outcome, Reading, Recipient, SignsOfLife, Stage, State, TakeBack, Terms,
    Tie,
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
                    if let Purpose::Acquire(_) = self.purpose {
                        state.ties.asked_anew(&self.owner, &self.keys);
                    }
                });
                (Recipient::Session { client: self.client, about }, ctx.reply_line(c"WAITING"))
            }
        };
        // The caller notes what it waits for.
        state::with(|state| state.owed.owe(ticket, to, Stage::Beginning));
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
    (arrived, wait): (Millis, Wait),
    now: Now,
) -> Result<Replied, String> {
    let Terms { demand, tying, replicas } = *terms;
    let until = wait.until(now);
    let holders = newly_contended(locks, &request.keys, now)?;
    let asking = deadlock::Request {
        id: state::with(|state| state.queue.next_id(arrived)),
        owner: request.owner.clone(),
        keys: request.keys.clone(),
        limit: demand.limit,
    };
    let about = deadlocks::Wait { client: request.client, until, now: now.millis() };
    deadlocks::refuse_cycle(ctx, &asking, holders.iter().flat_map(|(_, holders)| holders), about)?;
    let Some((ticket, replied)) = request.owe(ctx, names) else {
        return Err("ERR this client can't be blocked".into());
    };
    let Request { client, on_behalf, keys, owner, .. } = request;
    let asker = Asker { ticket, client, on_behalf, tying, replicas, arrived: now };
    let overtakes = state::with(|state| {
        let id = state.queue.join(owner, keys.clone(), demand, arrived, until, asker);
        state.owed.set(ticket, Stage::Waiting(id));
        state.owed.timeouts.extend(until.map(|until| (until, ticket)));
        holders.into_iter().for_each(|(key, holders)| state.queue.held_by(&key, holders));
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

/// Who holds those of the locks that nobody waits for so far.
///
/// # Errors
///
/// If they are too many to be noted in one step.
fn newly_contended(locks: &[Lock], keys: &[LockKey], now: Now) -> Result<Vec<(LockKey, Vec<Owner>)>, String> {
    let is_new = |key: &LockKey| !state::with(|state| state.is_contended(key.db, &key.name));
    let new: Vec<(&Lock, &LockKey)> = locks.iter().zip(keys).filter(|(_, key)| is_new(key)).collect();
    let (all, most) = (new.iter().map(|(lock, _)| lock.count() as u64).sum::<u64>(), config::MAX_HOLDERS.get());
    if new.len() > 1 && all > most {
        return Err(format!(
            "ERR too many holders of these {} locks to wait for them in one request: all together they have {all}, and may \
             have no more than one lock may have (holdfast.max-holders is {most})",
            locks.len()
        ));
    }
    let owners = |lock: &Lock| lock.holders(now.millis()).into_iter().map(|(owner, _)| owner).collect();
    Ok(new.into_iter().map(|(lock, key)| (key.clone(), owners(lock))).collect())
}

/// Withholds the answer to a grant or renewal of these holds until its replicas have confirmed it.
///
/// # Errors
///
/// The reply that says that nobody can wait for the answer. What was granted is taken back.
pub fn confirm(
    ctx: Ctx,
    request: &Request,
    names: &[TextRef],
    answer: Answer,
    (grantee, back, holds): (Grantee, TakeBack, Vec<GrantedHold>),
    now: Now,
) -> Result<Replied, String> {
    let (owed, terms) = (request.owe(ctx, names), *grantee.terms);
    let ticket = owed.as_ref().map_or_else(|| state::with(|state| state.owed.ticket()), |(ticket, _)| *ticket);
    let grant = holding::take_off(ctx.db(), grantee, ticket, (back, holds));
    let Some((_, replied)) = owed else {
        state::with(|state| state.in_flight.owe(grant));
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
        return Err("ERR this client can't be blocked".into());
    };
    let id = confirming::begin(ctx, What::Reply { ticket, answer, grant, terms }, terms.replicas, now);
    state::with(|state| state.owed.set(ticket, Stage::Confirming(id)));
    Ok(replied)
}

/// The request of this owner for one of these keys that a session waits for already, if there is one.
///
/// # Errors
///
/// If too much of what became of this owner's requests has not been read.
pub fn admit(request: &Request) -> Result<Option<Ticket>, String> {
    match state::with(|state| state.sessions.claimed(request.client, &request.owner, &request.keys)) {
        Claimed::Nothing => Ok(None),
        Claimed::Waits(ticket) => Ok(Some(ticket)),
        Claimed::Unread => {
            Err(format!("ERR too many unread events of this owner for this key: {MOST_UNREAD}, of this session"))
        }
    }
}

/// What is already known of a session's request: `None`, or the answer. Changes nothing.
///
/// # Errors
///
/// As [`admit`]; or if its owner has asked for other keys as well, or on other terms.
pub fn repeated(ctx: Ctx, request: &Request) -> Result<Option<Replied>, String> {
    let Some(ticket) = admit(request)? else { return Ok(None) };
    let waits = state::with(|state| match state.owed.get(ticket).map(|pending| &pending.to) {
        Some(Recipient::Session { about, .. }) => Some(about.clone()),
        _ => None,
    });
    match waits {
        Some(about) if about.keys != request.keys => {
            let what = "this owner already waits for one of these keys, together with other keys";
            Err(format!("ERR {what}, on behalf of this session"))
        }
        Some(about) if about.purpose != request.purpose => {
            let what = "this owner already waits for this on behalf of this session, on other terms";
            Err(format!("ERR {what}: only WAIT may differ when a request is repeated"))
        }
        _ => Ok(Some(ctx.reply_line(c"WAITING"))),
    }
}

/// Gives up an owner's acquisition on behalf of a session, however far it got: its request, if that waits or is being
/// confirmed; what it was granted and has not heard of; and what it holds, with all that was granted together with it.
/// Returns whether there was anything of that.
///
/// The wait and the ties go at once, also where the server takes no writes now; then the holds follow when it does.
pub fn cancel(ctx: Ctx, session: u64, owner: TextRef, key: &LockKey, now: Now) -> bool {
    let name: Owner = owner.bytes().into();
    let (any, keys) = state::with(|state| {
        let waits = state.sessions.waiting(session, &name, key).and_then(|ticket| state.withdraw(ticket));
        let (ties, together) = state.ties.take_together(session, &name, key);
        let mut unheard = state.sessions.forget_events(session, &name, key);
        if let Some(Together { token, keys }) = together {
            let of_key = |key: &LockKey| state.sessions.forget_events_of(session, &name, key, &[token].into());
            unheard.extend(keys.iter().flat_map(of_key));
        }
        unheard.iter().for_each(|grant| state.in_flight.owe(*grant));
        let any = waits.is_some() || !unheard.is_empty() || !ties.is_empty();
        let mut keys: Vec<LockKey> = ties.iter().map(Tie::key).collect();
        if let Some(Recipient::Session { about, .. }) = waits.map(|it| it.from) {
            keys.extend(about.keys.iter().cloned());
        }
        ties.into_iter().for_each(|tie| state.end_later(tie));
        (any, keys)
    });
    if holding::takes_writes(ctx) {
        // The named lock at once, the others as far as this step has room for them: each has to be read.
        let (slice, end) = (Slice::of_command(), |key: &LockKey| {
            ctx.in_db(key.db, |ctx| holding::end_broken(ctx, Text::new(&key.name).as_text(), now));
        });
        end(key);
        keys.iter().take_while(|_| !slice.is_over()).for_each(end);
        serve(ctx, now, &slice);
    }
    if state::with(|state| state.in_flight.is_owed()) {
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
    any
}

/// An owner gives back all that it holds of a lock of the selected database (under this token, if it names one): its
/// request for it that is in flight ends, too.
pub fn end_in_flight(
    ctx: Ctx,
    name: TextRef,
    (owner, token): (TextRef, Option<Token>),
    connection: Option<u64>,
    now: Now,
) {
    const RELEASED: &str = "UNCONFIRMED the lock was released before the answer";
    let key = LockKey::new(ctx.db(), name.bytes());
    let ended = state::with(|state| {
        let id = state.in_the_way((key.db, &key.name, owner.bytes()), connection)?;
        let grant = state.in_flight.get(id)?;
        let held = grant.holds.iter().find(|hold| hold.name == key.name)?.token;
        if token.is_some_and(|named| !state.raised.is_meant((key.db, &key.name, owner.bytes()), held, named)) {
            return None;
        }
        let (ticket, client) = (grant.ticket, grant.client);
        if let Some(Stage::Confirming(id)) = state.owed.get(ticket).map(|pending| &pending.stage) {
            let id = *id;
            state.confirmations.remove(id);
        }
        // This hold is what is being released. The others are taken back, unless the answer is on its way already.
        state.in_flight.remove_hold(id, &key.name);
        let is_unread = state.sessions.refuse_unread(client, id, (&owner.bytes().into(), &key), RELEASED);
        if is_unread || state.owed.get(ticket).is_some() {
            state.in_flight.owe(id);
        } else {
            state.in_flight.settle(id);
        }
        Some(ticket)
    });
    if let Some(ticket) = ended {
        if state::with(|state| state.owed.get(ticket).is_some()) {
            answering::end_request(ctx, ticket, Outcome::Refused(RELEASED.into()), now);
        }
        timer::wake(ctx, Timer::Work, timer::THIS_TURN);
    }
}

/// Blocks a session until its next events arrive, or until it is due to hear that it is alive.
pub fn read_next(ctx: Ctx, session: u64, reading: Reading, wait: Wait, now: Now) -> Result<Replied, String> {
    events::watch_keys(ctx);
    let ticket = state::with(|state| {
        state.sessions.open(session);
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

/// Whether there is room for one more request: in the queue of each of its keys, and among those of its session.
///
/// # Errors
///
/// Names the setting that forbids it.
pub fn has_room(request: &Request) -> Result<(), String> {
    let (most, of_session) = (config::MAX_WAITERS.get(), config::MAX_SESSION_WAITS.get());
    state::with(|state| {
        if request.on_behalf == OnBehalf::Session && state.sessions.load(request.client) as u64 >= of_session {
            return Err(format!("ERR too many waits for this session: holdfast.max-session-waits is {of_session}"));
        }
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

/// Ends the sessions that were promised a sign of life and do not ask for it: whoever they stand for is gone.
pub fn end_silent(ctx: Ctx, now: Now, slice: &Slice) {
    while !slice.is_over() {
        let Some(client) = state::with(|state| state.sessions.take_silent(now.millis())) else { break };
        if clients::end(ctx, client) {
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
        Remains::Grant(grant) => {
            state.in_flight.owe(grant);
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
        state::with(|state| state.in_flight.owe(grant));
        let to_session = state::with(|state| {
            state.owed.get(ticket).is_some_and(|pending| matches!(pending.to, Recipient::Session { .. }))
        });
        if to_session {
            answering::end_request(ctx, ticket, refused(), now);
        }
    }
}
