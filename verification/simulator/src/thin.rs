//! Clients of the basic profile, as simple as the rules of `docs/client-protocol.md` allow, on the server with the
//! module. Each acquisition is a state machine, and each request has a connection of its own. The network delays, cuts
//! and drops. The invariants of this file hold in addition to those of the module ([`crate::rules`]). `simulate --thin`
//! runs it from seeds.
//!
//! Clients can break two rules of the protocol without a violation here: `WAIT 0` for a time that is nearly over (B2;
//! B13 withdraws it), and `ALL` after a broken connection (B18; a newer request takes over the place of a stale one).
//! B18 and B21 leave a gap that the model allows for: an ACQUIRE that was sent before its connection broke may arrive
//! after the release, or more than a second after the first withdrawal. It is granted, and its hold ends with its lease.

use crate::random::Random;
use crate::redis::event_loop::{Arrival, run_iteration, wakes_at};
use crate::redis::{Bytes, Generation, Replica, node, start};
use crate::resp::Reply;
use crate::rules::{Checker, Violation};
use crate::{state, stored};
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The clock rule (B6).
pub const CERTAIN: &str = "a hold that its client is certain of exists at the server, with its token";
/// Mutual exclusion.
pub const TWICE: &str = "no more clients are certain of a lock than its limit";
/// Withdrawal and release.
pub const LEFT: &str = "a finished acquisition leaves neither holds nor requests";
/// Time limits.
pub const ENDS: &str = "every call returns within its timeout, and every acquisition ends";
/// Waits that are repeated (B11, B12).
pub const FREE: &str = "a free lock is granted to a client that waits for it";
/// Repeated releases (B17).
pub const FALSE_LOSS: &str = "a caller whose hold was certain when it was released gets no report of a loss";

/// A rule of the protocol that a client breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// B1: every acquisition has the same owner.
    OneOwner,
    /// B3: `HOLDS 1` is missing.
    CountsTwice,
    /// B6: a lease counts from the reply.
    CountsFromReply,
    /// B6: a renewed lease counts from the reply.
    RenewalCountsFromReply,
    /// B6: the waited time counts twice.
    WaitedTwice,
    /// B11: `-SUPERSEDED` to the only request ends the acquisition.
    SupersededIsTheEnd,
    /// B11: a silent wait is not repeated.
    NotAskedAgain,
    /// B13: a wait that timed out without a reply is not withdrawn.
    NotWithdrawnInTime,
    /// B13: an acquisition that ends without the lock after a broken connection is not withdrawn.
    NotWithdrawnWhenBroken,
    /// B17: nil to a repeated release counts as a loss.
    NilIsALoss,
    /// B19: a release is not repeated.
    ReleasedOnce,
    /// B20: a cancelled wait is not withdrawn.
    NotWithdrawn,
    /// B20: a token that is read after the withdrawal is ignored.
    LateTokenIgnored,
    /// B21: a withdrawal after a broken connection is not repeated.
    WithdrawnOnce,
    /// B24: a caller waits for the server.
    WaitsForTheServer,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::OneOwner,
        Self::CountsTwice,
        Self::CountsFromReply,
        Self::RenewalCountsFromReply,
        Self::WaitedTwice,
        Self::SupersededIsTheEnd,
        Self::NotAskedAgain,
        Self::NotWithdrawnInTime,
        Self::NotWithdrawnWhenBroken,
        Self::NilIsALoss,
        Self::ReleasedOnce,
        Self::NotWithdrawn,
        Self::LateTokenIgnored,
        Self::WithdrawnOnce,
        Self::WaitsForTheServer,
    ];
}

type Micros = u64;
const MS: Micros = 1000;
/// A wait without a reply is repeated after this time (B11). Its connection is closed after twice this time.
const SILENT_WAIT: Micros = 2000 * MS;
const SILENT_MORE: Micros = 1000 * MS;
/// The longest delay of a request whose connection was cut.
const LATEST: Micros = 3000 * MS;
/// How much later than its timeout a call may return (B24).
const GRACE: Micros = 250 * MS;
/// `holdfast.replicas-timeout`.
const REPLICAS_TIMEOUT: Micros = 1000 * MS;
/// The longest time that a run may take.
const LONGEST: Micros = 120_000 * MS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Acquire,
    Renew,
    Release,
    Withdraw,
}

/// The state of an acquisition: the table of the protocol. A hold whose token was read late becomes `Held` when a
/// renewal got a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting,
    Confirming,
    Held,
    Releasing,
    Withdrawing,
    Finished,
}

#[derive(Clone, Debug)]
struct Call {
    owner: String,
    key: &'static str,
    limit: &'static str,
    lease: Micros,
    replicas: bool,
    began: Micros,
    /// When the caller's time is over.
    until: Micros,
    cancelled_at: Micros,
    holds_for: Micros,
    stage: Stage,
    /// When the request of the stage is sent, or repeated.
    ask_at: Micros,
    is_answered: bool,
    /// The connection of the latest ACQUIRE, and when that was sent.
    newest: Option<u64>,
    acquired_at: Micros,
    token: u64,
    certain: Micros,
    release_at: Micros,
    /// When the first release was sent.
    released: Option<Micros>,
    is_repeated: bool,
    /// A connection broke under an ACQUIRE.
    broke: bool,
    /// When the latest ACQUIRE arrived, and whether it did so after the latest withdrawal.
    arrived: Micros,
    is_late: bool,
    /// Since when it waits for a lock that is free.
    free_since: Option<Micros>,
    /// How many withdrawals got a reply, when the first one was sent, and until when no ACQUIRE may arrive unnoticed.
    withdrawn: usize,
    withdraws_since: Micros,
    withdraws_until: Micros,
    over_at: Micros,
    /// No release got a reply within a lease, or too few withdrawals.
    gave_up: bool,
}

impl Call {
    /// How many withdrawals must get a reply: after a broken connection, a stale request may arrive between two of them.
    fn answers_needed(&self, fault: Option<Fault>) -> usize {
        if self.broke && fault != Some(Fault::WithdrawnOnce) { 2 } else { 1 }
    }

    /// Whether the protocol leaves something behind: an ACQUIRE that arrived too late to be withdrawn, or nobody
    /// answered the releases.
    fn may_be_left(&self) -> bool {
        let is_missed = self.released.is_some() || self.arrived >= self.withdraws_until;
        self.gave_up || self.broke && self.is_late && is_missed
    }
}

#[derive(Debug)]
struct Wire {
    call: usize,
    /// Requests without a reply, and when each was sent.
    unanswered: VecDeque<(Kind, Micros)>,
    /// Those to which the server has not replied.
    at_server: VecDeque<Kind>,
    swallows: bool,
    /// The server has noticed that it was closed.
    has_ended: bool,
    /// When the client closes it.
    close_at: Micros,
    received: Bytes,
    unread: Bytes,
    last: [Micros; 2],
}

#[derive(Debug)]
enum Parcel {
    Request(u64, Vec<Bytes>),
    End(u64),
    Bytes(u64, Bytes),
    Ended(u64),
}

#[derive(Clone, Copy, Debug)]
enum Mishap {
    Cut,
    Swallow,
    Stall(Micros),
    Replicas,
}

struct Run {
    calls: Vec<Call>,
    wires: BTreeMap<u64, Wire>,
    in_flight: BTreeMap<(Micros, u64), Parcel>,
    mishaps: Vec<(Micros, Mishap)>,
    sent: u64,
    checker: Checker,
    random: Random,
    delay: Micros,
    admin: u64,
    stall: Option<Micros>,
    /// The longest time for which a lock may be free while a client waits for it.
    longest_free: Micros,
    paused_until: Micros,
    fault: Option<Fault>,
}

/// Plays the run of a seed. The clients break `fault`, if there is one. Returns how many requests arrived.
///
/// # Errors
///
/// The first violated invariant.
pub fn play(seed: u64, fault: Option<Fault>) -> Result<u64, Violation> {
    let mut run = Run::new(seed, fault);
    let ran = catch_unwind(AssertUnwindSafe(|| run.run()));
    ran.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(Violation::new("nothing panics", text.unwrap_or("a panic")))
    })
}

fn now() -> Micros {
    node(|node| node.clock.mono)
}

/// Whole milliseconds, rounded up.
fn ms(micros: Micros) -> u64 {
    micros.div_ceil(MS)
}

impl Run {
    fn new(seed: u64, fault: Option<Fault>) -> Self {
        let mut random = Random::new(seed ^ 0x7417);
        start(*random.of(&Generation::ALL), None);
        node(|node| {
            let confirmed = node.stream.offset();
            node.replicas = vec![Replica { confirmed, delay: Some(5), is_good: true, confirms_at: VecDeque::new() }];
        });
        let (replicas, many) = (random.one_in(4), random.word(&["LIMIT 2", "SHARED"]));
        let mut calls: Vec<Call> = (0..2 + random.below(5))
            .map(|number| {
                let began = random.below(3000) as Micros * MS;
                let (key, limit) = *random.of(&[("k", "LIMIT 1"), ("k", "LIMIT 1"), ("l", many)]);
                let wait = *random.of(&[1, 30, 300, 3_000, 10_000]) * MS + random.below(2) as Micros * 300;
                let is_cancelled = random.one_in(3);
                let cancelled_at = if is_cancelled { began + random.below(600) as Micros * MS } else { Micros::MAX };
                Call {
                    owner: if fault == Some(Fault::OneOwner) { "o".into() } else { format!("o{number}") },
                    key,
                    limit,
                    lease: *random.of(&[400, 1_000, 3_000]) * MS,
                    replicas,
                    began,
                    until: began + wait,
                    cancelled_at,
                    holds_for: *random.of(&[0, 10, 300, 2_500]) * MS,
                    stage: Stage::Waiting,
                    ask_at: began,
                    is_answered: false,
                    newest: None,
                    acquired_at: 0,
                    token: 0,
                    certain: 0,
                    release_at: 0,
                    released: None,
                    is_repeated: false,
                    broke: false,
                    arrived: 0,
                    is_late: false,
                    free_since: None,
                    withdrawn: 0,
                    withdraws_since: 0,
                    withdraws_until: Micros::MAX,
                    gave_up: false,
                    over_at: 0,
                }
            })
            .collect();
        calls.sort_by_key(|call| call.began);
        let mishaps = [
            Mishap::Cut,
            Mishap::Cut,
            Mishap::Cut,
            Mishap::Swallow,
            Mishap::Stall(30 * MS),
            Mishap::Stall(500 * MS),
            Mishap::Stall(3_000 * MS),
            Mishap::Replicas,
        ];
        // Half of them come just after a first request.
        let at = |random: &mut Random| match random.one_in(2) {
            true => random.below(6_000) as Micros * MS,
            false => random.of(&calls).began + random.below(300) as Micros * MS,
        };
        let mut mishaps: Vec<(Micros, Mishap)> =
            (0..random.below(9)).map(|_| (at(&mut random), *random.of(&mishaps))).collect();
        mishaps.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        let delay = *random.of(&[0, MS, 30 * MS, 300 * MS]);
        let costs = mishaps.iter().map(|(_, mishap)| match mishap {
            Mishap::Stall(time) => *time,
            Mishap::Replicas => 0,
            Mishap::Cut | Mishap::Swallow => SILENT_WAIT,
        });
        let longest_free = SILENT_WAIT + costs.sum::<Micros>() + 4 * delay;
        let admin = node(|node| node.connect());
        let (wires, in_flight, checker) = (BTreeMap::new(), BTreeMap::new(), Checker::new());
        Self {
            calls,
            wires,
            in_flight,
            mishaps,
            sent: 0,
            checker,
            random,
            delay,
            admin,
            stall: None,
            longest_free,
            paused_until: 0,
            fault,
        }
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    fn run(&mut self) -> Result<u64, Violation> {
        let mut quiet_since = None;
        loop {
            let now = now();
            let is_over = |call: &Call| call.stage == Stage::Finished;
            if self.calls.iter().all(is_over) && self.in_flight.is_empty() && self.mishaps.is_empty() {
                // Whatever is left after the longest lease is left forever.
                if now > *quiet_since.get_or_insert(now) + 5_000 * MS {
                    return self.nothing_is_left().map(|()| self.sent);
                }
            } else if now > LONGEST {
                return Err(Violation::new(ENDS, format!("{:?}", self.calls)));
            }
            let in_flight = self.in_flight.keys().next().map(|(at, _)| *at);
            let mishap = self.mishaps.last().map(|(at, _)| *at);
            let call = (0..self.calls.len()).map(|call| (self.due(call), call)).min();
            let wire = self.wires.iter().map(|(id, wire)| (wire.close_at, *id)).min();
            let server = if self.stall.is_some() { now } else { wakes_at() };
            let times = [in_flight, mishap, call.map(|(at, _)| at), wire.map(|(at, _)| at), Some(server)];
            let next = times.into_iter().flatten().min().unwrap_or(server).max(now);
            node(|node| node.clock.advance(next - now));
            if mishap.is_some_and(|at| at <= next) {
                self.mishap(next);
            } else if in_flight.is_some_and(|at| at <= next) {
                self.arrives(next)?;
            } else if let Some((_, id)) = wire.filter(|(at, _)| *at <= next) {
                self.ended(id, next);
            } else if let Some((_, call)) = call.filter(|(at, _)| *at <= next) {
                self.step(call, next)?;
            } else {
                self.iteration(Vec::new())?;
            }
        }
    }

    /// When an acquisition has something to do.
    fn due(&self, call: usize) -> Micros {
        let it = &self.calls[call];
        match it.stage {
            // No ACQUIRE after the caller's time is over (B12).
            Stage::Waiting => {
                let ask = if it.ask_at < it.until { it.ask_at } else { Micros::MAX };
                let bound = if self.has(Fault::WaitsForTheServer) { Micros::MAX } else { it.until + GRACE };
                ask.min(bound).min(it.cancelled_at.max(it.began))
            }
            Stage::Confirming => it.ask_at.min(it.certain).min(it.until + GRACE),
            Stage::Held => it.ask_at.min(it.certain).min(it.release_at),
            Stage::Releasing | Stage::Withdrawing => it.ask_at,
            Stage::Finished => Micros::MAX,
        }
    }

    fn step(&mut self, call: usize, now: Micros) -> Result<(), Violation> {
        let it = &self.calls[call];
        match it.stage {
            Stage::Waiting if now >= it.cancelled_at => {
                let is_withdrawn = !self.has(Fault::NotWithdrawn);
                self.answer(call, now, is_withdrawn)
            }
            Stage::Waiting | Stage::Confirming if now >= it.until + GRACE => {
                let is_withdrawn = !self.has(Fault::NotWithdrawnInTime);
                self.answer(call, now, is_withdrawn)
            }
            // The server was busy when the request was to be repeated: now the caller's time is over (B12).
            Stage::Waiting if now >= it.until => {
                self.calls[call].ask_at = Micros::MAX;
                Ok(())
            }
            Stage::Confirming if now >= it.certain => self.answer(call, now, true),
            Stage::Held if now >= it.release_at.min(it.certain) => {
                let it = &mut self.calls[call];
                (it.stage, it.ask_at) = (Stage::Releasing, now);
                Ok(())
            }
            Stage::Finished => Ok(()),
            _ => {
                self.ask(call, now);
                Ok(())
            }
        }
    }

    /// The call returns without the lock.
    fn answer(&mut self, call: usize, now: Micros, withdraws: bool) -> Result<(), Violation> {
        let it = &mut self.calls[call];
        // While the server is busy, nothing else happens: there is only one clock.
        if !it.is_answered && now > (it.until + GRACE).max(self.paused_until) + MS {
            return Err(Violation::new(ENDS, format!("at {now}: {it:?}")));
        }
        if it.stage == Stage::Waiting && now < it.cancelled_at && now + 2 * MS < it.until {
            return Err(Violation::new(ENDS, format!("at {now}, too early: {it:?}")));
        }
        (it.is_answered, it.stage) = (true, Stage::Withdrawing);
        (it.ask_at, it.withdraws_since) = (now, now);
        // A reply that is not complete by then counts as broken.
        self.wires.values_mut().filter(|wire| wire.call == call).for_each(|wire| {
            wire.close_at = wire.close_at.min(now + SILENT_WAIT);
        });
        if !withdraws {
            self.finish(call, now);
        }
        Ok(())
    }

    /// Sends the request of the stage.
    fn ask(&mut self, call: usize, now: Micros) {
        let fault = self.fault;
        let it = self.calls[call].clone();
        let replicas = if it.replicas { " REPLICAS 1" } else { "" };
        let (key, owner, token, lease) = (it.key, &it.owner, it.token, ms(it.lease));
        let silence = (it.lease / 8).clamp(50 * MS, 1000 * MS) + if it.replicas { REPLICAS_TIMEOUT } else { 0 };
        let all = format!("LOCK.RELEASE {key} {owner} ALL");
        // Its earlier requests have no reply. (A wait that is repeated gets one soon.)
        let is_wait = it.stage == Stage::Waiting;
        let more = now + SILENT_MORE + if it.replicas { REPLICAS_TIMEOUT } else { 0 };
        let silent: Vec<u64> = self.wires.iter().filter(|(_, wire)| wire.call == call).map(|(id, _)| *id).collect();
        for id in silent {
            let Some(wire) = self.wires.get_mut(&id) else { continue };
            match wire.unanswered.front() {
                Some((Kind::Acquire, _)) if is_wait => wire.close_at = wire.close_at.min(more),
                Some((Kind::Acquire, _)) => {}
                _ => drop(self.close(id, now)),
            }
        }
        let it = &mut self.calls[call];
        it.ask_at = now + silence;
        let (kind, lines) = match it.stage {
            Stage::Waiting => {
                it.ask_at = now + SILENT_WAIT + if it.replicas { REPLICAS_TIMEOUT } else { 0 };
                if fault == Some(Fault::NotAskedAgain) {
                    it.ask_at = Micros::MAX;
                }
                let left = it.until - now;
                let wait = ms(left);
                let waited = now - it.began;
                let waited = if waited > 0 { format!(" WAITED {}", ms(waited)) } else { String::new() };
                let holds = if fault == Some(Fault::CountsTwice) { "" } else { "HOLDS 1 " };
                let terms = format!("{holds}LEASE {lease} WAIT {wait}{waited} {}{replicas} WITHWAITED", it.limit);
                it.acquired_at = now;
                (Kind::Acquire, vec![format!("LOCK.ACQUIRE {key} {owner} {terms}")])
            }
            Stage::Confirming | Stage::Held => {
                (Kind::Renew, vec![format!("LOCK.RENEW {key} {owner} TOKEN {token} LEASE {lease}{replicas}")])
            }
            Stage::Releasing => {
                let is_late = it.released.is_some_and(|first| now > first + it.lease);
                let is_once = fault == Some(Fault::ReleasedOnce) && it.released.is_some();
                it.gave_up = is_late;
                if is_late || is_once {
                    return self.finish(call, now);
                }
                it.is_repeated = it.released.is_some();
                it.released.get_or_insert(now);
                let token = format!("LOCK.RELEASE {key} {owner} TOKEN {token}");
                (Kind::Release, if it.broke { vec![token, all] } else { vec![token] })
            }
            Stage::Withdrawing if now >= it.acquired_at.max(it.withdraws_since) + it.lease + 2 * SILENT_WAIT => {
                it.gave_up = it.withdrawn < it.answers_needed(fault);
                return self.finish(call, now);
            }
            Stage::Withdrawing | Stage::Finished => (Kind::Withdraw, vec![all]),
        };
        let id = node(|node| node.connect());
        if kind == Kind::Acquire {
            it.newest = Some(id);
        }
        let kinds = [kind].into_iter().chain(std::iter::repeat(Kind::Withdraw)).take(lines.len());
        let unanswered = kinds.clone().map(|kind| (kind, now)).collect();
        let (at_server, received, unread) = (kinds.collect(), Vec::new(), Vec::new());
        let wire = Wire {
            call,
            unanswered,
            at_server,
            swallows: false,
            has_ended: false,
            close_at: Micros::MAX,
            received,
            unread,
            last: [0; 2],
        };
        self.wires.insert(id, wire);
        for line in lines {
            let words = line.split(' ').map(|word| word.as_bytes().to_vec()).collect();
            self.post(id, Parcel::Request(id, words), now);
        }
    }

    /// Sends something; bytes in one direction arrive in order.
    fn post(&mut self, id: u64, parcel: Parcel, now: Micros) {
        let at = now + self.random.below(self.delay as usize + 1) as Micros;
        let Some(wire) = self.wires.get_mut(&id).filter(|wire| !wire.swallows) else { return };
        let last = &mut wire.last[usize::from(matches!(parcel, Parcel::Bytes(..) | Parcel::Ended(_)))];
        *last = at.max(*last);
        self.sent += 1;
        self.in_flight.insert((*last, self.sent), parcel);
    }

    /// A client closes a connection and ignores later replies. Returns the requests without a reply.
    fn close(&mut self, id: u64, now: Micros) -> Vec<Kind> {
        self.post(id, Parcel::End(id), now);
        let Some(wire) = self.wires.get_mut(&id) else { return Vec::new() };
        wire.close_at = Micros::MAX;
        let lost: Vec<Kind> = std::mem::take(&mut wire.unanswered).into_iter().map(|(kind, _)| kind).collect();
        self.calls[wire.call].broke |= lost.contains(&Kind::Acquire);
        lost
    }

    /// An acquisition has ended: its connections return to the pool.
    fn finish(&mut self, call: usize, now: Micros) {
        (self.calls[call].stage, self.calls[call].over_at) = (Stage::Finished, now);
        let ids: Vec<u64> = self.wires.iter().filter(|(_, wire)| wire.call == call).map(|(id, _)| *id).collect();
        for id in ids {
            // The reply to a wait is read completely.
            let is_wait = self.wires[&id].unanswered.front().is_some_and(|(kind, _)| *kind == Kind::Acquire);
            if !is_wait {
                self.close(id, now);
            }
        }
    }

    fn mishap(&mut self, now: Micros) {
        let Some((_, mishap)) = self.mishaps.pop() else { return };
        let open: Vec<u64> =
            self.wires.iter().filter(|(_, wire)| !wire.unanswered.is_empty()).map(|(id, _)| *id).collect();
        let id = open.get(self.random.below(open.len())).copied();
        match (mishap, id) {
            (Mishap::Stall(time), _) => self.stall = Some(time),
            (Mishap::Replicas, _) => {
                node(|node| {
                    let replicas = node.replicas.iter_mut();
                    replicas.for_each(|it| it.delay = if it.delay.is_some() { None } else { Some(5) });
                });
                self.checker.replicas_changed();
            }
            (Mishap::Cut, Some(id)) => {
                let keeps = self.random.one_in(2);
                let is_slow = self.random.one_in(2);
                let delay = if is_slow { self.random.below(LATEST as usize) as Micros } else { 0 };
                let of_wire: Vec<_> = self.in_flight.keys().copied().collect();
                for at in of_wire {
                    match &self.in_flight[&at] {
                        Parcel::Request(to, _) if *to == id => {
                            let parcel = self.in_flight.remove(&at).filter(|_| keeps);
                            parcel.into_iter().for_each(|it| self.post(id, it, now + delay));
                        }
                        Parcel::Bytes(from, _) if *from == id => drop(self.in_flight.remove(&at)),
                        _ => {}
                    }
                }
                self.post(id, Parcel::End(id), now + delay);
                // The client notices it immediately, while its request may be on the way. Its caller may cancel.
                if self.random.one_in(3)
                    && let Some(wire) = self.wires.get(&id)
                {
                    self.calls[wire.call].cancelled_at = now;
                }
                self.sent += 1;
                self.in_flight.insert((now, self.sent), Parcel::Ended(id));
            }
            (Mishap::Swallow, Some(id)) => {
                let is_of = |parcel: &Parcel| match parcel {
                    Parcel::Request(it, _) | Parcel::End(it) | Parcel::Bytes(it, _) | Parcel::Ended(it) => *it == id,
                };
                self.in_flight.retain(|_, parcel| !is_of(parcel));
                self.wires.get_mut(&id).into_iter().for_each(|wire| wire.swallows = true);
            }
            (_, None) => {}
        }
    }

    fn arrives(&mut self, now: Micros) -> Result<(), Violation> {
        let Some((_, parcel)) = self.in_flight.pop_first() else { return Ok(()) };
        let is_here = |id: &u64| node(|node| node.clients.contains_key(id));
        match parcel {
            Parcel::Request(id, words) if is_here(&id) => {
                self.checker.request_sent(id, &words);
                if let Some(wire) = self.wires.get(&id) {
                    let it = &mut self.calls[wire.call];
                    if words[0] == b"LOCK.ACQUIRE" {
                        (it.arrived, it.is_late) = (now, true);
                    } else if words.last().is_some_and(|word| word == b"ALL") {
                        it.is_late = false;
                    }
                }
                self.iteration(vec![Arrival::Requests(id, vec![words])])
            }
            Parcel::End(id) if is_here(&id) => {
                self.checker.client_vanished(id);
                self.wires.get_mut(&id).into_iter().for_each(|wire| wire.has_ended = true);
                self.iteration(vec![Arrival::End(id)])
            }
            Parcel::Bytes(id, bytes) => {
                self.wires.get_mut(&id).into_iter().for_each(|wire| wire.received.extend_from_slice(&bytes));
                while let Some(wire) = self.wires.get_mut(&id)
                    && let Some(reply) = Reply::take(&mut wire.received)
                {
                    let call = wire.call;
                    if let Some((kind, sent)) = wire.unanswered.pop_front() {
                        self.reply_received(call, id, (kind, sent), &reply, now)?;
                    }
                }
                if self.wires.get(&id).is_some_and(|wire| wire.unanswered.is_empty()) {
                    self.close(id, now);
                }
                Ok(())
            }
            Parcel::Ended(id) => {
                self.ended(id, now);
                Ok(())
            }
            Parcel::Request(..) | Parcel::End(_) => Ok(()),
        }
    }

    /// A connection broke or was closed.
    fn ended(&mut self, id: u64, now: Micros) {
        let lost = self.close(id, now);
        let Some(call) = self.wires.get(&id).map(|wire| wire.call).filter(|_| !lost.is_empty()) else { return };
        let pause = self.pause(call);
        let it = &mut self.calls[call];
        let is_of_stage = match it.stage {
            // Of several waits, the server has the newest.
            Stage::Waiting => it.newest == Some(id),
            Stage::Confirming | Stage::Held => lost.contains(&Kind::Renew),
            Stage::Releasing | Stage::Withdrawing => lost.contains(&Kind::Withdraw) || lost.contains(&Kind::Release),
            Stage::Finished => false,
        };
        if is_of_stage {
            it.ask_at = it.ask_at.min(now + pause);
        }
        self.is_withdrawn(call, now);
    }

    fn pause(&mut self, call: usize) -> Micros {
        let most = (self.calls[call].lease / 16).clamp(20 * MS, 1000 * MS);
        10 * MS + self.random.below(most as usize) as Micros
    }

    fn reply_received(
        &mut self,
        call: usize,
        id: u64,
        (kind, sent): (Kind, Micros),
        reply: &Reply,
        now: Micros,
    ) -> Result<(), Violation> {
        let pause = self.pause(call);
        let fault = self.fault;
        let it = &mut self.calls[call];
        let is_newest = it.newest == Some(id);
        match (kind, reply, it.stage) {
            (Kind::Acquire, Reply::Array(parts), stage) => {
                let number = |position: usize| parts.get(position).and_then(Reply::number).unwrap_or(0);
                let (token, waited) = (number(0), number(1) * MS);
                if stage != Stage::Waiting {
                    // RELEASE has overtaken the ACQUIRE: it is withdrawn again.
                    let is_ignored = fault == Some(Fault::LateTokenIgnored) || fault == Some(Fault::NotWithdrawn);
                    let is_late = matches!(stage, Stage::Withdrawing | Stage::Releasing | Stage::Finished);
                    if is_late && !is_ignored && fault != Some(Fault::NotWithdrawnInTime) {
                        (it.stage, it.withdrawn, it.ask_at) = (Stage::Withdrawing, 0, now);
                        it.withdraws_since = now;
                    }
                    return Ok(());
                }
                let waited = if fault == Some(Fault::WaitedTwice) { 2 * waited } else { waited };
                let from = if fault == Some(Fault::CountsFromReply) { now } else { sent + waited };
                (it.token, it.certain) = (token, from + it.lease / 100 * 99);
                if it.certain < now + it.lease / 2 {
                    (it.stage, it.ask_at) = (Stage::Confirming, now);
                } else {
                    (it.stage, it.ask_at) = (Stage::Held, now + it.lease / 4);
                    (it.is_answered, it.release_at) = (true, now + it.holds_for);
                }
            }
            (Kind::Acquire, Reply::Null, Stage::Waiting) if is_newest => {
                let is_withdrawn = it.broke && fault != Some(Fault::NotWithdrawnWhenBroken);
                return self.answer(call, now, is_withdrawn);
            }
            (Kind::Acquire, Reply::Error(error), Stage::Waiting) if is_newest => {
                if fault == Some(Fault::SupersededIsTheEnd) && error.starts_with("SUPERSEDED") {
                    return self.answer(call, now, false);
                }
                it.ask_at = now + pause;
            }
            (Kind::Renew, Reply::Integer(_), Stage::Confirming | Stage::Held) => {
                let from = if fault == Some(Fault::RenewalCountsFromReply) { now } else { sent };
                it.certain = it.certain.max(from + it.lease / 100 * 99);
                it.ask_at = now + it.lease / 4;
                if it.stage == Stage::Confirming {
                    (it.stage, it.is_answered, it.release_at) = (Stage::Held, true, now + it.holds_for);
                }
            }
            (Kind::Renew, Reply::Null, Stage::Confirming) => return self.answer(call, now, true),
            (Kind::Renew, Reply::Null, Stage::Held) if now < it.certain => {
                return Err(Violation::new(CERTAIN, format!("at {now}: {it:?}")));
            }
            (Kind::Renew, Reply::Null, Stage::Held) => (it.stage, it.ask_at) = (Stage::Releasing, now),
            (Kind::Renew, _, Stage::Confirming | Stage::Held) => it.ask_at = now + pause,
            (Kind::Release, Reply::Integer(0), _) => {
                return Err(Violation::new(LEFT, format!("at {now}, the release left holds: {it:?}")));
            }
            (Kind::Release, Reply::Integer(_) | Reply::Null, Stage::Releasing) => {
                let is_loss = *reply == Reply::Null && (!it.is_repeated || fault == Some(Fault::NilIsALoss));
                if is_loss && now < it.certain {
                    return Err(Violation::new(FALSE_LOSS, format!("at {now}: {it:?}")));
                }
                // After a broken connection, the withdrawal of a stale request is in the same pipeline.
                if !it.broke {
                    self.finish(call, now);
                }
            }
            (Kind::Withdraw, Reply::Integer(_) | Reply::Null, Stage::Releasing) => self.finish(call, now),
            // (A withdrawal that was sent before the token was read does not count: its reply is not about that grant.)
            (Kind::Withdraw, Reply::Integer(_) | Reply::Null, Stage::Withdrawing) if sent >= it.withdraws_since => {
                it.withdrawn += 1;
                it.ask_at = now + SILENT_MORE;
                if it.withdrawn == 1 {
                    it.withdraws_until = it.ask_at;
                }
                self.is_withdrawn(call, now);
            }
            (Kind::Release, Reply::Error(_), Stage::Releasing)
            | (Kind::Withdraw, Reply::Error(_), Stage::Withdrawing) => it.ask_at = now + pause,
            _ => {}
        }
        if kind == Kind::Acquire {
            self.is_withdrawn(call, now);
        }
        Ok(())
    }

    /// Ends a withdrawal that got its replies, after a broken connection two of them, once no wait is left to read.
    fn is_withdrawn(&mut self, call: usize, now: Micros) {
        let waits = self
            .wires
            .values()
            .any(|wire| wire.call == call && wire.unanswered.iter().any(|(kind, _)| *kind == Kind::Acquire));
        let it = &self.calls[call];
        if it.stage == Stage::Withdrawing && it.withdrawn >= it.answers_needed(self.fault) && !waits {
            self.finish(call, now);
        }
    }

    /// An event-loop iteration of the server, and the bytes that it sends.
    fn iteration(&mut self, mut arrivals: Vec<Arrival>) -> Result<(), Violation> {
        if let Some(time) = self.stall.take() {
            let words = vec![b"DEBUG".to_vec(), b"SLEEP".to_vec(), (time as f64 / 1e6).to_string().into_bytes()];
            self.checker.request_sent(self.admin, &words);
            arrivals.push(Arrival::Requests(self.admin, vec![words]));
        }
        self.checker.before_iteration()?;
        let before = now();
        run_iteration(arrivals);
        let now = now();
        self.paused_until = if now > before { now } else { self.paused_until };
        let ids: Vec<u64> = self.wires.keys().copied().chain([self.admin]).collect();
        for id in ids {
            let sent = node(|node| match node.clients.get_mut(&id) {
                Some(client) => Some(std::mem::take(&mut client.sent)),
                None => node.final_output.remove(&id),
            });
            let is_gone = node(|node| !node.clients.contains_key(&id));
            let mut bytes = sent.unwrap_or_default();
            if id == self.admin {
                while let Some(reply) = Reply::take(&mut bytes) {
                    self.checker.reply_received(id, &reply)?;
                }
                continue;
            }
            let Some(wire) = self.wires.get_mut(&id) else { continue };
            wire.unread.extend_from_slice(&bytes);
            let has_ended = wire.has_ended;
            while let Some(reply) = Reply::take(&mut wire.unread) {
                self.checker.bytes_sent(&reply);
                // (The checker reads tokens only.)
                let is_grant = wire.at_server.pop_front() == Some(Kind::Acquire);
                let token = reply.elements().first().filter(|_| is_grant);
                if !has_ended {
                    self.checker.reply_received(id, token.unwrap_or(&reply))?;
                }
            }
            if !bytes.is_empty() && !has_ended {
                self.post(id, Parcel::Bytes(id, bytes), now);
            }
            if is_gone && !has_ended {
                self.wires.get_mut(&id).into_iter().for_each(|wire| wire.has_ended = true);
                self.post(id, Parcel::Ended(id), now);
            }
        }
        self.checker.after_iteration()?;
        self.holds_exist(now)
    }

    fn holds_exist(&mut self, now: Micros) -> Result<(), Violation> {
        let mut certain: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for call in &self.calls {
            let seen = node(|node| stored::read(node, 0, call.key.as_bytes()));
            let holder = seen.of(call.owner.as_bytes());
            if call.stage == Stage::Held && now < call.certain {
                if holder.is_none_or(|holder| holder.token != Some(call.token)) {
                    return Err(Violation::new(CERTAIN, format!("at {now}: {call:?}: {seen:?}")));
                }
                let most = call.limit.strip_prefix("LIMIT ").and_then(|most| most.parse().ok()).unwrap_or(usize::MAX);
                let (count, limit) = certain.entry(call.key).or_insert((0, most));
                *count += 1;
                *limit = most.min(*limit);
            }
            // (Such a hold ends with its lease. The server notices the end of its connection before.)
            let is_read = !self.wires.values().any(|wire| {
                self.calls[wire.call].owner == call.owner
                    && wire.unanswered.iter().any(|(kind, _)| *kind == Kind::Acquire)
            });
            let is_sure = !call.may_be_left() || now > call.over_at.max(call.arrived) + LATEST + call.lease;
            if call.stage == Stage::Finished && is_read && is_sure && !self.has(Fault::OneOwner) {
                let waits = state::with(|state| state.queue.waits(&call.owner.as_bytes().into()));
                if holder.is_some() || waits {
                    return Err(Violation::new(LEFT, format!("at {now}: {call:?}: {seen:?}, waits: {waits}")));
                }
            }
        }
        self.free_locks_are_granted(now)?;
        match certain.iter().find(|(_, (count, limit))| count > limit) {
            Some((key, (count, _))) => Err(Violation::new(TWICE, format!("{count} clients hold {key} at {now}"))),
            None => Ok(()),
        }
    }

    /// A request that got lost is repeated after two seconds, and each mishap can cost one. Without `REPLICAS`.
    fn free_locks_are_granted(&mut self, now: Micros) -> Result<(), Violation> {
        for it in &mut self.calls {
            let waits = it.stage == Stage::Waiting && it.began <= now && now < it.until && !it.replicas;
            let is_free = || node(|node| stored::read(node, 0, it.key.as_bytes())).holders().is_empty();
            if !waits || !is_free() {
                it.free_since = None;
            } else if now > *it.free_since.get_or_insert(now) + self.longest_free {
                return Err(Violation::new(FREE, format!("at {now}: {it:?}")));
            }
        }
        Ok(())
    }

    fn nothing_is_left(&self) -> Result<(), Violation> {
        let waiters = state::with(|state| state.queue.len());
        let keys = node(|node| ["k", "l"].map(|key| stored::read(node, 0, key.as_bytes())));
        if waiters > 0 || keys.iter().any(|seen| !seen.holders().is_empty()) {
            return Err(Violation::new(LEFT, format!("{waiters} requests wait, {keys:?}")));
        }
        Ok(())
    }
}
