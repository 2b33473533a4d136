//! A client: the program's requests to the servers, and their outcomes.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use holdfast_core::{Bytes, Id, Input, LossReason, Millis, Outcome, Reply, Terms, Wait};
use redis::AsyncConnectionConfig;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::clock;
use crate::driver;
use crate::error::{Error, refused_in_words};
use crate::line::QueueKey;
use crate::names::{Keys, Owner};
use crate::order::Name;
use crate::place::{Failure, closed, late};
use crate::servers::Servers;
use crate::shared::{Call, CallResult, HoldRecord, Holds, Shared};
use crate::terms::Deadline;

/// How long a server may be silent, and the time limit of a call that names none (ms).
pub(crate) const PATIENT: Millis = 10_000;
/// How many redirections a request follows.
const HOPS: u32 = 8;
/// The pause before a cluster is asked again which node serves a key.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Pauses between attempts to reach a server that does not answer: from the first to the longest, doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What all handles share. When the last handle is dropped, all holds are released and the connections close. If they
/// are in this crate's runtime, the drop waits for the releases: the program may end.
pub(crate) struct Client {
    shared: Arc<Shared>,
}

/// A request for a lock.
pub(crate) struct LockRequest {
    /// The number of the acquisition, if it has one already.
    pub(crate) number: Option<Id>,
    /// The prefix of the owner; the number follows.
    pub(crate) by: Bytes,
    pub(crate) keys: Keys,
    pub(crate) terms: Terms,
    pub(crate) wait: Wait,
    /// The local queue of a cached lock.
    pub(crate) line: Option<Arc<QueueKey>>,
}

/// An acquisition that has been requested.
pub(crate) struct Acquisition {
    pub(crate) id: Id,
    pub(crate) owner: Owner,
    pub(crate) answer: Answer,
}

/// The future outcome of a call. Dropping it abandons the call.
pub(crate) struct Answer {
    shared: Arc<Shared>,
    call: Id,
    ended: oneshot::Receiver<CallResult>,
    is_here: bool,
}

impl Client {
    pub(crate) fn new(name: Name, servers: Servers, config: AsyncConnectionConfig) -> Arc<Self> {
        Arc::new(Self { shared: Arc::new(Shared::new(name, servers, config)) })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Requests a lock from the server of its key.
    pub(crate) async fn acquire(&self, request: LockRequest, record: HoldRecord) -> Result<Acquisition, Error> {
        let LockRequest { number, by, keys, terms, wait, .. } = request;
        let deadline = Deadline::of(wait, Instant::now());
        let node = self.node_in_time(&keys, deadline).await?;
        let wait = deadline.left(Instant::now());
        let (id, answer) = self.begin(
            number,
            Some(record),
            |_| node,
            |call| {
                let keys = keys.iter().map(<[u8]>::to_vec).collect();
                Input::Acquire { call, by: by.clone(), keys, terms, wait }
            },
        );
        let owner = Owner::from([by, id.to_string().into_bytes()].concat());
        Ok(Acquisition { id, owner, answer })
    }

    /// Sends a request about a hold to its server.
    pub(crate) fn ask(&self, hold: Id, input: impl FnOnce(Id) -> Input) -> Answer {
        let node = |holds: &Holds| holds.get(&hold).map_or(0, |it| it.node);
        self.begin(None, None, node, input).1
    }

    /// Sends any other request to the server of this key, and follows redirections.
    pub(crate) async fn request(&self, keys: &Keys, words: &[Bytes], within: Millis) -> Result<Reply, Error> {
        let (mut elsewhere, mut asking) = (None, None);
        for _ in 0..HOPS {
            let node = match elsewhere.take() {
                Some(node) => node,
                None => self.node_of(keys, Some(within)).await?,
            };
            let request = |call| Input::Request { call, words: asking.iter().chain(words).cloned().collect(), within };
            let mut answer = self.begin(None, None, |_| node, request).1;
            let ended = answer.outcome().await;
            let Outcome::Answer(reply) = ended.outcome else { return Err(failed(keys, None, ended)) };
            let Reply::Error(error) = reply else { return Ok(reply) };
            let mut state = self.shared.state();
            let Some(place) = self.shared.servers.redirected(&error, &ended.server) else {
                return Err(refused_in_words(&ended.server, keys, error));
            };
            let other = self.shared.node(&mut state, &place);
            drop(state);
            // The core sends it right before the request.
            asking = error.starts_with("ASK").then(|| b"ASKING".to_vec());
            elsewhere = Some(other);
        }
        Err(Error::Connection { server: String::new(), keys: keys.clone(), source: late() })
    }

    /// Whether the server of this key answers within this time. A reply that has arrived by then counts, even if it is
    /// still unread. An error counts as well, such as a missing right.
    pub(crate) async fn answers(&self, keys: &Keys, within: Duration) -> bool {
        let reply = self.request(keys, &[b"LOCK.VERSION".to_vec()], clock::millis(within)).await;
        !matches!(reply, Err(Error::Connection { .. }))
    }

    /// Marks the server of this key as suspect, because it did not answer. A background task asks it until it answers.
    pub(crate) fn suspect(self: &Arc<Self>, keys: &Keys, why: Error, answers_within: Duration) {
        let Some(watch) = self.shared.health.suspect(why) else { return };
        let (client, keys): (Weak<Self>, _) = (Arc::downgrade(self), keys.clone());
        tokio::spawn(async move {
            let mut pause = FIRST_PAUSE;
            loop {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
                let Some(client) = client.upgrade() else { break };
                if client.shared.is_closed() || client.answers(&keys, answers_within).await {
                    break;
                }
            }
            drop(watch);
        });
    }

    /// Releases cached locks, and returns when all releases are done.
    pub(crate) async fn settled(&self) {
        let cached = self.shared.state().lines.take_idle(|_| true);
        cached.into_iter().for_each(|hold| forget(&self.shared, hold));
        let is_settled = || self.shared.state().nodes.iter().all(|node| node.core.is_settled());
        self.shared.settled.wait(None, is_settled).await;
    }

    /// Ends all calls, releases all holds, which are lost from now on, and returns when that is done.
    pub(crate) async fn close(&self) {
        let nodes = {
            let mut state = self.shared.state();
            state.is_closed = true;
            state.holds.drain().for_each(|(_, hold)| hold.record.status.lose(LossReason::Disconnected));
            state.nodes.len()
        };
        let close = |call| Input::Close { call, within: PATIENT };
        let closing: Vec<_> = (0..nodes).map(|node| self.begin(None, None, |_| node, close).1).collect();
        for mut answer in closing {
            answer.outcome().await;
        }
    }

    /// The node that serves these keys. If no node of a cluster can be reached, a request that waits looks again.
    async fn node_in_time(&self, keys: &Keys, deadline: Deadline) -> Result<usize, Error> {
        loop {
            let within = match deadline.left(Instant::now()) {
                Wait::No => Some(PATIENT),
                Wait::For(time) => Some(time),
                Wait::Forever => None,
            };
            match self.node_of(keys, within).await {
                Err(Error::Connection { .. })
                    if deadline.left(Instant::now()) != Wait::No && !self.shared.is_closed() =>
                {
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
                found => return found,
            }
        }
    }

    /// The node that serves these keys.
    async fn node_of(&self, keys: &Keys, within: Option<Millis>) -> Result<usize, Error> {
        let place = self.shared.servers.place_of(keys.first());
        let place = match within {
            None => place.await,
            Some(within) => match timeout(Duration::from_millis(within), place).await {
                Ok(place) => place,
                Err(_late) => Err(Failure { server: "cluster".to_owned(), error: late() }),
            },
        };
        let place = place.map_err(|failure| unreachable(keys, failure))?;
        Ok(self.shared.node(&mut self.shared.state(), &place))
    }

    fn begin(
        &self,
        number: Option<Id>,
        hold: Option<HoldRecord>,
        node: impl FnOnce(&Holds) -> usize,
        input: impl FnOnce(Id) -> Input,
    ) -> (Id, Answer) {
        let (answer, ended) = oneshot::channel();
        let mut state = self.shared.state();
        let call = number.unwrap_or_else(|| state.number());
        let node = node(&state.holds);
        state.calls.insert(call, Call { node, answer, hold });
        self.shared.step(&mut state, node, input(call));
        drop(state);
        driver::drive(&self.shared);
        (call, Answer { shared: self.shared.clone(), call, ended, is_here: false })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        for at in 0..state.nodes.len() {
            let call = state.number();
            self.shared.step(&mut state, at, Input::Close { call, within: PATIENT });
        }
        drop(state);
        driver::drive(&self.shared);
        driver::wait_for_releases(&self.shared);
    }
}

impl Answer {
    /// Waits for the outcome. May be called once.
    pub(crate) async fn outcome(&mut self) -> CallResult {
        let ended = (&mut self.ended).await;
        self.is_here = true;
        ended.unwrap_or_else(|_| CallResult { outcome: Outcome::Closed, server: String::new(), failure: None })
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.is_here {
            forget(&self.shared, self.call);
        }
    }
}

/// Abandons this call or hold: it is withdrawn or released.
pub(crate) fn forget(shared: &Arc<Shared>, call: Id) {
    let mut state = shared.state();
    let of_call = state.calls.remove(&call).map(|it| it.node);
    let of_hold = state.holds.remove(&call).map(|it| it.node);
    let Some(node) = of_call.or(of_hold) else { return };
    shared.step(&mut state, node, Input::Drop { call });
    drop(state);
    driver::drive(shared);
}

/// The error that says how a call ended.
pub(crate) fn failed(keys: &Keys, owner: Option<&Owner>, ended: CallResult) -> Error {
    let CallResult { outcome, server, failure } = ended;
    let (keys, owner) = (keys.clone(), owner.cloned().unwrap_or_else(|| Owner::from(Vec::new())));
    match outcome {
        Outcome::Refused(words) => refused_in_words(&server, &keys, words),
        Outcome::Lost(why) => Error::Lost { keys, owner, why },
        Outcome::NotHeld => Error::NotHeld { keys, owner },
        Outcome::Closed => Error::Connection { server, keys, source: closed() },
        _ => Error::Connection { server, keys, source: failure.unwrap_or_else(late) },
    }
}

pub(crate) fn unreachable(keys: &Keys, Failure { server, error }: Failure) -> Error {
    crate::error::refused(&server, keys, error)
}
