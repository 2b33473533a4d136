//! Locks at several servers, slots or databases at once: all or none.

use std::task::Poll;
use std::time::{Duration, Instant};

use holdfast_core::{Limit, Wait};

use crate::error::{Error, LossReason};
use crate::guard::{Guard, unless};
use crate::locks::Lock;
use crate::order::Position;
use crate::terms::{Deadline, at_most};

/// Mutexes at different servers, slots or databases, all or none. Those of one server and slot are a group, which is
/// acquired in one step. The groups are acquired one after the other, in an order that all clients share, so that their
/// waits form no cycle. The order in which a program names the locks does not matter.
///
/// The options of each lock apply to its hold. The wait is set here.
#[derive(Clone)]
pub struct MultiLock {
    locks: Vec<Lock>,
    wait: Wait,
}

impl MultiLock {
    /// All of these locks.
    pub fn new(locks: impl IntoIterator<Item = Lock>) -> Self {
        Self { locks: locks.into_iter().collect(), wait: Wait::Forever }
    }

    /// Waits for at most this long in all, in the servers' queues.
    pub fn wait(mut self, time: Duration) -> Self {
        self.wait = at_most(time);
        self
    }

    /// Waits without a limit.
    pub fn wait_forever(mut self) -> Self {
        self.wait = Wait::Forever;
        self
    }

    /// Acquires all of them: none if one was not granted in the time that [`wait`](Self::wait) allows. May be dropped at
    /// any point: then all are withdrawn.
    ///
    /// # Errors
    ///
    /// A server's refusal, [`Error::Connection`], or, if one was lost while the client waited for another, [`Error::Lost`]
    /// ([`Error::NotHeld`] where the server does not say why).
    pub async fn acquire(&self) -> Result<Option<MultiGuard>, Error> {
        self.acquire_by(Deadline::of(self.wait, Instant::now())).await
    }

    /// Acquires all of them without waiting: none if one was not granted at once.
    ///
    /// # Errors
    ///
    /// As for [`acquire`](Self::acquire).
    pub async fn try_acquire(&self) -> Result<Option<MultiGuard>, Error> {
        self.acquire_by(Deadline::of(Wait::No, Instant::now())).await
    }

    async fn acquire_by(&self, deadline: Deadline) -> Result<Option<MultiGuard>, Error> {
        let groups = groups(&self.locks)?;
        let mut held = MultiGuard { parts: Vec::new() };
        for (_, group) in &groups {
            let asking = group.acquire_by(deadline);
            let Some(guard) = held.while_held(asking).await?? else { return Ok(None) };
            held.parts.push(guard);
        }
        held.begin_leases().await?;
        Ok(Some(held))
    }
}

/// The groups of locks that are each requested in one step, in order.
fn groups(locks: &[Lock]) -> Result<Vec<(Position, Lock)>, Error> {
    let mut keys = Vec::new();
    for lock in locks {
        check_options(lock)?;
        keys.extend(lock.each_key().collect::<Result<Vec<_>, _>>()?);
    }
    if keys.is_empty() {
        return Err(Error::Invalid {
            message: "a lock over several servers needs at least one key, got none".to_owned(),
        });
    }
    // Locks of one place stay in the order in which they were named.
    keys.sort_by(|(one, _), (other, _)| one.cmp(other));
    keys.chunk_by(|(one, _), (other, _)| one == other).map(joined).collect()
}

fn check_options(lock: &Lock) -> Result<(), Error> {
    let invalid = |message: &str| Err(Error::Invalid { message: format!("{}: {message}", lock.keys()) });
    lock.check()?;
    if lock.terms().limit != Limit::One {
        return invalid("a MultiLock locks mutexes only, without SHARED or LIMIT");
    }
    if lock.terms().kept {
        return invalid("a lock of a MultiLock can't be cached");
    }
    if lock.waits_for() != Wait::Forever {
        return invalid("set the wait on the MultiLock, not on one of its locks");
    }
    Ok(())
}

/// The locks of one place as one.
fn joined(locks: &[(Position, Lock)]) -> Result<(Position, Lock), Error> {
    let (position, first) = &locks[0];
    if let Some((_, lock)) = locks.iter().find(|(_, lock)| lock.terms() != first.terms()) {
        let message = "the locks of one server and slot are acquired by one command, so their terms must be the same";
        return Err(Error::Invalid { message: format!("{}: {message}", lock.keys()) });
    }
    let group = first.clone().with_keys(locks.iter().flat_map(|(_, lock)| lock.keys().iter()).collect());
    group.check()?;
    Ok((position.clone(), group))
}

/// Locks at several servers that are all held, until this is dropped or one of them is lost.
///
/// Dropping it releases them in the background, without waiting, the last first.
#[must_use = "locks are released when their guard is dropped"]
#[derive(Debug)]
pub struct MultiGuard {
    parts: Vec<Guard>,
}

impl MultiGuard {
    /// The parts at each server and slot, in their order. Each has a fence of its own, which counts for what that
    /// server's locks protect: the tokens of two servers can't be compared.
    pub fn parts(&self) -> &[Guard] {
        &self.parts
    }

    /// Whether all are still held, as for one.
    ///
    /// # Errors
    ///
    /// As for one; it names the first that is not held.
    pub async fn check(&self) -> Result<(), Error> {
        for part in &self.parts {
            part.check().await?;
        }
        Ok(())
    }

    /// The loss of the first part that is known to be lost.
    fn check_loss(&self) -> Result<(), Error> {
        self.parts.iter().try_for_each(|part| part.hold.check_loss())
    }

    /// Waits until one of them is lost.
    pub async fn lost(&self) -> LossReason {
        let mut all: Vec<_> = self.parts.iter().map(|part| Box::pin(part.lost())).collect();
        std::future::poll_fn(|context| {
            let lost = all.iter_mut().find_map(|lost| match lost.as_mut().poll(context) {
                Poll::Ready(why) => Some(why),
                Poll::Pending => None,
            });
            lost.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Runs this future while all are held: it is dropped at its next await when one is lost, and suspended while
    /// an outcome is unknown.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the future did not run to its end.
    pub async fn while_held<F: Future>(&self, future: F) -> Result<F::Output, Error> {
        tokio::select! {
            // A lock that is lost already does not start the future.
            biased;
            error = self.loss() => Err(error),
            output = unless(|| self.parts.iter().any(Guard::is_uncertain), future) => Ok(output),
        }
    }

    /// Restarts all leases, with this length.
    ///
    /// # Errors
    ///
    /// As for one: those before it have the new lease then, the others the old one.
    pub async fn renew(&self, lease: Duration) -> Result<(), Error> {
        for part in &self.parts {
            part.renew(lease).await?;
        }
        Ok(())
    }

    /// Releases all, the last first.
    ///
    /// # Errors
    ///
    /// The first error, as for one. The others are released all the same.
    pub async fn release(mut self) -> Result<(), Error> {
        let mut outcome = self.check_loss();
        while let Some(part) = self.parts.pop() {
            outcome = outcome.and(part.release().await);
        }
        outcome
    }

    /// Renews all parts before the last. The last part's grant may arrive before the event of an earlier part's loss,
    /// and fixed leases ran while the client waited for the later parts.
    async fn begin_leases(&self) -> Result<(), Error> {
        let Some((_last, before)) = self.parts.split_last() else { return Ok(()) };
        for part in before {
            part.restart_lease().await?;
        }
        self.check().await
    }

    async fn loss(&self) -> Error {
        loop {
            self.lost().await;
            if let Err(error) = self.check_loss() {
                return error;
            }
        }
    }
}

impl Drop for MultiGuard {
    fn drop(&mut self) {
        while self.parts.pop().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locks::Locks;
    use proptest::prelude::*;

    /// Where locks can be: two servers, one with two databases, and a cluster.
    const PLACES: [&str; 4] =
        ["redis://10.0.0.2:6379", "redis://10.0.0.2:6379/3", "redis://10.0.0.10:6379", "redis+cluster://b:1,a:1"];

    fn locks(names: &[(usize, u8)]) -> Vec<Lock> {
        let lock = |(place, key): &(usize, u8)| Locks::open(PLACES[*place]).unwrap().lock(format!("k{key}"));
        names.iter().map(lock).collect()
    }

    fn positions(names: &[(usize, u8)]) -> Vec<(Position, usize)> {
        groups(&locks(names)).unwrap().into_iter().map(|(place, group)| (place, group.keys().len())).collect()
    }

    /// Places and keys.
    type Names = Vec<(usize, u8)>;

    /// The same in two orders.
    fn several() -> impl Strategy<Value = (Names, Names)> {
        prop::collection::btree_set((0..PLACES.len(), 0u8..4), 1..10).prop_flat_map(|names| {
            let names: Vec<_> = names.into_iter().collect();
            (Just(names.clone()).prop_shuffle(), Just(names).prop_shuffle())
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Regardless of the order of naming, the groups and their order are the same; each place comes once.
        #[test]
        fn groups_are_independent_of_naming_order((one, other) in several()) {
            let positions = positions(&one);
            prop_assert!(positions.windows(2).all(|pair| pair[0].0 < pair[1].0));
            prop_assert_eq!(positions.iter().map(|(_, keys)| keys).sum::<usize>(), one.len());
            prop_assert_eq!(positions, self::positions(&other));
        }
    }

    #[test]
    fn invalid_options_are_refused() {
        let locks = Locks::open(PLACES[0]).unwrap();
        let refused = |several: &[Lock]| match groups(several) {
            Err(Error::Invalid { message }) => message,
            other => panic!("{:?}", other.map(|groups| groups.len())),
        };
        assert!(refused(&[]).contains("one key"));
        assert!(refused(&[locks.lock("a"), locks.lock("a")]).contains("named twice"));
        assert!(refused(&[locks.lock("a").shared()]).contains("mutexes only"));
        let second = Duration::from_secs(1);
        assert!(refused(&[locks.lock("a").wait(second)]).contains("MultiLock"));
        assert!(refused(&[locks.lock("a").keep(second)]).contains("be cached"));
        assert!(refused(&[locks.lock("a"), locks.lock("b").lease(second)]).contains("terms"));
        assert!(refused(&[locks.lock("a").lease(Duration::ZERO)]).contains("longer than 0"));
        let many = |count: usize| (0..count).map(|key| locks.lock(key.to_string())).collect::<Vec<_>>();
        assert_eq!(groups(&many(128)).unwrap().len(), 1);
        assert!(refused(&many(100_000)).contains("at most 128 keys at once, got 100000"));
        assert!(refused(&[locks.lock_all((0..129u8).map(|key| [key]))]).contains("got 129"));
        let other_database = Locks::open(PLACES[1]).unwrap();
        assert_eq!(groups(&[locks.lock("a"), other_database.lock("a").lease(second)]).unwrap().len(), 2);
    }
}
