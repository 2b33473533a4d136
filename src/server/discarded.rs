//! Frees large collections in slices. Freeing a hundred thousand entries at once would block the server for
//! milliseconds.

use super::slice::Slice;
use std::collections::VecDeque;
use std::fmt;

/// A collection to be freed: each call of `next` frees one element.
type Pieces = Box<dyn Iterator<Item = ()>>;

/// Collections whose elements have yet to be freed.
#[derive(Default)]
pub struct Discarded(VecDeque<Pieces>);

impl Discarded {
    /// Takes over a collection. Frees its first element now, and the others in [`Discarded::free`].
    pub fn add<I: IntoIterator<Item: 'static, IntoIter: 'static>>(&mut self, pieces: I) {
        let mut pieces = pieces.into_iter().map(drop);
        if pieces.next().is_some() {
            self.0.push_back(Box::new(pieces));
        }
    }

    /// Frees elements until the slice is over or none is left.
    pub fn free(&mut self, slice: &Slice) {
        while !slice.is_over() && self.free_one() {}
    }

    /// Frees one element. Returns whether there was one.
    fn free_one(&mut self) -> bool {
        while let Some(first) = self.0.front_mut() {
            if first.next().is_some() {
                return true;
            }
            self.0.pop_front();
        }
        false
    }

    /// Whether there is nothing to free.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Discarded {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        to.debug_tuple("Discarded").field(&self.0.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::Discarded;
    use std::rc::Rc;

    #[test]
    fn pieces_are_freed_one_by_one() {
        let (piece, mut discarded) = (Rc::new(()), Discarded::default());
        discarded.add(vec![piece.clone(); 3]);
        discarded.add(vec![piece.clone(); 2]);
        discarded.add(Vec::<Rc<()>>::new());
        assert_eq!(Rc::strong_count(&piece), 4, "the first piece of each is freed at once");
        let left: Vec<usize> = std::iter::from_fn(|| discarded.free_one().then(|| Rc::strong_count(&piece))).collect();
        assert_eq!((left, discarded.is_empty()), (vec![3, 2, 1], true));
    }
}
