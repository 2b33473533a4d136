//! One acquisition at all servers: what each was asked, and what that makes in all.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use holdfast_core::{Id, Millis, Terms};
use tokio::task::JoinSet;

use super::vote::{Common, Returned, Vote};
use crate::changes::Changes;
use crate::client::Client;
use crate::error::{Error, Why};
use crate::locks::Locks;
use crate::names::{Keys, Owner};
use crate::terms::Deadline;

/// Numbers of acquisitions at several servers have this bit, so none of them has one already.
const SEVERAL: Id = 1 << 63;
static MADE: AtomicU64 = AtomicU64::new(SEVERAL);

/// One acquisition at all servers. Dropped, it is given back in the background, everywhere.
pub(crate) struct Ballot {
    common: Arc<Common>,
    /// In the order that all clients share, each with its vote once it was asked.
    servers: Vec<(Arc<Client>, Option<Arc<Vote>>)>,
    /// The votes that are being cast: also those that come when a majority has granted.
    casting: JoinSet<()>,
}

impl Ballot {
    pub(crate) fn new(servers: &[Locks], keys: Keys, terms: Terms, server_timeout: Duration) -> Self {
        // There is one server at least; its clients have names that nobody else has.
        let by = servers.first().map_or_else(Vec::new, Locks::by);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let owner = Owner::from([by.clone(), number.to_string().into_bytes()].concat());
        let (changes, fence) = (Changes::default(), OnceLock::new());
        let common = Arc::new(Common { keys, by, number, owner, terms, server_timeout, changes, fence });
        let servers = servers.iter().map(|locks| (locks.client().clone(), None)).collect();
        Self { common, servers, casting: JoinSet::new() }
    }

    pub(crate) fn keys(&self) -> &Keys {
        &self.common.keys
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.common.owner
    }

    pub(crate) fn changes(&self) -> &Changes {
        &self.common.changes
    }

    /// The greatest token of the majority.
    pub(crate) fn fence(&self) -> u64 {
        self.common.fence.get().copied().unwrap_or_default()
    }

    fn majority(&self) -> usize {
        self.servers.len() / 2 + 1
    }

    /// Asks this server, unless it was asked or does not answer.
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

    /// Asks all that were not asked, at once.
    pub(crate) fn ask_others(&mut self, deadline: Deadline) {
        for server in 0..self.servers.len() {
            self.ask(server, deadline);
        }
    }

    /// Returns when this server has granted it, or nothing more will come of it.
    pub(crate) async fn settled(&self, server: usize) {
        let Some(vote) = self.vote(server) else { return };
        let settled = || vote.failed() || vote.granted().is_some();
        while !settled() {
            self.common.changes.wait(None, settled).await;
        }
    }

    /// Returns when a majority has granted it, or can't. Every vote ends by itself: who did not get an answer is told so.
    pub(crate) async fn majority_granted(&self) {
        let open = || self.votes().filter(|vote| !vote.failed()).count() >= self.majority();
        let decided = || self.granted() >= self.majority() || !open();
        while !decided() {
            self.common.changes.wait(None, decided).await;
        }
    }

    /// Makes the greatest token of the majority known to it; false: there is none.
    pub(crate) fn make_fence_known(&self) -> bool {
        if self.granted() < self.majority() {
            return false;
        }
        let greatest = self.votes().filter_map(|vote| vote.granted()).max().unwrap_or_default();
        // Votes wait for it, and set it nowhere.
        let _ = self.common.fence.set(greatest);
        self.common.changes.tell();
        true
    }

    /// Returns when a majority has confirmed the fence, or can't any more; and whether the lock is valid.
    pub(crate) async fn majority_confirmed(&self) -> bool {
        // Each vote has its own time; those that join meanwhile don't prolong it for ever.
        let end = Instant::now() + self.common.server_timeout * 2;
        let open = || self.votes().filter(|vote| !vote.failed()).count() >= self.majority();
        let first = || self.majority_of(self.votes().filter(|vote| vote.counts_at_first()));
        self.until(end, || first().is_some() || !open()).await;
        first().is_some_and(|end| Instant::now() < end)
    }

    /// How many have granted it.
    pub(crate) fn granted(&self) -> usize {
        self.votes().filter(|vote| vote.granted().is_some()).count()
    }

    /// Until when a majority has it for certain; none if there is no majority.
    pub(crate) fn valid_until(&self) -> Option<Instant> {
        self.majority_of(self.votes())
    }

    fn majority_of<'a>(&self, votes: impl Iterator<Item = &'a Arc<Vote>>) -> Option<Instant> {
        let mut ends: Vec<Instant> = votes.filter_map(|vote| vote.counts_until()).collect();
        // With the earlier ones there are more than a majority.
        ends.sort_unstable_by(|one, other| other.cmp(one));
        ends.get(self.majority() - 1).copied()
    }

    /// Why it is no majority any more.
    pub(crate) fn why_lost(&self) -> Why {
        let by_the_clock = if self.common.terms.watchdog { Why::Disconnected } else { Why::Expired };
        self.told_lost().unwrap_or(by_the_clock)
    }

    /// What a server has told of its loss.
    fn told_lost(&self) -> Option<Why> {
        self.votes().filter_map(|vote| vote.why_lost()).last()
    }

    /// Why this server failed, if not because others have the lock.
    pub(crate) fn error(&self, server: usize) -> Option<Error> {
        self.vote(server)?.error()
    }

    /// Whether the time was over in this server's queue.
    pub(crate) fn not_granted(&self, server: usize) -> bool {
        self.vote(server).is_some_and(Vote::not_granted)
    }

    /// The first server that has let it wait in vain.
    pub(crate) fn first_in_vain(&self) -> Option<usize> {
        (0..self.servers.len()).find(|server| self.vote(*server).is_some_and(Vote::in_vain))
    }

    /// Whether so many servers failed or do not answer that the others are no majority.
    pub(crate) fn no_majority_left(&self) -> bool {
        self.reachable() < self.majority()
    }

    /// The error that says so, unless all answer again by now; or as an error, what a server refused with.
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

    /// Begins the lease anew, and waits until a majority has done so or can't.
    pub(crate) async fn renew(&self, lease: Millis) -> Result<(), Error> {
        let mut renewing = JoinSet::new();
        for vote in self.votes().filter(|vote| vote.counts_until().is_some()) {
            let vote = vote.clone();
            renewing.spawn(async move { vote.renew(lease).await });
        }
        let (mut renewed, mut failure) = (0, None);
        while let Some(outcome) = renewing.join_next().await {
            match outcome {
                Ok(Ok(true)) => renewed += 1,
                Ok(Err(error)) => failure = Some(error),
                Ok(Ok(false)) | Err(_) => {}
            }
        }
        match failure {
            _ if renewed >= self.majority() => Ok(()),
            Some(failure) => Err(failure),
            None => Err(Error::NotHeld { keys: self.keys().clone(), owner: self.owner().clone() }),
        }
    }

    /// Gives it back everywhere, and waits for the servers that answer. An error if it was not held by a majority.
    pub(crate) async fn release(&self) -> Result<(), Error> {
        let (suspect, well): (Vec<_>, Vec<_>) = self
            .servers
            .iter()
            .filter_map(|(client, vote)| Some((client, vote.clone()?)))
            .filter(|(_, vote)| vote.granted().is_some())
            .partition(|(client, _)| client.shared().health.suspected().is_some());
        let (mut held, mut failure) = (0, None);
        for servers in [well, suspect] {
            if held >= self.majority() {
                break;
            }
            let mut releasing = JoinSet::new();
            for (_, vote) in servers {
                releasing.spawn(async move { vote.release().await });
            }
            while let Some(returned) = releasing.join_next().await {
                match returned {
                    Ok(Returned::Held) => held += 1,
                    Ok(Returned::Unknown(error)) => failure = Some(error),
                    Ok(Returned::NotHeld) | Err(_) => {}
                }
            }
        }
        let (keys, owner) = (self.keys().clone(), self.owner().clone());
        match (failure, self.told_lost()) {
            _ if held >= self.majority() => Ok(()),
            (_, Some(why)) => Err(Error::Lost { keys, owner, why }),
            (Some(failure), None) => Err(failure),
            (None, None) => Err(Error::NotHeld { keys, owner }),
        }
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

    async fn until(&self, end: Instant, happened: impl Fn() -> bool) {
        while !happened() && Instant::now() < end {
            self.common.changes.wait(Some(end), &happened).await;
        }
    }
}

impl Drop for Ballot {
    fn drop(&mut self) {
        self.casting.abort_all();
        self.votes().for_each(|vote| vote.give_back());
    }
}
