//! One acquisition at all servers: the votes, and whether they make a majority.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use holdfast_core::{Id, Terms};
use tokio::task::JoinSet;

use super::vote::{Common, DRIFT, Vote};
use crate::changes::Changes;
use crate::client::Client;
use crate::clock;
use crate::error::{Error, LossReason};
use crate::locks::Locks;
use crate::names::{Keys, Owner};
use crate::terms::Deadline;

/// Numbers of acquisitions at several servers have this bit, so that they differ from all others.
const SEVERAL: Id = 1 << 63;
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(SEVERAL);

/// A lock that is held on a majority of servers, until this is dropped or fewer than a majority have it.
///
/// Dropping it releases it everywhere in the background, without waiting.
// The value exists from the request on, before the lock is granted.
#[must_use = "a lock is released when its guard is dropped"]
pub struct RedGuard {
    common: Arc<Common>,
    /// In the order that all clients share, each with its vote once the lock was requested there.
    servers: Vec<(Arc<Client>, Option<Arc<Vote>>)>,
    /// The votes that are being cast, including those after a majority has granted.
    casting: JoinSet<()>,
    /// Once lost, always lost.
    lost: OnceLock<LossReason>,
}

impl RedGuard {
    /// The fencing token: greater than that of every earlier holder of this lock, on any majority.
    pub fn fence(&self) -> u64 {
        self.common.fence.get().copied().unwrap_or_default()
    }

    /// The keys that are held.
    pub fn keys(&self) -> &Keys {
        &self.common.keys
    }

    /// The owner, the same at all servers: new for each acquisition.
    pub fn owner(&self) -> &Owner {
        &self.common.owner
    }

    /// Until when no other client can hold the lock, even if connections break, provided that the servers keep their
    /// grants. None: the lock is lost. With a renewed lease, this time advances.
    pub fn valid_until(&self) -> Option<Instant> {
        match self.why_lost() {
            Some(_) => None,
            None => self.majority_until(),
        }
    }

    /// Whether it is still held, as far as this process can know without asking: an error is certain.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`].
    pub fn check(&self) -> Result<(), Error> {
        match self.why_lost() {
            Some(why) => Err(self.loss(why)),
            None => Ok(()),
        }
    }

    /// Waits until it is lost.
    pub async fn lost(&self) -> LossReason {
        loop {
            if let Some(why) = self.why_lost() {
                return why;
            }
            self.common.changes.wait(self.majority_until(), || self.why_lost().is_some()).await;
        }
    }

    /// Runs this future while the lock is held: it is dropped at its next await when the lock is lost.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the future did not run to its end.
    pub async fn while_held<F: Future>(&self, future: F) -> Result<F::Output, Error> {
        tokio::select! {
            // A lock that is lost already does not start the future.
            biased;
            why = self.lost() => Err(self.loss(why)),
            output = future => Ok(output),
        }
    }

    /// Restarts the lease, with this length, at a majority at least. A hold that the servers renew is renewed with
    /// this length from now on.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], [`Error::NotHeld`] or [`Error::Connection`] if there was no majority for it: then the old lease
    /// continues.
    pub async fn renew(&self, lease: Duration) -> Result<(), Error> {
        self.check()?;
        if lease <= DRIFT {
            let message = format!(
                "{}: lease must be longer than {DRIFT:?}, the tolerance for clocks, got {lease:?}",
                self.keys()
            );
            return Err(Error::Invalid { message });
        }
        let mut renewing = JoinSet::new();
        for vote in self.votes().filter(|vote| vote.counts_until().is_some()) {
            let vote = vote.clone();
            renewing.spawn(async move { vote.renew(clock::millis(lease)).await });
        }
        let (renewed, failure) = counted(renewing).await;
        self.check()?;
        if renewed >= self.majority() { Ok(()) } else { Err(failure.unwrap_or_else(|| self.not_held())) }
    }

    /// Releases it everywhere; in the background at servers that do not answer.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if it was lost before; [`Error::NotHeld`] if a majority does not have it and does not say
    /// why; [`Error::Connection`] if too few answered to know.
    pub async fn release(self) -> Result<(), Error> {
        self.check()?;
        // Suspect servers are asked only if the result depends on them.
        let is_suspect = |client: &Client| client.shared().health.suspected().is_some();
        let (mut held, mut failure) = (0, None);
        for suspect in [false, true] {
            let mut releasing = JoinSet::new();
            for (client, vote) in &self.servers {
                let granted = vote.clone().filter(|vote| vote.granted().is_some() && is_suspect(client) == suspect);
                granted.into_iter().for_each(|vote| drop(releasing.spawn(async move { vote.release().await })));
            }
            let (released, failed) = counted(releasing).await;
            (held, failure) = (held + released, failed.or(failure));
            if held >= self.majority() {
                return Ok(());
            }
        }
        Err(match self.reported_loss() {
            Some(why) => self.loss(why),
            None => failure.unwrap_or_else(|| self.not_held()),
        })
    }

    fn why_lost(&self) -> Option<LossReason> {
        if let Some(why) = self.lost.get() {
            return Some(*why);
        }
        if self.majority_until().is_some_and(|end| Instant::now() < end) {
            return None;
        }
        let by_the_clock = if self.common.terms.watchdog { LossReason::Disconnected } else { LossReason::Expired };
        Some(*self.lost.get_or_init(|| self.reported_loss().unwrap_or(by_the_clock)))
    }

    /// The loss that a server reported.
    fn reported_loss(&self) -> Option<LossReason> {
        self.votes().filter_map(|vote| vote.why_lost()).last()
    }

    /// Until when a majority certainly has it; none if there is no majority.
    fn majority_until(&self) -> Option<Instant> {
        self.majority_of(self.votes())
    }

    fn loss(&self, why: LossReason) -> Error {
        Error::Lost { keys: self.keys().clone(), owner: self.owner().clone(), why }
    }

    fn not_held(&self) -> Error {
        Error::NotHeld { keys: self.keys().clone(), owner: self.owner().clone() }
    }
}

/// The acquisition, until it is granted.
impl RedGuard {
    pub(crate) fn new(servers: &[Locks], keys: Keys, terms: Terms, server_timeout: Duration) -> Self {
        // There is at least one server.
        let by = servers.first().map_or_else(Vec::new, Locks::by);
        let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
        let owner = Owner::from([by.clone(), number.to_string().into_bytes()].concat());
        let (changes, fence) = (Changes::default(), OnceLock::new());
        let common = Arc::new(Common { keys, by, number, owner, terms, server_timeout, changes, fence });
        let servers = servers.iter().map(|locks| (locks.client().clone(), None)).collect();
        Self { common, servers, casting: JoinSet::new(), lost: OnceLock::new() }
    }

    fn majority(&self) -> usize {
        self.servers.len() / 2 + 1
    }

    /// Requests the lock from this server, unless that was done or the server is suspect.
    pub(crate) fn ask(&mut self, server: usize, deadline: Deadline) -> bool {
        let Some((client, vote @ None)) = self.servers.get_mut(server) else { return false };
        if client.shared().health.suspected().is_some() {
            return false;
        }
        let cast = Arc::new(Vote::new(client.clone(), self.common.clone(), deadline));
        *vote = Some(cast.clone());
        self.casting.spawn(async move { cast.cast().await });
        true
    }

    /// Requests it from all other servers, at the same time.
    pub(crate) fn ask_others(&mut self, deadline: Deadline) {
        for server in 0..self.servers.len() {
            self.ask(server, deadline);
        }
    }

    /// Returns when this server has granted it, or will not grant it any more.
    pub(crate) async fn settled(&self, server: usize) {
        let Some(vote) = self.vote(server) else { return };
        let settled = || vote.failed() || vote.granted().is_some();
        self.common.changes.wait(None, settled).await;
    }

    /// Returns when a majority has granted it, or can't any more. Every vote ends within its own time limit, even
    /// without a reply.
    pub(crate) async fn majority_granted(&self) {
        let open = || self.votes().filter(|vote| !vote.failed()).count() >= self.majority();
        let decided = || self.granted() >= self.majority() || !open();
        self.common.changes.wait(None, decided).await;
    }

    /// Makes the greatest token of the majority the fence; false: there is no majority.
    pub(crate) fn make_fence_known(&self) -> bool {
        if self.granted() < self.majority() {
            return false;
        }
        let greatest = self.votes().filter_map(|vote| vote.granted()).max().unwrap_or_default();
        // Votes wait for it, and do not set it.
        let _ = self.common.fence.set(greatest);
        self.common.changes.notify();
        true
    }

    /// Returns when a majority has confirmed the fence, or can't any more; and whether the lock is valid.
    pub(crate) async fn majority_confirmed(&self) -> bool {
        // Each vote has its own time limit. Votes that join later don't extend this wait.
        let end = Instant::now() + self.common.server_timeout * 2;
        let open = || self.votes().filter(|vote| !vote.failed()).count() >= self.majority();
        let first = || self.majority_of(self.votes().filter(|vote| vote.counts_at_first()));
        self.common.changes.wait(Some(end), || first().is_some() || !open()).await;
        first().is_some_and(|end| Instant::now() < end)
    }

    /// How many have granted it.
    pub(crate) fn granted(&self) -> usize {
        self.votes().filter(|vote| vote.granted().is_some()).count()
    }

    fn majority_of<'a>(&self, votes: impl Iterator<Item = &'a Arc<Vote>>) -> Option<Instant> {
        let mut ends: Vec<Instant> = votes.filter_map(|vote| vote.counts_until()).collect();
        // The latest ends first: at the one with this index, exactly a majority is still certain.
        ends.sort_unstable_by(|one, other| other.cmp(one));
        ends.get(self.majority() - 1).copied()
    }

    /// Why this server failed, if not because other clients have the lock.
    pub(crate) fn error(&self, server: usize) -> Option<Error> {
        self.vote(server)?.error()
    }

    /// Whether the time was over in this server's queue.
    pub(crate) fn has_timed_out(&self, server: usize) -> bool {
        self.vote(server).is_some_and(Vote::has_timed_out)
    }

    /// The first server that has not granted it.
    pub(crate) fn first_ungranted(&self) -> Option<usize> {
        (0..self.servers.len()).find(|server| self.vote(*server).is_some_and(Vote::is_ungranted))
    }

    /// Whether so many servers failed or do not answer that the others are no majority.
    pub(crate) fn no_majority_left(&self) -> bool {
        self.reachable() < self.majority()
    }

    /// The error for too few servers; none if all of them answer again by now. A server's refusal is returned as an
    /// error.
    pub(crate) fn no_majority(&self) -> Result<Option<Error>, Error> {
        let failures = self.servers.iter().filter_map(|(client, vote)| match vote {
            Some(vote) => vote.error(),
            None => client.shared().health.suspected(),
        });
        let failures: Vec<Error> = failures.collect();
        if let Some(refusal) = failures.iter().find(|error| !matches!(error, Error::Connection { .. })) {
            return Err(refusal.clone());
        }
        let (keys, answer, majority) = (self.keys().clone(), self.reachable(), self.majority());
        let source = failures.into_iter().next().map(Box::new);
        Ok(source.map(|source| Error::NoMajority { keys, answer, majority, source }))
    }

    fn reachable(&self) -> usize {
        let reachable = |(client, vote): &&(Arc<Client>, Option<Arc<Vote>>)| match vote {
            Some(vote) => vote.error().is_none(),
            None => client.shared().health.suspected().is_none(),
        };
        self.servers.iter().filter(reachable).count()
    }

    fn votes(&self) -> impl Iterator<Item = &Arc<Vote>> {
        self.servers.iter().filter_map(|(_, vote)| vote.as_ref())
    }

    fn vote(&self, server: usize) -> Option<&Vote> {
        self.servers.get(server)?.1.as_deref()
    }
}

impl Drop for RedGuard {
    fn drop(&mut self) {
        self.casting.abort_all();
        self.votes().for_each(|vote| vote.release_in_background());
    }
}

impl std::fmt::Debug for RedGuard {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} held by {} under {}", self.keys(), self.owner(), self.fence())
    }
}

/// Waits for all votes. Returns how many succeeded, and the error of one that failed.
async fn counted(mut votes: JoinSet<Result<bool, Error>>) -> (usize, Option<Error>) {
    let (mut done, mut failure) = (0, None);
    while let Some(outcome) = votes.join_next().await {
        match outcome {
            Ok(Ok(true)) => done += 1,
            Ok(Err(error)) => failure = Some(error),
            Ok(Ok(false)) | Err(_) => {}
        }
    }
    (done, failure)
}
