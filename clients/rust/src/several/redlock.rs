//! RedLock: a lock on a majority of independent servers. `docs/redlock.md` says why it is correct, step by step.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use holdfast_core::{Terms, Wait};
use tokio::task::JoinSet;

use super::majority::RedGuard;
use super::vote::DRIFT;
use crate::clock;
use crate::error::Error;
use crate::locks::Locks;
use crate::names::Keys;
use crate::terms::{Deadline, at_most};

/// How long a server may take to answer: the default, and the maximum.
const SERVER_TIMEOUT: Duration = Duration::from_millis(500);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(3600);

/// A mutex on a majority of independent servers: it survives the loss of a minority of them.
///
/// A waiter queues at the first server of an order that all clients share. It asks the others when that one has
/// granted, or the time to wait is over there: the majority decides. A server that does not answer costs one short
/// timeout. Then a background task asks it until it answers.
#[derive(Clone)]
pub struct RedLock {
    /// In the order in which the program named them.
    servers: Vec<Locks>,
    keys: Keys,
    terms: Terms,
    wait: Wait,
    server_timeout: Duration,
}

/// How a round ended.
enum Round {
    Held(RedGuard),
    /// The time was over.
    NotGranted,
    /// Other clients share the votes. This server did not grant in time.
    Split(usize),
    /// Fewer than a majority of the servers answer.
    NoMajority(Error),
}

impl RedLock {
    /// A lock by its key, on these servers, each by `Locks` of its own.
    pub fn new(servers: impl IntoIterator<Item = Locks>, key: impl AsRef<[u8]>) -> Self {
        Self {
            servers: servers.into_iter().collect(),
            keys: Keys::from_iter([key]),
            terms: Terms { watchdog: true, ..Terms::default() },
            wait: Wait::Forever,
            server_timeout: SERVER_TIMEOUT,
        }
    }

    /// Waits for at most this long. Without it [`acquire`](Self::acquire) waits without a limit.
    pub fn wait(mut self, time: Duration) -> Self {
        self.wait = at_most(time);
        self
    }

    /// Waits without a limit.
    pub fn wait_forever(mut self) -> Self {
        self.wait = Wait::Forever;
        self
    }

    /// Holds for this long from the grant on, without renewal. Without this, the servers renew the lock for as long as the process
    /// runs, and it expires at most the servers' default lease later.
    pub fn lease(mut self, time: Duration) -> Self {
        (self.terms.lease, self.terms.watchdog) = (Some(clock::millis(time)), false);
        self
    }

    /// Renewed by the servers while the process runs; expires at most this much later.
    pub fn watched(mut self, lease: Duration) -> Self {
        (self.terms.lease, self.terms.watchdog) = (Some(clock::millis(lease)), true);
        self
    }

    /// How long a server may take to answer (500 ms; at most an hour). All clients that contend should have the same.
    pub fn server_timeout(mut self, time: Duration) -> Self {
        self.server_timeout = time.min(LONGEST_TIMEOUT);
        self
    }

    /// Acquires it: none if it was not granted in the time that [`wait`](Self::wait) allows. May be dropped at any point:
    /// then it is withdrawn everywhere.
    ///
    /// # Errors
    ///
    /// [`Error::NoMajority`] if fewer than a majority of the servers answer, or a server's refusal.
    pub async fn acquire(&self) -> Result<Option<RedGuard>, Error> {
        self.acquire_by(Deadline::of(self.wait, Instant::now())).await
    }

    /// Acquires it without waiting: none if it was not granted at once.
    ///
    /// # Errors
    ///
    /// As for [`acquire`](Self::acquire).
    pub async fn try_acquire(&self) -> Result<Option<RedGuard>, Error> {
        self.acquire_by(Deadline::of(Wait::No, Instant::now())).await
    }

    async fn acquire_by(&self, deadline: Deadline) -> Result<Option<RedGuard>, Error> {
        let servers = self.in_order()?;
        let mut first = 0;
        loop {
            match self.round(&servers, deadline, first).await? {
                Round::Held(guard) => return Ok(Some(guard)),
                Round::NotGranted => return Ok(None),
                Round::Split(next) => {
                    first = next;
                    if !pause(random_part_of(self.server_timeout), deadline).await {
                        return Ok(None);
                    }
                }
                Round::NoMajority(error) => {
                    first = 0;
                    if !wait_for_suspect(&servers, deadline).await {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Asks all servers once, beginning with that one.
    async fn round(&self, servers: &[Locks], deadline: Deadline, first: usize) -> Result<Round, Error> {
        let mut guard = RedGuard::new(servers, self.keys.clone(), self.terms.clone(), self.server_timeout);
        // Waits in the queue of one server. A server that does not answer is skipped.
        for server in std::iter::once(first).chain((0..servers.len()).filter(|server| *server != first)) {
            if guard.no_majority_left() {
                break;
            }
            if !guard.ask(server, deadline) {
                continue;
            }
            guard.settled(server).await;
            if let Some(error @ Error::Deadlock { .. }) = guard.error(server) {
                return Err(error);
            }
            // A request whose time is over in this queue still asks the others: one server is no majority.
            if guard.granted() > 0 || guard.has_timed_out(server) {
                break;
            }
        }
        if !guard.no_majority_left() {
            guard.ask_others(deadline.before(Instant::now() + self.server_timeout));
            guard.majority_granted().await;
            // The hold has to be confirmed under the fence before the program uses it.
            if guard.make_fence_known() && guard.majority_confirmed().await {
                return Ok(Round::Held(guard));
            }
        }
        if guard.no_majority_left()
            && let Some(error) = guard.no_majority()?
        {
            return Ok(Round::NoMajority(error));
        }
        match deadline.left(Instant::now()) {
            Wait::No => Ok(Round::NotGranted),
            Wait::For(_) | Wait::Forever => Ok(Round::Split(guard.first_ungranted().unwrap_or(0))),
        }
    }

    /// The servers in the order that all clients share.
    fn in_order(&self) -> Result<Vec<Locks>, Error> {
        let invalid = |message: &str| Err(Error::Invalid { message: format!("{}: {message}", self.keys) });
        if self.servers.is_empty() {
            return invalid("a RedLock needs at least one server");
        }
        if self.server_timeout.is_zero() {
            return invalid("server_timeout must be longer than 0");
        }
        if self.terms.lease.map(Duration::from_millis).is_some_and(|lease| lease <= DRIFT) {
            return invalid("lease must be longer than the tolerance for clocks: lease × 0.01 + 2 ms");
        }
        let place = |locks: &Locks| Ok((locks.client().shared().name.position(self.keys.first())?, locks.clone()));
        let mut servers = self.servers.iter().map(place).collect::<Result<Vec<_>, Error>>()?;
        servers.sort_by(|(one, _), (other, _)| one.cmp(other));
        if servers.windows(2).any(|pair| matches!(pair, [(one, _), (other, _)] if one.server == other.server)) {
            return invalid("the servers of a RedLock must be independent: one is named twice");
        }
        Ok(servers.into_iter().map(|(_, locks)| locks).collect())
    }
}

/// Returns when one of the suspect servers answers; false: the time is over first.
async fn wait_for_suspect(servers: &[Locks], deadline: Deadline) -> bool {
    let mut any = JoinSet::new();
    for locks in servers {
        let health = &locks.client().shared().health;
        if health.suspected().is_some() {
            any.spawn(health.wait_until_recovered());
        }
    }
    match deadline {
        Deadline::Past => false,
        Deadline::Never => any.join_next().await.is_some(),
        Deadline::At(end) => {
            let recovered = tokio::time::timeout_at(end.into(), any.join_next()).await;
            matches!(recovered, Ok(Some(_)))
        }
    }
}

/// Waits for this long; false: the deadline is earlier.
async fn pause(time: Duration, deadline: Deadline) -> bool {
    let end = Instant::now() + time;
    match deadline.before(end) {
        Deadline::At(earlier) if earlier < end => false,
        Deadline::Past => false,
        _ => {
            tokio::time::sleep_until(end.into()).await;
            true
        }
    }
}

/// A random part of this time, so that two clients that split the votes don't do so again.
fn random_part_of(time: Duration) -> Duration {
    // The standard library's seeds are the system's random numbers.
    let random = RandomState::new().build_hasher().finish();
    time.mul_f64(random as f64 / u64::MAX as f64)
}
