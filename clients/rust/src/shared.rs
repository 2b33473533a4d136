//! What all handles, guards and tasks of one client share: a core for each server, and who waits for what.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use holdfast_core::{Core, Id, Input, Millis, Moved, Outcome, Output, Settings, Why};
use redis::{AsyncConnectionConfig, RedisError};
use tokio::sync::oneshot;

use crate::changes::Changes;
use crate::clock;
use crate::health::Health;
use crate::link::Link;
use crate::order::Name;
use crate::place::Place;
use crate::servers::Servers;

/// How much longer than its time a wait is left to a server whose answer is on its way, or to a machine that is busy (ms).
const GRACE: Millis = 1_000;

pub(crate) struct Shared {
    pub(crate) name: Name,
    pub(crate) servers: Servers,
    pub(crate) config: AsyncConnectionConfig,
    pub(crate) health: Arc<Health>,
    state: Mutex<State>,
    /// All that was to be given back is.
    pub(crate) settled: Changes,
    /// The runtime of a driver has ended.
    pub(crate) undriven: Changes,
}

/// All of it changes in one step: what goes from one core to another is never between the two.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) nodes: Vec<Node>,
    /// Who waits for which call.
    pub(crate) calls: HashMap<Id, Call>,
    /// Who has which hold, and at which node.
    pub(crate) holds: HashMap<Id, (usize, Arc<Seen>)>,
    made: Id,
}

/// One server.
pub(crate) struct Node {
    pub(crate) place: Arc<Place>,
    /// Its address, as far as is known.
    pub(crate) server: String,
    pub(crate) core: Core,
    pub(crate) link: Option<Link>,
    /// The pair that is to be opened.
    pub(crate) wanted: Option<u64>,
    pub(crate) wakes_at: Option<Millis>,
    /// What went wrong last.
    pub(crate) failure: Option<RedisError>,
    pub(crate) heard: Instant,
    pub(crate) is_driven: bool,
    /// Of the task that drives it; and whether that looks at all this next anyway.
    driver: Waker,
    is_awake: bool,
}

/// A call that somebody waits for.
pub(crate) struct Call {
    pub(crate) node: usize,
    pub(crate) answer: oneshot::Sender<Ended>,
    /// What an acquisition becomes.
    pub(crate) hold: Option<Arc<Seen>>,
}

/// How a call has ended, where, and what had gone wrong there.
pub(crate) struct Ended {
    pub(crate) outcome: Outcome,
    pub(crate) server: String,
    pub(crate) failure: Option<RedisError>,
}

/// What was told of a hold.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) token: AtomicU64,
    pub(crate) lost: OnceLock<Why>,
    pub(crate) changes: Changes,
}

impl Seen {
    pub(crate) fn lose(&self, why: Why) {
        let _ = self.lost.set(why);
        self.changes.tell();
    }
}

impl Shared {
    pub(crate) fn new(name: Name, servers: Servers, config: AsyncConnectionConfig) -> Self {
        let (settled, undriven) = (Changes::default(), Changes::default());
        Self { name, servers, config, health: Health::new(), state: Mutex::default(), settled, undriven }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // Whoever panicked with it changed it in one step, or not at all.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node of this place.
    pub(crate) fn node(&self, state: &mut State, place: &Arc<Place>) -> usize {
        let known = state.nodes.iter().position(|node| Arc::ptr_eq(&node.place, place));
        known.unwrap_or_else(|| {
            // The standard library's seeds are the system's random numbers.
            let seed = RandomState::new().build_hasher().finish();
            let settings = Settings { grace: GRACE, seed, ..Settings::default() };
            let core = if self.servers.several() { Core::in_cluster(settings) } else { Core::new(settings) };
            state.nodes.push(Node {
                place: place.clone(),
                server: place.name(),
                core,
                link: None,
                wanted: None,
                wakes_at: None,
                failure: None,
                heard: Instant::now(),
                is_driven: false,
                driver: Waker::noop().clone(),
                is_awake: false,
            });
            state.nodes.len() - 1
        })
    }

    /// Tells a core what happens, and does what it says.
    pub(crate) fn step(&self, state: &mut State, node: usize, input: Input) {
        let mut inputs = vec![(node, input)];
        while let Some((at, input)) = inputs.pop() {
            let was_settled = state.nodes[at].core.is_settled();
            state.nodes[at].core.step(clock::now(), input);
            while let Some(output) = state.nodes[at].core.take() {
                match output {
                    Output::Moved { moved, error } => inputs.push(self.redirect(state, at, moved, &error)),
                    output => self.perform(state, at, output),
                }
            }
            if !was_settled && state.nodes[at].core.is_settled() {
                self.settled.tell();
            }
        }
    }

    fn perform(&self, state: &mut State, at: usize, output: Output) {
        let State { nodes, calls, holds, .. } = state;
        let node = &mut nodes[at];
        match output {
            Output::Open { pair } => {
                node.wanted = Some(pair);
                node.wake();
            }
            Output::End { .. } => {
                (node.wanted, node.link) = (None, None);
                self.servers.doubt();
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
                if let Some((_, seen)) = holds.remove(&hold) {
                    seen.lose(why);
                }
            }
            Output::Ended { call, outcome } => {
                let Some(Call { answer, hold, .. }) = calls.remove(&call) else { return };
                if let (Outcome::Granted(token), Some(seen)) = (&outcome, hold) {
                    seen.token.store(*token, Ordering::Relaxed);
                    holds.insert(call, (at, seen));
                }
                // Whoever asked may be gone: then he says so.
                let _ = answer.send(Ended { outcome, server: node.server.clone(), failure: node.failure.clone() });
            }
            Output::Moved { .. } => {}
        }
    }

    /// Who has this now. If nobody knows, it is asked for once more where it was.
    fn redirect(&self, state: &mut State, at: usize, moved: Box<Moved>, error: &str) -> (usize, Input) {
        let place = self.servers.redirected(error, &state.nodes[at].server).or_else(|| self.servers.known(moved.key()));
        let to = place.map_or(at, |place| self.node(state, &place));
        for call in moved.calls() {
            state.calls.entry(call).and_modify(|call| call.node = to);
        }
        state.holds.entry(moved.id).and_modify(|hold| hold.0 = to);
        (to, Input::Take { moved })
    }

    /// Tells the core of a node all that has arrived.
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

    /// Lets go what other nodes of a cluster have by now.
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
    /// The next thing that has arrived.
    fn next(&mut self, context: &mut Context<'_>) -> Option<Input> {
        let link = self.link.as_mut()?;
        let pair = link.pair;
        let Poll::Ready((channel, reply)) = link.poll(context) else { return None };
        match reply {
            Ok(reply) => {
                self.heard = Instant::now();
                Some(Input::Replied { pair, channel, reply })
            }
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
        self.made += 1;
        self.made
    }
}
