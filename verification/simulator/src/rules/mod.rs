//! The invariants that are checked after every event-loop iteration. They are the promises of `docs/guarantees.md`;
//! each has a constant with the text that a violation prints.
//!
//! The checker trusts the replies that clients receive: a hold begins with the reply that grants it. It reads the
//! keyspace with its own parser ([`crate::stored`]), and reads the module's state only where an invariant is about that
//! state.

mod deadlines;
mod events;
mod fairness;
mod grants;
mod holds;
mod log;
mod losses;
mod records;
mod replies;
mod server;
mod tokens;

use crate::lock::internal_errors;
use crate::redis::{Bytes, node};
use crate::request::Request;
use crate::resp::Reply;
use crate::server::Role;
use crate::server::clock::Now;
use crate::state::pending::Ticket;
use crate::state::{self};
use deadlines::{no_wait_on_replica, waits_end_in_time};
use fairness::no_wait_for_free_lock;
use records::{Arrival, Belief, Binding, Cause, Connection, OpenRequest, ReceivedToken, Wait};
use server::{is_refusing, tables_agree};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

/// After this many idle ms, anything that is still undecided stays undecided.
pub const IDLE_TIME: u64 = 300;
/// An event with its own deadline (a lease that expires, a connection that closes) is handled at most this many ms
/// later, unless something prevents it.
const HANDLED_WITHIN: u64 = 20;

/// Replicas are asked again after this many ms.
const REPLICA_POLL: u64 = 100;

/// A replica that confirms within this many ms counts as prompt.
const PROMPT: u64 = 20;

/// The time that replicas have to confirm, in ms (`holdfast.replicas-timeout`).
const REPLICAS_TIMEOUT: u64 = 1000;

/// The period of the server's cron, in ms.
const CRON: u64 = 100;

/// Duration of holds.
pub const HELD: &str = "a hold stays until its owner releases it, its lease ends, another client forces or overwrites the lock, or its ephemeral connection ends";
/// Hold counts: `HOLDS n` sets the count to n.
pub const REQUESTED: &str = "an owner has no more holds than it requested";
/// Hold counts: releases.
pub const COUNTED: &str = "only a release lowers the count of holds that were delivered to an owner";
/// Ephemeral holds.
pub const EPHEMERAL: &str = "an ephemeral hold ends with its connection";
/// Mutual exclusion.
pub const LIMIT: &str = "never more holders than the limit, by the replies that clients received";
/// First come, first served.
pub const ORDER: &str = "no request is granted before one that has waited longer, here and elsewhere";
/// `NEW`.
pub const NO_RE_ENTRY: &str = "a request with NEW is never granted to an owner that already holds the lock";
/// Fencing.
pub const TOKENS: &str = "a token is greater than all before it, and belongs to one owner";
/// Leases.
pub const LEASE: &str = "a lease never ends before its time";
/// Clock steps.
pub const STEPPED: &str = "a clock step never shortens or ends a bound hold";
/// Watchdog.
pub const WATCHED: &str = "the server renews watched holds until the connection closes";
/// Sessions that read without heartbeats.
pub const POLLED: &str = "LOCK.EVENTS replies in time for the session's renewals";
/// Session connections.
pub const SESSIONS: &str = "only LOCK.SESSION makes a connection a session";
/// Replaced sessions.
pub const REPLACED: &str = "a replaced session is closed";
/// Error codes.
pub const CODES: &str = "the module's errors have codes that the server does not use";
/// Confirmed deadlines.
pub const CONFIRMED: &str = "a bound hold ends at the deadline that its replicas have confirmed";
/// Confirmations.
pub const CONFIRMED_SOON: &str = "a request that waits for replicas is answered as soon as they have confirmed";
/// Replies and events.
pub const ONE_REPLY: &str = "every request gets exactly one reply, every wait one outcome";
/// Lost wake-ups.
pub const FREE: &str = "with everything idle, no request waits for a lock that is free";
/// Wait timeouts.
pub const TIMEOUT: &str = "a wait ends when its timeout is over";
/// Deadlocks.
pub const CYCLES: &str = "a request that would close a cycle of waits is refused";
/// `lost` events.
pub const NOTIFIED: &str = "a session is notified of each hold that it loses, once";
/// `contended` events.
pub const CONTENTION: &str = "a session with CONTENTION is notified of contention, once";
/// No false `lost` events.
pub const TRUE_LOSS: &str = "a hold that was reported lost is lost";
/// No `lost` event after a release.
pub const RELEASED: &str = "a session is not notified of the loss of a hold that its owner released";
/// Undelivered grants.
pub const UNDELIVERED: &str = "an undelivered grant to a waiter is revoked";
/// ACL rights.
pub const RIGHTS: &str = "no request is granted after its user has lost the right to make it";
/// Heartbeats.
pub const HEARTBEAT: &str =
    "every reply to LOCK.EVENTS … HEARTBEAT ends with one heartbeat, and no other reply has one";
/// Replicas.
pub const REPLICATED: &str = "the replication stream produces the same keyspace";
/// Refused writes.
pub const REFUSED: &str = "the module writes nothing while the server refuses writes";
/// Consistency of the module's tables.
pub const STATE: &str = "the module's tables agree with one another";
/// Bounded work.
pub const WORK: &str = "the work in one event-loop iteration is bounded";
/// Internal errors.
pub const INTERNAL: &str = "no internal error is counted: every invariant of the module holds";
/// Leaks.
pub const EMPTY_TABLES: &str = "every table is empty after all clients have disconnected";
/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The invariant: one of the constants above.
    pub rule: &'static str,
    /// The details.
    pub what: String,
}

impl Violation {
    /// Creates a violation.
    pub fn new(rule: &'static str, what: impl Into<String>) -> Self {
        Self { rule, what: what.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.rule, self.what)
    }
}

/// A hold: database, key and owner.
type Hold = (i32, Bytes, Bytes);

/// A position in the sequence of everything that happened in the run.
type Position = usize;

/// Checks the invariants during a run.
#[derive(Debug, Default)]
pub struct Checker {
    connections: BTreeMap<u64, Connection>,
    beliefs: BTreeMap<Hold, Belief>,
    waits: Vec<Wait>,
    /// Requests whose clients will never receive a reply.
    abandoned: Vec<(i32, Request)>,
    /// Queued requests of sessions whose `WAITING` reply has not been received yet, and may never be.
    unacknowledged: Vec<Wait>,
    position: Position,
    /// The position at which the current iteration began.
    iteration: Position,
    /// The latest iterations, since the first whose writes the module of Redis 7.0 may not have seen: when the iteration
    /// before each ended (monotonic, µs), and the position at which it began.
    iterations: VecDeque<(u64, Position)>,
    /// Events that end holds immediately, and events that may end them later, once the server takes writes again.
    causes: Vec<(Position, Cause)>,
    lasting: Vec<(Position, Cause)>,
    /// Every token that was seen in the keyspace: its owner, and when it was first seen.
    tokens: BTreeMap<u64, (Bytes, Position)>,
    /// The newest token of each hold that a client received.
    newest: BTreeMap<Hold, ReceivedToken>,
    /// Every token that was written to the network, received or not.
    sent: BTreeSet<u64>,
    /// Holds whose token was first seen in the keyspace in this iteration.
    new_holds: Vec<(Hold, u64)>,
    /// Tokens that were granted to queued requests, and their owners. Then the owners that sent a request in this
    /// iteration.
    queued: BTreeMap<u64, Bytes>,
    current_requesters: BTreeSet<Bytes>,
    /// Tokens that `FENCE` named. They come from other servers.
    fences: BTreeSet<u64>,
    /// The newest token that each key carries.
    carried: BTreeMap<(i32, Bytes), u64>,
    /// Holds that their owner released.
    released: BTreeSet<(Hold, u64)>,
    /// A client stopped reading for a while, or the server was a replica. It is then unknown which grants were
    /// delivered.
    deliveries_are_unknown: bool,
    /// For each session, key and owner: the number of requests with `CONTENTION`, and the number of `contended` events.
    contended: BTreeMap<(u64, Bytes, Bytes), (usize, usize)>,
    /// Two databases were swapped: waiters stay in their database, holds move.
    has_swapped: bool,
    /// Losses that a session must be notified of, and the number of `lost` events for each loss.
    due_losses: BTreeSet<(u64, Bytes, Bytes, u64)>,
    lost_events: BTreeMap<(u64, Bytes, Bytes, u64), usize>,
    /// Holds whose lease has expired. If the clock is set back, those that were not removed exist again.
    expired_holds: BTreeMap<Hold, Belief>,
    /// When an owner that had received a grant was last seen without a hold, and the token of that grant.
    ended: BTreeMap<Hold, (Position, u64)>,
    /// Holds that a `lost` event named while the server refused writes.
    ending: Vec<(i32, Bytes, Bytes, u64)>,
    /// Keys, owners and tokens of holds that were over and could not be ended, or had not followed a clock step, when the
    /// role changed. Their keys stay unchanged.
    left_over: BTreeSet<(Bytes, Bytes, u64)>,
    /// The latest time of day before the clock was set back, the number of such steps, and whether any step happened.
    set_back: u64,
    steps_back: usize,
    has_stepped: bool,
    /// The positions of the clock steps.
    steps: Vec<Position>,
    /// Requests since the last clock step, and those that had no reply at that step.
    requests_since_step: Vec<Request>,
    /// A clock step happened while the server refused writes. Deadlines may then be the requested ones instead of the
    /// stored ones.
    stepped_while_refusing: bool,
    /// The most holds that an owner requested of a key, whatever the outcome: the number of single requests, and the
    /// greatest `HOLDS`.
    requested_holds: BTreeMap<(Bytes, Bytes), (u64, u64)>,
    /// The connections that requests asked to bind a hold to, with the number of such requests.
    requested_bindings: BTreeMap<Hold, BTreeMap<u64, usize>>,
    /// Connections, keys, owners and tokens of holds that one of several like requests may have made ephemeral.
    perhaps_ephemeral: BTreeSet<(u64, Bytes, Bytes, u64)>,
    /// Keys and owners of holds that a request has bound in one of two swapped databases.
    perhaps_bound: BTreeSet<(Bytes, Bytes)>,
    /// Keys and owners that a request with `REPLICAS` named.
    replicated: BTreeSet<(Bytes, Bytes)>,
    /// Holds with an `unbound` event, and the number of such events for each session, key and owner.
    unbound: BTreeMap<(u64, Bytes, Bytes, u64), Position>,
    times_unbound: BTreeMap<(u64, Bytes, Bytes), usize>,
    /// When another node began to serve a slot, the last time.
    moved_slots: BTreeMap<u16, Position>,
    /// Keys that other commands wrote. The module promises less about them.
    written_by_others: BTreeSet<(i32, Bytes)>,
    /// Keys whose expiry another command changed, in any database. The watchdog does not renew earlier because of that.
    expiry_changed: BTreeSet<Bytes>,
    /// The replies of this iteration.
    replies: Vec<(u64, OpenRequest, Reply)>,
    /// The outcomes of this iteration: where the request began, the request, the keys that the outcome is for, and the
    /// reply.
    received: Vec<(Position, OpenRequest, Request, Vec<Bytes>, Reply)>,
    /// The `lost` events of this iteration: session, database, key, owner, token.
    lost: Vec<(u64, i32, Bytes, Bytes, u64)>,
    /// The `unbound` events of this iteration, and those that a grant of the same hold followed.
    unbound_events: Vec<(u64, i32, Bytes, Bytes, u64, Bytes)>,
    bound_again: BTreeSet<(u64, i32, Bytes, Bytes, u64)>,
    /// The heartbeats of this iteration: the session, the text, and when `LOCK.EVENTS` was sent.
    heartbeats: Vec<(u64, String, (Position, u64))>,
    /// The requests that got a reply in this iteration, and the tokens of those replies.
    replied: Vec<(i32, Request)>,
    answered: Vec<(Bytes, u64)>,
    /// The grants of this iteration, for the check of the order.
    granted: Vec<(Arrival, i32, Request, usize, u64)>,
    /// Owners that sent a renewal. Their holds may have become endless at any time.
    renewed: BTreeSet<Bytes>,
    /// Owners with several queued requests at once, or with a granted `WAITED` request for one lock while another
    /// request of theirs was queued. A grant to such an owner may close a cycle.
    concurrent_waiters: BTreeSet<Bytes>,
    /// Locks that an owner requested while an earlier request of it may have been queued. The request may have taken
    /// over the earlier position.
    repeated_requests: BTreeSet<Hold>,
    /// Owners that released to a named count, or renewed with `REPLICAS`. Either keeps grants that were not delivered,
    /// even if the renewal is not confirmed or its reply is lost.
    keeping_owners: BTreeSet<Bytes>,
    /// When the iteration began (monotonic, µs), and whether writes were refused then.
    before: (u64, bool),
    /// When an iteration last began or ended with paused clients or refused writes (monotonic, µs).
    blocked_at: u64,
    /// Something has delayed renewals: a pause, a clock step, a long iteration, refused writes, another role.
    renewals_are_delayed: bool,
    /// When replicas last did not confirm promptly, and when any replica last could confirm (monotonic, µs).
    slow_at: u64,
    confirms_at: u64,
    /// When replicas are asked again at the latest, since they changed (monotonic, µs).
    replicas_asked_at: u64,
    /// Replies that wait for replicas, and since when (monotonic, µs).
    confirming: BTreeMap<Ticket, u64>,
    /// Since when a request has waited for a free lock (monotonic, µs).
    free_since: Option<u64>,
    /// When the last iteration ended (monotonic, µs).
    last_iteration_at: u64,
    requests: usize,
    /// Connections that closed in this iteration.
    closed: Vec<u64>,
    /// When the last iteration ended that was long, or in which a request arrived or ran (monotonic, µs).
    busy_until: u64,
}

impl Checker {
    /// A checker for a new run.
    pub fn new() -> Self {
        Self::default()
    }

    /// A client sent a request.
    pub fn request_sent(&mut self, client: u64, argv: &[Bytes]) {
        let request = Request::read(client, argv);
        for key in request.keys.iter().filter(|_| request.contention) {
            self.contended.entry((request.client, key.clone(), request.owner.clone())).or_default().0 += 1;
        }
        let connection = self.connections.entry(client).or_default();
        let is_exec = request.command == "exec";
        connection.open.push_back(OpenRequest {
            client,
            began: None,
            db: 0,
            at: 0,
            steady: 0,
            runs: vec![request.clone()],
            is_exec,
        });
        if matches!(request.command.as_str(), "renew" | "mrenew") {
            self.renewed.insert(request.owner);
        }
        self.requests += 1;
    }

    /// A client disconnected: it receives no further replies.
    pub fn client_vanished(&mut self, client: u64) {
        if node(|node| node.clients.contains_key(&client)) {
            self.connections.entry(client).or_default().has_vanished = true;
        }
    }

    /// The server wrote bytes to the network, whether or not a client reads them.
    pub fn bytes_sent(&mut self, reply: &Reply) {
        reply.tokens(&mut self.sent);
    }

    /// A client stops reading its socket.
    pub fn client_stopped_reading(&mut self) {
        self.deliveries_are_unknown = true;
    }

    /// Another node serves this slot now.
    pub fn slot_moved(&mut self, slot: u16) {
        self.moved_slots.insert(slot, self.position);
    }

    /// The replicas were replaced. The new ones have everything that was written until now.
    pub fn replicas_changed(&mut self) {
        // Confirmations that were requested before are requested again from the new replicas, but later, and with them those that
        // are requested until then.
        self.replicas_asked_at = node(|node| node.clock.mono) + REPLICA_POLL * 1000;
        self.confirming.values_mut().for_each(|since| *since = self.replicas_asked_at);
        for belief in self.beliefs.values_mut() {
            let deadline = belief.deadline.unwrap_or(u64::MAX);
            belief.known = belief.known.map(|known| known.max(deadline));
        }
    }

    /// The time of day steps by `ms`. Leases that are granted later keep their length, but end at another time of day.
    pub fn clock_stepped(&mut self, ms: i64) {
        let open = self.connections.values_mut().flat_map(|it| it.open.iter_mut());
        let waits = self.waits.iter_mut().chain(&mut self.unacknowledged);
        for open in open.chain(waits.map(|wait| &mut wait.open)) {
            open.at = open.at.saturating_add_signed(ms.min(0));
        }
        for (_, cause) in self.causes.iter_mut().chain(&mut self.lasting) {
            if let Cause::Own(_, _, at) = cause {
                *at = at.saturating_add_signed(ms.min(0));
            }
        }
        let undecided: Vec<Request> = self.undecided().map(|(.., request)| request.clone()).collect();
        self.requests_since_step =
            undecided.into_iter().chain(self.abandoned.iter().map(|(_, request)| request.clone())).collect();
        self.stepped_while_refusing |= self.before.1 || node(|node| is_refusing(node) || node.is_paused());
        let before = node(|node| node.millis()).saturating_add_signed(-ms);
        // While clients are paused, and until the module looks again, the key of an expired hold is hidden, not removed.
        let may_be_hidden = node(|node| node.is_paused()) || self.was_blocked(node(|node| node.clock.mono));
        // Bound holds follow the step.
        for ((db, key, owner), belief) in &mut self.beliefs {
            // A hold that expired while nothing could be written ends as soon as writes are possible.
            if belief.follows.is_some_and(|at| at < before) {
                (belief.follows, belief.deadline) = (Some(0), Some(0));
                continue;
            }
            let is_bound = state::with(|state| state.bindings.client_of(*db, key, owner).is_some());
            // (So does one whose grant was received after an earlier step.)
            let is_late = |it: Binding| self.steps.iter().any(|at| (it.at..it.received).contains(at));
            // (And one that expired hidden: a step back does not prolong it.)
            let is_ended = |it: Binding| may_be_hidden || is_late(it);
            let confirmed = belief.binding.and_then(|binding| binding.confirmed);
            let is_over = belief.deadline.into_iter().chain(confirmed).any(|at| at < before);
            if !is_bound && belief.binding.is_some_and(is_ended) && is_over {
                (belief.deadline, belief.had_expired) = (Some(0), may_be_hidden);
                continue;
            }
            let mut last = self.causes.iter().rev().take_while(|(at, _)| *at > self.iteration);
            belief.is_left |= last.any(|(_, cause)| match cause {
                Cause::Written(on, changed, false) | Cause::ExpiryChanged(on, changed, _) => on == db && changed == key,
                _ => false,
            });
            if is_bound && belief.is_left {
                let earliest = |at: u64| at.min(at.saturating_add_signed(ms));
                (belief.promised, belief.deadline) = (earliest(belief.promised), belief.deadline.map(earliest));
                if let Some(binding) = &mut belief.binding {
                    binding.confirmed = binding.confirmed.map(earliest);
                }
                (belief.follows, belief.has_stepped) = (None, true);
            } else if is_bound {
                let moved = |at: u64| at.saturating_add_signed(ms);
                (belief.promised, belief.renewed) = (moved(belief.promised), moved(belief.renewed));
                (belief.deadline, belief.known) = (belief.deadline.map(moved), belief.known.map(moved));
                if let Some(binding) = &mut belief.binding {
                    binding.confirmed = binding.confirmed.map(moved);
                }
                (belief.follows, belief.has_stepped) = (belief.deadline, true);
            }
        }
        if ms < 0 {
            // Holds that had expired and were not removed yet exist again.
            let was_over = |it: &Belief| it.follows.is_none() && it.deadline.is_some_and(|at| at < before);
            let over = self.beliefs.iter().filter(|(_, it)| was_over(it));
            self.expired_holds.extend(over.map(|(hold, it)| (hold.clone(), it.clone())));
            self.due_losses.clear();
            self.steps_back += 1;
            self.set_back = self.set_back.max(node(|node| node.millis()) + ms.unsigned_abs());
        }
        // The server's timers may not run until its cron has run three times.
        self.busy_until = node(|node| node.clock.mono) + IDLE_TIME * 1000;
        self.renewals_are_delayed = true;
        self.has_stepped = true;
        self.steps.push(self.position);
    }

    /// Whether nothing could be written before this time (monotonic, µs), and the module may not have looked again since.
    pub(super) fn was_blocked(&self, time: u64) -> bool {
        self.blocked_at > 0 && time <= self.blocked_at + HANDLED_WITHIN * 1000
    }

    /// Whether every request of a connection has a reply.
    pub fn is_idle(&self, client: u64) -> bool {
        self.connections.get(&client).is_none_or(|it| it.open.is_empty())
    }

    /// Whether the connection was used as a session.
    pub fn is_session(&self, client: u64) -> bool {
        self.connections.get(&client).is_some_and(|it| it.is_session)
    }

    /// An event-loop iteration is about to begin.
    ///
    /// # Errors
    ///
    /// The invariant that required something to have happened before.
    pub fn before_iteration(&mut self) -> Result<(), Violation> {
        self.iteration = self.position;
        // A timer that is set for now may fire a millisecond later, if the server still waits for an earlier one.
        let (last_began, _) = self.before;
        while self.iterations.get(1).is_some_and(|(ended, _)| ended + 1_000 <= last_began) {
            self.iterations.pop_front();
        }
        self.iterations.push_back((self.last_iteration_at, self.position));
        self.check_deadlines()?;
        node(|node| {
            let now = node.clock.mono;
            let is_prompt = |it: &crate::redis::Replica| it.delay.is_some_and(|delay| delay <= PROMPT);
            if !node.replicas.iter().any(is_prompt) {
                self.slow_at = now;
            }
            if node.replicas.iter().any(|it| it.delay.is_some() || !it.confirms_at.is_empty()) {
                self.confirms_at = u64::MAX;
            } else if self.confirms_at == u64::MAX {
                // They can have confirmed everything that was written until now.
                self.confirms_at = now;
                for belief in self.beliefs.values_mut() {
                    let deadline = belief.deadline.unwrap_or(u64::MAX);
                    belief.known = belief.known.map(|known| known.max(deadline));
                }
            }
        });
        node(|node| {
            node.writes = 0;
            node.look_ups = 0;
            node.reconfigured = false;
            self.before = (node.clock.mono, is_refusing(node));
            if node.is_paused() || is_refusing(node) {
                self.blocked_at = node.clock.mono;
            }
            let is_unowned = node.slots.as_ref().is_some_and(|slots| !slots.unowned.is_empty());
            self.renewals_are_delayed |=
                node.is_paused() || is_refusing(node) || node.role == Role::Replica || is_unowned;
        });
        Ok(())
    }

    /// When the server's role last changed.
    fn role_changed(&self) -> Position {
        self.lasting.iter().rfind(|(_, cause)| matches!(cause, Cause::Role)).map_or(0, |(position, _)| *position)
    }

    /// Requests that have begun and whose outcome has not been received, with the position where each began.
    fn undecided(&self) -> impl Iterator<Item = (Position, &OpenRequest, &Request)> {
        let open = self.connections.values().flat_map(|it| &it.open);
        let open = open.filter_map(|open| Some((open.began?, open)));
        let open = open.flat_map(|(at, open)| (at..).zip(&open.runs).map(move |(at, request)| (at, open, request)));
        let waits = self.waits.iter().chain(&self.unacknowledged);
        open.chain(waits.map(|wait| (wait.open.began.unwrap_or(0), &wait.open, &wait.request)))
    }

    /// The iteration is over: checks all invariants except those that need an idle server.
    pub fn after_iteration(&mut self) -> Result<(), Violation> {
        let errors: Vec<&str> = internal_errors::kinds().collect();
        if !errors.is_empty() {
            return Err(Violation::new(INTERNAL, errors.join("; ")));
        }
        let is_idle = self.requests == 0 && node(|node| node.writes == 0 && node.log.is_empty());
        if is_idle && self.replies.is_empty() {
            self.last_iteration_at = node(|node| node.clock.mono);
            return self.check_work();
        }
        let last = std::mem::replace(&mut self.last_iteration_at, node(|node| node.clock.mono));
        self.record_log();
        self.process_replies()?;
        let undecided = self.undecided_bindings(last);
        for client in self.closed.clone() {
            let left = self.waits.iter().filter(|wait| wait.request.client == client);
            self.abandoned.extend(left.map(|wait| (wait.open.db, wait.request.clone())));
            self.waits.retain(|wait| wait.request.client != client);
            let open = self.connections.remove(&client).map(|it| it.open).unwrap_or_default();
            let begun = open.iter().filter(|open| open.began.is_some());
            self.abandoned.extend(begun.flat_map(|open| open.runs.iter().map(|request| (open.db, request.clone()))));
        }
        let (began, was_refusing) = self.before;
        let now = node(|node| node.clock.mono);
        let is_long = now - began > 5_000;
        self.renewals_are_delayed |= is_long;
        if node(|node| node.is_paused() || is_refusing(node)) {
            self.blocked_at = now;
        }
        if is_long || self.requests > 0 {
            self.busy_until = self.busy_until.max(now);
        }
        self.check_refused_writes(was_refusing)?;
        self.check_holds(&undecided)?;
        self.closed.clear();
        self.check_limits()?;
        self.check_order()?;
        self.check_tokens()?;
        self.check_rights()?;
        self.current_requesters.clear();
        // Holds that were granted and ended within one iteration.
        for (owner, token) in std::mem::take(&mut self.answered) {
            self.tokens.entry(token).or_insert((owner, self.position));
        }
        self.check_replication()?;
        self.check_work()?;
        self.contention_is_notified()?;
        tables_agree()
    }

    /// Nothing has arrived for a while: checks what must have happened by now.
    pub fn check_idle(&mut self) -> Result<(), Violation> {
        if node(|node| node.clock.mono) < self.busy_until + IDLE_TIME * 1000 {
            return Ok(());
        }
        // Nothing else is in progress.
        waits_end_in_time()?;
        self.read_in_time()?;
        if node(|node| is_refusing(node) || node.is_paused() || node.clients.values().any(|it| it.is_not_reading)) {
            return Ok(());
        }
        // (Also for each hold by itself: the module's list of those that may lag may be wrong.)
        let lags = state::with(|state| {
            let mut holds = self.beliefs.keys();
            let any_lags = holds.any(|(db, key, owner)| state.bindings.lags_of(*db, key, owner));
            any_lags || state.bindings.any_lags() || state.seems_stepped(Now::read())
        });
        if node(|node| node.role == Role::Primary) && lags {
            return Err(Violation::new(STEPPED, "a key has not followed the clock step"));
        }
        self.all_answered()?;
        if crate::redis::event_loop::wakes_at() > node(|node| node.clock.mono) {
            self.answers_are_sent()?;
        }
        if node(|node| node.role == Role::Replica) {
            return no_wait_on_replica();
        }
        self.ephemeral_holds_end()?;
        self.losses_are_notified()?;
        self.lost_holds_end()?;
        self.undelivered_grants_are_revoked()?;
        // After a clock step, an expired lease is noticed by the server's cron at the latest.
        no_wait_for_free_lock(if self.renewals_are_delayed { 250 } else { 50 })?;
        self.check_cycles()
    }
}

fn show((db, key, owner): &Hold) -> String {
    format!("{} of {} in {db}", key.escape_ascii(), owner.escape_ascii())
}
