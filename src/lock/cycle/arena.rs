//! Tables whose rows refer to each other by number. A number from one table can't be used for another.
//!
//! Everything here grows in small parts, so that no step of a search is held up by it.

use std::marker::PhantomData;

/// The number of a row in some table.
pub trait Index: Copy {
    /// The number of the row at this position.
    fn new(position: usize) -> Self;

    /// Its position.
    fn position(self) -> usize;
}

/// A row number with a type of its own. Four bytes suffice, and there are many of them.
macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u32);

        impl $crate::lock::cycle::arena::Index for $name {
            fn new(position: usize) -> Self {
                Self(u32::try_from(position).unwrap_or(u32::MAX))
            }

            fn position(self) -> usize {
                self.0 as usize
            }
        }
    };
}
pub(crate) use index;

/// The number of the row after this one.
pub fn next<I: Index>(index: I) -> I {
    I::new(index.position().saturating_add(1))
}

/// How many rows are stored together. A table never moves its rows: with a hundred thousand, that would take too
/// long.
const TOGETHER: usize = 1024;

/// A table that only grows.
#[derive(Debug)]
pub struct Arena<I, T> {
    rows: Vec<Vec<T>>,
    len: usize,
    index: PhantomData<I>,
}

impl<I, T> Default for Arena<I, T> {
    fn default() -> Self {
        Self { rows: Vec::new(), len: 0, index: PhantomData }
    }
}

impl<I: Index, T> Arena<I, T> {
    /// Adds a row. Returns its number.
    pub fn push(&mut self, row: T) -> I {
        let index = self.end();
        match self.rows.last_mut() {
            Some(last) if last.len() < TOGETHER => last.push(row),
            _ => self.rows.push(vec![row]),
        }
        self.len = self.len.saturating_add(1);
        index
    }

    /// Drops the last rows and frees their memory. Returns whether there were any.
    pub fn free_part(&mut self) -> bool {
        self.rows.pop().is_some()
    }

    /// The number that the next row will have.
    pub fn end(&self) -> I {
        I::new(self.len)
    }

    /// A row.
    pub fn get(&self, index: I) -> Option<&T> {
        self.rows.get(index.position() / TOGETHER)?.get(index.position() % TOGETHER)
    }

    /// A row, to be changed.
    pub fn get_mut(&mut self, index: I) -> Option<&mut T> {
        self.rows.get_mut(index.position() / TOGETHER)?.get_mut(index.position() % TOGETHER)
    }
}

/// How many notes are stored together: few, as most searches make few.
const NOTES: usize = 64;

/// Notes on some of the rows of a table.
#[derive(Debug)]
pub struct Notes<I, T> {
    notes: Vec<Vec<Option<T>>>,
    index: PhantomData<I>,
}

impl<I, T> Default for Notes<I, T> {
    fn default() -> Self {
        Self { notes: Vec::new(), index: PhantomData }
    }
}

impl<I: Index, T: Copy> Notes<I, T> {
    /// The note on a row.
    pub fn get(&self, index: I) -> Option<T> {
        *self.notes.get(index.position() / NOTES)?.get(index.position() % NOTES)?
    }

    /// Makes a note on a row.
    pub fn insert(&mut self, index: I, note: T) {
        let part = index.position() / NOTES;
        if self.notes.len() <= part {
            self.notes.resize_with(part.saturating_add(1), Vec::new);
        }
        let Some(part) = self.notes.get_mut(part) else { return };
        if part.is_empty() {
            part.resize(NOTES, None);
        }
        if let Some(row) = part.get_mut(index.position() % NOTES) {
            *row = Some(note);
        }
    }
}
