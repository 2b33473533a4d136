//! Plays a plan and checks it.
//!
//! | invariant | what violates it |
//! |---|---|
//! | *every loss of a hold in use is reported* | after all faults have ended, a program relies on a hold that the server does not have |
//! | *nothing is left behind* | the server has a hold or a request that no program uses, or a cached lock whose time is over |
//! | *every call ends* | a call ends later than its timeout, or never, also while a client has the lock cached |
//! | *never two certain holders* | at any step, more clients than allowed have a hold that `check` would confirm |
//! | those of [`rules`](simulator::rules) | after every event-loop iteration of the server |

use crate::network::{Micros, Network, Parcel};
use crate::plan::{Act, LONG, Plan};
use crate::program::{Held, Program};
use crate::text::{Text, of_core};
use holdfast_core::{Channel, Input, Limit, Output};
use simulator::config;
use simulator::redis::event_loop::{Arrival, run_iteration, wakes_at};
use simulator::redis::{Bytes, Replica, node, start};
use simulator::resp::Reply;
use simulator::rules::{Checker, Violation};
use simulator::stored;
use std::collections::{BTreeMap, VecDeque};
use std::iter::from_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

const LOST: &str = "every loss of a hold in use is reported";
const LEFT: &str = "nothing is left behind";
const ENDS: &str = "every call ends";
const TWICE: &str = "never two certain holders";
const TOLD: &str = "each call ends once, and each hold is lost once";
const NEVER: &str = "nothing panics";

/// The server's setting in all runs, which are short (ms).
const DEFAULT_LEASE: i64 = 1_000;

/// The time in which everything must work again after the last fault (ms).
const HEALED: u64 = 30_000;

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct RunResult {
    pub steps: u64,
    pub commands: u64,
    /// The steps of each program as text.
    pub scripts: Vec<(String, Vec<String>)>,
    pub violation: Option<Violation>,
}

struct Run {
    programs: Vec<Program>,
    network: Network,
    checker: Checker,
    ran: RunResult,
    /// When each core must be woken, and until when each process is paused.
    wakes: BTreeMap<usize, Micros>,
    paused_until: BTreeMap<usize, Micros>,
    /// For each key: tokens up to this one were force-released by another client. Their holders learn of it later.
    broken: BTreeMap<Bytes, u64>,
    /// Keys that other clients are about to force-release. While the server is paused, these requests wait, too.
    breaking: Vec<Bytes>,
    acts: Vec<(Micros, Act)>,
    births: u64,
    seed: u64,
    keeps: bool,
    /// The requests that arrived at the server, as a script of `simulate --play`.
    server: Vec<String>,
    served: Micros,
    admin: u64,
    admin_asks: Vec<Vec<Bytes>>,
}

/// Plays a plan. `keeps`: the steps are recorded.
pub fn play(plan: &Plan, keeps: bool) -> RunResult {
    start(plan.generation, None);
    config::DEFAULT_LEASE.value.store(DEFAULT_LEASE, Ordering::Relaxed);
    let mut run = Run {
        programs: Vec::new(),
        network: Network::new(plan.seed),
        checker: Checker::new(),
        ran: RunResult::default(),
        wakes: BTreeMap::new(),
        paused_until: BTreeMap::new(),
        broken: BTreeMap::new(),
        breaking: Vec::new(),
        acts: plan.acts.iter().rev().map(|(at, act)| (at * 1000, act.clone())).collect(),
        births: 0,
        seed: plan.seed,
        keeps,
        server: Vec::new(),
        served: 0,
        admin: node(|node| node.connect()),
        admin_asks: Vec::new(),
    };
    for client in 0..plan.clients {
        let program = run.born(client);
        run.programs.push(program);
    }
    let result = catch_unwind(AssertUnwindSafe(|| run.run()));
    run.ran.violation = match result {
        Ok(Ok(())) => None,
        Ok(Err(violation)) => Some(violation),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Some(Violation::new(NEVER, text.unwrap_or("a panic")))
        }
    };
    let programs = run.programs.into_iter().map(|program| (program.by, program.steps));
    run.ran.scripts.extend(programs);
    run.ran.scripts.push(("server".into(), run.server));
    run.ran
}

impl Run {
    fn born(&mut self, client: usize) -> Program {
        self.births += 1;
        Program::new(client, self.births, self.seed.wrapping_mul(31).wrapping_add(self.births))
    }

    fn run(&mut self) -> Result<(), Violation> {
        node(|node| {
            let confirmed = node.stream.offset();
            node.replicas = vec![Replica { confirmed, delay: Some(5), is_good: true, confirms_at: VecDeque::new() }];
        });
        let last = self.acts.first().map_or(0, |(at, _)| *at);
        self.run_until(last + 1_000)?;
        self.heal();
        self.settle(|run| run.states_agree())?;
        // Now every program releases its holds, and every waiter is granted its lock.
        let begin = node(|node| node.clock.mono);
        while self.programs.iter().any(|it| !it.holds.is_empty() || !it.calls.is_empty()) {
            let now = node(|node| node.clock.mono);
            if now > begin + HEALED * 1000 {
                let open: Vec<_> = self.programs.iter().map(|it| (&it.by, &it.calls)).collect();
                return Err(Violation::new(ENDS, format!("{open:?}")));
            }
            for client in 0..self.programs.len() {
                let holds: Vec<u64> = self.programs[client].holds.keys().copied().collect();
                for hold in holds {
                    let program = &mut self.programs[client];
                    // A wait for a cached lock must not last until its caching time is over.
                    let input = match program.holds.get(&hold) {
                        Some(held) if held.terms.kept => program.keeps(hold, LONG, now / 1000),
                        _ => program.release(hold, 5_000, now / 1000),
                    };
                    self.step(client, now, input)?;
                }
            }
            self.run_until(now + 20_000)?;
        }
        let now = node(|node| node.clock.mono);
        for client in 0..self.programs.len() {
            for call in std::mem::take(&mut self.programs[client].idle).into_keys() {
                self.step(client, now, Input::Drop { call })?;
            }
        }
        self.settle(|run| run.is_empty())
    }

    /// Continues until the condition holds; it must hold within a time limit.
    fn settle(&mut self, is_so: impl Fn(&Self) -> Result<(), Violation>) -> Result<(), Violation> {
        let begin = node(|node| node.clock.mono);
        loop {
            let now = node(|node| node.clock.mono);
            self.run_until(now + 200_000)?;
            match is_so(self) {
                Ok(()) => return Ok(()),
                Err(violation) if now > begin + HEALED * 1000 => return Err(violation),
                Err(_) => {}
            }
        }
    }

    fn asks(&mut self, request: &str) {
        self.admin_asks.push(request.split(' ').map(|word| word.as_bytes().to_vec()).collect());
    }

    fn heal(&mut self) {
        self.network.heal();
        node(|node| {
            node.misconf = false;
            node.paused_until = 0;
            node.replicas.iter_mut().for_each(|replica| replica.delay = Some(5));
        });
    }

    /// Plays all events until `end`.
    fn run_until(&mut self, end: Micros) -> Result<(), Violation> {
        loop {
            let now = node(|node| node.clock.mono);
            let resumed =
                |(client, at): (&usize, &Micros)| (*at).max(self.paused_until.get(client).copied().unwrap_or(0));
            let server = if self.admin_asks.is_empty() { wakes_at() } else { now };
            let wake = self.wakes.iter().map(|it| (resumed(it), *it.0)).min();
            let parcel = self.network.parcels.first_key_value().map(|(key, _)| *key);
            let act = self.acts.last().map(|(at, _)| *at);
            let client_next = [act, parcel.map(|(at, _)| at), wake.map(|(at, _)| at)].into_iter().flatten().min();
            let next = client_next.unwrap_or(server).min(server);
            if next > end && now >= end {
                return Ok(());
            }
            if next > end {
                node(|node| node.clock.advance(end - now));
                return Ok(());
            }
            node(|node| node.clock.advance(next.saturating_sub(now)));
            // What has arrived is read before time is checked.
            if act == Some(next) {
                let Some((_, act)) = self.acts.pop() else { continue };
                self.act(next, act)?;
            } else if parcel.is_some_and(|(at, _)| at == next) {
                self.arrives(next)?;
            } else if let Some((_, client)) = wake.filter(|(at, _)| *at == next) {
                self.wakes.remove(&client);
                self.step(client, next, Input::Wake)?;
            } else {
                self.iteration(Vec::new())?;
            }
        }
    }

    /// A shorter pause within a longer one changes nothing: what has arrived stays in order.
    fn pause(&mut self, client: usize, end: Micros) {
        let until = self.paused_until.entry(client).or_default();
        *until = end.max(*until);
    }

    /// Delivers everything that arrives at this time, up to the first arrival at a client.
    fn arrives(&mut self, now: Micros) -> Result<(), Violation> {
        let mut arrivals: Vec<Arrival> = Vec::new();
        while let Some(entry) = self.network.parcels.first_entry().filter(|entry| entry.key().0 <= now) {
            let of_server = matches!(entry.get(), Parcel::Request(..) | Parcel::End(_));
            if !of_server && !arrivals.is_empty() {
                break;
            }
            let ((_, number), parcel) = entry.remove_entry();
            match parcel {
                Parcel::Request(id, words) => {
                    if node(|node| !node.clients.contains_key(&id)) {
                        continue;
                    }
                    self.checker.request_sent(id, &words);
                    self.ran.commands += 1;
                    match arrivals.last_mut() {
                        Some(Arrival::Requests(last, requests)) if *last == id => requests.push(words),
                        _ => arrivals.push(Arrival::Requests(id, vec![words])),
                    }
                }
                Parcel::End(id) => {
                    self.checker.client_vanished(id);
                    if let Some(wire) = self.network.wires.get_mut(&id) {
                        wire.is_notified = true;
                    }
                    arrivals.push(Arrival::End(id));
                }
                parcel => return self.delivered(now, number, parcel),
            }
        }
        self.iteration(arrivals)
    }

    fn delivered(&mut self, now: Micros, number: u64, parcel: Parcel) -> Result<(), Violation> {
        let of = |id: &u64| self.network.wires.get(id).filter(|wire| !wire.is_closed).cloned();
        let (client, input) = match &parcel {
            Parcel::Opened(client, pair, true) => (*client, Input::Opened { pair: *pair }),
            Parcel::Opened(client, pair, false) => (*client, Input::Ended { pair: *pair }),
            Parcel::Reply(id, reply) => match of(id) {
                Some(it) => (it.client, Input::Replied { pair: it.pair, channel: it.channel, reply: of_core(reply) }),
                None => return Ok(()),
            },
            Parcel::Ended(id) => match of(id) {
                Some(it) => (it.client, Input::Ended { pair: it.pair }),
                None => return Ok(()),
            },
            Parcel::Request(..) | Parcel::End(_) => return Ok(()),
        };
        if let Some(until) = self.paused_until.get(&client).copied().filter(|until| *until > now) {
            // With its number: what was sent earlier is read earlier.
            self.network.parcels.insert((until, number), parcel);
            return Ok(());
        }
        if let Input::Opened { pair } = input {
            self.network.connect(client, pair);
        }
        self.step(client, now, input)
    }

    /// An event-loop iteration of the server, and the replies that it sends.
    fn iteration(&mut self, mut arrivals: Vec<Arrival>) -> Result<(), Violation> {
        let requests = std::mem::take(&mut self.admin_asks);
        if !requests.is_empty() {
            requests.iter().for_each(|words| self.checker.request_sent(self.admin, words));
            arrivals.push(Arrival::Requests(self.admin, requests));
        }
        if self.keeps {
            self.write_down(&arrivals);
        }
        self.checker.before_iteration()?;
        let before = node(|node| node.clock.mono);
        run_iteration(arrivals);
        let now = node(|node| node.clock.mono);
        // There is one clock: while the server is busy, nothing else happens, so programs were paused as well.
        if now > before {
            (0..self.programs.len()).for_each(|client| self.pause(client, now));
        }
        let ids: Vec<u64> = self.network.wires.keys().copied().chain([self.admin]).collect();
        for id in ids {
            let sent = node(|node| match node.clients.get_mut(&id) {
                Some(client) => Some(std::mem::take(&mut client.sent)),
                None => node.final_output.remove(&id),
            });
            let is_gone = node(|node| !node.clients.contains_key(&id));
            let bytes = sent.unwrap_or_default();
            if id == self.admin {
                let mut bytes = bytes;
                while let Some(reply) = Reply::take(&mut bytes) {
                    self.checker.bytes_sent(&reply);
                    self.checker.reply_received(id, &reply)?;
                }
                continue;
            }
            let Some(wire) = self.network.wires.get_mut(&id) else { continue };
            wire.unread.extend_from_slice(&bytes);
            let has_ended = wire.is_notified;
            for reply in from_fn(|| Reply::take(&mut wire.unread)).collect::<Vec<_>>() {
                self.checker.bytes_sent(&reply);
                if !has_ended {
                    self.checker.reply_received(id, &reply)?;
                    self.network.to_client(id, Parcel::Reply(id, reply), now);
                }
            }
            if is_gone {
                if !has_ended {
                    self.network.to_client(id, Parcel::Ended(id), now);
                }
                if let Some(wire) = self.network.wires.get_mut(&id) {
                    wire.is_notified = true;
                }
                if self.network.wires.get(&id).is_some_and(|wire| wire.is_closed) {
                    self.network.wires.remove(&id);
                }
            }
        }
        // Grants before the reply to another client's force-release may be gone without their holders knowing.
        if self.checker.is_idle(self.admin) {
            let until = node(|node| node.clock.wall);
            self.broken.extend(std::mem::take(&mut self.breaking).into_iter().map(|key| (key, until)));
        }
        self.checker.after_iteration()
    }

    /// Records what arrives, as far as a script can express it: whole milliseconds, and letters for connections.
    fn write_down(&mut self, arrivals: &[Arrival]) {
        let now = node(|node| node.clock.mono);
        if arrivals.is_empty() {
            return;
        }
        if now / 1000 > self.served / 1000 {
            self.server.push(format!("+{}", now / 1000 - self.served / 1000));
            self.served = now;
        }
        let name = |id: u64| char::from_u32(u32::from('a') + id as u32).unwrap_or('?');
        for arrival in arrivals {
            match arrival {
                Arrival::Requests(id, requests) => {
                    for words in requests {
                        let word = |word: &Bytes| {
                            let text = word.escape_ascii().to_string();
                            match text.rsplit_once(':').filter(|(run, _)| run.len() == 36) {
                                Some((_, id)) => format!("${}", id.parse().map_or('?', name)),
                                None => text,
                            }
                        };
                        let words: Vec<String> = words.iter().map(word).collect();
                        self.server.push(format!("{} {}", name(*id), words.join(" ")));
                    }
                }
                Arrival::End(id) => self.server.push(format!("{} !end", name(*id))),
                // No slot moves away from this server.
                Arrival::SlotTaken(_) => {}
            }
        }
    }

    fn act(&mut self, now: Micros, act: Act) -> Result<(), Violation> {
        match &act {
            Act::Acquire { client, .. }
            | Act::Release { client, .. }
            | Act::Renew { client, .. }
            | Act::Check { client, .. }
            | Act::Ask { client }
            | Act::Close { client }
            | Act::Drop { client, .. } => {
                let client = *client;
                if self.paused_until.get(&client).is_some_and(|until| *until > now) {
                    return Ok(());
                }
                if let Some(input) = self.programs[client].acts(&act, now / 1000) {
                    self.step(client, now, input)?;
                }
            }
            Act::Kill { client } => {
                let pairs: Vec<u64> =
                    self.network.wires.values().filter(|it| it.client == *client).map(|it| it.pair).collect();
                pairs.into_iter().for_each(|pair| self.network.close(*client, pair, now));
                self.network.parcels.retain(|_, it| !matches!(it, Parcel::Opened(of, ..) if of == client));
                self.wakes.remove(client);
                let next = self.born(*client);
                let before = std::mem::replace(&mut self.programs[*client], next);
                self.ran.scripts.push((before.by, before.steps));
            }
            Act::Cut { client, channel } => {
                if let Some(id) = self.network.newest(*client, *channel) {
                    self.network.cut(id, now);
                }
            }
            Act::Partition { client, ms } => {
                self.network.held_up.insert(*client, now + ms * 1000);
            }
            Act::Swallow { client, channel } => {
                if let Some(id) = self.network.newest(*client, *channel) {
                    self.network.swallow(id);
                }
            }
            Act::Unreachable { client, ms, silent } => {
                self.network.unreachable.insert(*client, (now + ms * 1000, *silent));
            }
            Act::PauseProcess { client, ms } => {
                self.pause(*client, now + ms * 1000);
            }
            Act::Stall { ms } => self.asks(&format!("DEBUG SLEEP {}", *ms as f64 / 1000.0)),
            Act::Misconf { .. } => node(|node| node.misconf = !node.misconf),
            Act::Pause { ms } => self.asks(&format!("CLIENT PAUSE {ms} WRITE")),
            Act::Unconfirmed { .. } => node(|node| {
                let replica = node.replicas.iter_mut();
                replica.for_each(|it| it.delay = if it.delay.is_some() { None } else { Some(5) });
            }),
            Act::Force { key } | Act::Delete { key } | Act::Overwrite { key } => {
                self.asks(&match act {
                    Act::Force { .. } => format!("LOCK.FORCE {key}"),
                    Act::Overwrite { .. } => format!("SET {key} x"),
                    _ => format!("DEL {key}"),
                });
                self.breaking.push(key.as_bytes().to_vec());
                // Runs immediately, unless the server is paused.
                self.iteration(Vec::new())?;
            }
        }
        Ok(())
    }

    /// A step of a core, and its outputs.
    fn step(&mut self, client: usize, now: Micros, input: Input) -> Result<(), Violation> {
        self.ran.steps += 1;
        let ms = now / 1000;
        let closes = matches!(input, Input::Close { .. });
        let program = &mut self.programs[client];
        if self.keeps {
            program.steps.push(format!("{ms} {}", Text(&input)));
        }
        program.core.step(ms, input);
        while let Some(output) = self.programs[client].core.take() {
            let program = &mut self.programs[client];
            if self.keeps {
                program.steps.push(format!("> {}", Text(&output)));
            }
            match output {
                Output::Open { pair } => self.network.open(client, pair, now),
                Output::End { pair } => self.network.close(client, pair, now),
                Output::Send { pair, channel, words } => {
                    if let Some(id) = self.network.wire(client, pair, channel) {
                        self.network.to_server(id, Parcel::Request(id, words), now);
                    }
                }
                Output::Ended { call, outcome } => {
                    let bound = program.calls.get(&call).and_then(|open| open.bound);
                    let resumed = self.paused_until.get(&client).map_or(0, |until| until / 1000 + 1);
                    if let Some(bound) = bound.filter(|bound| ms > (*bound).max(resumed) + 1) {
                        let what = format!("{}{call} ended at {ms}, and not by {bound}: {outcome:?}", program.by);
                        return Err(Violation::new(ENDS, what));
                    }
                    program.ended(call, &outcome);
                }
                Output::Lost { hold, why } => program.lost(hold, why),
                Output::Moved { .. } => program.wrong = Some("there is no other server".into()),
                Output::Wake { at } => drop(self.wakes.insert(client, at.saturating_mul(1000).max(now))),
            }
        }
        let program = &mut self.programs[client];
        if let Some(wrong) = program.wrong.take() {
            return Err(Violation::new(TOLD, format!("{}: {wrong}", program.by)));
        }
        if let Some(then) = program.then.take() {
            return self.step(client, now, then);
        }
        if closes {
            // The program exists until its call has ended; until then, it gets no other events.
            self.acts.retain(|(_, act)| !of_program(act, client));
        }
        self.certain_holders(ms)
    }

    /// No more clients are certain of a hold than its limit allows.
    fn certain_holders(&self, now: u64) -> Result<(), Violation> {
        let mut by_key: BTreeMap<&[u8], Vec<(String, u32, u64)>> = BTreeMap::new();
        for (client, program) in self.programs.iter().enumerate() {
            // An ephemeral hold ends when the server notices that the session is closed, possibly before its client
            // does.
            let session = self.network.newest(client, Channel::Session);
            let stands = session.is_some_and(|id| self.network.wires.get(&id).is_some_and(|wire| !wire.is_notified));
            let is_sure = |held: &Held| stands || !held.terms.ephemeral;
            // A cached lock may be used at any moment.
            let cached = program.idle.iter().map(|(hold, (held, _))| (hold, held));
            for (hold, held) in program.holds.iter().chain(cached).filter(|(_, held)| is_sure(held)) {
                let limit = match held.terms.limit {
                    Limit::One => 1,
                    Limit::Of(limit) => limit,
                    Limit::Shared => u32::MAX,
                };
                for key in &held.keys {
                    let is_broken = self.broken.get(key).is_some_and(|until| held.token <= *until);
                    if !is_broken && program.core.is_held(*hold, now) {
                        let owner = format!("{}{hold}", program.by);
                        by_key.entry(key).or_default().push((owner, limit, held.token));
                    }
                }
            }
        }
        let too_many = |all: &[(String, u32, u64)]| all.iter().any(|(_, limit, _)| all.len() > *limit as usize);
        match by_key.iter().find(|(_, all)| too_many(all)) {
            Some((key, all)) => {
                let what = format!("{} at {now} ms: {all:?}", key.escape_ascii());
                Err(Violation::new(TWICE, what))
            }
            None => Ok(()),
        }
    }

    /// The owners of all locks at the server.
    fn holders(&self) -> Vec<(Bytes, Bytes)> {
        node(|node| {
            let keys: Vec<Bytes> = node.dbs[0].keys().cloned().collect();
            let of = |key: Bytes| {
                let seen = stored::read(node, 0, &key);
                let owners: Vec<Bytes> = seen.holders().iter().map(|holder| holder.owner.clone()).collect();
                owners.into_iter().map(move |owner| (key.clone(), owner))
            };
            keys.into_iter().flat_map(of).collect()
        })
    }

    /// Programs and server agree.
    fn states_agree(&self) -> Result<(), Violation> {
        let now = node(|node| node.clock.mono) / 1000;
        let holders = self.holders();
        let text = |bytes: &[u8]| bytes.escape_ascii().to_string();
        let mut wanted = Vec::new();
        for program in &self.programs {
            let cached = program.idle.iter().map(|(hold, (held, _))| (hold, held));
            for (hold, held) in program.holds.iter().chain(cached) {
                let owner = program.owner(*hold);
                for key in &held.keys {
                    if program.core.is_held(*hold, now) && !holders.contains(&(key.clone(), owner.clone())) {
                        return Err(Violation::new(LOST, format!("{} of {}", text(key), text(&owner))));
                    }
                }
                if program.holds.contains_key(hold) && !program.core.is_held(*hold, now) {
                    return Err(Violation::new(LOST, format!("the outcome of {} is unknown", text(&owner))));
                }
            }
            let asked = program.calls.iter().filter(|(_, open)| open.asked.is_some()).map(|(call, _)| *call);
            let cached = program.idle.iter().filter(|(_, (_, until))| *until > now).map(|(hold, _)| *hold);
            let all = program.holds.keys().copied().chain(asked).chain(cached);
            wanted.extend(all.map(|call| program.owner(call)));
        }
        match holders.iter().find(|(_, owner)| !wanted.contains(owner)) {
            Some((key, owner)) => Err(Violation::new(LEFT, format!("{} is held by {}", text(key), text(owner)))),
            None => Ok(()),
        }
    }

    /// The server has no locks and no waiters.
    fn is_empty(&self) -> Result<(), Violation> {
        let holders = self.holders();
        let (waiters, bindings) = simulator::state::with(|state| (state.queue.len(), state.bindings.len()));
        if holders.is_empty() && waiters == 0 && bindings == 0 {
            return Ok(());
        }
        let holders: Vec<String> =
            holders.iter().map(|(key, owner)| format!("{} by {}", key.escape_ascii(), owner.escape_ascii())).collect();
        Err(Violation::new(LEFT, format!("{waiters} wait, {bindings} bindings, holds {holders:?}")))
    }
}

/// Whether an event belongs to a program.
fn of_program(act: &Act, client: usize) -> bool {
    match act {
        Act::Acquire { client: it, .. }
        | Act::Release { client: it, .. }
        | Act::Renew { client: it, .. }
        | Act::Check { client: it, .. }
        | Act::Ask { client: it }
        | Act::Close { client: it }
        | Act::Drop { client: it, .. } => *it == client,
        _ => false,
    }
}
