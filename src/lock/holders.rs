//! The holders of a lock of any limit: hold counts, tokens, deadlines.

use super::{Deadline, Hold, Limit, Millis, Owner, Standing};
use foldhash::HashMap;
use std::collections::BTreeSet;

/// The holders of one lock, indexed by owner and by deadline.
///
/// A holder past its deadline stays until [`Holders::remove`] removes it, but no longer counts.
#[derive(Clone, Debug)]
pub struct Holders {
    limit: Limit,
    by_owner: HashMap<Owner, Hold>,
    by_deadline: BTreeSet<(Deadline, Owner)>,
}

impl Holders {
    /// A free lock.
    pub fn new(limit: Limit) -> Self {
        Self { limit, by_owner: HashMap::default(), by_deadline: BTreeSet::new() }
    }

    /// A lock held by all of these owners, each named once. Faster than inserting them one by one.
    pub fn collect(limit: Limit, holds: impl Iterator<Item = (Owner, Hold)>) -> Self {
        let most = holds.size_hint().1.unwrap_or(0);
        let mut by_owner = HashMap::with_capacity_and_hasher(most, Default::default());
        by_owner.extend(holds);
        let by_deadline = by_owner.iter().map(|(owner, hold)| (hold.deadline, owner.clone())).collect();
        Self { limit, by_owner, by_deadline }
    }

    /// The lock's limit.
    pub fn limit(&self) -> Limit {
        self.limit
    }

    /// Lowers the limit to `limit` if that is smaller: the smallest limit that a holder names applies.
    pub fn tighten(&mut self, limit: Limit) {
        self.limit = self.limit.min(limit);
    }

    /// How many holders there are, including those past their deadline.
    pub fn len(&self) -> usize {
        self.by_owner.len()
    }

    /// Whether there are no holders, not even one past its deadline.
    pub fn is_empty(&self) -> bool {
        self.by_owner.is_empty()
    }

    /// The hold of an owner, even if it is past its deadline.
    pub fn get(&self, owner: &[u8]) -> Option<&Hold> {
        self.by_owner.get(owner)
    }

    /// The lock as `owner` sees it.
    pub fn standing(&self, owner: &[u8], now: Millis) -> Standing {
        let own = self.by_owner.get(owner).copied().filter(|hold| !hold.deadline.has_passed(now));
        let holders = self.len().saturating_sub(self.expired(now).count());
        Standing { own, holders, limit: self.limit }
    }

    /// Sets the hold of an owner.
    pub fn insert(&mut self, owner: Owner, hold: Hold) {
        if let Some(old) = self.by_owner.insert(owner.clone(), hold) {
            self.by_deadline.remove(&(old.deadline, owner.clone()));
        }
        self.by_deadline.insert((hold.deadline, owner));
    }

    /// Removes an owner's hold, and returns it.
    pub fn remove(&mut self, owner: &[u8]) -> Option<Hold> {
        let (owner, hold) = self.by_owner.remove_entry(owner)?;
        self.by_deadline.remove(&(hold.deadline, owner));
        Some(hold)
    }

    /// The owners past their deadline, earliest deadline first.
    pub fn expired(&self, now: Millis) -> impl Iterator<Item = &Owner> {
        self.by_deadline.iter().take_while(move |(deadline, _)| deadline.has_passed(now)).map(|(_, owner)| owner)
    }

    /// The earliest deadline that has not passed.
    pub fn next_deadline(&self, now: Millis) -> Option<Deadline> {
        self.by_deadline.iter().map(|(deadline, _)| *deadline).find(|deadline| !deadline.has_passed(now))
    }

    /// The earliest deadline, passed or not.
    pub fn first_deadline(&self) -> Option<Deadline> {
        self.by_deadline.first().map(|(deadline, _)| *deadline)
    }

    /// The latest deadline; [`Deadline::Never`] if some holder has none.
    pub fn last_deadline(&self) -> Option<Deadline> {
        self.by_deadline.last().map(|(deadline, _)| *deadline)
    }

    /// The latest deadline of the holders that have one.
    pub fn last_end(&self) -> Option<Deadline> {
        match self.last_deadline()? {
            Deadline::Never => {
                let mut ends = self.by_deadline.range(..(Deadline::Never, Owner::from([])));
                ends.next_back().map(|(deadline, _)| *deadline)
            }
            end => Some(end),
        }
    }

    /// All holders, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (&Owner, &Hold)> {
        self.by_owner.iter()
    }
}
