//! What all handles, guards and tasks of one client share: a core for each server, and the callers of each call.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use holdfast_core::{Core, Id, Input, Millis, Moved, Outcome, Output, Settings};
use redis::{AsyncConnectionConfig, RedisError};
use tokio::runtime;
use tokio::sync::{broadcast, oneshot};

use crate::changes::Changes;
use crate::clock;
use crate::events::{self, Event, Span};
use crate::health::Health;
use crate::line::{CachedHold, Head, Lines, Next, QueueKey};
use crate::link::Link;
use crate::names::Keys;
use crate::order::Name;
use crate::place::Place;
use crate::seen::HoldStatus;
use crate::servers::Servers;

/// How much later than its deadline a wait ends here, for a reply that is on its way or a busy machine (ms).
const GRACE: Millis = 250;

pub(crate) struct Shared {
    pub(crate) name: Name,
    pub(crate) servers: Servers,
    pub(crate) config: AsyncConnectionConfig,
    pub(crate) health: Arc<Health>,
    state: Mutex<State>,
    /// Notified when all releases are done.
    pub(crate) settled: Changes,
    pub(crate) events: broadcast::Sender<Event>,
}

/// One mutex protects all of it, so that a claim that moves from one core to another is never between the two.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) nodes: Vec<Node>,
    /// The callers of each call.
    pub(crate) calls: HashMap<Id, Call>,
    pub(crate) holds: Holds,
    /// The local queues of cached locks.
    pub(crate) lines: Lines,
    /// Whether the program has closed the client: the cores of further servers are closed, too.
    pub(crate) is_closed: bool,
    last_number: Id,
}

/// All holds of this process, cached ones included.
pub(crate) type Holds = HashMap<Id, Holding>;

/// A hold, and its node.
pub(crate) struct Holding {
    pub(crate) node: usize,
    pub(crate) record: HoldRecord,
    _span: Span,
}

/// What an acquisition becomes.
pub(crate) struct HoldRecord {
    pub(crate) keys: Keys,
    /// When it was requested.
    pub(crate) asked: Instant,
    /// The state of the hold, as the server reported it.
    pub(crate) status: Arc<HoldStatus>,
    /// The local queue that it was requested in.
    pub(crate) line: Option<Arc<QueueKey>>,
}

/// One server.
pub(crate) struct Node {
    pub(crate) place: Arc<Place>,
    /// Its address, as far as is known.
    pub(crate) server: String,
    pub(crate) core: Core,
    pub(crate) link: Option<Link>,
    /// The pair of connections to be opened.
    pub(crate) wanted: Option<u64>,
    pub(crate) wakes_at: Option<Millis>,
    /// The last error.
    pub(crate) failure: Option<RedisError>,
    /// The runtime of its driver.
    pub(crate) driven_in: Option<runtime::Id>,
    /// The waker of the task that drives it, and whether that task is reading now, so that it need not be woken.
    driver: Waker,
    is_awake: bool,
}

/// A call with a caller that waits.
pub(crate) struct Call {
    pub(crate) node: usize,
    pub(crate) answer: oneshot::Sender<CallResult>,
    pub(crate) hold: Option<HoldRecord>,
}

/// The outcome of a call, the server, and the last error of its connection.
pub(crate) struct CallResult {
    pub(crate) outcome: Outcome,
    pub(crate) server: String,
    pub(crate) failure: Option<RedisError>,
}

impl Shared {
    pub(crate) fn new(name: Name, servers: Servers, config: AsyncConnectionConfig) -> Self {
        let (state, settled) = (Mutex::default(), Changes::default());
        Self { name, servers, config, health: Health::new(), state, settled, events: events::sender() }
    }

    /// Whether the program has closed the client. Its calls fail from then on, and no retry helps.
    pub(crate) fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // A panic leaves the state before or after a whole change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node of this place.
    pub(crate) fn node(&self, state: &mut State, place: &Arc<Place>) -> usize {
        let known = state.nodes.iter().position(|node| Arc::ptr_eq(&node.place, place));
        known.unwrap_or_else(|| {
            // The standard library's seeds are the system's random numbers.
            let seed = RandomState::new().build_hasher().finish();
            let settings = Settings { grace: GRACE, seed, ..Settings::default() };
            let core = if self.servers.is_cluster() { Core::in_cluster(settings) } else { Core::new(settings) };
            state.nodes.push(Node {
                place: place.clone(),
                server: place.name(),
                core,
                link: None,
                wanted: None,
                wakes_at: None,
                failure: None,
                driven_in: None,
                driver: Waker::noop().clone(),
                is_awake: false,
            });
            let at = state.nodes.len() - 1;
            if state.is_closed {
                let call = state.number();
                self.step(state, at, Input::Close { call, within: 0 });
            }
            at
        })
    }

    /// Gives an input to a core, and carries out its outputs. Returns the outcome of a call without a registered
    /// caller, such as `Input::Use`, if the core answers it in this step.
    pub(crate) fn step(&self, state: &mut State, node: usize, input: Input) -> Option<Outcome> {
        let mut answer = None;
        let mut inputs = vec![(node, input)];
        while let Some((at, input)) = inputs.pop() {
            let was_settled = state.nodes[at].core.is_settled();
            state.nodes[at].core.step(clock::now(), input);
            while let Some(output) = state.nodes[at].core.take() {
                match output {
                    Output::Moved { moved, error } => inputs.push(self.redirect(state, at, moved, &error)),
                    output => answer = self.perform(state, at, output).or(answer),
                }
            }
            if !was_settled && state.nodes[at].core.is_settled() {
                self.settled.notify();
            }
        }
        answer
    }

    fn perform(&self, state: &mut State, at: usize, output: Output) -> Option<Outcome> {
        let node = &mut state.nodes[at];
        match output {
            Output::Open { pair } => {
                node.wanted = Some(pair);
                node.wake();
            }
            Output::End { .. } => {
                (node.wanted, node.link) = (None, None);
                self.servers.invalidate();
            }
            Output::Send { channel, words, .. } => {
                if let Some(link) = &mut node.link {
                    link.send(channel, &words, &node.driver);
                }
            }
            Output::Wake { at } => {
                // A timer that fires too early does no harm.
                let is_earlier = node.wakes_at.is_none_or(|before| at < before);
                node.wakes_at = Some(at);
                if is_earlier {
                    node.wake();
                }
            }
            Output::Lost { hold, why } => {
                let lost = state.holds.remove(&hold)?;
                lost.record.status.lose(why);
                if let Some(line) = lost.record.line.clone() {
                    match state.lines.head(&line) {
                        Some(Head::Idle(kept)) if kept.id == hold => state.lines.end(&line),
                        // The user of the hold is notified. The tasks behind it do not wait until it reacts.
                        _ => self.leave_queue(state, &line, hold),
                    }
                }
            }
            Output::Ended { call, outcome } => {
                let Some(Call { answer, hold, .. }) = state.calls.remove(&call) else { return Some(outcome) };
                // The send fails if the caller is gone: then the call is dropped.
                let (server, failure) = (node.server.clone(), node.failure.clone());
                if let Some(record) = hold {
                    self.acquired(state, (at, call), record, &outcome);
                }
                let _ = answer.send(CallResult { outcome, server, failure });
            }
            Output::Moved { .. } => {}
        }
        None
    }

    /// Records the outcome of an acquisition.
    fn acquired(&self, state: &mut State, (node, call): (usize, Id), record: HoldRecord, outcome: &Outcome) {
        if let Outcome::Granted(token) = outcome {
            record.status.token.store(*token, Ordering::Relaxed);
            let span = Span::begin(&self.events, (record.keys.clone(), record.asked), record.status.clone());
            state.holds.insert(call, Holding { node, record, _span: span });
        } else if let Some(line) = &record.line {
            self.leave_queue(state, line, call);
        }
    }

    /// Puts a task at the head of a queue: it uses the cached hold, if it may, or requests one.
    pub(crate) fn begin_use(
        &self,
        state: &mut State,
        line: &Arc<QueueKey>,
        kept: Option<CachedHold>,
        most: u32,
    ) -> Next {
        if let Some(kept) = kept.filter(|kept| self.may_use(state, kept.id, most)) {
            state.lines.set_head(line, Head::Busy(kept.id));
            return Next { id: kept.id, kept: Some(kept) };
        }
        let State { nodes, holds, lines, .. } = state;
        let is_kept = |id| holds.get(&id).is_some_and(|it| nodes[it.node].core.held_until(id).is_some());
        lines.sweep(is_kept).iter().for_each(|id| drop(holds.remove(id)));
        let id = state.number();
        state.lines.set_head(line, Head::Busy(id));
        Next { id, kept: None }
    }

    /// Whether a task may use this hold now. If not, it is released.
    fn may_use(&self, state: &mut State, hold: Id, most: u32) -> bool {
        let Some(node) = state.holds.get(&hold).map(|it| it.node) else { return false };
        let call = state.number();
        let is_held = self.step(state, node, Input::Use { call, hold, most }) == Some(Outcome::Held);
        if !is_held {
            state.holds.remove(&hold);
        }
        is_held
    }

    /// Ends the use of a hold by the task at the head. The hold goes to the next task, or stays cached.
    pub(crate) fn finish_use(&self, state: &mut State, line: &Arc<QueueKey>, kept: Option<CachedHold>, idle: Millis) {
        if let Some(first) = state.lines.first(line) {
            let next = self.begin_use(state, line, kept, first.most);
            // This does not fail: a waiting task leaves the queue before it is dropped.
            let _ = first.reached.send(next);
        } else if let Some(kept) = kept.filter(|kept| self.keep_cached(state, kept.id, idle)) {
            state.lines.set_head(line, Head::Idle(kept));
        } else {
            state.lines.end(line);
        }
    }

    /// Caches an unused hold. Returns false if it was released instead.
    fn keep_cached(&self, state: &mut State, hold: Id, idle: Millis) -> bool {
        let Some(node) = state.holds.get(&hold).map(|it| it.node) else { return false };
        self.step(state, node, Input::Keep { hold, idle });
        let is_kept = state.nodes[node].core.held_until(hold).is_some();
        if !is_kept {
            state.holds.remove(&hold);
        }
        is_kept
    }

    /// Removes the task with this number from the head, without a hold. Does nothing if another task is there.
    pub(crate) fn leave_queue(&self, state: &mut State, line: &Arc<QueueKey>, id: Id) {
        if state.lines.is_at_head(line, id) {
            self.finish_use(state, line, None, 0);
        }
    }

    /// The node that a moved call or hold goes to: the one that serves its key now, or, if unknown, the same one again.
    fn redirect(&self, state: &mut State, at: usize, moved: Box<Moved>, error: &str) -> (usize, Input) {
        let place = self.servers.redirected(error, &state.nodes[at].server).or_else(|| self.servers.known(moved.key()));
        let to = place.map_or(at, |place| self.node(state, &place));
        for call in moved.calls() {
            state.calls.entry(call).and_modify(|call| call.node = to);
        }
        state.holds.entry(moved.id).and_modify(|hold| hold.node = to);
        (to, Input::Take { moved })
    }

    /// Gives a node's core all replies that have arrived.
    pub(crate) fn read(&self, state: &mut State, at: usize, context: &mut Context<'_>) {
        if !state.nodes[at].driver.will_wake(context.waker()) {
            state.nodes[at].driver = context.waker().clone();
        }
        state.nodes[at].is_awake = true;
        while let Some(input) = state.nodes[at].next(context) {
            self.step(state, at, input);
        }
        state.nodes[at].is_awake = false;
    }

    /// Hands over the calls and holds whose keys other nodes of a cluster serve now.
    pub(crate) fn reroute(&self, state: &mut State, at: usize) {
        let place = state.nodes[at].place.clone();
        let is_elsewhere = |key: &[u8]| self.servers.known(key).is_some_and(|known| !Arc::ptr_eq(&known, &place));
        let elsewhere: Vec<Id> =
            state.nodes[at].core.keys().filter(|(_, key)| is_elsewhere(key)).map(|(id, _)| id).collect();
        for id in elsewhere {
            self.step(state, at, Input::Leave { id });
        }
    }
}

impl Node {
    /// The next reply that has arrived, or the end of the connection.
    fn next(&mut self, context: &mut Context<'_>) -> Option<Input> {
        let link = self.link.as_mut()?;
        let pair = link.pair;
        let Poll::Ready((channel, reply)) = link.poll(context) else { return None };
        match reply {
            Ok(reply) => Some(Input::Replied { pair, channel, reply }),
            Err(error) => {
                self.failure = Some(error);
                Some(Input::Ended { pair })
            }
        }
    }

    fn wake(&self) {
        if !self.is_awake {
            self.driver.wake_by_ref();
        }
    }
}

impl State {
    /// A number that no other call of this client has.
    pub(crate) fn number(&mut self) -> Id {
        self.last_number += 1;
        self.last_number
    }
}
