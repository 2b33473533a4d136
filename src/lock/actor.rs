//! Actors: the threads or tasks that act under one owner or several.
//!
//! A client may use a new owner for each acquisition (`vm7:312:thread4##18`). The part before the first `##` then names
//! the thread that makes all of them. Only the search for deadlocks uses actors.

use super::Owner;

/// The thread or task behind an owner: the owner up to its first `##`, or the whole owner if it has none.
pub type Actor = Owner;

/// The name of the actor behind an owner.
pub fn name(owner: &[u8]) -> &[u8] {
    // `contains` searches eight bytes at a time, and most owners have no `#`.
    if !owner.contains(&b'#') {
        return owner;
    }
    let end = owner.windows(2).position(|pair| pair == b"##");
    end.and_then(|end| owner.get(..end)).unwrap_or(owner)
}

/// The actor behind an owner, as a shared string that a table can store.
pub fn of(owner: &Owner) -> Actor {
    if has_suffix(owner) { name(owner).into() } else { owner.clone() }
}

/// Whether an owner has a `##`, so that its actor has a shorter name.
pub fn has_suffix(owner: &[u8]) -> bool {
    name(owner).len() < owner.len()
}
