//! A sorted list of what one lock has for each of its owners. Nearly all locks have one owner at a time.

use super::Owner;

/// Entries by owner, sorted by owner and entry. An insertion or removal moves all later entries. There are about as
/// many entries as the lock has holders, and `holdfast.max-holders` limits those.
#[derive(Debug)]
pub struct ByOwner<T>(Vec<(Owner, T)>);

impl<T> Default for ByOwner<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Copy + Ord> ByOwner<T> {
    /// Adds an entry of an owner, unless it is there already.
    pub fn insert(&mut self, owner: Owner, entry: T) {
        if self.0.is_empty() {
            self.0.reserve_exact(1);
        }
        if let Err(place) = self.place(&owner, entry) {
            self.0.insert(place, (owner, entry));
        }
    }

    /// Removes an entry of an owner.
    pub fn remove(&mut self, owner: &[u8], entry: T) {
        if let Ok(place) = self.place(owner, entry) {
            self.0.remove(place);
        }
    }

    fn place(&self, owner: &[u8], entry: T) -> Result<usize, usize> {
        self.0.binary_search_by(|(of, it)| (**of).cmp(owner).then_with(|| it.cmp(&entry)))
    }

    /// The entries of an owner.
    pub fn of(&self, owner: &[u8]) -> impl Iterator<Item = T> {
        let first = self.0.partition_point(|(of, _)| **of < *owner);
        let rest = self.0.get(first..).unwrap_or_default();
        rest.iter().take_while(move |(of, _)| **of == *owner).map(|(_, entry)| *entry)
    }

    /// All entries. To remove them without moving any, begin with the last.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = T> + ExactSizeIterator {
        self.0.iter().map(|(_, entry)| *entry)
    }

    /// Whether the list has no entries.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::ByOwner;
    use crate::lock::Owner;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn list_equals_set_of_pairs(steps in prop::collection::vec((any::<bool>(), 0_u8..4, 0_u64..8), 0..100)) {
            let (mut list, mut set) = (ByOwner::default(), BTreeSet::new());
            for (adds, owner, entry) in steps {
                let owner: Owner = Owner::from([b'o', owner]);
                if adds {
                    list.insert(owner.clone(), entry);
                    set.insert((owner, entry));
                } else {
                    list.remove(&owner, entry);
                    set.remove(&(owner, entry));
                }
                prop_assert_eq!(list.is_empty(), set.is_empty());
                prop_assert!(list.all().eq(set.iter().map(|(_, entry)| *entry)));
                for owner in 0..4 {
                    let owner = [b'o', owner];
                    let of_owner = set.iter().filter(|(of, _)| **of == owner);
                    prop_assert!(list.of(&owner).eq(of_owner.map(|(_, entry)| *entry)));
                }
            }
        }
    }
}
