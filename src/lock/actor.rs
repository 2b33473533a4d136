//! Actors: those who act under one owner or several.
//!
//! A client whose acquisitions have an owner each (`vm7:312:thread4##18`) says by the part before the first `##` that
//! one thread makes them all. Only the search for deadlocks goes by it.

use super::Owner;

/// Who acts: an owner up to its first `##`, or the whole of it if there is none.
pub type Actor = Owner;

/// The actor behind an owner.
pub fn name(owner: &[u8]) -> &[u8] {
    // Searched eight bytes at a time; most owners have none.
    if !owner.contains(&b'#') {
        return owner;
    }
    let end = owner.windows(2).position(|pair| pair == b"##");
    end.and_then(|end| owner.get(..end)).unwrap_or(owner)
}

/// The same, to be kept.
pub fn of(owner: &Owner) -> Actor {
    if is_one_of_several(owner) { name(owner).into() } else { owner.clone() }
}

/// Whether an owner is not called as its actor is.
pub fn is_one_of_several(owner: &[u8]) -> bool {
    name(owner).len() < owner.len()
}
