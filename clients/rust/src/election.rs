//! Leader election: the value in a candidate's owner, and observers of the leader.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::Error;
use crate::info::Info;
use crate::locks::{LONGEST_NAME, Lock, Locks};

/// How long a leader that was killed blocks the next one.
const LEASE: Duration = Duration::from_secs(5);
/// The shortest interval of an observer, and one that its clock can still add.
const SHORTEST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(u32::MAX as u64);
/// Between the value and the random part of a candidate's owner.
const VALUE_ENDS: u8 = b'#';

/// The leader of an election, as its server sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leader {
    /// The value of its candidacy, such as its address; empty if it named none.
    pub value: String,
    /// The term: the fencing token of the leader's hold, if it is known.
    pub fence: Option<u64>,
}

impl Leader {
    /// The first holder is the leader: an election is a mutex.
    fn of(info: &Info) -> Option<Self> {
        let holder = info.holders.first()?;
        let owner = holder.owner.as_bytes();
        let value = match owner.iter().rposition(|byte| *byte == VALUE_ENDS) {
            Some(end) => String::from_utf8_lossy(owner.get(..end).unwrap_or_default()).into_owned(),
            None => String::new(),
        };
        Some(Self { value: value.replace("%23", "#").replace("%25", "%"), fence: holder.token })
    }
}

impl Locks {
    /// A candidate of an election, to be [acquired](Lock::acquire): it leads for as long as its [`Guard`](crate::Guard)
    /// is held, the fence is the term, and dropping the guard hands over. [`leader`](Self::leader) returns the value,
    /// such as this process's address, to other clients.
    ///
    /// A leader that is killed or paused is replaced within its lease: 5 s, unless [`Lock::watched`] says otherwise. With
    /// [`Lock::ephemeral`], one that is killed is replaced at once.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the value is longer than 400 bytes, where `%` and `#` count as three.
    pub fn elect(&self, name: impl AsRef<[u8]>, value: &str) -> Result<Lock, Error> {
        let value = prefix(value);
        if value.len() > LONGEST_NAME + "#".len() {
            let message = format!("a candidate's value has at most {LONGEST_NAME} bytes, got {}", value.len() - 1);
            return Err(Error::Invalid { message });
        }
        Ok(self.clone().with_owners(&value).lock(name).watched(LEASE))
    }

    /// The leader of an election, if there is one.
    ///
    /// # Errors
    ///
    /// As for [`info`](Self::info).
    pub async fn leader(&self, name: impl AsRef<[u8]>) -> Result<Option<Leader>, Error> {
        Ok(self.info(name).await?.as_ref().and_then(Leader::of))
    }

    /// Follows the leader of an election: asks the server each time this interval has passed, 20 ms at least.
    pub fn observe(&self, name: impl AsRef<[u8]>, every: Duration) -> Observer {
        Observer { locks: self.clone(), name: name.as_ref().to_vec(), every, asks_at: Instant::now(), last: None }
    }
}

/// The beginning of a candidate's owner. All clients read the value from it.
fn prefix(value: &str) -> String {
    match value {
        "" => String::new(),
        value => format!("{}#", value.replace('%', "%25").replace('#', "%23")),
    }
}

/// Follows the leader of an election: [`Locks::observe`].
pub struct Observer {
    locks: Locks,
    name: Vec<u8>,
    every: Duration,
    asks_at: Instant,
    last: Option<Option<Leader>>,
}

impl Observer {
    /// Returns the current leader at the first call. Each later call waits until it observes another leader, or none.
    ///
    /// # Errors
    ///
    /// As for [`Locks::info`]. The next call asks again.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, no change is lost, and the next call asks the server at the time at which this one
    /// would.
    pub async fn next(&mut self) -> Result<Option<Leader>, Error> {
        loop {
            tokio::time::sleep_until(self.asks_at).await;
            let leader = self.locks.leader(&self.name).await;
            self.asks_at = Instant::now() + self.every.clamp(SHORTEST, LONGEST);
            let leader = leader?;
            if self.last.as_ref() != Some(&leader) {
                self.last = Some(leader.clone());
                return Ok(leader);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::info::Holder;

    fn led_by(owner: &str) -> Info {
        let owner = owner.as_bytes().to_vec().into();
        let holder = Holder { owner, holds: 1, token: Some(7), left: None, contention: false };
        Info { limit: Some(1), fence: Some(7), holders: vec![holder], waiters: 0 }
    }

    #[test]
    fn leader_has_value_of_its_candidacy() {
        for value in ["", "host-1", "a:1#%", "%23", "%2523", "##"] {
            let owner = format!("{}0123:1", prefix(value));
            assert!(!owner.contains("##"), "no actor: {owner}");
            let leader = Leader::of(&led_by(&owner)).map(|leader| (leader.value, leader.fence));
            assert_eq!(leader, Some((value.to_owned(), Some(7))));
        }
    }

    #[test]
    fn free_lock_has_no_leader() {
        assert_eq!(Leader::of(&Info { holders: Vec::new(), ..led_by("a") }), None);
    }
}
